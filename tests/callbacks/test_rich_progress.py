from __future__ import annotations

import errno
import io
import os
import pty
import select
import sys
import threading
import time
from contextlib import redirect_stdout
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import RichProgressBar, RichProgressBarTheme

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


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


class Terminal:
    """A real pseudo-terminal. Inside ``with`` it is standard output; afterwards ``text`` is what came out of it."""

    def __enter__(self) -> Terminal:
        self.outer, inner = pty.openpty()
        self.stdout = open(inner, "w", encoding="utf-8", closefd=True)
        self.received: list[bytes] = []
        self.done = threading.Event()
        self.reader = threading.Thread(target=self.drain, daemon=True)
        self.reader.start()
        self.redirect = redirect_stdout(self.stdout)
        self.redirect.__enter__()
        return self

    def drain(self) -> None:
        while True:
            if select.select([self.outer], [], [], 0.02)[0]:
                try:
                    self.received.append(os.read(self.outer, 65536))
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    return
            elif self.done.is_set():
                return

    def __exit__(self, *error: Any) -> None:
        self.redirect.__exit__(*error)
        self.stdout.flush()
        self.done.set()
        self.reader.join(10)
        self.stdout.close()
        os.close(self.outer)
        self.text = b"".join(self.received).decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_terminal_shows_bars_that_are_drawn_over_and_gets_its_cursor_back(terminal: Terminal) -> None:
    with terminal:
        fit(RichProgressBar(), epochs=2)
    text = terminal.text
    assert "Sanity Checking" in text
    assert "\x1b[1A" in text, "nothing was drawn over"
    assert "5/5" in text
    assert "Epoch 1/1" in text
    assert "val: " in text
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR)
    assert text.rstrip().endswith(SHOW_CURSOR)


def test_what_is_printed_during_a_fit_stands_above_the_bar_and_stdout_is_put_back(terminal: Terminal) -> None:
    with terminal:
        before = sys.stdout, sys.stderr
        fit(RichProgressBar())
        assert (sys.stdout, sys.stderr) == before
    text = terminal.text
    for line in ("printed in a step", "printed through the trainer"):
        assert f"{line}\r\n" in text
        assert text.index(line) < text.rindex("Epoch 0/0")


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), KeyboardInterrupt()])
def test_an_error_or_ctrl_c_leaves_the_bar_where_it_was_and_gives_the_cursor_back(
    terminal: Terminal, error: Any
) -> None:
    class Fails(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    with terminal:
        with pytest.raises(type(error)):
            fit(RichProgressBar(), Fails())
        assert sys.stdout is terminal.stdout
    text = terminal.text
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert "3/5" in text[: text.index(SHOW_CURSOR)]


def test_an_error_in_a_validation_gives_the_cursor_back(terminal: Terminal) -> None:
    class Fails(Shown):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("in validation")

    with terminal, pytest.raises(RuntimeError, match="in validation"):
        fit(RichProgressBar(), Fails(), num_sanity_val_steps=0)
    text = terminal.text
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1


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


@pytest.mark.parametrize(("leave", "kept"), [(False, ["Epoch 2/2"]), (True, ["Epoch 0/2", "Epoch 1/2", "Epoch 2/2"])])
def test_leave_keeps_the_bar_of_every_epoch(leave: bool, kept: list[str]) -> None:
    text = TerminalText()
    fit(RichProgressBar(leave=leave, console_kwargs={"file": text, "width": 100, "color_system": None}), epochs=3)
    assert [title for title in ("Epoch 0/2", "Epoch 1/2", "Epoch 2/2") if title in screen(text.getvalue())] == kept


def screen(text: str) -> str:
    """What stands on a terminal after ``text``: understands what rich uses of its control sequences."""
    rows, row, column = [""], 0, 0
    text = text.replace(HIDE_CURSOR, "").replace(SHOW_CURSOR, "")
    at = 0
    while at < len(text):
        if text.startswith("\x1b[2K", at):
            rows[row], at = "", at + 4
        elif text.startswith("\x1b[1A", at):
            row, at = row - 1, at + 4
        else:
            char, at = text[at], at + 1
            if char == "\r":
                column = 0
            elif char == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            else:
                rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
                column += 1
    return "\n".join(rows)


def test_the_finished_fit_shows_the_last_epoch_and_its_metrics_once() -> None:
    text = TerminalText()
    kwargs = {"file": text, "width": 100, "color_system": None}
    fit(RichProgressBar(console_kwargs=kwargs), module=Shown(), epochs=2)
    shown = screen(text.getvalue())
    assert shown.count("Epoch") == 1
    assert shown.count("Validation") == shown.count("Sanity") == 0
    assert "Epoch 1/1" in shown
    assert "5/5" in shown
    assert "val: " in shown


def test_the_theme_sets_how_metrics_are_written() -> None:
    text = TerminalText()
    theme = RichProgressBarTheme(metrics_format=".1f", metrics_text_delimiter=" | ")

    class Fixed(RichProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            return {"a": 1.25, "b": 3, "c": "word"}

    fit(Fixed(theme=theme, console_kwargs={"file": text, "width": 100, "color_system": None}))
    assert "a: 1.2 | b: 3 | c: word" in screen(text.getvalue())


def test_a_narrow_terminal_gets_a_shorter_bar() -> None:
    text = TerminalText()
    fit(RichProgressBar(console_kwargs={"file": text, "width": 72, "color_system": None}))
    assert max(map(len, screen(text.getvalue()).splitlines())) <= 72
    assert "5/5" in screen(text.getvalue())


def test_square_brackets_in_what_is_printed_are_no_markup() -> None:
    text = TerminalText()
    bar = RichProgressBar(console_kwargs={"file": text, "width": 100, "color_system": None})

    class Talks(Shown):
        def on_train_epoch_start(self) -> None:
            bar.print("[red]brackets[/red] [1, 2]")

    fit(bar, Talks())
    assert "[red]brackets[/red] [1, 2]" in screen(text.getvalue())


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
    assert "loss: 0.2500" in shown[1][1]


@pytest.mark.parametrize("theme", ["green", {"progress_bar": "green"}])
def test_a_theme_of_another_type_is_refused(theme: Any) -> None:
    with pytest.raises(TypeError, match=r"RichProgressBar\(theme=.*Pass a RichProgressBarTheme"):
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
