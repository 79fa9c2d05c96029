"""The base of all callbacks: its hooks, its key, its state."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    RunReport,
    Timer,
    TQDMProgressBar,
)
from paceline.callbacks.base import FIT_PSEUDO_CODE, HOOKS
from paceline.loggers import CSVLogger


def test_every_hook_takes_the_trainer_and_the_module_first() -> None:
    for name in HOOKS:
        assert list(inspect.signature(getattr(Callback, name)).parameters)[:3] == ["self", "trainer", "pl_module"], name


def test_the_hooks_are_those_of_a_fit_and_of_the_evaluations() -> None:
    assert len(set(HOOKS)) == len(HOOKS)
    for stage in ("train", "validation", "test", "predict"):
        for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end"):
            assert f"on_{stage}_{moment}" in HOOKS
    assert {"setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint"} <= set(HOOKS)
    assert not {"state_dict", "load_state_dict", "state_key"} & set(HOOKS)


def test_a_hook_does_nothing_by_default() -> None:
    callback = Callback()
    for name in HOOKS:
        method = getattr(callback, name)
        assert method(*range(len(inspect.signature(method).parameters))) is None
    assert callback.state_dict() == {}
    assert callback.load_state_dict({}) is None


def test_the_pseudo_code_is_python() -> None:
    compile(FIT_PSEUDO_CODE, "fit", "exec")


def test_a_state_key_is_the_class_and_what_tells_instances_apart() -> None:
    class Keyed(Callback):
        def __init__(self, monitor: str) -> None:
            self.monitor = monitor

        @property
        def state_key(self) -> str:
            return self._generate_state_key(monitor=self.monitor)

    assert Callback().state_key == "Callback"
    assert Keyed("a").state_key == f"{Keyed.__qualname__}{{'monitor': 'a'}}"
    assert Keyed("a").state_key != Keyed("b").state_key


@pytest.mark.parametrize(
    ("kind", "arguments", "idle"),
    [
        (LearningRateMonitor, {"logging_interval": "epoch"}, ("on_before_optimizer_step",)),
        (LearningRateMonitor, {"logging_interval": "step"}, ()),
        (ModelCheckpoint, {"save_last": True}, ("on_train_batch_end",)),
        (ModelSummary, {"max_depth": 0}, ()),
        (RichProgressBar, {"refresh_rate": 0}, ("on_train_batch_end", "on_validation_batch_end")),
        (RunReport, {}, ()),
        (Timer, {"duration": "00:01:00:00", "interval": "epoch"}, ("on_train_batch_end",)),
        (Timer, {}, ("on_train_batch_end",)),
        (TQDMProgressBar, {"refresh_rate": 0}, ("on_train_batch_end", "on_validation_batch_end")),
    ],
)
def test_an_idle_hook_costs_nothing_until_a_subclass_defines_it(
    kind: Any, arguments: dict[str, Any], idle: tuple[str, ...], quiet: dict[str, Any], tmp_path: Path
) -> None:
    called: set[str] = set()

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            called.add(name)
            return getattr(super(mine, self), name)(*args)

        return hook

    bar = None if kind in (RichProgressBar, TQDMProgressBar) else False
    mine = type("Mine", (kind,), {name: noting(name) for name in HOOKS})
    plain, own = kind(**arguments), mine(**arguments)
    settings = {name: value for name, value in quiet.items() if value is not False} | {"logger": CSVLogger(tmp_path)}
    for callback in (plain, own):
        trainer = Trainer(**settings, callbacks=[callback], fast_dev_run=True, enable_progress_bar=bar)
        trainer.fit(TinyModule(), tiny_loader(1), tiny_loader(1))
    assert {name for name in HOOKS if name.startswith(("on_train_", "on_validation_", "on_fit_"))} <= called
    assert "on_before_optimizer_step" in called
    assert [name for name in idle if getattr(plain, name) is not None] == []


def test_two_callbacks_of_one_class_keep_their_states_under_their_keys(quiet: dict[str, Any], tmp_path: Any) -> None:
    class Counts(Callback):
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        @property
        def state_key(self) -> str:
            return self._generate_state_key(name=self.name)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.count += 1 if self.name == "a" else 10

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    trainer = Trainer(**quiet, max_epochs=1, callbacks=[Counts("a"), Counts("b")])
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = [Counts("b"), Counts("a")]
    Trainer(**quiet, max_epochs=2, callbacks=again).fit(TinyModule(), tiny_loader(), ckpt_path=tmp_path / "x.ckpt")
    assert [callback.count for callback in again] == [80, 8]


@pytest.mark.parametrize("value", [0, None, 1, "stop"])
def test_only_minus_one_from_on_train_batch_start_skips_the_epoch(value: Any, quiet: dict[str, Any]) -> None:
    class Returns(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
            return value

    trainer = Trainer(**quiet, max_epochs=1, callbacks=Returns())
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4
