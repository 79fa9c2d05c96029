"""Train for three epochs, resume for one more, and print the loss.

    python fit.py cpu FOLDER    one process
    python fit.py ddp FOLDER    two processes

With two processes, each gets half of each batch, so both commands print the same loss up to rounding.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule, seed_everything


class Regression(TrainingModule):
    """A small network trained to add four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean squared error of one batch."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an Adam optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train, resume, and print the number of steps and the loss."""
    strategy, folder = sys.argv[1:]
    processes = 2 if strategy == "ddp" else 1
    points = torch.randn(128, 4, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=16 // processes, shuffle=True)
    for epochs in (3, 4):
        seed_everything(1)
        trainer = Trainer(
            max_epochs=epochs, accelerator="cpu", strategy=strategy, devices=processes, default_root_dir=folder
        )
        trainer.fit(Regression(), loader, ckpt_path="auto")
    if trainer.is_global_zero:
        print(f"steps {trainer.global_step} loss {trainer.callback_metrics['loss'].item():.6f}")


if __name__ == "__main__":
    main()
