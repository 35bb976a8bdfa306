from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

from dist_checkpointing.format import Box
from dist_checkpointing.tools.map import (
    CheckpointMap,
    MappedTensor,
    page_data,
    palette,
    render_page,
)

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


def test_an_empty_checkpoint_has_a_page() -> None:
    assert page_data(CheckpointMap("c", "zarr 2", ()))["tensors"] == []
    assert parsed(render_page(CheckpointMap("c", "zarr 2", ()))).links == []


def test_colours_are_distinct() -> None:
    for count in (1, 8, 9, 100):
        colours = palette(count)
        assert len(set(colours)) == len(colours) == count
        assert all(a != b for a, b in pairwise(colours))
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
