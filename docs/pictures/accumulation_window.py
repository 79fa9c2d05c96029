"""What happens in an accumulation window: backward passes, communication, clipping, the step."""

from __future__ import annotations

from canvas import WIDTH, Canvas, Color, Scheme

NAME = "window"
BATCHES = 4
BLOCK, FORWARD, SPACE = 112.0, 46.0, 7.0
UPDATE_X = BATCHES * (BLOCK + SPACE) + 17
#: The update in its order: what happens, and whether it is a hook.
UPDATE = [
    ("unscale (fp16)", False),
    ("on_before_optimizer_step", True),
    ("clip", False),
    ("optimizer.step()", False),
    ("on_before_zero_grad", True),
    ("clear gradients", False),
    ("advance schedulers", False),
]


def draw(scheme: Scheme) -> str:
    """The picture in one scheme."""
    canvas = Canvas(scheme, 442, f"An accumulation window of {BATCHES} batches, and the short one at an epoch's end")
    canvas.text(1, 14, f"A window: accumulate_grad_batches={BATCHES}", 14, bold=True)
    _passes(canvas, 26, BATCHES)
    _gradients(canvas, 98)
    _communication(canvas, 202)
    _update(canvas, 26)
    canvas.line([(1, 302), (WIDTH - 1, 302)], "line", 1)
    canvas.text(1, 332, "The last window of an epoch may be shorter", 14, bold=True)
    _passes(canvas, 346, 2)
    canvas.text(1, 422, "The gradient is the mean over the batches that the window has: here it is", 13, "muted")
    canvas.text(1, 439, f"multiplied by {BATCHES} / 2 before hooks and clipping see it.", 13, "muted")
    x = 2 * (BLOCK + SPACE) + 17
    canvas.line([(x - 20, 371), (x - 5, 371)], "muted", arrow=True)
    canvas.rect(x, 346, 92, 50, "amber", "amber", True)
    canvas.text(x + 46, 375, f"x {BATCHES} / 2", 13, "amber", "middle", bold=True)
    canvas.line([(x + 97, 371), (x + 112, 371)], "muted", arrow=True)
    canvas.rect(x + 117, 346, 110, 50, "teal", "teal", True)
    canvas.text(x + 172, 375, "the update", 13, "teal", "middle", bold=True)
    return canvas.svg()


def _passes(canvas: Canvas, y: float, batches: int) -> None:
    for index in range(batches):
        x = 1 + index * (BLOCK + SPACE)
        canvas.rect(x, y, BLOCK, 50, "panel", "line")
        canvas.text(x + BLOCK / 2, y + 17, f"batch {index + 1}", 12.5, anchor="middle", bold=True)
        parts: list[tuple[float, float, Color, str]] = [
            (x + 2, FORWARD, "blue", "forward"),
            (x + 4 + FORWARD, BLOCK - FORWARD - 6, "violet", "backward"),
        ]
        for at, width, color, word in parts:
            canvas.rect(at, y + 25, width, 23, color, soft=True, radius=4)
            canvas.text(at + width / 2, y + 40.5, word, 11, color, "middle")


def _gradients(canvas: Canvas, y: float) -> None:
    canvas.text(1, y + 12, f"Gradients: each backward pass adds those of loss / {BATCHES}", 13, "muted")
    full, bottom = 56.0, y + 82
    for index in range(BATCHES):
        x, width = 5 + index * (BLOCK + SPACE) + FORWARD, BLOCK - FORWARD - 6
        part = full / BATCHES
        canvas.rect(x, bottom - full, width, full, stroke="line", radius=4, dash="3 3")
        canvas.rect(x, bottom - part * (index + 1), width, part * (index + 1), "violet", soft=True, radius=4)
        canvas.rect(x, bottom - part * (index + 1), width, part, "violet", radius=4)
        canvas.text(x - 8, bottom - part * index - 3, f"{index + 1}/{BATCHES}", 12, "violet", "end", bold=True)
    canvas.line([(1, bottom + 0.5), (UPDATE_X - 24, bottom + 0.5)], "line", 1)


def _communication(canvas: Canvas, y: float) -> None:
    canvas.text(1, y + 12, "Between ranks: nothing before the last backward pass", 13, "muted")
    for index in range(BATCHES - 1):
        x = 5 + index * (BLOCK + SPACE) + FORWARD
        canvas.line([(x, y + 49), (x + BLOCK - FORWARD - 6, y + 49)], "line", 2, "2 4")
    x = 1 + (BATCHES - 1) * (BLOCK + SPACE)
    canvas.rect(x, y + 24, BLOCK, 50, "amber", "amber", True)
    canvas.lines(
        x + BLOCK / 2, y + 45, ["gradients", "are averaged"], size=12.5, color="amber", anchor="middle", bold=True
    )


def _update(canvas: Canvas, y: float) -> None:
    width = WIDTH - UPDATE_X - 1
    canvas.line([(UPDATE_X - 20, y + 25), (UPDATE_X - 5, y + 25)], "muted", arrow=True)
    canvas.rect(UPDATE_X, y, width, 250, "teal", "teal", True, 8)
    canvas.text(UPDATE_X + 16, y + 24, "The update, once per window", 13, "teal", bold=True)
    for index, (words, hook) in enumerate(UPDATE):
        at = y + 54 + index * 28
        canvas.circle(UPDATE_X + 22, at - 4.5, 4, "teal" if hook else "back", "teal")
        if index:
            canvas.line([(UPDATE_X + 22, at - 28.5), (UPDATE_X + 22, at - 8.5)], "teal", 1.2)
        mono = hook or words.endswith("()")
        canvas.text(UPDATE_X + 36, at, words, 12.5, mono=mono)
