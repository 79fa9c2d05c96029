"""Pickling and copying Trainers, modules, callbacks and loggers, before and after a fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import DataModule, Trainer
from paceline.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    LossGuard,
    ModelCheckpoint,
    RunReport,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from paceline.loggers import CSVLogger, TensorBoardLogger

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "deepcopy": copy.deepcopy,
}


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()

    def val_dataloader(self) -> Any:
        return tiny_loader()


def weights(module: TinyModule) -> torch.Tensor:
    return module.layer.weight.detach().clone()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
        {"precision": "16-mixed"},
        {"profiler": "simple"},
        {"detect_anomaly": True},
    ],
    ids=str,
)
def test_a_copy_of_a_trainer_keeps_what_is_read_and_fits_as_the_original(
    given: dict[str, Any], how: str, quiet: dict[str, Any]
) -> None:
    copied_and_compared(how, {**quiet, **given})


def test_a_trainer_of_ddp_can_be_copied_too(quiet: dict[str, Any]) -> None:
    ranks(1, copied_and_compared, "pickle", {**quiet, "strategy": "ddp", "precision": "bf16-mixed"})


def fit(trainer: Trainer, module: TinyModule) -> torch.Tensor:
    trainer.fit(module, datamodule=Data())
    return weights(module)


def fresh() -> TinyModule:
    torch.manual_seed(7)
    return TinyModule()


def copied_and_compared(how: str, given: dict[str, Any]) -> None:
    trainer = Trainer(**given, max_epochs=1)
    before = COPIES[how](trainer)
    module = fresh()
    expected = fit(trainer, module)
    assert torch.equal(fit(before, fresh()), expected)
    after = COPIES[how](trainer)
    assert after.callback_metrics.keys() == trainer.callback_metrics.keys() != set()
    assert all(torch.equal(value, trainer.callback_metrics[key]) for key, value in after.callback_metrics.items())
    assert (after.global_step, after.current_epoch) == (trainer.global_step, trainer.current_epoch)
    theirs = after.lightning_module
    assert torch.equal(weights(theirs), expected)
    assert theirs.trainer is after
    assert after.datamodule.trainer is after
    assert after.optimizers[0].param_groups[0]["params"][0] is theirs.layer.weight
    after.validate(verbose=False, datamodule=Data())
    after.max_epochs = trainer.max_epochs = 2
    again, again_there = fit(trainer, module), fit(after, theirs)
    assert torch.equal(again, again_there)
    assert not torch.equal(again, expected)


class InTheMiddle(TinyModule):
    """Copies its trainer once."""

    copied: Trainer | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            InTheMiddle.copied = pickle.loads(pickle.dumps(self.trainer))


def test_a_trainer_copied_in_the_middle_of_a_fit_is_ready_for_another_run(quiet: dict[str, Any]) -> None:
    Trainer(**quiet, max_epochs=1).fit(InTheMiddle(), tiny_loader())
    other = InTheMiddle.copied
    assert other is not None
    assert (other.global_step, other.state.fn) == (2, None)
    other.fit(TinyModule(), tiny_loader())
    assert other.state.status == "finished"


CALLBACKS: dict[str, Callable[[], Any]] = {
    "DeviceStatsMonitor": lambda: DeviceStatsMonitor(cpu_stats=True),
    "EarlyStopping": lambda: EarlyStopping("val_loss"),
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.9),
    "LearningRateMonitor": LearningRateMonitor,
    "LossGuard": lambda: LossGuard(warmup=1),
    "ModelCheckpoint": ModelCheckpoint,
    "RunReport": RunReport,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1),
    "ThroughputMonitor": lambda: ThroughputMonitor(size_of, window_size=2),
    "Timer": lambda: Timer("00:01:00:00"),
    "WeightAveraging": WeightAveraging,
    "WeightAveraging(avg_fn)": lambda: WeightAveraging(avg_fn=halfway),
}


def size_of(batch: Any) -> int:
    return len(batch[0])


def halfway(average: torch.Tensor, current: torch.Tensor, count: int) -> torch.Tensor:
    return (average + current) / 2


@pytest.mark.filterwarnings("ignore::paceline.messages.PacelineWarning")
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_loggers_and_the_module_can_be_copied_before_and_after_a_fit(
    name: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    callback, module, data = CALLBACKS[name](), TinyModule(), Data()
    loggers = [CSVLogger(tmp_path), *([TensorBoardLogger(tmp_path)] if name == "ModelCheckpoint" else [])]
    more = {"logger": loggers, "callbacks": [callback], "enable_checkpointing": None}
    trainer = Trainer(**{**quiet, **more}, max_epochs=2, log_every_n_steps=1)
    for _ in range(2):
        for how in COPIES.values():
            how(callback)
            how(loggers)
            other = how(trainer)
            assert [type(one) for one in other.callbacks] == [type(one) for one in trainer.callbacks]
            assert torch.equal(weights(how(module)), weights(module))
            assert how(data).trainer is None
        if trainer.state.status != "finished":
            trainer.fit(module, datamodule=data)


def test_a_module_that_fsdp_has_split_says_how_to_keep_it(quiet: dict[str, Any]) -> None:
    def run() -> None:
        module = TinyModule()
        Trainer(**quiet, max_epochs=1, strategy="fsdp").fit(module, tiny_loader())
        for how in COPIES.values():
            with pytest.raises(TypeError, match=r"TinyModule cannot be copied or pickled, .* trainer\.save_checkpoint"):
                how(module)

    ranks(1, run)


def test_a_shallow_copy_shares_what_the_original_has_and_leaves_it_as_it_is(quiet: dict[str, Any]) -> None:
    doubles: list[Trainer] = []

    class Copied(TinyModule):
        def on_train_epoch_end(self) -> None:
            doubles.append(copy.copy(self.trainer))

    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(module := Copied(), tiny_loader(3))
    assert (trainer.global_step, trainer.callback_metrics.keys()) == (3, {"train_loss"})
    assert module.trainer is trainer
    assert (doubles[0].state, doubles[0].callbacks) == (trainer.state, trainer.callbacks)
