"""``dckpt show``: shows one tensor, object or entry of the common state."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pprint
import sys
from collections.abc import Collection, Iterator
from typing import Annotated, Any

import numpy as np
import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import (
    Checkpoint,
    ObjectHandle,
    StoredChunk,
    TensorHandle,
)
from dist_checkpointing.checkpoint.slicing import parse_slices, select
from dist_checkpointing.errors import hint
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.tools import values
from dist_checkpointing.tools.ls import sharding_text
from dist_checkpointing.tools.opening import open_tensors
from dist_checkpointing.tools.report import (
    PIPE_WIDTH,
    AsJson,
    Report,
    counted,
    one_line,
    painted,
    print_json,
    progress_bar,
    shape_text,
    terminal_width,
)
from dist_checkpointing.tools.runs import CheckpointArgument, Trusted
from dist_checkpointing.tools.values import Histogram, Statistics

_MAX_WHOLE = 200
_MAX_JSON = 10_000
_MAX_CHUNKS = 8
_MAX_LINES = 60
_BINS = 20


def show(
    checkpoint: CheckpointArgument,
    key: Annotated[
        str,
        typer.Argument(help="Key of a tensor, object or common state (such as args.lr)."),
    ],
    *,
    part: Annotated[
        str | None,
        typer.Option("--slice", "-s", help="A part of the tensor, such as 0:4,:8 or -1,..."),
    ] = None,
    statistics: Annotated[
        bool, typer.Option(help="Read all of it (or of the slice) for its statistics.")
    ] = True,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw a histogram of it (or of the slice).")
    ] = False,
    trusted: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Show a tensor: values, statistics, and the part in each chunk.

    Also shows sharded objects and entries of the common state. A histogram
    reaches as far as four standard deviations from the mean; what lies
    outside is counted below and above it.

    Example: dckpt show runs/gpt@latest decoder.weight --plot

    Example: dckpt show ckpt/1000 decoder.weight --slice "0:4,:8"
    """
    opened = open_tensors(checkpoint, trusted=trusted)
    if key in opened:
        _show_tensor(opened[key], part, statistics=statistics, plot=plot, as_json=as_json)
        return
    is_object = key in opened.objects
    value = None if is_object else _common_value(opened, key)
    if part is not None or plot:
        raise ValueError(f"{key!r} is not a tensor: only tensors have slices and histograms")
    if is_object:
        _show_object(opened.objects[key], as_json=as_json)
    elif as_json:
        print_json({"key": key, "type": values.type_text(value), "value": value})
    else:
        report = Report(key)
        report.line(f"common state, {values.type_text(value)}")
        report.section()
        _add_value(report, value)
        report.print()


def _show_tensor(
    handle: TensorHandle, part: str | None, *, statistics: bool, plot: bool, as_json: bool
) -> None:
    slices = ... if part is None else parse_slices(part)
    selected = select(handle.shape, slices, handle.key)
    found = histogram = None
    if statistics or plot:
        num_bytes = sum(box.num_elements for box in selected.boxes) * handle.stored.dtype.itemsize
        with progress_bar("reading", num_bytes * (2 if plot else 1)) as bar:
            found = values.statistics_of_part(handle, slices, report=bar.advance)
            if plot:
                histogram = values.histogram_of_part(
                    handle, slices, found, bins=_BINS, report=bar.advance
                )
    if as_json:
        print_json(_document(handle, part, slices, selected.shape, found, histogram))
        return
    report = Report(handle.key)
    cut = (
        counted(handle.num_chunks, "piece")
        if handle.chunk_shape is None
        else sharding_text(handle.shape, handle.chunk_shape).replace(" of ", " chunks of ")
    )
    facts = [shape_text(handle.shape), handle.dtype_name, bytes_text(handle.num_bytes), cut]
    report.line("  ".join(facts))
    title = "" if part is None else f" of [{part.strip()}], {shape_text(selected.shape)}"
    if found is not None:
        report.section(f"Statistics{title}")
        report.lines(_statistics_lines(found))
    if histogram is not None:
        report.section(f"Histogram{title}")
        width = terminal_width() or PIPE_WIDTH
        report.lines(plot_lines(histogram, width, sys.stdout.encoding or "ascii"))
    report.section(f"Values{title}")
    report.lines([_values_text(handle, slices)])
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
    texts.append(f"zero {found.num_zero:,}")
    yield f"{'  '.join(texts)}  of {counted(found.count, 'element')}"
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
    chosen = (
        (number, chunk)
        for number, chunk in numbered
        if not boxes or any(chunk.box.intersect(box) for box in boxes)
    )
    listed = list(itertools.islice(chosen, _MAX_CHUNKS + 1))
    rows = []
    for number, chunk in listed[:_MAX_CHUNKS]:
        file = handle.location(number).removeprefix(f"{handle.folder}/")
        rows.append((str(number), _box_text(chunk), bytes_text(chunk.num_bytes), one_line(file)))
    report.table(("", "", "", ""), rows, right=[0, 2])
    if len(listed) > _MAX_CHUNKS:
        report.line("...")


