"""Split a loader among several processes. :class:`Division` defines the rules.

The processes do not communicate. Each one iterates over the same full order and loads only its own shard.
:func:`seed_shuffling` must be called before each epoch, with the same arguments on every process.

To put an evaluation's outputs into the dataset's order, join them round by round, and rank by rank within each round,
leaving out the outputs of :func:`surplus` batches.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from .. import messages
from ..processes.seed import PrivateRandomness
from .combined_loader import CombinedLoader, close_iterator, length_of
from .loaders import replaced, samplers_of, shard_of, whole_of
from .sample_order import RUN_NOTHING, cuts, from_item
from .streams import counts_ranks_at_creation, num_ranks_of, splits_shards
from .uneven_shards import Division, RoundShare, Shard

#: Samplers whose order depends on their own generator or on nothing, so that it is the same on every process.
_SELF_CONTAINED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

#: Attributes in which samplers that split the samples by rank store the number of ranks (torch, transformers).
_RANKS = ("num_replicas", "world_size", "dp_size")


def shard_training(loader: Any, rank: int, world: int) -> Any:
    """Return a copy of a training loader that yields only this process's shard of the data.

    ``world`` processes with batches of *b* samples see, batch by batch, the same samples as one process with batches of
    ``world * b``, and all processes have the same number of batches. The last batches may differ in size by one sample.
    Multiply the mean loss of the last batch by :func:`last_share`, so that the mean over processes is the mean over
    samples. ``drop_last=True`` drops samples that do not fill a batch on every process.

    Batches that are not collected sample by sample from a sampler (a custom ``batch_sampler``, ``batch_size=None``, a
    list of batches) are assigned to the processes in turn, without splitting them. Other iterables are left unchanged,
    because they may already be sharded by process. If several workers read an iterable dataset, each worker's stream
    ends separately, so several batches of an epoch may need a weight: multiply by :func:`batch_share`.

    Args:
        loader: a DataLoader, a list of batches, or a ``CombinedLoader``, whose loaders are sharded individually. A
            loader that is already split (for example, by a ``DistributedSampler``) is returned unchanged.
        rank: rank of this process.
        world: number of processes. If it is 1, the loader itself is returned.
    """
    return shard(loader, world, partial(Division, rank, world))


def shard_evaluation(loader: Any, rank: int, world: int) -> Any:
    """Return a copy of a loader that yields only this process's shard. Together, the processes see every sample once.

    All processes have the same number of batches if possible; otherwise, some end with a :func:`surplus` batch. If
    workers read an iterable dataset, each worker may give some processes an extra batch. ``drop_last=True`` drops
    samples that do not fill a batch, as it does on one process.

    The arguments are the same as for :func:`shard_training`.
    """
    return shard(loader, world, partial(Division, rank, world, evaluation=True))


def last_share(loader: Any) -> float:
    """Return the weight of this process's mean over its last batch.

    The weight is ``own samples * processes / samples of all processes``: 1.0 if all processes have the same number of
    samples, and 0.0 for a batch that only repeats a sample. The weight applies to the loader's own last batch, not to
    the last batch before a limit. For a loader without a known length, the weight is valid once the last batch has been
    fetched. For a ``CombinedLoader``, the weight is that of the loaders that end together with the ``CombinedLoader``,
    or 1.0 if their weights differ.
    """
    if isinstance(loader, CombinedLoader):
        shares = {last_share(leaf) for leaf in _ending(loader)}
        return shares.pop() if len(shares) == 1 else 1.0
    shard = shard_of(loader)
    return 1.0 if shard is None or shard.division.evaluation else shard.share


def unweighted(loader: CombinedLoader, batches: int | float) -> list[int]:
    """Return the indices of the loaders in a combined loader whose last batch cannot be weighted separately.

    The processes share that batch unevenly, but :func:`last_share` is one weight for the batches of all loaders in a
    step. Loaders without a known length are left out.

    Args:
        loader: a CombinedLoader that :func:`shard_training` returned.
        batches: number of combined batches in an epoch.
    """
    limits = loader.limits or [float("inf")] * len(loader.flattened)
    lengths = [length_of(leaf) or 0 for leaf in loader.flattened]
    read = [length <= min(limit, batches) for length, limit in zip(lengths, limits, strict=True)]
    uneven = [i for i, leaf in enumerate(loader.flattened) if read[i] and lengths[i] and last_share(leaf) != 1.0]
    alike = len({last_share(leaf) for leaf in loader.flattened}) == 1 and {*lengths} == {batches}
    return [] if alike else uneven


def ends_separately(loader: Any) -> bool:
    """Return True if workers read an iterable dataset, so each of them has a last batch; see :func:`batch_share`.

    False for a loader that saves its workers' positions (torchdata's) or that yields batches out of order, because the
    workers' last batches cannot be told apart from the others then.
    """
    return (
        isinstance(shard_of(loader), RankStream)
        and loader.num_workers > 0
        and not hasattr(loader, "load_state_dict")
        and getattr(loader, "in_order", True)
    )


def batch_share(loader: Any, number: int, at_end: bool) -> float:
    """Return the weight of this process's mean over one batch of the current pass, as in :func:`last_share`.

    Args:
        loader: a loader that :func:`shard_training` returned.
        number: index of the batch (0-based), which has been fetched.
        at_end: whether the loader ended after this batch.
    """
    if ends_separately(loader):
        return shard_of(loader).share_of(number)
    return last_share(loader) if at_end else 1.0


def ends_unknown(loader: Any, batches: int | float) -> bool:
    """Return True if an epoch of ``batches`` batches ends in a batch whose share is known once it has been fetched."""
    shard, length = shard_of(loader), length_of(loader)
    if isinstance(shard, RankStream) and loader.num_workers == 0 and length is None:
        return True  # this process has read no further
    unknown = length is None or (isinstance(shard, RankStream) and loader.num_workers > 1)
    return unknown and batches in (float("inf"), length)


def surplus(loader: Any) -> bool:
    """Return True if this process's last evaluation batch exists only because other processes have one more batch.

    That batch repeats samples that another process has, so process it without counting its results, or skip it. For a
    loader without a known length, the result is valid once that batch has been fetched.
    """
    if isinstance(loader, CombinedLoader):
        ending = _ending(loader)
        return bool(ending) and all(surplus(leaf) for leaf in ending)
    shard = shard_of(loader)
    return shard is not None and shard.division.evaluation and shard.share == 0.0


def batch_indices(loader: Any) -> Iterator[list[Any]] | None:
    """Return an iterator over the dataset indices of each batch in the next pass. Call this before the pass begins.

    Returns None if the indices are unknown: the loader has no batch sampler, or a single process reads the samples in a
    shuffled or custom order.
    """
    shard = shard_of(loader)
    if isinstance(shard, RankSampler):
        return shard.record()
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, (SequentialSampler, Sequence)):
        return map(list, sampler)
    return None


class RankSampler(Shard, Sampler[Any]):
    """Replaces a loader's batch sampler (or sampler) and yields this rank's shard of the replaced sampler's items.

    Attributes of the replaced sampler can be read from this object.
    """

    alike = False

    def __init__(self, whole: DataLoader[Any], division: Division) -> None:
        self.sampler_of_all: Any = whole.sampler if whole.batch_sampler is None else whole.batch_sampler
        self.division = division
        self._makes_batches = whole.batch_sampler is not None
        self._splits = cuts(self.sampler_of_all)
        self._items: Any = self.sampler_of_all.sampler if self._splits else self.sampler_of_all
        self._share = 1.0
        self._records: deque[list[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._batches(0)

    def from_item(self, count: int) -> Iterator[Any]:
        """Like ``iter(sampler)``, but start at batch number ``count``."""
        return self._batches(count)

    def _batches(self, start: int) -> Iterator[Any]:
        records, self._records = self._records, None
        known = type(self._items) in _SELF_CONTAINED or isinstance(self._items, Sequence)
        seed, left_out = None if known else self.order_seed, start * self.division.round_size
        for part in _parts(self.division, self._items, seed, left_out):
            self._share = part.share
            batch = list(part.items) if self._splits else part.items[0]
            if records is not None:
                records.append(list(batch) if self._makes_batches or isinstance(batch, list) else [batch])
            yield batch

    def __len__(self) -> int:
        return self.division.count(len(self._items))

    def __getattr__(self, name: str) -> Any:
        return _from(self, "sampler_of_all", name)

    @property
    def share(self) -> float:
        """The weight of this rank's last batch; see :func:`last_share`."""
        total = length_of(self._items)
        return self._share if total is None else self.division.share(total)

    def record(self) -> Iterator[list[Any]]:
        """Record the indices of each batch; see :func:`batch_indices`."""
        records = self._records = deque()
        return iter(lambda: records.popleft() if records else None, None)


