"""8-bit matrix products for linear layers, through NVIDIA's TransformerEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ... import messages
from ...processes.device_transfer import convert
from .base import default_dtype
from .float8 import require_8_bit_products
from .mixed import MixedPrecision

if TYPE_CHECKING:
    from transformer_engine.common.recipe import Recipe  # pyright: ignore[reportMissingImports]

T = TypeVar("T")

_PACKAGE = "transformer_engine"
#: Names of this precision, by the dtype of its weights. All other dtypes use the first name.
_NAMES = {torch.bfloat16: "transformer-engine", torch.float16: "transformer-engine-float16"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: TransformerEngine can multiply a weight in 8 bits only if its sizes are multiples of this.
_MULTIPLE = 16


class TransformerEnginePrecision(MixedPrecision):
    """The precisions ``"transformer-engine"`` and ``"transformer-engine-float16"``: 8-bit matrix products.

    When the run starts, ``transformer_engine.pytorch.Linear`` replaces each ``nn.Linear`` layer of the module whose
    sizes are multiples of 16, and ``transformer_engine.pytorch.LayerNorm`` replaces each ``nn.LayerNorm``. The new
    layers hold the same parameters under the same names, and stay in the module. Steps run in TransformerEngine's
    autocast, so the batch size (times the sequence length) must be a multiple of 8.

    The scales depend on values from earlier steps. Checkpoints contain this history as the layers' ``_extra_state``.
    Checkpoints without the history can be loaded, and other precisions can load checkpoints with it.

    Requires the package ``transformer_engine``, and a CUDA GPU with compute capability 8.9 or higher (Ada, Hopper,
    Blackwell). Without this package, use ``"fp8-mixed"``, which multiplies in 8 bits through torchao.

    Args:
        weights_dtype: dtype of the weights and of floating-point inputs; None leaves both unchanged.
        recipe: how tensors are scaled: a ``transformer_engine.common.recipe.Recipe``, or the arguments of
            ``DelayedScaling`` as a mapping, in which ``fp8_format`` may be a name such as ``"HYBRID"``; None means
            ``DelayedScaling()``.
        replace_layers: if False, only TransformerEngine layers that the module already contains multiply in 8 bits. A
            module that contains such layers is never changed.
        fallback_compute_dtype: dtype of all other operations (autocast); None means ``weights_dtype``, or bfloat16 if
            both are None.

    Attributes:
        evaluates_in_8_bits: if False, forward passes without gradients compute in ``fallback_compute_dtype``.

    Raises:
        ModuleNotFoundError: TransformerEngine is not installed.
        ValueError: a dtype is unknown, or, when the run starts, ``recipe`` has an unknown key or the device cannot
            multiply in 8 bits.
    """

    def __init__(
        self,
        weights_dtype: torch.dtype | None = torch.bfloat16,
        recipe: Mapping[str, Any] | Recipe | None = None,
        replace_layers: bool | None = True,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        for argument, dtype in {
            "weights_dtype": weights_dtype,
            "fallback_compute_dtype": fallback_compute_dtype,
        }.items():
            if dtype not in (None, *_DTYPES):
                raise ValueError(
                    f"TransformerEnginePrecision does not support {argument}={dtype}. Choose torch.bfloat16, "
                    "torch.float16 or torch.float32."
                )
        super().__init__("bf16-mixed")
        self.name = _NAMES.get(weights_dtype, _NAMES[torch.bfloat16])  # type: ignore[arg-type, assignment]
        if not messages.is_installed(_PACKAGE):
            raise ModuleNotFoundError(
                f"precision={self.name!r} needs NVIDIA's TransformerEngine, which is not installed. Run: pip install "
                "--no-build-isolation \"transformer_engine[pytorch]\". Or use precision='fp8-mixed', which multiplies "
                "in 8 bits through torchao.",
                name=_PACKAGE,
            )
        self.input_dtype = weights_dtype
        self.dtype = fallback_compute_dtype or weights_dtype or torch.bfloat16
        self.autocast = self.dtype is not torch.float32
        self.recipe = recipe
        self.replace_layers = replace_layers is not False
        self.evaluates_in_8_bits = True
        self._on = torch.device("cpu")

    def use_on(self, device: torch.device) -> None:
        super().use_on(device)
        self._on = device
        if self.input_dtype is torch.float16:  # a loss scaler cannot unscale float16 gradients
            self.scaler = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        require_8_bit_products(self._on, self.name)
        if self.input_dtype is not None:
            convert(module, self.input_dtype)
        found = any(map(_is_of_transformer_engine, module.modules()))
        if not found and not (self.replace_layers and _replace_layers(module)):
            why = (
                f"none of its linear layers has sizes that are multiples of {_MULTIPLE}"
                if self.replace_layers
                else "replace_layers is False, and the module has no TransformerEngine layers"
            )
            messages.warn_once(
                f"With precision={self.name!r}, no layer of {type(module).__name__} multiplies in 8 bits: {why}. All "
                f"computation is in {str(self.dtype).removeprefix('torch.')}."
            )
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        enabled = self.evaluates_in_8_bits or torch.is_grad_enabled()
        in_dtype = nullcontext() if self.input_dtype is None else default_dtype(self.input_dtype)
        with in_dtype, super().forward_context(), self._autocast(enabled=enabled):
            yield

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        return self._in_context(step)

    @functools.cached_property
    def _autocast(self) -> Callable[..., AbstractContextManager[Any]]:
        """TransformerEngine's autocast with this recipe; older versions call it ``fp8_autocast``."""
        engine, recipe = import_module(f"{_PACKAGE}.pytorch"), _made(self.recipe)
        if hasattr(engine, "autocast"):
            return functools.partial(engine.autocast, recipe=recipe)
        return functools.partial(engine.fp8_autocast, fp8_recipe=recipe)


