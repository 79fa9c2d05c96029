"""The phases of a run: what is counted, and that it is said once, where it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

PROGRAM = """
import time
from paceline.loggers.timings import phase, timed

@timed("inner")
def inner():
    time.sleep(0.02)

with phase("outer"):
    inner()
    inner()
try:
    with phase("fails"):
        raise ValueError
except ValueError:
    pass
"""


@pytest.mark.parametrize("variables", [{"PACELINE_DEBUG": "1"}, {"ACCELERATE_DEBUG_MODE": "true"}, {}])
def test_c17_phases_are_told_at_the_end_where_debugging_asks_for_it(variables: dict[str, str]) -> None:
    environ = {name: value for name, value in os.environ.items() if "DEBUG" not in name}
    environ |= {"PYTHONPATH": str(Path(paceline.__file__).resolve().parent.parent), **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    if not variables:
        assert done.stderr == ""
        return
    head, *rows = done.stderr.splitlines()
    assert head.startswith("Seconds of this process by phase, ")
    names = [row.rpartition(" ")[0].split("  ")[1 if row[2] != " " else 2].strip() for row in rows]
    assert names == ["outer", "inner", "fails", "all else"]
    seconds = [float(row.split("(")[0].split()[-1]) for row in rows]
    assert seconds[0] >= seconds[1] >= 0.04
    assert "(2 times)" in rows[1]


def test_other_processes_than_the_first_stay_silent() -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(paceline.__file__).resolve().parent.parent)}
    environ |= {"PACELINE_DEBUG": "1", "RANK": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
