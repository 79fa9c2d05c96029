"""The smallest things that train: ``from tiny import QUIET, TinyModule, tiny_loader``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import TrainingModule

#: Trainer arguments that switch off everything optional.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class TinyModule(TrainingModule):
    """Linear regression; logs ``train_loss``, ``val_loss`` and ``test_loss``."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tiny_loader(batches: int = 4, batch_size: int = 2, shuffle: bool = False, seed: int = 0) -> DataLoader:
    """``batches`` full batches of a noiseless linear problem."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * batch_size, 4, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)