def _box_text(chunk: StoredChunk) -> str:
    pairs = zip(chunk.box.offset, chunk.box.stop, strict=True)
    text = ",".join(f"{start}:{stop}" for start, stop in pairs) or "scalar"
    if chunk.flat_range is not None:
        text += f" flat {chunk.flat_range[0]}:{chunk.flat_range[1]}"
    return text


def _document(
    handle: TensorHandle,
    part: str | None,
    slices: Any,
    shape: tuple[int, ...],
    found: Statistics | None,
    histogram: Histogram | None,
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
    if histogram is not None:
        document["histogram"] = dataclasses.asdict(histogram)
    if math.prod(shape) <= _MAX_JSON:
        document["values"] = values.as_numbers(handle[slices]).tolist()
    document["chunk_shape"] = handle.chunk_shape
    document["num_chunks"] = handle.num_chunks
    document["chunks"] = [
        {
            "offset": chunk.box.offset,
            "shape": chunk.box.shape,
            "flat_range": chunk.flat_range,
            "num_bytes": chunk.num_bytes,
            "location": handle.location(number) if number < _MAX_CHUNKS else None,
        }
        for number, chunk in enumerate(itertools.islice(handle.iter_chunks(), _MAX_JSON))
    ]
    return document


def _show_object(handle: ObjectHandle, *, as_json: bool) -> None:
    if as_json:
        cells = [{"cell": cell, "value": handle[cell]} for cell in handle]
        print_json({"key": handle.key, "shape": handle.shape, "cells": cells})
        return
    report = Report(handle.key)
    cells_text = f"{counted(len(handle), 'cell')} in a grid of {shape_text(handle.shape)}"
    report.line(f"sharded object, {cells_text}")
    for cell in handle:
        report.section(f"Cell {shape_text(cell)}")
        _add_value(report, handle[cell])
    report.print()


def _common_value(opened: Checkpoint, key: str) -> Any:
    common = opened.common
    try:
        return values.below(common, key)
    except KeyError:
        near = hint(key, [*opened, *opened.objects, *common, *values.entries(common)])
        raise KeyError(
            f"{opened.path} holds nothing called {key!r}"
            f"{near or '; dckpt ls --all lists everything in it'}"
        ) from None


def _add_value(report: Report, value: Any) -> None:
    text = pprint.pformat(value, width=terminal_width() or PIPE_WIDTH, compact=True)
    report.listed(text.split("\n"), _MAX_LINES, None, "... {} more lines")


def plot_lines(found: Histogram, width: int, encoding: str = "utf-8") -> Iterator[str]:
    """A line for each bin: its lower edge, a bar, and the number of its values."""
    full, parts = "█", " ▏▎▍▌▋▊▉"
    try:
        (full + parts).encode(encoding)
    except UnicodeEncodeError:
        full, parts = "#", "       #"
    is_whole = found.is_of_integers
    labels = [f"{edge + 0.5:.0f}" if is_whole else f"{edge:.4g}" for edge in found.edges]
    rows = [(f">= {labels[0]}", found.counts[0]), *zip(labels[1:-1], found.counts[1:], strict=True)]
    if is_whole or not found.below:
        rows[0] = (labels[0], found.counts[0])
    if found.below:
        rows.insert(0, (f"< {labels[0]}", found.below))
    if found.above:
        rows.append((f"> {labels[-1]}", found.above))
    label_width = max(len(label) for label, _ in rows)
    most = max(count for _, count in rows)
    count_width = len(f"{most:,}")
    room = max(8, width - label_width - count_width - 4)
    for label, count in rows:
        eighths = round(8 * room * count / most)
        bar = full * (eighths // 8) + parts[eighths % 8].strip()
        if count and not bar:
            bar = parts[1].strip() or full
        yield f"{label:>{label_width}}  {bar:<{room}}  {count:>{count_width},}"
