"""Charts as inline SVG: pie charts, stacked bars and line charts, with legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .html_page import Html, color, escaped

#: Maximum number of points in a line; if there are more, only the lowest and highest of each interval are drawn.
MOST_POINTS = 1600
_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 12, 12, 34
#: Largest width of a character in a chart's text.
_CHARACTER = 7.5


def side_by_side(parts: Iterable[Html]) -> Html:
    """Place charts side by side if the window is wide enough."""
    return Html(f'<div class="charts">{"".join(parts)}</div>')


def legend(names: Sequence[str]) -> Html:
    """Return a legend for the colors of the series."""
    items = (f'<li><i style="background:{color(i)}"></i>{escaped(name)}</li>' for i, name in enumerate(names))
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


# ---- shares ----------------------------------------------------------------------------------------------------------


def pie(shares: Mapping[str, float], caption: str = "", size: int = 190) -> Html:
    """Return a pie chart of the positive values, clockwise from the top, with a legend.

    Colors follow the order of ``shares``, so that two charts with the same names can be compared.
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
    """Return a chart with one stacked bar per row, on a common scale."""
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
    """Return a line chart with a common x axis.

    Args:
        series: points (x, y) by name, in ascending order of x. A line is interrupted where y is not finite.
        x_label: label of the x axis.
        y_label: label of the y axis, with its unit.
        log: whether to use a logarithmic y axis, which omits points that are not positive.
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
    """Return a label below its position on the x axis, moved left if it would cross the chart's right edge."""
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