class RankStream(Shard, IterableDataset[Any]):
    """Replaces an iterable dataset and yields this rank's shard of its stream, batch by batch.

    With workers, each worker's stream is split. All other attributes are read from and set on the replaced dataset.
    """

    def __init__(self, whole: DataLoader[Any], division: Division) -> None:
        ends = torch.tensor([[0.0, 1.0]] * max(whole.num_workers, 1), dtype=torch.float64)
        vars(self).update(
            whole_dataset=whole.dataset,
            division=division,
            order_seed=None,
            _batched=whole.batch_size is not None,
            _workers=whole.num_workers,
            # For each worker: number of batches so far and share of the last one, set by the process that reads them.
            _ends=ends.share_memory_() if whole.num_workers else ends,
        )

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        end = self._ends[0 if worker is None else worker.id]
        end[0], end[1] = 0, 1
        seed = self.order_seed if worker is None else None  # no other loader uses the worker's RNG states
        for part, share in _parts(self.division, self.whole_dataset, seed):
            if share == 0 and self.division.evaluation and self._workers > 1:
                return  # surplus() can report only the very last batch of a loader
            end[0] += 1
            end[1] = share
            yield list(part) if self._batched else part[0]

    def __getattr__(self, name: str) -> Any:
        return _from(self, "whole_dataset", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.whole_dataset, name, value)  # for example, from a worker_init_fn that splits the dataset

    @property
    def share(self) -> float:
        """The weight of this rank's last batch; see :func:`last_share`."""
        total = length_of(self.whole_dataset) if self._workers < 2 else None
        if total is not None:
            return self.division.share(total)
        ends = list(enumerate(self._ends.tolist()))
        # Workers take turns, so the last one with the most batches ends last.
        return max(ends, key=lambda entry: (entry[1][0], entry[0]))[1][1]

    def share_of(self, number: int) -> float:
        """Return the weight of batch ``number`` in the pass; 1.0 unless that batch is a worker's last batch."""
        ends = self._ends.tolist()
        for worker, (count, share) in enumerate(ends):
            if share == 1.0:
                continue
            turns = [min(made, count - (other >= worker)) for other, (made, _) in enumerate(ends)]
            if count and sum(turns) == number:
                return share
        return 1.0


