"""Automatic optimization while the person's own code steps, or runs backward, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer, TrainingModule
from paceline.trainer.manual_step_check import UPDATES


class ByHand(TinyModule):
    """Steps by hand from batch ``start`` on."""

    start, managed, retain = 0, True, True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx >= self.start:
            optimizer = self.optimizers(use_pl_optimizer=self.managed)
            optimizer.zero_grad()
            loss.backward(retain_graph=self.retain)
            optimizer.step()
        return loss


class Closure(ByHand):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class InAHook(TinyModule):
    def on_train_batch_end(self, *args: Any) -> None:
        self.optimizers().step()


def fit(module: TrainingModule, quiet: dict[str, Any], **arguments: Any) -> None:
    Trainer(**quiet, max_epochs=1, **arguments).fit(module, tiny_loader())


STEPPED = r"(?s){} stepped its optimizer by hand.*in {}\.__init__:\n\n    self\.automatic_optimization = False\n"


@pytest.mark.parametrize("kind", [ByHand, Closure])
@pytest.mark.parametrize(
    ("managed", "start", "accumulate"), [(True, 0, 1), (True, 3, 1), (False, 0, 1), (False, 1, 1), (False, 3, 4)]
)
@pytest.mark.parametrize("retain", [True, False])
def test_an_optimizer_that_is_stepped_by_hand_too_is_refused(
    kind: type[ByHand], managed: bool, start: int, accumulate: int, retain: bool, quiet: dict[str, Any]
) -> None:
    module = kind()
    module.start, module.managed, module.retain = start, managed, retain
    with pytest.raises(RuntimeError, match=STEPPED.format(kind.__name__, kind.__name__)):
        fit(module, quiet, accumulate_grad_batches=accumulate)


def test_one_that_is_stepped_in_a_hook_is_refused_too(quiet: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=STEPPED.format("InAHook", "InAHook")):
        fit(InAHook(), quiet)


def test_steps_that_are_meant_are_left_alone(quiet: dict[str, Any]) -> None:
    class Other(TinyModule):
        """Steps another optimizer, of a layer that the trainer's does not have."""

        def configure_optimizers(self) -> Any:
            self.mine = torch.nn.Linear(1, 1, bias=False)
            self.own = torch.optim.SGD(self.mine.parameters(), lr=0.1)
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.own.zero_grad()
            self.mine.weight.sum().backward()
            self.own.step()
            return self.loss(batch)

    class Counts(Callback):
        steps = 0

        def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            self.steps += 1
            assert len(optimizer._optimizer_step_pre_hooks) == (self.steps <= UPDATES)

    module, counts = Other(), Counts()
    fit(module, quiet, callbacks=[counts])
    assert counts.steps == 4


def test_an_optimizer_of_a_fit_that_ended_at_once_may_be_stepped_and_trained_with_again(quiet: dict[str, Any]) -> None:
    class Kept(TinyModule):
        def configure_optimizers(self) -> Any:
            self.kept = getattr(self, "kept", None) or torch.optim.SGD(self.parameters(), lr=0.1)
            return self.kept

    module = Kept()
    for _ in range(2):
        fit(module, quiet, limit_train_batches=1)
        module.kept.step()
    fit(module, quiet)


def test_a_backward_by_hand_says_which_line_to_write(quiet: dict[str, Any]) -> None:
    class Backward(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            loss.backward()
            return loss

    told = (
        r"^Backward\.training_step ran backward itself.*in Backward\.__init__:\n\n    self\.automatic_optimization = F"
    )
    with pytest.raises(RuntimeError, match=told) as raised:
        fit(Backward(), quiet)
    assert "a second time" in str(raised.value.__cause__)


def test_a_graph_that_is_kept_from_batch_to_batch_is_told_apart(quiet: dict[str, Any]) -> None:
    class Keeps(TinyModule):
        kept: Any = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.kept = (self.kept + self.loss(batch)) ** 2
            return self.kept

    with pytest.raises(RuntimeError, match=r"If Keeps\.training_step keeps tensors between batches, detach them"):
        fit(Keeps(), quiet)
