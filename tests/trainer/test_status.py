"""What can be asked of a Trainer before, during and after a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline import Callback, DataModule, Trainer, TrainingModule
from paceline.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, RichProgressBar


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = [torch.ones(1)] * 6
NAMES = [
    "current_epoch",
    "global_step",
    "is_last_batch",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "num_training_batches",
    "num_val_batches",
    "num_sanity_val_batches",
    "num_test_batches",
    "num_predict_batches",
    "estimated_stepping_batches",
    "train_dataloader",
    "val_dataloaders",
    "test_dataloaders",
    "predict_dataloaders",
    "datamodule",
    "distributed_sampler_kwargs",
    "enable_validation",
    "model",
    "training_module",
    "lightning_module",
    "optimizers",
    "lr_scheduler_configs",
    "scaler",
    "precision",
    "precision_plugin",
    "strategy",
    "accelerator",
    "global_rank",
    "local_rank",
    "node_rank",
    "world_size",
    "num_nodes",
    "num_devices",
    "device_ids",
    "is_global_zero",
    "logger",
    "loggers",
    "log_dir",
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "log_every_n_steps",
    "profiler",
    "callbacks",
    "checkpoint_callback",
    "checkpoint_callbacks",
    "early_stopping_callback",
    "early_stopping_callbacks",
    "progress_bar_callback",
    "default_root_dir",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "fast_dev_run",
    "reload_dataloaders_every_n_epochs",
    "barebones",
    "state",
    "interrupted",
    "training",
    "validating",
    "testing",
    "predicting",
    "evaluating",
    "sanity_checking",
    "received_sigterm",
    "should_stop",
    "ckpt_path",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_can_be_read_in_a_run(name: str, quiet: dict[str, Any]) -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            getattr(trainer, name)

    trainer = Trainer(max_epochs=1, **quiet, callbacks=[Reads()])
    trainer.fit(Net(), DATA, DATA)
    getattr(trainer, name)


def test_the_stage_is_told_while_it_lasts(quiet: dict[str, Any]) -> None:
    seen: list[str] = []

    class Watch(Callback):
        def look(self, trainer: Any) -> None:
            stages = ("training", "validating", "testing", "predicting", "sanity_checking")
            seen.append(" ".join([str(trainer.state.fn), *(s for s in stages if getattr(trainer, s))]))

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.look(trainer)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.look(trainer)

        def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
            self.look(trainer)

    trainer = Trainer(max_epochs=1, **quiet, callbacks=[Watch()])
    trainer.fit(Net(), DATA, DATA)
    trainer.validate(Net(), DATA, verbose=False)
    trainer.predict(Net(), DATA)
    assert seen == [
        "fit sanity_checking",
        "fit training",
        "fit validating",
        "validate validating",
        "predict predicting",
    ]
    assert (trainer.state.fn, trainer.training, trainer.validating) == (None, False, False)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 3}, 18),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": -1, "max_steps": 7}, 7),
        ({"max_epochs": 2, "limit_train_batches": 4}, 8),
        ({"max_epochs": -1, "max_time": "00:00:00:05"}, math.inf),
        ({"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({1: 2, 2: 6})]}, 6 + 3 + 1),
    ],
)
def test_estimated_stepping_batches(arguments: dict[str, Any], steps: float, quiet: dict[str, Any]) -> None:
    seen: list[float] = []

    class Asks(Net):
        def configure_optimizers(self) -> Any:
            seen.append(self.trainer.estimated_stepping_batches)
            self.trainer.should_stop = True
            return super().configure_optimizers()

    Trainer(**{**quiet, **arguments}).fit(Asks(), DATA)
    assert seen == [steps]


def test_the_estimate_is_what_a_fit_makes(quiet: dict[str, Any]) -> None:
    trainer = Trainer(max_epochs=3, **quiet, callbacks=[GradientAccumulationScheduler({1: 4})])
    trainer.fit(Net(), DATA)
    assert trainer.estimated_stepping_batches == trainer.global_step == 6 + 2 + 2


def test_defaults_are_there_unless_the_user_brings_them(tmp_path: Any) -> None:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu")
    assert [type(c).__name__ for c in trainer.callbacks] == ["RichProgressBar", "ModelSummary", "ModelCheckpoint"]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["TensorBoardLogger"]
    mine = [ModelCheckpoint(), EarlyStopping("v"), RichProgressBar()]
    trainer = Trainer(max_epochs=1, callbacks=mine, logger=False, enable_model_summary=False)
    assert trainer.callbacks == [mine[1], mine[2], mine[0]]
    assert trainer.checkpoint_callback is mine[0]
    assert trainer.early_stopping_callback is mine[1]
    assert trainer.progress_bar_callback is mine[2]


def test_a_callback_of_the_module_replaces_one_of_its_type(quiet: dict[str, Any]) -> None:
    theirs = EarlyStopping("v", patience=9)

    class Brings(Net):
        def configure_callbacks(self) -> Any:
            return theirs

    trainer = Trainer(max_epochs=1, **quiet, callbacks=[EarlyStopping("v", patience=1)])
    trainer.fit(Brings(), DATA, DATA)
    assert trainer.early_stopping_callbacks == [theirs]


def test_a_datamodule_may_stand_where_the_loaders_do(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    class Data(DataModule):
        def prepare_data(self) -> None:
            order.append("data prepare")

        def setup(self, stage: str) -> None:
            order.append(f"data setup {stage}")

        def train_dataloader(self) -> Any:
            return DATA

        def teardown(self, stage: str) -> None:
            order.append("data teardown")

    class Hooked(Net):
        def setup(self, stage: str) -> None:
            order.append("module setup")

        def teardown(self, stage: str) -> None:
            order.append("module teardown")

    class Hooks(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            order.append("callback setup")

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            order.append("callback teardown")

    trainer = Trainer(max_epochs=1, **quiet, callbacks=[Hooks()])
    trainer.fit(Hooked(), Data())
    assert trainer.global_step == 6
    assert order == [
        "data prepare",
        "data setup fit",
        "callback setup",
        "module setup",
        "data teardown",
        "callback teardown",
        "module teardown",
    ]


def test_a_path_set_on_the_trainer_holds_for_all_entry_points(quiet: dict[str, Any], tmp_path: Any) -> None:
    trainer = Trainer(max_epochs=1, **quiet)
    module = Net()
    trainer.fit(module, DATA)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = module.layer.weight.detach().clone()
    torch.nn.init.zeros_(module.layer.weight)
    trainer.ckpt_path = tmp_path / "a.ckpt"
    trainer.validate(module, DATA, verbose=False)
    assert torch.equal(module.layer.weight, saved)


def ranks_told(trainer: Trainer) -> dict[str, Any]:
    names = ("device_ids", "num_devices", "num_nodes", "node_rank", "local_rank", "global_rank", "world_size")
    return {name: getattr(trainer, name) for name in (*names, "is_global_zero")}


def ranks_told_by(strategy: str) -> list[dict[str, Any]]:
    class Asks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            found.append(ranks_told(trainer))

    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Asks()],
    )
    found = [ranks_told(trainer)]
    trainer.fit(Net(), DataLoader(torch.ones(4, 1)))
    return [*found, ranks_told(trainer)]


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_each_rank_knows_its_place_and_the_devices_of_its_machine_before_during_and_after_a_run(strategy: str) -> None:
    alike = {"device_ids": [0, 1], "num_devices": 2, "num_nodes": 1, "node_rank": 0, "world_size": 2}
    for rank, told in enumerate(ranks(2, ranks_told_by, strategy)):
        own = {"local_rank": rank, "global_rank": rank, "is_global_zero": rank == 0}
        assert told == [alike | own] * 3


@pytest.mark.gpu
def test_the_devices_of_a_machine_are_told_by_their_own_indices(quiet: dict[str, Any]) -> None:
    last = torch.cuda.device_count() - 1
    for strategy in ("ddp", "auto"):
        assert Trainer(**(quiet | {"accelerator": "gpu"}), devices=[last], strategy=strategy).device_ids == [last]
