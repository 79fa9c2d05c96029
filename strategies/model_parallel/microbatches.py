"""Split a batch into micro-batches, and join the results that a step returns for each micro-batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

#: Orders in which micro-batches pass through the stages.
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b"]


def cut(batch: Any, count: int) -> tuple[list[Any], list[int]]:
    """Split a batch along the first dimension of its tensors.

    Tensors whose first dimension differs in size from that of the batch's first tensor are not split; every micro-batch
    gets them in full. Lists with one value per sample (a string, a number) are split like tensors.

    Args:
        batch: tensors in tuples, lists, mappings or dataclasses.
        count: number of micro-batches, at most one per sample. If the samples cannot be distributed evenly, each of the
            first micro-batches gets one more sample than the others.

    Returns:
        The micro-batches, and the number of samples in each of them.

    Raises:
        TypeError: the batch contains no tensor with a first dimension.
    """
    size = _first_size(batch)
    if size is None:
        raise TypeError(
            f"A batch of type {type(batch).__name__} cannot be split into micro-batches for the pipeline, because it "
            "contains no tensor with a first dimension. Pass tensors in tuples, lists, dicts or dataclasses."
        )
    count = max(min(count, size), 1)
    ends = [size // count * index + min(index, size % count) for index in range(count + 1)]
    sizes = [end - start for start, end in pairwise(ends)]
    if count == 1:
        return [batch], sizes
    pieces = [_piece(batch, size, slice(start, end)) for start, end in pairwise(ends)]
    return pieces, sizes


def _first_size(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else None
    return next((size for part in _parts(value) if (size := _first_size(part)) is not None), None)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _piece(value: Any, size: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part] if value.ndim and value.shape[0] == size else value
    if isinstance(value, (tuple, list)) and _has_a_value_each(value, size):
        return value[part]
    return _rebuilt(value, lambda inner: _piece(inner, size, part))


def _has_a_value_each(values: Sequence[Any], size: int) -> bool:
    return len(values) == size and not any(isinstance(v, (Tensor, Mapping, tuple, list)) for v in values)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with its values changed; return any other value unchanged."""
    if isinstance(value, tuple):
        values = [change(v) for v in value]
        return value._make(values) if hasattr(value, "_make") else type(value)(values)  # type: ignore[attr-defined]
    if isinstance(value, list):
        return [change(v) for v in value]
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, inner in value.items():
            result[key] = change(inner)
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, change(getattr(value, field.name)))
        return result
    return value


def form_of(batch: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a batch's tensors, which determine the form of the step's results."""
    return tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v) for v in leaves(batch))


def leaves(value: Any) -> list[Any]:
    """Return the values in nested containers."""
    parts = _parts(value)
    return [leaf for part in parts for leaf in leaves(part)] if parts else [value]


def join(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results that a step returned for the micro-batches of a batch.

    Tensors and lists with one entry per sample are concatenated, and single numbers are averaged over samples, even
    inside containers. Any other value is taken from the first micro-batch.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        if first.ndim and all(v.shape[0] == size for v, size in zip(values, sizes, strict=True)):
            return torch.cat(list(values))
        return mean(values, sizes) if first.is_floating_point() and first.numel() == 1 else first
    if isinstance(first, float):
        return mean(values, sizes)
    if isinstance(first, (tuple, list)):
        if all(_has_a_value_each(v, size) for v, size in zip(values, sizes, strict=True)):
            return type(first)(entry for value in values for entry in value)
        joined = iter([join(inner, sizes) for inner in zip(*values, strict=True)])
        return _rebuilt(first, lambda _: next(joined))
    if isinstance(first, Mapping):
        return {key: join([value[key] for value in values], sizes) for key in first}
    return first


def mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the weighted mean of numbers or tensors."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
