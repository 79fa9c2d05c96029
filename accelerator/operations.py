"""Operations on tensors across processes: gather, reduce, broadcast, pad, split.

Every process must make the same call. Processes first exchange 16 bytes to compare shapes and dtypes, so that a
mismatch raises an error on every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .. import messages
from ..strategies.base import Strategy
from ..strategies.communication import UnlikeTensorsError
from .nested_tensors import honor_type, leaves, recursively_apply

Reduction = Literal["mean", "sum", "min", "max", "none"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


class DistributedOperationException(ValueError):  # noqa: N818 - the name that users catch
    """Raised if the inputs that processes pass to an operation do not match."""


class CannotPadNestedTensorWarning(messages.PacelineWarning):
    """Warning about a nested tensor, which cannot be padded."""


def gather(data: Any, strategy: Strategy, group: Any = None) -> Any:
    """Concatenate the tensors of all processes along the first dimension; scalars become shape (world,).

    Only the size of the first dimension may differ between processes.

    Raises:
        DistributedOperationException: the tensors differ in any other way; raised on every process.
        TypeError: the data contains something other than tensors.
    """
    _refuse_others("gather", data)
    own = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in leaves(data)]
    try:
        stacked = strategy.all_gather(own, group)
        joined = own if stacked is own else [tensor.flatten(0, 1) for tensor in stacked]
    except UnlikeTensorsError as error:
        joined = _joined_ragged(own, list(error.found), strategy, group)
    return _with_leaves(data, joined)


def _refuse_others(operation: str, data: Any) -> None:
    """Raise a TypeError for anything but tensors."""

    def itself(tensor: Tensor) -> Tensor:
        return tensor

    itself.__name__ = operation
    recursively_apply(itself, data, error_on_other_type=True)


def _joined_ragged(own: list[Tensor], found: list[Any], strategy: Strategy, group: Any) -> list[Tensor]:
    """Pad each tensor to the largest number of rows on any process, gather it, and remove the padding."""
    like = [(shape[1:], dtype) for shape, dtype in found[0]]
    if any([(shape[1:], dtype) for shape, dtype in entry] != like for entry in found):
        raise DistributedOperationException(_said("gather", found, "their first dimension")) from None
    rows = [[shape[0] for shape, _ in column] for column in zip(*found, strict=True)]
    padded = [_padded(tensor, 0, max(counts)) for tensor, counts in zip(own, rows, strict=True)]
    return [
        torch.cat([part[:count] for part, count in zip(stack, counts, strict=True)])
        for stack, counts in zip(strategy.all_gather(padded, group), rows, strict=True)
    ]


def _with_leaves(data: Any, tensors: list[Tensor]) -> Any:
    """Return a structure like ``data`` in which ``tensors`` replace the original tensors."""
    following = iter(tensors)
    return recursively_apply(lambda _: next(following), data)


def gather_for_metrics(
    data: Any, strategy: Strategy, loader: Any = None, use_gather_object: bool = False, in_parts: bool = False
) -> Any:
    """Like :func:`gather`, but drops repeated samples, so that a pass yields every sample once and in order.

    Rows are removed from tensors (and lists of objects) that have one row per sample. Tensors of shape () are left out
    if they come from a process that has only repeated samples. All other values are gathered in full, with a warning if
    the pass ended with repeated samples. With ``in_parts``, each process has the result for one part of each sequence,
    and the results for all parts are gathered.

    Raises:
        RuntimeError: the processes have different numbers of batches, so some would wait for the others.
    """
    group = strategy.parts_group if in_parts else strategy.data_group
    if strategy.world_size == 1:
        return data
    if loader is not None and loader.lengths:
        raise RuntimeError(
            f"gather_for_metrics was called while reading a loader that has {messages.names(loader.lengths, 'and')} "
            "batches on the processes (even_batches=False), so the last calls would wait for processes that have no "
            "batch. Set even_batches=True (gather_for_metrics leaves out repeated samples, so each sample counts "
            "once), or collect the results and call accelerator.gather_for_metrics after the loop."
        )
    objects = use_gather_object or not _only_tensors(data)
    own, counting = (0, 0) if loader is None else (loader.batch_rows, loader.rows)
    if strategy.num_data_ranks > 1 and loader is not None and loader.may_repeat:
        data = _without_repeats(data, own, counting, objects, strategy)
    if objects:
        return gather_object(data, strategy, group)
    return gather(data, strategy, group)


def _only_tensors(data: Any) -> bool:
    others: list[Any] = []
    recursively_apply(others.append, data, test_type=lambda v: not isinstance(v, (list, tuple, Mapping)))
    return bool(others) and all(other is None or isinstance(other, Tensor) for other in others)


def _without_repeats(data: Any, own: int, counting: int, objects: bool, strategy: Strategy) -> Any:
    """Keep the first ``counting`` of this process's ``own`` rows; the others repeat another process's samples."""
    whole: list[str] = []

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.dim() and own and not counting:
            return value.new_empty(0)
        sized = isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
        if sized and len(value) in (own, counting):
            return value[:counting]
        whole.append(f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else messages.a(value))
        return value

    data = cut(data) if objects else recursively_apply(cut, data)
    if strategy.agree(bool(whole) and counting < own):
        messages.warn_once(
            f"gather_for_metrics got {' and '.join(dict.fromkeys(whole))} for a batch of {own} "
            f"sample{'s' * (own != 1)}, and at the end of this loader some processes repeat samples of other "
            "processes. Repeated samples are removed only from values with one row per sample; in other values, they "
            "count twice. Gather one value per sample and reduce the result."
        )
    return data


def gather_object(data: Any, strategy: Strategy, group: Any = None) -> Any:
    """Concatenate the lists of all processes in rank order.

    If any process passes something other than a list or tuple, return a list with one object per process.
    """
    found = strategy.gather_objects(data, group)
    if all(isinstance(entry, (list, tuple)) for entry in found):
        return list(chain.from_iterable(found))
    return found


def reduce(data: Any, strategy: Strategy, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Reduce every tensor across processes, then multiply it by ``scale``.

    Raises:
        TypeError: the data contains something other than tensors.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(messages.unknown("reduction", reduction, REDUCTIONS))
    _refuse_others("reduce", data)
    _require_alike("reduce", data, strategy)

    def one(tensor: Tensor) -> Tensor:
        if reduction == "sum" and tensor.dtype is torch.bool:
            tensor = tensor.long()  # as in torch.sum; all_reduce would only say whether any value is true
        if reduction != "none":
            tensor = strategy.reduce(tensor, reduction)  # type: ignore[arg-type]
        return tensor if scale == 1.0 else tensor * scale

    return recursively_apply(one, data)


def broadcast(data: Any, strategy: Strategy, from_process: int = 0) -> Any:
    """Broadcast one process's tensors to all processes; shapes and dtypes must be the same on all of them."""
    _refuse_others("broadcast", data)
    _require_alike("broadcast", data, strategy)
    return recursively_apply(lambda tensor: strategy.broadcast_tensor(tensor, from_process), data)


