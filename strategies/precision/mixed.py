"""Weights in float32, computation in 16 bits through autocast; fp16 with a loss scaler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from .base import Precision

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class MixedPrecision(Precision):
    """``"16-mixed"`` and ``"bf16-mixed"``.

    With fp16 the loss is scaled so that small gradients do not vanish (Micikevicius et al., Mixed Precision Training,
    2018). A step whose gradients overflow is skipped: it moves neither ``global_step`` nor schedulers, and is counted
    in ``skipped_steps``.

    Args:
        name: which of the two.
        device: kind of device, ``"cuda"``, ``"cpu"`` or ``"mps"``.
        scaler: a ``GradScaler`` of your own, for fp16 only.
    """

    def __init__(self, name: str = "bf16-mixed", device: str = "cpu", scaler: GradScaler | None = None) -> None:
        if name not in DTYPES:
            raise ValueError(f"MixedPrecision({name!r}): choose one of {', '.join(map(repr, DTYPES))}.")
        if scaler is not None and name != "16-mixed":
            raise ValueError(f"MixedPrecision({name!r}, scaler=...): bf16 needs no loss scaling. Leave scaler out.")
        self.name = name
        self.device = device
        self.dtype = DTYPES[name]
        self.scaler: Any = scaler or (GradScaler(device) if name == "16-mixed" else None)
        self.skipped_steps = 0

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.dtype)

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        context = self.forward_context()

        @functools.wraps(step)
        def in_autocast(*args: Any) -> T:
            with context:
                return step(*args)

        return in_autocast

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is None:
            return
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if self.scaler is None:
            return super().optimizer_step(optimizer, closure)
        if closure is not None:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "precision='16-mixed' with LBFGS: it evaluates the loss several times a step, which loss scaling "
                    "cannot "
                    "follow. Use 'bf16-mixed' or '32-true'."
                )
            closure()
        self.scaler.step(optimizer)  # waits for the device to learn about overflows, so reading them again is free
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        skipped = any(overflow.item() for overflow in found.values())
        self.scaler.update()
        self.skipped_steps += skipped
        return not skipped

    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {}
        return {"scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
            self.skipped_steps = state_dict["skipped_steps"]
