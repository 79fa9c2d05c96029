"""On three ranks, sums of gradients round differently in another order of buckets, so a resume restores the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Trainer, TrainingModule
from paceline.accelerator.kwargs_handlers import DistributedDataParallelKwargs
from paceline.callbacks import ModelCheckpoint
from paceline.strategies import DDPStrategy

STEPS = 6


class Net(nn.Module):
    """Its layers run in another order than they are defined in, so torch reorders its small buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(7, 33), nn.Linear(33, 5), nn.Linear(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def loader() -> DataLoader[Any]:
    rows = torch.randn(12 * STEPS, 7, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), 4)


def weights_of(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


class Model(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder: Path, step: int | None = None) -> Tensor:
    model = Model()
    saves = ModelCheckpoint(
        folder / ("whole" if step is None else f"from {step}"), "{step}", None, every_n_train_steps=1
    )
    saves.save_top_k = -1
    trainer = Trainer(
        **QUIET | {"max_epochs": 1, "enable_checkpointing": True},
        strategy=DDPStrategy(bucket_cap_mb=0.001),
        callbacks=[saves],
    )
    trainer.fit(model, loader(), ckpt_path=None if step is None else folder / "whole" / f"step={step}.ckpt")
    return weights_of(model)


def loop(folder: Path, step: int | None = None) -> Tensor:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=0.001)])
    torch.manual_seed(0)
    net = Net()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loader()
    )
    if step is not None:
        accelerator.load_state(str(folder / f"step {step}"))
    done = step or 0
    for (x,) in batches:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if step is None:
            accelerator.save_state(str(folder / f"step {done}"))
    return weights_of(net)


@pytest.mark.parametrize("learn", [fit, loop])
def test_a_resume_on_three_ranks_is_bit_identical(learn: Any, tmp_path: Path) -> None:
    whole = ranks(3, lambda: learn(tmp_path))[0]
    for step in (1, 3):
        for found in ranks(3, lambda step=step: learn(tmp_path, step)):
            assert torch.equal(found, whole), step
