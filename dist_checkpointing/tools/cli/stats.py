"""``dckpt stats``: counts what a checkpoint consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.tools.cli.screen import (
    AsJson,
    CheckpointArgument,
    Trusted,
    counted,
    facts_lines,
    in_columns,
    one_line,
    painted,
    print_json,
    progress_bar,
    say,
)
from dist_checkpointing.tools.inspect.inventory import Inventory, TensorTotal, take_inventory
from dist_checkpointing.tools.inspect.opening import open_tensors

if TYPE_CHECKING:
    from dist_checkpointing.tools.inspect.values import Statistics


def stats(
    checkpoint: CheckpointArgument,
    *,
    scan: Annotated[
        bool, typer.Option("--scan", help="Read every tensor and look for NaN and infinity.")
    ] = False,
    top: Annotated[int, typer.Option("--top", "-n", min=0, help="How many to list.")] = 5,
    trusted: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Show files, bytes, dtypes, the largest tensors and the share of the optimizer.

    With --scan the exit code is 1 if a tensor holds NaN or infinity.

    Example: dckpt stats ckpt/1000 --scan
    """
    opened = open_tensors(checkpoint, trusted=trusted)
    found = take_inventory(opened, most_listed=top)
    strange = _scan(opened) if scan else None
    if as_json:
        print_json(_as_json(opened, found, strange))
    else:
        for line in _lines(opened, found):
            say(line)
        if strange is not None:
            for line in _scan_lines(strange, found):
                say(line)
    if strange:
        raise typer.Exit(1)


def _scan(opened: Checkpoint) -> dict[str, Statistics]:
    """The statistics of the tensors that hold NaN or infinity."""
    # Imports torch, which counting files does not need.
    from dist_checkpointing.tools.inspect.values import stream_statistics  # noqa: PLC0415

    # Only these dtypes have NaN or infinity.
    regions = [
        (key, Box.whole(tensor.shape))
        for key, tensor in opened.items()
        if tensor.dtype_name.startswith(("float", "bfloat", "complex"))
    ]
    with progress_bar("scanning", sum(opened[key].num_bytes for key, _ in regions)) as bar:
        found = stream_statistics(opened, regions, report=bar.advance)
    return {key: one for key, one in found.items() if one.num_nan or one.num_inf}


def _lines(opened: Checkpoint, found: Inventory) -> Iterator[str]:
    name, version = opened.backend
    yield painted(one_line(str(opened.path)), "bold")
    on_disk = found.files.num_bytes_on_disk
    share = found.tensors.num_bytes and found.files.num_bytes / found.tensors.num_bytes
    tensors = f"{counted(found.tensors.num_tensors, 'tensor')}, {found.num_elements:,} elements"
    chunks = f"{found.num_chunks:,}, the largest has {bytes_text(found.largest_chunk_bytes)}"
    files = f"{counted(found.files.num_files, 'file')}, {bytes_text(found.files.num_bytes)}"
    rows = [
        ("backend", f"{name} {version}"),
        ("tensors", f"{tensors}, {bytes_text(found.tensors.num_bytes)}"),
        ("files", f"{files} ({share:.2f} of the tensors), {bytes_text(on_disk)} on disk"),
        *([("of its own", found.files.own_text())] if found.files.num_bytes_shared else []),
        ("chunks", chunks if found.num_chunks else "none"),
        *((one_line(fact), one_line(text)) for fact, text in found.facts.items()),
    ]
    yield from facts_lines(rows)
    shares = {"model": found.model, "optimizer": found.optimizer}
    yield from _share_lines("SHARE", {key: one for key, one in shares.items() if one.num_tensors})
    yield from _share_lines("DTYPE", found.by_dtype)
    if found.largest:
        yield ""
        rows = [(one_line(key), bytes_text(size)) for key, size in found.largest]
        yield from in_columns(("LARGEST TENSORS", "SIZE"), rows, right=[1])
    if found.largest_files:
        yield ""
        rows = [(one_line(key), bytes_text(size)) for key, size in found.largest_files]
        yield from in_columns(("LARGEST FILES", "SIZE"), rows, right=[1])


def _share_lines(title: str, shares: Mapping[str, TensorTotal]) -> Iterator[str]:
    total = sum(share.num_bytes for share in shares.values())
    if not shares:
        return
    rows = [
        (
            name,
            f"{share.num_tensors:,}",
            bytes_text(share.num_bytes),
            f"{share.num_bytes / total:.1%}" if total else "",
        )
        for name, share in shares.items()
    ]
    yield ""
    yield from in_columns((title, "TENSORS", "SIZE", ""), rows, right=[1, 2, 3])


def _scan_lines(strange: Mapping[str, Statistics], found: Inventory) -> Iterator[str]:
    yield ""
    if not strange:
        number = counted(found.tensors.num_tensors, "tensor")
        yield painted(f"no NaN and no infinity in {number}", "green")
        return
    number = counted(len(strange), "tensor")
    yield painted(f"{number} with NaN or infinity", "red")
    rows = [
        (one_line(key), f"{one.num_nan:,}", f"{one.num_inf:,}", f"{one.count:,}")
        for key, one in strange.items()
    ]
    yield from in_columns(("KEY", "NAN", "INF", "ELEMENTS"), rows, right=[1, 2, 3])


def _as_json(
    opened: Checkpoint, found: Inventory, strange: Mapping[str, Statistics] | None
) -> dict[str, Any]:
    document = {"path": str(opened.path), "backend": opened.backend, **dataclasses.asdict(found)}
    if strange is not None:
        document["not_finite"] = {
            key: {"num_nan": one.num_nan, "num_inf": one.num_inf, "num_elements": one.count}
            for key, one in strange.items()
        }
    return document
