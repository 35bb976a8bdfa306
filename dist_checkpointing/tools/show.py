"""``dckpt show``: shows one tensor, object or entry of the common state."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pprint
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any

import numpy as np
import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint, StoredChunk, TensorHandle
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
    handle = opened.objects.get(key)
    value = _common_value(opened, key) if handle is None else None
    if part is not None or plot:
        raise ValueError(f"{key!r} is not a tensor: only tensors have slices and histograms")
    report = Report(key)
    document: dict[str, Any] = {"key": key}
    contents: Iterable[tuple[str | None, Any]] = [(None, value)]
    if handle is None:
        document |= {"type": values.type_text(value), "value": value}
        report.line(f"common state, {values.type_text(value)}")
    else:
        cells = ((cell, handle[cell]) for cell in handle)
        if as_json:
            rows = [{"cell": cell, "value": content} for cell, content in cells]
            document |= {"shape": handle.shape, "cells": rows}
        cells_text = f"{counted(len(handle), 'cell')} in a grid of {shape_text(handle.shape)}"
        report.line(f"sharded object, {cells_text}")
        contents = ((f"Cell {shape_text(cell)}", content) for cell, content in cells)
    if as_json:
        print_json(document)
        return
    for title, content in contents:
        report.section(title)
        text = pprint.pformat(content, width=terminal_width() or PIPE_WIDTH, compact=True)
        report.listed(text.split("\n"), _MAX_LINES, None, "... {} more lines")
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
    chosen = (row for row in numbered if not boxes or any(map(row[1].box.intersect, boxes)))
    rows = []
    for number, chunk in itertools.islice(chosen, _MAX_CHUNKS):
        file = handle.location(number).removeprefix(f"{handle.folder}/")
        rows.append((str(number), _box_text(chunk), bytes_text(chunk.num_bytes), one_line(file)))
    report.table(("", "", "", ""), rows, right=[0, 2])
    if next(chosen, None):
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


def plot_lines(found: Histogram, width: int, encoding: str = "utf-8") -> Iterator[str]:
    """A line for each bin: its lower edge, a bar, and the number of its values."""
    full, parts = "█", " ▏▎▍▌▋▊▉"
    try:
        (full + parts).encode(encoding)
    except UnicodeEncodeError:
        full, parts = "#", "       #"
    is_whole = found.is_of_integers
    labels = [f"{edge + 0.5:.0f}" if is_whole else f"{edge:.4g}" for edge in found.edges]
    first = labels[0] if is_whole or not found.below else f">= {labels[0]}"
    rows = list(zip([first, *labels[1:-1]], found.counts, strict=True))
    if found.below:
        rows.insert(0, (f"< {labels[0]}", found.below))
    if found.above:
        rows.append((f"> {labels[-1]}", found.above))
    label_width = max(len(label) for label, _ in rows)
    most = max(found.below, *found.counts, found.above)
    count_width = len(f"{most:,}")
    room = max(8, width - label_width - count_width - 4)
    for label, count in rows:
        eighths = round(8 * room * count / most)
        bar = full * (eighths // 8) + parts[eighths % 8].strip()
        if count and not bar:
            bar = parts[1].strip() or full
        yield f"{label:>{label_width}}  {bar:<{room}}  {count:>{count_width},}"
