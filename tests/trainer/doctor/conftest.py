from __future__ import annotations

import pytest
from patients import CLOCK


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor read a clock that goes on by what a test says, however busy the machine is."""
    for file in ("clock", "measure"):
        monkeypatch.setattr(f"paceline.trainer.doctor.{file}.perf_counter", CLOCK)
