"""``configure_optimizers`` in every form, and optimization by hand."""

from __future__ import annotations

import copy
import logging
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CyclicLR,
    ExponentialLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from paceline import Accelerator, Callback, Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint
from paceline.messages import PacelineWarning
from paceline.strategies.base import SingleDevice
from paceline.strategies.one_cycle_schedules import advance
from paceline.trainer.optimizers import ManagedOptimizer, configure


class Two(TrainingModule):
    """Two layers, so that two optimizers have something each."""

    def __init__(self, configured: Any = None, manual: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)
        self.configured = configured
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.a(batch).sum()

    def configure_optimizers(self) -> Any:
        return self.configured(self)


def sgd(module: Two, lr: float = 0.1) -> SGD:
    return SGD(module.a.parameters(), lr=lr)


def pair(module: Two) -> tuple[SGD, Adam]:
    return sgd(module), Adam(module.b.parameters())


def with_scheduler(module: Two, **settings: Any) -> dict[str, Any]:
    optimizer = sgd(module)
    scheduler = StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **settings} if settings else scheduler}


@pytest.mark.parametrize(
    ("configured", "manual", "counts"),
    [
        (sgd, False, (1, 0)),
        (lambda m: [sgd(m)], False, (1, 0)),
        (lambda m: (sgd(m),), False, (1, 0)),
        (pair, True, (2, 0)),
        (pair, False, (2, 0)),
        (lambda m: ([o := sgd(m)], [StepLR(o, 1)]), False, (1, 1)),
        (lambda m: ([o := sgd(m)], StepLR(o, 1)), False, (1, 1)),
        (lambda m: ([o := sgd(m)], [{"scheduler": StepLR(o, 1), "interval": "step"}]), False, (1, 1)),
        (lambda m: {"optimizer": sgd(m)}, False, (1, 0)),
        (with_scheduler, False, (1, 1)),
        (lambda m: with_scheduler(m, interval="step", frequency=2, name="mine"), False, (1, 1)),
        (lambda m: [with_scheduler(m), {"optimizer": Adam(m.b.parameters())}], True, (2, 1)),
        (lambda m: [with_scheduler(m), {"optimizer": Adam(m.b.parameters())}], False, (2, 1)),
        (lambda m: ([sgd(m)], []), False, (1, 0)),
    ],
)
def test_every_form_is_understood(configured: Any, manual: bool, counts: tuple[int, int]) -> None:
    optimizers, schedulers = configure(Two(configured, manual))
    assert (len(optimizers), len(schedulers)) == counts


