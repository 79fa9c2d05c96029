"""The base of all callbacks: its hooks, its key, its state."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks.base import FIT_PSEUDO_CODE, HOOKS


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
