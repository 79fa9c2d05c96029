"""The loss of a run that was killed twice and resumed, over that of the same run without interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canvas import WIDTH, Canvas, Color, Point, Scheme

NAME = "resume"
DATA = Path(__file__).resolve().with_name("resume.json")
LEFT, RIGHT, TOP, BOTTOM = 46.0, WIDTH - 14.0, 40.0, 268.0
COLORS: tuple[Color, ...] = ("blue", "amber", "teal")
NAMES = ("first process", "second", "third")


def draw(scheme: Scheme) -> str:
    """The picture in one scheme."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    whole = data["whole"]["losses"]
    canvas = Canvas(scheme, 366, "The loss of a run that was killed twice covers that of a run that was not")
    top = int(max(whole) * 2 + 1) / 2

    def at(step: int, loss: float) -> Point:
        return LEFT + (step - 1) / (len(whole) - 1) * (RIGHT - LEFT), BOTTOM - loss / top * (BOTTOM - TOP)

    _axes(canvas, at, len(whole), top)
    canvas.line([at(step, loss) for step, loss in enumerate(whole, start=1)], "line", 8)
    for part, color in zip(data["parts"], COLORS, strict=True):
        canvas.line([at(step, loss) for step, loss in _steps(part)], color, 2)
    for index, part in enumerate(data["parts"]):
        _process(canvas, at, index, part, len(whole))
    _legend(canvas)
    return canvas.svg()


def _steps(part: dict[str, Any]) -> list[tuple[int, float]]:
    return list(enumerate(part["losses"], start=part["first_step"]))


def _axes(canvas: Canvas, at: Any, steps: int, top: float) -> None:
    for half in range(int(top * 2) + 1):
        y = at(1, half / 2)[1]
        canvas.line([(LEFT, y), (RIGHT, y)], "line", 0.8)
        canvas.text(LEFT - 9, y + 4, f"{half / 2:.1f}", 12, "muted", "end")
    for step in range(20, steps + 1, 20):
        canvas.text(at(step, 0)[0], BOTTOM + 18, str(step), 12, "muted", "middle")
    canvas.text(LEFT, BOTTOM + 18, "step", 12, "muted")
    canvas.text(LEFT - 9, TOP - 12, "loss", 12, "muted", "end")


def _process(canvas: Canvas, at: Any, index: int, part: dict[str, Any], steps: int) -> None:
    """The steps of one process as a bar below the curve, and where it was killed."""
    points, color = _steps(part), COLORS[index]
    (start, _), (end, loss) = points[0], points[-1]
    y = BOTTOM + 30 + index * 24
    left, right = at(start, 0)[0], at(end, 0)[0]
    canvas.rect(left, y, right - left, 17, color, color, True, 4)
    canvas.text(left + 8, y + 13, NAMES[index], 12, color, bold=True)
    if end < steps:
        x, height = at(end, loss)
        canvas.line([(x, height), (x, y + 9)], "red", 1.2, "3 3")
        canvas.cross(x, height, "red")
        canvas.cross(x, y + 8.5, "red", 4)
        canvas.text(x + 10, y + 13, "killed", 12, "red")


def _legend(canvas: Canvas) -> None:
    y = 14.0
    canvas.line([(LEFT, y), (LEFT + 30, y)], "line", 8)
    canvas.text(LEFT + 39, y + 4.5, "never interrupted")
    for index, color in enumerate(COLORS):
        canvas.line([(LEFT + 190 + index * 14, y), (LEFT + 203 + index * 14, y)], color, 2)
    canvas.text(LEFT + 240, y + 4.5, "killed twice and resumed, each time by a new process")
