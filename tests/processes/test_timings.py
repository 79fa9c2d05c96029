"""The phases of a run: what is counted, and that it is said once, where it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

PROGRAM = """
from types import SimpleNamespace
from clocks import Clock
from paceline.processes import timings
from paceline.processes.timings import phase

clock = Clock()
timings.time, timings._begin = SimpleNamespace(perf_counter=clock), 0.0

@phase("inner")
def inner():
    clock.sleep(2.0)

with phase("outer"):
    inner()
    inner()
    clock.sleep(1.0)
try:
    with phase("fails"):
        raise ValueError
except ValueError:
    pass
clock.sleep(2.0)
"""
PATH = os.pathsep.join([str(Path(paceline.__file__).parent.parent), str(Path(__file__).parents[1])])


@pytest.mark.parametrize("variables", [{"PACELINE_DEBUG": "1"}, {"ACCELERATE_DEBUG_MODE": "true"}, {}])
def test_c17_phases_are_told_at_the_end_where_debugging_asks_for_it(variables: dict[str, str]) -> None:
    environ = {name: value for name, value in os.environ.items() if "DEBUG" not in name}
    environ |= {"PYTHONPATH": PATH, **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    if not variables:
        assert done.stderr == ""
        return
    assert done.stderr.splitlines() == [
        "Seconds that this process spent in each phase, 7.00 in total:",
        "  outer               5.00",
        "    inner             4.00  (2 times)",
        "  fails               0.00",
        "  everything else     2.00",
    ]


def test_other_processes_than_the_first_stay_silent() -> None:
    environ = os.environ | {"PYTHONPATH": PATH, "PACELINE_DEBUG": "1", "RANK": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
