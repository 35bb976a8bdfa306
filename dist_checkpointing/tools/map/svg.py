"""A drawing as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from dist_checkpointing.tools.map.drawing import PAPER, Drawing, Label, Rect

_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
# What XML cannot hold at all, even escaped.
_FORBIDDEN = dict.fromkeys((*range(32), 65534, 65535, *range(55296, 57344)), "�")


def render_svg(drawing: Drawing) -> str:
    """The text of an SVG file that needs no other."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family={quoteattr(_FONT)}>',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *(_rect(shape) if isinstance(shape, Rect) else _label(shape) for shape in drawing.shapes),
        "</svg>\n",
    ]
    return "\n".join(lines)


def _rect(rect: Rect) -> str:
    line = "" if rect.line is None else f' stroke="{rect.line}"'
    place = f'x="{rect.x:.2f}" y="{rect.y:.2f}" width="{rect.width:.2f}" height="{rect.height:.2f}"'
    return f'<rect {place} fill="{rect.fill}"{line}/>'


def _label(label: Label) -> str:
    weight = ' font-weight="600"' if label.bold else ""
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    # Not dominant-baseline: many viewers do not know it.
    y = label.y + label.size * 0.35
    text = escape(label.text.translate(_FORBIDDEN))
    place = f'x="{label.x:.2f}" y="{y:.2f}" font-size="{label.size:g}" fill="{label.colour}"'
    return f"<text {place}{anchor}{weight}>{text}</text>"
