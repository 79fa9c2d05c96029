"""Norms of sharded parameters and gradients, logged: those of the whole tensors, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn

from paceline import Accelerator, Trainer
from paceline.utilities import grad_norm


class Norms(TinyModule):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return super().forward(self.hidden(x))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.hidden.weight
        self.log("last", weight.norm())
        self.log("mean", weight.norm(), on_epoch=True)
        self.log("max", weight.grad.norm(), on_epoch=True, reduce_fx="max")
        self.log_dict(grad_norm(self, 2))
        self.log_dict({"one": weight.norm(), "other": weight.abs().max()})


def fit(strategy: str, batch_size: int) -> dict[str, float]:
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2)
    trainer.fit(Norms(), tiny_loader(16 // batch_size, batch_size))
    return {name: value.item() for name, value in trainer.callback_metrics.items() if name != "train_loss"}


def own_loop(folder: Path) -> None:
    from paceline.accelerator.plugins import FullyShardedDataParallelPlugin

    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), log_with="csv", project_dir=folder
    )
    accelerator.init_trackers("norms")
    torch.manual_seed(3)
    model = accelerator.prepare(nn.Linear(4, 4))
    accelerator.log({"norm": model.weight.norm()}, step=0)
    accelerator.end_training()


def test_a_trainer_logs_the_norms_of_one_process() -> None:
    alone = fit("single_device", 4)
    assert len(alone) > 8
    for found in ranks(2, fit, "fsdp", 2):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


class OnRankZero(Norms):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("n", self.hidden.weight.norm(), rank_zero_only=True)


def fit_on_rank_zero() -> None:
    Trainer(**QUIET, strategy="fsdp", max_epochs=1).fit(OnRankZero(), tiny_loader())


def test_a_norm_of_a_part_cannot_be_logged_on_rank_zero_only() -> None:
    with pytest.raises(RanksError, match=r"got a sharded tensor.*full_tensor"):
        ranks(2, fit_on_rank_zero)


def test_an_accelerator_logs_the_norm_of_the_whole_weight(tmp_path: Path) -> None:
    ranks(2, own_loop, tmp_path)
    torch.manual_seed(3)
    (file,) = tmp_path.rglob("*.csv")
    header, row = file.read_text().splitlines()
    logged = dict(zip(header.split(","), row.split(","), strict=True))
    torch.testing.assert_close(float(logged["norm"]), nn.Linear(4, 4).weight.norm().item(), rtol=1e-4, atol=1e-6)
