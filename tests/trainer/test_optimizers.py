"""``configure_optimizers`` in every form, and optimization by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from paceline import Callback, Trainer, TrainingModule
from paceline.trainer.optimizers import configure


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
        (lambda m: ([o := sgd(m)], [StepLR(o, 1)]), False, (1, 1)),
        (lambda m: ([o := sgd(m)], [{"scheduler": StepLR(o, 1), "interval": "step"}]), False, (1, 1)),
        (lambda m: {"optimizer": sgd(m)}, False, (1, 0)),
        (with_scheduler, False, (1, 1)),
        (lambda m: with_scheduler(m, interval="step", frequency=2, name="mine"), False, (1, 1)),
        (lambda m: [with_scheduler(m), {"optimizer": Adam(m.b.parameters())}], True, (2, 1)),
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
        (lambda m: "sgd", TypeError, "returned str where an optimizer was expected. Return an optimizer; a list"),
        (lambda m: [sgd(m), 3], TypeError, "returned int where an optimizer was expected"),
        (lambda m: {"optimiser": sgd(m)}, ValueError, "'optimiser'. Did you mean 'optimizer'"),
        (lambda m: {"lr_scheduler": None}, ValueError, "and no 'optimizer'"),
        (
            pair,
            RuntimeError,
            r"returned 2 optimizers, but automatic optimization steps one.*automatic_optimization = False",
        ),
        (lambda m: with_scheduler(m, intervall="step"), ValueError, "'intervall'. Did you mean 'interval'"),
        (lambda m: with_scheduler(m, interval="batch"), ValueError, "'batch'.*'epoch' or 'step'"),
        (lambda m: with_scheduler(m, frequency=0), ValueError, "frequency=0. Use an integer of 1 or more"),
        (lambda m: ([o := sgd(m)], [ReduceLROnPlateau(o)]), ValueError, "ReduceLROnPlateau without 'monitor'"),
        (lambda m: ([sgd(m)], ["step"]), TypeError, r"returned str as a scheduler; it has no step\(\)"),
        (lambda m: ([sgd(m)], [StepLR(sgd(m), 1)]), ValueError, "StepLR for an optimizer that it did not return"),
    ],
)
def test_other_forms_are_refused(configured: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        configure(Two(configured))


def test_none_means_no_optimizer_and_is_told(quiet: dict[str, Any]) -> None:
    module = Two(lambda m: None)
    trainer = Trainer(max_epochs=1, **quiet)
    with pytest.warns(UserWarning, match="returned None: fit runs without an optimizer"):
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

    with pytest.warns(UserWarning, match="monitors 'nothing', which was not logged"):
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
