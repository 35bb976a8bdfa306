"""The colours of ranks and dtypes on the page."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable

from dist_checkpointing.tools.map.contents import MappedTensor

_FEW = ("#3b7dd8", "#e08a1e", "#2e9e78", "#c2569b", "#8a6fd1", "#c9b028", "#d1553f", "#4fb3d1")


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
    """A colour for every rank that wrote a part of any of them."""
    ranks = sorted({rank for t in tensors for writers in set(t.writers) for rank in writers})
    return dict(zip(ranks, palette(len(ranks)), strict=True))
