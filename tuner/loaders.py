"""Loaders with another batch size."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from ..data.combined_loader import CombinedLoader
from ..data.loaders import is_loader_collection, replaced
from ..torch_private import forget_iterator


def _check(loader: Any) -> None:
    """Raise if nobody but the user can make this loader's batches another size."""
    why = ""
    if isinstance(loader, CombinedLoader) or is_loader_collection(loader):
        why = "several loaders were given, and it is not clear whose batches are meant"
    elif not isinstance(loader, DataLoader):
        why = f"a {type(loader).__name__} was given, whose batches are made already"
    elif type(loader.batch_sampler) is not BatchSampler:
        made = "its data set (batch_size=None)" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        why = f"the {type(loader).__name__} that was given gets its batches from {made}"
    if why:
        raise ValueError(
            f"scale_batch_size cannot change the batch size: {why}. Define train_dataloader() on the module or a "
            "DataModule, which reads self.batch_size, or pass one DataLoader(dataset, batch_size=...)."
        )


def size_of(loader: Any) -> int:
    """The batch size of a loader that was given.

    Raises:
        ValueError: it has none that could be changed.
    """
    _check(loader)
    return loader.batch_sampler.batch_size


def resized(loader: Any, size: int) -> Any:
    """A copy with another batch size."""
    _check(loader)
    batches = BatchSampler(loader.sampler, size, loader.drop_last)
    return replaced(loader, batch_size=size, batch_sampler=batches)


def resize(loader: Any, size: int) -> None:
    """Change the batch size of the user's loader itself, which refuses to have it set as an attribute."""
    _check(loader)
    loader.batch_sampler.batch_size = size
    vars(loader).update(batch_size=size)
    forget_iterator(loader)
