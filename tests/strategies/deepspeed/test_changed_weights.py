"""Weights that the user's code changes while DeepSpeed trains copies of them: kept as on one process, or an error."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import Tensor

from paceline import Trainer
from paceline.strategies import DeepSpeedStrategy

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs DeepSpeed: pip install deepspeed", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def deepspeed_here(deepspeed_imported: None) -> None:
    """For the ranks that this process forks."""


class Changing(TinyModule):
    """Halves its weight at the moment ``when``, once."""

    def __init__(self, when: str) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.when = when

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.layer.weight
        if batch_idx == 1 and self.when == "hook":
            with torch.no_grad():
                weight.mul_(0.5)
        elif batch_idx == 1 and self.when == "hook, .data":
            weight.data.mul_(0.5)
        elif batch_idx == 1 and self.when == "hook, gathered":
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.when == "step":
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return super().training_step(batch, batch_idx)


def fit(strategy: Any, batches: int, batch_size: int, when: str, precision: Any = "32-true") -> dict[str, Tensor]:
    module = Changing(when)
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=1, precision=precision)
    trainer.fit(module, tiny_loader(batches, batch_size))
    return {name: value.float() for name, value in trainer.strategy.model_state(module).items()}


def fit_each(stage: int, whens: list[str], offload: bool = False, precision: str = "32-true") -> Any:
    made = lambda: DeepSpeedStrategy(stage=stage, offload_optimizer=offload)  # noqa: E731
    return [fit(made(), 8, 2, when, precision) for when in whens]


@pytest.mark.parametrize(("precision", "atol"), [("32-true", 1e-6), ("bf16-true", 1e-2)])
@pytest.mark.parametrize(
    ("stage", "offload", "whens"),
    [
        (1, False, ["hook", "hook, .data", "step"]),
        (2, False, ["hook", "hook, .data", "step"]),
        (2, True, ["hook", "step"]),
        (3, False, ["hook, gathered"]),
    ],
)
def test_weights_continue_from_a_change(
    stage: int, offload: bool, whens: list[str], precision: str, atol: float
) -> None:
    changed = [fit("single_device", 4, 4, "hook" if "," in when else when, precision) for when in whens]
    plain = fit("single_device", 4, 4, "never", precision)
    for expected, found in zip(changed, ranks(2, fit_each, stage, whens, offload, precision)[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        assert (plain["layer.weight"] - expected["layer.weight"]).abs().max() > 10 * atol


class Freezing(Changing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layer.weight.requires_grad_(batch_idx < 1)


def freeze() -> None:
    Trainer(**QUIET, strategy=DeepSpeedStrategy(stage=2), max_epochs=1).fit(Freezing(""), tiny_loader())


def test_a_weight_that_is_frozen_after_training_began_is_an_error() -> None:
    with pytest.raises(RanksError, match=r"layer.weight was frozen after training began, but DeepSpeed"):
        ranks(2, freeze)


@pytest.mark.parametrize("when", ["hook", "step"])
def test_a_change_that_stage_3_would_lose_is_an_error(when: str) -> None:
    with pytest.raises(RanksError, match=r"layer.weight was changed in place.*within `with deepspeed.zero.Gathered"):
        ranks(2, fit_each, 3, [when])
