"""Float32 weights with 16-bit computation through autocast; fp16 also uses a loss scaler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState

from ...torch_private import scale_of, scaler_states
from .base import Precision, gradients

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")

MixedName = Literal["16-mixed", "bf16-mixed"]
DTYPES: dict[MixedName, torch.dtype] = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class MixedPrecision(Precision):
    """The precisions ``"16-mixed"`` and ``"bf16-mixed"``: float32 weights, with 16-bit computation in autocast.

    With fp16, the loss is scaled so that small gradients do not vanish (Micikevicius et al., Mixed Precision Training,
    2018). A step whose gradients overflow is skipped: ``global_step`` and schedulers do not advance, and
    ``skipped_steps`` counts it.

    Args:
        precision: one of the two names.
        device: the kind of device, ``"cuda"``, ``"cpu"`` or ``"mps"``, or a device such as ``"cuda:0"``; the
            strategy's device if None.
        scaler: your own ``GradScaler``, for fp16 only.
        autocast: if False, the forward pass computes in the dtype of the weights and inputs.
        cache: whether a weight is converted once per forward pass instead of at each use. None means torch's default,
            or False if the strategy shards the weights, because the cache would hold the whole model's weights.
    """

    def __init__(
        self,
        precision: MixedName = "bf16-mixed",
        device: str | None = None,
        scaler: GradScaler | None = None,
        *,
        autocast: bool = True,
        cache: bool | None = None,
    ) -> None:
        if precision not in DTYPES:
            raise ValueError(
                f"MixedPrecision does not support {precision!r}. Choose one of {', '.join(map(repr, DTYPES))}."
            )
        if scaler is not None and precision != "16-mixed":
            raise ValueError(
                f"MixedPrecision({precision!r}, scaler=...): bf16 needs no loss scaling. Leave scaler out."
            )
        self.name = precision
        self.dtype = DTYPES[precision]
        self.device = None if device is None else torch.device(device).type
        self.scaler: Any = scaler
        self.autocast, self.cache = autocast, cache
        self.skipped_steps = 0
        self._several = self._update_due = False
        if self.device is not None:
            self.use_on(torch.device(self.device))

    def use_on(self, device: torch.device) -> None:
        if self.device not in (None, device.type):
            raise ValueError(
                f"MixedPrecision({self.name!r}, device={self.device!r}) cannot run on {device}, where it "
                "would compute in float32. Leave device out."
            )
        self.device = device.type
        if self.dtype is torch.float16 and self.scaler is None:
            self.scaler = GradScaler(device.type)

    def use_scaler(self, scaler: GradScaler) -> None:
        """Scale losses with another ``GradScaler`` from now on. The previous one adjusts its scale first."""
        self._update()
        self.scaler = scaler

    @property
    def _scales(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    def autocast_context_manager(self) -> torch.autocast:
        """Like :meth:`forward_context`, but convert weights at each use, so that they may change in the context."""
        return torch.autocast(self.device or "cpu", dtype=self.dtype, enabled=self.autocast, cache_enabled=False)

    def forward_context(self) -> AbstractContextManager[Any]:
        if "autocast_context_manager" in self.overrides:
            return self.autocast_context_manager()
        kind, cache = self.device or "cpu", self.cache
        if cache is None and self.shards:
            cache = False  # the cache would hold the whole model in 16 bits
        return torch.autocast(kind, dtype=self.dtype, enabled=self.autocast, cache_enabled=cache)

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        if self.has_own_context:
            return self._in_context(step)
        context = self.forward_context()

        @functools.wraps(step)
        def in_autocast(*args: Any, **kwargs: Any) -> T:
            with context:
                return step(*args, **kwargs)

        return in_autocast

    def backward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device or "cpu", enabled=False)

    def scale_loss(self, loss: Tensor) -> Tensor:
        if not self._scales:
            return loss
        self._update()
        return self.scaler.scale(loss)

    def shared_scale(self, of_next_loss: bool = False) -> Tensor | None:
        if not (self._scales and self._several):
            return None
        return self.scale_loss(torch.ones((), device=self.device)) if of_next_loss else scale_of(self.scaler)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if not self._scales:
            return
        state = scaler_states(self.scaler)[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            self._update()
            state = scaler_states(self.scaler)[id(optimizer)]
        if state["stage"] is OptState.READY and gradients(optimizer):
            self.scaler.unscale_(optimizer)

    def setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        self._several = len(optimizers) > 1
        if self._scales and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError(
                "precision='16-mixed' does not work with LBFGS, because LBFGS computes the loss several times per "
                "step, which loss scaling does not support. Use 'bf16-mixed' or '32-true'."
            )

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **arguments: Any) -> bool:
        if not self._scales:
            return super().optimizer_step(optimizer, model, closure, **arguments)
        if not isinstance(model, nn.Module):
            closure = closure or model
        if closure is not None:
            closure()
        if not gradients(optimizer):
            return super().optimizer_step(optimizer, **arguments)
        self.unscale_gradients(optimizer)
        # step already waits for the device, so reading the overflow flags adds no wait.
        self.scaler.step(optimizer, **arguments)
        found = scaler_states(self.scaler)[id(optimizer)]["found_inf_per_device"]
        skipped = any(overflow.item() for overflow in found.values())
        self._update_due = True
        if not self._several:
            self._update()
        self.skipped_steps += skipped
        return not skipped

    def inverse_scale(self) -> Tensor:
        """Return the inverse of the loss scale as a scalar tensor, for a strategy that unscales gradients itself."""
        return scale_of(self.scaler).double().reciprocal().float()

    def settle(self, optimizer: Optimizer, overflow: Tensor) -> None:
        """Adjust the scale after a step (taken or skipped) whose gradients the strategy unscaled itself.

        Args:
            optimizer: the optimizer of the step.
            overflow: 1 if a gradient was not finite, else 0; a scalar float32 tensor.
        """
        state = scaler_states(self.scaler)[id(optimizer)]
        state["stage"], state["found_inf_per_device"] = OptState.STEPPED, {overflow.device: overflow}
        self.skipped_steps += bool(overflow.item())
        self._update_due = True
        self._update()

    def _update(self) -> None:
        """Adjust the scale if a step has run since the last adjustment.

        With several optimizers, this waits until the next loss is scaled, because optimizers that have not stepped need
        the scale by which their losses were multiplied. Unscaled gradients stay marked as unscaled.
        """
        if not self._update_due:
            return
        self._update_due = False
        states = scaler_states(self.scaler)
        waiting = {key: state for key, state in states.items() if state["stage"] is OptState.UNSCALED}
        self.scaler.update()
        scaler_states(self.scaler).update(waiting)

    def state_dict(self) -> dict[str, Any]:
        if not self._scales:
            return {}
        self._update()
        return {"scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._scales and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
            self.skipped_steps = state_dict["skipped_steps"]
