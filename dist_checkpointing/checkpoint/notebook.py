"""How a notebook shows a checkpoint: a tree of its keys, with a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Final

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.format.index import Index, StoredTensor

_MOST_SHOWN: Final = 2000
_MOST_LEVELS: Final = 20

_OPEN_TENSORS: Final = 20
"""A group with no more tensors than this is shown open."""

_STYLE: Final = """<style>
.dckpt{font-size:13px;line-height:1.5}.dckpt details,.dckpt p{margin:0 0 0 1.2em;padding:0}
.dckpt summary{cursor:pointer;margin-left:-1.2em}.dckpt small{opacity:.65;margin-left:.6em}
.dckpt input{margin:.3em 0;width:20em;max-width:90%}
</style>"""
# A tensor is hidden unless its key holds the text; a group, unless it holds a tensor that is shown.
_SEARCH: Final = """
const box = this.parentNode, text = this.value.toLowerCase();
for (const one of box.querySelectorAll('p[data-key]'))
  one.hidden = !one.dataset.key.toLowerCase().includes(text);
for (const group of box.querySelectorAll('details')) {
  group.hidden = !group.querySelector('p[data-key]:not([hidden])');
  if (text) group.open = true;
}"""


@dataclass(slots=True)
class _Group:
    """The tensors whose keys begin alike."""

    count: int = 0
    num_bytes: int = 0
    groups: dict[str, _Group] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def add(self, stored: StoredTensor) -> None:
        *path, name = stored.key.split(".", _MOST_LEVELS)
        group = self
        for part in path:
            group.count, group.num_bytes = group.count + 1, group.num_bytes + stored.num_bytes
            group = group.groups.setdefault(part, _Group())
        group.count, group.num_bytes = group.count + 1, group.num_bytes + stored.num_bytes
        group.tensors[name] = stored

    @property
    def text(self) -> str:
        tensors = f"{self.count:,} tensor{'' if self.count == 1 else 's'}"
        return f"{tensors}, {bytes_text(self.num_bytes)}"

    def lines(self) -> Iterator[str]:
        for name, group in self.groups.items():
            state = " open" if group.count <= _OPEN_TENSORS else ""
            yield f"<details{state}><summary>{escape(name)}<small>{group.text}</small></summary>"
            yield from group.lines()
            yield "</details>"
        for name, stored in self.tensors.items():
            what = f"{stored.dtype.name}{list(stored.global_shape)}, {bytes_text(stored.num_bytes)}"
            key = escape(stored.key)
            yield f'<p data-key="{key}" title="{key}">{escape(name)}<small>{what}</small></p>'


def html_of(path: str, backend: str, index: Index) -> str:
    """A checkpoint as a fragment of HTML; a large one in part."""
    tree, shown = _Group(), _Group()
    for number, key in enumerate(index):
        stored = index[key]
        tree.add(stored)
        if number < _MOST_SHOWN:
            shown.add(stored)
    search = f'<input type="search" placeholder="Search keys" oninput="{escape(_SEARCH)}">'
    hidden = tree.count - shown.count
    more = f"<p>and {hidden:,} tensors more, which are not shown</p>" if hidden else ""
    head = f"<b>{escape(path)}</b><small>{escape(backend)}, {tree.text}</small>"
    lines = "".join(shown.lines())
    return f'<div class="dckpt">{_STYLE}{head}<br>{search}{lines}{more}</div>'