def test_a_plateau_scheduler_may_have_its_monitor_beside_it() -> None:
    _, (config,) = configure(
        Two(lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": ReduceLROnPlateau(o), "monitor": "val_loss"})
    )
    assert (config.monitor, config.reduce_on_plateau, config.interval) == ("val_loss", True, "epoch")


@pytest.mark.parametrize("make", [lambda o: OneCycleLR(o, 0.1, total_steps=3), lambda o: CyclicLR(o, 0.1, 0.2)])
def test_a_scheduler_made_for_steps_is_stepped_every_update(make: Any) -> None:
    _, (config,) = configure(Two(lambda m: ([o := sgd(m)], [make(o)])))
    assert config.interval == "step"
    _, (config,) = configure(Two(lambda m: ([o := sgd(m)], [{"scheduler": make(o), "interval": "epoch"}])))
    assert config.interval == "epoch"


@pytest.mark.parametrize(
    ("configured", "error", "message"),
    [
        (lambda m: "sgd", TypeError, "returned a str where an optimizer was expected. Return an optimizer; a list"),
        (lambda m: [sgd(m), 3], TypeError, "returned an int where an optimizer was expected"),
        (lambda m: {"optimiser": sgd(m)}, ValueError, "'optimiser'. Did you mean 'optimizer'"),
        (lambda m: {"lr_scheduler": None}, ValueError, "but without 'optimizer'"),
        (lambda m: with_scheduler(m, intervall="step"), ValueError, "'intervall'. Did you mean 'interval'"),
        (lambda m: with_scheduler(m, interval="batch"), ValueError, "'batch'.*'epoch' or 'step'"),
        (lambda m: with_scheduler(m, frequency=0), ValueError, "frequency=0. Use an integer of 1 or more"),
        (lambda m: ([o := sgd(m)], [ReduceLROnPlateau(o)]), ValueError, "ReduceLROnPlateau without 'monitor'"),
        (lambda m: ([sgd(m)], sgd(m)), TypeError, r"returned an? SGD as a scheduler. To use several optimizers"),
        (lambda m: ([sgd(m)], ["step"]), TypeError, r"returned a str as a scheduler, but it has no step\(\)"),
        (lambda m: ([sgd(m)], [StepLR(sgd(m), 1)]), ValueError, "StepLR for an optimizer that it did not return"),
    ],
)
def test_other_forms_are_refused(configured: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        configure(Two(configured))


def test_none_means_no_optimizer_and_is_told(quiet: dict[str, Any]) -> None:
    module = Two(lambda m: None)
    trainer = Trainer(max_epochs=1, **quiet)
    with pytest.warns(UserWarning, match="returned None, so fit runs without an optimizer"):
        trainer.fit(module, [torch.ones(1)] * 2)
    assert (trainer.global_step, trainer.state.batches) == (2, 2)


def test_by_hand_two_optimizers_are_stepped_counted_and_seen_by_hooks(quiet: dict[str, Any]) -> None:
    stepped: list[str] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            stepped.append(type(optimizer).__name__)

    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(self.a(batch).sum())
            self.clip_gradients(first, 0.5)
            first.step()
            first.zero_grad()
            if batch_idx % 2 == 0:
                self.manual_backward(self.b(batch).sum())
                second.step()
                second.zero_grad()

    module = Module(pair, manual=True)
    before = module.a.bias.item()
    trainer = Trainer(max_epochs=1, **quiet, callbacks=[Watch()])
    trainer.fit(module, [torch.zeros(1)] * 3)
    assert (trainer.global_step, trainer.state.updates) == (5, 3)
    assert stepped == ["SGD", "Adam", "SGD", "SGD", "Adam"]
    assert module.a.bias.item() == pytest.approx(before - 3 * 0.1 * 0.5, rel=1e-4)


def test_toggling_restores_exactly_what_was(quiet: dict[str, Any]) -> None:
    seen: list[list[bool]] = []

    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.b.bias.requires_grad_(False)
            first, second = self.optimizers()
            for optimizer in (first, second):
                with self.toggled_optimizer(optimizer):
                    seen.append([p.requires_grad for p in self.parameters()])
            with first.toggle_model():
                seen.append([p.requires_grad for p in self.parameters()])
            seen.append([p.requires_grad for p in self.parameters()])

    Trainer(max_epochs=1, **quiet).fit(Module(pair, manual=True), [torch.ones(1)])
    assert seen == [
        [True, True, False, False],
        [False, False, True, False],
        [True, True, False, False],
        [True, True, True, False],
    ]


def test_optimizers_can_be_had_raw_and_managed_ones_show_what_is_inside(quiet: dict[str, Any]) -> None:
    class Module(Two):
        def on_train_start(self) -> None:
            managed, raw = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            assert managed.optimizer is raw
            assert managed.param_groups is raw.param_groups
            assert isinstance(self.lr_schedulers(), StepLR)

    Trainer(max_epochs=1, **quiet).fit(Module(with_scheduler), [torch.ones(1)])


def test_frequency_counts_in_the_schedulers_interval(quiet: dict[str, Any]) -> None:
    rates: list[float] = []

    class Module(Two):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    def configured(module: Two) -> Any:
        optimizer = sgd(module, 1.0)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 2}]

    Trainer(max_epochs=1, **quiet).fit(Module(configured), [torch.ones(1)] * 4)
    assert rates == [1.0, 0.5, 0.5, 0.25]


def test_strict_false_turns_a_missing_monitor_into_a_warning(quiet: dict[str, Any]) -> None:
    def configured(module: Two) -> Any:
        optimizer = sgd(module)
        plateau = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "nothing", "strict": False}
        return [optimizer], [plateau]

    with pytest.warns(UserWarning, match="monitors 'nothing', which had not been logged"):
        Trainer(max_epochs=1, **quiet).fit(Two(configured), [torch.ones(1)])


def test_a_step_override_decides_when_to_step(quiet: dict[str, Any]) -> None:
    class Module(Two):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    module = Module(sgd)
    before = module.a.bias.item()
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.ones(1)] * 5)
    assert trainer.global_step == 2
    assert module.a.bias.item() == pytest.approx(before - 0.2)


