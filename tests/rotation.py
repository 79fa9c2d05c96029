"""Which cells of a large matrix this run takes: ``make test`` takes a share that moves on with every landing.

Landings (commits of the first line of parents) in a row take one share after the other, so ten take all cells.
``make test-all`` takes all at once, ``--rotation N`` those of one landing. The tests that are marked ``rotates(runs)``,
because they are costly, form such a matrix too. Nothing is left out where single files are run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

PERIOD = 10
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
    """Leave out the marked tests of other runs, where all tests are asked for."""
    if Path(__file__).parent not in [Path(config.invocation_params.dir, argument) for argument in config.args]:
        return
    marked: dict[int, list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("rotates"):
            marked.setdefault(mark.args[0], []).append(item)
    others: set[pytest.Item] = set()
    for runs, cells in marked.items():
        cells.sort(key=lambda item: item.nodeid)
        others |= set(cells).difference(share(cells, runs))
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def pytest_report_header() -> str:
    return f"share of the large matrices: {os.environ[VARIABLE]} of {PERIOD} (make test-all takes all)"


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
