"""Create, recognize, save and load bitsandbytes linear layers, whose weights have 8 or 4 bits."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import messages

#: Weights are stored in 4 bits (two formats), in 8 bits, or as floating-point numbers that are rounded to 8 bits in
#: every product.
Kind = Literal["nf4", "fp4", "int8", "int8-training"]
_PREPARED = "_paceline_prepared"


@dataclass(frozen=True)
class Quantization:
    """Settings for quantizing linear layers.

    Attributes:
        kind: the format of the weights.
        double: whether to quantize the scales of 4-bit weights as well.
        dtype: the dtype in which 4-bit layers compute.
        threshold: 8-bit layers multiply inputs above this value in 16 bits; 0 means no threshold.
    """

    kind: Kind
    double: bool = False
    dtype: torch.dtype | None = None
    threshold: float = 6.0


def require_bitsandbytes(who: str) -> None:
    """Raise a ModuleNotFoundError if bitsandbytes is not installed; ``who`` is the caller's name."""
    if not messages.is_installed("bitsandbytes"):
        raise ModuleNotFoundError(messages.missing(who, "bitsandbytes"), name="bitsandbytes")


def _bitsandbytes() -> Any:
    return import_module("bitsandbytes.nn")


def quantized_layers(module: nn.Module) -> dict[str, Any]:
    """Return a module's bitsandbytes linear layers, keyed by name."""
    if "bitsandbytes" not in sys.modules:
        return {}
    kinds = _bitsandbytes().Linear4bit, _bitsandbytes().Linear8bitLt
    return {name: one for name, one in module.named_modules() if isinstance(one, kinds)}


def is_quantized(parameter: Tensor) -> bool:
    """Return True if a parameter contains quantized values, which cannot be trained."""
    if "bitsandbytes" not in sys.modules:
        return False
    kept: Any = parameter
    if isinstance(kept, _bitsandbytes().Int8Params):
        return not kept.has_fp16_weights
    return isinstance(kept, _bitsandbytes().Params4bit)


