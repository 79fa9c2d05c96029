"""What a Trainer is doing, as words."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.trainer.states import RunningStage, TrainerFn, TrainerStatus


def test_the_words_of_a_run(quiet: dict[str, Any]) -> None:
    seen: list[tuple[Any, Any, Any]] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            seen.append((trainer.state.fn, trainer.state.stage, trainer.state.status))

        def on_validation_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            seen.append((trainer.state.fn, trainer.state.stage, trainer.state.status))

    trainer = Trainer(
        **{**quiet, "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}, callbacks=[Look()]
    )
    assert trainer.state.status is TrainerStatus.INITIALIZING
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    fit, running = TrainerFn.FITTING, TrainerStatus.RUNNING
    stages = [RunningStage.SANITY_CHECKING, RunningStage.TRAINING, RunningStage.VALIDATING]
    assert seen == [(fit, stage, running) for stage in stages]
    assert trainer.state.status is TrainerStatus.FINISHED
    assert trainer.state.finished


@pytest.mark.parametrize("kind", [TrainerStatus, TrainerFn, RunningStage])
def test_a_word_is_its_string_everywhere(kind: Any) -> None:
    for word in kind:
        assert word == word.value == str(word) == f"{word}"
        assert {word.value: 1}[word] == 1
        assert kind(word.value) is word


def test_which_stages_evaluate_and_what_their_loaders_are_called() -> None:
    assert [stage.value for stage in RunningStage if stage.evaluating] == ["sanity_check", "validate", "test"]
    assert [stage.dataloader_prefix for stage in RunningStage] == ["train", None, "val", "test", "predict"]
    assert TrainerStatus.INTERRUPTED.stopped
    assert not TrainerStatus.RUNNING.stopped
