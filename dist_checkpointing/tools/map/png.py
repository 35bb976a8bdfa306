"""A drawing as PNG, by matplotlib."""

from __future__ import annotations

import io
import itertools

from dist_checkpointing.tools.map.drawing import PAPER, Drawing, Label, Rect

_DPI = 100
_POINTS_PER_PIXEL = 72 / _DPI
_ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}
_SCALE = 2
"""Pixels of the file for each of the drawing: sharp on fine screens."""


def render_png(drawing: Drawing) -> bytes:
    """The bytes of a PNG file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    # Not at the top: it is an extra, and takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.collections import PatchCollection  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    size = (drawing.width / _DPI, drawing.height / _DPI)
    figure = Figure(figsize=size, dpi=_DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    for order, (kind, shapes) in enumerate(itertools.groupby(drawing.shapes, type)):
        if kind is Rect:
            rects = [shape for shape in shapes if isinstance(shape, Rect)]
            axes.add_collection(
                PatchCollection(
                    [Rectangle((rect.x, rect.y), rect.width, rect.height) for rect in rects],
                    facecolors=[rect.fill for rect in rects],
                    edgecolors=[rect.line or "none" for rect in rects],
                    linewidths=0.8,
                    zorder=order,
                )
            )
        for label in (shape for shape in shapes if isinstance(shape, Label)):
            axes.text(
                label.x,
                label.y,
                label.text.replace("$", r"\$"),  # a key is no formula
                fontsize=label.size * _POINTS_PER_PIXEL,
                color=label.colour,
                ha=_ALIGNMENTS[label.anchor],
                va="center_baseline",
                fontweight="bold" if label.bold else "normal",
                zorder=order,
            )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI * _SCALE)
    return buffer.getvalue()
