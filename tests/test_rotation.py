"""What the shares of the large matrices promise: nothing is left out for long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rotation
from faults.test_strikes import CELLS, ORDERED
from parity.test_parity import cells


@pytest.mark.parametrize("runs", [2, 5, 10, 20])
def test_any_runs_in_a_row_take_every_cell_once(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(rotation.PERIOD):
        taken: list[int] = []
        for number in range(first, first + runs):
            monkeypatch.setenv(rotation.VARIABLE, str(number % rotation.PERIOD))
            taken += rotation.share(range(37), runs)
        assert sorted(taken) == list(range(37))


def test_twenty_runs_in_a_row_strike_every_way_to_train_and_compare_every_cell_of_the_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = [str(one.id) for one in cells()]
    struck: list[str] = []
    compared: list[str] = []
    for number in range(rotation.PERIOD):
        monkeypatch.setenv(rotation.VARIABLE, str(number))
        struck += map(str, rotation.share(ORDERED))
        compared += [str(one.id) for one in rotation.share(cells())]
    assert sorted(struck) == sorted(map(str, CELLS))
    assert sorted(compared) == sorted(everything)


def test_a_costly_test_is_left_out_only_where_all_tests_are_asked_for_and_two_runs_take_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(rotation.__file__, tests)
    (tests / "pytest.ini").write_text("[pytest]\n")
    (tests / "conftest.py").write_text("pytest_plugins = ['rotation']\n")
    (tests / "test_some.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(5))\ndef test_costly(n): pass\n\ndef test_cheap(): pass\n"
    )
    (tests / "test_whole.py").write_text("def test_one(): pass\n\ndef test_other(): pass\n")
    (tests / rotation.COSTLY).write_text("# why\n2 test_some.py::test_costly\n2 test_whole.py\n")
    monkeypatch.delenv(rotation.VARIABLE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:random_order"]
    environment = os.environ | {"PYTHONPATH": str(tests)}

    def ran(*arguments: str) -> list[str]:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(set(re.findall(r"::(test_\S+)", done.stdout)))

    some, whole = ["test_cheap", *(f"test_costly[{n}]" for n in range(5))], ["test_one", "test_other"]
    one, other = ran("tests", "--rotation", "3"), ran("tests", "--rotation", "4", "-n", "2")
    assert sorted(one + other) == ["test_cheap", *some, *whole]
    assert len(set(one) & set(whole)) != 1
    assert ran("tests/test_some.py", "--rotation", "3") == some


def test_every_name_in_the_list_is_one_of_a_test() -> None:
    folder = Path(__file__).parent
    for name, runs in rotation.costly(folder / rotation.COSTLY).items():
        file, _, test = name.partition("::")
        assert rotation.PERIOD % runs == 0, name
        text = (folder / file).read_text()
        assert all(re.search(rf"^ *(def|class) {part}\b", text, re.M) for part in test.split("::") if part), name
