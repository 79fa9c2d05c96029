"""A run that goes on from a checkpoint does, to the bit, what the run that wrote it did next."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Callback, DataModule, Trainer, TrainingModule, seed_everything
from paceline.callbacks import ModelCheckpoint
from paceline.checkpoint import single_file
from paceline.processes.seed import random_states

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
EPOCHS = 4


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are changed at random, by every generator, each time they are asked for."""

    def __init__(self, size: int = 14) -> None:
        self.x = torch.linspace(-1, 1, size * 3).view(size, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return torch.tensor(index), self.x[index] + 0.1 * noise


class Net(TrainingModule):
    """Dropout, batch norm, momentum, a scheduler per step and one per epoch; keeps what it trained on."""

    def __init__(self, width: int = 8, lr: float = 0.05, plateau: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))
        self.seen: list[tuple[int, list[int], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x = batch["a"] if isinstance(batch, dict) else batch
        loss = (self.layers(x) - random.random()).pow(2).mean()
        self.seen.append((self.current_epoch, index.tolist(), loss.item()))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch[1]).mean() + random.random())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("first_weight", self.layers[0].weight[0, 0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        per_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        per_epoch: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if self.hparams.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            per_epoch = {"scheduler": plateau, "monitor": "val_loss", "strict": False}
        return [optimizer], [{"scheduler": per_step, "interval": "step"}, per_epoch]


def loader(workers: int = 0, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=shuffle, num_workers=workers)


class NoLength:
    """An iterable over batches that does not say how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(shuffle=False))


LOADERS: dict[str, Callable[[int], Any]] = {
    "one": loader,
    "two": lambda workers: {"a": loader(workers), "b": loader(workers)},
    "no length": lambda workers: NoLength(),
}


def train(
    folder: Path,
    *,
    ckpt_path: Any = None,
    seed: int = 0,
    workers: int = 0,
    data: str = "one",
    validate: bool = False,
    plateau: bool = False,
    save_after_validation: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Fit ``EPOCHS`` epochs, every epoch saved in ``folder``; returns everything that could differ from another run."""
    seed_everything(seed, verbose=False)
    module = Net(plateau=plateau)
    at_end = not save_after_validation
    keeper = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=at_end)
    trainer = Trainer(**{**QUIET, "max_epochs": EPOCHS, "callbacks": [keeper], **arguments})
    val_loader = loader(workers, shuffle=False) if validate else None
    trainer.fit(module, LOADERS[data](workers), val_loader, ckpt_path=ckpt_path)
    return {
        "seen": module.seen,
        "weights": {key: value.clone() for key, value in module.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "random": random_states(),
        "precision": trainer.strategy.precision.state_dict(),
        "counters": trainer.state.state_dict(),
        "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
    }


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert equality to the bit, naming the first place that differs."""
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{index}]")
    else:
        assert a == b, where


def same_from(epoch: int, whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    expected = [seen for seen in whole["seen"] if seen[0] >= epoch]
    assert {seen[0] for seen in expected} == set(range(epoch, EPOCHS))
    same(resumed, {**whole, "seen": expected})


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"workers": 2},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed"},
    "accumulation": {"accumulate_grad_batches": 3},
    "validation": {"validate": True},
    "plateau": {"validate": True, "plateau": True, "check_val_every_n_epoch": 2},
    "two loaders": {"data": "two"},
    "no length": {"data": "no length"},
    "saved after validation": {"validate": True, "save_after_validation": True},
    "saved after validation, two loaders": {"validate": True, "save_after_validation": True, "data": "two"},
    "saved after validation, no length": {"validate": True, "save_after_validation": True, "data": "no length"},
    "all": {"workers": 2, "validate": True, "precision": "bf16-mixed", "accumulate_grad_batches": 3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_resume_at_an_epoch_is_bit_identical_to_the_uninterrupted_run(tmp_path: Path, settings: dict[str, Any]):
    whole = train(tmp_path / "whole", **settings)
    resumed = train(tmp_path / "resumed", ckpt_path=tmp_path / "whole" / "epoch=1.ckpt", seed=5, **settings)
    same_from(2, whole, resumed)


def test_every_epoch_is_shuffled_anew(tmp_path: Path):
    seen = train(tmp_path)["seen"]
    orders = {tuple(index for at, indices, _ in seen if at == epoch for index in indices) for epoch in range(EPOCHS)}
    assert len(orders) == EPOCHS
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(14))}


@pytest.mark.cold
def test_resume_in_a_fresh_process_is_bit_identical(tmp_path: Path):
    whole = train(tmp_path / "whole", **SETTINGS["all"])
    command = [sys.executable, __file__, str(tmp_path), "all"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 0, done.stderr
    same_from(2, whole, torch.load(tmp_path / "resumed.pt"))


def python_path() -> str:
    return os.pathsep.join([str(Path(__file__).resolve().parents[3]), *sys.path])


def test_a_resumed_run_can_be_resumed_again(tmp_path: Path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "first", max_epochs=1)
    train(tmp_path / "second", ckpt_path=tmp_path / "first" / "epoch=0.ckpt", seed=1, max_epochs=3)
    third = train(tmp_path / "third", ckpt_path=tmp_path / "second" / "epoch=2.ckpt", seed=2)
    same_from(3, whole, third)


def test_saving_changes_nothing_in_the_run_that_saves(tmp_path: Path):
    with_files = train(tmp_path / "whole", validate=True)
    without = train(tmp_path / "none", validate=True, callbacks=[], enable_checkpointing=False)
    assert len(list((tmp_path / "whole").iterdir())) == EPOCHS
    same(without, with_files)


def test_a_file_saved_after_fit_goes_on_with_the_next_epoch(tmp_path: Path):
    whole = train(tmp_path / "whole")
    seed_everything(0, verbose=False)
    trainer = Trainer(**QUIET, max_epochs=2, enable_checkpointing=False)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = train(tmp_path / "resumed", ckpt_path=tmp_path / "after.ckpt", seed=5)
    same_from(2, whole, resumed)


def test_a_users_generator_goes_on_where_it_was(tmp_path: Path):
    def run(ckpt_path: Any = None, max_epochs: int = EPOCHS) -> list[Any]:
        module, generator = Net(), torch.Generator().manual_seed(3)
        trainer = Trainer(**QUIET, max_epochs=max_epochs, enable_checkpointing=False)
        data = DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_epochs}.ckpt")
        return [(epoch, indices) for epoch, indices, _ in module.seen]

    whole = run()
    run(max_epochs=2)
    assert run(tmp_path / "2.ckpt") == whole[8:]


# ---- which file ------------------------------------------------------------------------------------------------------


def test_ckpt_path_last_goes_on_from_the_newest_whole_file(tmp_path: Path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "run", max_epochs=3)
    newest = tmp_path / "run" / "epoch=2.ckpt"
    newest.write_bytes(newest.read_bytes()[:-200])
    with pytest.warns(UserWarning, match=r"'last' skips .*epoch=2\.ckpt.* uses .*epoch=1\.ckpt"):
        resumed = train(tmp_path / "run", ckpt_path="last", seed=5)
    same_from(2, whole, resumed)


def test_ckpt_path_last_without_any_file_starts_fresh_and_says_so(tmp_path: Path):
    whole = train(tmp_path / "whole")
    with pytest.warns(UserWarning, match="there is no valid checkpoint in .*the run starts fresh"):
        fresh = train(tmp_path / "empty", ckpt_path="last")
    same(fresh, whole)


@pytest.fixture
def fitted(tmp_path: Path) -> Trainer:
    """A trainer that has fitted two epochs, of which the first has the better ``val_loss``."""

    class Worsens(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch))

    keeper = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", monitor="score", save_top_k=2)
    trainer = Trainer(**QUIET, max_epochs=2, callbacks=[keeper], num_sanity_val_steps=0)
    trainer.fit(Worsens(), loader(), loader(shuffle=False))
    return trainer


def weight_in(path: Path) -> float:
    return single_file.read(path)["state_dict"]["layers.0.weight"][0, 0].item()


def test_test_takes_the_weights_of_best_last_or_a_path(fitted: Trainer, tmp_path: Path):
    kept = tmp_path / "kept"
    expected = {"best": "epoch=0.ckpt", "last": "epoch=1.ckpt", kept / "epoch=0.ckpt": "epoch=0.ckpt"}
    assert weight_in(kept / "epoch=0.ckpt") != weight_in(kept / "epoch=1.ckpt")
    for ckpt_path, name in expected.items():
        (results,) = fitted.test(Net(), loader(shuffle=False), ckpt_path=ckpt_path, verbose=False)
        assert results["first_weight"] == pytest.approx(weight_in(kept / name), abs=0)


def test_a_run_without_a_module_takes_the_best_weights_of_the_last(fitted: Trainer, tmp_path: Path):
    (results,) = fitted.test(dataloaders=loader(shuffle=False), verbose=False)
    assert results["first_weight"] == pytest.approx(weight_in(tmp_path / "kept" / "epoch=0.ckpt"), abs=0)


def test_predict_from_a_file_predicts_with_its_weights(fitted: Trainer, tmp_path: Path):
    path, batches = tmp_path / "kept" / "epoch=0.ckpt", [(None, torch.randn(4, 3)), (None, torch.randn(2, 3))]
    predictions = Trainer(**QUIET, max_epochs=1).predict(Net(), batches, ckpt_path=path)
    module = Net.load_from_checkpoint(path).eval()
    with torch.no_grad():
        expected = [module.layers(x) for _, x in batches]
    same(predictions, expected)


def test_evaluation_from_a_file_leaves_callbacks_alone(fitted: Trainer, tmp_path: Path):
    class Stateful(Callback):
        loaded = False

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = True

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self.loaded = True

    callback = Stateful()
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[callback], enable_checkpointing=False)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.test(Net(), loader(shuffle=False), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert not callback.loaded
    trainer = Trainer(**QUIET, max_epochs=2, callbacks=[callback], enable_checkpointing=False)
    trainer.fit(Net(), loader(), ckpt_path=tmp_path / "x.ckpt")
    assert callback.loaded


def test_best_with_nothing_saved_is_an_error():
    with pytest.raises(ValueError, match="found no best checkpoint"):
        Trainer(**QUIET, enable_checkpointing=False).test(Net(), loader(), ckpt_path="best")


def test_saving_before_any_run_is_an_error(tmp_path: Path):
    with pytest.raises(AttributeError, match=r"before the Trainer had a module to save\. Call fit"):
        Trainer(**QUIET).save_checkpoint(tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


# ---- data module -----------------------------------------------------------------------------------------------------


class Counting(DataModule):
    """Counts the epochs it gave data to, in its own state."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs = 0

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=self.hparams.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.trainer.current_epoch + 10}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def test_a_data_modules_state_and_hyperparameters_come_back(tmp_path: Path):
    trainer = Trainer(**QUIET, max_epochs=2, enable_checkpointing=False)
    trainer.fit(Net(), datamodule=Counting(batch_size=7))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = Counting()
    Trainer(**QUIET, max_epochs=3, enable_checkpointing=False).fit(Net(), again, ckpt_path=tmp_path / "x.ckpt")
    assert again.epochs == 12
    loaded = Counting.load_from_checkpoint(tmp_path / "x.ckpt")
    assert (loaded.hparams.batch_size, loaded.epochs) == (7, 12)


if __name__ == "__main__":
    work, chosen = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    outcome = train(work / "fresh", ckpt_path=work / "whole" / "epoch=1.ckpt", seed=9, **SETTINGS[chosen])
    torch.save(outcome, work / "resumed.pt")
