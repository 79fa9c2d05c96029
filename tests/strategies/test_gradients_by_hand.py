"""Gradients of manual optimization that do not come from ``manual_backward``: still those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import Tensor
from torch.utils.data import DataLoader

from paceline import Trainer


class ByHand(TinyModule):
    """Steps after every second batch."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.differentiate(self.loss(batch), batch_idx)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def differentiate(self, loss: Tensor, batch_idx: int) -> None:
        raise NotImplementedError


class OwnGradients(ByHand):
    def differentiate(self, loss: Tensor, batch_idx: int) -> None:
        own = list(self.parameters())
        for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class PlainBackward(ByHand):
    def differentiate(self, loss: Tensor, batch_idx: int) -> None:
        loss.backward()


class NotEveryPassCommunicates(ByHand):
    def differentiate(self, loss: Tensor, batch_idx: int) -> None:
        with self.optimizers().toggle_model(sync_grad=bool(batch_idx % 2)):
            self.manual_backward(loss)


class StepsLater(ByHand):
    def differentiate(self, loss: Tensor, batch_idx: int) -> None:
        with self.optimizers().toggle_model(sync_grad=False):
            self.manual_backward(loss)


class InAClosure(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure=closure)


KINDS = [OwnGradients, PlainBackward, NotEveryPassCommunicates, StepsLater, InAClosure]


def fit_all(strategy: str, batch_size: int) -> list[dict[str, Tensor]]:
    weights = []
    for kind in KINDS:
        torch.manual_seed(5)
        module = kind()
        trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2)
        trainer.fit(module, tiny_loader(32 // batch_size, batch_size, shuffle=True))
        state = trainer.strategy.model_state(module)
        weights.append({name: value for name, value in state.items() if not value.is_meta})
    return weights


class EachBatch(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


def fit_unevenly(batch_size: int) -> list[Tensor]:
    """Train on samples whose last batch has 5 of 8, and 1 of 8."""
    weights = []
    for size in (21, 17):
        torch.manual_seed(5)
        module, data = EachBatch(), tiny_loader(1, size).dataset
        trainer = Trainer(**QUIET, strategy="ddp" if batch_size == 4 else "single_device", max_epochs=2)
        trainer.fit(module, DataLoader(data, batch_size, shuffle=True))
        weights.append(module.layer.weight.detach().clone())
    return weights


def test_each_sample_of_an_uneven_last_batch_has_the_same_weight() -> None:
    torch.testing.assert_close(ranks(2, fit_unevenly, 4), [fit_unevenly(8)] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_that_do_not_come_from_manual_backward_are_averaged(strategy: str) -> None:
    alone = fit_all("single_device", 8)
    for together in ranks(2, fit_all, strategy, 4):
        for kind, expected, got in zip(KINDS, alone, together, strict=True):
            if got:  # under FSDP, only rank 0 gets the values
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=f"{kind.__name__} differs")
