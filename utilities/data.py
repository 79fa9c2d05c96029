"""Facts about data loaders."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import IterableDataset

from .. import messages
from ..data.batches import batch_size_of as extract_batch_size
from ..data.combined_loader import length_of
from ..processes.device_transfer import move as move_data_to_device
from ..strategies.base import Strategy

__all__ = [
    "advise_about_length",
    "extract_batch_size",
    "has_iterable_dataset",
    "has_len",
    "has_len_all_ranks",
    "move_data_to_device",
    "suggested_max_num_workers",
]


def has_iterable_dataset(dataloader: Any) -> bool:
    """Whether a loader reads an iterable dataset, which has no indices."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: Any) -> bool:
    """Whether a loader has a length. Warns if it is 0."""
    try:
        length = len(dataloader)
    except (TypeError, NotImplementedError):
        return False
    if length == 0:
        messages.warn_once(f"{type(dataloader).__name__} has length 0, so it yields no batches.")
    return True


def has_len_all_ranks(
    dataloader: Any, strategy: Strategy, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Whether a loader has a length, on every rank. Every rank must call.

    Args:
        dataloader: this rank's loader.
        strategy: of the run.
        allow_zero_length_dataloader_with_multiple_devices: False: a length of 0 on one rank only is an error.

    Raises:
        RuntimeError: this rank has no batch, and others do.
    """
    length = length_of(dataloader)
    lengths = strategy.gather_objects(length)
    if None in lengths:
        return False
    kind = type(dataloader).__name__
    if not sum(lengths):
        messages.warn(f"{kind} has a length of 0 on every rank: it gives no batches.")
    elif not length and not allow_zero_length_dataloader_with_multiple_devices:
        raise RuntimeError(
            f"{kind} has a length of 0 on rank {strategy.global_rank}; the ranks have {', '.join(map(str, lengths))}. "
            "Give every rank a batch, or set allow_zero_length_dataloader_with_multiple_devices on the DataModule."
        )
    advise_about_length(dataloader, kind)
    return True


def advise_about_length(dataloader: Any, name: str) -> None:
    """Warn of a data set that is read in order and claims a length, which worker processes may make wrong."""
    if has_iterable_dataset(dataloader) and length_of(dataloader) is not None:
        messages.warn(
            f"The data set of {name} is an IterableDataset with a __len__: with worker processes its length is right "
            "only if each of them yields its own part. Check that, or remove __len__."
        )


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return a number of worker processes per loader with which this machine's processes share its cores.

    Args:
        local_world_size: number of processes of the run on this machine.

    Raises:
        ValueError: it is less than 1.
    """
    if local_world_size < 1:
        raise ValueError(f"suggested_max_num_workers({local_world_size}): pass the number of processes, 1 or more.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)
