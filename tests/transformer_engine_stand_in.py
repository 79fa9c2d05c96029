"""Classes with TransformerEngine's documented interface, in place of the package, which needs a GPU to be imported.

They show that Paceline uses this interface as documented. They do not show what TransformerEngine computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

#: The autocasts that are open, each as (enabled, recipe), and all that have been opened.
inside: list[tuple[bool, Any]] = []
opened: list[tuple[bool, Any]] = []


class Format(Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None


@contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> Any:
    inside.append((enabled, recipe))
    opened.append((enabled, recipe))
    yield
    inside.pop()


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> AbstractContextManager[Any]:
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


class Linear(nn.Module):
    """Rounds its input with a scale that the step before has left, so the extra state changes what it computes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.empty(0)
        self.largest = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if inside and inside[-1][0]:
            scale = 8 / self.largest if self.largest else torch.ones(())
            self.largest = x.detach().abs().max().float()
            x = x + (((x * scale).round() / scale).to(x.dtype) - x).detach()
        return linear(x, self.weight, self.bias if self.bias.numel() else None)

    def get_extra_state(self) -> Tensor:
        saved = self.largest.reshape(1).clone().view(torch.uint8)
        return saved if self.largest else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if state.numel():
            self.largest = state.clone().view(torch.float32)[0]


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float = 1e-5,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(self.shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(self.shape, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch, **more: Any) -> ModuleType:
    """Put these classes where ``import transformer_engine.pytorch`` finds them; return that module."""
    inside.clear()
    opened.clear()
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"Format": Format, "DelayedScaling": DelayedScaling},
        "transformer_engine.pytorch": {"Linear": Linear, "LayerNorm": LayerNorm, "autocast": autocast} | more,
    }
    for name, held in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin=__file__)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    for kind in (Linear, LayerNorm):
        monkeypatch.setattr(kind, "__module__", "transformer_engine.pytorch")
    return sys.modules["transformer_engine.pytorch"]
