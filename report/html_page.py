"""A self-contained HTML page with text, tables and charts as inline SVG, for reports that open in a browser.

Uses only the standard library. Every function returns :class:`Html`; anything else on a page is treated as text and
escaped. Colors follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: Largest number of points in a line; with more, only the lowest and highest of each interval are drawn.
MOST_POINTS = 1600
_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 12, 12, 34
#: Largest width of a character in a chart's text.
_CHARACTER = 7.5
#: Colors of series and shares by scheme, distinguishable with red-green color blindness.
_LIGHT = ("#3b6fb6", "#e08a1e", "#3a9a6a", "#b4467e", "#7a6bc4", "#8a8d93")
_LIGHT += ("#c4a000", "#2fa3b5", "#a0522d", "#5b7c2a", "#1f4e79", "#d98cb3")
_DARK = ("#7aa7e8", "#f0a94a", "#63c497", "#e07fb2", "#a99bee", "#a9adb5")
_DARK += ("#e2c33c", "#62cddd", "#cf8a63", "#9cbf5f", "#b9cbe6", "#f2c4da")

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2126; --soft: #667; --line: #d9dce1; --back: #fff; --box: #f6f7f9; %(light)s }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa1ab; --line: #3a4048; --back: #15181c; --box: #1d2126; %(dark)s }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 860px; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 34px 0 8px } p { margin: 6px 0 }
.scroll { overflow-x: auto; margin-bottom: 10px }
table { border-collapse: collapse; font-size: 14px } th, td { text-align: left; padding: 4px 14px 4px 0;
  border-bottom: 1px solid var(--line); vertical-align: top } th { color: var(--soft); font-weight: 600 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.card { background: var(--box); border-left: 4px solid var(--c0); border-radius: 4px;
  padding: 8px 14px; margin: 10px 0 }
.card h3 { margin: 0 0 4px; font-size: 15px } .card.good { border-color: var(--c2) }
.card.bad { border-color: var(--c1) }
.charts { display: flex; flex-wrap: wrap; gap: 12px 36px } figure { margin: 0 0 14px }
.charts figure { max-width: 235px }
figcaption { color: var(--soft); font-size: 13px } pre { background: var(--box); padding: 10px; overflow-x: auto }
svg { max-width: 100%%; height: auto; display: block } svg text { fill: var(--soft); font-size: 12px }
.legend { list-style: none; padding: 0; margin: 4px 0; display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px }
"""


class Html(str):
    """Finished HTML that is put on a page without escaping."""

    __slots__ = ()


class Section(NamedTuple):
    """A section of a page: a heading and its contents, HTML or plain text."""

    heading: str
    parts: Sequence[str]


def escaped(value: object) -> str:
    """Return ``value`` for a page: HTML unchanged, everything else escaped."""
    return value if isinstance(value, Html) else html.escape(str(value))


def page(title: str, sections: Iterable[Section], lead: str = "") -> str:
    """Return a complete, self-contained page. ``lead`` is a line below the title."""
    colors = {"light": _variables(_LIGHT), "dark": _variables(_DARK)}
    parts = [f"<h1>{escaped(title)}</h1>", paragraph(lead) if lead else ""]
    for section in sections:
        body = "\n".join(part if isinstance(part, Html) else paragraph(part) for part in section.parts)
        parts.append(f"<section><h2>{escaped(section.heading)}</h2>\n{body}</section>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE % colors}</style></head>\n<body>\n" + "\n".join(part for part in parts if part) + "\n"
        "</body></html>\n"
    )


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {color};" for index, color in enumerate(colors))


def color(index: int) -> str:
    """Return the CSS color of series or share number ``index``; colors repeat after the twelfth."""
    return f"var(--c{index % len(_LIGHT)})"


def paragraph(text: object) -> Html:
    """Return a paragraph of text."""
    return Html(f"<p>{escaped(text)}</p>")


