from __future__ import annotations

import pytest
from patients import read_clock


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    read_clock(monkeypatch.setattr)
