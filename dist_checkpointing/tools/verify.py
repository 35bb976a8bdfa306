"""``dckpt verify``: checks whether a checkpoint can be loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from typer import Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.verify_checkpoint import Examination, examine_checkpoint
from dist_checkpointing.errors import Finding, counted
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format.run_steps import located
from dist_checkpointing.tools.opening import CheckpointArgument, Trusted, explaining, open_named
from dist_checkpointing.tools.report import AsJson, Report, progress_bar
from dist_checkpointing.tools.torchrun import ranks

_MAX_BYTES = 2**30


def verify(
    checkpoint: CheckpointArgument,
    *,
    against: Annotated[
        Path | None,
        Option(
            help="Compare with the fingerprints in this file: of dckpt ls --fingerprint --json, or"
            " a JSON object of keys and fingerprints."
        ),
    ] = None,
    trusted: Trusted = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print nothing if all is well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read all of a checkpoint and name everything that is damaged.

    Checks that the save was completed and that the stored parts cover every
    tensor. Reads every part, and compares checksums if the save kept any.
    Reads sharded objects and common state. With --against, computes the
    fingerprints of all tensors from what is stored, which reads them once
    more.

    Exit code: 0 if all is well, 1 if something is damaged, 2 if there is no
    checkpoint.

    Example: dckpt verify ckpt/1000 && echo fine
    """
    expected = None if against is None else read_fingerprints(against)
    path = located(checkpoint)
    with ranks() as comm, progress_bar("verifying", None) as bar, explaining(path):
        share = {"rank": comm.rank, "world_size": comm.world_size}
        found = Examination.joined(
            comm.exchange(
                "verifying",
                lambda: examine_checkpoint(path, trusted=trusted, progress=bar.show, **share),
            )
        )
    verdict = "sound" if found.is_sound else "damaged"
    # Fingerprints are compared only where nothing is damaged.
    if against is not None and expected is not None and found.is_sound:
        opened = open_named(checkpoint, trusted=trusted)
        others = [*other_fingerprints(opened.fingerprints(stored=False), expected, against)]
        found.findings = others
        verdict = "not what the file says" if others else verdict
    report = Report()
    if not (quiet and found.is_sound):
        report.line(str(checkpoint), "bold")
        if found.num_tensors or not found.findings:
            for text in _coverage(found):
                report.line(text)
        if expected is not None and found.is_sound:
            number = counted(len(expected), "tensor")
            report.line(f"all fingerprints are those of the file: {number}")
        for title, style, findings in (
            (counted(len(found.findings), "finding"), "red", found.findings),
            ("not read, because it holds more than plain data types", "yellow", found.refused),
            ("worth a look", "yellow", found.remarks),
        ):
            report.section(title, style)
            report.lines([f"  - {finding}" for finding in findings], None, len(findings))
        report.paragraph(verdict, "green" if found.is_sound else "red")
    document = {"path": str(checkpoint), "is_sound": found.is_sound, **dataclasses.asdict(found)}
    for name in ("findings", "refused", "remarks"):
        document[name] = [
            {field: value for field, value in row.items() if value or field == "key"}
            for row in document[name]
        ]
    report.finish(document, as_json=as_json, code=int(not found.is_sound))


def read_fingerprints(path: Path) -> dict[str, str]:
    """The fingerprints in a file, by key."""
    remedy = "Write it with dckpt ls --fingerprint --json."
    with local_folder.parsing("the file of fingerprints cannot be read", path, remedy=remedy):
        content = location.read_json(path, _MAX_BYTES)
        if isinstance(content.get("tensors"), list):
            content = {row["key"]: row["fingerprint"] for row in content["tensors"]}
        if not content or not {str}.issuperset(map(type, content.values())):
            raise ValueError("it holds no fingerprints")
    return dict(content)


def other_fingerprints(
    found: Mapping[str, str], expected: Mapping[str, str], path: Path
) -> Iterator[Finding]:
    """The tensors whose fingerprints are not those of a file, or are in one of both only."""
    for key in sorted({*found, *expected}):
        if key not in found:
            yield Finding("the file names this tensor, the checkpoint does not hold it", key)
        elif key not in expected:
            yield Finding("the file does not name this tensor", key, path=str(path))
        elif found[key] != expected[key]:
            problem = "the values, the dtype or the shape are others than the file says"
            yield Finding(problem, key, expected=expected[key], found=found[key])


def _coverage(found: Examination) -> Iterator[str]:
    parts = f"{counted(found.num_parts, 'part')}, {bytes_text(found.num_bytes)}"
    yield f"{counted(found.num_tensors, 'tensor')} in {parts}"
    if found.is_sealed:
        yield "sealed: every file was compared with the record of the save"
    elif found.findings:
        yield "no seal that can be read: files are not compared"
    else:
        yield "no seal (an older version or another program saved it): files are not compared"
    if found.num_bytes and not found.num_bytes_compared:
        yield "no checksums were kept: what cannot be read is found, flipped bits are not"
    elif found.num_bytes_compared < found.num_bytes:
        yield f"{bytes_text(found.num_bytes_compared)} of it has checksums"
    elif found.num_bytes:
        yield "all of it has checksums"
    if found.num_objects:
        yield f"{counted(found.num_objects, 'cell')} of sharded objects, and the common state"
    else:
        yield "the common state"
