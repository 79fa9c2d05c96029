"""Bad batches planted in the data: what the guard leaves out is as if it had not been there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import LossGuard, ModelCheckpoint
from paceline.loggers import CSVLogger

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
BATCHES = 12
BAD = {4: math.nan, 8: 1e6, 11: math.inf}


class Net(TrainingModule):
    """Batch norm, dropout, momentum and a scheduler, all of which a bad batch would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        self.seen.append(x[0, 1].item())
        loss = (self.layers(x) - x[:, :1]).pow(2).mean() + x[:, 2].mean()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class OwnStep(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)


def data(bad: dict[int, float], left_out: bool = False, size: int = 4) -> DataLoader[Any]:
    """``BATCHES`` batches with what is bad in the last column; or those alone that are not bad."""
    x = torch.randn(BATCHES, size, 3, generator=torch.Generator().manual_seed(3))
    x[:, :, 1] = torch.arange(BATCHES)[:, None]
    x[:, :, 2] = 0.0
    for index, value in bad.items():
        x[index, :, 2] = value
    kept = [index for index in range(BATCHES) if not (left_out and index in bad)]
    return DataLoader(TensorDataset(x[kept].flatten(0, 1)), batch_size=size)


def fit(loader: Any, *callbacks: Any, kind: type[Net] = Net, ckpt_path: Any = None, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    settings = {"max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = Trainer(callbacks=list(callbacks), **{**QUIET, **settings})
    trainer.fit(kind(), loader, ckpt_path=ckpt_path)
    return trainer


def guard(**options: Any) -> LossGuard:
    return LossGuard(window=5, warmup=3, **options)


def same_state(one: Trainer, other: Trainer) -> None:
    states = [trainer.training_module.state_dict() for trainer in (one, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    momenta: list[list[Tensor]] = [
        [s["momentum_buffer"] for s in t.optimizers[0].state_dict()["state"].values()] for t in (one, other)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
    assert one.optimizers[0].param_groups[0]["lr"] == other.optimizers[0].param_groups[0]["lr"]
    assert one.global_step == other.global_step


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Net, OwnStep])
def test_skipped_batches_leave_no_trace(accumulate: int, kind: type[Net], caplog: Any) -> None:
    careful = guard()
    guarded = fit(data(BAD), careful, accumulate_grad_batches=accumulate, kind=kind)
    same_state(guarded, fit(data(BAD, left_out=True), accumulate_grad_batches=accumulate, kind=kind))
    assert sorted(careful.batches) == [(epoch, batch) for epoch in range(2) for batch in BAD]
    assert careful.left_out == 6
    assert math.isfinite(guarded.callback_metrics["train_loss_epoch"])


def test_without_a_guard_the_same_data_spoil_the_weights() -> None:
    weights = fit(data(BAD)).training_module.state_dict()
    assert not all(torch.isfinite(value).all() for value in weights.values())
