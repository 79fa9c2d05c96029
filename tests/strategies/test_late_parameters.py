"""Parameters that are frozen, unfrozen or added after training began: the numbers of one process, or an error."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import QUIET, TinyModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Trainer
from paceline.callbacks import BackboneFinetuning
from paceline.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

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


class ByHand(Net):
    """Unfreezes its first layer in a step of manual optimization."""

    def __init__(self, when: str) -> None:
        super().__init__(when)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class Saliency(Net):
    """Differentiates on rank 0 alone, after layers were unfrozen."""

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.loss((torch.ones(1, 4), torch.ones(1, 1))).backward()
            self.zero_grad()


class Teacher(Net):
    """Has a frozen layer that was made in inference mode."""

    def __init__(self, when: str) -> None:
        super().__init__(when)
        with torch.inference_mode():
            self.teacher = nn.Linear(4, 1).requires_grad_(False)


class Growing(Net):
    """Gets a layer in its second epoch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.later(super().forward(x)) if hasattr(self, "later") else super().forward(x)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.later = nn.Linear(1, 1)
            nn.init.constant_(self.later.weight, 1.0 + self.global_rank)
            self.optimizers().add_param_group({"params": self.later.parameters()})


class OnlyHead(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.05)


def fit(
    make: Callable[[], Strategy] | str, batch_size: int, module: type[Net], when: str, accumulate: int, *callbacks: Any
) -> dict[str, Tensor]:
    torch.manual_seed(5)
    made = module(when)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, shuffle=True)
    strategy = make if isinstance(make, str) else make()
    trainer = Trainer(
        **QUIET, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[*callbacks]
    )
    trainer.fit(made, loader)
    state = trainer.strategy.model_state(made)  # under FSDP, only rank 0 gets the values of sharded parameters
    return {name: value for name, value in state.items() if not value.is_meta}


def assert_two_processes_learn_what_one_learns(make: Callable[[], Strategy], *given: Any) -> None:
    alone = fit("single_device", 8, *given)
    first, second = ranks(2, fit, make, 4, *given)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, {name: alone[name] for name in second}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("when", ["on_train_epoch_start", "on_train_batch_start", "training_step"])
@pytest.mark.parametrize("make", [DDPStrategy, FSDPStrategy])
def test_a_layer_that_is_unfrozen_at_any_moment_learns_what_it_does_on_one_process(
    make: Callable[[], Strategy], when: str, accumulate: int
) -> None:
    assert_two_processes_learn_what_one_learns(make, Net, when, accumulate)


@pytest.mark.parametrize("make", [DDPStrategy, FSDPStrategy])
def test_a_layer_that_is_unfrozen_in_a_step_of_manual_optimization_learns(make: Callable[[], Strategy]) -> None:
    assert_two_processes_learn_what_one_learns(make, ByHand, "training_step", 1)


@pytest.mark.parametrize("module", [Saliency, Teacher])
def test_other_gradients_and_frozen_tensors_do_not_disturb_ddp(module: type[Net]) -> None:
    assert_two_processes_learn_what_one_learns(DDPStrategy, module, "on_train_batch_start", 1)


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
    with pytest.raises(RanksError, match=r"later.bias was added to Growing after FSDP had sharded it.*use strat"):
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


def _fit_twice() -> None:
    module = Net("")
    x = torch.ones(8, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
    for strategy in (DeepSpeedStrategy(stage=1), DDPStrategy()):
        Trainer(**QUIET, strategy=strategy, max_epochs=1).fit(module, loader)
        module.backbone.requires_grad_(True)


@NEEDS_DEEPSPEED
def test_deepspeed_forgets_what_was_frozen_when_its_run_ends(deepspeed_imported: None) -> None:
    ranks(2, _fit_twice)


class Adapted(Net):
    """Gets an adapter inside a module that FSDP ignores."""

    def __init__(self, when: str) -> None:
        super().__init__(when)
        self.backbone = nn.Sequential(nn.Linear(4, 4))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.append(nn.Linear(4, 4))
            nn.init.eye_(self.backbone[1].weight)
            nn.init.zeros_(self.backbone[1].bias)
            self.optimizers().add_param_group({"params": self.backbone[1].parameters()})


def test_a_layer_may_be_added_to_a_module_that_fsdp_ignores() -> None:
    assert_two_processes_learn_what_one_learns(lambda: FSDPStrategy(ignored_modules="backbone"), Adapted, "", 1)


def _loop_beside_an_unplaced_model() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    teacher = accelerator.prepare(nn.Linear(4, 1), device_placement=[False])
    model = nn.Linear(4, 1)
    model, loader = accelerator.prepare(model, DataLoader(torch.ones(4, 4), 2))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader:
        accelerator.backward((model(batch) - teacher(batch).detach()).square().mean())
        optimizer.step()


def test_a_model_that_was_not_placed_does_not_disturb_a_pass() -> None:
    ranks(2, _loop_beside_an_unplaced_model)