def test_a_step_override_that_forgets_the_closure_is_told(quiet: dict[str, Any]) -> None:
    class Module(Two):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"optimizer_step did not run the closure.*optimizer.step\(closure="):
        Trainer(max_epochs=1, **quiet).fit(Module(sgd), [torch.ones(1)])


def test_zero_grad_backward_and_clipping_can_be_overridden(quiet: dict[str, Any]) -> None:
    called: list[str] = []

    class Module(Two):
        def backward(self, loss: Any) -> None:
            called.append("backward")
            loss.backward()

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            called.append(f"clip {gradient_clip_val}")
            self.clip_gradients(optimizer, 1.0, "value")

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            called.append(f"zero {epoch} {batch_idx}")
            optimizer.zero_grad(set_to_none=False)

    module = Module(sgd)
    Trainer(max_epochs=1, **quiet).fit(module, [torch.ones(1)])
    assert called == ["backward", "clip None", "zero 0 0"]
    assert module.a.bias.grad.item() == 0.0


class ClearsItsWay(torch.optim.SGD):
    """Has a ``zero_grad`` without ``set_to_none``, like the optimizers of some packages."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize("manual", [False, True])
def test_an_optimizer_that_clears_gradients_without_an_argument_trains(manual: bool, quiet: dict[str, Any]) -> None:
    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not manual:
                return loss
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return None

    module = Module(lambda module: ClearsItsWay(module.a.parameters(), lr=0.1), manual)
    before = module.a.bias.item()
    Trainer(max_epochs=1, **quiet).fit(module, [torch.ones(1)])
    assert module.a.bias.item() == pytest.approx(before - 0.1)
    assert module.a.bias.grad.item() == 0.0


def test_an_empty_list_means_no_optimizer_and_is_told(quiet: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"returned \[\], so fit runs without an optimizer"):
        Trainer(max_epochs=1, **quiet).fit(Two(lambda m: []), [torch.ones(1)])


@pytest.mark.parametrize("manual", [False, True])
def test_without_optimizers_batches_count_so_that_max_steps_ends_the_run(manual: bool, quiet: dict[str, Any]) -> None:
    trainer = Trainer(max_epochs=-1, max_steps=3, **quiet)
    trainer.fit(Two(lambda m: None, manual=manual), [torch.ones(1)] * 2)
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)


def test_stepping_past_the_managed_optimizer_is_told(quiet: dict[str, Any]) -> None:
    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers(use_pl_optimizer=False).step()

    with pytest.warns(UserWarning, match=r"did not step any of self.optimizers\(\) in an entire epoch"):
        Trainer(max_epochs=1, **quiet).fit(Module(sgd, manual=True), [torch.ones(1)])


@pytest.mark.parametrize("precision", [None, "16-mixed"])
def test_by_hand_with_a_closure_hooks_see_its_gradients(precision: Any, quiet: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Any:
                seen.append("closure")
                optimizer.zero_grad()
                loss = self.a(batch).float().sum() / 1024  # no overflow under a scale of 65536
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.a.bias.grad.item() * 1024)

    trainer = Trainer(max_epochs=1, precision=precision, **quiet)
    trainer.fit(Module(sgd, manual=True), [torch.ones(1)] * 2)
    assert seen == ["closure", 1.0, "closure", 1.0]
    assert trainer.global_step == 2


@pytest.mark.parametrize("manual", [False, True])
def test_lbfgs_finds_the_minimum_of_a_quadratic(manual: bool, quiet: dict[str, Any]) -> None:
    goal, curvature = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0])

    class Bowl(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor([3.0, -2.0]))
            self.automatic_optimization = not manual

        def loss(self) -> Any:
            return (curvature * (self.x - goal) ** 2).sum()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not manual:
                return self.loss()
            optimizer = self.optimizers()

            def closure() -> Any:
                optimizer.zero_grad()
                loss = self.loss()
                self.manual_backward(loss)
                return loss

            return optimizer.step(closure) and None

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=10)

    module = Bowl()
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.ones(1)] * 3)
    torch.testing.assert_close(module.x.detach(), goal)
    assert trainer.global_step == 3


class Adversaries(TrainingModule):
    """Two networks against each other, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(2, 2), nn.Linear(2, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            self.manual_backward(-self.d(self.g(batch)).mean())
            self.clip_gradients(first, 0.1, "norm")
            first.step()
            first.zero_grad()
        with self.toggled_optimizer(second):
            self.manual_backward(self.d(self.g(batch).detach()).mean() - self.d(batch).mean())
            second.step()
            second.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first, second = Adam(self.g.parameters(), 1e-2), SGD(self.d.parameters(), 1e-2, momentum=0.9)
        return [first, second], [StepLR(first, 1, 0.9), StepLR(second, 1, 0.8)]


def test_two_optimizers_by_hand_do_what_a_plain_loop_does(quiet: dict[str, Any]) -> None:
    data = [torch.randn(4, 2) for _ in range(5)]
    module = Adversaries()
    plain = copy.deepcopy(module)
    trainer = Trainer(max_epochs=2, **quiet)
    trainer.fit(module, data)
    (first, second), schedulers = plain.configure_optimizers()
    for batch in data * 2:
        (-plain.d(plain.g(batch)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(plain.g.parameters(), 0.1)
        first.step()
        plain.zero_grad()
        (plain.d(plain.g(batch).detach()).mean() - plain.d(batch).mean()).backward()
        second.step()
        plain.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert (trainer.global_step, trainer.state.updates) == (20, 10)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_toggling_one_after_the_other_without_undoing_is_undone_at_once(quiet: dict[str, Any]) -> None:
    seen: list[list[bool]] = []

    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.a.bias.requires_grad_(False)
            self.toggle_optimizer(first)
            self.toggle_optimizer(second)
            seen.append([p.requires_grad for p in self.parameters()])
            self.untoggle_optimizer(second)
            seen.append([p.requires_grad for p in self.parameters()])

    Trainer(max_epochs=1, **quiet).fit(Module(pair, manual=True), [torch.ones(1)])
    assert seen == [[False, False, True, True], [True, False, True, True]]


ARGUMENTS = [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.1},
    {"precision": "bf16-mixed"},
    {"precision": "16-mixed", "accumulate_grad_batches": 2},
]


class Net(TrainingModule):
    """Notes the hooks of a step; returns ``num_items`` if asked to."""

    def __init__(self, items: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1)
        self.items = items
        self.order = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).pow(2).mean()
        return {"loss": loss, "num_items": len(batch)} if self.items else loss

    def on_before_backward(self, loss: Any) -> None:
        self.order += "b"

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.order += "s"

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.order += "z"

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), 0.05)


