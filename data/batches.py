"""Iterate over a loader's batches for one epoch, optionally moving them to the device and fetching one ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import messages
from ..processes.device_transfer import ahead
from ..processes.seed import mixed
from .combined_loader import CombinedLoader, close_iterator
from .sample_order import can_jump, iterate, within_length
from .uneven_shards import Shard

if TYPE_CHECKING:
    from ..trainer.metrics import MetricStore

_END = object()


class Batches:
    """The batches of one epoch: the loader's batches from index ``skip`` up to ``limit``.

    Without ``move`` and ``lookahead``, iterating costs no Python call per batch, because ``iter()`` returns the
    loader's own iterator. Call :meth:`close` when done, even after an exception, so that worker processes exit at once.

    Args:
        loader: a DataLoader, a :class:`CombinedLoader` (only its batches, without indices) or any iterable.
        move: function that moves a batch to the device; None leaves batches where they are.
        lookahead: whether to fetch (and move) the next batch before the current one is yielded, so that it is known
            whether the current batch is the last. If fetching fails, the current batch is still yielded before the
            error is raised.
        limit: number of batches after which the epoch ends if the loader does not end earlier; ``inf`` means no limit.
            No batch is fetched past the limit or past the loader's length.
        agree: function for several processes whose loaders have no known length. It receives whether this process has a
            batch, and returns whether all processes have one. The epoch ends on all processes when it ends on one of
            them.
        skip: number of batches at the beginning of the epoch that have already been processed (they count toward
            ``limit``). A map-style DataLoader skips them without loading anything; other loaders fetch and discard
            them.
        seed: number that, combined with each batch's index, seeds the RNG states of workers that load by index; None
            keeps torch's seeding.
        remember: called before each batch that is fetched ahead; its result is stored in ``before_ahead``.
        prepare: with ``lookahead``, called before the first batch is fetched.

    Attributes:
        before_ahead: the result of the ``remember`` call that preceded fetching the next batch.
        exhausted: whether the most recent batch is known to be the last. Always False without ``lookahead``.
        left_over: whether the epoch ended while this process still had an unused batch.
    """

    __slots__ = (
        "_agree",
        "_iterator",
        "_limit",
        "_loader",
        "_lookahead",
        "_move",
        "_remember",
        "_seed",
        "_skip",
        "_source",
        "before_ahead",
        "exhausted",
        "left_over",
        "prepare",
    )

    def __init__(
        self,
        loader: Iterable[Any],
        move: Callable[[Any], Any] | None = None,
        lookahead: bool = False,
        limit: int | float = float("inf"),
        skip: int = 0,
        agree: Callable[[bool], bool] | None = None,
        seed: int | None = None,
        remember: Callable[[], Any] | None = None,
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        self._agree = agree
        self._loader = loader
        self._move = move
        self._lookahead = lookahead
        self._limit = limit
        self._skip = skip
        self._seed = seed
        self._remember = remember
        self.prepare = prepare
        self.before_ahead: Any = None
        self._source: Iterator[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self.exhausted = self.left_over = False

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self.exhausted = self.left_over = False
        self._iterator = self._start()
        return self._iterator

    def close(self) -> None:
        """Stop iterating: end the loader's worker processes (unless they are persistent) and close its generators."""
        iterator, source = self._iterator, self._source
        self._iterator = self._source = None
        if isinstance(iterator, Generator):
            iterator.close()
        if source is not None and source is not self._loader:
            close_iterator(source)

    def _start(self) -> Iterator[Any]:
        limited = self._limit != float("inf")
        if limited and self._skip >= self._limit:
            self.exhausted = True
            return iter(())
        source, dropped = self._open()
        self._source = source
        self._drop(source, dropped)  # done now, so that RNG states can be restored afterward
        if not isinstance(self._loader, CombinedLoader):
            source = within_length(self._loader, source, self._skip)
        if limited:
            source = islice(source, int(self._limit) - self._skip)
        if self._agree is not None:
            source = self._in_step(source, self._agree)
        if not self._lookahead:
            return source if self._move is None else map(self._move, source)
        side = ahead(self._move)
        move = side or self._move
        source = source if move is None else map(move, source)
        if self.prepare is not None:
            self.prepare()
        first = next(source, _END)
        self.exhausted = first is _END
        return self._one_ahead(first, source, side.ready if side else None)

    def _open(self) -> tuple[Iterator[Any], int]:
        """Return the loader's iterator and the number of its batches that still have to be discarded."""
        loader = self._loader
        if isinstance(loader, CombinedLoader):
            jumps = all(can_jump(leaf) for leaf in loader.flattened) and loader.counts_passes
            start = self._skip if jumps else 0
            return loader.batches(start, self._open_leaf), self._skip - start
        if self._skip and not can_jump(loader):
            return iterate(loader, 0, self._seed), self._skip
        return iterate(loader, self._skip, self._seed), 0

    def _open_leaf(self, leaf: Any, start: int, index: int, number: int) -> Iterator[Any]:
        return iterate(leaf, start, None if self._seed is None else mixed(self._seed, index, number))

    def _drop(self, source: Iterator[Any], count: int) -> None:
        """Fetch and discard the batches that have already been processed, and report how long that took."""
        if not count or isinstance(self._loader, (Sequence, Shard)):
            next(islice(source, count, count), None)
            return
        advice = (
            "Use a map-style dataset. To resume from a checkpoint, you can also use a loader (or, without workers, "
            "an iterable dataset) that has state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader."
        )
        if callable(getattr(self._loader, "state_dict", None)):
            advice = "This loader can resume only at a position that it saved itself, and it saved none for this epoch."
        begun = perf_counter()
        next(islice(source, count, count), None)
        messages.info_once(
            f"To start after batch {count} of the epoch, all batches up to it were loaded and discarded in "
            f"{perf_counter() - begun:.1f} s, because this {type(self._loader).__name__} cannot start in the middle "
            f"of an epoch. {advice}",
            key="batches thrown away",
        )

    def _in_step(self, source: Iterator[Any], agree: Callable[[bool], bool]) -> Iterator[Any]:
        """Yield batches as long as every process has a batch."""
        while agree((batch := next(source, _END)) is not _END):
            yield batch
        self.left_over = batch is not _END

    def _one_ahead(self, batch: Any, source: Iterator[Any], ready: Callable[[], None] | None) -> Iterator[Any]:
        while batch is not _END:
            if ready is not None:
                ready()
            if self._remember is not None:
                self.before_ahead = self._remember()
            try:
                following = next(source, _END)
            except Exception:
                yield batch
                raise
            if following is _END:
                self.exhausted = True
            yield batch
            batch = following


