"""Linear layers with 4-bit or 8-bit weights, through bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn

from ... import messages
from ...big_model.quantized_layers import (
    Kind,
    Quantization,
    is_quantized,
    plain_layers,
    quantized_layers,
    replace_layers,
    require_bitsandbytes,
)
from ...devices.kinds import CUDA_KIND
from .base import parameters
from .mixed import MixedPrecision

if TYPE_CHECKING:
    from torch.optim import Optimizer

Mode = Literal["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"]
MODES: tuple[Mode, ...] = get_args(Mode)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class BitsandbytesPrecision(MixedPrecision):
    """The precisions ``"bnb.nf4"``, ``"bnb.int8"``, ...: the weights of linear layers have 4 or 8 bits each.

    When the run starts, bitsandbytes layers replace the module's linear layers and stay in the module. Their weights
    are quantized one layer at a time while they are moved to the device. The new layers are frozen; other layers, such
    as LoRA adapters, are trained (Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023). Steps run in
    autocast. Checkpoints contain the quantized weights, so a resumed run has exactly the same weights; weights from
    other files are quantized when they are loaded.

    If some of the module's linear layers are frozen, only these are replaced, because the others will be trained. If
    none is frozen, all linear layers are replaced. Subclasses of ``nn.Linear`` and layers with a shared weight are
    never replaced. A module that already has bitsandbytes layers (from transformers, for example) is not changed.

    Requires the package ``bitsandbytes``, and a strategy whose processes hold the whole model: one device or DDP.

    Args:
        mode: ``"nf4"`` or ``"fp4"`` (4 bits; with the suffix ``"-dq"``, scales are quantized too), ``"int8"`` (8
            bits), or ``"int8-training"`` (weights stay in floating point and are trained; only matrix products use 8
            bits).
        dtype: the dtype of computation. None means float32 for ``"int8-training"``, float16 for ``"int8"`` on a GPU and
            for GPUs without bfloat16, and bfloat16 otherwise. With float16, the loss is scaled.
        ignore_modules: names of modules to leave out: full names (``"model.lm_head"``) or parts of names
            (``"lm_head"``).

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
        ValueError: ``mode`` or ``dtype`` is unknown, or, when the run starts, there is nothing to quantize.
    """

    quantizes = True

    def __init__(
        self, mode: Mode, dtype: torch.dtype | None = None, ignore_modules: Iterable[str] | None = None
    ) -> None:
        if mode not in MODES:
            raise ValueError(messages.unknown("BitsandbytesPrecision mode", mode, MODES))
        if dtype not in (None, *_DTYPES):
            raise ValueError(
                f"BitsandbytesPrecision does not support dtype={dtype}. Choose torch.bfloat16, torch.float16 or "
                "torch.float32."
            )
        if isinstance(ignore_modules, str):
            raise TypeError(f"ignore_modules={ignore_modules!r} is a string. Pass a list or a set of names.")
        require_bitsandbytes(f"precision='bnb.{mode}'")
        super().__init__("bf16-mixed")
        self.name = f"bnb.{mode}"
        self.mode: Mode = mode
        self.ignore_modules = frozenset(ignore_modules or ())
        self._asked = dtype

    def use_on(self, device: torch.device) -> None:
        self.dtype = self._asked or _default_dtype(self.mode, device)
        self.autocast = self.dtype is not torch.float32
        super().use_on(device)

    def init_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context manager in which new layers are created in host memory, because the device may be too small."""
        return torch.device("cpu")

    def move_module(self, module: nn.Module, device: torch.device) -> nn.Module:
        if not quantized_layers(module):
            kind = cast(Kind, self.mode.removesuffix("-dq"))
            how = Quantization(kind, self.mode != kind, self.dtype)
            replace_layers(module, self._chosen(module), how, device)
        return module.to(device)

    def _chosen(self, module: nn.Module) -> dict[str, nn.Linear]:
        possible = plain_layers(module, self.ignore_modules)
        frozen = {name: one for name, one in possible.items() if not one.weight.requires_grad}
        chosen = possible if self.mode == "int8-training" else frozen or possible
        if not chosen:
            count = sum(isinstance(one, nn.Linear) for one in module.modules())
            raise ValueError(
                f"precision={self.name!r} found no layer to quantize in {type(module).__name__} (linear layers: "
                f"{count}). A layer must be a plain nn.Linear whose weight is not shared and whose name is not in "
                f"ignore_modules={sorted(self.ignore_modules)}. Use precision='bf16-mixed', or change ignore_modules."
            )
        return chosen

    def setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        super().setup_optimizers(optimizers)
        for optimizer in optimizers:
            held = parameters(optimizer)
            frozen = sum(map(is_quantized, held))
            if frozen:
                raise ValueError(
                    f"{frozen} of the {len(held)} parameters of {type(optimizer).__name__} cannot be trained, because "
                    f"precision={self.name!r} has quantized them. Pass only the trainable parameters: [p for p in "
                    "self.parameters() if p.requires_grad] in configure_optimizers. In your own loop, freeze the "
                    "layers first with requires_grad_(False), or create the optimizer after prepare."
                )


def _default_dtype(mode: Mode, device: torch.device) -> torch.dtype:
    if mode == "int8-training":
        return torch.float32
    if device.type == CUDA_KIND.name and (mode == "int8" or not CUDA_KIND.computes_in_bfloat16(False)):
        return torch.float16
    return torch.bfloat16
