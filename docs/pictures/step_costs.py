"""What a batch costs over the same loop written by hand: the tables of benchmarks/README.md as bars."""

from __future__ import annotations

import re
from pathlib import Path

from canvas import WIDTH, Canvas, Color, Scheme

NAME = "overhead"
README = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
#: The headings of two tables there, and what they are called in the picture.
TABLES = {
    "Everything optional off": "nothing optional",
    "Three logged values, TensorBoard, progress bar, checkpoint (against a loop without any)": (
        "three logged values, TensorBoard, progress bar, checkpoint"
    ),
}
COLORS: tuple[Color, ...] = ("muted", "blue")
LEFT, TOP, ROW = 150.0, 66.0, 50.0


def microseconds(heading: str) -> dict[str, float]:
    """The column "over raw" of the table below a heading, by contestant."""
    table = README.read_text(encoding="utf-8").partition(f"### {heading}\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    column = rows[0].index("over raw")
    return {row[0]: float(row[column]) for row in rows[2:]}


def measured() -> str:
    """The day on which the tables were measured."""
    text = README.read_text(encoding="utf-8")
    return re.findall(r"`python benchmarks/step_overhead.py`, (\d{4}-\d\d-\d\d)", text)[0]


def draw(scheme: Scheme) -> str:
    """The picture in one scheme."""
    tables = [microseconds(heading) for heading in TABLES]
    names = sorted((name for name in tables[1] if name != "raw"), key=lambda name: tables[1][name])
    canvas = Canvas(scheme, TOP + len(names) * ROW + 26, "Microseconds that a framework adds to a batch")
    for index, words in enumerate(TABLES.values()):
        x = 1 + index * 170
        canvas.rect(x, 2, 13, 13, COLORS[index], radius=3)
        canvas.text(x + 20, 13.5, words)
    canvas.text(
        1, 42, "Microseconds of CPU time that a batch costs more than in a loop by hand; less is better", 13, "muted"
    )
    most = max(max(table.values()) for table in tables)
    for row, name in enumerate(names):
        y = TOP + row * ROW
        ours = name.startswith("paceline")
        label = {"paceline": "Paceline", "paceline accelerator": "Paceline, own loop"}.get(name, name.capitalize())
        canvas.text(LEFT - 12, y + 22, label, 13, anchor="end", bold=ours)
        for index, table in enumerate(tables):
            width = max(table[name], 0) / most * (WIDTH - LEFT - 62)
            top = y + 2 + index * 17
            canvas.rect(LEFT, top, max(width, 1.5), 14, COLORS[index], radius=2)
            canvas.text(LEFT + max(width, 1.5) + 7, top + 11.5, f"{table[name]:.0f}", 12, COLORS[index], bold=ours)
    canvas.line([(LEFT, TOP - 6), (LEFT, TOP + len(names) * ROW - 6)], "line", 1.2)
    canvas.text(
        1,
        TOP + len(names) * ROW + 18,
        f"python benchmarks/step_overhead.py, {measured()}",
        12,
        "muted",
        mono=True,
    )
    return canvas.svg()
