"""Creates batches from in-memory tensors with one indexing operation, which is faster than stacking single samples."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from ..torch_private import makes_torchs_iterators


class TensorRows:
    """The samples of a ``TensorDataset``, or of a ``Subset`` of one, as rows of tensors.

    Args:
        data: the dataset.
        tensors: the dataset's tensors, each of shape (samples, ...), on the CPU.
        places: the indices of each ``Subset`` that wraps the dataset, outermost first.
    """

    def __init__(self, data: Dataset[Any], tensors: tuple[Tensor, ...], places: list[Tensor]) -> None:
        self.data = data
        self.tensors = tensors
        self.places = places

    def batches(self, indices: Iterable[Any], pinned: bool = False) -> Iterator[list[Tensor]]:
        """Yield the batches that ``default_collate`` would create: lists of tensors of shape (batch size, ...).

        Args:
            indices: the indices of each batch: an int64 tensor of shape (batch size,), or a list of integers, which is
                slower. Other types and negative indices are looked up sample by sample, as in torch.
            pinned: whether to put the batches in pinned memory.
        """
        tensors, places = self.tensors, self.places
        for one in indices:
            try:
                chosen = one if type(one) is Tensor else _as_tensor(one)
                for place in places:
                    chosen = place.index_select(0, chosen)
                batch = [tensor.index_select(0, chosen) for tensor in tensors]
            except Exception:  # unsupported or wrong indices: torch's own code raises its own error
                batch = default_collate([self.data[index] for index in one])
            yield [tensor.pin_memory() for tensor in batch] if pinned else batch


def rows_of(loader: DataLoader[Any]) -> TensorRows | None:
    """Return a loader's :class:`TensorRows`, or None if a single indexing operation cannot create torch's batches.

    The batches are the same if the loader has no workers, its dataset is a ``TensorDataset`` or a ``Subset`` of one
    (``random_split``) on the CPU, and torch's own iterator and ``default_collate`` create the batches.
    """
    if loader.num_workers or loader.batch_sampler is None or loader.collate_fn is not default_collate:
        return None
    if not makes_torchs_iterators(loader):
        return None
    data: Any = loader.dataset
    places: list[Tensor] = []
    while type(data) is Subset:
        place = _positions(data.indices)
        if place is None:
            return None
        places.append(place)
        data = data.dataset
    if type(data) is not TensorDataset or not all(map(_is_plain, data.tensors)):
        return None
    return TensorRows(loader.dataset, data.tensors, places)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _positions(indices: Any) -> Tensor | None:
    """Return the indices of a ``Subset`` as a tensor; None for types that may behave differently from a list."""
    if type(indices) is Tensor:
        return indices.long() if indices.dim() == 1 and indices.dtype in (torch.int32, torch.int64) else None
    if type(indices).__module__ == "numpy":
        indices = indices.tolist()
    if type(indices) not in (list, tuple, range):
        return None
    try:
        return _as_tensor(indices) if len(indices) else torch.empty(0, dtype=torch.int64)
    except (TypeError, OverflowError):
        return None


def _as_tensor(indices: Sequence[int]) -> Tensor:
    """Convert indices to an int64 tensor. For a list, this is five times as fast as ``torch.tensor``.

    Raises:
        TypeError: if the indices are not integers.
    """
    if type(indices[0]) is bool:
        raise TypeError("A bool is not an index.")
    return torch.frombuffer(array("q", indices), dtype=torch.int64)
