from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_checkpointing.format.geometry import Box
from dist_checkpointing.tools.map import CheckpointMap, MappedTensor
from dist_checkpointing.tools.map.chunk_grid import grid_picture
from dist_checkpointing.tools.map.drawing import Drawing, Label, Rect, palette
from dist_checkpointing.tools.map.page import page_data, render_page
from dist_checkpointing.tools.map.svg import render_svg
from dist_checkpointing.tools.map.treemap import overview, squarify

EVIL = "a</script><script>alert(1)</script>&<!--\x00\x1b[31m\n\u2028"


def tensor(key: str, shape: Any, chunk: Any, writers: Any) -> MappedTensor:
    return MappedTensor(key, "float32", 4, shape, chunk, (), tuple(writers))


def some_map() -> CheckpointMap:
    pieces = ((Box((0, 0), (1, 4)), Box((1, 0), (1, 1))), (Box((1, 1), (1, 3)),))
    return CheckpointMap(
        "run/1000",
        "zarr 2",
        (
            tensor("m.a", (8, 6), (4, 3), [(0,), (0,), (1,), (0, 1)]),
            tensor("m.b", (100,), (10,), [(r,) for r in range(10)]),
            tensor("m.empty", (0, 3), (1, 3), []),
            tensor("m.scalar", (), (), [()]),
            MappedTensor("o.pieces", "bfloat16", 2, (2, 4), None, pieces, ((0,), (1,))),
            tensor(EVIL, (2, 3, 4), (1, 3, 2), [(0,), (1,), (2,), (3,)]),
        ),
    )


# The page.


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.links += [f"{tag} {name}" for name in names if name in ("src", "href", "action")]
        if tag in ("link", "img", "iframe", "object", "base"):
            self.links.append(tag)
        if tag == "script":
            self.scripts.append(names)
            self._inside = names.get("type") == "application/json"

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data