class Closed(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.order += "."
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_an_override_that_only_passes_on_changes_nothing(
    arguments: dict[str, Any], items: bool, quiet: dict[str, Any]
) -> None:
    data = [torch.randn(size, 3) for size in (2, 5, 3, 4, 1, 2, 7)]
    straight, closed = Net(items), Closed(items)
    steps = []
    for module in (straight, closed):
        trainer = Trainer(max_epochs=2, **quiet, **arguments)
        trainer.fit(module, data)
        steps.append((trainer.global_step, trainer.state.updates, module.order.replace(".", "")))
    assert torch.equal(straight.layer.weight, closed.layer.weight)
    assert steps[0] == steps[1]


@pytest.mark.parametrize("kind", [Net, Closed])
def test_a_skipped_batch_is_no_step(kind: type[Net], quiet: dict[str, Any]) -> None:
    class Module(kind):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx == 1 else None

    module = Module()
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.ones(1, 3)] * 3)
    assert (trainer.global_step, trainer.state.updates, module.order.replace(".", "")) == (1, 1, "bsz")


def test_a_window_cut_short_goes_through_the_override(quiet: dict[str, Any]) -> None:
    module = Closed()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 4 else None
    trainer = Trainer(max_epochs=1, accumulate_grad_batches=3, **quiet)
    trainer.fit(module, [torch.ones(1, 3)] * 9)
    assert module.order == "bb.bszb.sz"
    assert trainer.global_step == 2


