"""Functions for tensors in nested lists, tuples and mappings, without communication between processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import messages
from ..data.batches import batch_size_of
from ..devices.kinds import kind_of
from ..processes.device_transfer import in_mapping_type, move


def is_torch_tensor(tensor: Any) -> bool:
    """Return True if a value is a tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Return True if a value is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def listify(data: Any) -> Any:
    """Convert tensors to (nested) lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def honor_type(obj: Any, generator: Any) -> Any:
    """Convert the values of ``generator`` to the sequence type of ``obj``, which may be a named tuple."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def honor_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Convert ``values`` to the mapping type of ``original``."""
    return values if type(original) is dict else in_mapping_type(original, values)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a copy of nested lists, tuples and mappings with ``func`` applied to values that ``test_type`` accepts.

    Args:
        func: function to call with each value, ``args`` and ``kwargs``.
        data: the structure.
        *args: passed to ``func``.
        test_type: function that returns True for values to which ``func`` is applied.
        error_on_other_type: whether to raise a TypeError for any other value except None.
        **kwargs: passed to ``func``.
    """
    name = getattr(func, "__name__", "recursively_apply") if error_on_other_type else None
    return _applied(data, functools.partial(func, *args, **kwargs) if args or kwargs else func, test_type, name)


def _applied(value: Any, func: Callable[[Any], Any], test_type: Callable[[Any], bool], name: str | None) -> Any:
    """Apply ``func`` as :func:`recursively_apply` does.

    If ``name`` is not None, a value that is neither None nor one that ``func`` applies to raises a TypeError whose
    message begins with ``name``. This function is not nested in :func:`recursively_apply`, because a nested function
    that calls itself would keep ``func`` and the tensors that it has stored alive until the next garbage collection.
    """
    if test_type(value):
        return func(value)
    if isinstance(value, (list, tuple)):
        return honor_type(value, [_applied(entry, func, test_type, name) for entry in value])
    if isinstance(value, Mapping):
        return honor_mapping(value, {key: _applied(entry, func, test_type, name) for key, entry in value.items()})
    if name is not None and value is not None:
        raise TypeError(
            f"{name} got {messages.a(value)} ({repr(value)[:60]}) among its tensors. Pass only tensors, in lists, "
            "tuples or dicts. Use torch.tensor(value) for a number and gather_object for other objects."
        )
    return value


def leaves(data: Any) -> list[Tensor]:
    """Return the tensors in a structure, in order."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move tensors, and objects with a ``to`` method, to a device, except those under ``skip_keys`` in mappings.

    With ``non_blocking``, tensors in pinned memory may still be being copied after this function has returned, so do
    not change these tensors until the copies are complete.
    """
    place = torch.device(device)
    kind = kind_of(place)
    waits = not non_blocking and kind.overlaps_copies()
    waits = waits and any(one.is_cpu and one.is_pinned() for one in leaves(tensor))
    moved = _moved(tensor, device, {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ()))
    if waits:
        kind.synchronize(place)
    return moved


def _moved(data: Any, device: Any, skip: set[Any]) -> Any:
    if skip and isinstance(data, Mapping):
        return honor_mapping(
            data, {key: one if key in skip else _moved(one, device, skip) for key, one in data.items()}
        )
    if skip and isinstance(data, (list, tuple)):
        return honor_type(data, [_moved(one, device, skip) for one in data])
    return move(data, device)


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor in a structure."""
    found = batch_size_of(data)
    if found is None:
        raise ValueError(
            f"find_batch_size found no tensor in a {type(data).__name__}. Pass data that contains a tensor."
        )
    return found


def ignorant_find_batch_size(data: Any) -> int | None:
    """Like :func:`find_batch_size`, but return None if there is no tensor."""
    return batch_size_of(data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a structure, or None if there is no tensor."""
    return next((tensor.device for tensor in leaves(data)), None)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Replace every tensor with ``tensor[tensor_slice]``."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the corresponding tensors of structures that have the same layout."""
    first = data[0]
    if len(data) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (tuple, list)):
        return honor_type(first, [concatenate([entry[i] for entry in data], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: concatenate([entry[key] for entry in data], dim) for key in first})
    raise TypeError(f"concatenate got {messages.a(first)} among its tensors. Pass tensors, lists, tuples or dicts.")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """In tensors with ``batch_size`` rows, repeat the last row until ``num_processes`` divides the number of rows."""
    missing = -batch_size % num_processes

    def pad(value: Tensor) -> Tensor:
        if value.dim() <= dim or value.shape[dim] != batch_size or not missing:
            return value
        last = value.narrow(dim, batch_size - 1, 1)
        return torch.cat([value, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor)


def get_data_structure(data: Any) -> Any:
    """Replace each tensor with a :class:`TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Create uninitialized tensors from a result of :func:`get_data_structure`."""
    return recursively_apply(
        lambda information: torch.empty(*information.shape, dtype=information.dtype),
        data_structure,
        test_type=lambda value: isinstance(value, TensorInformation),
    )


class TensorInformation:
    """The shape and dtype of a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def convert_to_fp32(tensor: Any) -> Any:
    """Convert float16 and bfloat16 tensors to float32."""
    return recursively_apply(
        Tensor.float,
        tensor,
        test_type=lambda value: isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16),
    )


class ConvertOutputsToFp32:
    """Wraps ``model_forward`` and converts its 16-bit outputs to float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise TypeError(
            "A forward method whose outputs are converted to float32 cannot be pickled. Unwrap the model first: "
            "unwrap_model(model, keep_fp32_wrapper=False)."
        )


convert_outputs_to_fp32 = ConvertOutputsToFp32


def rows_of(batch: Any) -> int:
    """Return a batch's number of samples, taken from its tensors, or else from its first list; 0 if it has neither."""
    found = batch_size_of(batch)
    while found is None and isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    if found is None and isinstance(batch, (list, tuple)):
        first = batch[0] if batch else None
        return len(first if isinstance(first, (list, tuple)) else batch)
    return found or 0
