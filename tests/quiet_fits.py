"""Fits without files and output, and callbacks that save one: ``from quiet_fits import SaveAt, loader, trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer
from paceline.callbacks.base import Callback


class SaveAt(Callback):
    """Saves when the given epoch, or its validation, ends."""

    monitors_metrics = True

    def __init__(self, epoch: int, path: Path) -> None:
        self.epoch = epoch
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


class SaveInValidation(SaveAt):
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)

    on_train_epoch_end = None  # type: ignore[assignment]


def loader(num: int = 20, shuffle: bool = False) -> DataLoader[Any]:
    """Batches of four rows of noise, 4 numbers and a target each."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num, 4, generator=generator)
    y = torch.randn(num, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=shuffle)


def trainer(path: Path, *callbacks: Callback, **kwargs: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": path,
    }
    return Trainer(callbacks=list(callbacks), **(quiet | kwargs))
