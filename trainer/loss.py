"""Read the loss from ``training_step``'s output, weight it within the window, and raise if it is not a valid loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import messages
from ..loggers.values import words_in
from ..strategies.item_weighting import ItemWindow

if TYPE_CHECKING:
    from ..strategies.base import Strategy


class LossReader:
    """Reads losses; either all or none of them must come with ``num_items``.

    Attributes:
        together: whether a callback makes all ranks skip the same batches.
        form_known: whether a loss has been read; from then on, ``by_items`` no longer changes.
        by_items: whether ``training_step`` returns ``num_items``, by which ``window`` then weights the losses.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, together: bool = False) -> None:
        self.owner = f"{type(module).__name__}.training_step"
        self.strategy = strategy
        self.together = together
        self.by_items = False
        self.form_known = False
        self.window = ItemWindow(strategy, f"{self.owner} returned")

    def read(self, output: Any) -> Tensor | None:
        """Return the scalar loss to run backward on; None means to skip the batch."""
        if output is None:
            return None if self.together else self._skip()
        loss = _loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._no_loss(output, loss)
        items = output.get("num_items") if isinstance(output, Mapping) else None
        if not self.form_known:
            self.form_known, self.by_items = True, items is not None
        if (items is not None) != self.by_items:
            raise ValueError(
                f"{self.owner} returned 'num_items' for some batches but not for all, so the window's losses cannot "
                "be weighted. Return 'num_items' for every batch, or for none."
            )
        return loss if items is None else self.window.weigh(loss, items)

    def finish_window(self) -> Tensor:
        """Return the factor, of shape (), that turns the window's summed gradients into the mean over all items."""
        return self.window.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items in the current window, and the window's ``unit``, as plain data."""
        return self.window.state_dict()

    def load_state_dict(self, state: dict[str, Any], in_window: bool) -> None:
        """Restore the state from :meth:`state_dict`; outside a window, restore only ``unit``."""
        self.window.load_state_dict(state, in_window)
        if in_window and state["unit"] is not None:
            self.form_known = self.by_items = True

    def _skip(self) -> None:
        if self.strategy.world_size > 1:
            raise RuntimeError(
                f"{self.owner} returned None to skip a batch on rank {self.strategy.global_rank}, but the other ranks "
                "would wait for this rank's gradients. Return a loss multiplied by zero instead."
            )
        messages.warn_once(
            f"{self.owner} returned None, so this batch is skipped and nothing is learned from it. If this is not "
            "intended, return the loss.",
            key=f"{self.owner} skips",
        )

    def problem(self, loss: Tensor) -> Exception | None:
        """Return the error for a loss whose backward pass failed; None if the loss is not the cause."""
        if not loss.requires_grad:
            return RuntimeError(
                f"{self.owner} returned a loss that does not require gradients, so nothing can be trained. Compute it "
                "from the module's output without .item(), .detach() or torch.no_grad(), check that not all "
                "parameters are frozen, or return None to skip this batch."
            )
        return None if loss.numel() == 1 else self._no_loss(loss, loss)

    def finite(self, output: Any) -> Any:
        """Return ``output``, or raise if its loss is NaN or infinite (this waits for the device)."""
        loss = _loss_of(output)
        if isinstance(loss, Tensor) and not torch.isfinite(loss).all():
            raise RuntimeError(
                f"{self.owner} returned a loss of {loss.detach().tolist()}. Because detect_anomaly=True is set, the "
                "run stops before the weights are corrupted. Check the batch and the learning rate. If the problem "
                "arose in backward, torch's anomaly trace shows which operation failed."
            )
        return output

    def _no_loss(self, output: Any, loss: Any) -> Exception:
        if isinstance(loss, Tensor):
            return ValueError(
                f"{self.owner} returned a loss of shape {tuple(loss.shape)}, which is not a scalar. Return its mean: "
                "loss.mean()."
            )
        if isinstance(output, Mapping) and "loss" not in output:
            what = f"a dict without 'loss' (keys: {', '.join(map(repr, output))})"
        else:
            where = "a dict whose 'loss' is " if isinstance(output, Mapping) else ""
            what = f"{where}{type(loss).__name__} ({loss!r:.60})"
        return TypeError(
            f"{self.owner} returned {what}, so there is nothing to run backward on. "
            "Return the loss tensor, or put it under 'loss'. Return None to skip this batch."
        )


class LossWatch:
    """Warns once if a NaN or infinite loss is among the values that are copied to the host for the loggers.

    Losses are the values with the word "loss" in their names, and the loss that ``training_step`` (``owner``) returned.
    """

    def __init__(self, owner: str) -> None:
        self.warned = False
        self.returned = f"The loss that {owner} returned"

    def among(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the losses among the values."""
        return {name: value for name, value in values.items() if not words_in(name).isdisjoint(("loss", "losses"))}

    def within(self, output: Any) -> dict[str, Any]:
        """Return the loss in an output of ``training_step``."""
        loss = None if self.warned else _loss_of(output)
        return {self.returned: loss} if isinstance(loss, Tensor) and loss.numel() == 1 else {}

    def check(self, values: dict[str, float], step: int, epoch: int) -> None:
        """Check values before they go to the loggers, and remove the loss that ``training_step`` returned."""
        losses = {} if self.warned else self.among(values)
        values.pop(self.returned, None)
        name = next((name for name, value in losses.items() if not math.isfinite(value)), None)
        if name is None:
            return
        self.warned = True
        messages.warn(
            f"{name} is {losses[name]} as of step {step}, epoch {epoch}. Training continues, but a loss that is not "
            "finite corrupts the weights and every checkpoint saved from then on. Check the data and the learning "
            "rate. The LossGuard callback skips such batches or returns to a good checkpoint. "
            "Trainer(detect_anomaly=True) stops at the first such loss, and reports the operation if the problem arose "
            "in backward."
        )


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output
