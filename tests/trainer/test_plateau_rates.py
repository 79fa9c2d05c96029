"""Learning rates that follow a metric: the same on every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline import Trainer


class Watching(TinyModule):
    """Watches a training loss that each process logs for itself."""

    def __init__(self, interval: str) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.interval = interval
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        by_step = self.interval == "step"
        self.log("own_loss", loss, sync_dist=None if by_step else False, on_step=by_step, on_epoch=not by_step)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "own_loss", "interval": self.interval},
        }


def rates_of_a_fit(strategy: str, batch_size: int, interval: str) -> list[float]:
    torch.manual_seed(5)
    module = Watching(interval)
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        strategy=strategy,
        max_epochs=6,
    )
    trainer.fit(module, tiny_loader(32 // batch_size, batch_size, shuffle=True))
    return module.rates


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_all_processes_reduce_the_rate_when_one_process_would(interval: str) -> None:
    alone = rates_of_a_fit("single_device", 8, interval)
    assert len(set(alone)) > 1
    assert ranks(2, rates_of_a_fit, "ddp", 4, interval) == [alone, alone]
