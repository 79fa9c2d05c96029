"""One epoch's batches out of a loader, moved to the device and fetched one ahead where that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import messages
from ..processes.device_transfer import ahead
from ..processes.seed import mixed
from .combined_loader import CombinedLoader, close_iterator
from .sample_order import can_jump, iterate, within_length
from .stream_sharding import Shard

_END = object()


class Batches:
    """The batches of one epoch: those of ``loader`` from number ``skip`` up to number ``limit``.

    Without ``move`` and ``lookahead`` iterating costs no Python call a batch: ``iter()`` hands out the loader's own
    iterator. :meth:`close` it when done, also after an exception, so that worker processes end at once.

    Args:
        loader: a DataLoader, a :class:`CombinedLoader` (only its batches, without indices) or any iterable.
        move: brings a batch to the device; None if there is nothing to do.
        lookahead: fetch (and move) a batch before the one in front of it is handed out, so that the last one is known
            as such. If fetching fails, the batch in front of it is handed out first.
        limit: where the epoch ends if the loader does not end before; ``inf`` for nowhere. Nothing is fetched past it,
            nor past the loader's length.
        agree: with several processes whose loaders do not say how long they are: whether all of them have a batch.
            The epoch ends for all when it ends for one; needs ``lookahead``.
        skip: how many batches at the beginning were done already (they count towards ``limit``). A map-style
            DataLoader jumps over them without loading anything, other loaders fetch and drop them.
        seed: what workers that load by index seed their random states from, with the number of each batch; None leaves
            them as torch makes them.
        remember: called before each batch that is fetched ahead; what it returns is kept in ``before_ahead``.
        prepare: called before the first batch is fetched, with ``lookahead``.

    Attributes:
        before_ahead: what ``remember`` returned before the batch that waits behind the one handed out was fetched.
        exhausted: whether the batch handed out last is known to be the final one. Stays False without ``lookahead``.
        left_over: the epoch ended although this process had another batch.
    """

    __slots__ = (
        "_agree",
        "_iterator",
        "_limit",
        "_loader",
        "_lookahead",
        "_move",
        "_prepare",
        "_remember",
        "_seed",
        "_skip",
        "_source",
        "before_ahead",
        "exhausted",
        "left_over",
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
        self._prepare = prepare
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
        """Let go of what a half-read pass holds: worker processes (unless they are persistent), open generators."""
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
        self._drop(source, dropped)  # at once, so that random states can be restored after it
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
        if self._prepare is not None:
            self._prepare()
        first = next(source, _END)
        self.exhausted = first is _END
        return self._one_ahead(first, source, side.ready if side else None)

    def _open(self) -> tuple[Iterator[Any], int]:
        """The loader's iterator, and how many of its batches remain to be dropped."""
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
        """Fetch batches that were done already, and say what that costs."""
        if not count or isinstance(self._loader, (Sequence, Shard)):
            next(islice(source, count, count), None)
            return
        begun = perf_counter()
        next(islice(source, count, count), None)
        messages.info_once(
            f"Continuing at batch {count} of the epoch: {count} batches were loaded and thrown away to get there, "
            f"which took {perf_counter() - begun:.1f} s, because a {type(self._loader).__name__} of this kind cannot "
            "start in the middle. A map-style data set can, and so can a loader (or, without workers, an iterable "
            "data set) that has state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader.",
            key="batches thrown away",
        )

    def _in_step(self, source: Iterator[Any], agree: Callable[[bool], bool]) -> Iterator[Any]:
        """The batches for as long as every process has one."""
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


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples in a batch: the first dimension of the first tensor in it, None if there is none.

    Lists, tuples, mappings, dataclasses and other objects are searched in order; a tensor of shape () counts as 1. An
    object that says its own ``batch_size`` (or ``num_graphs``) is believed.
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
    """Return the different first dimensions of a batch's tensors if they differ, in order; otherwise an empty tuple."""
    sizes = tuple(dict.fromkeys(_sizes(batch, set(), scalars=False)))
    return sizes if len(sizes) > 1 else ()


def _sizes(value: Any, seen: set[int], scalars: bool = True) -> Iterator[int]:
    """First dimensions of the tensors in ``value``, in order."""
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
    """The size that an object states itself."""
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
    """What a container or an object is made of; nothing for everything that cannot hold tensors of a batch."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, type) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).values())
