"""A web page that shows a map: one file, which loads nothing else."""

from __future__ import annotations

import colorsys
import html
import itertools
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from dist_checkpointing.tools.map.contents import CheckpointMap, MappedTensor, Writers

_FEW = ("#3b7dd8", "#e08a1e", "#2e9e78", "#c2569b", "#8a6fd1", "#c9b028", "#d1553f", "#4fb3d1")

_SCRIPTS = (
    "contents.js",
    "painting.js",
    "prefixes.js",
    "treemap.js",
    "chunks.js",
    "chunk_grid.js",
    "table.js",
    "steps.js",
    "begin.js",
)
"""The scripts in this order, in one scope: each can use the definitions of the earlier ones."""


def render_page(chunks: CheckpointMap) -> str:
    """The HTML of the page. A pure function of the map."""
    parts = {
        "TITLE": html.escape(f"{chunks.name}: chunks"),
        "STYLE": _resource("page.css"),
        "DATA": _script_json(page_data(chunks)),
        "SCRIPT": _script(),
    }
    text = _resource("page.html")
    for name, content in parts.items():
        before, _, after = text.partition(f"@{name}@")
        text = before + content + after
    return text


def page_data(chunks: CheckpointMap) -> dict[str, Any]:
    """The data for the script of the page; chunks in a row with the same writers are one entry."""
    numbers: dict[Writers, int] = {}
    tensors = [_tensor(tensor, numbers) for tensor in chunks.tensors]
    dtypes = sorted({tensor.dtype for tensor in chunks.tensors})
    return {
        "name": chunks.name,
        "backend": chunks.backend,
        "writers": [list(writers) for writers in numbers],
        "ranks": list(rank_colours(chunks.tensors).items()),
        "dtypes": list(zip(dtypes, palette(len(dtypes)), strict=True)),
        "tensors": tensors,
    }


def _tensor(tensor: MappedTensor, numbers: dict[Writers, int]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": tensor.key,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "bytes": tensor.num_bytes,
        "writers": _runs([numbers.setdefault(w, len(numbers)) for w in tensor.writers]),
    }
    if tensor.chunk_shape is not None:
        return row | {"chunk": tensor.chunk_shape}
    pieces = [[(box.offset, box.shape) for box in piece] for piece in tensor.pieces]
    return row | {"pieces": pieces}


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [(number, len(list(run))) for number, run in itertools.groupby(numbers)]


def _script_json(content: Any) -> str:
    """JSON that cannot end the script element around it."""
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    # Not as modules, because the page has no files to import.
    body = "\n".join(map(_resource, _SCRIPTS))
    return f'"use strict";\n(() => {{\n{body}}})();'


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def palette(count: int) -> list[str]:
    """``count`` colours: chosen ones if they are few, else from the colour circle."""
    if count <= len(_FEW):
        return list(_FEW[:count])
    colours = []
    for number in range(count):
        lightness = (0.46, 0.60, 0.53)[number % 3]
        rgb = colorsys.hls_to_rgb(number / count, lightness, 0.62)
        colours.append("#" + "".join(f"{round(255 * part):02x}" for part in rgb))
    return colours


def rank_colours(tensors: Iterable[MappedTensor]) -> dict[int, str]:
    """A colour for every rank that wrote a part of the tensors."""
    ranks = sorted({rank for t in tensors for writers in set(t.writers) for rank in writers})
    return dict(zip(ranks, palette(len(ranks)), strict=True))