def parsed(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    return parser


def test_the_page_holds_its_data_and_no_key_breaks_out() -> None:
    chunks = some_map()
    page = parsed(render_page(chunks))
    assert [script.get("type") for script in page.scripts] == ["application/json", None]
    data = json.loads(page.data)
    assert data == json.loads(json.dumps(page_data(chunks)))
    assert [row["key"] for row in data["tensors"]] == [tensor.key for tensor in chunks.tensors]
    first, second, empty, scalar, pieces, _ = data["tensors"]
    assert (first["shape"], first["chunk"], first["bytes"]) == ([8, 6], [4, 3], 192)
    assert _unpacked(data, first) == [[0], [0], [1], [0, 1]]
    assert _unpacked(data, second) == [[rank] for rank in range(10)]
    assert _unpacked(data, empty) == []
    assert _unpacked(data, scalar) == [[]]
    assert pieces["pieces"] == [[[[0, 0], [1, 4]], [[1, 0], [1, 1]]], [[[1, 1], [1, 3]]]]
    assert [rank for rank, _ in data["ranks"]] == list(range(10))
    assert [name for name, _ in data["dtypes"]] == ["bfloat16", "float32"]


def _unpacked(data: Any, row: Any) -> list[list[int]]:
    return [data["writers"][number] for number, count in row["writers"] for _ in range(count)]


def test_the_page_loads_nothing() -> None:
    text = render_page(some_map())
    assert parsed(text).links == []
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert "default-src 'none'" in text


def test_a_page_of_thousands_stays_small() -> None:
    writers = [(r // 8,) for r in range(64)]
    tensors = tuple(tensor(f"layer.{i}.w", (64, 8), (1, 8), writers) for i in range(5000))
    assert len(render_page(CheckpointMap("c", "zarr 2", tensors))) < 2_000_000


# Pictures.


def rects(drawing: Drawing) -> list[Rect]:
    return [shape for shape in drawing.shapes if isinstance(shape, Rect)]


def labels(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Label)]


@settings(deadline=None)
@given(
    st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60),
    st.floats(1, 2000),
    st.floats(1, 2000),
)
def test_tiles_fill_the_place_and_have_their_shares(
    weights: list[float], width: float, height: float
) -> None:
    weights.sort(reverse=True)
    places = squarify(weights, (10.0, 20.0, width, height))
    area = width * height
    for weight, (x, y, w, h) in zip(weights, places, strict=True):
        assert w * h == pytest.approx(area * weight / sum(weights), rel=1e-6)
        assert x >= 10 - 1e-6 * width
        assert y >= 20 - 1e-6 * height
        assert x + w <= 10 + width * (1 + 1e-6)
        assert y + h <= 20 + height * (1 + 1e-6)
    assert sum(w * h for _, _, w, h in places) == pytest.approx(area)


def test_tiles_do_not_overlap() -> None:
    places = squarify([7.0, 5, 5, 3, 2, 1, 1], (0.0, 0.0, 60.0, 40.0))
    for i, (ax, ay, aw, ah) in enumerate(places):
        for bx, by, bw, bh in places[i + 1 :]:
            apart = ax + aw <= bx + 1e-9 or bx + bw <= ax + 1e-9
            assert apart or ay + ah <= by + 1e-9 or by + bh <= ay + 1e-9


def test_the_overview_shows_every_tensor_its_writers_and_a_legend() -> None:
    drawing = overview(some_map())
    texts = labels(drawing)
    assert texts[0] == "run/1000"
    assert "6 tensors" in texts[1]
    assert "written by 10 ranks" in texts[1]
    assert {"a", "b"} <= set(texts)
    assert any(text.startswith("rank 9") for text in texts)
    assert any(text.startswith("writer not recorded") for text in texts)
    assert any(text.startswith("Stripes") for text in texts)
    for rect in rects(drawing):
        assert rect.x >= 0
        assert rect.x + rect.width <= drawing.width
        assert rect.y + rect.height <= drawing.height


def test_an_empty_checkpoint_has_a_picture() -> None:
    assert "0 tensors" in labels(overview(CheckpointMap("c", "zarr 2", ())))[1]
    render_page(CheckpointMap("c", "zarr 2", ()))


def one(mapped: MappedTensor) -> Drawing:
    return grid_picture(CheckpointMap("run/1000", "zarr 2", (mapped,)))


def test_a_grid_is_to_scale_and_in_the_colours_of_its_writers() -> None:
    drawing = one(tensor("w", (8, 12), (4, 4), [(rank,) for rank in range(6)]))
    colours = palette(6)
    cells = [rect for rect in rects(drawing) if rect.fill in colours][:6]
    assert [rect.fill for rect in cells] == colours
    assert {(round(c.width, 6), round(c.height, 6)) for c in cells} == {
        (round(cells[0].width, 6), round(cells[0].width, 6))
    }
    texts = labels(drawing)
    assert {"0", "4", "8", "12", "rank 5", "axis 0 ↓", "axis 1 →"} <= set(texts)
    assert any("2x3 chunks of 4x4" in text for text in texts)
    assert "To scale." in texts


def test_pieces_are_drawn_where_they_are() -> None:
    drawing = one(some_map().tensors[4])
    cells = [rect for rect in rects(drawing) if rect.fill in palette(2)]
    first, second, third = cells[:3]
    assert first.width == pytest.approx(4 * second.width)
    assert third.width == pytest.approx(3 * second.width)
    assert (second.y, second.x + second.width) == pytest.approx((third.y, third.x))
    assert (first.fill, second.fill, third.fill) == (palette(2)[0], palette(2)[0], palette(2)[1])


def test_of_many_axes_the_cut_ones_are_drawn() -> None:
    drawing = one(tensor("w", (2, 3, 4), (1, 3, 2), [(0,), (1,), (2,), (3,)]))
    assert {"axis 0 ↓", "axis 2 →"} <= set(labels(drawing))
    hidden = one(tensor("w", (2, 4, 6), (1, 2, 2), [(r,) for r in range(12)]))
    assert any("Only index 0 of axis 0 (of 2) is shown" in text for text in labels(hidden))


@pytest.mark.parametrize("number", range(6))
def test_every_kind_of_tensor_has_a_picture_that_is_xml(number: int) -> None:
    drawing = one(some_map().tensors[number])
    root = ET.fromstring(render_svg(drawing))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    shown = len([element for element in root if element.tag.endswith("rect")])
    assert shown == len(rects(drawing)) + 1
    assert float(root.attrib["height"]) == pytest.approx(drawing.height, abs=1)


def test_a_key_is_text_in_an_svg() -> None:
    root = ET.fromstring(render_svg(overview(some_map())))
    assert {element.tag.rpartition("}")[2] for element in root} == {"rect", "text"}


def test_colours_are_distinct() -> None:
    for count in (1, 8, 9, 100):
        colours = palette(count)
        assert len(set(colours)) == len(colours) == count
        assert all(a != b for a, b in pairwise(colours))
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_a_png_is_as_large_as_the_drawing() -> None:
    pytest.importorskip("matplotlib")
    from dist_checkpointing.tools.map.png import render_png

    drawing = one(tensor("cost $x^2$", (8, 12), (4, 4), [(rank,) for rank in range(6)]))
    data = render_png(drawing)
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == pytest.approx((2 * drawing.width, 2 * drawing.height), abs=2)
