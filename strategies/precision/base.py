"""Full precision, and the interface that the others share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")


class Precision:
    """Which dtypes a run computes in. This one is ``"32-true"``: everything stays as the user made it.

    Everything per step is chosen when the run starts: :meth:`bind_forward` returns the step itself where nothing has to
    be done around it.
    """

    #: The canonical name, as in ``Trainer(precision=...)``.
    name: str = "32-true"
    #: The dtype floating-point inputs are converted to when a batch is moved, or None.
    input_dtype: torch.dtype | None = None
    #: fp16's loss scaler, or None.
    scaler: Any = None

    def use_on(self, device: torch.device) -> None:
        """Say where it will compute. Called once by the strategy that it belongs to."""

    def setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Say which optimizers there are; raises for one that this precision cannot step."""

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        """Return ``step`` as the loop should call it (inside autocast, for one)."""
        return step

    def forward_context(self) -> AbstractContextManager[Any]:
        """The same as a context, for code that is not a step."""
        return nullcontext()

    def backward_context(self) -> AbstractContextManager[Any]:
        """Context for a backward that starts inside a step (manual optimization): it has the dtypes of the forward."""
        return nullcontext()

    def init_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context in which new layers get this precision's dtype, on ``device``."""
        return device

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Bring the weights to this precision's dtype."""
        return module

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss as backward should see it: scalar, shape ()."""
        return loss

    def shared_scale(self, of_next_loss: bool = False) -> Tensor | None:
        """The loss scale in force, or that of the next loss; shape (). None where no step changes it for others."""
        return None

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of the gradients once before clipping."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """One optimizer step; False when it was skipped because of an overflow."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it (the loss scale)."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back :meth:`state_dict`."""


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's parameters hold just now."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
