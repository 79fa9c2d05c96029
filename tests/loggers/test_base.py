from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer, loggers, messages
from paceline.loggers import DummyLogger
from paceline.loggers.base import Nothing, rank_zero_experiment


def test_a_dummy_logger_has_every_method_with_any_arguments() -> None:
    logger: Any = DummyLogger()
    assert logger[0] is logger
    assert logger.log_image("key", [1, 2], step=3) is None
    assert logger.log_metrics(1, two=2) is logger.log_hyperparams() is None
    logger.experiment["key"] = "value"
    assert logger.experiment["key"] != "value"
    with pytest.raises(AttributeError, match="'DummyLogger' object has no attribute '_private'"):
        _ = logger._private


def test_a_dummy_logger_can_be_copied_and_pickled() -> None:
    for again in (copy.deepcopy(DummyLogger()), pickle.loads(pickle.dumps(DummyLogger()))):
        assert again.name == ""


def test_a_fast_dev_run_calls_methods_of_the_logger_that_it_replaces() -> None:
    class Draws(TinyModule):
        def on_train_end(self) -> None:
            self.logger.log_image("weights", [self.layer.weight])  # type: ignore[union-attr]

    trainer = Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Draws(), tiny_loader(1), tiny_loader(1))
    assert isinstance(trainer.logger, DummyLogger)


def test_the_experiment_of_a_logger_of_ones_own_is_made_on_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(DummyLogger):
        @property
        @rank_zero_experiment
        def experiment(self) -> str:
            """Made."""
            return "made"

    assert Mine().experiment == "made"
    monkeypatch.setattr(messages, "is_rank_zero", lambda: False)
    assert isinstance(Mine().experiment, Nothing)


def test_every_logger_takes_values_and_settings_by_keyword() -> None:
    for name in loggers.__all__:
        kind = getattr(loggers, name)
        if kind is not DummyLogger:
            assert list(inspect.signature(kind.log_metrics).parameters) == ["self", "metrics", "step"], name
            first, second, third, *others = inspect.signature(kind.log_hyperparams).parameters.values()
            assert [first.name, second.name, third.name] == ["self", "params", "metrics"], name
            assert all(other.default is None for other in others), name
    dummy = DummyLogger()
    dummy.log_metrics(metrics={"loss": 1.0}, step=3)
    dummy.log_hyperparams(params={"lr": 0.1})
    dummy.log_image(key="anything", images=[])
