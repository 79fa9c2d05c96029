"""``paceline report``: write a run's report page, even for a killed run, or compare two runs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from .. import messages
from ..report import compare_runs, history, run_page
from ..report.history import History

_EPILOG = """\
A run has a record if it used Trainer(callbacks=[RunReport()]). The page is rebuilt from the record, also
during the run and after its process was killed.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the folder of a run (its newest record is used), or a record; two runs are compared",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file for the page (default: next to the record, or ./run_comparison.html for two runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Write the page and print the main figures."""
    given = arguments.runs
    if len(given) > 2:
        raise ValueError(f"{len(given)} runs were given ({messages.names(given, 'and')}). Pass one or two runs.")
    found = [history.read(history.find(path)) for path in given]
    if len(found) == 2 and found[0].path.resolve() == found[1].path.resolve():
        raise ValueError(
            f"{given[0]!r} and {given[1]!r} are the same record, {str(found[0].path)!r}. Pass the folders of two runs."
        )
    beside = found[0].path.with_suffix(".html") if len(found) == 1 else "run_comparison.html"
    page = run_page.single(found[0]) if len(found) == 1 else compare_runs.pair(*found)
    path = run_page.write(arguments.output or beside, page)
    facts = _of_one(found[0]) if len(found) == 1 else _of_two(*found)
    messages.answer(json.dumps({**facts, "page": path}, indent=2) if arguments.json else _as_text(facts, path, found))
    return 0


def _of_one(history: History) -> dict[str, Any]:
    last = {name: points[-1][1] for name, points in sorted(history.curves().items())}
    return {
        "record": str(history.path),
        "run": run_page.overview(history),
        "seconds": history.clock,
        "last": last,
        "error": {name: history.error.get(name) for name in ("type", "text")} if history.error else None,
    }


def _of_two(a: History, b: History) -> dict[str, Any]:
    return {
        "records": [str(a.path), str(b.path)],
        "differs": [list(row) for row in compare_runs.differences(a, b)],
        "speed": [list(row) for row in compare_runs.ratios(a, b)],
        "last": [list(row) for row in compare_runs.last_values(a, b)],
    }


def _as_text(facts: dict[str, Any], path: str, found: list[History]) -> str:
    if len(found) == 1:
        parts = [("", list(facts["run"].items())), ("Seconds", list(facts["seconds"].items()))]
        parts += [("Last values", list(facts["last"].items()))]
        parts += [("Error", [(facts["error"]["type"], facts["error"]["text"])])] if facts["error"] else []
    else:
        names = compare_runs.titles(*found)
        parts = [("", [("", *names)]), ("What differs", facts["differs"]), ("Speed (last: B / A)", facts["speed"])]
        parts += [("Last values (last: B - A)", facts["last"])]
    blocks = [f"{title}\n{_table(rows)}".strip("\n") for title, rows in parts if rows]
    return "\n\n".join([*blocks, f"Page: {path}"])


def _table(rows: list[Any]) -> str:
    return messages.table([[f"  {row[0]}", *map(_cell, row[1:])] for row in rows])


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