class StepIterator:
    """The iterator passed to steps that take ``dataloader_iter`` and fetch batches themselves.

    The loop iterates over this object, which yields itself once per step.

    Args:
        batches: the batches, which must use ``lookahead``, so that it is known whether a batch is the last.
        start: index of the first batch.
        metrics: object that receives each batch, because logged values are weighted by batch size.
        dataloader_idx: index of the loader among the loaders of an evaluation.

    Attributes:
        taken: number of batches fetched so far.
        last: the last fetched batch, its ``batch_idx`` and its ``dataloader_idx``; None and zeros before the first
            fetch.
    """

    def __init__(self, batches: Batches, start: int, metrics: MetricStore, dataloader_idx: int = 0) -> None:
        self._batches = batches
        self._start = start
        self._metrics = metrics
        self._dataloader_idx = dataloader_idx
        self.last: tuple[Any, int, int] = (None, 0, 0)
        self._iterator: Iterator[Any] = iter(())
        self.taken = 0

    @property
    def exhausted(self) -> bool:
        """Whether no batches are left."""
        return self._batches.exhausted

    def close(self) -> None:
        """Stop iterating."""
        self._batches.close()

    def __iter__(self) -> Iterator[StepIterator]:
        self._iterator = iter(self._batches)  # start fetching now, not with the first batch
        self.taken = 0
        return self._turns()

    def _turns(self) -> Iterator[StepIterator]:
        while not self.exhausted:
            yield self

    def __next__(self) -> tuple[Any, int, int]:
        batch = self._metrics.batch = next(self._iterator)
        self.taken += 1
        self.last = (batch, self._start + self.taken - 1, self._dataloader_idx)
        return self.last


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples in a batch: the length of its first tensor, or None if it has no tensor.

    Lists, tuples, mappings, dataclasses and other objects are searched in order; a tensor of shape () counts as 1. If
    an object has a ``batch_size`` (or ``num_graphs``) attribute, its value is used.
    """
    kind, first = type(batch), batch
    if kind is tuple or kind is list:
        first = batch[0] if batch else None
    elif kind is dict:
        first = next(iter(batch.values()), None)
    if isinstance(first, Tensor):
        return first.shape[0] if first.dim() else 1
    return next(_sizes(batch, set()), None)


def conflicting_sizes(batch: Any) -> tuple[int, ...]:
    """Return the distinct lengths of a batch's tensors, in order; an empty tuple if all tensors are equally long."""
    sizes = tuple(dict.fromkeys(_sizes(batch, set(), scalars=False)))
    return sizes if len(sizes) > 1 else ()


def _sizes(value: Any, seen: set[int], scalars: bool = True) -> Iterator[int]:
    """Yield the size of the first dimension of each tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value.shape[0]
        elif scalars:
            yield 1
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    own = _own_size(value)
    if own is not None:
        yield own
        return
    for part in _parts(value):
        yield from _sizes(part, seen, scalars)


def _own_size(value: Any) -> int | None:
    """Return the value of an object's batch size attribute, or None if there is no such attribute."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, (str, bytes, tuple, list)) or type(value) is dict:
        return None
    for name in ("num_graphs", "batch_size"):
        size = getattr(value, name, None)
        if isinstance(size, tuple) and size:
            size = size[0]
        if isinstance(size, int):
            return size
    return None


def _parts(value: Any) -> Iterable[Any]:
    """Return the entries of a container or the attributes of an object; empty if it cannot contain tensors."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, type) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).values())
