"""How far the tensors of a checkpoint have moved since an earlier one."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES
from dist_checkpointing.tools.inspect.values import (
    slabs,
    stream_pairs,
    without_equal_fingerprints,
)


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the values of a tensor, or of several, have moved.

    Attributes:
        num_elements: Number of elements.
        num_changed: Number of elements with another value; NaN that stays NaN has not changed.
        num_not_finite: Number of elements that are NaN or infinite in one of the two, which the
            norms and ``max_change`` leave out.
        squares: Sums of squares: of the earlier values, of the later ones, and of the changes.
        max_change: Largest ``|later - earlier|``.
    """

    num_elements: int = 0
    num_changed: int = 0
    num_not_finite: int = 0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    max_change: float = 0.0

    @property
    def norms(self) -> tuple[float, float, float]:
        """L2 norms of the earlier values, of the later ones, and of the changes."""
        earlier, later, change = map(math.sqrt, self.squares)
        return earlier, later, change

    @property
    def relative(self) -> float:
        """Norm of the changes by the norm of the earlier values; infinity if those are all 0."""
        earlier, _, change = self.norms
        return change / earlier if earlier else math.inf if change else 0.0

    @property
    def fraction(self) -> float:
        """Fraction of the elements that changed."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    def with_more(self, other: Moved) -> Moved:
        """Both together."""
        first, second, third = (a + b for a, b in zip(self.squares, other.squares, strict=True))
        return Moved(
            self.num_elements + other.num_elements,
            self.num_changed + other.num_changed,
            self.num_not_finite + other.num_not_finite,
            (first, second, third),
            max(self.max_change, other.max_change),
        )


@dataclass(frozen=True, slots=True)
class Movement:
    """What moved between two checkpoints.

    Attributes:
        moved: Tensors of which an element changed, by key; those that moved most, relative to
            their norm, come first.
        num_same: Number of tensors of which no element changed.
        not_compared: Tensors that only one of the two has, or that have another shape.
    """

    moved: dict[str, Moved]
    num_same: int
    not_compared: tuple[str, ...]

    @property
    def total(self) -> Moved:
        """All tensors that moved, together."""
        total = Moved()
        for moved in self.moved.values():
            total = total.with_more(moved)
        return total


def movement(
    earlier: Checkpoint,
    later: Checkpoint,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    report: Callable[[int], None] = lambda _: None,
) -> Movement:
    """How far each tensor moved. Tensors with the same kept fingerprint are not read.

    Args:
        earlier: the checkpoint from which the tensors moved.
        later: the checkpoint to which they moved.
        memory_bytes: most bytes of values of both that are in memory at a time.
        report: called with the number of bytes of the later one that were read since the last call.

    Raises:
        CheckpointingException: if something cannot be read.
    """
    both = [k for k in later if k in earlier and later[k].shape == earlier[k].shape]
    found: dict[str, Moved] = {}

    def compare(key: str, _: Box, a: torch.Tensor, b: torch.Tensor) -> None:
        found[key] = found.get(key, Moved()).with_more(_moved(a, b))
        report(b.nbytes)

    to_read = without_equal_fingerprints(earlier, later, both)
    report(sum(later[key].num_bytes for key in set(both) - set(to_read)))
    stream_pairs(earlier, later, to_read, memory_bytes, compare)
    rows = [(key, moved) for key, moved in found.items() if moved.num_changed]
    rows.sort(key=lambda row: (-row[1].relative, -row[1].fraction, row[0]))
    others = dict.fromkeys([*earlier, *later])
    return Movement(
        dict(rows), len(both) - len(rows), tuple(key for key in others if key not in set(both))
    )


def _moved(a: torch.Tensor, b: torch.Tensor) -> Moved:
    total = Moved()
    for x, y in zip(slabs(a), slabs(b), strict=True):
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        changed = x != y
        # Changes of large integers are rounded, like their norms; whether they changed is exact.
        p, q = x.astype(wide), y.astype(wide)
        changed &= ~(np.isnan(p) & np.isnan(q))
        is_finite = np.isfinite(p) & np.isfinite(q)
        p, q = np.abs(p[is_finite]), q[is_finite]
        distance = np.abs(q - x.astype(wide)[is_finite])
        q = np.abs(q)
        total = total.with_more(
            Moved(
                x.size,
                int(np.count_nonzero(changed)),
                x.size - p.size,
                (float(p @ p), float(q @ q), float(distance @ distance)),
                float(distance.max()) if distance.size else 0.0,
            )
        )
    return total


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 16px 20px; }}
h1 {{ font-size: 18px; overflow-wrap: anywhere; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th, td {{ padding: 3px 12px 3px 4px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #8884; font-variant-numeric: tabular-nums; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 14em; }}
th {{ cursor: pointer; }}
meter {{ width: 8em; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
<p><input id="search" type="search" placeholder="Search keys" aria-label="Search keys"></p>
<div class="scroll"><table><thead><tr>{headers}</tr></thead>
<tbody>{rows}</tbody></table></div>
<script>
"use strict";
const body = document.querySelector("tbody"), rows = [...body.rows];
document.querySelector("#search").oninput = (event) => {{
  for (const row of rows) row.hidden = !row.dataset.key.includes(event.target.value);
}};
document.querySelectorAll("th").forEach((head, at) => {{
  const value = (row) => at ? Number(row.cells[at].dataset.value) : row.dataset.key;
  head.onclick = () => {{
    const sign = head.dataset.down ? 1 : -1;
    head.dataset.down = sign < 0 ? "1" : "";
    rows.sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    body.append(...rows);
  }};
}});
</script></body></html>
"""


def movement_page(found: Movement, title: str, summary: str) -> str:
    """A web page with a line for each tensor that moved; loads nothing from elsewhere."""
    names = ("tensor", "moved by", "", "norm before", "norm after", "norm of change", "max change",
             "changed", "not finite")  # fmt: skip
    most = max((m.relative for m in found.moved.values() if m.relative < math.inf), default=1.0)
    rows = (_row(key, moved, most) for key, moved in found.moved.items())
    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(summary),
        headers="".join(f"<th>{name}</th>" for name in names),
        rows="\n".join(rows),
    )


def _row(key: str, moved: Moved, most: float) -> str:
    share = min(moved.relative / most, 1.0)
    values: Iterable[tuple[float, str]] = (
        (moved.relative, percent_text(moved.relative)),
        (share, f'<meter value="{share:.4f}"></meter>'),
        *((norm, f"{norm:.4g}") for norm in moved.norms),
        (moved.max_change, f"{moved.max_change:.3g}"),
        (moved.fraction, percent_text(moved.fraction)),
        (moved.num_not_finite, f"{moved.num_not_finite:,}"),
    )
    cells = "".join(
        f'<td data-value="{"Infinity" if value == math.inf else value}">{text}</td>'
        for value, text in values
    )
    name = html.escape(key)
    return f'<tr data-key="{name}"><td>{name}</td>{cells}</tr>'


def percent_text(share: float) -> str:
    """``12.3%``; a share above zero is never shown as zero."""
    if share == math.inf:
        return "from 0"
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.1e}%"
