"""Which tests this run takes: of the costly ones, ``make test`` takes a share that moves on with every landing.

``costly.txt`` names those that take more than 0.3 s of the processors, and how many landings (commits of the first line
of parents) in a row take all of them. The large matrices take their share of cells themselves. ``make test-all`` takes
everything, ``--rotation N`` the shares of one landing. Nothing is left out where single files are run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

PERIOD = 20
COSTLY = "costly.txt"
VARIABLE = "PACELINE_TESTS_ROTATION"
Cell = TypeVar("Cell")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cells", action="store_true", help="every cell of every matrix, not a share of them")
    parser.addoption("--rotation", type=int, help=f"which share, 0 to {PERIOD - 1}; by default the landing says it")


def pytest_configure(config: pytest.Config) -> None:
    """Decide once; the workers of xdist find it in the environment."""
    if config.getoption("--all-cells"):
        os.environ[VARIABLE] = "all"
    elif (asked := config.getoption("--rotation")) is not None:
        os.environ[VARIABLE] = str(asked % PERIOD)
    else:
        os.environ.setdefault(VARIABLE, str(_landings() % PERIOD))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the costly tests of other runs, where all tests are asked for."""
    folder = Path(__file__).parent
    if folder not in [Path(config.invocation_params.dir, argument) for argument in config.args]:
        return
    runs = costly(folder / COSTLY)
    cells: dict[int, dict[str, list[pytest.Item]]] = {}
    for item in items:
        file, test = item.nodeid.split("::")[0], item.nodeid.split("[")[0]
        if file in runs:
            cells.setdefault(runs[file], {}).setdefault(file, []).append(item)
        elif test in runs:
            cells.setdefault(runs[test], {}).setdefault(item.nodeid, []).append(item)
    others: set[pytest.Item] = set()
    for number, tests in cells.items():
        others.update(*(tests[cell] for cell in set(tests).difference(share(sorted(tests), number))))
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def costly(path: Path) -> dict[str, int]:
    """By name, among how many runs the tests of a file (as one: they share a fixture) or a test's cells are shared."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: int(runs) for runs, name in lines}


def pytest_report_header() -> str:
    return f"share of the costly tests: {os.environ[VARIABLE]} of {PERIOD} (make test-all takes all)"


def share(cells: Sequence[Cell], runs: int = PERIOD) -> list[Cell]:
    """The cells of this run; every cell is one of any ``runs`` runs in a row.

    Args:
        cells: all of them, ordered so that neighbours have little in common.
        runs: among how many they are shared out; a divisor of ``PERIOD``.
    """
    chosen = os.environ.get(VARIABLE, "all")
    return list(cells) if chosen == "all" else list(cells[int(chosen) % runs :: runs])


def _landings() -> int:
    """How many landings lead here; 0 outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "--first-parent", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0
