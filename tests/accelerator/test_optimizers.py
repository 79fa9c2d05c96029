"""A prepared optimizer is its optimizer: what is read, set and cleared through it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Accelerator


class ClearsItsWay(torch.optim.SGD):
    """Has a ``zero_grad`` without ``set_to_none``, like the optimizers of some packages."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


class ClearsAnyWay(torch.optim.SGD):
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)


def trained(kind: type[torch.optim.SGD]) -> tuple[nn.Linear, Any]:
    """A prepared model after one step, and its prepared optimizer."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("kind", "left"), [(ClearsItsWay, True), (ClearsAnyWay, False), (torch.optim.SGD, False)])
def test_gradients_are_cleared_with_the_arguments_that_the_optimizer_accepts(kind: Any, left: bool) -> None:
    model, optimizer = trained(kind)
    optimizer.zero_grad()
    assert (model.weight.grad is not None) is left
    assert not left or not model.weight.grad.any()  # type: ignore[union-attr]


def test_an_argument_that_the_optimizer_lacks_is_refused_by_it() -> None:
    _, optimizer = trained(ClearsItsWay)
    with pytest.raises(TypeError, match="zero_grad"):
        optimizer.zero_grad(set_to_none=False)


def test_what_is_set_on_a_prepared_optimizer_is_set_on_the_users() -> None:
    model, optimizer = trained(torch.optim.SGD)
    inner = optimizer.optimizer
    assert inner.state[model.weight]["momentum_buffer"] is not None
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**group, "lr": 0.5} for group in inner.param_groups]
    optimizer.defaults = {**inner.defaults, "lr": 0.5}
    assert not inner.state
    assert [group["lr"] for group in inner.param_groups] == [0.5]
    assert inner.defaults["lr"] == 0.5
    before = model.bias.item()
    optimizer.step()
    assert model.bias.item() == pytest.approx(before - 0.5)
