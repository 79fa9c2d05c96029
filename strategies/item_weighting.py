"""Average the loss over all items (tokens, pixels, boxes) in an accumulation window, not over its micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..devices.kinds import kind_of

if TYPE_CHECKING:
    from .base import Strategy


class ItemWindow:
    """Weights the loss of each micro-batch in an accumulation window by its number of items.

    Each loss is multiplied by its number of items and divided by ``unit``, a power of two. When the window is complete,
    multiplying its gradients by the factor from :meth:`finish` turns them into gradients of the mean over all ranks'
    items. ``items`` counts this rank's items in the window so far. ``said`` is the beginning of error messages and says
    where the counts come from, such as ``"Net.training_step returned"``.
    """

    def __init__(self, strategy: Strategy, said: str) -> None:
        self.strategy = strategy
        self.said = said
        self.items: Any = 0
        self.unit: float | None = None

    def weigh(self, loss: Tensor, items: Any) -> Tensor:
        """Return the weighted loss to run backward on, shape (); ``loss`` is a mean over ``items`` items."""
        if self.unit is None:
            self.unit = self._unit_of(items)
        self.items = self.items + items
        return weighed(loss, items, self.unit)

    def finish(self) -> Tensor:
        """Return the factor, shape (), that turns the window's gradients into those of the mean over all ranks' items.

        Every rank must call this. Afterwards, the window is empty.
        """
        device = self.strategy.device
        dtype = kind_of(device).widest_float
        total = self.strategy.reduce(torch.as_tensor(self.items, device=device, dtype=dtype), "mean")
        self.items = 0
        return final_factor(total, self.unit)

    def state_dict(self) -> dict[str, Any]:
        """Return the unit and the number of items in the unfinished window, as plain data."""
        items = self.items.detach().cpu() if isinstance(self.items, Tensor) else self.items
        return {"items": items, "unit": self.unit}

    def load_state_dict(self, state: dict[str, Any], in_window: bool) -> None:
        """Restore the state that :meth:`state_dict` returned, or only ``unit`` if there was no unfinished window."""
        self.unit, self.items = state["unit"], 0
        if in_window and self.unit is not None:
            items = state["items"]
            self.items = items.to(self.strategy.device) if isinstance(items, Tensor) else items

    def _unit_of(self, items: Any) -> float:
        """Return a power of two close to the first batch's number of items.

        Dividing weighted losses by this power of two keeps them within fp16's range and does not round them.
        """
        first = float(items)
        if not 0 <= first < math.inf:
            raise ValueError(
                f"{self.said} num_items={first!r}. num_items must be the number of items that the loss is averaged "
                "over, which is 0 or more."
            )
        return self.strategy.broadcast(2.0 ** math.floor(math.log2(max(first, 1.0))))


def weighed(loss: Tensor, items: Any, unit: float | None) -> Tensor:
    """Return the loss of one micro-batch, shape (), weighted by its ``items``."""
    return loss * (items / (unit or 1.0))


def final_factor(total: Tensor, unit: float | None) -> Tensor:
    """Return the factor for the gradients of weighted losses, shape ().

    ``total`` is the number of items in the window, averaged across ranks.
    """
    return (unit or 1.0) / total.clamp(min=torch.finfo(torch.float32).tiny)