class SizedRankStream(RankStream):
    """A :class:`RankStream` for a dataset with a known length. Its own length is this rank's number of samples."""

    def __len__(self) -> int:
        total, division = len(self.whole_dataset), self.division
        batches = division.count(total)
        return max(division.items(total), (batches - 1) * division.size + 1) if batches else 0


class RankIterable(Shard):
    """Replaces a list of batches and yields this rank's batches. Attributes are read from the list."""

    def __init__(self, whole: Any, division: Division) -> None:
        self.paceline_whole = whole
        self.division = division
        self._share = 1.0

    def __iter__(self) -> Iterator[Any]:
        whole = self.paceline_whole
        for part in _parts(self.division, whole, None):
            self._share = part.share
            yield part.items[0]

    def __len__(self) -> int:
        return self.division.count(len(self.paceline_whole))

    def __getattr__(self, name: str) -> Any:
        return _from(self, "paceline_whole", name)

    @property
    def share(self) -> float:
        """The weight of this rank's last batch; see :func:`last_share`."""
        total = length_of(self.paceline_whole)
        return self._share if total is None else self.division.share(total)


def shard(loader: Any, world: int, divide: Callable[..., Division]) -> Any:
    """Return a copy of a loader that yields only one process's shard of the data.

    ``divide(size=..., drop_last=...)`` returns the :class:`Division` to use.
    """
    if world == 1:
        return loader
    if isinstance(loader, CombinedLoader):
        clone = copy.copy(loader)
        clone.flattened = [shard(leaf, world, divide) for leaf in loader.flattened]
        return clone
    loader = whole_of(loader)  # a loader that was sharded for training may now be used for evaluation
    if is_split(loader):
        return loader
    if not isinstance(loader, (DataLoader, Sequence)):
        messages.info_once(
            f"{type(loader).__name__} is not a DataLoader and may split its batches by rank itself, so each of the "
            f"{world} processes uses all the batches that it yields. If the loader does not split them, make it yield "
            "only this process's shard, or pass a DataLoader or a list of batches."
        )
        return loader
    if not isinstance(loader, DataLoader):
        return RankIterable(loader, divide(size=1))
    if isinstance(loader.dataset, IterableDataset):
        _note_all_read(loader.dataset, world)
        division = divide(size=loader.batch_size or 1, drop_last=loader.drop_last)
        kind = RankStream if length_of(loader.dataset) is None else SizedRankStream
        # The dataset yields all samples of a batch together, because it decides where a batch ends.
        return replaced(loader, dataset=kind(loader, division), batch_sampler=None, paceline_whole=loader)
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batches: Any = getattr(loader, place)
    size, drop_last = (batches.batch_size, batches.drop_last) if cuts(batches) else (1, False)
    sampler = RankSampler(loader, divide(size=size, drop_last=drop_last))
    return replaced(loader, **{place: sampler}, paceline_whole=loader)


