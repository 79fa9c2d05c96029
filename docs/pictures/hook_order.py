"""The order of the hooks of a fit, drawn from the pseudo code that the documentation and a test of the code share."""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from dataclasses import dataclass, field

from canvas import WIDTH, Canvas, Scheme

from paceline.callbacks.base import FIT_PSEUDO_CODE

NAME = "hooks"
ROW, HEAD, PAD, GAP = 20.5, 27.0, 8.0, 6.0
LEFT, RIGHT = 400.0, 340.0
NOTE_CHARACTERS = 45


@dataclass
class Line:
    """One call, or a ``break`` with its condition."""

    text: str
    note: int | None = None

    @property
    def height(self) -> float:
        return ROW


@dataclass
class Box:
    """A function, a loop or a condition, with what is in it."""

    kind: str  # "function", "loop" or "condition"
    text: str
    inside: list[Line | Box] = field(default_factory=list)
    note: int | None = None

    @property
    def height(self) -> float:
        return HEAD + sum(one.height for one in self.inside) + PAD + (2 * GAP if self.kind != "function" else 0)


def notes(code: str = FIT_PSEUDO_CODE) -> dict[int, str]:
    """The comments of the pseudo code, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {one.start[0]: one.string.removeprefix("# ") for one in tokens if one.type == tokenize.COMMENT}


def boxes(code: str = FIT_PSEUDO_CODE) -> list[Box]:
    """The functions of the pseudo code."""
    numbers = {line: number for number, line in enumerate(notes(code), start=1)}
    functions = [one for one in ast.parse(code).body if isinstance(one, ast.FunctionDef)]
    return [Box("function", one.name, _inside(one.body, numbers)) for one in functions]


def _inside(body: list[ast.stmt], numbers: dict[int, int]) -> list[Line | Box]:
    found: list[Line | Box] = []
    for one in body:
        note = numbers.get(one.lineno)
        if isinstance(one, ast.For):
            text = f"for {ast.unparse(one.target)} in {ast.unparse(one.iter)}"
            found.append(Box("loop", text, _inside(one.body, numbers), note))
        elif isinstance(one, ast.If) and isinstance(one.body[0], ast.Break):
            found.append(Line(f"break if {ast.unparse(one.test)}", note))
        elif isinstance(one, ast.If):
            found.append(Box("condition", f"if {ast.unparse(one.test)}", _inside(one.body, numbers), note))
        else:
            found.append(Line(ast.unparse(one), note))
    return found


def draw(scheme: Scheme) -> str:
    """The picture in one scheme."""
    fit, *others = boxes()
    canvas = Canvas(scheme, fit.height + 2, "The order of hooks in a fit, with its loops as nested boxes")
    functions = {f"{box.text}()" for box in others}
    _box(canvas, fit, 1, 1, LEFT, functions)
    x, y = WIDTH - RIGHT - 1, 1.0
    for box in others:
        _box(canvas, box, x, y, RIGHT, functions)
        y += box.height + 18
    y = _legend(canvas, x + 12, y + 18)
    _notes(canvas, x + 12, y + 40)
    return canvas.svg()


def _box(canvas: Canvas, box: Box, x: float, y: float, width: float, functions: set[str]) -> None:
    if box.kind == "function":
        canvas.rect(x, y, width, box.height, "panel", "line", radius=8)
        canvas.text(x + 12, y + 19, f"{box.text}()", 13.5, mono=True, bold=True)
    else:
        y += GAP
        loop, height = box.kind == "loop", box.height - 2 * GAP
        if loop:
            canvas.rect(x, y, width, height, "blue", "blue", opacity=canvas.scheme.soft * 0.55)
            canvas.again(x + 15, y + 13.5, "blue")
        else:
            canvas.rect(x, y, width, height, "back", "amber", dash="4 3")
        start = x + (27 if loop else 12)
        canvas.text(start, y + 18, box.text, 12.5, "blue" if loop else "amber", mono=True, bold=True)
        _mark(canvas, box.note, start + 7.6 * len(box.text), y + 18)
    at = y + HEAD
    for one in box.inside:
        if isinstance(one, Box):
            _box(canvas, one, x + 10, at, width - 20, functions)
        else:
            _line(canvas, one, x + 12, at + 14, functions)
        at += one.height


def _line(canvas: Canvas, line: Line, x: float, y: float, functions: set[str]) -> None:
    text = line.text
    if text.startswith("break"):
        canvas.text(x + 14, y, text, 12.5, "muted", mono=True, italic=True)
    elif text in functions:
        canvas.line([(x - 1, y - 4), (x + 8, y - 4)], "violet", 1.8, arrow=True)
        canvas.text(x + 14, y, text, 12.5, "violet", mono=True, bold=True)
    else:
        text = text.removesuffix("()")
        _dot(canvas, text.startswith("on_"), x + 4, y - 4)
        canvas.text(x + 14, y, text, 12.5, mono=True)
    _mark(canvas, line.note, x + 14 + 7.6 * len(text), y)


def _dot(canvas: Canvas, hook: bool, x: float, y: float) -> None:
    canvas.circle(x, y, 3.2, "teal" if hook else None, "teal" if hook else "muted")


def _mark(canvas: Canvas, note: int | None, x: float, y: float) -> None:
    if note is not None:
        canvas.text(x + 7, y - 3.5, str(note), 10.5, "muted")


def _legend(canvas: Canvas, x: float, y: float) -> float:
    """Explain the signs; returns where it ends."""
    _dot(canvas, True, x + 8, y - 4)
    canvas.text(x + 28, y, "a hook: yours to define")
    _dot(canvas, False, x + 8, y + 18)
    canvas.text(x + 28, y + 22, "a step: yours, or the default")
    canvas.line([(x + 2, y + 40), (x + 12, y + 40)], "violet", 1.8, arrow=True)
    canvas.text(x + 28, y + 44, "runs the box of that name")
    canvas.rect(x, y + 55, 16, 14, "blue", "blue", radius=4, opacity=canvas.scheme.soft * 0.55)
    canvas.text(x + 28, y + 66, "repeated")
    canvas.rect(x + 120, y + 55, 16, 14, "back", "amber", radius=4, dash="4 3")
    canvas.text(x + 148, y + 66, "only then")
    return y + 66


def _notes(canvas: Canvas, x: float, y: float) -> None:
    for number, note in enumerate(notes().values(), start=1):
        words = textwrap.wrap(note[0].upper() + note[1:], NOTE_CHARACTERS)
        canvas.text(x + 10, y, str(number), 10.5, "muted", "end")
        canvas.lines(x + 28, y, words, 16, size=12.5, color="muted")
        y += 16 * len(words) + 5
