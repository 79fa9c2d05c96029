"""Move batches to the model's device with one pinned, non-blocking copy per tensor, and convert dtypes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import UserList, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import swap_tensors

from ..devices.kinds import kind_of
from ..torch_private import APPLY, is_in_parts

M = TypeVar("M", bound=nn.Module)
TensorFunction = Callable[[Tensor], Tensor]


def mover(device: torch.device | str, dtype: torch.dtype | None = None) -> Mover | None:
    """Return a function that moves batches to ``device`` and converts them to ``dtype``; None if neither is needed."""
    device = torch.device(device)
    if device.type == "cpu" and dtype is None:
        return None
    return Mover(device, dtype)


def move(batch: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """Return ``batch`` on ``device``, with floating-point tensors converted to ``dtype`` unless ``dtype`` is None.

    This covers nested lists, tuples, named tuples, mappings, dataclasses (even frozen ones) and objects with a ``to``
    method; anything else is unchanged. Tensors that already have this device and dtype are not copied.
    """
    return _cached_mover(torch.device(device), dtype)(batch)


def ahead(move: Callable[[Any], Any] | None) -> SideStream | None:
    """Return a version of ``move`` that has its own stream; None if copies cannot run while the device computes."""
    if isinstance(move, Mover) and move.overlaps:
        return SideStream(move)
    return None


class Mover:
    """Moves every tensor of a batch to a device, and converts floating-point tensors to a dtype.

    The handler for a type is chosen when the type is first seen; afterwards, one dict lookup finds the handler. CPU
    tensors are pinned and copied without waiting if the device supports it. An object that has its own ``to`` method
    keeps its dtype, unless it is a mapping or a ``PackedSequence``.

    Args:
        device: the device to which tensors are moved.
        dtype: the dtype to which floating-point tensors are converted; if None, they keep their dtype.
        moved: function that is called with every moved tensor, and with every moved object that has a ``record_stream``
            method.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        moved: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.overlaps = kind_of(device).overlaps_copies()
        self._moved = moved
        self._tensor = _tensor_function(device, dtype, moved, self.overlaps)
        self._handlers = _Handlers(self._choose)
        self._handlers.update({tuple: self._tuple, list: self._list, dict: self._dict, Tensor: self._tensor})

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device."""
        return self._handlers[type(batch)](batch)

    def _choose(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, Tensor):
            return self._tensor
        if issubclass(kind, PackedSequence):
            return self._packed
        if issubclass(kind, Mapping) and (self.dtype is not None or not hasattr(kind, "to")):
            return self._mapping
        if callable(getattr(kind, "to", None)):
            return self._by_its_own_method(kind)
        return self._choose_container(kind)

    def _choose_container(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, tuple):
            return self._named_tuple if hasattr(kind, "_make") else self._tuple_subclass
        if issubclass(kind, (list, deque, UserList)):
            return self._sequence
        if dataclasses.is_dataclass(kind):
            return self._dataclass
        return _unchanged

    def _tuple(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        handlers = self._handlers
        return tuple([handlers[type(value)](value) for value in values])

    def _list(self, values: list[Any]) -> list[Any]:
        handlers = self._handlers
        return [handlers[type(value)](value) for value in values]

    def _dict(self, values: dict[Any, Any]) -> dict[Any, Any]:
        handlers = self._handlers
        return {key: handlers[type(value)](value) for key, value in values.items()}

    def _named_tuple(self, values: Any) -> Any:
        return values._make(self._list(values))

    def _tuple_subclass(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        moved = self._list(values)  # type: ignore[arg-type]
        if all(new is old for new, old in zip(moved, values, strict=True)):
            return values
        return type(values)(moved)

    def _sequence(self, values: Any) -> Any:
        result = copy.copy(values)
        for index, value in enumerate(values):
            result[index] = self(value)
        return result

    def _mapping(self, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return in_mapping_type(values, {key: self(value) for key, value in values.items()})

    def _dataclass(self, value: Any) -> Any:
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(result, field.name, self(getattr(value, field.name)))
        return result

    def _packed(self, value: Any) -> Any:
        """Move a PackedSequence with its own ``to`` method, which keeps the lengths on the CPU."""
        if self.overlaps and value.data.is_cpu:
            value = value.pin_memory()
        result = value.to(self.device, non_blocking=self.overlaps)
        return result if self.dtype is None else result.to(in_dtype(result.data.dtype, self.dtype))

    def _by_its_own_method(self, kind: Any) -> Callable[[Any], Any]:
        options: dict[str, Any] = {}
        if self.overlaps and _takes(kind.to, "non_blocking"):
            options["non_blocking"] = True
        device, moved = self.device, self._moved

        def call_to(value: Any) -> Any:
            result = value.to(device, **options)
            if result is None:  # the object moved itself in place
                result = value
            if moved is not None and hasattr(result, "record_stream"):
                moved(result)
            return result

        return call_to


class SideStream:
    """Moves batches on its own stream, so that a copy runs while the device is still computing the previous step.

    Call this object with a batch, then call :meth:`ready` before using that batch.
    """

    def __init__(self, mover: Mover) -> None:
        self._device, self._kind = mover.device, kind_of(mover.device)
        self._side = self._kind.new_stream(mover.device)
        self._main = self._kind.current_stream(mover.device)
        self._move = Mover(mover.device, mover.dtype, moved=self._used_by_main)

    def __call__(self, batch: Any) -> Any:
        """Start moving a batch; the host does not wait."""
        self._main = self._kind.current_stream(self._device)
        # The main stream may still be creating the batch, or using memory that the copies will reuse.
        self._side.wait_stream(self._main)
        with self._kind.on_stream(self._side):
            return self._move(batch)

    def ready(self) -> None:
        """Make the current stream, but not the host, wait for the batches moved so far."""
        self._kind.current_stream(self._device).wait_stream(self._side)

    def _used_by_main(self, tensor: Tensor) -> None:
        tensor.record_stream(self._main)


class _Handlers(dict[type, Callable[[Any], Any]]):
    """Maps each type to the function that handles its values, chosen on first use."""

    def __init__(self, choose: Callable[[type], Callable[[Any], Any]]) -> None:
        super().__init__()
        self._choose = choose

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        handler = self[kind] = self._choose(kind)
        return handler


@functools.lru_cache(maxsize=16)
def _cached_mover(device: torch.device, dtype: torch.dtype | None) -> Mover:
    return Mover(device, dtype)


def _tensor_function(
    device: torch.device, dtype: torch.dtype | None, moved: Callable[[Tensor], None] | None, overlaps: bool
) -> TensorFunction:
    """Build the function that moves one tensor."""

    def copy_pinned(tensor: Tensor) -> Tensor:
        if tensor.is_cpu and tensor.layout is torch.strided:
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def copy_waiting(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    copy_tensor = copy_pinned if overlaps else copy_waiting
    if dtype is None and moved is None:
        return copy_tensor

    def copy_and_more(tensor: Tensor) -> Tensor:
        tensor = copy_tensor(tensor)
        if dtype is not None:
            tensor = tensor.to(in_dtype(tensor.dtype, dtype))
        if moved is not None:
            moved(tensor)
        return tensor

    return copy_and_more


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if ``function`` accepts the keyword argument ``name``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def in_mapping_type(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Convert ``values`` to the mapping type of ``original``, with the attributes of ``original``."""
    if not isinstance(original, MutableMapping):
        return type(original)(values)  # type: ignore[call-arg]
    result = copy.copy(original)
    for key, value in values.items():
        result[key] = value
    return result


