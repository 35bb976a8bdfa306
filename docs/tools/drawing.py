"""A small SVG canvas whose pictures follow light and dark mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Final

_LIGHT: Final = (
    "--ink:#20242c;--mute:#667085;--line:#c5ccd6;--card:#f4f6f8;--paper:#fff;"
    "--c0:#2f6fb3;--c1:#cf7416;--c2:#2c8a57;--c3:#9650ad;--stop:#c0392b"
)
_DARK: Final = (
    "--ink:#e6e9ef;--mute:#9aa4b5;--line:#4a5365;--card:#262b36;--paper:#1e2129;"
    "--c0:#6ba7e6;--c1:#f0a04b;--c2:#5cc28c;--c3:#c58bd9;--stop:#ef7568"
)
# Read on its own, a picture follows the reader's system; inside the site, the site's own switch.
_STYLE: Final = f"""
.dc{{{_LIGHT};max-width:100%;height:auto}}
@media (prefers-color-scheme:dark){{.dc{{{_DARK}}}}}
[data-md-color-scheme=default] .dc{{{_LIGHT}}}
[data-md-color-scheme=slate] .dc{{{_DARK}}}
.dc text{{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}}
.dc .mono{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px}}
.dc .small{{font-size:11.5px}}
.dc .mute{{fill:var(--mute)}}
.dc .bold{{font-weight:600}}
.dc .on{{fill:var(--paper);font-weight:600}}
"""


@dataclass
class Drawing:
    """Shapes in the order in which they are drawn; lengths are in pixels.

    Attributes:
        name: of the file; also makes ids unique in a page with several pictures.
        title: what a reader who does not see the picture is told.
    """

    name: str
    title: str
    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        line: str = "none",
        opacity: float = 1.0,
        thick: float = 1.0,
        radius: float = 0,
        dash: str = "",
    ) -> None:
        """``fill`` and ``line`` are names of colours: ink, mute, line, card, c0 .. c3, stop."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            + (f' rx="{radius:g}"' if radius else "")
            + f' style="fill:{_colour(fill)};stroke:{_colour(line)}"'
            + (f' fill-opacity="{opacity:g}"' if opacity != 1 else "")
            + (f' stroke-width="{thick:g}"' if thick != 1 else "")
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + "/>"
        )

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        colour: str = "mute",
        thick: float = 1.0,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        """A line through ``points``, with a head at the last one if ``arrow``."""
        places = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{places}" style="fill:none;stroke:{_colour(colour)}"'
            + (f' stroke-width="{thick:g}"' if thick != 1 else "")
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + (f' marker-end="url(#{self.name}-head)"' if arrow else "")
            + "/>"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        look: str = "",
        *,
        anchor: str = "start",
        colour: str = "",
    ) -> None:
        """``look``: any of mono, small, mute, bold, on."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}"'
            + (f' class="{look}"' if look else "")
            + (f' text-anchor="{anchor}"' if anchor != "start" else "")
            + (f' style="fill:{_colour(colour)}"' if colour else "")
            + f">{escape(words)}</text>"
        )

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<marker id="{self.name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" style="fill:var(--mute)"/>'
            "</marker>"
        )
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dc" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{self.name}-title">'
        )
        return "\n".join(
            [
                start,
                f'<title id="{self.name}-title">{escape(self.title)}</title>',
                f"<style>{_STYLE}</style>",
                f"<defs>{head}</defs>",
                *self.shapes,
                "</svg>\n",
            ]
        )


def _colour(name: str) -> str:
    return "none" if name == "none" else f"var(--{name})"
