"""8-bit matrix products for linear layers, through torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from ... import messages
from ...devices.kinds import kind_of
from .mixed import MixedPrecision

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
#: GPUs can multiply a weight in 8 bits only if its sizes are multiples of this.
_MULTIPLE = 16
#: The first CUDA compute capability with 8-bit matrix products.
_CAPABILITY = (8, 9)


class Float8Precision(MixedPrecision):
    """The precision ``"fp8-mixed"``: ``"bf16-mixed"`` with 8-bit matrix products in linear layers.

    When the run starts, the module's ``nn.Linear`` layers are permanently replaced with torchao's ``Float8Linear``.
    Weights stay float32 parameters with the same names, so checkpoints do not change. Each tensor is scaled to the
    range of its 8-bit dtype right before it is multiplied (Micikevicius et al., FP8 Formats for Deep Learning, 2022).
    FSDP gathers the converted weights in 8 bits, unless ``recipe`` scales by rows.

    Requires the package ``torchao``, and a CUDA GPU with compute capability 8.9 or higher (Ada, Hopper, Blackwell). On
    a CPU, the products are emulated: tensors are rounded to 8 bits and multiplied in float32.

    Args:
        recipe: how tensors are scaled: ``"tensorwise"`` (one scale for each tensor, fastest), ``"rowwise"`` (one for
            each row, more accurate), or ``"rowwise_with_gw_hp"`` (the same, with weight gradients in 16 bits).
        config: a ``torchao.float8.Float8LinearConfig``, instead of ``recipe``.
        filter: a function that takes a linear layer and its name, and returns True if the layer should be converted. If
            None, every layer whose sizes are multiples of 16 is converted, except the module's first and last linear
            layers.
        device: the same as for :class:`MixedPrecision`.

    Raises:
        ModuleNotFoundError: torchao is not installed.
        ValueError: ``recipe`` is unknown or contradicts ``config``, or, when the run starts, the device cannot multiply
            in 8 bits.
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        config: Float8LinearConfig | None = None,
        filter: Callable[[nn.Module, str], bool] | None = None,
        device: str | None = None,
    ) -> None:
        if not messages.is_installed("torchao"):
            raise ModuleNotFoundError(messages.missing("precision='fp8-mixed'", "torchao"), name="torchao")
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.config import Float8LinearRecipeName

        if recipe is not None and config is not None:
            raise ValueError(f"Float8Precision: recipe={recipe!r} and config=... contradict each other. Leave one out.")
        known = [one.value for one in Float8LinearRecipeName]
        if recipe is not None and recipe not in known:
            raise ValueError(messages.unknown("Float8Precision recipe", recipe, known))
        self.config = config or Float8LinearConfig.from_recipe_name(recipe or "tensorwise")
        if config is None and recipe in (None, "tensorwise"):
            self.config = replace(self.config, enable_fsdp_float8_all_gather=True)
        self._filter = filter
        self._on = torch.device("cpu")
        super().__init__("bf16-mixed", device)
        self.name = "fp8-mixed"

    def use_on(self, device: torch.device) -> None:
        super().use_on(device)
        self._on = device

    def convert_module(self, module: nn.Module) -> nn.Module:
        from torchao.float8 import convert_to_float8_training

        linears = [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
        config = self._config_here()
        chosen = {name for name in linears if self._is_chosen(module.get_submodule(name), name, linears)}
        if not chosen and not any(type(one).__name__ == "Float8Linear" for one in module.modules()):
            messages.warn_once(
                f"precision='fp8-mixed' converts no layer of {type(module).__name__}, so all computation is in "
                f"bfloat16. By default, a linear layer is converted if its sizes are multiples of {_MULTIPLE} and it "
                f"is neither the first nor the last of the module's linear layers (there are {len(linears)}). Choose "
                "other layers with Float8Precision(filter=...)."
            )
        convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in chosen)
        return module

    def _config_here(self) -> Float8LinearConfig:
        """Return the settings for this process's device; raise if the device cannot multiply in 8 bits."""
        config = self.config
        if not self.shards:  # the weights would become tensors that only FSDP can gather
            config = replace(config, enable_fsdp_float8_all_gather=False)
        if config.emulate or _multiplies_in_8_bits(self._on):
            return config
        if self._on.type != "cpu":
            require_8_bit_products(self._on, self.name)
        messages.info_once("CPUs have no 8-bit matrix products, so precision='fp8-mixed' emulates them, which is slow.")
        return replace(config, emulate=True)

    def _is_chosen(self, layer: nn.Module, name: str, linears: list[str]) -> bool:
        if type(layer) is not nn.Linear:
            return False
        if self._filter is not None:
            return self._filter(layer, name)
        sizes = layer.in_features, layer.out_features
        return name not in (linears[0], linears[-1]) and not any(size % _MULTIPLE for size in sizes)


def _multiplies_in_8_bits(device: torch.device) -> bool:
    capability = kind_of(device).capability(device)
    return capability is not None and capability >= _CAPABILITY


def require_8_bit_products(device: torch.device, precision: str) -> None:
    """Raise a ValueError if a device cannot multiply in 8 bits."""
    if not _multiplies_in_8_bits(device):
        raise ValueError(
            f"precision={precision!r} needs a CUDA GPU with compute capability {'.'.join(map(str, _CAPABILITY))} or "
            f"higher, but this process runs on {_described(device)}. Use precision='bf16-mixed'."
        )


def _described(device: torch.device) -> str:
    kind = kind_of(device)
    found = kind.capability(device)
    return f"'{device}'" if found is None else f"'{device}' ({kind.name_of(device)}, {found[0]}.{found[1]})"
