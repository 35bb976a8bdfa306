"""``dckpt show``: shows one tensor, object or entry of the common state."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pprint
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any

import numpy as np
from typer import Argument, Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint, TensorHandle
from dist_checkpointing.checkpoint.slicing import parse_slices, select
from dist_checkpointing.errors import counted, hint
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.tools import values
from dist_checkpointing.tools.ls import sharding_text
from dist_checkpointing.tools.opening import CheckpointArgument, Trusted, open_named
from dist_checkpointing.tools.report import (
    PIPE_WIDTH,
    AsJson,
    Report,
    one_line,
    painted,
    print_json,
    progress_bar,
    shape_text,
    terminal_width,
)
from dist_checkpointing.tools.values import Statistics

_MAX_WHOLE = 200
_MAX_JSON = 10_000
_MAX_CHUNKS = 8
_MAX_LINES = 60


def show(
    checkpoint: CheckpointArgument,
    key: Annotated[
        str, Argument(help="Key of a tensor, object or common state (such as args.lr).")
    ],
    *,
    part: Annotated[
        str | None, Option("--slice", "-s", help="A part of the tensor, such as 0:4,:8 or -1,...")
    ] = None,
    statistics: Annotated[
        bool, Option(help="Read all of it (or of the slice) for its statistics.")
    ] = True,
    trusted: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Show a tensor: values, statistics, and the part in each chunk.

    Also shows sharded objects and entries of the common state.

    Example: dckpt show runs/gpt@latest args.lr

    Example: dckpt show ckpt/1000 decoder.weight --slice "0:4,:8"
    """
    opened = open_named(checkpoint, trusted=trusted)
    if key in opened:
        _show_tensor(opened[key], part, statistics=statistics, as_json=as_json)
        return
    handle = opened.objects.get(key)
    value = _common_value(opened, key) if handle is None else None
    if part is not None:
        raise ValueError(f"{key!r} is not a tensor: only tensors have slices")
    if handle is None:
        what = values.type_text(value)
        document = {"key": key, "type": what, "value": value}
        title = f"common state, {what}"
        contents: Iterable[tuple[str | None, Any]] = [(None, value)]
    else:
        rows = ({"cell": cell, "value": handle[cell]} for cell in handle)
        document = {"key": key, "shape": handle.shape, "cells": list(rows) if as_json else []}
        cells = f"{counted(len(handle), 'cell')} in a grid of {shape_text(handle.shape)}"
        title = f"sharded object, {cells}"
        contents = ((f"Cell {shape_text(row['cell'])}", row["value"]) for row in rows)
    if as_json:
        print_json(document)
        return
    report = Report(key)
    report.line(title)
    for heading, content in contents:
        text = pprint.pformat(content, width=terminal_width() or PIPE_WIDTH, compact=True)
        report.section(heading)
        report.lines(text.split("\n"), None, _MAX_LINES)
    report.print()


def _show_tensor(
    handle: TensorHandle, part: str | None, *, statistics: bool, as_json: bool
) -> None:
    slices = ... if part is None else parse_slices(part)
    selected = select(handle.shape, slices, handle.key)
    num_bytes = sum(box.num_elements for box in selected.boxes) * handle.stored.dtype.itemsize
    found = None
    if statistics:
        with progress_bar("reading", num_bytes) as bar:
            found = values.statistics_of_part(handle, slices, report=bar.advance)
    if as_json:
        print_json(_document(handle, part, slices, selected.shape, found))
        return
    report = Report(handle.key)
    cut = counted(handle.num_chunks, "piece")
    if handle.chunk_shape is not None:
        cut = sharding_text(handle.shape, handle.chunk_shape).replace(" of ", " chunks of ")
    shape, size = shape_text(handle.shape), bytes_text(handle.num_bytes)
    report.line(f"{shape}  {handle.dtype_name}  {size}  {cut}")
    title = "" if part is None else f" of [{part.strip()}], {shape_text(selected.shape)}"
    if found is not None:
        report.section(f"Statistics{title}")
        report.raw(_statistics_lines(found))
    report.section(f"Values{title}")
    report.raw([_values_text(handle, slices)])
    boxes = () if part is None else selected.boxes
    report.section(f"Chunks{' that hold a part of the slice' if boxes else ''}")
    _add_chunks(report, handle, boxes)
    report.print()


