from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer, messages
from paceline.callbacks.base import Callback
from paceline.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler


class Steps(Callback):
    """The number of optimizer steps in each epoch."""

    def __init__(self) -> None:
        self.per_epoch: list[int] = []
        self.before = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = trainer.global_step

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.per_epoch.append(trainer.global_step - self.before)


def make_trainer(*callbacks: Callback, epochs: int = 4, **arguments: Any) -> Trainer:
    return Trainer(
        callbacks=list(callbacks),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        **arguments,
    )


def steps_of(scheduling: dict[int, int], batches: int = 6, resume: Any = None, epochs: int = 4) -> list[int]:
    steps = Steps()
    make_trainer(steps, GradientAccumulationScheduler(scheduling), epochs=epochs).fit(
        TinyModule(), tiny_loader(batches), ckpt_path=resume
    )
    return steps.per_epoch


@pytest.mark.parametrize(
    ("scheduling", "steps"),
    [({1: 2, 3: 6}, [6, 3, 3, 1]), ({0: 3}, [2, 2, 2, 2]), ({0: 4, 2: 1}, [2, 2, 6, 6])],
)
def test_each_epoch_makes_the_steps_of_its_schedule(scheduling: dict[int, int], steps: list[int]) -> None:
    assert steps_of(scheduling) == steps


def test_a_resumed_run_goes_on_in_the_schedule(tmp_path: Path) -> None:
    schedule = {1: 2, 2: 3}
    trainer = make_trainer(GradientAccumulationScheduler(schedule), epochs=2)
    trainer.fit(TinyModule(), tiny_loader(6))
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert steps_of(schedule, resume=tmp_path / "file.ckpt") == [2, 2]


def test_the_trainer_gets_its_own_value_back_and_can_fit_again() -> None:
    trainer = make_trainer(GradientAccumulationScheduler({0: 3}), epochs=1)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.accumulate_grad_batches == 1
    trainer.fit(TinyModule(), tiny_loader())


def test_the_users_dict_is_left_as_it_is() -> None:
    scheduling = {4: 2}
    scheduler = GradientAccumulationScheduler(scheduling)
    assert scheduling == {4: 2}
    assert [scheduler.get_accumulate_grad_batches(epoch) for epoch in (0, 3, 4, 9)] == [1, 1, 2, 2]
    assert scheduler.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


def test_two_places_that_ask_for_accumulation_are_an_error() -> None:
    trainer = make_trainer(GradientAccumulationScheduler({2: 4}), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2.*both set.*Remove one of them"):
        trainer.fit(TinyModule(), tiny_loader())
    assert trainer.accumulate_grad_batches == 2


def test_manual_optimization_is_an_error() -> None:
    module = TinyModule()
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match=r"TinyModule\.automatic_optimization is False.*Remove the callback"):
        make_trainer(GradientAccumulationScheduler({2: 4})).fit(module, tiny_loader())


@pytest.mark.parametrize(
    ("scheduling", "error", "message"),
    [
        ({}, TypeError, r"scheduling=\{\}.*contains no epoch.*Pass a dict"),
        ([1, 2], TypeError, r"scheduling=\[1, 2\].*contains no epoch.*Pass a dict"),
        ({-1: 2}, ValueError, r"key -1, which is not an epoch.*whole numbers, starting at 0"),
        ({"4": 2}, ValueError, r"key '4', which is not an epoch.*whole numbers"),
        ({True: 2}, ValueError, r"key True, which is not an epoch"),
        ({4: 0}, ValueError, r"sets 0 batches per step from epoch 4 on.*at least 1"),
        ({4: 1.5}, ValueError, r"sets 1\.5 batches per step.*at least 1"),
    ],
)
def test_bad_schedules_are_errors_that_say_what_to_do(scheduling: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GradientAccumulationScheduler(scheduling)


def test_hooks_of_the_module_that_run_once_per_step_are_told_of() -> None:
    class Steps(TinyModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    with pytest.warns(
        messages.PacelineWarning, match=r"Steps overrides 'optimizer_step', which the trainer calls once per"
    ):
        make_trainer(GradientAccumulationScheduler({0: 2}), epochs=1).fit(Steps(), tiny_loader())
