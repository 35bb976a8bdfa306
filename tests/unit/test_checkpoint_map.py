from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

from dist_checkpointing.tools.map import palette, render_page

EVIL = "a</script><script>alert(1)</script>&<!--\x00\x1b[31m\n\u2028"


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


def test_no_key_breaks_out_of_the_page_and_it_loads_nothing() -> None:
    data = {"name": EVIL, "tensors": [{"key": EVIL, "shape": [2]}]}
    text = render_page(data)
    page = parsed(text)
    assert [script.get("type") for script in page.scripts] == ["application/json", None]
    assert json.loads(page.data) == data
    assert not {*"<>&"} & {*page.data}
    assert page.links == []
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert "default-src 'none'" in text


def test_colours_are_distinct() -> None:
    for count in (1, 8, 9, 100):
        colours = palette(count)
        assert len(set(colours)) == len(colours) == count
        assert all(a != b for a, b in pairwise(colours))
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