def _statistics_lines(found: Statistics) -> Iterator[str]:
    if found.num_finite:
        named = {"min": found.minimum, "max": found.maximum, "mean": found.mean, "std": found.std}
        yield "  ".join(
            f"{name} {value}" if isinstance(value, int) else f"{name} {value:.6g}"
            for name, value in named.items()
            if value is not None
        )
    counts = {"NaN": found.num_nan, "Inf": found.num_inf}
    texts = [painted(f"{name} {n:,}", "red" if n else None) for name, n in counts.items()]
    yield f"{'  '.join(texts)}  zero {found.num_zero:,}  of {counted(found.count, 'element')}"
    if found.num_finite not in (0, found.count):
        yield painted("min, max, mean and std are of the finite values", "dim")


def _values_text(handle: TensorHandle, slices: Any) -> str:
    width = terminal_width() or PIPE_WIDTH
    # A number takes about 12 columns, and a row shows ``edge`` numbers at both ends.
    edge = max(1, min(3, (width - 8) // 26))
    excerpt, is_whole = values.read_excerpt(handle, slices, most=_MAX_WHOLE, edge=edge)
    if 0 in excerpt.shape:
        return "no elements"
    return np.array2string(
        values.as_numbers(excerpt),
        max_line_width=width,
        precision=5,
        threshold=_MAX_WHOLE if is_whole else 0,
        edgeitems=edge,
    )


def _add_chunks(report: Report, handle: TensorHandle, boxes: Collection[Box]) -> None:
    """Add the first chunks, or the first of those that hold a part of ``boxes``."""
    if 0 in handle.shape:
        report.line("none: the tensor has no elements")
        return
    numbered = enumerate(itertools.islice(handle.iter_chunks(), _MAX_JSON))
    chosen = (row for row in numbered if not boxes or any(map(row[1].box.intersect, boxes)))
    rows = []
    for number, chunk in itertools.islice(chosen, _MAX_CHUNKS):
        pairs = zip(chunk.box.offset, chunk.box.stop, strict=True)
        text = ",".join(f"{start}:{stop}" for start, stop in pairs) or "scalar"
        if chunk.flat_range is not None:
            text += f" flat {chunk.flat_range[0]}:{chunk.flat_range[1]}"
        file = handle.location(number).removeprefix(f"{handle.folder}/")
        rows.append((str(number), text, bytes_text(chunk.num_bytes), one_line(file)))
    report.table(("", "", "", ""), rows, right=[0, 2])
    if next(chosen, None):
        report.line("...")


def _document(
    handle: TensorHandle,
    part: str | None,
    slices: Any,
    shape: tuple[int, ...],
    found: Statistics | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "key": handle.key,
        "shape": handle.shape,
        "dtype": handle.dtype_name,
        "num_bytes": handle.num_bytes,
        "slice": part,
        "slice_shape": shape,
    }
    if found is not None:
        document["statistics"] = dataclasses.asdict(found)
    if math.prod(shape) <= _MAX_JSON:
        document["values"] = values.as_numbers(handle[slices]).tolist()
    chunks = [
        {
            "offset": chunk.box.offset,
            "shape": chunk.box.shape,
            "flat_range": chunk.flat_range,
            "num_bytes": chunk.num_bytes,
            "location": handle.location(number) if number < _MAX_CHUNKS else None,
        }
        for number, chunk in enumerate(itertools.islice(handle.iter_chunks(), _MAX_JSON))
    ]
    sizes = {"chunk_shape": handle.chunk_shape, "num_chunks": handle.num_chunks}
    return {**document, **sizes, "chunks": chunks}


def _common_value(opened: Checkpoint, key: str) -> Any:
    common = values.common_state(opened)
    try:
        return values.below(common, key)
    except KeyError:
        near = hint(key, [*opened, *opened.objects, *common, *values.entries(common)])
        near = near or "; dckpt ls --all lists everything in it"
        raise KeyError(f"{opened.path} holds nothing called {key!r}{near}") from None
