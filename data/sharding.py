"""Which samples a process sees when several read the same loader. :class:`Division` has the rules.

The processes neither talk to each other nor copy anything: each goes through the whole order, which is the same on all
of them, and loads only its own part. :func:`seed_shuffling` has to be called before each epoch, with the same numbers
on every process.

After an evaluation the outputs are in the data set's order round by round and, within a round, rank by rank; batches
that are :func:`surplus` are to be left out.
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
from .stream_sharding import Division, Part, Shard

#: Samplers whose order a generator of their own decides (or nothing), so that it is the same on every process.
_SELF_CONTAINED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

#: What iterable data sets keep that ask for the process's rank themselves: of Hugging Face, LitData and Mosaic.
_KNOWS_RANKS = ("_distributed", "distributed_env", "_unique_rank_world")


def shard_training(loader: Any, rank: int, world: int) -> Any:
    """Return a copy of a training loader that yields this process's part of the batches.

    ``world`` processes with batches of *b* see, batch by batch, what one process with batches of ``world * b`` sees,
    and all have the same number of batches. The last batches may differ in size by one sample: multiply the mean loss
    of the last by :func:`last_share`, and the mean over the processes is the mean over the samples. ``drop_last=True``
    drops what does not fill a batch of every process.

    Batches that are not made of a sampler's single samples (a custom ``batch_sampler``, ``batch_size=None``, a list of
    batches) are dealt whole, in turn. Other iterables stay as they are: they may be this process's part already.
    Workers that read an iterable data set each have a stream, and an end, of their own; only the end of the last one
    is weighed exactly.

    Args:
        loader: a DataLoader, a list of batches, or a ``CombinedLoader``, whose loaders are sharded one by one.
            What is split already (by a ``DistributedSampler``, for example) is returned as it is.
        rank: of this process.
        world: number of processes. With 1 the loader itself is returned.
    """
    return shard(loader, world, partial(Division, rank, world))


def shard_evaluation(loader: Any, rank: int, world: int) -> Any:
    """Return a copy of a loader that yields this process's part, every sample once over all processes.

    All processes have the same number of batches where that is possible; where it is not, the last batch of some is
    :func:`surplus`. Workers that read an iterable data set may give one process a batch more than another, each.
    ``drop_last=True`` leaves out what does not fill one batch, as it does on one process.

    Args:
        loader: as for :func:`shard_training`.
        rank: of this process.
        world: number of processes. With 1 the loader itself is returned.
    """
    return shard(loader, world, partial(Division, rank, world, evaluation=True))


def last_share(loader: Any) -> float:
    """What this process's mean over its last batch counts in the mean over all processes, as a factor: ``n * k / m``.

    1.0 where all have as many samples, 0.0 for a batch that is a repetition. It is of the batch that the loader itself
    ends with, not of one at which a limit cuts it off. Where the loader does not know its length it holds from the
    moment that this batch is fetched. Of a ``CombinedLoader``: that of the loaders which end with it if they agree,
    otherwise 1.0.
    """
    if isinstance(loader, CombinedLoader):
        shares = {last_share(leaf) for leaf in _ending(loader)}
        return shares.pop() if len(shares) == 1 else 1.0
    shard = shard_of(loader)
    return 1.0 if shard is None or shard.division.evaluation else shard.share


def repeats(loader: Any, number: int, last: bool) -> bool:
    """Whether a batch of the pass under way only repeats a sample that another process has.

    Args:
        loader: what :func:`shard_training` returned for a DataLoader.
        number: of the batch that was handed out last, 0-based.
        last: it is the last of the pass.
    """
    shard = shard_of(loader)
    if isinstance(shard, RankStream) and loader.num_workers > 1:
        return shard.share_of(number) == 0.0
    return last and last_share(loader) == 0.0


def surplus(loader: Any) -> bool:
    """Whether this process's last batch in an evaluation is only there because others have one.

    It repeats samples that another process has: run it without counting it, or skip it. Where the loader does not know
    its length this holds from the moment that the batch is fetched.
    """
    if isinstance(loader, CombinedLoader):
        ending = _ending(loader)
        return bool(ending) and all(surplus(leaf) for leaf in ending)
    shard = shard_of(loader)
    return shard is not None and shard.division.evaluation and shard.share == 0.0


def batch_indices(loader: Any) -> Iterator[list[Any]] | None:
    """The data set's indices of each batch of the coming pass, to be asked for once per batch; call it before the pass.

    None where they cannot be known: without a sampler, or on one process with samples that are not in order.
    """
    shard = shard_of(loader)
    if isinstance(shard, RankSampler):
        return shard.record()
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, SequentialSampler):
        return map(list, sampler)
    return None


class RankSampler(Shard, Sampler[Any]):
    """Takes the place of a loader's batch sampler (or sampler): this rank's part of what that one yields.

    Attributes of the sampler it stands for can be read through it.
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
        """As ``iter()``, from batch number ``count`` on."""
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
        """See :func:`last_share`."""
        total = length_of(self._items)
        return self._share if total is None else self.division.share(total)

    def record(self) -> Iterator[list[Any]]:
        """See :func:`batch_indices`."""
        records = self._records = deque()
        return iter(lambda: records.popleft() if records else None, None)


