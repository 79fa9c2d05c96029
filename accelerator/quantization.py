"""Quantizes models to 8- or 4-bit weights with bitsandbytes, for your own loop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import messages
from ..big_model.device_map import device_of, is_offloaded, main_device_of, torch_device
from ..big_model.dispatch import dispatch_model
from ..big_model.empty_init import give
from ..big_model.hooks import default_device
from ..big_model.infer_device_map import Spread, plan_device_map
from ..big_model.module_sizes import find_tied_parameters, named_tensors, names_of
from ..big_model.quantized_layers import (
    Quantization,
    load_weight,
    plain_layers,
    quantized_layers,
    replace_layers,
    require_bitsandbytes,
)
from ..big_model.weight_files import mapped_tensors, weight_files
from ..processes.device_transfer import in_dtype

Word = Literal["fp32", "fp16", "bf16"]
_DTYPES: dict[Any, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """Settings for how :func:`load_and_quantize_model` quantizes linear layers.

    Args:
        load_in_8bit: whether to store the weights in 8 bits.
        llm_int8_threshold: 8-bit layers multiply inputs above this value in 16 bits.
        load_in_4bit: whether to store the weights in 4 bits.
        bnb_4bit_quant_type: ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: whether to quantize the scales of 4-bit weights as well.
        bnb_4bit_compute_dtype: dtype in which 4-bit layers compute.
        torch_dtype: dtype of all other floating-point tensors; None means ``bnb_4bit_compute_dtype``, or float16 for 8
            bits.
        skip_modules: full or partial names of modules that are not quantized; None means the model's head and modules
            that share weights.
        keep_in_fp32_modules: full or partial names of modules that stay in float32.

    Raises:
        ValueError: a value is not valid, or not exactly one of ``load_in_8bit`` and ``load_in_4bit`` is True.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Word | torch.dtype = "fp16"
    torch_dtype: Word | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit is self.load_in_4bit or not isinstance(self.load_in_8bit, bool):
            raise ValueError(
                f"BnbQuantizationConfig got load_in_8bit={self.load_in_8bit!r} and load_in_4bit={self.load_in_4bit!r}. "
                "Set exactly one of them to True."
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(messages.unknown("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4")))
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise ValueError(f"BnbQuantizationConfig got {name}={getattr(self, name)!r}. Pass a list of names.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        usual = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _dtype("torch_dtype", usual if self.torch_dtype is None else self.torch_dtype)

    @property
    def target_dtype(self) -> torch.dtype | str:
        """The format of quantized weights."""
        return torch.int8 if self.load_in_8bit else "int4"

    def quantization(self) -> Quantization:
        """Convert these settings to a :class:`Quantization`."""
        if self.load_in_8bit:
            return Quantization("int8", threshold=self.llm_int8_threshold)
        dtype = cast(torch.dtype, self.bnb_4bit_compute_dtype)
        return Quantization(self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant, dtype)


def _dtype(name: str, value: Any) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else _DTYPES.get(value)
    if found is None:
        raise ValueError(messages.unknown(name, value, _DTYPES, ", or pass a torch dtype"))
    return found


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Spread | Mapping[str, Any] | None = None,
    no_split_module_classes: Any = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantize a model's linear layers one by one, move the model to its device, and return it.

    Quantized layers are frozen. To train, add adapters, such as peft's.

    Args:
        model: a model with its weights or, if the weights are in files, on the meta device (``init_empty_weights``).
        bnb_quantization_config: the quantization format, and the layers that are not quantized.
        weights_location: file or folder with the weights, as for ``load_checkpoint_and_dispatch``. The weights may
            already be quantized in the chosen format. Needed only for a model on the meta device.
        device_map: devices for the parts of a model on the meta device, as for ``load_checkpoint_and_dispatch``. None
            means the first accelerator, or the CPU if there is none. Modules that a map offloads to the CPU or to disk
            are not quantized.
        no_split_module_classes: as for ``load_checkpoint_and_dispatch``.
        max_memory: as for ``load_checkpoint_and_dispatch``.
        offload_folder: as for ``load_checkpoint_and_dispatch``.
        offload_state_dict: has no effect, because weights are always read one at a time.

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
        RuntimeError: the model is on the meta device, but ``weights_location`` is not set or some weights are missing.
        ValueError: the device map offloads quantized layers, or weights in a file do not match the model.
    """
    config = bnb_quantization_config
    require_bitsandbytes("load_and_quantize_model")
    messages.ignored(
        "load_and_quantize_model", "weights are read one at a time", False, offload_state_dict=offload_state_dict
    )
    skipped = [*_left_out(model, config), *_offloaded(device_map)]
    vars(model).update(is_loaded_in_4bit=config.load_in_4bit, is_loaded_in_8bit=config.load_in_8bit)  # peft reads them
    empty = any(parameter.is_meta for parameter in model.parameters())
    if not empty:
        for name, tensor in named_tensors(model):
            tensor.data = tensor.data.to(_wanted_dtype(name, tensor, config))
        _replace(model, config, skipped, default_device())
        return model.to(default_device())
    if weights_location is None:
        raise RuntimeError(
            f"{type(model).__name__} is on the meta device, so it has no weights to quantize. Pass weights_location, "
            "the file or folder that contains the weights."
        )
    _replace(model, config, skipped)
    for layer in quantized_layers(model).values():
        size = layer.weight.shape if config.load_in_8bit else ((layer.weight.numel() + 1) // 2, 1)
        kind = torch.int8 if config.load_in_8bit else torch.uint8
        layer.weight.data = torch.empty(size, dtype=kind, device="meta")  # device maps are planned with these sizes
    places = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    _fill(model, config, Path(weights_location), places)
    return dispatch_model(model, places, offload_dir=offload_folder)


def _left_out(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    return [*skipped, *(config.keep_in_fp32_modules or ())]


def _offloaded(device_map: Any) -> list[str]:
    """Return the modules that a device map offloads."""
    if not isinstance(device_map, Mapping):
        return []
    main = main_device_of(device_map)
    return [name for name, device in device_map.items() if is_offloaded(device, main)]


def _replace(
    model: nn.Module, config: BnbQuantizationConfig, skipped: Iterable[str], device: torch.device | None = None
) -> None:
    layers = plain_layers(model, skipped)
    if not layers:
        messages.warn(
            f"{type(model).__name__} has no linear layer to quantize. Some models, such as GPT-2, use other layers "
            "instead of nn.Linear. Check skip_modules, or use another model."
        )
    replace_layers(model, layers, config.quantization(), device)


def _wanted_dtype(name: str, tensor: Tensor, config: BnbQuantizationConfig) -> torch.dtype:
    if any(part in name for part in config.keep_in_fp32_modules or ()):
        return in_dtype(tensor.dtype, torch.float32)
    return in_dtype(tensor.dtype, cast(torch.dtype, config.torch_dtype))


def _fill(model: nn.Module, config: BnbQuantizationConfig, path: Path, places: Mapping[str, Any]) -> None:
    """Load the weights. Weights of quantized layers are quantized on their layer's device.

    All other weights stay mapped from the file until :func:`dispatch_model` moves them.
    """
    values = {name: value for file in weight_files(path) for name, value in mapped_tensors(file)}
    for name, layer in quantized_layers(model).items():
        if f"{name}.weight" in values:
            found = {
                key: values.pop(key) for key in list(values) if key.startswith(f"{name}.") and key != f"{name}.bias"
            }
            weights = {key.removeprefix(f"{name}."): value for key, value in found.items()}
            weights["weight"] = weights["weight"].to(_wanted_dtype(name, weights["weight"], config))
            load_weight(layer, weights, torch_device(device_of(name, places), "device_map"))
    names = names_of(model)
    for name, own in list(named_tensors(model)):
        if name in values:
            value = values.pop(name)
            give(model, names[id(own)], own, value.to(_wanted_dtype(name, value, config)))
    if values:
        messages.warn(
            f"{str(path)!r} contains {len(values)} unused tensor{'s' * (len(values) > 1)} that {type(model).__name__} "
            f"does not have: {', '.join(list(values)[:5])}{', ...' if len(values) > 5 else ''}. Check that the file "
            "belongs to this model."
        )


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Spread | Mapping[str, Any] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Any = None,
) -> dict[str, Any]:
    """Return the device map for a model with quantized layers.

    Raises:
        ValueError: a quantized layer would be offloaded.
    """
    config = bnb_quantization_config
    if device_map is None:
        main = default_device()
        return {"": "cpu" if main.type == "cpu" else main.index}
    if isinstance(device_map, Mapping):
        places = dict(device_map)
    else:
        dtypes = {name: _wanted_dtype(name, tensor, config) for name, tensor in named_tensors(model)}
        plan = plan_device_map(model, device_map, max_memory, no_split_module_classes, None, dtypes, verbose=False)
        places = dict(plan.device_map)
    main = main_device_of(places)
    away = [name for name in quantized_layers(model) if is_offloaded(device_of(name, places), main)]
    if away:
        raise ValueError(
            f"The device map offloads {len(away)} quantized layer{'s' * (len(away) > 1)} "
            f"({', '.join(away[:3])}{', ...' if away[3:] else ''}), which must stay on {main}. Raise the memory limit "
            f"of {main} (max_memory), or pass a device_map that puts only other modules on the CPU and the disk."
        )
    return places


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: Any = None,
) -> nn.Module:
    """Quantize a model's linear layers in place, except ``modules_to_not_convert``, and return the model.

    ``current_key_name`` is accepted and ignored.
    """
    require_bitsandbytes("replace_with_bnb_layers")
    _replace(model, bnb_quantization_config, modules_to_not_convert or ())
    return model


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return True if a model has bitsandbytes layers with 4-bit weights."""
    return any(hasattr(layer, "quant_state") for layer in quantized_layers(model).values())


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules of a model that are usually not quantized: its head, and modules that share weights.

    Returns an empty list if a transformers model has neither a head nor shared weights.
    """
    tied = [name for names in find_tied_parameters(model) for name in names]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    found = {name.removesuffix(".weight").removesuffix(".bias") for name in (*tied, *last)}
    return sorted(found)
