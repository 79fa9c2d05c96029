"""Where a warning points to (the user's line, or nowhere), and how messages show paths."""

from __future__ import annotations

import contextlib
import linecache
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminals import seen
from tiny import TinyModule, tiny_loader

from paceline import Trainer, messages
from paceline.messages import PacelineWarning


def warned(function: Callable[[], Any]) -> warnings.WarningMessage:
    """The one warning of Paceline that ``function`` leads to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    (found,) = [one for one in caught if issubclass(one.category, PacelineWarning)]
    return found


def line_of(warning: warnings.WarningMessage) -> str:
    assert warning.filename == __file__, f"{warning.filename}:{warning.lineno}: {warning.message}"
    return linecache.getline(warning.filename, warning.lineno).strip()


def test_a_warning_that_comes_through_libraries_points_to_the_line_of_the_user() -> None:
    def run() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(messages.warn, "called by a library")

    assert line_of(warned(run)) == "with contextlib.ExitStack() as stack:"


def test_code_that_was_made_from_text_is_no_line_of_the_user() -> None:
    run = eval("lambda: messages.warn('made')", {"messages": messages})
    assert line_of(warned(run)) == "function()"


def test_a_warning_about_what_the_trainer_was_asked_for_points_to_the_call() -> None:
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**silent, accelerator="cpu", enable_model_summary=False, max_epochs=1)
    found = warned(lambda: trainer.fit(TinyModule(), tiny_loader(1)))
    assert "val_dataloader" in str(found.message)
    assert line_of(found).startswith("found = warned(lambda: trainer.fit(")


def test_a_warning_that_no_line_of_the_user_leads_to_has_no_location() -> None:
    def run() -> None:
        thread = threading.Thread(target=messages.warn, args=("from a thread",))
        thread.start()
        thread.join()

    found = warned(run)
    assert (found.filename, found.lineno) == ("paceline", 0)
    assert warnings.formatwarning(found.message, found.category, found.filename, found.lineno) == (
        "paceline:0: PacelineWarning: from a thread\n"
    )


def test_each_line_is_warned_from_once_as_python_does_it() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            messages.warn("the same from here")
        messages.warn("the same from here")
    assert len(caught) == 2


@pytest.mark.parametrize(("columns", "told"), [(80, "80"), (None, "None")])
def test_the_width_is_that_of_the_terminal_that_notes_go_to(columns: int | None, told: str) -> None:
    assert seen(lambda: print(messages.columns()), columns).text == told


def test_a_path_is_shown_relative_to_the_working_directory_if_it_lies_below(tmp_path: Path) -> None:
    for path, shown in (
        (tmp_path / "logs" / "a", "logs/a"),
        (tmp_path, str(tmp_path)),
        (f"{tmp_path}s/a", f"{tmp_path}s/a"),
        ("logs/a", "logs/a"),
        ("s3://bucket/a", "s3://bucket/a"),
    ):
        assert messages.path(path) == shown
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert messages.path(tmp_path / "a") == str(tmp_path / "a")
    os.chdir(tmp_path)