def broadcast_object_list(object_list: list[Any], strategy: Strategy, from_process: int = 0) -> list[Any]:
    """Replace a list's entries in place with one process's entries, and return the list."""
    object_list[:] = strategy.broadcast(list(object_list), from_process)
    return object_list


def pad_across_processes(
    data: Any, strategy: Strategy, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
) -> Any:
    """Pad every tensor along ``dim`` to its largest size across processes. Nested tensors are returned unchanged.

    Raises:
        DistributedOperationException: the number of tensors or dimensions differs; raised on every process.
    """
    tensors = leaves(data)
    if any(tensor.is_nested for tensor in tensors):
        messages.warn(
            "pad_across_processes cannot pad a nested tensor, so the tensor is returned unchanged. To pad it, pass "
            "tensor.to_padded_tensor(0).",
            CannotPadNestedTensorWarning,
        )
    sizes = [(tensor.dim(), tensor.shape[dim] if _has(tensor, dim) else -1) for tensor in tensors]
    found = strategy.unlike(sizes)
    if not found:
        return data
    if len({len(entry) for entry in found}) > 1:
        raise DistributedOperationException(
            f"The number of tensors passed to pad_across_processes differs between ranks (in rank order: "
            f"{', '.join(str(len(entry)) for entry in found)}). Pass the same number of tensors on every process."
        )
    for index, column in enumerate(zip(*found, strict=True)):
        if len({dims for dims, _ in column}) > 1:
            which = f"tensor {index}" if len(sizes) > 1 else "a tensor"
            raise DistributedOperationException(
                f"pad_across_processes got {which} with {', '.join(str(dims) for dims, _ in column)} dimensions (in "
                "rank order). Padding can extend a dimension but cannot add one. Pass tensors with the same number of "
                "dimensions on every process, such as tensor.unsqueeze(0) for a single sample."
            )
    largest = iter([max(size for _, size in column) for column in zip(*found, strict=True)])

    def pad(tensor: Tensor) -> Tensor:
        size = next(largest)
        return _padded(tensor, dim, size, pad_index, pad_first) if _has(tensor, dim) else tensor

    return recursively_apply(pad, data)


