"""Weights, inputs and computation in one dtype other than float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ...processes.device_transfer import convert
from .base import Precision

T = TypeVar("T")

TrueName = Literal["64-true", "16-true", "bf16-true"]
DTYPES: dict[TrueName, torch.dtype] = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


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
