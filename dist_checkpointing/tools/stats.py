"""``dckpt stats``: counts what a checkpoint consists of, and finds NaN and infinity."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.file_names import is_of_optimizer
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.format.seal import SEAL_NAME
from dist_checkpointing.tools.opening import open_tensors
from dist_checkpointing.tools.report import AsJson, Report, counted, print_json, progress_bar
from dist_checkpointing.tools.runs import CheckpointArgument, Files, Trusted

if TYPE_CHECKING:
    from dist_checkpointing.tools.values import Statistics

_EXIT_NOT_FINITE = 1


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
    found = count_contents(opened, most_listed=top)
    not_finite = _scan(opened) if scan else None
    if as_json:
        print_json(_document(opened, found, not_finite))
    else:
        _report(opened, found, not_finite).print()
    if not_finite:
        raise typer.Exit(_EXIT_NOT_FINITE)


def _scan(opened: Checkpoint) -> dict[str, Statistics]:
    """The statistics of the tensors that hold NaN or infinity."""
    # Imports torch, which counting files does not need.
    from dist_checkpointing.tools.values import stream_statistics  # noqa: PLC0415

    # Only these dtypes have NaN or infinity.
    sizes = {
        key: tensor.num_bytes
        for key, tensor in opened.items()
        if tensor.dtype_name.startswith(("float", "bfloat", "complex"))
    }
    with progress_bar("scanning", sum(sizes.values())) as bar:
        found = stream_statistics(opened, sizes, report=bar.advance)
    return {key: one for key, one in found.items() if one.num_nan or one.num_inf}


# What it consists of.


@dataclass(frozen=True, slots=True)
class TensorTotal:
    """The number of some tensors, and their bytes."""

    num_tensors: int
    num_bytes: int

    @classmethod
    def of(cls, tensors: Collection[StoredTensor]) -> TensorTotal:
        """What some tensors take together, before compression."""
        return cls(len(tensors), sum(tensor.num_bytes for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a checkpoint consists of.

    Attributes:
        largest_files: Relative names and bytes of the largest files, largest first.
        by_dtype: Tensors of each element type, largest share first.
        model: Tensors of the model: all but ``optimizer``.
        optimizer: Tensors of an optimizer, see ``is_of_optimizer``.
        largest: Keys and bytes of the largest tensors.
        num_chunks: Number of stored chunks and pieces of all tensors.
        largest_chunk_bytes: Bytes of the largest chunk, before compression.
        facts: Facts about this backend, as text.
    """

    files: Files
    largest_files: tuple[tuple[str, int], ...]
    tensors: TensorTotal
    by_dtype: Mapping[str, TensorTotal]
    model: TensorTotal
    optimizer: TensorTotal
    largest: tuple[tuple[str, int], ...]
    num_elements: int
    num_chunks: int
    largest_chunk_bytes: int
    facts: Mapping[str, str]


def count_contents(checkpoint: Checkpoint, *, most_listed: int = 10) -> Inventory:
    """Count what the index and the names and sizes of the files show; no values are read."""
    tensors = [checkpoint.index[key] for key in checkpoint.index]
    uses = location.use_below(checkpoint.folder)
    sizes = {name: use.num_bytes for name, use in uses.items()}
    groups: defaultdict[str | bool, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype.name].append(tensor)
        groups[is_of_optimizer(tensor.key)].append(tensor)
    model, optimizer = (TensorTotal.of(groups.pop(key, ())) for key in (False, True))
    totals = {str(name): TensorTotal.of(group) for name, group in groups.items()}
    return Inventory(
        Files.of(uses.values()),
        _largest(sizes, most_listed),
        TensorTotal.of(tensors),
        dict(sorted(totals.items(), key=lambda row: (-row[1].num_bytes, row[0]))),
        model,
        optimizer,
        _largest({tensor.key: tensor.num_bytes for tensor in tensors}, most_listed),
        sum(tensor.num_bytes // tensor.dtype.itemsize for tensor in tensors),
        sum(tensor.num_parts for tensor in tensors),
        max(map(_chunk_bytes, tensors), default=0),
        _facts(checkpoint, sizes),
    )


def _largest(sizes: Mapping[str, int], most: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items(), key=lambda row: (-row[1], row[0]))[:most])