class RankStream(Shard, IterableDataset[Any]):
    """Takes the place of an iterable data set: this rank's part of its stream, batch by batch.

    In every worker it is that worker's stream that is shared. What else is read from or set on it goes to the data set.
    """

    def __init__(self, whole: DataLoader[Any], division: Division) -> None:
        ends = torch.zeros(max(whole.num_workers, 1), 2, dtype=torch.float64)
        vars(self).update(
            whole_dataset=whole.dataset,
            division=division,
            order_seed=None,
            _batched=whole.batch_size is not None,
            _workers=whole.num_workers,
            # By worker: batches so far, share of the last of them. Written where the stream is read.
            _ends=ends.share_memory_() if whole.num_workers else ends,
        )

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        end = self._ends[0 if worker is None else worker.id]
        end[0], end[1] = 0, 1
        seed = self.order_seed if worker is None else None  # a worker's random states are nobody else's
        for part, share in _parts(self.division, self.whole_dataset, seed):
            if share == 0 and self.division.evaluation and self._workers > 1:
                return  # only of the very last batch of a loader it could be told that it is surplus
            end[0] += 1
            end[1] = share
            yield list(part) if self._batched else part[0]

    def __getattr__(self, name: str) -> Any:
        return _from(self, "whole_dataset", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.whole_dataset, name, value)  # as a worker_init_fn does that splits the data set

    @property
    def share(self) -> float:
        """See :func:`last_share`."""
        total = length_of(self.whole_dataset) if self._workers < 2 else None
        if total is not None:
            return self.division.share(total)
        ends = list(enumerate(self._ends.tolist()))  # workers take turns: of those with most batches the last ends last
        return max(ends, key=lambda entry: (entry[1][0], entry[0]))[1][1]

    def share_of(self, number: int) -> float:
        """The share of batch ``number`` of the pass: that of a worker's last, if it is one, otherwise 1.0."""
        ends = self._ends.tolist()
        for worker, (count, share) in enumerate(ends):
            turns = [min(made, count - (other >= worker)) for other, (made, _) in enumerate(ends)]
            if count and sum(turns) == number:
                return share
        return 1.0


class SizedRankStream(RankStream):
    """A :class:`RankStream` of a data set that knows its length: samples of this rank."""

    def __len__(self) -> int:
        total, division = len(self.whole_dataset), self.division
        batches = division.count(total)
        return max(division.items(total), (batches - 1) * division.size + 1) if batches else 0


class RankIterable(Shard):
    """Takes the place of a list of batches: its batches in turn. What is read from it goes to that."""

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
        """See :func:`last_share`."""
        total = length_of(self.paceline_whole)
        return self._share if total is None else self.division.share(total)


