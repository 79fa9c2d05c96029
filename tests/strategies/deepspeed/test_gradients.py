"""Gradients that DeepSpeed keeps in its own buffers: counted once each, and gone after a step."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Trainer
from paceline.accelerator.plugins import DeepSpeedPlugin
from paceline.strategies import DeepSpeedStrategy
from paceline.utilities import grad_norm

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs DeepSpeed: pip install deepspeed", allow_module_level=True)

#: Micro-batches per step, and what the loop does in some of its micro-batches.
LOOPS = [
    (1, "skips a layer"),
    (2, "skips a layer"),
    (1, "discards"),
    (1, "goes back twice"),
    (2, "goes back twice"),
    (1, "shares gradients in two of three"),
    (1, "steps after a backward under no_sync"),
]
#: Which micro-batch of three runs its backward pass under no_sync.
ALONE = {"shares gradients in two of three": 1, "steps after a backward under no_sync": 2}


@pytest.fixture(scope="module", autouse=True)
def deepspeed_here(deepspeed_imported: None) -> None:
    """For the ranks that this process forks."""


def learn(steps: int, kind: str, batch_size: int, plugin: DeepSpeedPlugin | None = None) -> dict[str, Tensor]:
    """Return the weights after nine micro-batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, deepspeed_plugin=plugin)
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(36, 4), torch.randn(36, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size))
    for index, (x, y) in enumerate(loader):
        shares = index % 3 != ALONE.get(kind)
        with accelerator.accumulate(model) if shares else accelerator.no_sync(model):
            loss, second = nn.functional.mse_loss(model(x), y), model(x).square().mean()
            if kind == "skips a layer" and index % 3 == 1:
                loss = (model[2](x[:, :3]) - y).square().mean()
            # DeepSpeed also updates parameters that the loss does not reach, as if their gradients were zero.
            loss = loss + 0 * sum(p.sum() for p in model.parameters()) if plugin is None else loss
            accelerator.backward(loss)
            if kind == "goes back twice":
                accelerator.backward(second)
            if kind == "discards" and index % 3 == 1:
                optimizer.zero_grad()
                continue
            if kind in ALONE and index % 3 != 2:
                continue
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def learn_all(loops: list[tuple[int, str]], **plugin: Any) -> list[dict[str, Tensor]]:
    return [learn(*loop, 2, DeepSpeedPlugin(**plugin)) for loop in loops]


@pytest.mark.parametrize(("stage", "offload"), [(1, "none"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")])
def test_each_gradient_counts_once(stage: int, offload: Any) -> None:
    found = ranks(2, lambda: learn_all(LOOPS, zero_stage=stage, offload_optimizer_device=offload))[0]
    for loop, weights in zip(LOOPS, found, strict=True):
        torch.testing.assert_close(weights, learn(*loop, 4), rtol=1e-5, atol=1e-6)


class Norms(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


def norms(strategy: Any, batch_size: int) -> dict[str, float]:
    torch.manual_seed(3)
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(Norms(), tiny_loader(16 // batch_size, batch_size))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "norm" in name}


def test_grad_norm_returns_the_norms_of_one_process() -> None:
    alone = norms("single_device", 4)
    assert len(alone) == 3
    kinds = [(1, False), (2, False), (3, False), (2, True), (3, True)]
    for found in ranks(
        2, lambda: [norms(DeepSpeedStrategy(stage=stage, offload_optimizer=to), 2) for stage, to in kinds]
    ):
        assert found == [pytest.approx(alone, rel=1e-5)] * len(kinds)