def _has(tensor: Tensor, dim: int) -> bool:
    return not tensor.is_nested and -tensor.dim() <= dim < tensor.dim()


def _padded(tensor: Tensor, dim: int, size: int, value: Any = 0, first: bool = False) -> Tensor:
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_zeros(shape) + value
    parts = [filling.to(tensor.dtype), tensor]
    return torch.cat(parts if first else parts[::-1], dim=dim)


# ---- mismatches ------------------------------------------------------------------------------------------------------


def _described(data: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in leaves(data)]


def _require_alike(operation: str, data: Any, strategy: Strategy) -> None:
    found = strategy.unlike(_described(data))
    if found:
        raise DistributedOperationException(_said(operation, found))


def _said(operation: str, found: list[Any], but: str = "") -> str:
    listed = "; ".join(
        f"rank {rank}: {', '.join(f'{shape} {dtype}' for shape, dtype in entry) or 'no tensor'}"
        for rank, entry in enumerate(found)
    )
    may = f" (only {but} may differ)" if but else ""
    return (
        f"{operation} needs tensors with the same shapes and dtypes on every rank{may}, but got {listed}. Make the "
        "shapes equal, for example with pad_across_processes(data, dim=1)."
    )


# ---- split -----------------------------------------------------------------------------------------------------------


def split_between_processes(inputs: Any, strategy: Strategy, apply_padding: bool = False) -> Any:
    """Return this process's contiguous part of ``inputs``. The first parts may have one more entry than the others.

    Raises:
        TypeError: the inputs cannot be split.
        ValueError: the entries of a dict have different lengths.
    """
    world, rank = strategy.num_data_ranks, strategy.data_rank
    if world == 1:
        return inputs
    total = _length(inputs)
    low, larger = divmod(total, world)
    start = rank * low + min(rank, larger)
    own = list(range(start, start + low + (rank < larger)))
    if apply_padding and total:
        own += [total - 1] * (low + bool(larger) - len(own))
    return _taken(inputs, own)


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"split_between_processes got a dict whose entries have different lengths: {lengths}. Pass the "
                "same number of inputs for each key."
            )
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, (str, bytes)) or not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(
            f"split_between_processes got {messages.a(inputs)}, which cannot be split. Pass a list, a tuple, a tensor, "
            "a datasets.Dataset, or a dict of lists, tuples or tensors."
        )
    return len(inputs)


def _taken(inputs: Any, indices: list[int]) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _taken(value, indices) for key, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return honor_type(inputs, [inputs[index] for index in indices])
    if hasattr(inputs, "select") and not isinstance(inputs, Tensor):
        return inputs.select(indices)
    return inputs[indices]
