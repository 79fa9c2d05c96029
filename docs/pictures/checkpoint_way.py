"""How a checkpoint gets to the disk in the background, and what is in the folder at each moment."""

from __future__ import annotations

from canvas import WIDTH, Canvas, Color, Scheme

NAME = "checkpoint"
LEFT = 112.0
COPY = (244.0, 88.0)  # where the state is copied, and how long that takes
#: What the thread does after the copy: words, and how wide the box is.
WRITING = [
    (["stream the tensors,", "with checksums"], 120.0),
    (["append the", "manifest"], 74.0),
    (["fsync", "file"], 42.0),
    (["rename"], 52.0),
    (["fsync", "folder"], 44.0),
    (["delete what", "it replaces"], 76.0),
]
SPACE = 3.0


def draw(scheme: Scheme) -> str:
    """The picture in one scheme."""
    canvas = Canvas(scheme, 374, "A checkpoint is copied, written aside, synced, renamed; then older files are deleted")
    starts = [COPY[0] + COPY[1] + SPACE]
    for _, width in WRITING:
        starts.append(starts[-1] + width + SPACE)
    rename, deleted = starts[3] + WRITING[3][1] / 2, starts[5] + WRITING[5][1] / 2
    _lane(canvas, 8, "Training")
    _steps(canvas, 8)
    _lane(canvas, 86, "Writer", "a thread")
    for (words, width), x in zip(WRITING, starts, strict=False):
        color: Color = "teal" if words == ["rename"] else "violet"
        canvas.rect(x, 86, width, 50, color, color, True, 5)
        top = 116 if len(words) == 1 else 107
        canvas.lines(x + width / 2, top, words, 16, size=11, color="ink", anchor="middle", bold=words == ["rename"])
    _lane(canvas, 164, "Folder")
    _files(canvas, 164, starts[0], rename, deleted)
    canvas.line([(rename, 138), (rename, 353)], "teal", 1.5, "4 3")
    x = COPY[0] + COPY[1] / 2
    canvas.line([(x, 60), (x, 111), (starts[0] - 4, 111)], "amber", 1.6, arrow=True)
    _promise(canvas, 300, rename)
    return canvas.svg()


def _lane(canvas: Canvas, y: float, name: str, more: str = "") -> None:
    canvas.text(1, y + (22 if more else 30), name, 13.5, bold=True)
    canvas.text(1, y + 39, more, 12, "muted")


def _steps(canvas: Canvas, y: float) -> None:
    x, number = LEFT, 98
    while x + 40 < WIDTH:
        if x <= COPY[0] < x + 44:
            canvas.rect(COPY[0], y, COPY[1], 50, "amber", "amber", True, 5)
            canvas.lines(COPY[0] + COPY[1] / 2, y + 21, ["copy the state", "to memory"], 16, size=11, anchor="middle")
            x = COPY[0] + COPY[1] + SPACE
            continue
        canvas.rect(x, y, 41, 50, "blue", "blue", True, 5)
        canvas.text(x + 20.5, y + 21, "step", 11.5, "muted", "middle")
        canvas.text(x + 20.5, y + 38, str(number), 12.5, "ink", "middle", bold=True)
        x, number = x + 41 + SPACE, number + 1


def _files(canvas: Canvas, y: float, begins: float, rename: float, deleted: float) -> None:
    rows: list[tuple[str, float, float, Color, str]] = [
        ("step=90.ckpt", LEFT, deleted, "blue", ""),
        (".step=100.ckpt.5f0c...tmp", begins, rename, "violet", "4 3"),
        ("step=100.ckpt", rename, WIDTH - 1, "teal", ""),
    ]
    for index, (name, start, end, color, dash) in enumerate(rows):
        at = y + index * 38
        canvas.rect(start, at, end - start, 29, color, color, True, 5, dash)
        canvas.text(start + 10, at + 19, name, 11.5, mono=True)
    canvas.cross(deleted, y + 14.5, "red", 4.5)


def _promise(canvas: Canvas, y: float, rename: float) -> None:
    canvas.line([(LEFT, y), (rename - 8, y)], "muted", 1.2)
    canvas.line([(rename + 8, y), (WIDTH - 1, y)], "muted", 1.2)
    canvas.text(1, y + 5, "After a crash", 13.5, bold=True)
    canvas.lines(
        (LEFT + rename) / 2,
        y + 24,
        [
            "the old file is complete and is the newest;",
            "the next run removes the .tmp file",
        ],
        18,
        size=13,
        color="muted",
        anchor="middle",
    )
    canvas.lines(
        (rename + WIDTH) / 2, y + 24, ["the new file is", "complete"], 18, size=13, color="muted", anchor="middle"
    )
    canvas.text(
        WIDTH - 1, y + 68, "the rename is one operation: now the new file counts", 12.5, "teal", "end", bold=True
    )