def _chunk_bytes(stored: StoredTensor) -> int:
    """Bytes of the largest chunk or piece."""
    if (pieces := stored.pieces) is None:
        count = math.prod(map(min, stored.grid.chunk_shape, stored.global_shape))
    else:
        start, stop = pieces.flat.T
        counts = np.where(start < 0, pieces.shapes.prod(axis=1), stop - start)
        count = int(counts.max(initial=0))
    return count * stored.dtype.itemsize


def _facts(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> dict[str, str]:
    backend, version = checkpoint.backend
    if backend in ("safetensors", "torch"):
        return {}
    tables = [n for n in sizes if n.startswith(f"{CHECKSUMS_NAME}/") and n.endswith(".bin")]
    facts = {
        "checksums": f"in {counted(len(tables), 'table')}" if tables else "none were kept",
        "seal": "kept" if SEAL_NAME in sizes else "none was kept",
    }
    if backend == "tensorstore":
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for name, size in sizes.items():
            if name.startswith("data/"):
                groups[name.split("/")[1]].append(size)
        # A removal of all of its tensors frees this.
        for group, inside in sorted(groups.items()):
            facts[f"group {group}"] = f"{sum(inside):,} bytes in {counted(len(inside), 'file')}"
    elif backend == "zarr":
        facts["format"] = f"zarr v{3 if version == 2 else 2}"
        facts["compression"] = checkpoint.index.codec or "none"
    elif backend == "torch_dist":
        data = [name for name in sizes if name.endswith(".distcp")]
        ranks = {name.split("_")[2] for name in data if name.startswith("__")}
        facts["written by"] = f"{counted(len(ranks), 'rank')}, {counted(len(data), 'data file')}"
    return facts


# What is printed.


def _report(
    opened: Checkpoint, found: Inventory, not_finite: Mapping[str, Statistics] | None
) -> Report:
    report = Report(str(opened.path))
    name, version = opened.backend
    tensors, files = found.tensors, found.files
    share = tensors.num_bytes and files.num_bytes / tensors.num_bytes
    size = f"{bytes_text(files.num_bytes)} ({share:.2f} of the tensors)"
    number = counted(tensors.num_tensors, "tensor")
    elements = f"{found.num_elements:,} elements, {bytes_text(tensors.num_bytes)}"
    chunks = f"{found.num_chunks:,}, the largest has {bytes_text(found.largest_chunk_bytes)}"
    on_disk = f"{bytes_text(files.num_bytes_on_disk)} on disk"
    facts = [
        ("backend", f"{name} {version}"),
        ("tensors", f"{number}, {elements}"),
        ("files", f"{counted(files.num_files, 'file')}, {size}, {on_disk}"),
        *([("of its own", files.own_text())] if files.num_bytes_shared else []),
        ("chunks", chunks if found.num_chunks else "none"),
        *found.facts.items(),
    ]
    report.facts(facts)
    uses = {"model": found.model, "optimizer": found.optimizer}
    shares = {"SHARE": {key: one for key, one in uses.items() if one.num_tensors}}
    for title, totals in {**shares, "DTYPE": found.by_dtype}.items():
        whole = sum(one.num_bytes for one in totals.values())
        rows = []
        for key, one in totals.items():
            part = f"{one.num_bytes / whole:.1%}" if whole else ""
            rows.append((key, f"{one.num_tensors:,}", bytes_text(one.num_bytes), part))
        report.section()
        report.table((title, "TENSORS", "SIZE", ""), rows, right=[1, 2, 3])
    largest = {"LARGEST TENSORS": found.largest, "LARGEST FILES": found.largest_files}
    for title, sizes in largest.items():
        report.section()
        report.table((title, "SIZE"), [(key, bytes_text(size)) for key, size in sizes], right=[1])
    if not_finite:
        report.section(f"{counted(len(not_finite), 'tensor')} with NaN or infinity", "red")
        counts = [
            (key, f"{one.num_nan:,}", f"{one.num_inf:,}", f"{one.count:,}")
            for key, one in not_finite.items()
        ]
        report.table(("KEY", "NAN", "INF", "ELEMENTS"), counts, right=[1, 2, 3])
    elif not_finite is not None:
        report.section(f"no NaN and no infinity in {number}", "green")
    return report


def _document(
    opened: Checkpoint, found: Inventory, not_finite: Mapping[str, Statistics] | None
) -> dict[str, Any]:
    document = {"path": str(opened.path), "backend": opened.backend, **dataclasses.asdict(found)}
    if not_finite is not None:
        document["not_finite"] = {
            key: {"num_nan": one.num_nan, "num_inf": one.num_inf, "num_elements": one.count}
            for key, one in not_finite.items()
        }
    return document
