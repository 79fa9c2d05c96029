"""Norms of gradients, for logging."""

from __future__ import annotations

import pytest
import torch

from paceline.utilities import grad_norm


@pytest.mark.parametrize(("norm_type", "order"), [(2, 2.0), ("inf", float("inf")), (1.5, 1.5)])
def test_each_parameter_and_all_together_have_a_norm(norm_type: float | str, order: float) -> None:
    module = torch.nn.Linear(3, 2)
    module(torch.ones(1, 3)).square().sum().backward()
    found = grad_norm(module, norm_type)
    grads = {name: p.grad.norm(order) for name, p in module.named_parameters() if p.grad is not None}
    expected = {f"grad_{order}_norm/{name}": norm for name, norm in grads.items()}
    expected[f"grad_{order}_norm_total"] = torch.stack(list(grads.values())).norm(order)
    torch.testing.assert_close(found, expected)


def test_without_gradients_there_are_no_norms() -> None:
    assert grad_norm(torch.nn.Linear(3, 2), 2) == {}


def test_a_norm_of_order_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"norm_type=0 must be a positive number"):
        grad_norm(torch.nn.Linear(3, 2), 0)