def plain_layers(module: nn.Module, ignored: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """Return those linear layers of a module that can be quantized, keyed by name.

    Layers that share their weight are left out, as are instances of subclasses, which may compute something else.
    ``ignored`` contains full names, or consecutive dot-separated parts of names.
    """
    owners: dict[int, int] = {}
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {
        name: one
        for name, one in module.named_modules()
        if type(one) is nn.Linear
        and owners[id(one.weight)] == 1
        and not any(f".{part}." in f".{name}." for part in ignored)
    }


def replace_layers(
    module: nn.Module, layers: Mapping[str, nn.Linear], how: Quantization, device: torch.device | None = None
) -> None:
    """Replace linear layers of a module with quantized ones, which are frozen (except ``"int8-training"`` layers).

    Layers on the meta device remain without values. All other layers are moved to ``device``; None leaves them where
    they are.
    """
    chosen, made = set(layers.values()), {}  # the same layer may have several names
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if child in chosen:
            place, _, last = name.rpartition(".")
            made[child] = made.get(child) or quantized_layer(cast(nn.Linear, child), how, device)
            setattr(module.get_submodule(place), last, made[child])


def quantized_layer(linear: nn.Linear, how: Quantization, device: torch.device | None = None) -> nn.Module:
    """Return a quantized layer with the values of a linear layer; see :func:`replace_layers`."""
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    layer: Any
    if how.kind in ("nf4", "fp4"):
        layer = _bitsandbytes().Linear4bit(
            *sizes, compute_dtype=how.dtype, compress_statistics=how.double, quant_type=how.kind, device="meta"
        )
    else:
        trains = how.kind == "int8-training"
        layer = _bitsandbytes().Linear8bitLt(*sizes, has_fp16_weights=trains, threshold=how.threshold, device="meta")
    layer.train(linear.training)
    layer.bias = linear.bias
    if how.kind == "int8-training":
        layer.weight = _bitsandbytes().Int8Params(
            linear.weight.data, linear.weight.requires_grad, has_fp16_weights=True
        )
    else:
        layer.requires_grad_(False)
        if not linear.weight.is_meta:
            load_weight(layer, {"weight": linear.weight.data}, device or linear.weight.device)
    prepare_quantized(layer)
    return layer


def prepare_quantized(module: nn.Module) -> None:
    """Allow the quantized layers in a module to load any compatible state.

    The layers can then load their own states, even after a forward pass. They can also load the weights of plain linear
    layers, which are then quantized. On a CPU, bitsandbytes would round the scales of 4-bit weights again in the first
    evaluation. This rounding is turned off, because training and resumed runs need unchanged weights.
    """
    for layer in quantized_layers(module).values():
        if _PREPARED in vars(layer):
            continue
        vars(layer)[_PREPARED] = True
        if hasattr(layer, "quant_state"):
            layer.support_avx512bf16_for_cpu = False
        layer.register_load_state_dict_pre_hook(_load)
        if _holds_floats(layer):
            layer.register_forward_pre_hook(_before_evaluation)


def statistics_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the scales of a module's quantized weights, which are neither parameters nor buffers."""
    for layer in quantized_layers(module).values():
        state = getattr(layer, "quant_state", None)
        if state is not None:
            inner = getattr(state, "state2", None)
            found = [state.absmax, state.offset, *([] if inner is None else [inner.absmax])]
        else:
            found = [] if _holds_floats(layer) else [layer.weight.SCB, layer.state.SCB]
        yield from (one for one in found if isinstance(one, Tensor))


def load_weight(layer: Any, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Set a quantized layer's weight on a device.

    Args:
        layer: the layer, of any kind except ``"int8-training"``.
        values: tensors of the layer's own ``state_dict``, or a floating-point ``weight``, which is quantized.
        device: device to put the weight on.

    Raises:
        ValueError: the values have a different format or shape.
    """
    from bitsandbytes.functional import QuantState, int8_vectorwise_quant, quantize_4bit

    weight = values["weight"].detach()
    shape = (layer.out_features, layer.in_features)
    scales = {name: value.detach().clone() for name, value in values.items() if name.startswith("weight.")}
    own = layer.weight
    if hasattr(layer, "quant_state"):
        if scales:
            state = QuantState.from_dict(scales, device=device)
            found = tuple(state.shape or ()), f"{state.quant_type}{'-dq' if state.nested else ''}"
            data = weight.to(device, copy=True)
        else:
            found = tuple(weight.shape), str(weight.dtype).removeprefix("torch.")
            state = data = None
        _check(found, shape, f"{own.quant_type}{'-dq' if own.compress_statistics else ''}")
        if data is None:
            settings = (own.blocksize, own.compress_statistics, own.quant_type, own.quant_storage)
            data, state = quantize_4bit(weight.to(device).contiguous(), None, None, *settings)
        _set_4bit(layer, data, state)
        return
    kind = "nf4 or fp4" if scales else str(weight.dtype).removeprefix("torch.")
    _check((tuple(weight.shape), kind if "SCB" not in values or scales else "int8"), shape, "int8")
    if "SCB" in values:
        _set_8bit(layer, weight.to(device, copy=True), values["SCB"].detach().to(device, copy=True))
    else:
        _set_8bit(layer, *int8_vectorwise_quant(weight.to(device, torch.float16).contiguous())[:2])


def _holds_floats(layer: Any) -> bool:
    """Return True if a layer is of the kind ``"int8-training"``, which stores floating-point weights."""
    return not hasattr(layer, "quant_state") and layer.state.has_fp16_weights


def _check(found: tuple[tuple[int, ...], str], shape: tuple[int, int], kind: str) -> None:
    if found[1] not in (kind, "float32", "float16", "bfloat16", "float64"):
        raise ValueError(f"the weight to load has the format {found[1]}, but the layer has the format {kind}")
    if found[0] != shape:
        raise ValueError(f"the weight to load has the shape {found[0]}, but the layer's weight has the shape {shape}")


def _set_4bit(layer: Any, data: Tensor, state: Any) -> None:
    own = layer.weight
    if own.device != data.device:
        layer.weight = own = _bitsandbytes().Params4bit(
            data,
            blocksize=own.blocksize,
            compress_statistics=own.compress_statistics,
            quant_type=own.quant_type,
            quant_storage=own.quant_storage,
        )
    own.data, own.quant_state, own.bnb_quantized = data, state, True
    layer.quant_state = state


def _set_8bit(layer: Any, data: Tensor, scale: Tensor) -> None:
    if layer.weight.device != data.device:
        layer.weight = _bitsandbytes().Int8Params(data, requires_grad=False)
    layer.weight.data = layer.weight.CB = data
    layer.weight.SCB = scale
    layer.state.CB = layer.state.SCB = None


def _load(layer: Any, state: dict[str, Any], prefix: str, *more: Any) -> None:
    """Load a layer's weight before torch loads the layer's tensors, and replace the weight in ``state`` with it."""
    if f"{prefix}weight" not in state:
        return
    quantized = [name for name in state if name.startswith((f"{prefix}weight.", f"{prefix}SCB"))]
    values = {name.removeprefix(prefix): state.pop(name) for name in quantized}
    values["weight"] = weight = state[f"{prefix}weight"]
    floats = _holds_floats(layer)
    try:
        if floats:
            _check((tuple(weight.shape), "quantized" if quantized else "float32"), weight.shape, "int8-training")
        else:
            load_weight(layer, values, weight.device if layer.weight.is_meta else layer.weight.device)
    except ValueError as error:
        raise ValueError(f"{prefix}weight: {error}. Use the precision with which the weight was saved.") from error
    if not floats:
        state[f"{prefix}weight"] = layer.weight


def _before_evaluation(layer: Any, inputs: Any) -> None:
    """Drop the rounded weight from the last training step, which bitsandbytes would reuse in an evaluation."""
    if layer.training:
        return
    if layer.weight.device.type == "cpu":
        raise RuntimeError(
            "bitsandbytes can train 'int8-training' layers on a CPU, but cannot evaluate them there. Use a CUDA GPU, "
            "turn off validation, or use another precision."
        )
    layer.state.reset_grads()
