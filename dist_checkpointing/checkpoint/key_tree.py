"""The keys of a checkpoint as a tree, and how a notebook shows it, with a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from typing import Any, Final

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.errors import counted
from dist_checkpointing.format.index import Index

_MOST_SHOWN: Final = 2000
_MAX_LEVELS: Final = 100
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
class Branch:
    """One part of the keys, the entry with exactly this key, and the parts below it by name.

    The sums are of the entries here and below.
    """

    name: str
    below: dict[str, Branch] = field(default_factory=dict)
    entry: Any = None
    num_entries: int = 0
    num_bytes: int = 0


def as_tree(entries: Iterable[Any]) -> Branch:
    """The entries, which have a ``key`` and ``num_bytes``, as a tree of the parts of their keys.

    Parts are separated by ``.`` and ``/``.
    """
    root = Branch("")
    for entry in entries:
        path = [root]
        for name in entry.key.replace("/", ".").split(".", _MAX_LEVELS):
            below = path[-1].below
            if name not in below:
                below[name] = Branch(name)
            path.append(below[name])
        # If two keys differ only in their separators, the second gets its own line.
        if path[-1].entry is not None:
            path[-1] = path[-2].below.setdefault(entry.key, Branch(entry.key))
        path[-1].entry = entry
        for branch in path:
            branch.num_entries += 1
            branch.num_bytes += entry.num_bytes
    return root


def html_of(path: str, backend: str, index: Index) -> str:
    """A checkpoint as a fragment of HTML; a large one in part."""
    num_bytes = sum(index[key].num_bytes for key in index)
    search = f'<input type="search" placeholder="Search keys" oninput="{escape(_SEARCH)}">'
    lines = "".join(_lines(as_tree(index[key] for key in islice(index, _MOST_SHOWN))))
    hidden = len(index) - _MOST_SHOWN
    more = f"<p>and {counted(hidden, 'tensor')} more, which are not shown</p>" if hidden > 0 else ""
    about = f"{escape(backend)}, {_sum_text(len(index), num_bytes)}"
    head = f"<b>{escape(path)}</b><small>{about}</small>"
    return f'<div class="dckpt">{_STYLE}{head}<br>{search}{lines}{more}</div>'


def _sum_text(count: int, num_bytes: int) -> str:
    return f"{counted(count, 'tensor')}, {bytes_text(num_bytes)}"


def _lines(branch: Branch) -> Iterator[str]:
    for name, group in branch.below.items():
        if group.below:
            state = " open" if group.num_entries <= _OPEN_TENSORS else ""
            text = _sum_text(group.num_entries, group.num_bytes)
            yield f"<details{state}><summary>{escape(name)}<small>{text}</small></summary>"
            yield from _lines(group)
            yield "</details>"
    for name, leaf in branch.below.items():
        if (stored := leaf.entry) is not None:
            what = f"{stored.dtype.name}{list(stored.global_shape)}, {bytes_text(stored.num_bytes)}"
            key = escape(stored.key)
            yield f'<p data-key="{key}" title="{key}">{escape(name)}<small>{what}</small></p>'