def test_a_module_that_holds_a_managed_optimizer_can_be_copied(quiet: dict[str, Any]) -> None:
    class Module(Net):
        def on_train_start(self) -> None:
            self.mine = self.optimizers()
            other = copy.deepcopy(self)
            assert other.mine.param_groups[0]["params"][0] is other.layer.weight
            assert copy.copy(self.mine).optimizer is self.mine.optimizer

    Trainer(max_epochs=1, **quiet).fit(Module(), [torch.ones(1, 3)])


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"interval": "epoch"}, [1.0] * 8),
        ({"interval": "step"}, [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]),
        ({"interval": "step", "frequency": 2}, [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
    ],
    ids=str,
)
def test_a_plateau_scheduler_advances_by_epochs_or_steps(
    settings: dict[str, Any], rates: list[float], quiet: dict[str, Any]
) -> None:
    found: list[float] = []
    module = Net()
    optimizer = SGD(module.parameters(), 1.0)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    module.validation_step = lambda batch, batch_idx: module.log("val", 1.0)
    module.on_train_batch_end = lambda outputs, batch, batch_idx: found.append(optimizer.param_groups[0]["lr"])
    module.configure_optimizers = lambda: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": plateau, "monitor": "val", **settings},
    }
    trainer = Trainer(max_epochs=2, val_check_interval=1, **quiet)
    trainer.fit(module, [torch.ones(1, 3)] * 4, [torch.ones(1, 3)])
    assert found == rates


def test_a_plateau_scheduler_may_monitor_what_the_module_logs_at_the_epochs_end(quiet: dict[str, Any]) -> None:
    seen: list[float] = []
    module = Net()
    optimizer = SGD(module.parameters(), 1.0)
    module.configure_optimizers = lambda: {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "late"},
    }
    module.on_train_epoch_end = lambda: module.log("late", float(module.current_epoch))
    module.lr_scheduler_step = lambda scheduler, metric: seen.append(metric.item())
    Trainer(max_epochs=2, **quiet).fit(module, [torch.ones(1, 3)])
    assert seen == [0.0, 1.0]


def test_a_scheduler_made_for_steps_is_told_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="paceline"):
        for _ in range(2):
            configure(Two(lambda m: ([o := sgd(m)], [OneCycleLR(o, 0.1, total_steps=3)])))
    assert caplog.text.count("OneCycleLR advances at every optimizer step, so interval='step' is used") == 1


# ---- a one-cycle schedule that is over -------------------------------------------------------------------------------


def cycle(optimizer: Any, total_steps: int = 4) -> OneCycleLR:
    return OneCycleLR(optimizer, 0.1, total_steps=total_steps, anneal_strategy="linear", final_div_factor=10)


def after_a_constant(optimizer: Any) -> SequentialLR:
    return SequentialLR(optimizer, [ConstantLR(optimizer, 1.0, 1), cycle(optimizer, 3)], milestones=[1])


def in_a_chain(optimizer: Any) -> ChainedScheduler:
    return ChainedScheduler([after_a_constant(optimizer), MultiplicativeLR(optimizer, lambda _: 0.5)], optimizer)


class OneCycle(TinyModule):
    """Writes down the learning rate of each update."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        self.rates: list[float] = []
        optimizer = SGD(self.parameters(), momentum=0.9)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(round(optimizer.param_groups[0]["lr"], 6))


def fitted(make: Any, folder: Path, from_step: int | None = None) -> OneCycle:
    module, saver = OneCycle(make), ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    torch.manual_seed(0)
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[saver], enable_progress_bar=False)
    path = None if from_step is None else next(folder.glob(f"*step={from_step}.ckpt"))
    trainer.fit(module, tiny_loader(7), ckpt_path=path)
    return module


def by_hand(make: Any, folder: Path, from_step: int | None = None) -> OneCycle:
    accelerator, module = Accelerator(cpu=True), OneCycle(make)
    (optimizer,), (config,) = module.configure_optimizers()
    torch.manual_seed(0)
    _, optimizer, schedule, loader = accelerator.prepare(module, optimizer, config["scheduler"], tiny_loader(7))
    if from_step is not None:
        accelerator.load_state(folder / str(from_step))
    for batch in loader:
        accelerator.backward(module.loss(batch))
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if from_step is None:
            accelerator.save_state(folder / str(loader.batches_done))
    return module


@pytest.mark.parametrize("make", [cycle, after_a_constant, in_a_chain])
@pytest.mark.parametrize("train", [fitted, by_hand], ids=["Trainer", "Accelerator"])
def test_a_one_cycle_schedule_that_is_over_keeps_its_last_learning_rate_with_one_warning(
    tmp_path: Path, train: Any, make: Any
) -> None:
    """The last one of its curve: torch's own next step lies beyond that, here below zero, and the one after raises."""
    alone = OneCycle(make)
    (optimizer,), (config,) = alone.configure_optimizers()
    for _ in range(4):
        alone.on_before_optimizer_step(optimizer)
        optimizer.step()
        config["scheduler"].step()
    with pytest.warns(PacelineWarning, match=r"OneCycleLR\(total_steps=[34]\) has ended") as caught:
        whole = train(make, tmp_path)
    assert len([one for one in caught if "has ended" in str(one.message)]) == 1
    assert whole.rates == [*alone.rates, *alone.rates[-1:] * 3]
    for done in (3, 4, 6):
        found = train(make, tmp_path, done)
        assert found.rates == whole.rates[done:]
        assert torch.equal(found.layer.weight, whole.layer.weight)


