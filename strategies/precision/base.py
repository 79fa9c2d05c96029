"""Precisions that compute in the dtype of the weights, and the interface of all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ...processes.device_transfer import convert

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")
TrueName = Literal["64-true", "16-true", "bf16-true"]
DTYPES: dict[TrueName, torch.dtype] = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


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

    @property
    def precision(self) -> str:
        """Its name, as in ``Trainer(precision=...)``."""
        return self.name

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
            optimizer.step(closure=closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it (the loss scale)."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back :meth:`state_dict`."""


class TruePrecision(Precision):
    """``"64-true"``, ``"16-true"`` and ``"bf16-true"``: the module's floating-point tensors are converted, inputs too.

    Complex tensors become complex128 with the first, and stay as they are with the others.

    Tensors made inside a step get the dtype as well. With 16 bits the weights themselves are rounded: updates smaller
    than their resolution are lost, so prefer the mixed forms for training.
    """

    def __init__(self, name: TrueName = "bf16-true") -> None:
        if name not in DTYPES:
            raise ValueError(f"TruePrecision({name!r}): choose one of {', '.join(map(repr, DTYPES))}.")
        self.name = name
        self.input_dtype = DTYPES[name]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.input_dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        dtype = self.input_dtype or torch.get_default_dtype()

        @functools.wraps(step)
        def in_dtype(*args: Any, **kwargs: Any) -> T:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return step(*args, **kwargs)
            finally:
                torch.set_default_dtype(before)

        return in_dtype

    @contextmanager
    def _init(self, device: torch.device) -> Iterator[None]:
        with device, self.forward_context():
            yield

    def init_context(self, device: torch.device) -> AbstractContextManager[Any]:
        return self._init(device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if self.input_dtype is None else convert(module, self.input_dtype)


class DoublePrecision(TruePrecision):
    """``"64-true"``."""

    def __init__(self) -> None:
        super().__init__("64-true")


class HalfPrecision(TruePrecision):
    """``"16-true"`` or ``"bf16-true"``.

    Args:
        precision: which of the two.
    """

    def __init__(self, precision: Literal["16-true", "bf16-true"] = "16-true") -> None:
        super().__init__(precision)


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The current gradients of an optimizer's parameters."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
