"""``paceline report``: write a run's report page, even if the run was killed, or compare two runs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from .. import messages
from ..report import history
from ..report.history import History

#: Sections to print in the terminal: the title and the rows of each section.
Parts = list[tuple[str, list[Any]]]

_EPILOG = """\
A run has a record if it used Trainer(callbacks=[RunReport()]). The page is created from the record, so this
also works while the run continues, and after it was killed.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run's folder (the newest record in it is used), or a record; pass two to compare two runs",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file for the page (default: next to the record, or ./run_comparison.html for two runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Write the page and print the most important numbers."""
    from ..report.run_page import write

    given = arguments.runs
    if len(given) > 2:
        raise ValueError(f"{len(given)} runs were given ({messages.names(given, 'and')}). Pass one or two runs.")
    found = [history.read(history.find(path)) for path in given]
    if len(found) == 2 and found[0].path.resolve() == found[1].path.resolve():
        raise ValueError(
            f"{given[0]!r} and {given[1]!r} are the same record, {str(found[0].path)!r}. Pass two different runs."
        )
    page, facts, parts = _of_one(found[0]) if len(found) == 1 else _of_two(*found)
    beside = found[0].path.with_suffix(".html") if len(found) == 1 else "run_comparison.html"
    path = write(arguments.output or beside, page)
    messages.answer(json.dumps({**facts, "page": path}, indent=2) if arguments.json else _as_text(parts, path))
    return 0


def _of_one(history: History) -> tuple[str, dict[str, Any], Parts]:
    """Return a run's page, its most important numbers, and the sections to print in the terminal."""
    from ..report import run_page

    last = {name: points[-1][1] for name, points in sorted(history.curves().items())}
    error = {name: history.error.get(name) for name in ("type", "text")} if history.error else None
    overview = run_page.overview(history)
    facts = {"record": str(history.path), "run": overview, "seconds": history.clock, "last": last, "error": error}
    parts: Parts = [("", list(overview.items())), ("Seconds", list(history.clock.items()))]
    parts += [("Last values", list(last.items()))]
    parts += [("Error", [(error["type"], error["text"])])] if error else []
    return run_page.single(history), facts, parts


def _of_two(a: History, b: History) -> tuple[str, dict[str, Any], Parts]:
    """Return the comparison page, the most important numbers, and the sections to print in the terminal."""
    from ..report import compare_runs

    differs, speed, last = compare_runs.differences(a, b), compare_runs.ratios(a, b), compare_runs.last_values(a, b)
    facts = {
        "records": [str(a.path), str(b.path)],
        "differs": [list(row) for row in differs],
        "speed": [list(row) for row in speed],
        "last": [list(row) for row in last],
    }
    parts: Parts = [("", [("", *compare_runs.titles(a, b))]), ("What differs", differs)]
    parts += [("Speed (last: B / A)", speed), ("Last values (last: B - A)", last)]
    return compare_runs.pair(a, b), facts, parts


def _as_text(parts: Parts, path: str) -> str:
    blocks = [f"{title}\n{_table(rows)}".strip("\n") for title, rows in parts if rows]
    return "\n\n".join([*blocks, f"Page: {path}"])


def _table(rows: list[Any]) -> str:
    return messages.table([[f"  {row[0]}", *map(_cell, row[1:])] for row in rows])


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
