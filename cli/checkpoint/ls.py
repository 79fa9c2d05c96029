"""``paceline checkpoint ls``: list the checkpoints in a folder."""

from __future__ import annotations

import json
import textwrap
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from ... import messages
from ...report.text_table import fitted
from .select import FoundCheckpoint, checkpoints

_HEADINGS = ("name", "save", "epoch", "step", "score", "kind", "ranks", "size", "written", "state")
#: Columns that wrap. Names wrap only if leaving out other columns does not make enough room.
_WRAP = ("name", "state")
_LEFT_OUT = ("save", "ranks", "kind", "epoch", "written", "size")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("folder", help="a folder, or a URL such as s3://bucket/run; subfolders are included")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(arguments: Namespace) -> int:
    """Print one line per checkpoint."""
    found = list(checkpoints(arguments.folder))
    if arguments.json:
        messages.answer(json.dumps([_facts(one) for one in found], indent=1))
    else:
        names = _short([str(one.path) for one in found])
        columns, width = list(zip(_HEADINGS, *map(_row, names, found), strict=True)), messages.columns(of_answers=True)
        rows, left_out = fitted(columns, width, ("state",), _LEFT_OUT, ("state",))
        if width is not None and max(len(line) for row in rows for line in row.splitlines()) > width:
            kept = [cells for cells in columns if cells[0] not in _LEFT_OUT]
            rows, left_out = fitted(kept, width, _WRAP, (), _WRAP)[0], list(_LEFT_OUT)
        messages.answer("\n".join(rows))
        if left_out:
            messages.answer(
                textwrap.fill(f"These columns were left out for lack of room: {', '.join(left_out)}.", width or 80)
            )
    return 0


def _facts(one: FoundCheckpoint) -> dict[str, object]:
    known = asdict(one.known) if one.known else {}
    known.pop("files", None)
    return {"path": str(one.path), "bytes": one.size, "state": one.state, **known, "kind": one.kind}


def _short(paths: list[str]) -> list[str]:
    """Return the paths without their common leading folders."""
    parts = [path.split("/") for path in paths]
    same = 0
    while all(len(one) > same + 1 and one[same] == parts[0][same] for one in parts):
        same += 1
    return ["/".join(one[same:]) for one in parts]


def _row(name: str, one: FoundCheckpoint) -> tuple[str, ...]:
    known = one.known
    if known is None:
        return (name, "-", "-", "-", "-", one.kind, "-", messages.size(one.size), "-", one.state)
    score = "-" if known.score is None else f"{known.monitor}={known.score:.4g}"
    counts = (str(number) for number in (known.sequence, known.epoch, known.global_step))
    written = known.written[:16].replace("T", " ")
    return (name, *counts, score, one.kind, str(known.world_size), messages.size(one.size), written, one.state)
