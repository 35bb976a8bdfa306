"""``dckpt stats``: counts what a checkpoint consists of, and finds NaN and infinity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any

import numpy as np
from typer import Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import counted
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.file_names import is_of_optimizer
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.format.seal import SEAL_NAME
from dist_checkpointing.tools.opening import CheckpointArgument, Files, Trusted, open_named
from dist_checkpointing.tools.report import AsJson, Report, Total, progress_bar, totals
from dist_checkpointing.tools.torchrun import ranks


def stats(
    checkpoint: CheckpointArgument,
    *,
    scan: Annotated[
        bool, Option("--scan", help="Read every tensor and look for NaN and infinity.")
    ] = False,
    top: Annotated[int, Option("--top", "-n", min=0, help="How many to list.")] = 5,
    trusted: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Show files, bytes, dtypes, the largest tensors and the share of the optimizer.

    With --scan the exit code is 1 if a tensor holds NaN or infinity.

    Example: dckpt stats ckpt/1000 --scan
    """
    opened = open_named(checkpoint, trusted=trusted)
    found = count_contents(opened, most_listed=top)
    if scan:
        found["not_finite"] = _not_finite(opened)
    _report(found).finish(found, as_json=as_json, code=int(bool(found.get("not_finite"))))


def _not_finite(opened: Checkpoint) -> dict[str, dict[str, int]]:
    """The tensors that hold NaN or infinity, and how many."""
    # Imports torch, which counting files does not need.
    from dist_checkpointing.tools.values import stream_statistics  # noqa: PLC0415

    # Only these dtypes have NaN or infinity.
    sizes = {
        key: tensor.num_bytes
        for key, tensor in opened.items()
        if tensor.dtype_name.startswith(("float", "bfloat", "complex"))
    }
    with ranks() as comm, progress_bar("scanning", sum(sizes.values()) // comm.world_size) as bar:
        share = [*sizes][comm.rank :: comm.world_size]
        found = comm.exchange(
            "scanning", lambda: stream_statistics(opened, share, report=bar.advance)
        )
    return {
        key: {"num_nan": one.num_nan, "num_inf": one.num_inf, "num_elements": one.count}
        for key, one in sorted(chain.from_iterable(part.items() for part in found))
        if one.num_nan or one.num_inf
    }


def count_contents(checkpoint: Checkpoint, *, most_listed: int = 10) -> dict[str, Any]:
    """The document of ``--json``: what the index and the names and sizes of the files show.

    No values are read. Tensors of the model are all but those of an optimizer, see
    ``is_of_optimizer``. Sizes of chunks are those before compression.
    """
    tensors = [checkpoint.index[key] for key in checkpoint.index]
    uses = location.use_below(checkpoint.folder)
    sizes = {name: use.num_bytes for name, use in uses.items()}
    by_use = totals((is_of_optimizer(one.key), one.num_bytes) for one in tensors)
    by_dtype = totals((one.dtype.name, one.num_bytes) for one in tensors)
    return {
        "path": str(checkpoint.path),
        "backend": checkpoint.backend,
        "files": dataclasses.asdict(Files.of(uses.values())),
        "largest_files": _largest(sizes, most_listed),
        "tensors": Total(len(tensors), sum(one.num_bytes for one in tensors))._asdict(),
        "by_dtype": {name: one._asdict() for name, one in by_dtype.items()},
        "model": by_use.get(False, Total())._asdict(),
        "optimizer": by_use.get(True, Total())._asdict(),
        "largest": _largest({tensor.key: tensor.num_bytes for tensor in tensors}, most_listed),
        "num_elements": sum(tensor.num_bytes // tensor.dtype.itemsize for tensor in tensors),
        "num_chunks": sum(tensor.num_parts for tensor in tensors),
        "largest_chunk_bytes": max(map(_chunk_bytes, tensors), default=0),
        "facts": _facts(checkpoint, sizes),
    }


def _largest(sizes: Mapping[str, int], most: int) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda row: (-row[1], row[0]))[:most]


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
    tables = [n for n in sizes if n.startswith(f"{CHECKSUMS_NAME}/") and n.endswith(".bin")]
    facts = {
        "checksums": f"in {counted(len(tables), 'table')}" if tables else "none were kept",
        "seal": "kept" if SEAL_NAME in sizes else "none was kept",
    }
    if backend == "zarr":
        facts["format"] = f"zarr v{3 if version == 2 else 2}"
        facts["compression"] = checkpoint.index.codec or "none"
    return facts


def _report(found: dict[str, Any]) -> Report:
    report = Report(found["path"])
    name, version = found["backend"]
    files, tensors = Files(**found["files"]), found["tensors"]
    num_bytes = tensors["num_bytes"]
    share = num_bytes and files.num_bytes / num_bytes
    size = f"{bytes_text(files.num_bytes)} ({share:.2f} of the tensors)"
    on_disk = f"{bytes_text(files.num_bytes_on_disk)} on disk"
    number = counted(tensors["num_tensors"], "tensor")
    largest_chunk = bytes_text(found["largest_chunk_bytes"])
    chunks = f"{found['num_chunks']:,}, the largest has {largest_chunk}"
    facts = {
        "backend": f"{name} {version}",
        "tensors": f"{number}, {found['num_elements']:,} elements, {bytes_text(num_bytes)}",
        "files": f"{counted(files.num_files, 'file')}, {size}, {on_disk}",
        "not shared": files.own_text(),
        "chunks": chunks if found["num_chunks"] else "none",
        **found["facts"],
    }
    report.facts(facts.items())
    shares = {key: found[key] for key in ("model", "optimizer") if found[key]["num_tensors"]}
    for title, groups in (("SHARE", shares), ("DTYPE", found["by_dtype"])):
        whole = sum(one["num_bytes"] for one in groups.values())
        rows = []
        for key, one in groups.items():
            part = f"{one['num_bytes'] / whole:.1%}" if whole else ""
            rows.append((key, f"{one['num_tensors']:,}", bytes_text(one["num_bytes"]), part))
        report.section()
        report.table((title, "TENSORS", "SIZE", ""), rows, right=[1, 2, 3])
    for title, name in (("LARGEST TENSORS", "largest"), ("LARGEST FILES", "largest_files")):
        report.section()
        largest = [(key, bytes_text(size)) for key, size in found[name]]
        report.table((title, "SIZE"), largest, right=[1])
    not_finite = found.get("not_finite")
    if not_finite == {}:
        report.paragraph(f"no NaN and no infinity in {number}", "green")
    elif not_finite:
        report.section(f"{counted(len(not_finite), 'tensor')} with NaN or infinity", "red")
        counts = [(key, *map("{:,}".format, one.values())) for key, one in not_finite.items()]
        report.table(("KEY", "NAN", "INF", "ELEMENTS"), counts, right=[1, 2, 3])
    return report
