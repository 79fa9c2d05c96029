"""Start iterating over a loader at any batch, by skipping indices instead of loading and discarding batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ..processes import seed as randomness
from ..torch_private import dataset_iterator, index_sampler, pins_memory, running_iterator
from .in_memory import rows_of
from .uneven_shards import Shard
from .worker_processes import SEEDED, start_iterating

#: Module of torchdata's BatchSampler, which groups indices like torch's and can save its position.
_STATEFUL_SAMPLERS = "torchdata.stateful_dataloader.sampler"

#: Built-in iterators, which run no other code. Reading past their last item draws no random numbers and reads no data.
RUN_NOTHING = (type(iter([])), type(iter(())), type(iter(range(0))))

_REACHED = object()
#: Number of batches whose indices are split off at a time.
_PIECES = 1024


def from_item(sampler: Any, count: int) -> Iterator[Any]:
    """Return the items of a sampler, starting at number ``count``.

    Skipping items costs almost nothing with torch's own samplers; the user's samplers are iterated over. When this
    function returns, exactly the skipped items have been drawn. Only torch's samplers are read past their length.
    """
    if not count:
        return _from_first(sampler)
    own = getattr(sampler, "from_item", None)
    if own is not None:
        return own(count)
    if cuts(sampler):
        rest = from_item(sampler.sampler, count * sampler.batch_size)
        return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return iter(range(len(sampler.data_source))[count:])
    if type(sampler) is RandomSampler and _is_one_permutation(sampler):
        return _permuted(sampler, count)
    if type(sampler) is SubsetRandomSampler and sampler.generator is not None:
        places = torch.randperm(len(sampler.indices), generator=sampler.generator)[count:].tolist()
        return map(sampler.indices.__getitem__, places)
    items = _from_first(sampler)
    next(islice(items, count, count), None)
    return items


class _Inside:
    """The items of a sampler up to its length. As in torch, ``iter(sampler)`` is called only when iteration starts."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.sampler)
        is_stream = isinstance(self.sampler, IterableDataset)  # its length determines how processes weight their parts
        if type(items) in RUN_NOTHING and not is_stream:
            return items
        return _first(items, length_of(self.sampler), close=items is not self.sampler)


def _first(items: Iterator[Any], count: int | None, close: bool) -> Iterator[Any]:
    try:
        yield from islice(items, count)
    finally:
        if close and isinstance(items, Generator):
            items.close()


def _from_first(sampler: Any) -> Iterator[Any]:
    """Return the same items as ``iter(sampler)``, but read only torch's own samplers past their length."""
    if _ends_by_itself(sampler):
        return iter(sampler)
    if cuts(sampler):
        return iter(BatchSampler(_Inside(sampler.sampler), sampler.batch_size, sampler.drop_last))  # type: ignore[arg-type]
    return iter(_Inside(sampler))


def _ends_by_itself(sampler: Any) -> bool:
    """Return True if a sampler must be read to its end, because torch's samplers draw from their generators there.

    A dataset that saves its position must also be read to its end, so that its position returns to the beginning.
    """
    source = sampler.sampler if cuts(sampler) else sampler
    module = type(source).__module__
    ours_or_torchs = isinstance(source, Shard) or module.startswith("torch.") or module == _STATEFUL_SAMPLERS
    saves_place = isinstance(source, IterableDataset) and callable(getattr(source, "state_dict", None))
    return ours_or_torchs or saves_place


def cuts(sampler: Any) -> bool:
    """Return True if a batch sampler only groups the items of its sampler into batches."""
    plain = type(sampler).__iter__ is BatchSampler.__iter__ or type(sampler).__module__ == _STATEFUL_SAMPLERS
    return isinstance(sampler, BatchSampler) and plain


def _is_one_permutation(sampler: RandomSampler) -> bool:
    one = not sampler.replacement and sampler.num_samples == len(sampler.data_source)  # type: ignore[arg-type]
    return one and sampler.generator is not None


