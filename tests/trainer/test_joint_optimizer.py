"""Several optimizers that automatic optimization steps together: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from paceline import Callback, Trainer, TrainingModule
from paceline.strategies import DDPStrategy, FSDPStrategy
from paceline.strategies.precision import MixedPrecision
from paceline.trainer.joint_optimizer import JointOptimizer


class Net(TrainingModule):
    """Two layers whose weights Muon trains, and whose biases AdamW."""

    def __init__(self, as_dicts: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.as_dicts = as_dicts
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        matrices = Muon([p for p in self.parameters() if p.ndim == 2], lr=0.02)
        rest = AdamW([p for p in self.parameters() if p.ndim != 2], lr=0.01)
        schedules = (
            {"scheduler": ExponentialLR(matrices, 0.9), "interval": "step"},
            {"scheduler": StepLR(rest, 1, 0.5), "interval": "step", "frequency": 2},
        )
        if self.as_dicts:
            return [{"optimizer": o, "lr_scheduler": s} for o, s in zip((matrices, rest), schedules, strict=True)]
        return [matrices, rest], list(schedules)


def data(count: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def fit(quiet: dict[str, Any], module: TrainingModule | None = None, batches: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**quiet, "max_epochs": 1, **arguments})
    trainer.fit(Net() if module is None else module, data() if batches is None else batches)
    return trainer


def by_hand(clip: Any, accumulate: int) -> Net:
    """The plain loop: backward for each micro-batch, then one clipped step of both optimizers."""
    module = Net()
    (matrices, rest), (every, second) = module.configure_optimizers()
    for number, window in enumerate(torch.stack(data()).split(accumulate), 1):
        for batch in window:
            loss = module.training_step(batch, 0)
            (loss / accumulate if accumulate > 1 else loss).backward()
        if len(window) < accumulate:
            for parameter in module.parameters():
                parameter.grad.mul_(accumulate / len(window))
        clip(module.parameters())
        for optimizer in (matrices, rest):
            optimizer.step()
            optimizer.zero_grad()
        every["scheduler"].step()
        if number % second["frequency"] == 0:
            second["scheduler"].step()
    return module


def fp16() -> dict[str, Any]:
    """Arguments of a Trainer with a loss scale that these losses do not overflow."""
    return {"plugins": MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))}


def same_weights(module: nn.Module, other: nn.Module) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 7), (3, 3)])
@pytest.mark.parametrize(
    ("clip", "arguments"),
    [
        (lambda parameters: None, {}),
        (lambda p: nn.utils.clip_grad_norm_(p, 0.3), {"gradient_clip_val": 0.3}),
        (
            lambda p: nn.utils.clip_grad_value_(p, 0.1),
            {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        ),
    ],
    ids=["unclipped", "norm", "value"],
)
def test_losses_and_weights_are_those_of_a_loop_that_steps_both(
    clip: Any, arguments: dict[str, Any], accumulate: int, steps: int, quiet: dict[str, Any]
) -> None:
    want = by_hand(clip, accumulate)
    for as_dicts in (False, True):
        module = Net(as_dicts)
        trainer = fit(quiet, module, accumulate_grad_batches=accumulate, **arguments)
        assert module.losses == want.losses
        same_weights(module, want)
        assert (trainer.global_step, trainer.state.updates) == (steps, steps)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        assert rates == pytest.approx([0.02 * 0.9**steps, 0.01 * 0.5 ** (steps // 2)])
        assert [type(optimizer) for optimizer in trainer.optimizers] == [Muon, AdamW]
        assert all(parameter.grad is None for parameter in module.parameters())


# ---- hooks and overridden methods ------------------------------------------------------------------------------------


class Hooked(Net):
    """Overrides every method of an update."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(("before", optimizer))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.calls.append(("clip", optimizer))
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.calls.append(("step", optimizer.optimizer))
        optimizer.step(closure=optimizer_closure)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append(("cleared soon", optimizer))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append(("clear", optimizer))
        optimizer.zero_grad()


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 7), (3, 3)])
@pytest.mark.parametrize("scaled", [False, True])
def test_each_hook_is_called_once_an_update_with_one_optimizer_for_all(
    accumulate: int, steps: int, scaled: bool, quiet: dict[str, Any]
) -> None:
    plain, module = Net(), Hooked()
    same: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.3}
    fit(quiet, plain, **same, **(fp16() if scaled else {}))
    trainer = fit(quiet, module, **same, **(fp16() if scaled else {}))
    same_weights(module, plain)
    assert trainer.global_step == steps
    assert [name for name, _ in module.calls] == ["step", "before", "clip", "cleared soon", "clear"] * steps
    joint: Any = module.calls[0][1]
    assert all(optimizer is joint for _, optimizer in module.calls)
    assert isinstance(joint, torch.optim.Optimizer)
    assert joint.optimizers == trainer.optimizers
    assert [len(group["params"]) for group in joint.param_groups] == [2, 2]
    assert set(joint.state) == set(module.parameters())


def test_an_optimizer_for_all_fails_loudly_where_only_its_parts_can_act() -> None:
    net = nn.Linear(2, 2)
    joint = JointOptimizer([SGD([net.weight], lr=0.1), Adam([net.bias])])
    for use in (
        joint.state_dict,
        lambda: joint.load_state_dict({}),
        lambda: joint.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda: joint.register_step_pre_hook(lambda *_: None),
        lambda: joint.defaults,
    ):
        with pytest.raises(
            AttributeError, match=r"it combines several optimizers.*Use the optimizers in its \.optimizers"
        ):
            use()
    assert repr(joint) == "JointOptimizer(SGD, Adam)"


