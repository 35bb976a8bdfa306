"""The overview: every tensor a tile whose area is its size, below the prefixes of its key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.format.geometry import most_cut_axes
from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor, Writers
from dist_checkpointing.tools.map.drawing import (
    GROUP,
    INK,
    LINE,
    PAPER,
    SOFT,
    Drawing,
    Label,
    Rect,
    facts_of,
    fitted,
    legend,
    painted,
    rank_colours,
    text_width,
)

_WIDTH, _HEIGHT, _MARGIN, _TOP = 1600.0, 1000.0, 24.0, 76.0
_HEADING = 17.0
_SMALLEST = 0.25
"""Tiles narrower than this, in pixels, cannot be seen."""
_MOST_CELLS = 4096
_DIGITS = re.compile(r"([0-9]+)")
_SEPARATORS = re.compile(r"[./]")

Place = tuple[float, float, float, float]
"""x, y, width, height"""


def squarify(weights: Sequence[float], place: Place) -> list[Place]:
    """Rectangles that tile ``place``, each with its share of the area, as square as can be.

    Args:
        weights: positive, largest first.
        place: to fill.
    """
    x, y, width, height = place
    scale = width * height / sum(weights) if weights else 0.0
    areas = [weight * scale for weight in weights]
    placed: list[Place] = []
    begin = 0
    while begin < len(areas):
        side = max(1e-9, min(width, height))
        end, area, worst = begin, 0.0, float("inf")
        while end < len(areas):
            wider = area + areas[end]
            ratio = max(side**2 * areas[begin] / wider**2, wider**2 / (side**2 * areas[end]))
            if ratio > worst:
                break
            end, area, worst = end + 1, wider, ratio
        thick, along = area / side, 0.0
        for each in areas[begin:end]:
            length = each / thick
            if width >= height:
                placed.append((x, y + along, thick, length))
            else:
                placed.append((x + along, y, length, thick))
            along += length
        if width >= height:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        begin = end
    return placed


@dataclass(slots=True)
class _Node:
    name: str
    children: dict[str, _Node] = field(default_factory=dict)
    leaves: list[tuple[str, MappedTensor]] = field(default_factory=list)
    num_bytes: int = 0


def _tree(tensors: Sequence[MappedTensor]) -> _Node:
    root = _Node("")
    for tensor in tensors:
        *above, name = _SEPARATORS.split(tensor.key)
        node = root
        node.num_bytes += tensor.num_bytes
        for part in above:
            node = node.children.setdefault(part, _Node(part))
            node.num_bytes += tensor.num_bytes
        node.leaves.append((name, tensor))
    return root


def overview(chunks: CheckpointMap) -> Drawing:
    """The picture of a whole checkpoint. A pure function of the map."""
    colours = rank_colours(chunks.tensors)
    shapes: list[Rect | Label] = [
        Label(_MARGIN, 26, fitted(chunks.name, _WIDTH - 2 * _MARGIN, 19), 19, bold=True),
        Label(_MARGIN, 52, facts_of(chunks), 13, SOFT),
    ]
    place = (_MARGIN, _TOP, _WIDTH - 2 * _MARGIN, _HEIGHT - _TOP)
    root = _tree(chunks.tensors)
    if chunks.tensors:
        least = 1.0 + root.num_bytes * 2e-5  # an empty tensor can be seen as well
        headings: list[Rect | Label] = []
        tiles: list[Rect | Label] = []
        for shape, is_tile in _laid_out(root, place, least, colours):
            (tiles if is_tile else headings).append(shape)
        shapes += [*headings, *tiles]
    keys, end = legend(chunks.tensors, colours, _MARGIN, _HEIGHT + 16, _WIDTH - 2 * _MARGIN)
    return Drawing(_WIDTH, end + 8, (*shapes, *keys))


def _laid_out(
    node: _Node, place: Place, least: float, colours: dict[int, str]
) -> Iterator[tuple[Rect | Label, bool]]:
    entries: list[tuple[float, str, _Node | MappedTensor]] = [
        (tensor.num_bytes + least, name, tensor) for name, tensor in node.leaves
    ]
    for child in node.children.values():
        name, inner = child.name, child
        while len(inner.children) == 1 and not inner.leaves:
            (inner,) = inner.children.values()
            name = f"{name}.{inner.name}"
        if not inner.children and len(inner.leaves) == 1:
            ((last, tensor),) = inner.leaves
            entries.append((tensor.num_bytes + least, f"{name}.{last}", tensor))
        else:
            entries.append((inner.num_bytes + least, name, inner))
    entries.sort(key=lambda entry: (-entry[0], _counted(entry[1])))
    places = squarify([weight for weight, _, _ in entries], place)
    for (_, name, entry), (x, y, width, height) in zip(entries, places, strict=True):
        if min(width, height) < _SMALLEST:
            continue
        if isinstance(entry, MappedTensor):
            for shape in _tile(entry, name, (x, y, width, height), colours):
                yield shape, True
        elif width < 24 or height < 30:
            yield from _laid_out(entry, (x, y, width, height), least, colours)
        else:
            for shape in _heading(entry, name, (x, y, width, height)):
                yield shape, False
            inside = (x + 2, y + _HEADING, width - 4, height - _HEADING - 2)
            yield from _laid_out(entry, inside, least, colours)


def _counted(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


def _heading(node: _Node, name: str, place: Place) -> Iterator[Rect | Label]:
    x, y, width, height = place
    yield Rect(x + 0.5, y + 0.5, width - 1, height - 1, GROUP, LINE)
    text, size = fitted(name, width - 10), bytes_text(node.num_bytes)
    if text:
        yield Label(x + 5, y + 9, text)
    left = text_width(text) + 14
    if text and left + text_width(size) + 6 < width:
        yield Label(x + left, y + 9, size, colour=SOFT)


def _tile(
    tensor: MappedTensor, name: str, place: Place, colours: dict[int, str]
) -> Iterator[Rect | Label]:
    gap = 1.0 if min(place[2:]) > 5 else 0.0
    x, y = place[0] + gap / 2, place[1] + gap / 2
    width, height = place[2] - gap, place[3] - gap
    rows, columns, writers = _plane(tensor)
    if rows <= height / 2 and columns <= width / 2 and rows * columns <= _MOST_CELLS:
        wide, high = width / columns, height / rows
        line = PAPER if len(writers) > 1 and min(wide, high) > 4 else None
        for number, own in enumerate(writers):
            left, top = x + number % columns * wide, y + number // columns * high
            yield from painted(left, top, (wide, high), own, colours)
            if line is not None:
                yield Rect(left, top, wide, high, "none", line)
    else:
        at = 0.0
        for own, share in _shares(tensor):
            yield from painted(x, y + height * at, (width, height * share), own, colours)
            at += share
    text = fitted(name, width - 12)
    if text and width > 44 and height > 16:
        second = bytes_text(tensor.num_bytes)
        if height <= 36 or text_width(second) > width - 12:
            second = ""
        middle_x, middle_y = x + width / 2, y + height / 2
        wide = max(text_width(text), text_width(second)) + 8
        high = 31.0 if second else 15.0
        yield Rect(middle_x - wide / 2, middle_y - high / 2, wide, high, PAPER)
        top = middle_y - 7 if second else middle_y
        yield Label(middle_x, top, text, colour=INK, anchor="middle")
        if second:
            yield Label(middle_x, middle_y + 8, second, colour=SOFT, anchor="middle")


def _plane(tensor: MappedTensor) -> tuple[int, int, list[Writers]]:
    """Rows and columns of a tile, and who wrote each: the first cells of the two most cut axes."""
    if tensor.chunk_shape is None or not tensor.writers:
        return _MOST_CELLS, _MOST_CELLS, []
    counts = tensor.counts
    row, column = drawn_axes(tensor)
    strides = [1] * len(counts)
    for axis in reversed(range(len(counts) - 1)):
        strides[axis] = strides[axis + 1] * counts[axis + 1]
    rows, down = (1, 0) if row is None else (counts[row], strides[row])
    columns, across = (1, 0) if column is None else (counts[column], strides[column])
    if rows * columns > _MOST_CELLS:
        return rows, columns, []
    cells = [tensor.writers[r * down + c * across] for r in range(rows) for c in range(columns)]
    return rows, columns, cells


def drawn_axes(tensor: MappedTensor) -> tuple[int | None, int | None]:
    """The axes that go down and across: the two that are cut most, in their order."""
    ndim = len(tensor.shape)
    cuts: Sequence[int]
    if tensor.chunk_shape is not None:
        cuts = tensor.counts
    else:
        boxes = [box for piece in tensor.pieces for box in piece]
        cuts = [len({box.offset[axis] for box in boxes}) for axis in range(ndim)]
    row, column = [None, None, *most_cut_axes(cuts)][-2:]
    return row, column


def _shares(tensor: MappedTensor) -> list[tuple[Writers, float]]:
    if not tensor.writers:
        return [((), 1.0)]
    counts: dict[Writers, int] = {}
    for writers in tensor.writers:
        counts[writers] = counts.get(writers, 0) + 1
    return [(writers, n / len(tensor.writers)) for writers, n in sorted(counts.items())]
