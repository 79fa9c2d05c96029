"""Functions that inspect data loaders."""

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
    """Return True if a loader reads an iterable dataset, which has no indices."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: Any) -> bool:
    """Return True if a loader has a length; warn if the length is 0."""
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
    """Return True if a loader has a length on every rank. Every rank must call this.

    Args:
        dataloader: this rank's loader.
        strategy: the run's strategy.
        allow_zero_length_dataloader_with_multiple_devices: if False, a length of 0 on some but not all ranks is an
            error.

    Raises:
        RuntimeError: this rank has no batches, but other ranks do.
    """
    length = length_of(dataloader)
    lengths = strategy.gather_objects(length)
    if None in lengths:
        return False
    kind = type(dataloader).__name__
    if not any(lengths):
        messages.warn(f"{kind} has a length of 0 on every rank, so it yields no batches.")
    elif not length and not allow_zero_length_dataloader_with_multiple_devices:
        raise RuntimeError(
            f"{kind} has a length of 0 on rank {strategy.global_rank}. The lengths are {', '.join(map(str, lengths))} "
            "(in rank order). Give every rank at least one batch, or set "
            "allow_zero_length_dataloader_with_multiple_devices on the DataModule."
        )
    advise_about_length(dataloader, kind)
    return True


def advise_about_length(dataloader: Any, name: str) -> None:
    """Warn about an iterable dataset with a length, because worker processes may make the length wrong."""
    if has_iterable_dataset(dataloader) and length_of(dataloader) is not None:
        messages.warn(
            f"The dataset of {name} is an IterableDataset with a __len__. With worker processes, this length is "
            "correct only if each worker yields its own shard. Make sure that each worker yields only its own shard, "
            "or remove __len__."
        )


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return how many workers each loader can have if the processes on this machine share its CPU cores.

    Args:
        local_world_size: the run's number of processes on this machine.

    Raises:
        ValueError: ``local_world_size`` is less than 1.
    """
    if local_world_size < 1:
        raise ValueError(f"suggested_max_num_workers({local_world_size}): the number of processes must be 1 or more.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)
