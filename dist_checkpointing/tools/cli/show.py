"""``dckpt show``: shows one tensor, object or entry of the common state."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pprint
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.checkpoint.slicing import (
    ObjectHandle,
    StoredChunk,
    TensorHandle,
    parse_slices,
    select,
)
from dist_checkpointing.errors import hint
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.tools.cli.screen import (
    AsJson,
    CheckpointArgument,
    Trusted,
    counted,
    in_columns,
    one_line,
    painted,
    print_json,
    progress_bar,
    say,
    terminal_width,
)
from dist_checkpointing.tools.inspect.listing import shape_text, sharding_text
from dist_checkpointing.tools.inspect.opening import open_tensors

if TYPE_CHECKING:
    from dist_checkpointing.tools.inspect.values import Histogram, Statistics

_MOST_WHOLE = 200
_MOST_JSON = 10_000
_MOST_LISTED = 8
_MOST_LINES = 60
_PIPE_WIDTH = 100


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
    else:
        _show_common(key, value, as_json=as_json)


def _show_tensor(
    handle: TensorHandle, part: str | None, *, statistics: bool, plot: bool, as_json: bool
) -> None:
    # Imported here, because these import torch.
    from dist_checkpointing.tools.cli.plot import BINS, plot_lines  # noqa: PLC0415
    from dist_checkpointing.tools.inspect.values import (  # noqa: PLC0415
        histogram_of_part,
        statistics_of_part,
    )

    slices = ... if part is None else parse_slices(part)
    selected = select(handle.shape, slices, handle.key)
    found = histogram = None
    if statistics or plot:
        num_bytes = sum(box.num_elements for box in selected.boxes) * handle.stored.dtype.itemsize
        with progress_bar("reading", num_bytes * (2 if plot else 1)) as bar:
            found = statistics_of_part(handle, slices, report=bar.advance)
            if plot:
                histogram = histogram_of_part(handle, slices, found, bins=BINS, report=bar.advance)
    if as_json:
        print_json(_as_json(handle, part, slices, selected.shape, found, histogram))
        return
    stored = handle.stored
    say(painted(one_line(handle.key), "bold"))
    cut = (
        sharding_text(handle.shape, handle.chunk_shape).replace(" of ", " chunks of ")
        if stored.pieces is None
        else counted(len(stored.pieces), "piece")
    )
    facts = [shape_text(handle.shape), handle.dtype_name, bytes_text(handle.num_bytes), cut]
    say("  ".join(facts))
    title = "" if part is None else f" of [{part.strip()}], {shape_text(selected.shape)}"
    if found is not None:
        say(f"\n{painted(f'Statistics{title}', 'bold')}")
        for line in _statistics_lines(found):
            say(line)
    if histogram is not None:
        say(f"\n{painted(f'Histogram{title}', 'bold')}")
        width = terminal_width() or _PIPE_WIDTH
        for line in plot_lines(histogram, width, sys.stdout.encoding or "ascii"):
            say(line)
    say(f"\n{painted(f'Values{title}', 'bold')}")
    say(_values_text(handle, slices))
    boxes = () if part is None else selected.boxes
    which = " that hold a part of the slice" if boxes else ""
    say(f"\n{painted(f'Chunks{which}', 'bold')}")
    for line in _chunk_lines(handle, boxes):
        say(line)


def _statistics_lines(found: Statistics) -> Iterator[str]:
    if found.num_finite:
        named = [
            ("min", found.minimum),
            ("max", found.maximum),
            ("mean", found.mean),
            ("std", found.std),
        ]
        yield "  ".join(f"{name} {_number(value)}" for name, value in named if value is not None)
    counts = [("NaN", found.num_nan), ("Inf", found.num_inf), ("zero", found.num_zero)]
    texts = [
        painted(f"{name} {number:,}", "red") if number and name != "zero" else f"{name} {number:,}"
        for name, number in counts
    ]
    yield f"{'  '.join(texts)}  of {counted(found.count, 'element')}"
    if found.num_finite not in (0, found.count):
        yield painted("min, max, mean and std are of the finite values", "dim")


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _values_text(handle: TensorHandle, slices: Any) -> str:
    # Imported here, because it imports torch.
    from dist_checkpointing.tools.inspect.values import as_numbers, read_excerpt  # noqa: PLC0415

    width = terminal_width() or _PIPE_WIDTH
    # A number takes about 12 columns, and a row shows ``edge`` numbers at both ends.
    edge = max(1, min(3, (width - 8) // 26))
    excerpt = read_excerpt(handle, slices, most=_MOST_WHOLE, edge=edge)
    if 0 in excerpt.shape:
        return "no elements"
    return np.array2string(
        as_numbers(excerpt.values),
        max_line_width=width,
        precision=5,
        threshold=_MOST_WHOLE if excerpt.is_whole else 0,
        edgeitems=edge,
    )


def _chunk_lines(handle: TensorHandle, boxes: Collection[Box]) -> Iterator[str]:
    """The first chunks, or the first of those that hold a part of ``boxes``."""
    if 0 in handle.shape:
        yield "none: the tensor has no elements"
        return
    numbered = enumerate(itertools.islice(handle.iter_chunks(), _MOST_JSON))
    found = (
        (number, chunk)
        for number, chunk in numbered
        if not boxes or any(chunk.box.intersect(box) for box in boxes)
    )
    listed = list(itertools.islice(found, _MOST_LISTED + 1))
    rows = [
        (str(number), _box_text(chunk), bytes_text(chunk.num_bytes), _place(handle, number))
        for number, chunk in listed[:_MOST_LISTED]
    ]
    yield from in_columns(("", "", "", ""), rows, right=[0, 2])
    if len(listed) > _MOST_LISTED:
        yield "..."


def _place(handle: TensorHandle, number: int) -> str:
    text = handle.location(number)
    folder = f"{handle.folder}/"
    return one_line(text.removeprefix(folder))


def _box_text(chunk: StoredChunk) -> str:
    pairs = zip(chunk.box.offset, chunk.box.stop, strict=True)
    text = ",".join(f"{start}:{stop}" for start, stop in pairs) or "scalar"
    if chunk.flat_range is not None:
        text += f" flat {chunk.flat_range[0]}:{chunk.flat_range[1]}"
    return text


def _as_json(
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
    if math.prod(shape) <= _MOST_JSON:
        from dist_checkpointing.tools.inspect.values import as_numbers  # noqa: PLC0415

        document["values"] = as_numbers(handle[slices]).tolist()
    chunks = list(itertools.islice(handle.iter_chunks(), _MOST_JSON))
    document["chunk_shape"] = handle.chunk_shape
    document["num_chunks"] = handle.num_chunks
    document["chunks"] = [
        {
            "offset": chunk.box.offset,
            "shape": chunk.box.shape,
            "flat_range": chunk.flat_range,
            "num_bytes": chunk.num_bytes,
            "location": handle.location(number) if number < _MOST_LISTED else None,
        }
        for number, chunk in enumerate(chunks)
    ]
    return document


def _show_object(handle: ObjectHandle, *, as_json: bool) -> None:
    if as_json:
        cells = [{"cell": cell, "value": handle[cell]} for cell in handle]
        print_json({"key": handle.key, "shape": handle.shape, "cells": cells})
        return
    say(painted(one_line(handle.key), "bold"))
    say(f"sharded object, {counted(len(handle), 'cell')} in a grid of {shape_text(handle.shape)}")
    for cell in handle:
        say(f"\n{painted(f'Cell {shape_text(cell)}', 'bold')}")
        _print_value(handle[cell])


def _common_value(opened: Checkpoint, key: str) -> Any:
    from dist_checkpointing.tools.inspect import plain_state  # noqa: PLC0415 - imports torch

    common = opened.common
    try:
        return plain_state.below(common, key)
    except KeyError:
        names = [*opened, *opened.objects, *common, *plain_state.entries(common)]
        near = hint(key, names)
        raise KeyError(
            f"{opened.path} holds nothing called {key!r}"
            f"{near or '; dckpt ls --all lists everything in it'}"
        ) from None


def _show_common(key: str, value: Any, *, as_json: bool) -> None:
    from dist_checkpointing.tools.inspect import plain_state  # noqa: PLC0415 - imports torch

    if as_json:
        print_json({"key": key, "type": plain_state.type_text(value), "value": value})
        return
    say(painted(one_line(key), "bold"))
    say(f"common state, {plain_state.type_text(value)}\n")
    _print_value(value)


def _print_value(value: Any) -> None:
    text = pprint.pformat(value, width=terminal_width() or _PIPE_WIDTH, compact=True)
    lines = text.split("\n")
    for line in lines[:_MOST_LINES]:
        say(one_line(line))
    if len(lines) > _MOST_LINES:
        say(painted(f"... {len(lines) - _MOST_LINES:,} more lines", "dim"))
