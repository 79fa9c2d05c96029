"""Workers that read a stream each end with a short batch: every sample counts once, as on one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline import Accelerator, Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint

#: Number of samples and workers, whether the data set has a length, and the Trainer's arguments.
Run: TypeAlias = tuple[int, int, bool, dict[str, Any]]
PLAIN: Run = (22, 2, False, {})
RUNS: list[Run] = [
    PLAIN,
    (21, 2, False, {"accumulate_grad_batches": 2}),
    (22, 2, False, {"limit_train_batches": 4}),
    (21, 1, False, {"limit_train_batches": 5}),
    (23, 1, False, {"limit_train_batches": 6}),
    (22, 2, True, {}),
    (25, 2, True, {"accumulate_grad_batches": 3}),
]


class Stream(IterableDataset):
    """Rows of numbers; each worker has its own."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


def loader(world: int, count: int, workers: int, sized: bool, persistent: bool = False) -> DataLoader[Any]:
    """Batches of four rows on all processes together."""
    data = (SizedStream if sized else Stream)(count)
    return DataLoader(data, 4 // world, num_workers=workers, persistent_workers=persistent)


def net() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 1).double()


def loss_of(layer: nn.Module, rows: Tensor) -> Tensor:
    return (layer(rows) - rows.sum(1, keepdim=True)).square().mean()


class Model(TrainingModule):
    def __init__(self, items: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.layer, self.items, self.automatic_optimization = net(), items, not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = loss_of(self.layer, batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "num_items": len(batch)} if self.items else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(world: int, run: Run, path: Path | None = None, **how: bool) -> list[float]:
    """Return the weights and the epoch value after two epochs."""
    *data, options = run
    model = Model(**how)
    trainer = Trainer(**QUIET | {"max_epochs": 2} | options, strategy="ddp" if world > 1 else "auto")
    trainer.fit(model, loader(world, *data, persistent=True), ckpt_path=path)
    return [*model.layer.weight[0].tolist(), float(trainer.callback_metrics["loss"])]


def loop(world: int, run: Run) -> list[float]:
    """The same in one's own loop."""
    *data, options = run
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.get("accumulate_grad_batches", 1))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer, optimizer, batches = accelerator.prepare(model, optimizer, loader(world, *data))
    for _ in range(2):
        for batch in batches:
            with accelerator.accumulate(layer):
                accelerator.backward(loss_of(layer, batch))
                optimizer.step()
                optimizer.zero_grad()
    return model.weight[0].tolist()


def all_fits(world: int) -> list[list[float]]:
    found = [fit(world, run) for run in RUNS]
    return [*found, fit(world, PLAIN, items=True), fit(world, PLAIN, manual=True)]


def all_loops(world: int) -> list[list[float]]:
    return [loop(world, run) for run in RUNS if "limit_train_batches" not in run[-1]]


@pytest.mark.parametrize("learn", [all_fits, all_loops])
def test_two_processes_learn_what_one_learns(learn: Any) -> None:
    for found in ranks(2, partial(learn, 2)):
        assert found == [pytest.approx(expected, abs=1e-12) for expected in learn(1)]


def test_a_run_resumed_before_the_short_batches_learns_the_same(tmp_path: Path) -> None:
    def resumed() -> list[list[float]]:
        saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        whole = fit(2, (*PLAIN[:3], {"callbacks": [saves], "enable_checkpointing": True}))
        return [whole, fit(2, PLAIN, tmp_path / "step=4.ckpt")]

    for whole, again in ranks(2, resumed):
        assert again == whole == pytest.approx(fit(1, PLAIN), abs=1e-12)


def test_gather_for_metrics_returns_each_row_once() -> None:
    def gathered() -> Tensor:
        accelerator = Accelerator(cpu=True)
        batches = accelerator.prepare(loader(2, 21, 2, False))
        return torch.cat([accelerator.gather_for_metrics(batch) for batch in batches])

    expected = Stream(21).rows
    for found in ranks(2, gathered):
        assert sorted(found.tolist()) == sorted(expected.tolist())
