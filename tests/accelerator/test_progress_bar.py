"""``tqdm`` on several processes."""

from __future__ import annotations

import importlib.util
import io

import pytest
from rank_processes import ranks

from paceline.accelerator.progress_bar import tqdm


def shown(main_process_only: bool) -> tuple[bool, int]:
    screen = io.StringIO()
    total = sum(tqdm(range(4), main_process_only=main_process_only, file=screen))
    return "100%" in screen.getvalue(), total


def test_one_process_shows_the_bar_and_all_count() -> None:
    assert ranks(2, shown, True) == [(True, 6), (False, 6)]
    assert ranks(2, shown, False) == [(True, 6), (True, 6)]


def test_the_bar_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Use main_process_only=True\."):
        tqdm(True, range(3))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    with pytest.raises(ModuleNotFoundError, match="pip install tqdm"):
        tqdm(range(3))
