"""Batches of tensors in memory: one indexing instead of a call for each sample and a stack of all."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate


class Rows:
    """The samples of a ``TensorDataset``, or of a ``Subset`` of one, as tensors whose rows are taken.

    Args:
        tensors: each of shape (samples, ...), on the CPU.
        places: for each ``Subset`` around them, the outermost first, which rows of what is inside it has.
    """

    def __init__(self, tensors: tuple[Tensor, ...], places: list[Tensor]) -> None:
        self.tensors = tensors
        self.places = places

    def batches(self, indices: Iterable[Any], pinned: bool = False) -> Iterator[list[Tensor]]:
        """Batches as ``default_collate`` makes them: lists of tensors of shape (batch size, ...).

        Args:
            indices: of each batch, an int64 tensor of shape (batch size,) or a list of integers, which takes longer.
            pinned: in memory that a GPU copies from directly.
        """
        tensors, places = self.tensors, self.places
        for one in indices:
            chosen = _as_tensor(one)
            try:
                for place in places:
                    chosen = place.index_select(0, chosen)
                batch = [tensor.index_select(0, chosen) for tensor in tensors]
            except IndexError:  # negative indices too, which a data set knows and this way of indexing does not
                batch = self._counting_back(_as_tensor(one))
            yield [tensor.pin_memory() for tensor in batch] if pinned else batch

    def _counting_back(self, chosen: Tensor) -> list[Tensor]:
        for place in self.places:
            chosen = place.index_select(0, torch.where(chosen < 0, chosen + len(place), chosen))
        return [
            tensor.index_select(0, torch.where(chosen < 0, chosen + len(tensor), chosen)) for tensor in self.tensors
        ]


def rows_of(loader: DataLoader[Any]) -> Rows | None:
    """What a loader without workers reads, where indexing all samples of a batch at once gives the batches torch makes.

    That is where the data set is a ``TensorDataset`` or a ``Subset`` of one (``random_split``), on the CPU, and batches
    are made by torch's own ``default_collate``. None for any other.
    """
    if loader.num_workers or loader.batch_sampler is None or loader.collate_fn is not default_collate:
        return None
    data: Any = loader.dataset
    places: list[Any] = []
    while type(data) is Subset:
        places.append(data.indices)
        data = data.dataset
    if type(data) is not TensorDataset or not all(map(_is_plain, data.tensors)):
        return None
    return Rows(data.tensors, [_as_tensor(place) for place in places])


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _as_tensor(indices: Tensor | Sequence[int]) -> Tensor:
    """Indices as an int64 tensor, made of a list five times as fast as ``torch.tensor`` makes it."""
    if isinstance(indices, Tensor):
        return indices
    return (
        torch.frombuffer(array("q", indices), dtype=torch.int64) if len(indices) else torch.empty(0, dtype=torch.int64)
    )