def verbatim(text: object) -> Html:
    """Return text in a fixed-width font with its line breaks."""
    return Html(f"<pre>{escaped(text)}</pre>")


def card(heading: str, lines: Iterable[object], kind: str = "") -> Html:
    """Return a box with a heading; ``kind`` is ``"good"``, ``"bad"`` or empty."""
    body = "".join(paragraph(line) for line in lines)
    return Html(f'<div class="card {escaped(kind)}"><h3>{escaped(heading)}</h3>{body}</div>')


def side_by_side(parts: Iterable[Html]) -> Html:
    """Return charts in a row, if the window is wide enough."""
    return Html(f'<div class="charts">{"".join(parts)}</div>')


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> Html:
    """Return a table; columns of numbers are right-aligned."""
    rows = [list(row) for row in rows]
    words = {place for row in rows for place, cell in enumerate(row) if not _is_number(cell) and cell not in ("", None)}

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if place in words else ' class=number'}>{escaped(_shown(cell))}</{tag}>"
            for place, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>" if header else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return Html(f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>')


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def legend(names: Sequence[str]) -> Html:
    """Return a legend of the series' colors."""
    items = (f'<li><i style="background:{color(i)}"></i>{escaped(name)}</li>' for i, name in enumerate(names))
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


# ---- shares ----------------------------------------------------------------------------------------------------------


def pie(shares: Mapping[str, float], caption: str = "", size: int = 190) -> Html:
    """Return a pie chart of the positive values, clockwise from the top, with a legend.

    Colors follow the order of ``shares``, so that two pies with the same names can be compared.
    """
    total = sum(value for value in shares.values() if value > 0)
    radius, at, wedges, names = size / 2, 0.0, [], []
    for index, (name, value) in enumerate(shares.items()):
        part = max(value, 0.0) / total if total else 0.0
        names.append(f"{name} {part:.1%}")
        if part:
            mark = f'fill="{color(index)}"><title>{escaped(name)}: {part:.1%}</title>'
            wedges.append(_wedge(at, part, radius, mark))
        at += part
    drawn = (
        "".join(wedges) or f'<circle cx="{radius}" cy="{radius}" r="{radius - 1}" fill="none" stroke="var(--line)"/>'
    )
    svg = f'<svg role="img" width="{size}" height="{size}" viewBox="0 0 {size} {size}">{drawn}</svg>'
    return Html(f"<figure>{svg}<figcaption>{escaped(caption)}</figcaption>{legend(names)}</figure>")


def _wedge(start: float, part: float, radius: float, mark: str) -> str:
    if part > 0.9999:
        return f'<circle cx="{radius:g}" cy="{radius:g}" r="{radius:g}" {mark}</circle>'
    points = []
    for turn in (start, start + part):
        angle = 2 * math.pi * turn
        points.append(f"{radius * (1 + math.sin(angle)):.2f} {radius * (1 - math.cos(angle)):.2f}")
    large = int(part > 0.5)
    path = f"M{radius:g} {radius:g}L{points[0]}A{radius:g} {radius:g} 0 {large} 1 {points[1]}Z"
    return f'<path d="{path}" stroke="var(--back)" stroke-width="1" {mark}</path>'


