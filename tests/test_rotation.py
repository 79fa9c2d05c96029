"""What the shares of the large matrices promise: nothing is left out for long."""

from __future__ import annotations

import pytest
import rotation
from faults.test_strikes import CELLS, CELLS_OF_RUNS
from parity.test_parity import cells


@pytest.mark.parametrize("runs", [2, 5, 10])
def test_any_runs_in_a_row_take_every_cell_once(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(rotation.PERIOD):
        taken: list[int] = []
        for number in range(first, first + runs):
            monkeypatch.setenv(rotation.VARIABLE, str(number % rotation.PERIOD))
            taken += rotation.share(range(37), runs)
        assert sorted(taken) == list(range(37))


def test_ten_runs_in_a_row_strike_every_way_to_train_and_five_compare_every_cell_of_the_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = [str(one.id) for one in cells()]
    struck, compared = set(), []
    for number in range(rotation.PERIOD):
        monkeypatch.setenv(rotation.VARIABLE, str(number))
        struck |= set(rotation.share(CELLS_OF_RUNS))
        compared += [str(one.id) for one in rotation.share(cells(), 5)] if number < 5 else []
    assert struck == set(CELLS)
    assert sorted(compared) == sorted(everything)