def _unchanged(value: Any) -> Any:
    return value


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def full_value(tensor: Tensor) -> Tensor:
    """Return the full value of a DTensor, or any other tensor unchanged.

    All processes that hold a part of the DTensor must call this. Without this, ``item()`` on the norm of a sharded
    parameter would return only this process's part.
    """
    return tensor.full_tensor() if is_in_parts(tensor) else tensor  # type: ignore[operator]


def in_dtype(kind: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """Return the dtype for tensors of dtype ``kind`` when floating-point tensors are converted to ``wanted``.

    If ``wanted`` is float64, complex tensors become complex128. Narrower dtypes leave complex tensors unchanged,
    because most of those dtypes have no complex counterpart that torch can compute in. Integers and bools do not
    change.
    """
    if kind.is_floating_point:
        return wanted
    return torch.complex128 if kind.is_complex and wanted == torch.float64 else kind


def convert(module: M, wanted: torch.dtype, non_blocking: bool = False) -> M:
    """Convert a module's parameters and buffers to a dtype. Unlike ``module.to``, this keeps imaginary parts."""
    return getattr(module, APPLY)(lambda tensor: tensor.to(in_dtype(tensor.dtype, wanted), non_blocking=non_blocking))


def move_in_place(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer to a device. It remains the same Python object."""
    moved = tensor.data.to(device)
    try:
        tensor.data = moved
    except RuntimeError:  # tensors on a device that a package adds may have a different C++ class
        swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved)
