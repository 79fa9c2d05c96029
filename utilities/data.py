"""Facts about data loaders."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import IterableDataset

from .. import messages
from ..data.batches import batch_size_of as extract_batch_size
from ..processes.device_transfer import move as move_data_to_device

__all__ = ["extract_batch_size", "has_iterable_dataset", "has_len", "move_data_to_device", "suggested_max_num_workers"]


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