def _made(recipe: Mapping[str, Any] | Recipe | None) -> Recipe:
    """Return the recipe that was passed, or a ``DelayedScaling`` with the arguments that were passed."""
    if recipe is not None and not isinstance(recipe, Mapping):
        return recipe
    recipes, arguments = import_module(f"{_PACKAGE}.common.recipe"), dict(recipe or {})
    known = [field.name for field in fields(recipes.DelayedScaling)]
    for key in arguments:
        if key not in known:
            raise ValueError(messages.unknown("TransformerEnginePrecision recipe key", key, known))
    asked = arguments.get("fp8_format")
    if isinstance(asked, str):
        if asked not in ("HYBRID", "E4M3"):
            raise ValueError(messages.unknown("TransformerEnginePrecision fp8_format", asked, ("HYBRID", "E4M3")))
        arguments["fp8_format"] = recipes.Format[asked]
    return recipes.DelayedScaling(**arguments)


# ---- layers ----------------------------------------------------------------------------------------------------------


def _is_of_transformer_engine(layer: nn.Module) -> bool:
    return any(kind.__module__.startswith(f"{_PACKAGE}.") for kind in type(layer).__mro__)


def _replace_layers(module: nn.Module) -> bool:
    """Replace layers with their TransformerEngine counterparts; return True if any linear layer was replaced."""
    made: dict[nn.Module, nn.Module | None] = {}  # a module may contain a layer more than once
    linear = False
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if layer not in made:
            made[layer] = _counterpart(layer) if name else None
        found = made[layer]
        if found is not None:
            linear = linear or isinstance(layer, nn.Linear)
            place, _, last = name.rpartition(".")
            setattr(module.get_submodule(place), last, found)
    return linear


def _counterpart(layer: nn.Module) -> nn.Module | None:
    """Return a TransformerEngine layer with the same parameters; None if there is no counterpart."""
    held = dict(layer.named_parameters(recurse=False))
    engine = import_module(f"{_PACKAGE}.pytorch")
    if type(layer) is nn.Linear and "weight" in held and not any(size % _MULTIPLE for size in layer.weight.shape):
        sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
        found = engine.Linear(*sizes, bias=bias, params_dtype=layer.weight.dtype, device="meta")
    elif type(layer) is nn.LayerNorm and held.keys() == {"weight", "bias"}:
        found = engine.LayerNorm(layer.normalized_shape, eps=layer.eps, device="meta")
    else:
        return None
    for name, parameter in held.items():  # the same objects, which optimizers and other layers may hold
        setattr(found, name, parameter)
    found.register_load_state_dict_post_hook(_allow_no_extra_state)
    return found.train(layer.training)


def _allow_no_extra_state(layer: nn.Module, keys: Any) -> None:
    """Accept checkpoints that contain only the weights; the history of scales then starts empty."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.rpartition(".")[2] != "_extra_state"]
