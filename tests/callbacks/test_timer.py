from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import timer as module_under_test
from paceline.callbacks.base import Callback
from paceline.callbacks.timer import Timer, to_timedelta


class Clock(Callback):
    """A clock that moves by ``seconds`` in each training batch and by one in each validation batch."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.now = 1000.0
        self.seconds = seconds

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.now += self.seconds

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.now += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module_under_test, "perf_counter", lambda: clock.now)
    return clock


def make_trainer(*callbacks: Callback, epochs: int = 5, **arguments: Any) -> Trainer:
    given = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    if "strategy" in arguments:
        del given["accelerator"]
    return Trainer(callbacks=list(callbacks), max_epochs=epochs, **(given | arguments))


def fit(*callbacks: Callback, resume: Any = None, validate: bool = False, **arguments: Any) -> Trainer:
    trainer = make_trainer(*callbacks, **arguments)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader() if validate else None, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize(
    "duration", ["00:00:00:55", timedelta(seconds=55), {"seconds": 55}, {"minutes": 1, "seconds": -5}]
)
def test_the_training_stops_after_the_batch_in_which_the_time_is_up(clock: Clock, duration: Any) -> None:
    timer = Timer(duration)
    assert fit(clock, timer).global_step == 6
    assert timer.time_elapsed() == 60
    assert timer.time_remaining() == -5


def test_an_interval_of_epochs_finishes_the_epoch(clock: Clock) -> None:
    assert fit(clock, Timer("00:00:00:55", interval="epoch")).global_step == 8


def test_validation_counts_for_the_time_of_a_training(clock: Clock) -> None:
    assert fit(clock, Timer("00:00:00:43"), validate=True, num_sanity_val_steps=0).global_step == 5


def test_a_duration_of_zero_trains_nothing(clock: Clock) -> None:
    assert fit(clock, Timer("00:00:00:00")).global_step == 0


def test_max_time_of_the_trainer_is_a_timer(clock: Clock) -> None:
    trainer = fit(clock, max_time={"seconds": 15}, epochs=None)
    assert trainer.global_step == 2
    assert sum(isinstance(callback, Timer) for callback in trainer.callbacks) == 1


def test_time_used_before_a_resume_counts(clock: Clock, tmp_path: Path) -> None:
    trainer = fit(clock, Timer("00:00:01:35"), epochs=1)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    state = torch.load(tmp_path / "file.ckpt", weights_only=True)["callbacks"]["Timer"]
    assert state["time_elapsed"]["train"] == 40
    clock.now += 5000  # the time between the two runs does not
    timer = Timer("00:00:01:35")
    trainer = fit(clock, timer, resume=tmp_path / "file.ckpt")
    assert trainer.global_step == 10
    assert timer.time_elapsed() == 100


def test_a_resume_with_no_time_left_trains_nothing(clock: Clock, tmp_path: Path) -> None:
    fit(clock, Timer("00:00:01:00"), epochs=1).save_checkpoint(tmp_path / "file.ckpt")
    assert fit(clock, Timer("00:00:00:30"), resume=tmp_path / "file.ckpt").global_step == 4


def test_each_stage_has_its_own_time(clock: Clock) -> None:
    timer = Timer()
    trainer = make_trainer(clock, timer, epochs=2)
    assert (timer.start_time(), timer.end_time(), timer.time_elapsed()) == (None, None, 0)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert timer.time_elapsed("sanity_check") == 2
    assert timer.time_elapsed("validate") == 4
    assert timer.time_elapsed("train") == 2 * (40 + 4)
    assert timer.start_time() == 1002
    assert timer.end_time() == 1002 + 88
    assert timer.time_elapsed("test") == 0
    trainer.test(TinyModule(), tiny_loader(), verbose=False)
    trainer.predict(TinyModule(), tiny_loader())
    assert timer.end_time("test") == timer.start_time("test") == timer.start_time("predict") == 1090
    assert timer.time_remaining() is None


def test_a_second_fit_measures_afresh(clock: Clock) -> None:
    timer = Timer("00:00:00:55")
    fit(clock, timer)
    assert fit(clock, timer).global_step == 6
    assert timer.time_elapsed() == 60


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [
        ({}, False),
        ({"interval": "epoch"}, False),
        ({"duration": "00:00:00:01"}, True),
        ({"duration": "00:00:00:01", "interval": "epoch"}, False),
    ],
)
def test_batches_cost_something_only_where_the_clock_is_looked_at_after_each(
    arguments: dict[str, Any], batch: bool
) -> None:
    assert (Timer(**arguments).on_train_batch_end is not None) == batch


def test_a_subclass_with_a_batch_hook_still_stops_at_the_end_of_an_epoch(clock: Clock) -> None:
    class Mine(Timer):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)

    assert fit(clock, Mine({"seconds": 15}, interval="epoch")).global_step == 4


def test_the_grace_time_is_kept_for_what_follows(clock: Clock) -> None:
    assert fit(clock, Timer({"seconds": 60}, grace_seconds=15)).global_step == 5
    assert fit(Clock(), max_time={"seconds": 0.0}, grace_seconds=3).global_step == 0


def test_a_grace_time_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"grace_seconds=3\) has no effect without max_time"):
        make_trainer(grace_seconds=3)
    for seconds in (-1, float("nan"), "5"):
        with pytest.raises(ValueError, match=r"Timer: grace_seconds=.*Pass the number of seconds"):
            Timer("00:00:00:01", grace_seconds=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("verbose", [True, False])
def test_the_end_of_the_time_is_told_once(clock: Clock, verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    fit(clock, Timer("00:00:00:15", verbose=verbose), min_epochs=2)
    assert caplog.text.count("Elapsed time: 0:00:20. Signaling Trainer to stop.") == verbose


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:12:30:00", 45000), ("2:00:00:01", 172801), (" 00:00:00:07 ", 7), ("120:00:00:00", 10368000)],
)
def test_durations_are_read(text: str, seconds: int) -> None:
    assert to_timedelta(text, "here").total_seconds() == seconds


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"duration": "12:30"}, ValueError, r"Timer\(duration=\) got '12:30'.*'DD:HH:MM:SS'.*Use '00:12:30:00'"),
        ({"duration": 90}, TypeError, r"got 90 of type int.*unit is unknown.*timedelta"),
        ({"duration": {"minute": 3}}, ValueError, r"Unknown unit 'minute'\. Did you mean 'minutes'\?"),
        ({"duration": timedelta(seconds=-1)}, ValueError, r"which is negative.*zero or more"),
        ({"interval": "steps"}, ValueError, r"Timer interval 'steps'\. Did you mean 'step'\?.*clock"),
    ],
)
def test_bad_arguments_are_errors_that_say_what_to_do(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Timer(**arguments)


def test_an_unknown_stage_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Unknown stage 'training'\. Did you mean 'train'\?.*'validate'"):
        Timer().time_elapsed("training")