def shard(loader: Any, world: int, divide: Callable[..., Division]) -> Any:
    """Return a copy of a loader that yields one process's part, as ``divide(size=, drop_last=)`` says."""
    if world == 1:
        return loader
    if isinstance(loader, CombinedLoader):
        clone = copy.copy(loader)
        clone.flattened = [shard(leaf, world, divide) for leaf in loader.flattened]
        return clone
    loader = whole_of(loader)  # what was sharded for training may have to be evaluated
    if is_split(loader):
        return loader
    if not isinstance(loader, (DataLoader, Sequence)):
        messages.info_once(
            f"{type(loader).__name__} is no DataLoader, so every one of the {world} processes gets all its batches: it "
            "may split them by rank itself. If it does not, let it yield each process's part, or pass a DataLoader or "
            "a list of batches."
        )
        return loader
    if not isinstance(loader, DataLoader):
        return RankIterable(loader, divide(size=1))
    if isinstance(loader.dataset, IterableDataset):
        _say_all_read(loader.dataset, world)
        division = divide(size=loader.batch_size or 1, drop_last=loader.drop_last)
        kind = RankStream if length_of(loader.dataset) is None else SizedRankStream
        # The data set yields the samples of a batch together, so that it decides where a batch ends.
        return replaced(loader, dataset=kind(loader, division), batch_sampler=None, paceline_whole=loader)
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batches: Any = getattr(loader, place)
    size, drop_last = (batches.batch_size, batches.drop_last) if cuts(batches) else (1, False)
    sampler = RankSampler(loader, divide(size=size, drop_last=drop_last))
    return replaced(loader, **{place: sampler}, paceline_whole=loader)


def _parts(division: Division, source: Any, seed: int | None, start: int = 0) -> Iterator[Part]:
    """This rank's parts of what ``source`` yields, which draws from random states of its own if a seed is given.

    The first ``start`` items, full rounds, are left out.
    """
    items = from_item(source, start) if seed is None else _privately(source, seed, division.round_size, start)
    try:
        yield from division.parts(items)
    finally:
        _close(items, source)


def _privately(source: Any, seed: int, at_once: int, start: int) -> Iterator[Any]:
    """What ``source`` yields, read so many items at a time under random states of their own."""
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
    if items is not source:  # an iterator that the user gave may be read on in the next epoch
        close_iterator(items)


def is_split(loader: Any) -> bool:
    """Whether each process has its own part already, by a sampler or a data set that knows of the processes."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterDataPipe):
        return True  # torch splits it at its sharding_filter
    if any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers_of(loader)):
        return True
    if not isinstance(dataset, IterableDataset):
        return False
    if any(getattr(dataset, name, None) is not None for name in _KNOWS_RANKS):
        return True
    processes = getattr(dataset, "num_replicas", None) or getattr(dataset, "world_size", None)
    return isinstance(processes, int) and processes > 1 and hasattr(dataset, "rank")


def _ending(loader: CombinedLoader) -> list[Any]:
    """The loaders that end when the whole does, or may do so."""
    total = length_of(loader)
    return [leaf for leaf in loader.flattened if total is None or length_of(leaf) == total]


def _say_all_read(source: Any, world: int) -> None:
    messages.info_once(
        f"Each of the {world} processes reads everything that {type(source).__name__} yields and keeps its own part, "
        "because something that can only be iterated over cannot be asked for a part. To read less, split it by rank "
        "yourself and pass Trainer(use_distributed_sampler=False) (in a loop of your own, do not prepare its loader), "
        "or let one process read for all with DataLoaderConfiguration(dispatch_batches=True).",
        key="each process reads everything",
    )


def _from(owner: Any, place: str, name: str) -> Any:
    """An attribute that ``owner`` lacks, of what it stands for. Special ones are looked for before it has that."""
    if name.startswith("__"):
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    return getattr(vars(owner)[place], name)
