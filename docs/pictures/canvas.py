"""A small canvas that writes SVG, and the two palettes of the pictures.

Sizes are in the units of the view box, which is 760 wide, so that one unit is about a pixel in a page. Text stays text:
the reader's system chooses the font, so leave room for wider ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

WIDTH = 760
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"

Color = Literal["ink", "muted", "line", "panel", "back", "blue", "teal", "amber", "red", "violet"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Scheme:
    """The colors of one scheme. ``soft`` is how opaque a tint of an accent is on the page's background."""

    name: str
    soft: float
    colors: dict[Color, str]


LIGHT = Scheme(
    "light",
    0.13,
    {
        "ink": "#1d2733",
        "muted": "#5b6878",
        "line": "#cdd5de",
        "panel": "#f5f7fa",
        "back": "#ffffff",
        "blue": "#2363c4",
        "teal": "#087267",
        "amber": "#935b06",
        "red": "#b8324b",
        "violet": "#7350c4",
    },
)
DARK = Scheme(
    "dark",
    0.2,
    {
        "ink": "#e5eaf1",
        "muted": "#9ba8b8",
        "line": "#3d4858",
        "panel": "#1c232d",
        "back": "#14181e",
        "blue": "#6ea6f7",
        "teal": "#41c4ae",
        "amber": "#e6ac4e",
        "red": "#f0808f",
        "violet": "#ae95f2",
    },
)


class Canvas:
    """A picture in one scheme. Later shapes cover earlier ones.

    Args:
        scheme: the palette.
        height: height of the view box.
        title: what the picture shows, for screen readers.
    """

    def __init__(self, scheme: Scheme, height: float, title: str) -> None:
        self.scheme = scheme
        self.height = height
        self.title = title
        self._parts: list[str] = []

    def svg(self) -> str:
        """The file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(self.height)}" width="{WIDTH}" '
            f'height="{_n(self.height)}" role="img" aria-label={quoteattr(self.title)} font-family="{SANS}">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self._parts, "</svg>"]) + "\n"

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: Color | None = None,
        stroke: Color | None = None,
        soft: bool = False,
        radius: float = 6,
        dash: str = "",
        opacity: float | None = None,
        thick: float = 1.2,
    ) -> None:
        """A rectangle. ``soft`` fills with a tint; ``opacity`` is that of the fill."""
        shown = opacity if opacity is not None else self.scheme.soft if soft else None
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
            f"{self._paint(fill, stroke, thick, dash, shown)}/>"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        color: Color = "ink",
        anchor: Literal["start", "middle", "end"] = "start",
        bold: bool = False,
        mono: bool = False,
        italic: bool = False,
    ) -> None:
        """A line of text whose baseline is at ``y``."""
        more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (' font-weight="600"' if bold else "")
        more += (f' font-family="{MONO}"' if mono else "") + (' font-style="italic"' if italic else "")
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
        self._parts.append(f'<text {place} fill="{self._color(color)}"{more}>{escape(words)}</text>')

    def lines(self, x: float, y: float, words: Sequence[str], step: float = 17, **how: object) -> None:
        """Lines of text below each other; ``how`` as for :meth:`text`."""
        for index, line in enumerate(words):
            self.text(x, y + index * step, line, **how)  # pyright: ignore[reportArgumentType]

    def line(
        self, points: Sequence[Point], color: Color = "line", thick: float = 1.5, dash: str = "", arrow: bool = False
    ) -> None:
        """A line through points; ``arrow`` puts a head at its end."""
        path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.path(path, None, color, thick, dash)
        if arrow:
            self._head(points[-2], points[-1], color)

    def path(
        self, path: str, fill: Color | None = None, stroke: Color | None = None, thick: float = 1.5, dash: str = ""
    ) -> None:
        """A path in the language of SVG."""
        self._parts.append(f'<path d="{path}"{self._paint(fill, stroke, thick, dash, None)} stroke-linejoin="round"/>')

    def circle(self, x: float, y: float, radius: float, fill: Color | None, stroke: Color | None = None) -> None:
        """A circle around a point."""
        shape = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
        self._parts.append(f"{shape}{self._paint(fill, stroke, 1.5, '', None)}/>")

    def cross(self, x: float, y: float, color: Color, size: float = 5, thick: float = 2.4) -> None:
        """A cross at a point, as where something is killed."""
        for turn in (1, -1):
            self.line([(x - size, y - turn * size), (x + size, y + turn * size)], color, thick)

    def again(self, x: float, y: float, color: Color, radius: float = 5) -> None:
        """An arrow that goes around a point, as a sign for a loop."""
        self.path(
            f"M{_n(x + radius * 0.5)} {_n(y - radius * 0.87)}A{radius} {radius} 0 1 0 {_n(x + radius)} {_n(y)}",
            None,
            color,
        )
        tip_x, tip_y = x + radius * 0.5, y - radius * 0.87
        self.path(
            f"M{_n(tip_x - 1)} {_n(tip_y - 3.2)}L{_n(tip_x + 3.6)} {_n(tip_y + 0.4)}"
            f"L{_n(tip_x - 1.2)} {_n(tip_y + 3)}Z",
            color,
        )

    def _head(self, before: Point, end: Point, color: Color, size: float = 6) -> None:
        (x0, y0), (x, y) = before, end
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length * size, (y - y0) / length * size
        left, right = (x - dx - dy * 0.6, y - dy + dx * 0.6), (x - dx + dy * 0.6, y - dy - dx * 0.6)
        points = "L".join(f"{_n(px)} {_n(py)}" for px, py in (left, (x + dx * 0.3, y + dy * 0.3), right))
        self.path(f"M{points}Z", color)

    def _color(self, color: Color) -> str:
        return self.scheme.colors[color]

    def _paint(self, fill: Color | None, stroke: Color | None, thick: float, dash: str, opacity: float | None) -> str:
        found = f' fill="{self._color(fill)}"' if fill else ' fill="none"'
        found += f' fill-opacity="{opacity:g}"' if fill and opacity is not None else ""
        found += f' stroke="{self._color(stroke)}" stroke-width="{thick:g}"' if stroke else ""
        return found + (f' stroke-dasharray="{dash}"' if stroke and dash else "")


def _n(number: float) -> str:
    """A number with at most one digit after the point, the same on every machine."""
    return f"{round(number + 1e-9, 1):.1f}".removesuffix(".0")
