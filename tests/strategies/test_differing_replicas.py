"""Ranks whose copies of the model no longer have the same weights: a warning that names them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline import Accelerator, Trainer
from paceline.accelerator.local_sgd import LocalSGD
from paceline.strategies import DDPStrategy


def reset(layer: nn.Linear) -> None:
    """Set new random weights, which are different on each rank."""
    torch.manual_seed(dist.get_rank())
    layer.reset_parameters()


class BetweenEpochs(TinyModule):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            reset(self.layer)


class BetweenBatches(TinyModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            reset(self.layer)


def fit(module: type[TinyModule], epochs: int, **strategy: Any) -> None:
    trainer = Trainer(**QUIET, strategy=DDPStrategy(**strategy), max_epochs=epochs)
    trainer.fit(module(), tiny_loader(), tiny_loader())


def own_loop(folder: Path, between: Callable[[Accelerator, nn.Module, Any], Any]) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential()
    model.layer = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), tiny_loader())
    for epoch in range(3):
        for x, y in loader:
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            between(accelerator, model, loader)
        accelerator.save_state(str(folder))


def train_apart(accelerator: Accelerator, model: nn.Module, loader: Any) -> None:
    with LocalSGD(accelerator, model, 2) as local, torch.no_grad():
        reset(model.layer)
        list(loader)
        local.step()
        local.step()


class OnePerRank(TinyModule):
    """Has a layer that each rank trains for itself, which torch's own method for this excludes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(1, 1, bias=False)
        self.register_buffer("rank", torch.zeros(()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own.weight", "rank"])

    def on_fit_start(self) -> None:
        self.rank.fill_(self.global_rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(super().forward(x)) * (1 + self.global_rank)


def warnings_on_ranks(function: Callable[..., Any], *args: Any) -> list[str]:
    """Run a function on two ranks, and return the warnings of both about weights that differ."""

    def recorded() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(*args)
        return [str(one.message) for one in caught if "between the ranks" in str(one.message)]

    return [warning for warned in ranks(2, recorded) for warning in warned]


@pytest.mark.parametrize(("module", "epochs"), [(BetweenEpochs, 2), (BetweenBatches, 1)])
def test_layers_whose_weights_differ_are_named_once(module: type[TinyModule], epochs: int) -> None:
    (warning,) = warnings_on_ranks(fit, module, epochs)
    assert f"{module.__name__}: layer.weight, layer.bias differ between the ranks" in warning


def test_layers_whose_weights_differ_in_an_own_loop_are_named(tmp_path: Path) -> None:
    (warning,) = warnings_on_ranks(own_loop, tmp_path / "state", lambda accelerator, model, loader: reset(model.layer))
    assert "Sequential: layer.weight, layer.bias differ between the ranks" in warning


def test_weights_that_averaged_gradients_change_cause_no_warning() -> None:
    assert not warnings_on_ranks(fit, TinyModule, 3)


def look_at_a_batch(accelerator: Accelerator, model: nn.Module, loader: Any) -> None:
    for training in (True, False):
        model.train(training)
        if accelerator.is_main_process:
            next(iter(loader))
    model.train()


def test_one_rank_may_look_at_a_batch_between_passes(tmp_path: Path) -> None:
    assert not warnings_on_ranks(own_loop, tmp_path / "state", look_at_a_batch)


def test_local_sgd_causes_no_warning(tmp_path: Path) -> None:
    assert not warnings_on_ranks(own_loop, tmp_path / "state", train_apart)


class OnePerRankByHand(OnePerRank):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def fit_own(module: type[OnePerRank]) -> tuple[float, float, float]:
    made = module()
    Trainer(**QUIET, strategy="ddp", max_epochs=2).fit(made, tiny_loader(), tiny_loader())
    return made.own.weight.item(), made.layer.bias.item(), made.rank.item()


@pytest.mark.parametrize("module", [OnePerRank, OnePerRankByHand])
def test_what_torch_was_told_to_ignore_stays_each_ranks_own(module: type[OnePerRank]) -> None:
    assert not warnings_on_ranks(fit_own, module)
    (first, bias, _), (second, other_bias, rank) = ranks(2, fit_own, module)
    assert first != second
    assert bias == other_bias
    assert rank == 1
