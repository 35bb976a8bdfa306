"""A still picture as values: what ``svg`` and ``png`` draw."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor, Writers

INK, SOFT, LINE, GROUP, PAPER, UNKNOWN = (
    "#1c2430", "#5d6878", "#c9d0da", "#eceff4", "#ffffff", "#a9b1bd",
)  # fmt: skip
_FEW = ("#3b7dd8", "#e08a1e", "#2e9e78", "#c2569b", "#8a6fd1", "#c9b028", "#d1553f", "#4fb3d1")
_CHARACTER = 0.58
"""Width of a character of the font, on average, for a size of one."""
_LEGEND_ROW = 20.0
_MOST_IN_LEGEND = 64


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle, in pixels from the top left; ``line`` is the colour of its border."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text, ``y`` at half its height; ``anchor`` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = INK
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes in the order in which they are painted."""

    width: float
    height: float
    shapes: tuple[Rect | Label, ...]


def palette(count: int) -> list[str]:
    """So many colours: distinct ones for a few, the colour circle for many."""
    if count <= len(_FEW):
        return list(_FEW[:count])
    colours = []
    for number in range(count):
        lightness = (0.46, 0.60, 0.53)[number % 3]
        rgb = colorsys.hls_to_rgb(number / count, lightness, 0.62)
        colours.append("#" + "".join(f"{round(255 * part):02x}" for part in rgb))
    return colours


def rank_colours(tensors: Iterable[MappedTensor]) -> dict[int, str]:
    """A colour for every rank that wrote any of them."""
    ranks = sorted({rank for t in tensors for writers in set(t.writers) for rank in writers})
    return dict(zip(ranks, palette(len(ranks)), strict=True))


def painted(
    x: float, y: float, size: tuple[float, float], writers: Writers, colours: dict[int, str]
) -> list[Rect]:
    """A chunk: in one colour, or in stripes if several ranks wrote it."""
    own = [colours[rank] for rank in writers[:16]] or [UNKNOWN]
    width = size[0] / len(own)
    return [Rect(x + i * width, y, width, size[1], colour) for i, colour in enumerate(own)]


def text_width(text: str, size: float = 12.0) -> float:
    """About how wide a text is, in pixels."""
    return len(text) * size * _CHARACTER


def fitted(text: str, width: float, size: float = 12.0) -> str:
    """The text, or its beginning, as far as it fits; nothing if hardly anything does."""
    if text_width(text, size) <= width:
        return text
    kept = int(width / (size * _CHARACTER)) - 1
    return f"{text[:kept]}…" if kept > 2 else ""


def facts_of(chunks: CheckpointMap) -> str:
    """One line about all of it."""
    ranks = len(rank_colours(chunks.tensors))
    size = bytes_text(sum(tensor.num_bytes for tensor in chunks.tensors))
    parts = sum(len(tensor.writers) for tensor in chunks.tensors)
    writers = f"written by {ranks} ranks" if ranks != 1 else "written by 1 rank"
    return (
        f"{chunks.backend} · {len(chunks.tensors)} tensors · {size} · {parts} chunks · "
        f"{writers if ranks else 'writer not recorded'}"
    )


def legend(
    tensors: Sequence[MappedTensor], colours: dict[int, str], x: float, y: float, width: float
) -> tuple[list[Rect | Label], float]:
    """Who wrote how much, from ``y`` on; and where it ends."""
    sums: dict[int, float] = {}
    size: float
    for tensor in tensors:
        for boxes, writers in tensor.parts():
            size = sum(box.num_elements for box in boxes) * tensor.itemsize
            for rank in writers or (-1,):
                sums[rank] = sums.get(rank, 0) + size / max(1, len(writers))
    shapes: list[Rect | Label] = []
    left = x
    entries = sorted(sums.items())
    for rank, size in entries[:_MOST_IN_LEGEND]:
        name = "writer not recorded" if rank < 0 else f"rank {rank}"
        text = f"{name}  {bytes_text(size)}"
        needed = 20 + text_width(text) + 14
        if left > x and left + needed > x + width:
            left, y = x, y + _LEGEND_ROW
        shapes.append(Rect(left, y, 13, 13, colours.get(rank, UNKNOWN)))
        shapes.append(Label(left + 19, y + 6.5, text, colour=SOFT))
        left += needed
    if len(entries) > _MOST_IN_LEGEND:
        more = f"and {len(entries) - _MOST_IN_LEGEND} more ranks"
        shapes.append(Label(x, y + _LEGEND_ROW + 6.5, more, colour=SOFT))
        y += _LEGEND_ROW
    if any(len(writers) > 1 for tensor in tensors for writers in set(tensor.writers)):
        note = "Stripes: several ranks wrote parts of one chunk."
        shapes.append(Label(x, y + _LEGEND_ROW + 6.5, note, colour=SOFT))
        y += _LEGEND_ROW
    return shapes, y + _LEGEND_ROW
