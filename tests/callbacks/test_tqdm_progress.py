from __future__ import annotations

import io
import pickle
import sys
import threading
from contextlib import redirect_stdout
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import RichProgressBar, TQDMProgressBar

EVALUATIONS = [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")]


class Shown(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), prog_bar=True)


class TerminalText(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> TerminalText:
    return TerminalText()


def trainer_with(bar: TQDMProgressBar, **more: Any) -> Trainer:
    return Trainer(
        callbacks=[bar],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu",
        **{"max_epochs": 2, **more},
    )


def test_a_terminal_shows_tqdms_bars(terminal: TerminalText) -> None:
    with redirect_stdout(terminal):
        trainer_with(TQDMProgressBar()).fit(Shown(), tiny_loader(5), tiny_loader(2))
    text = terminal.getvalue()
    assert "Sanity Checking: " in text
    assert "Epoch 0/1: 5/5 (100%)" in text
    assert "Epoch 1/1: 5/5 (100%)" in text
    assert "val=" in text
    assert "loss_epoch=" in text
    assert text.rstrip("\r ").endswith("\n")  # on a slow machine the bars that are gone are wiped once more


def test_a_left_bar_shows_the_metrics_of_its_epoch(terminal: TerminalText) -> None:
    with redirect_stdout(terminal):
        trainer_with(TQDMProgressBar(leave=True)).fit(Shown(), tiny_loader(5), tiny_loader(2))
    text = terminal.getvalue()
    assert "Epoch 1/1: 100%" in text
    assert "5/5 [" in text
    assert "val=" in text


def test_one_bar_serves_all_epochs_unless_they_are_left(terminal: TerminalText) -> None:
    made: list[int] = []

    class Counting(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            made.append(1)
            return super().init_train_tqdm()

    with redirect_stdout(terminal):
        trainer_with(Counting(), max_epochs=3).fit(Shown(), tiny_loader(3))
    assert len(made) == 1
    with redirect_stdout(terminal):
        trainer_with(Counting(leave=True), max_epochs=3).fit(Shown(), tiny_loader(3))
    assert len(made) == 4


def test_a_bar_can_be_changed_by_overriding_how_it_is_made(terminal: TerminalText) -> None:
    class Own(TQDMProgressBar):
        def init_validation_tqdm(self) -> Any:
            bar = super().init_validation_tqdm()
            bar.set_description("running validation ...")
            return bar

        def init_sanity_tqdm(self) -> Any:
            from tqdm import tqdm

            return tqdm(disable=True)

    trainer = trainer_with(Own(), max_epochs=1)
    with redirect_stdout(terminal):
        trainer.fit(Shown(), tiny_loader(3), tiny_loader(2))
    with redirect_stdout(terminal):
        trainer.validate(Shown(), tiny_loader(2), verbose=False)
    assert "running validation ...: 100%" in terminal.getvalue()
    assert "Sanity" not in terminal.getvalue()


@pytest.mark.parametrize(("entry", "title"), EVALUATIONS)
def test_validate_test_and_predict_have_a_bar(terminal: TerminalText, entry: str, title: str) -> None:
    with redirect_stdout(terminal):
        getattr(trainer_with(TQDMProgressBar()), entry)(Shown(), tiny_loader(4))
    assert f"{title}: 100%" in terminal.getvalue()
    assert "4/4 [" in terminal.getvalue()


def test_several_loaders_are_numbered(terminal: TerminalText) -> None:
    with redirect_stdout(terminal):
        trainer_with(TQDMProgressBar(leave=True)).predict(Predicts(), [tiny_loader(2), tiny_loader(3)])
    text = terminal.getvalue()
    assert "Predicting DataLoader 0: 100%" in text
    assert "2/2 [" in text
    assert "Predicting DataLoader 1: 100%" in text
    assert "3/3 [" in text


class Predicts(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return self(batch[0])


def test_a_loader_without_length_has_no_total(terminal: TerminalText) -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(list(tiny_loader(3)))

    with redirect_stdout(terminal):
        trainer_with(TQDMProgressBar(leave=True), max_epochs=1).fit(Shown(), Endless())
    assert "3/? [" in terminal.getvalue()


def test_output_that_is_no_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    trainer_with(bar).fit(Shown(), tiny_loader(4), tiny_loader(2))
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total, bar.val_progress_bar.n) == (4, 4, 2)
    assert pickle.loads(pickle.dumps(bar)).refresh_rate == 1
    text = capsys.readouterr().out
    assert [line.split(":")[0] for line in text.splitlines()] == ["Epoch 0/1", "Epoch 1/1"]
    assert "4/4 (100%)" in text
    assert not set(text) & {"\r", "\x1b"}


def test_an_error_closes_the_bar_with_its_line_whole(terminal: TerminalText) -> None:
    class Fails(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise RuntimeError("the user's own")
            return super().training_step(batch, batch_idx)

    from tqdm import tqdm

    with redirect_stdout(terminal), pytest.raises(RuntimeError, match="the user's own"):
        trainer_with(TQDMProgressBar()).fit(Fails(), tiny_loader(5))
    assert "3/5 [" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    assert not list(tqdm._instances)


def test_print_stands_on_a_line_of_its_own(terminal: TerminalText) -> None:
    class Talks(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                self.trainer.print("hello", "there", sep="-")
            return super().training_step(batch, batch_idx)

    with redirect_stdout(terminal):
        trainer_with(TQDMProgressBar(), max_epochs=1).fit(Talks(), tiny_loader(3))
    assert "\rhello-there\n" in terminal.getvalue()


def test_tqdms_monitoring_thread_is_not_started(terminal: TerminalText) -> None:
    seen: list[set[int | None]] = []

    class Looks(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append({thread.ident for thread in threading.enumerate()})
            return super().training_step(batch, batch_idx)

    before = {thread.ident for thread in threading.enumerate()}
    with redirect_stdout(terminal):
        trainer_with(TQDMProgressBar(), max_epochs=1).fit(Looks(), tiny_loader(2))
    assert "Epoch 0/0" in terminal.getvalue()
    assert seen == [before] * 2


def test_tqdm_miniters_raises_the_refresh_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_MINITERS", "20")
    assert TQDMProgressBar().refresh_rate == 20
    assert TQDMProgressBar(refresh_rate=50).refresh_rate == 50
    assert TQDMProgressBar(refresh_rate=0).is_disabled
    monkeypatch.setenv("TQDM_MINITERS", "often")
    with pytest.raises(ValueError, match="TQDM_MINITERS='often' must be a number"):
        TQDMProgressBar()


def test_a_missing_tqdm_is_told_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match=r"TQDMProgressBar needs the tqdm package.*`pip install tqdm`"):
        TQDMProgressBar()


@pytest.mark.parametrize("position", [-1, 0.5, True, "1"])
def test_a_process_position_that_is_no_number_of_lines_is_refused(position: Any) -> None:
    with pytest.raises(ValueError, match=r"process_position=.*must be a non-negative integer"):
        TQDMProgressBar(process_position=position)


def test_process_position_moves_the_bars_down(terminal: TerminalText) -> None:
    made: list[int] = []

    class Looks(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            made.append(super().init_train_tqdm().pos)
            return super().init_train_tqdm()

    with redirect_stdout(terminal):
        trainer_with(Looks(process_position=2), max_epochs=1).fit(Shown(), tiny_loader(2))
    assert made == [-4]


def test_the_bars_that_are_drawn_can_be_read_and_changed(terminal: TerminalText) -> None:
    class Reads(Shown):
        def on_train_batch_end(self, *args: Any) -> None:
            bar.train_progress_bar.set_description("mine")

    bar = TQDMProgressBar()
    with pytest.raises(TypeError, match="has not drawn the bar for 'train' yet"):
        _ = bar.train_progress_bar
    with redirect_stdout(terminal):
        trainer_with(bar, max_epochs=1, num_sanity_val_steps=0).fit(Reads(), tiny_loader(3))
    assert "mine: " in terminal.getvalue()
    assert bar.train_progress_bar.n == 3


def test_one_progress_bar_is_enough() -> None:
    with pytest.raises(ValueError, match="got 'TQDMProgressBar' and 'RichProgressBar', which would draw"):
        Trainer(callbacks=[TQDMProgressBar(), RichProgressBar()], accelerator="cpu")
