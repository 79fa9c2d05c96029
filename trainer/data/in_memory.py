"""Batches of tensors in memory: one indexing instead of a call for each sample and a stack of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate


def index_at_once(loader: DataLoader[Any], iterator: Iterator[Any]) -> None:
    """Let an iterator of a loader without workers fetch whole batches, where that gives the same ones.

    That is where the data set is a ``TensorDataset`` or a ``Subset`` of one (``random_split``), on the CPU, and batches
    are made by torch's own ``default_collate``. Any other iterator stays as it is.
    """
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if loader.batch_sampler is None or loader.collate_fn is not default_collate or fetcher is None:
        return
    data: Any = loader.dataset
    places: list[Sequence[int]] = []
    while type(data) is Subset:
        places.append(data.indices)
        data = data.dataset
    if type(data) is TensorDataset and all(map(_is_plain, data.tensors)):
        vars(iterator)["_dataset_fetcher"] = _Indexer(data.tensors, places)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


class _Indexer:
    """Stands where the iterator has what calls the data set for each sample."""

    def __init__(self, tensors: tuple[Tensor, ...], places: list[Sequence[int]]) -> None:
        self.tensors = tensors
        self.places = places

    def fetch(self, indices: Sequence[int]) -> list[Tensor]:
        """A batch as ``default_collate`` makes it: a list of tensors of shape (len(indices), ...)."""
        for place in self.places:
            indices = [place[index] for index in indices]
        chosen = torch.tensor(indices)
        return [tensor.index_select(0, chosen) for tensor in self.tensors]
