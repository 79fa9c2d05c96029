from __future__ import annotations

from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks.base import HOOKS
from paceline.callbacks.lambda_callback import LambdaCallback


def fit(*callbacks: LambdaCallback) -> Trainer:
    trainer = Trainer(
        callbacks=list(callbacks),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    return trainer


def test_functions_are_called_with_the_hooks_arguments() -> None:
    seen: list[Any] = []
    trainer = fit(
        LambdaCallback(
            setup=lambda trainer, pl_module, stage: seen.append(stage),
            on_train_batch_end=lambda trainer, pl_module, outputs, batch, batch_idx: seen.append(batch_idx),
            on_fit_end=lambda *everything: seen.append(everything),
        )
    )
    assert seen == ["fit", 0, 1, 2, 3, 0, 1, 2, 3, (trainer, trainer.training_module)]


def test_only_given_hooks_exist() -> None:
    trainer = fit(LambdaCallback(on_train_start=lambda trainer, pl_module: None, on_train_end=None))
    defined = [name for name in HOOKS if getattr(trainer.current_run.hooks, name) and name.startswith("on_train")]
    assert defined == ["on_train_start"]


def test_several_live_in_one_run() -> None:
    seen: list[str] = []
    fit(*(LambdaCallback(on_fit_start=lambda trainer, pl_module, name=name: seen.append(name)) for name in "ab"))
    assert seen == ["a", "b"]


def test_a_function_with_other_arguments_is_an_error_when_the_run_starts() -> None:
    with pytest.raises(TypeError, match=r"on_train_start.*cannot be called with \(trainer, pl_module\)"):
        fit(LambdaCallback(on_train_start=lambda trainer: None))


def test_an_unknown_hook_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        ValueError, match=r"hook 'on_train_batch_ends'\. Did you mean 'on_train_batch_end'\? Choose 'setup'"
    ):
        LambdaCallback(on_train_batch_ends=lambda *everything: None)


def test_a_hook_that_cannot_be_called_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"LambdaCallback\(on_fit_end=\) got 3 of type int.*Callback\.on_fit_end"):
        LambdaCallback(on_fit_end=3)