def _parts(division: Division, source: Any, seed: int | None, start: int = 0) -> Iterator[RoundShare]:
    """Yield this rank's share of ``source``, round by round. With a seed, ``source`` draws from private RNG states.

    The first ``start`` items, which must be full rounds, are skipped.
    """
    items = from_item(source, start) if seed is None else _privately(source, seed, division.round_size, start)
    try:
        yield from division.parts(items)
    finally:
        _close(items, source)


def _privately(source: Any, seed: int, at_once: int, start: int) -> Iterator[Any]:
    """Yield the items of ``source``, reading ``at_once`` items at a time with private RNG states."""
    states = PrivateRandomness(seed)
    with states:
        items = from_item(source, start)
    if type(items) in RUN_NOTHING:  # changing states costs 0.2 ms
        yield from items
        return
    try:
        while True:
            with states:
                found = list(islice(items, at_once))
            yield from found
            if len(found) < at_once:
                return
    finally:
        _close(items, source)


def _close(items: Iterator[Any], source: Any) -> None:
    if items is not source:  # the next epoch may continue reading an iterator that the user passed
        close_iterator(items)


def is_split(loader: Any) -> bool:
    """Return True if the loader is already split by process, either by its sampler or by its dataset."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterDataPipe):
        return True  # torch splits it at its sharding_filter
    if any(hasattr(one, "rank") and any(hasattr(one, name) for name in _RANKS) for one in samplers_of(loader)):
        return True
    if not isinstance(dataset, IterableDataset):
        return False
    if splits_shards(dataset):
        return True
    known = num_ranks_of(dataset)
    if known == 1 and counts_ranks_at_creation(dataset):
        raise ValueError(
            f"The {type(dataset).__name__} was created before this run's processes started. At that time, the dataset "
            "found only 1 rank, so every rank would read all of its samples. Create the dataset later: in "
            "train_dataloader() of the module or DataModule, or after you create the Accelerator."
        )
    return known is not None and known > 1


def _ending(loader: CombinedLoader) -> list[Any]:
    """Return the loaders that end, or may end, together with the combined loader."""
    total = length_of(loader)
    return [leaf for leaf in loader.flattened if total is None or length_of(leaf) == total]


def _note_all_read(source: Any, world: int) -> None:
    messages.info_once(
        f"Each of the {world} processes reads everything that {type(source).__name__} yields and keeps its own part, "
        "because an iterable dataset cannot be read in parts. To read less, split the dataset by rank yourself and "
        "pass Trainer(use_distributed_sampler=False) (with Accelerator, do not prepare its loader), or let one "
        "process read for all processes with DataLoaderConfiguration(dispatch_batches=True).",
        key="each process reads everything",
    )


def _from(owner: Any, place: str, name: str) -> Any:
    """Look up an attribute on the object that ``owner`` replaces; dunder names raise an AttributeError.

    Dunder names may be looked up before ``owner`` holds the object that it replaces.
    """
    if name.startswith("__"):
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    return getattr(vars(owner)[place], name)
