"""When schedulers advance: also in an epoch that is skipped, cut short or finished later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from paceline import Trainer


class Scheduled(TinyModule):
    """Halves its learning rate at each step of its scheduler, and notes at which update that is."""

    def __init__(self, kind: str, interval: str) -> None:
        super().__init__(lr=1.0)
        self.kind, self.interval = kind, interval
        self.advanced: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx) * 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if self.kind == "plain":
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": self.interval}]
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        monitor = "loss" if self.interval == "epoch" else "train_loss"
        return [optimizer], [{"scheduler": plateau, "interval": self.interval, "monitor": monitor}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.advanced.append((self.trainer.current_epoch, self.trainer.global_step))
        super().lr_scheduler_step(scheduler, metric)


class Skipping(Scheduled):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


@pytest.mark.parametrize("kind", ["plain", "plateau"])
@pytest.mark.parametrize(
    ("interval", "accumulate", "advanced"),
    [
        ("epoch", 1, [(0, 3), (1, 6)]),
        ("epoch", 2, [(0, 2), (1, 4)]),
        ("step", 2, [(0, 1), (0, 2), (1, 3), (1, 4)]),  # the second of each epoch completes the short window
    ],
)
def test_schedulers_advance_in_an_epoch_whose_rest_is_skipped(
    kind: str, interval: str, accumulate: int, advanced: list[tuple[int, int]], quiet: dict[str, Any]
) -> None:
    module = Skipping(kind, interval)
    Trainer(**quiet, max_epochs=2, accumulate_grad_batches=accumulate).fit(module, tiny_loader(5))
    assert module.advanced == advanced


@pytest.mark.parametrize("again", ["resume", "fit"])
def test_an_epoch_plateau_advances_once_in_an_epoch_that_is_cut_and_finished_later(
    again: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    whole = Scheduled("plateau", "epoch")
    trainer = Trainer(**quiet, max_epochs=3)
    trainer.fit(whole, tiny_loader(4))
    expected = trainer.optimizers[0].param_groups[0]["lr"]
    cut = Scheduled("plateau", "epoch")
    trainer = Trainer(**quiet, max_steps=6)
    trainer.fit(cut, tiny_loader(4))
    assert cut.advanced == [(0, 4)]
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    if again == "resume":
        trainer = Trainer(**quiet, max_epochs=3)
        trainer.fit(cut, tiny_loader(4), ckpt_path=tmp_path / "cut.ckpt")
    else:
        trainer.max_steps, trainer.max_epochs = -1, 3
        trainer.fit(cut, tiny_loader(4))
    assert cut.advanced == whole.advanced == [(0, 4), (1, 8), (2, 12)]
    if again == "resume":
        assert trainer.optimizers[0].param_groups[0]["lr"] == expected


def test_a_plateau_scheduler_whose_value_comes_later_in_the_epoch_is_no_error_where_the_epoch_is_cut(
    quiet: dict[str, Any],
) -> None:
    class Late(Scheduled):
        def on_validation_epoch_end(self) -> None:
            self.log("late", 1.0)

        def configure_optimizers(self) -> Any:
            (optimizer,), (config,) = super().configure_optimizers()
            return [optimizer], [config | {"monitor": "late"}]

    module = Late("plateau", "epoch")
    trainer = Trainer(**quiet, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, tiny_loader(4), tiny_loader(1))
    assert (module.advanced, trainer.global_step) == ([], 2)
