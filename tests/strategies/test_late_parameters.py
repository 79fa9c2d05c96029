"""Parameters that are frozen, unfrozen or added after training began: the numbers of one process, or an error."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import TinyModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer
from paceline.callbacks import BackboneFinetuning
from paceline.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


class Net(TinyModule):
    """Unfreezes its first layer at the moment ``when``."""

    def __init__(self, when: str) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.when = when
        self.backbone = nn.Linear(4, 4)
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.backbone(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.when == "training_step" and self.trainer.global_step == 3:
            self.backbone.requires_grad_(True)
        return self.loss(batch)

    def on_train_epoch_start(self) -> None:
        if self.when == "on_train_epoch_start" and self.current_epoch == 1:
            self.backbone.requires_grad_(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.when == "on_train_batch_start" and self.trainer.global_step == 3:
            self.backbone.requires_grad_(True)


class Freezing(Net):
    """Freezes its first layer in a step."""

    def __init__(self, when: str) -> None:
        super().__init__(when)
        self.backbone.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3:
            self.backbone.requires_grad_(False)
        return self.loss(batch)


class Growing(Net):
    """Gets a layer in its second epoch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.later(super().forward(x)) if hasattr(self, "later") else super().forward(x)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.later = nn.Linear(1, 1)
            nn.init.ones_(self.later.weight)
            self.optimizers().add_param_group({"params": self.later.parameters()})


class OnlyHead(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.05)


def fit(
    make: Callable[[], Strategy] | str, batch_size: int, module: type[Net], when: str, accumulate: int, *callbacks: Any
) -> list[Tensor]:
    torch.manual_seed(5)
    made = module(when)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, shuffle=True)
    strategy = make if isinstance(make, str) else make()
    trainer = Trainer(
        **QUIET, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[*callbacks]
    )
    trainer.fit(made, loader)
    return [value for value in trainer.strategy.model_state(made).values() if not value.is_meta]


def assert_two_processes_learn_what_one_learns(make: Callable[[], Strategy], *given: Any) -> None:
    alone = fit("single_device", 8, *given)
    for together in ranks(2, fit, make, 4, *given):
        if together:  # under FSDP, only rank 0 gets the values
            torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("when", ["on_train_epoch_start", "on_train_batch_start", "training_step"])
@pytest.mark.parametrize("make", [DDPStrategy, FSDPStrategy])
def test_a_layer_that_is_unfrozen_at_any_moment_learns_what_it_does_on_one_process(
    make: Callable[[], Strategy], when: str, accumulate: int
) -> None:
    assert_two_processes_learn_what_one_learns(make, Net, when, accumulate)


@pytest.mark.parametrize("make", [lambda: DDPStrategy(find_unused_parameters=True), FSDPStrategy])
def test_a_layer_that_is_frozen_in_a_step_stops_learning(make: Callable[[], Strategy]) -> None:
    assert_two_processes_learn_what_one_learns(make, Freezing, "", 1)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_options_of_ddp_do_not_keep_an_unfrozen_layer_from_being_averaged(option: str) -> None:
    make = lambda: DDPStrategy(**{option: True})  # noqa: E731
    assert_two_processes_learn_what_one_learns(make, Net, "on_train_batch_start", 2)


@pytest.mark.parametrize("make", [DDPStrategy, FSDPStrategy])
def test_backbone_finetuning_learns_what_it_does_on_one_process(make: Callable[[], Strategy]) -> None:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    assert_two_processes_learn_what_one_learns(make, OnlyHead, "", 1, callback)


def test_a_layer_that_is_added_between_epochs_is_averaged_under_ddp() -> None:
    assert_two_processes_learn_what_one_learns(DDPStrategy, Growing, "", 2)


def test_what_ddp_does_with_a_late_layer_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    ranks(2, fit, DDPStrategy, 4, Net, "on_train_batch_start", 1)
    assert capfd.readouterr().err.count("their gradients are averaged after each backward pass") == 1


@pytest.mark.parametrize("make", [FSDPStrategy, lambda: ModelParallelStrategy(data_parallel_shard=2)])
def test_a_layer_that_is_added_after_sharding_is_refused(make: Callable[[], Strategy]) -> None:
    with pytest.raises(RanksError, match=r"Linear.bias was added to Growing after FSDP had sharded it.*use strat"):
        ranks(2, fit, make, 4, Growing, "", 1)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_refuses_a_layer_that_is_unfrozen(stage: int, deepspeed_imported: None) -> None:
    make = lambda: DeepSpeedStrategy(stage=stage)  # noqa: E731
    with pytest.raises(RanksError, match=r"backbone.(bias|weight) was unfrozen after training began, but DeepSpeed"):
        ranks(2, fit, make, 4, Net, "on_train_epoch_start", 1)


class Converted(Net):
    def on_fit_start(self) -> None:
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch[0].double(), batch[1].double()))


class Replaced(Net):
    """Gets another last layer in its second epoch."""

    def __init__(self, when: str) -> None:
        super().__init__(when)
        self.backbone.requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layer = nn.Linear(4, 1)


def test_ddp_refuses_parameters_that_were_converted_after_it_had_wrapped_them() -> None:
    with pytest.raises(RanksError) as raised:
        ranks(2, fit, DDPStrategy, 4, Converted, "", 1)
    for error in raised.value.errors:
        assert "Converted.layer.weight was converted from torch.float32 to torch.float64" in str(error)


def test_ddp_names_the_parameters_that_were_replaced() -> None:
    with pytest.raises(RanksError) as raised:
        ranks(2, fit, DDPStrategy, 4, Replaced, "", 1)
    for error in raised.value.errors:
        assert "got no gradients: layer.weight, layer.bias" in str(error)
        assert "'layer.weight' and 'layer.bias' were replaced after training began" in str(error)