def _permuted(sampler: RandomSampler, count: int) -> Iterator[int]:
    """Return the items of a ``RandomSampler``. At the end, draw one more permutation, as torch does for a remainder."""
    size = len(sampler.data_source)  # type: ignore[arg-type]
    places = torch.randperm(size, generator=sampler.generator)[count:].tolist()
    items = chain(places, _end_of_permutation(sampler))
    if count > size:  # the end has been reached
        next(items, None)
    return items


def _end_of_permutation(sampler: RandomSampler) -> Iterator[int]:
    torch.randperm(len(sampler.data_source), generator=sampler.generator)  # type: ignore[arg-type]
    yield from ()


def _at_once(sampler: Any, start: int) -> Iterator[Any]:
    """Return a batch sampler's batches from number ``start`` on, as tensors (not lists) if the order is torch's."""
    source = sampler.sampler if cuts(sampler) else None
    if type(source) is SequentialSampler or (type(source) is RandomSampler and _is_one_permutation(source)):
        return _cut(sampler, source, start)
    return from_item(sampler, start)


def _cut(sampler: Any, source: SequentialSampler | RandomSampler, start: int) -> Iterator[Tensor]:
    """Return the batches of one permutation, without a Python call for each batch."""
    pieces = _pieces(sampler, source, start)
    if start:
        next(pieces)  # draws the skipped batches
    return chain.from_iterable(pieces)


def _pieces(sampler: Any, source: SequentialSampler | RandomSampler, start: int) -> Iterator[Sequence[Tensor]]:
    drawn = partial(torch.randperm, len(source), generator=source.generator) if type(source) is RandomSampler else None
    order, size = torch.arange(len(source)) if drawn is None else drawn(), sampler.batch_size
    full = len(order) // size * size
    ended = start * size > len(order)
    if drawn is not None and ended:
        drawn()
    yield ()
    for first in range(start * size, full, size * _PIECES):
        yield order[first : min(first + size * _PIECES, full)].split(size)
    if drawn is not None and not ended:
        drawn()  # at its end, RandomSampler does the same for an empty remainder
    if len(order) > max(full, start * size) and not sampler.drop_last:
        yield (order[full:],)


class NumberedIndices:
    """The indices and the number of a batch for a data loader worker. Unpickling returns only the indices.

    A worker unpickles a batch's indices right before it loads the batch, so unpickling also sets the worker's random
    states. These states then depend on the batch and not on other batches that the worker has loaded.
    """

    __slots__ = ("indices", "number", "seed")

    def __init__(self, indices: Any, seed: int, number: int) -> None:
        self.indices, self.seed, self.number = indices, seed, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded, (self.indices, self.seed, self.number)


def _seeded(indices: Any, seed: int, number: int) -> Any:
    randomness.seed_host(randomness.mixed(seed, number))
    return indices


class Order:
    """Replaces a loader's sampler for one iteration, to start at any batch and to number batches for workers.

    Args:
        sampler: the sampler to replace.
        in_workers: whether worker processes load the batches.
        at_once: whether to yield tensors instead of lists of indices where possible.
    """

    def __init__(self, sampler: Any, in_workers: bool, at_once: bool) -> None:
        self.sampler = sampler
        self.in_workers = in_workers
        self.from_item = _at_once if at_once else from_item
        self.start = 0
        self.seed: int | None = None
        self.opened: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        if self.in_workers:
            self.opened = self._numbered()
        else:
            self.opened = self._from_start() if self.start else self.from_item(self.sampler, 0)
        return self.opened

    def __len__(self) -> int:
        return len(self.sampler)

    def reach(self) -> None:
        """Draw the skipped items now. Does nothing with workers, because they have their first batches by then."""
        if self.start and not self.in_workers:
            next(self.opened)

    def _from_start(self) -> Iterator[Any]:
        items = self.from_item(self.sampler, self.start)
        yield _REACHED
        yield from items

    def _numbered(self) -> Iterator[Any]:
        start, seed = self.start, self.seed  # read at the first item, because a loader with workers calls iter() twice
        items = from_item(self.sampler, start)
        if seed is None:
            yield from items
            return
        for number, indices in enumerate(items, start):
            yield NumberedIndices(indices, seed, number)