def stacked_bars(rows: Mapping[str, Mapping[str, float]], unit: str = "") -> Html:
    """Return one stacked bar per row, on a common scale."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    most = max((sum(max(v, 0.0) for v in parts.values()) for parts in rows.values()), default=0.0) or 1.0
    room, height = _WIDTH - 230, 26
    drawn = []
    for line, (label, parts) in enumerate(rows.items()):
        x, y = 110.0, line * height + 4
        drawn.append(f'<text x="102" y="{y + 13}" text-anchor="end">{escaped(label)}</text>')
        for name, value in parts.items():
            width = max(value, 0.0) / most * room
            tip = f"<title>{escaped(f'{name}: {value:.4g} {unit}')}</title>"
            rect = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{color(names.index(name))}">'
            drawn.append(f"{rect}{tip}</rect>" if width else "")
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{escaped(f"{sum(parts.values()):.4g} {unit}")}</text>')
    tall = len(rows) * height + 6
    svg = f'<svg role="img" width="{_WIDTH}" height="{tall}" viewBox="0 0 {_WIDTH} {tall}">{"".join(drawn)}</svg>'
    return Html(f"<figure>{svg}{legend(names)}</figure>")


# ---- lines -----------------------------------------------------------------------------------------------------------


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str = "",
    y_label: str = "",
    log: bool = False,
    caption: str = "",
) -> Html:
    """Return a chart of lines over a common x axis.

    Args:
        series: points (x, y) by name, x ascending. The line is interrupted where y is not finite.
        x_label: label of the x axis.
        y_label: label of the y axis, with its unit.
        log: use a logarithmic y axis; points that are not positive are omitted.
        caption: text below the chart.
    """
    lines = [_thinned([(x, y) for x, y in points if math.isfinite(x)]) for points in series.values()]
    seen = [(x, y) for points in lines for x, y in points if _has_place(y, log)]
    if not seen:
        return Html(f"<figure><figcaption>{escaped(caption or 'Nothing to draw')}: no points.</figcaption></figure>")
    xs, ys = [x for x, _ in seen], [y for _, y in seen]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), (_log_ticks if log else _ticks)(min(ys), max(ys))
    left, right = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    low, high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))
    level = math.log10 if log else float

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left)
        up = (level(y) - level(low)) / ((level(high) - level(low)) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [_grid_line(place(left, y)[1], y) for y in y_ticks if low <= y <= high]
    floor = _HEIGHT - _BOTTOM + 16
    drawn += [_x_label(place(x, low)[0], floor, _number(x)) for x in x_ticks if left <= x <= right]
    drawn.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 3}" text-anchor="middle">{escaped(x_label)}</text>')
    drawn.append(
        f'<text transform="translate(11 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escaped(y_label)}</text>'
    )
    for index, points in enumerate(lines):
        drawn += [_stretch([place(x, y) for x, y in one], color(index)) for one in _stretches(points, log)]
    svg = f'<svg role="img" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(drawn)}</svg>'
    names = legend(list(series)) if len(series) > 1 else ""
    return Html(f"<figure>{svg}{names}<figcaption>{escaped(caption)}</figcaption></figure>")


def _has_place(y: float, log: bool) -> bool:
    return math.isfinite(y) and (y > 0 or not log)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return points
    width, kept = -(-2 * len(points) // MOST_POINTS), []
    for start in range(0, len(points), width):
        part = [p for p in points[start : start + width] if math.isfinite(p[1])] or points[start : start + 1]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _stretches(points: Iterable[tuple[float, float]], log: bool) -> list[list[tuple[float, float]]]:
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _has_place(y, log):
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [one for one in found if one]


def _stretch(places: list[tuple[float, float]], paint: str) -> str:
    if len(places) == 1:
        return f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" fill="{paint}"/>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline fill="none" stroke="{paint}" stroke-width="1.6" stroke-linejoin="round" points="{points}"/>'


def _x_label(middle: float, floor: float, text: str) -> str:
    """Return a number below its position on the x axis, moved left if it would cross the chart's right edge."""
    middle = min(middle, _WIDTH - 1 - len(text) * _CHARACTER / 2)
    return f'<text x="{middle:.1f}" y="{floor}" text-anchor="middle">{text}</text>'


def _grid_line(height: float, value: float) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}" stroke="var(--line)"/>'
    return f'{line}<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{_number(value)}</text>'


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers that span ``low`` to ``high``."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough)
    first = math.floor(low / step)
    return [step * (first + i) for i in range(math.ceil(high / step) - first + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    return [10.0**power for power in range(first, max(last, first + 1) + every, every)]


def _number(value: float) -> str:
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}"
