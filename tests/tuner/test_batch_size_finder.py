from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch.utils.data import DataLoader

from paceline import Callback, Trainer
from paceline.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
FULL = 1 << 46  # bytes that no machine has: the allocator refuses them


class Sized(TinyModule):
    def __init__(self, batch_size: int = 4, most: int = 10) -> None:
        super().__init__()
        self.batch_size, self.most = batch_size, most

    def check(self, batch: Any) -> None:
        if len(batch[0]) > self.most:
            torch.empty(FULL, dtype=torch.uint8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.check(batch)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.check(batch)
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.check(batch)
        return self(batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(tiny_loader(48, 1).dataset, self.batch_size, shuffle=True)

    test_dataloader = predict_dataloader = val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        total = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)]


class Sizes(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch[0]))

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.seen.append(len(batch[0]))


def test_a_fit_goes_on_with_the_size_and_its_schedule_knows_it() -> None:
    finder, sizes, module = BatchSizeFinder(), Sizes(), Sized()
    trainer = Trainer(**QUIET, max_epochs=2, callbacks=[sizes, finder], enable_checkpointing=False)
    trainer.fit(module)
    assert finder.optimal_batch_size == module.batch_size == 8
    assert [(t.size, t.fits) for t in finder.trials] == [(2, True), (4, True), (8, True), (16, False)]
    assert sizes.seen == [8] * 12
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 12


def test_a_loader_that_was_given_is_changed_itself() -> None:
    finder, sizes, module = BatchSizeFinder(mode="binsearch", margin=0.0), Sizes(), Sized(batch_size=3)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[sizes, finder], enable_checkpointing=False)
    loader = tiny_loader(16, 3, shuffle=True)
    trainer.fit(module, loader)
    assert loader.batch_size == module.batch_size == finder.optimal_batch_size == 10
    assert sizes.seen == [10, 10, 10, 10, 8]


@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_evaluation_goes_on_with_the_size(kind: str) -> None:
    finder, sizes, module = BatchSizeFinder(), Sizes(), Sized(batch_size=3)
    trainer = Trainer(**QUIET, callbacks=[sizes, finder], enable_checkpointing=False)
    result = getattr(trainer, kind)(module)
    assert finder.optimal_batch_size == module.batch_size == 8
    if kind == "predict":
        assert [len(batch) for batch in result] == [8] * 6
    if kind == "test":
        assert sizes.seen == [8] * 6
    plain = getattr(Trainer(**QUIET), kind)(module)
    assert kind == "predict" or result == [pytest.approx(plain[0])]


def on_two() -> Any:
    finder, sizes = BatchSizeFinder(effective_batch="keep"), Sizes()
    module = Sized(batch_size=16, most=5 if os.environ["RANK"] == "1" else 100)
    trainer = Trainer(
        **QUIET, strategy="ddp", max_epochs=1, callbacks=[finder, sizes, LearningRateFinder(num_training_steps=12)]
    )
    module.val_dataloader = None  # type: ignore[method-assign]
    trainer.fit(module)
    return finder.optimal_batch_size, trainer.accumulate_grad_batches, sizes.seen, trainer.global_step


def test_processes_agree_and_the_effective_batch_is_kept() -> None:
    # 48 samples on 2 processes: 24 each, 6 batches of 4, windows of 4 and 2
    assert ranks(2, on_two) == [(4, 4, [4] * 6, 2)] * 2


def test_a_fit_that_goes_on_takes_the_size_that_was_found_for_it(tmp_path: Path) -> None:
    class Plain(Sized):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def run(epochs: int, most: int, path: str | None) -> tuple[BatchSizeFinder, Sized]:
        finder, module = BatchSizeFinder(), Plain(most=most)
        save = ModelCheckpoint(dirpath=tmp_path, save_last=True)
        trainer = Trainer(**QUIET, max_epochs=epochs, callbacks=[save, finder])
        trainer.fit(module, ckpt_path=path)
        return finder, module

    run(1, 10, None)
    finder, module = run(2, 1000, "last")
    assert finder.trials == []
    assert module.batch_size == finder.optimal_batch_size == 8
