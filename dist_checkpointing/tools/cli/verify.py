"""``dckpt verify``: whether a checkpoint can be loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.tools.cli.screen import (
    AsJson,
    CheckpointFolder,
    Trusted,
    counted,
    one_line,
    painted,
    print_json,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from dist_checkpointing.checkpoint.examination import Examination

EXIT_DAMAGED = 1


def verify(
    checkpoint: CheckpointFolder,
    *,
    trusted: Trusted = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing if all is well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read all of a checkpoint and name everything that is damaged.

    Looks whether the save was completed and whether the stored parts cover
    every tensor; reads every part, compares checksums where they were kept,
    and reads sharded objects and common state.

    Exit code: 0 if all is well, 1 if something is damaged, 2 if there is no
    checkpoint.

    Example: dckpt verify ckpt/1000 && echo fine
    """
    # Imports torch.
    from dist_checkpointing.checkpoint.verify import examine_checkpoint  # noqa: PLC0415

    with progress_bar("verifying", None) as bar:
        found = examine_checkpoint(
            checkpoint,
            trusted=trusted,
            progress=lambda seen: bar.reach(seen.bytes_done, seen.bytes_total),
        )
    if as_json:
        print_json(_as_json(checkpoint, found))
    elif not (quiet and found.is_sound):
        for line in _lines(checkpoint, found):
            say(line)
    if not found.is_sound:
        raise typer.Exit(EXIT_DAMAGED)


def _lines(checkpoint: Path, found: Examination) -> Iterator[str]:
    yield painted(one_line(str(checkpoint)), "bold")
    yield from _seen(found)
    for title, style, findings in (
        (counted(len(found.findings), "finding"), "red", found.findings),
        ("not read, because it holds more than plain data types", "yellow", found.refused),
        ("worth a look", "yellow", found.remarks),
    ):
        if findings:
            yield painted(f"\n{title}", style)
            yield from (f"  - {one_line(str(finding))}" for finding in findings)
    verdict = painted("damaged", "red") if found.findings else painted("sound", "green")
    yield f"\n{verdict}"


def _seen(found: Examination) -> Iterator[str]:
    parts = f"{counted(found.num_parts, 'part')}, {bytes_text(found.num_bytes)}"
    yield f"{counted(found.num_tensors, 'tensor')} in {parts}"
    if found.is_sealed:
        yield "sealed: every file was compared with what the save noted of it"
    else:
        yield "no seal (an older version or another program saved it): files are not compared"
    if not found.num_bytes_compared:
        yield "no checksums were kept: what cannot be read is found, flipped bits are not"
    elif found.num_bytes_compared == found.num_bytes:
        yield "all of it has checksums"
    else:
        yield f"{bytes_text(found.num_bytes_compared)} of it has checksums"
    if found.num_objects:
        yield f"{counted(found.num_objects, 'cell')} of sharded objects, and the common state"
    else:
        yield "the common state"


def _as_json(checkpoint: Path, found: Examination) -> dict[str, Any]:
    return {
        "path": str(checkpoint),
        "is_sound": found.is_sound,
        "num_tensors": found.num_tensors,
        "num_parts": found.num_parts,
        "num_bytes": found.num_bytes,
        "num_bytes_compared": found.num_bytes_compared,
        "num_objects": found.num_objects,
        "is_sealed": found.is_sealed,
        "findings": _findings(found.findings),
        "refused": _findings(found.refused),
        "remarks": _findings(found.remarks),
    }


def _findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in dataclasses.asdict(finding).items()
            if value or name == "key"
        }
        for finding in findings
    ]
