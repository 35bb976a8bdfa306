"""Names like the one that was not found."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

_MOST_COMPARED = 500


def near_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that are most like ``name``, best first; none if none is like it."""
    names = list(known)
    if len(names) > _MOST_COMPARED:
        # difflib takes seconds for 100,000 names: first those that begin or end alike.
        names = heapq.nsmallest(_MOST_COMPARED, names, key=lambda other: _distance(name, other))
    folded: dict[str, str] = {}
    for other in names:
        folded.setdefault(other.casefold(), other)
    wanted = name.casefold()
    near = difflib.get_close_matches(wanted, folded, n=count, cutoff=0.6)
    inside = sorted((other for other in folded if wanted and wanted in other), key=len)
    chosen = list(dict.fromkeys([*near, *inside]))[:count]
    return [folded[other] for other in chosen]


def hint(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or nothing if there is nothing like it."""
    near = near_names(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _distance(name: str, other: str) -> int:
    if name in other:
        return len(other) - len(name) - 1000
    same = _num_alike(name, other) + _num_alike(name[::-1], other[::-1])
    return abs(len(other) - len(name)) - 2 * same


def _num_alike(a: str, b: str) -> int:
    """How many characters they begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))