def length_of(loader: Any) -> int | None:
    """Return the number of a loader's batches, or None if the loader has no known length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def within_length(loader: Any, iterator: Iterator[Any], start: int = 0) -> Iterator[Any]:
    """Limit a loader's iterator, which is at batch number ``start``, to the loader's length.

    The iterator is read past its last batch only if doing so runs no user code in this process, or if it resets the
    loader's saved position to the beginning.
    """
    length = length_of(loader)
    if length is None or isinstance(loader, Shard) or _stops_inside(loader, iterator):
        return iterator
    inside = islice(iterator, max(length - start, 0))
    return chain(inside, _past_length(iterator)) if _is_asked_for_its_end(loader) else inside


def _stops_inside(loader: Any, iterator: Iterator[Any]) -> bool:
    """Return True if reading an iterator to its end runs no user code past the loader's length."""
    if takes_indices(loader):
        return can_jump(loader) or _ends_by_itself(_sampler_of(loader))
    return type(dataset_iterator(iterator)) in RUN_NOTHING


def _is_asked_for_its_end(loader: Any) -> bool:
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and loader.num_workers:
        return not takes_indices(loader)  # workers that read a stream have already read ahead
    places = (loader, getattr(loader, "dataset", None))
    return any(callable(getattr(place, "state_dict", None)) for place in places)


def _past_length(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches that a loader yields past its length. If reading the first of them fails, yield nothing."""
    try:
        batch = next(iterator, _REACHED)
    except Exception:
        return  # the failing batch was not needed
    if batch is not _REACHED:
        yield batch
        yield from iterator


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def takes_indices(loader: Any) -> bool:
    """Return True if a loader takes indices from a sampler: it has torch's own ``__iter__`` and no iterable dataset."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return not isinstance(loader.dataset, IterableDataset)


def can_jump(loader: Any) -> bool:
    """Return True if a loader's batches can be skipped without loading them.

    A running iterator with persistent workers keeps the sampler that it was created with, so that sampler must be an
    ``Order``.
    """
    if not takes_indices(loader):
        return False
    running = running_iterator(loader)
    return running is None or type(index_sampler(running)) is Order


def iterate(loader: Any, start: int = 0, seed: int | None = None) -> Iterator[Any]:
    """Return a loader's iterator, starting at batch number ``start`` as if the batches before it had been read.

    Args:
        loader: a loader for which :func:`can_jump` is True; any loader if ``start`` is 0.
        start: number of batches to skip.
        seed: number that, combined with each batch's index, seeds the RNG states of workers that load by index; None
            leaves the RNG states unchanged.
    """
    if not can_jump(loader):
        return start_iterating(loader)
    running, workers, rows = running_iterator(loader), loader.num_workers > 0, rows_of(loader)
    sampler = _sampler_of(loader)
    as_torch_does = not start and (seed is None or not workers) and _ends_by_itself(sampler)
    if running is None and rows is None and as_torch_does:
        return start_iterating(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order = Order(sampler, workers, rows is not None) if running is None else index_sampler(running)
    order.start, order.seed = start, seed
    loader.__dict__[name] = order  # the loader rejects a plain assignment; its iterator reads the attribute once
    try:
        iterator = start_iterating(loader)
    finally:
        loader.__dict__[name] = sampler
    order.reach()
    return iterator if rows is None else rows.batches(order.opened, pins_memory(iterator))


def pass_over(loader: Any, first: bool, limit: int | None = None) -> None:
    """Advance a loader's random number generators as one pass over the data would, without loading anything.

    Args:
        loader: a loader for which :func:`can_jump` is True.
        first: whether this is the first pass, which is the only one that seeds persistent workers.
        limit: number of batches after which the pass ends; by then, workers have already received a few more.
    """
    items = _from_first(_sampler_of(loader))
    if (first and loader not in SEEDED) or not loader.persistent_workers:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if loader.persistent_workers:
        SEEDED.add(loader)
    if limit is not None:
        items = islice(items, limit + loader.num_workers * (loader.prefetch_factor or 0))
    deque(items, maxlen=0)
