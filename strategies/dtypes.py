"""What tensors become where floating-point ones are converted."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from ..torch_private import APPLY

M = TypeVar("M", bound=nn.Module)


def in_dtype(kind: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The dtype that tensors of another get where floating-point ones become ``wanted``.

    Complex ones stay complex: float64 goes with complex128; the smaller types, most of which have no complex partner
    that torch computes in, leave them as they are. Whole numbers and bools stay.
    """
    if kind.is_floating_point:
        return wanted
    return torch.complex128 if kind.is_complex and wanted == torch.float64 else kind


def convert(module: M, wanted: torch.dtype, non_blocking: bool = False) -> M:
    """Convert a module's parameters and buffers, where ``module.to(wanted)`` would cut off what is imaginary."""
    return getattr(module, APPLY)(lambda tensor: tensor.to(in_dtype(tensor.dtype, wanted), non_blocking=non_blocking))
