"""Values that the user's code sets in parameters under FSDP: kept as on one process, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import QUIET, TinyModule
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer
from paceline.strategies import FSDPStrategy


class Net(TinyModule):
    """Changes its parameters in ``training_step`` or after it."""

    def __init__(self, in_step: Any = None, after_step: Any = None) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.backbone = nn.Linear(4, 3)
        self.layer = nn.Linear(3, 1)
        self.in_step, self.after_step = in_step, after_step

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.backbone(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.in_step is not None:
            self.in_step(self)
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.after_step is not None:
            self.after_step(self)


class ByHand(Net):
    """Changes its parameters in steps of manual optimization, before and after the optimizer's step."""

    def __init__(self, in_step: Any) -> None:
        super().__init__(in_step)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.in_step(self)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.in_step(self)


@torch.no_grad()
def normalized(module: Net) -> None:
    """As prototypes of clusters are normalized."""
    module.layer.weight.copy_(normalize(module.layer.weight.data.clone()))
    module.backbone.weight.clamp_(-0.2, 0.2)


def clamped(module: Net) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def assigned(module: Net) -> None:
    module.backbone.weight.data = module.backbone.weight.data * 0.9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return self.linear(x)


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Block(), nn.Linear(4, 3))


def fit(make: Callable[[], Net], strategy: str, batch_size: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = make()
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, shuffle=True)
    chosen: Any = FSDPStrategy(wrap=Block) if strategy == "fsdp" and make is Blocks else strategy
    trainer = Trainer(**QUIET, strategy=chosen, max_epochs=2)
    trainer.fit(module, loader)
    return {name: value for name, value in trainer.strategy.model_state(module).items() if not value.is_meta}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(in_step=normalized),
        lambda: Net(after_step=normalized),
        lambda: Net(after_step=clamped),
        lambda: ByHand(normalized),
    ],
    ids=["in_step", "after_step", "data_after_step", "manual"],
)
def test_changes_in_place_are_those_of_one_process(make: Callable[[], Net]) -> None:
    alone = fit(make, "single_device", 8)
    together = ranks(2, fit, make, "fsdp", 4)[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Net(in_step=clamped), ".weight.data was changed or set"),
        (lambda: Net(in_step=assigned), "Net.backbone.weight.data was changed or set"),
        (lambda: Net(after_step=assigned), "Net.backbone.weight.data was changed or set"),
        (lambda: ByHand(clamped), ".weight.data was changed or set"),
        (Blocks, "Blocks.backbone.0.linear.weight was changed in place during a step"),
    ],
    ids=["data_in_step", "assigned_in_step", "assigned_after_step", "manual", "block"],
)
def test_a_change_that_would_be_lost_is_an_error(make: Callable[[], Net], said: str) -> None:
    with pytest.raises(RanksError) as raised:
        ranks(2, fit, make, "fsdp", 4)
    assert all(said in str(error) for error in raised.value.errors)
