"""A histogram, drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator

from dist_checkpointing.tools.inspect.values import Histogram

BINS = 20
_FULL = "█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def plot_lines(found: Histogram, width: int, encoding: str = "utf-8") -> Iterator[str]:
    """A line for each bin: its lower edge, a bar, and the number of its values."""
    full, parts = _FULL, _EIGHTHS
    try:
        (full + parts).encode(encoding)
    except UnicodeEncodeError:
        full, parts = "#", "       #"
    is_whole = found.is_of_integers
    labels = [f"{edge + 0.5:.0f}" if is_whole else f"{edge:.4g}" for edge in found.edges]
    rows = [(f">= {labels[0]}", found.counts[0]), *zip(labels[1:-1], found.counts[1:], strict=True)]
    if is_whole or not found.below:
        rows[0] = (labels[0], found.counts[0])
    if found.below:
        rows.insert(0, (f"< {labels[0]}", found.below))
    if found.above:
        rows.append((f"> {labels[-1]}", found.above))
    label_width = max(len(label) for label, _ in rows)
    most = max(count for _, count in rows)
    count_width = len(f"{most:,}")
    room = max(8, width - label_width - count_width - 4)
    for label, count in rows:
        eighths = round(8 * room * count / most)
        bar = full * (eighths // 8) + parts[eighths % 8].strip()
        if count and not bar:
            bar = parts[1].strip() or full
        yield f"{label:>{label_width}}  {bar:<{room}}  {count:>{count_width},}"