def test_stepping_a_part_by_hand_is_told(quiet: dict[str, Any]) -> None:
    class Steps(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.optimizers()[1].step()
            return super().training_step(batch, batch_idx)

    class StepsRaw(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.trainer.optimizers[1].step()
            return super().training_step(batch, batch_idx)

    for module in (Steps(), StepsRaw()):
        with pytest.raises(RuntimeError, match="stepped its optimizer by hand"):
            fit(quiet, module)


# ---- loss scaling ----------------------------------------------------------------------------------------------------


class Overflows(Net):
    """In batch 2 the gradient of one parameter overflows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.now = False
        self.get_parameter(name).register_hook(lambda gradient: gradient * float("inf") if self.now else gradient)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.now = batch_idx == 2
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", ["net.0.weight", "net.2.bias"])
def test_an_overflow_in_either_skips_both(name: str, quiet: dict[str, Any]) -> None:
    batches = data()
    skipped, without = Overflows(name), Net()
    trainer = fit(quiet, skipped, batches, **fp16())
    other = fit(quiet, without, batches[:2] + batches[3:], **fp16())
    same_weights(skipped, without)
    assert trainer.global_step == other.global_step == 6
    scales = [one.strategy.precision.state_dict() for one in (trainer, other)]
    assert scales[0]["scaler"]["scale"] == scales[1]["scaler"]["scale"] / 2
    assert [scale["skipped_steps"] for scale in scales] == [1, 0]


def test_clipping_the_parts_one_by_one_unscales_once(quiet: dict[str, Any]) -> None:
    class ByPart(Net):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            for part in optimizer.optimizers:
                self.clip_gradients(part, 1e6)

    class Early(Net):
        def on_after_backward(self) -> None:
            self.clip_gradients(self.optimizers()[0], 1e6)

    plain = Net()
    fit(quiet, plain, **fp16())
    for module in (ByPart(), Early()):
        fit(quiet, module, **fp16())
        same_weights(module, plain)


# ---- what cannot be stepped together ---------------------------------------------------------------------------------


class Given(Net):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def halves(module: Net) -> list[Any]:
    return [SGD(module.net[0].parameters(), lr=0.1), Adam(module.net[2].parameters())]


def test_a_parameter_that_two_optimizers_train_is_named(quiet: dict[str, Any]) -> None:
    def shared(module: Net) -> list[Any]:
        return [SGD(module.net[0].parameters(), lr=0.1), Adam(module.net[0].parameters())]

    message = (
        r"Given\.configure_optimizers\(\) returned SGD and Adam, and the parameter 'net\.0\.weight' is in both SGD and "
        r"Adam, so each step would change it twice\. Give each parameter to one optimizer, or set self\.automatic"
    )
    with pytest.raises(ValueError, match=message):
        fit(quiet, Given(shared))

    class Replaces(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers = shared(pl_module)

    with pytest.raises(ValueError, match=r"trainer\.optimizers was set to SGD and Adam, and the parameter 'net"):
        fit(quiet, Given(halves), callbacks=[Replaces()])


def test_an_optimizer_that_evaluates_the_loss_must_be_alone(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"returned SGD and LBFGS\. LBFGS evaluates.*Return only that optimizer"):
        fit(quiet, Given(lambda m: [SGD(m.net[0].parameters(), lr=0.1), LBFGS(m.net[2].parameters())]))


def test_a_frequency_of_an_optimizer_is_refused(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'frequency' with an optimizer, but automatic optimization steps all"):
        fit(quiet, Given(lambda m: [{"optimizer": one, "frequency": 2} for one in halves(m)]))


def test_a_parameter_in_no_optimizer_stays_as_it_was(quiet: dict[str, Any]) -> None:
    module = Given(lambda m: [SGD([m.net[0].weight], lr=0.1), Adam([m.net[0].bias])])
    before = copy.deepcopy(module.state_dict())
    fit(quiet, module)
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"net.0.weight", "net.0.bias"}


# ---- several processes -----------------------------------------------------------------------------------------------


class Plain(Net):
    """Rounds the same however its weights are sharded, while Muon computes in bfloat16."""

    def configure_optimizers(self) -> Any:
        (_, rest), _ = super().configure_optimizers()
        return SGD([p for p in self.parameters() if p.ndim == 2], lr=0.1, momentum=0.9), rest


def on_each(make: Any, modules: list[type[Net]], path: Path) -> None:
    for number, kind in enumerate(modules):
        module = kind()
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            max_epochs=1,
            strategy=make(),
            devices=2,
            gradient_clip_val=0.3,
        )
        trainer.fit(module, data(8)[int(os.environ["RANK"]) :: 2])
        state = trainer.strategy.model_state(module)
        if trainer.is_global_zero:
            torch.save((state, trainer.global_step), path / str(number))


def test_two_processes_give_the_numbers_of_one(tmp_path: Path, quiet: dict[str, Any]) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    for make, kinds in ((DDPStrategy, {Net: 0.0}), (partial(FSDPStrategy, wrap=None), {Net: 5e-3, Plain: 1e-6})):
        ranks(2, on_each, make, list(kinds), tmp_path)
        for number, (kind, tolerance) in enumerate(kinds.items()):
            alone = kind()
            fit(quiet, alone, data(8), **arguments)
            state, steps = torch.load(tmp_path / str(number))
            assert steps == 4
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance)
