from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

import pytest
from terminals import seen
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import RichProgressBar, RichProgressBarTheme

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
BAR = "\u2501"


class Shown(TinyModule):
    """Logs to the bar, and prints in the middle of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            print("printed in a step")
        if batch_idx == 3:
            self.trainer.print("printed through the trainer")
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), prog_bar=True)


class TerminalText(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def fit(bar: RichProgressBar, module: Any = None, epochs: int = 1, **more: Any) -> Trainer:
    trainer = Trainer(
        callbacks=[bar],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        max_epochs=epochs,
        accelerator="cpu",
        **more,
    )
    trainer.fit(module or Shown(), tiny_loader(5), tiny_loader(2))
    return trainer


def test_a_terminal_shows_bars_that_are_drawn_over_and_gets_its_cursor_back() -> None:
    raw = seen(lambda: fit(RichProgressBar(leave=True), epochs=2)).raw
    assert "Sanity Checking" in raw
    assert "\x1b[2K" in raw, "nothing was drawn over"
    assert "5/5" in raw
    assert "Epoch 1/1" in raw
    assert "val=" in raw
    assert raw.count(HIDE_CURSOR) == raw.count(SHOW_CURSOR) == 1
    assert raw.index(HIDE_CURSOR) < raw.index(SHOW_CURSOR)
    assert raw.rstrip().endswith(SHOW_CURSOR)


def test_what_is_printed_during_a_fit_stands_above_the_bar_and_stdout_is_put_back() -> None:
    def run() -> None:
        before = sys.stdout, sys.stderr
        fit(RichProgressBar())
        assert (sys.stdout, sys.stderr) == before

    lines = seen(run).lines
    assert lines[:2] == ["printed in a step", "printed through the trainer"]
    assert lines[2].startswith("Epoch 0/0")


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), KeyboardInterrupt()])
def test_an_error_or_ctrl_c_leaves_the_bar_where_it_was_and_gives_the_cursor_back(error: Any) -> None:
    class Fails(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    def run() -> None:
        before = sys.stdout
        with pytest.raises(type(error)):
            fit(RichProgressBar(), Fails())
        assert sys.stdout is before

    found = seen(run)
    assert found.raw.count(HIDE_CURSOR) == found.raw.count(SHOW_CURSOR) == 1
    assert any(line.startswith("Epoch 0/0") and "3/5" in line for line in found.lines)


def test_an_error_in_a_validation_gives_the_cursor_back() -> None:
    class Fails(Shown):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("in validation")

    def run() -> None:
        with pytest.raises(RuntimeError, match="in validation"):
            fit(RichProgressBar(), Fails(), num_sanity_val_steps=0)

    raw = seen(run).raw
    assert raw.count(HIDE_CURSOR) == raw.count(SHOW_CURSOR) == 1


def test_no_thread_runs_for_the_bar() -> None:
    seen: list[list[str]] = []

    class Looks(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(sorted(t.name for t in threading.enumerate()))
            return super().training_step(batch, batch_idx)

    before = sorted(t.name for t in threading.enumerate())
    fit(RichProgressBar(console_kwargs={"file": TerminalText()}), Looks())
    assert seen == [before] * 5


def test_a_file_gets_no_control_characters_even_where_colors_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = io.StringIO()
    fit(RichProgressBar(console_kwargs={"file": text}))
    assert "Epoch 0/0: 5/5 (100%)" in text.getvalue()
    assert not set(text.getvalue()) & {"\r", "\x1b", "\b"}


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = TerminalText()
    fit(RichProgressBar(console_kwargs={"file": text}))
    assert "Epoch 0/0: 5/5 (100%)" in text.getvalue()
    assert "\x1b" not in text.getvalue()


def test_plain_lines_go_to_stdout_by_default_and_elsewhere_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    fit(RichProgressBar(), module=TinyModule())
    assert "Epoch 0/0: 5/5" in capsys.readouterr().out
    fit(RichProgressBar(console_kwargs={"stderr": True}), module=TinyModule())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Epoch 0/0: 5/5" in captured.err


@pytest.mark.parametrize("leave", [False, True])
def test_leave_keeps_the_whole_bar_of_every_epoch_and_else_a_line_stays(leave: bool) -> None:
    text = seen(lambda: fit(RichProgressBar(leave=leave), epochs=3)).text
    for title in ("Epoch 0/2", "Epoch 1/2", "Epoch 2/2"):
        assert text.count(title) == 1
    assert (BAR in text) == leave
    assert ("Validation" in text) == leave
    assert "Sanity" not in text
    assert text.count("val=") >= 3


def test_the_theme_sets_how_metrics_are_written() -> None:
    theme = RichProgressBarTheme(metrics_format=".1f", metrics_text_delimiter=" | ")

    class Fixed(RichProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            return {"a": 1.25, "b": 3, "c": "word"}

    assert "a=1.2 | b=3 | c=word" in seen(lambda: fit(Fixed(leave=True, theme=theme))).text
    assert "a=1.2  b=3  c=word" in seen(lambda: fit(Fixed(theme=theme))).text


def test_a_narrow_terminal_gets_a_shorter_bar() -> None:
    found = seen(lambda: fit(RichProgressBar(leave=True)), columns=72)
    (line,) = [line for line in found.lines if line.startswith("Epoch 0/0")]
    assert "5/5" in line
    assert "it/s" in line
    assert BAR in line


def test_square_brackets_in_what_is_printed_are_no_markup() -> None:
    bar = RichProgressBar()

    class Talks(Shown):
        def on_train_epoch_start(self) -> None:
            bar.print("[red]brackets[/red] [1, 2]")

    assert "[red]brackets[/red] [1, 2]" in seen(lambda: fit(bar, Talks())).text


def test_a_notebook_gets_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is what tells a notebook from a shell."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.kernel = object()
        publisher = CapturingDisplayPublisher()
        monkeypatch.setattr(shell, "display_pub", publisher)
        fit(RichProgressBar())
        outputs = publisher.outputs
        assert len({output["transient"]["display_id"] for output in outputs}) == 1
        assert [output["update"] for output in outputs][:2] == [False, True]
        assert "Epoch 0/0" in outputs[-1]["data"]["text/html"]
    finally:
        InteractiveShell.clear_instance()


def test_a_notebook_output_is_drawn_and_then_replaced() -> None:
    from paceline.callbacks.progress import Bar
    from paceline.callbacks.rich_progress import _Notebook

    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, rows: Any) -> None:
            shown.append(("update", rows._repr_mimebundle_([], [])["text/plain"]))

    def display(rows: Any, display_id: bool) -> Handle:
        shown.append(("display", rows._repr_mimebundle_([], [])["text/html"]))
        return Handle()

    notebook = _Notebook(display, RichProgressBarTheme(), leave=False)
    bar = Bar("train", "Epoch 0", 10, 0, time.perf_counter())
    notebook.draw([bar], {"loss": 0.5})
    bar.advance(10, time.perf_counter() + 1)
    notebook.draw([bar], {"loss": 0.25})
    assert [kind for kind, _ in shown] == ["display", "update"]
    assert "0/10" in shown[0][1]
    assert "10/10" in shown[1][1]
    assert "loss=0.2500" in shown[1][1]


@pytest.mark.parametrize("theme", ["green", {"progress_bar": "green"}])
def test_a_theme_of_another_type_is_refused(theme: Any) -> None:
    with pytest.raises(TypeError, match=r"RichProgressBar: theme=.*Pass a RichProgressBarTheme"):
        RichProgressBar(theme=theme)


def test_a_format_that_cannot_format_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metrics_format='d'.*cannot format a float.*\.3f"):
        RichProgressBarTheme(metrics_format="d")


def test_the_bar_can_be_pickled_before_and_after_a_run() -> None:
    import copy
    import pickle

    bar = RichProgressBar(leave=True)
    assert pickle.loads(pickle.dumps(bar)).refresh_rate == 1
    fit(bar)
    bar._trainer = None
    assert copy.deepcopy(bar).refresh_rate == 1
