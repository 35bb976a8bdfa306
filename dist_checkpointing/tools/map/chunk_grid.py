"""One tensor: its chunks to scale, who wrote them, and where the cuts are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor
from dist_checkpointing.tools.map.drawing import (
    INK,
    PAPER,
    SOFT,
    Drawing,
    Label,
    Rect,
    fitted,
    legend,
    painted,
    rank_colours,
    text_width,
)
from dist_checkpointing.tools.map.treemap import drawn_axes

_WIDTH, _MARGIN, _LEFT, _TOP = 1200.0, 24.0, 84.0, 124.0
_MOST_HEIGHT, _STRIP = 760.0, 150.0
_WIDEST, _TALLEST = 6.0, 1 / 2


def grid_picture(chunks: CheckpointMap) -> Drawing:
    """The picture of the one tensor of a map. A pure function of it."""
    (tensor,) = chunks.tensors
    colours = rank_colours(chunks.tensors)
    row, column = drawn_axes(tensor)
    extents = [1 if axis is None else tensor.shape[axis] for axis in (row, column)]
    width, height, is_to_scale = _size(extents[0], extents[1], is_strip=row is None)
    shapes: list[Rect | Label] = [
        Label(_MARGIN, 26, fitted(tensor.key, _WIDTH - 2 * _MARGIN, 19), 19, bold=True),
        Label(_MARGIN, 52, f"{chunks.name} · {chunks.backend} · {_facts(tensor)}", 13, SOFT),
        Label(_MARGIN, 72, _scale_text(tensor, row, column, is_to_scale=is_to_scale), 12, SOFT),
    ]
    body: list[Rect | Label] = []
    edges: tuple[set[int], set[int]] = (set(), set())
    if tensor.num_bytes:
        scale = (height / extents[0], width / extents[1])
        for number, (boxes, writers) in enumerate(tensor.parts()):
            size = bytes_text(sum(box.num_elements for box in boxes) * tensor.itemsize)
            name = _ranks_text(writers)
            for box in boxes:
                if not _is_in_front(box.offset, row, column):
                    continue
                spans = []
                for axis, own in zip((row, column), edges, strict=True):
                    begin = 0 if axis is None else box.offset[axis]
                    extent = 1 if axis is None else box.shape[axis]
                    own |= {begin, begin + extent}
                    spans.append((begin, extent))
                x, y = _LEFT + spans[1][0] * scale[1], _TOP + spans[0][0] * scale[0]
                wide, high = spans[1][1] * scale[1], spans[0][1] * scale[0]
                body += painted(x, y, (wide, high), writers, colours)
                if min(wide, high) > 3:
                    body.append(Rect(x, y, wide, high, "none", PAPER))
                body += _cell_text(x, y, (wide, high), [name, f"#{number} · {size}"])
    if row is not None:
        shapes += _ticks(sorted(edges[0]), extents[0], height, is_down=True)
        shapes.append(Label(_MARGIN, _TOP - 22, f"axis {row} ↓", colour=INK))
    if column is not None:
        shapes += _ticks(sorted(edges[1]), extents[1], width, is_down=False)
        shapes.append(Label(_LEFT, _TOP - 34, f"axis {column} →", colour=INK))
    if not tensor.num_bytes:
        shapes.append(Label(_LEFT, _TOP + 20, "This tensor has no elements.", colour=SOFT))
    keys, end = legend(chunks.tensors, colours, _MARGIN, _TOP + height + 26, _WIDTH - 2 * _MARGIN)
    return Drawing(_WIDTH, end + 8, (*shapes, *body, *keys))


def _size(rows: int, columns: int, *, is_strip: bool) -> tuple[float, float, bool]:
    room = _WIDTH - _LEFT - 2 * _MARGIN
    if is_strip or not rows or not columns:
        return room, _STRIP, is_strip
    ratio = columns / rows
    shown = min(max(ratio, _TALLEST), _WIDEST)
    width = min(room, _MOST_HEIGHT * shown)
    return width, width / shown, shown == ratio


def _is_in_front(offset: Ints, row: int | None, column: int | None) -> bool:
    """Whether a box lies in the first plane along the axes that are not drawn."""
    return all(start == 0 for axis, start in enumerate(offset) if axis not in (row, column))


def _facts(tensor: MappedTensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    if tensor.chunk_shape is None:
        cut = f"{len(tensor.pieces)} pieces"
    elif len(tensor.writers) <= 1:
        cut = "whole"
    else:
        counts = "x".join(map(str, tensor.counts))
        cut = f"{counts} chunks of {'x'.join(map(str, tensor.chunk_shape))}"
    return f"{tensor.dtype} {shape} · {bytes_text(tensor.num_bytes)} · {cut}"


def _scale_text(
    tensor: MappedTensor, row: int | None, column: int | None, *, is_to_scale: bool
) -> str:
    text = "To scale." if is_to_scale else "Not to scale: one axis is far longer than the other."
    others = [axis for axis in range(len(tensor.shape)) if axis not in (row, column)]
    cut = [a for a in others if tensor.chunk_shape is None or tensor.counts[a] > 1]
    if cut:
        places = ", ".join(f"axis {axis} (of {tensor.shape[axis]})" for axis in cut)
        text += f" Only index 0 of {places} is shown."
    return text


def _ranks_text(ranks: Sequence[int]) -> str:
    if not ranks:
        return "writer not recorded"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _cell_text(
    x: float, y: float, size: tuple[float, float], lines: Sequence[str]
) -> Iterator[Rect | Label]:
    width, height = size
    first, second = lines
    short = first.rpartition(" ")[2] if text_width(first) > width - 8 else first
    if text_width(short) > width - 4 or height < 15:
        return
    both = height > 44 and text_width(second) < width - 8
    wide = max(text_width(short), text_width(second) if both else 0) + 8
    middle_x, middle_y = x + width / 2, y + height / 2
    high = 32.0 if both else 14.0
    yield Rect(middle_x - wide / 2, middle_y - high / 2, wide, high, PAPER)
    yield Label(middle_x, middle_y - 8 if both else middle_y, short, anchor="middle")
    if both:
        yield Label(middle_x, middle_y + 8, second, colour=SOFT, anchor="middle")


def _ticks(
    edges: Sequence[int], extent: int, length: float, *, is_down: bool
) -> Iterator[Rect | Label]:
    room, last = (15.0 if is_down else 52.0), float("-inf")
    for edge in edges:
        at = edge * length / max(1, extent)
        if at < last + room:
            continue
        last = at
        if is_down:
            yield Label(_LEFT - 8, _TOP + at, str(edge), colour=SOFT, anchor="end")
        else:
            yield Label(_LEFT + at, _TOP - 12, str(edge), colour=SOFT, anchor="middle")
