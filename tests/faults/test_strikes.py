"""The short form of the fault suite: a few strikes on a few ways to train. ``make faults`` runs the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rotation import share
from strikes import CELLS, ROOT, Cell, differences, examine, repeated, train

KILLS = 3
#: All cells; neighbours train under different strategies and differ otherwise too.
ORDERED = [CELLS[8 * row + (index + 3 * row) % 8] for index in range(8) for row in range(3)]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their command line, in /proc")


@pytest.mark.parametrize("cell", share(ORDERED), ids=str)
def test_a_training_that_is_killed_again_and_again_ends_where_one_does_that_was_left_alone(
    cell: Cell, tmp_path: Path
) -> None:
    result = examine(cell, KILLS, seed=CELLS.index(cell), folder=tmp_path)
    assert not result.problems, "\n".join(result.problems)
    assert result.struck.total() == KILLS


def test_torch_elastics_own_restart_goes_on_to_the_same_end(tmp_path: Path) -> None:
    cell = Cell("ddp", 0, False, 1)
    status, _, text = train(cell, tmp_path / "alone")
    assert status == 0, text
    struck, note = tmp_path / "struck", tmp_path / "note"
    struck.mkdir()
    elastic = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    strike = {"PACELINE_STRIKE": "validation:3", "PACELINE_STRIKE_RANK": "1", "PACELINE_STRIKE_NOTE": str(note)}
    environment = os.environ | strike | {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *elastic, *cell.command(struck)[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert note.exists()
    assert not differences(tmp_path / "alone", struck)


def test_the_driver_sees_a_difference(tmp_path: Path) -> None:
    one, other = Cell("cpu", 0, False, 1), Cell("cpu", 0, False, 3)
    for cell, name in ((one, "one"), (other, "other")):
        status, _, text = train(cell, tmp_path / name)
        assert status == 0, text
    found = differences(tmp_path / "one", tmp_path / "other")
    assert any("state_dict" in line for line in found)
    assert any("metrics.csv" in line for line in found)
    assert any("checkpoints are kept" in line for line in found)
    assert any("callbacks.ModelCheckpoint" in line for line in found)


def test_the_driver_sees_batches_that_are_trained_on_again_after_a_signal(tmp_path: Path) -> None:
    seen = tmp_path / "seen-0.txt"
    seen.write_text("0 a\n1 b\n2 c\n2 c\n3 d\n")
    assert not list(repeated(seen, [2, 5]))
    assert list(repeated(seen, [3])) == ["told to end after batch 2, the run went on with 2"]