def test_a_one_cycle_schedule_of_the_right_length_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], momentum=0.9)
    schedule = cycle(optimizer)
    for _ in range(schedule.total_steps):
        optimizer.step()
        advance(schedule)
    assert schedule.last_epoch == schedule.total_steps
    assert not recwarn.list


def test_a_managed_optimizer_is_its_optimizer_and_needs_no_run() -> None:
    inner = Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    managed = ManagedOptimizer(inner)
    assert isinstance(managed, Adam)
    assert isinstance(managed, ManagedOptimizer)
    for name in ("state", "defaults", "param_groups"):
        value = copy.copy(getattr(inner, name))
        setattr(managed, name, value)
        assert getattr(inner, name) is value
    StepLR(managed, 1).step()  # a scheduler takes it
    inner.param_groups[0]["params"][0].grad = torch.ones(1)
    managed.step()
    managed.zero_grad()
    assert inner.param_groups[0]["params"][0].item() < 1
    assert inner.param_groups[0]["params"][0].grad is None


def test_gradients_stay_here_in_a_toggled_model_that_does_not_synchronize(quiet: dict[str, Any]) -> None:
    told: list[bool] = []

    class Talks(SingleDevice):
        communicates_gradients = True

        def sync_gradients(self, enabled: bool) -> None:
            told.append(enabled)

    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first = self.optimizers()[0]
            with first.toggle_model():
                told.append(self.b.weight.requires_grad)
            with first.toggle_model(sync_grad=False):
                told.append(self.b.weight.requires_grad)

    del quiet["accelerator"]
    Trainer(max_epochs=1, **quiet, strategy=Talks("cpu")).fit(Module(pair, manual=True), [torch.ones(1)])
    assert told == [False, False, False, True]


def test_an_optimizer_whose_step_needs_a_closure_gets_one(quiet: dict[str, Any]) -> None:
    class Sharp(SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            loss = closure()
            super().step()
            return loss

    weights = []
    for kind in (SGD, Sharp):
        module = Two(lambda m, kind=kind: kind(m.parameters(), lr=0.1))
        nn.init.ones_(module.a.weight)
        Trainer(max_epochs=1, **quiet, accumulate_grad_batches=2).fit(module, [torch.ones(1)] * 3)
        weights.append(module.a.weight.item())
    assert weights[0] == weights[1] != 1


def test_clipping_gets_its_settings_by_name_or_in_order(quiet: dict[str, Any]) -> None:
    got: list[Any] = []

    class Named(Two):
        @wraps(TrainingModule.configure_gradient_clipping)
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            got.append(settings)

    class Ordered(Two):
        def configure_gradient_clipping(self, optimizer: Any, value: Any, algorithm: Any) -> None:  # type: ignore[override]
            got.append((value, algorithm))

    for kind in (Named, Ordered):
        Trainer(max_epochs=1, **quiet, gradient_clip_val=0.5).fit(kind(sgd), [torch.ones(1)])
    assert got == [{"gradient_clip_val": 0.5, "gradient_clip_algorithm": None}, (0.5, None)]


def test_optimization_by_hand_takes_any_scheduler_and_further_arguments_of_a_step(quiet: dict[str, Any]) -> None:
    got: list[Any] = []

    class Options(SGD):
        def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
            got.append(scale)
            return super().step(closure)

    class Module(Two):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            self.manual_backward(self.a(batch).sum())
            optimizer.step(scale=2.0)
            optimizer.step(lambda: None)

        def configure_optimizers(self) -> Any:
            optimizer = Options(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": object(), "monitor": "loss"}}

    with pytest.warns(UserWarning, match="sets 'monitor' for a scheduler, but manual optimization ignores"):
        Trainer(max_epochs=1, **quiet).fit(Module(manual=True), [torch.ones(1)])
    assert got == [2.0, 1.0]
