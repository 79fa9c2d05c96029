"""Tensors in lists, tuples, mappings: applying a function to each, and what needs no other process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import messages
from ..data.batches import batch_size_of
from ..processes.device_transfer import move


def is_torch_tensor(value: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, Tensor)


def is_namedtuple(value: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def listify(value: Any) -> Any:
    """The same with tensors as (nested) lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), value)


def honor_type(original: Any, values: Any) -> Any:
    """Make ``values`` a sequence of the type of ``original``; a named tuple gets them as its fields."""
    if is_namedtuple(original):
        return type(original)(*values)
    return type(original)(values)


def honor_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Make ``values`` a mapping of the type of ``original``."""
    if type(original) is dict:
        return values
    if not isinstance(original, MutableMapping):
        return type(original)(values)  # type: ignore[call-arg]
    result = copy.copy(original)
    for key, value in values.items():
        result[key] = value
    return result


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply ``func`` to what ``test_type`` accepts, in lists, tuples (named ones too) and mappings at any depth.

    Args:
        func: called with each, ``args`` and ``kwargs``.
        data: the structure, which is made anew.
        *args: for ``func``.
        test_type: what to apply it to.
        error_on_other_type: raise TypeError for anything else but None.
        **kwargs: for ``func``.
    """

    def walk(value: Any) -> Any:
        if test_type(value):
            return func(value, *args, **kwargs)
        if isinstance(value, (list, tuple)):
            return honor_type(value, [walk(entry) for entry in value])
        if isinstance(value, Mapping):
            return honor_mapping(value, {key: walk(entry) for key, entry in value.items()})
        if error_on_other_type and value is not None:
            name = getattr(func, "__name__", "this")
            raise TypeError(
                f"{name} got {messages.a(value)} ({repr(value)[:60]}) among its tensors. Give tensors, in lists, "
                "tuples or dicts as you like: torch.tensor(value) for a number, gather_object for other objects."
            )
        return value

    return walk(data)


def leaves(data: Any) -> list[Tensor]:
    """The tensors in a structure, in order."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Bring every tensor (and every object that has ``to``) to a device.

    Args:
        tensor: the structure.
        device: where to.
        non_blocking: copies to CUDA are pinned and do not wait in any case.
        skip_keys: entries of mappings under these keys stay where they are.
    """
    if not skip_keys:
        return move(tensor, device)
    skip = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys)
    if isinstance(tensor, Mapping):
        kept = {k: v if k in skip else send_to_device(v, device, skip_keys=skip) for k, v in tensor.items()}
        return honor_mapping(tensor, kept)
    if isinstance(tensor, (list, tuple)):
        return honor_type(tensor, [send_to_device(entry, device, skip_keys=skip) for entry in tensor])
    return move(tensor, device)


def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor in a structure.

    Raises:
        ValueError: there is none.
    """
    found = batch_size_of(data)
    if found is None:
        raise ValueError(f"find_batch_size found no tensor in a {type(data).__name__}. Give a structure that has one.")
    return found


def ignorant_find_batch_size(data: Any) -> int | None:
    """As :func:`find_batch_size`; None if there is no tensor."""
    return batch_size_of(data)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in a structure; None if there is none."""
    return next((tensor.device for tensor in leaves(data)), None)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Every tensor's ``tensor[tensor_slice]``."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of structures that are built alike.

    Raises:
        TypeError: something else than tensors is to be concatenated.
    """
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (tuple, list)):
        return honor_type(first, [concatenate([entry[i] for entry in data], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: concatenate([entry[key] for entry in data], dim) for key in first})
    raise TypeError(f"concatenate got {messages.a(first)} among its tensors. Give tensors, lists, tuples or dicts.")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last row of tensors with ``batch_size`` rows until ``num_processes`` divides their number."""
    missing = -batch_size % num_processes

    def pad(value: Tensor) -> Tensor:
        if value.dim() <= dim or value.shape[dim] != batch_size or not missing:
            return value
        last = value.narrow(dim, batch_size - 1, 1)
        return torch.cat([value, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor)


def get_data_structure(data: Any) -> Any:
    """The same with each tensor replaced by its shape and dtype, as a :class:`TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Empty tensors for what :func:`get_data_structure` returned."""
    return recursively_apply(
        lambda information: torch.empty(*information.shape, dtype=information.dtype),
        data_structure,
        test_type=lambda value: isinstance(value, TensorInformation),
    )


class TensorInformation:
    """Shape and dtype of a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def convert_to_fp32(tensor: Any) -> Any:
    """The same with float16 and bfloat16 tensors in float32."""
    return recursively_apply(
        Tensor.float,
        tensor,
        test_type=lambda value: isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16),
    )


class ConvertOutputsToFp32:
    """A function whose outputs are those of ``model_forward`` in float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise TypeError(
            "A forward whose outputs are converted to float32 cannot be pickled. Unwrap the model first: "
            "unwrap_model(model, keep_fp32_wrapper=False)."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose outputs are those of ``model_forward``, with half precision converted to float32."""
    return ConvertOutputsToFp32(model_forward)


def rows_of(batch: Any) -> int:
    """How many samples a batch has; where it holds no tensor, as many as its first list, 0 without one."""
    found = batch_size_of(batch)
    while found is None and isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    if found is None and isinstance(batch, (list, tuple)):
        first = batch[0] if batch else None
        return len(first if isinstance(first, (list, tuple)) else batch)
    return found or 0
