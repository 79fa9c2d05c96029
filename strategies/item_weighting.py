"""Accumulate the mean over all items (tokens, pixels, boxes) in a window, however micro-batches split them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import Strategy


class ItemWindow:
    """Weights the losses of a window's micro-batches by their numbers of items.

    Each loss is multiplied by its number of items and divided by ``unit``, a power of two. When the window is complete,
    its gradients are multiplied by the factor from :meth:`finish`, so they become the mean over the items of all ranks.
    ``items`` counts this rank's items in the window so far. ``said`` tells error messages where the counts come from,
    such as ``"Net.training_step returned"``.
    """

    def __init__(self, strategy: Strategy, said: str) -> None:
        self.strategy = strategy
        self.said = said
        self.items: Any = 0
        self.unit: float | None = None

    def weigh(self, loss: Tensor, items: Any) -> Tensor:
        """The weighted loss to run backward on, shape (); ``loss`` is a mean over ``items`` items."""
        if self.unit is None:
            self.unit = self._unit_of(items)
        self.items = self.items + items
        return weighed(loss, items, self.unit)

    def finish(self) -> Tensor:
        """The factor that turns the window's summed gradients into the mean over all items of all ranks, shape ().

        Every rank must call this; the window is empty afterwards.
        """
        device = self.strategy.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = self.strategy.reduce(torch.as_tensor(self.items, device=device, dtype=dtype), "mean")
        self.items = 0
        return final_factor(total, self.unit)

    def state_dict(self) -> dict[str, Any]:
        """The unit and the unfinished window's number of items, as plain data."""
        items = self.items.detach().cpu() if isinstance(self.items, Tensor) else self.items
        return {"items": items, "unit": self.unit}

    def load_state_dict(self, state: dict[str, Any], in_window: bool) -> None:
        """Restore :meth:`state_dict`; restores only the unit if there is no unfinished window."""
        self.unit, self.items = state["unit"], 0
        if in_window and self.unit is not None:
            items = state["items"]
            self.items = items.to(self.strategy.device) if isinstance(items, Tensor) else items

    def _unit_of(self, items: Any) -> float:
        """A power of two near the first batch's item count: keeps weighted losses in fp16's range without rounding."""
        first = float(items)
        if not 0 <= first < math.inf:
            raise ValueError(f"{self.said} num_items={first}. It must be the number of items averaged, 0 or more.")
        return self.strategy.broadcast(2.0 ** math.floor(math.log2(max(first, 1.0))))


def weighed(loss: Tensor, items: Any, unit: float | None) -> Tensor:
    """The loss of one micro-batch, shape (), weighted by its ``items``."""
    return loss * (items / (unit or 1.0))


def final_factor(total: Tensor, unit: float | None) -> Tensor:
    """The factor for gradients of weighted losses, shape (). ``total``: the window's items, averaged over the ranks."""
    return (unit or 1.0) / total.clamp(min=torch.finfo(torch.float32).tiny)
