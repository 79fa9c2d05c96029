"""Modules that documentation named under an earlier path are still found there."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline import messages
from paceline.old_paths import _MOVED


@pytest.mark.parametrize("old", sorted(_MOVED))
def test_a_module_is_found_under_its_earlier_name_and_the_new_one_is_told(
    old: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages.forget()
    caplog.set_level("INFO", "paceline")
    monkeypatch.delitem(sys.modules, f"paceline.{old}", raising=False)
    found = importlib.import_module(f"paceline.{old}")
    assert found is importlib.import_module(f"paceline.{_MOVED[old]}")
    assert f"paceline.{old} is now paceline.{_MOVED[old]}. Import the module by its new name." in caplog.text
    assert found.__name__ == found.__spec__.name == f"paceline.{_MOVED[old]}"


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"paceline\.trainer\.memories"):
        importlib.import_module("paceline.trainer.memories")
