"""Combine several loaders and iterate over them together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, count, islice, repeat, zip_longest
from numbers import Number
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader

from .. import messages
from ..torch_private import forget_iterator, running_iterator, shut_down_workers
from .sample_order import iterate, length_of, pass_over, within_length

Mode = Literal["min_size", "max_size", "max_size_cycle", "sequential"]
Limit = int | float | None
MODES: tuple[str, ...] = ("min_size", "max_size", "max_size_cycle", "sequential")

#: ``open(loader, start, index, number)`` returns an iterator over a loader from batch ``start``, for pass ``number``.
Open = Callable[[Any, int, int, int], Iterator[Any]]
Build = Callable[[Sequence[Any]], Any]


class CombinedLoader:
    """Iterates over several loaders together and yields ``(batch, batch_idx, dataloader_idx)``.

    Except in ``"sequential"`` mode, a batch has the structure of ``iterables``, with a batch in place of each loader,
    and ``dataloader_idx`` is 0.

    * ``"min_size"``: ends when the shortest loader ends.
    * ``"max_size"``: ends when the longest loader ends; loaders that ended earlier yield None.
    * ``"max_size_cycle"``: ends when the longest loader ends; shorter loaders start over.
    * ``"sequential"``: one loader after the other; ``batch_idx`` restarts with each loader, and ``dataloader_idx`` is
      the loader's index.

    Args:
        iterables: a loader, or lists, tuples, mappings and dataclasses of loaders, nested to any depth. A list that
            contains no loaders counts as a single loader, namely a list of batches.
        mode: how to combine the loaders.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            raise ValueError(messages.unknown("CombinedLoader mode", mode, MODES))
        self._mode: Mode = mode
        self._flattened: list[Any] = []
        self._build = _compile(iterables, self._flattened, "iterables", outermost=True)
        self._limits: list[int | float] | None = None

    @property
    def mode(self) -> Mode:
        """How the loaders are combined."""
        return self._mode

    @property
    def iterables(self) -> Any:
        """The loaders, in the structure in which they were passed."""
        return self._build(self._flattened)

    @property
    def flattened(self) -> list[Any]:
        """The loaders in order. Setting this property replaces the loaders and keeps the structure."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: Sequence[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.flattened was set to a different number of loaders ({len(loaders)} instead of "
                f"{len(self._flattened)}). Pass the same number of loaders, or create a new CombinedLoader."
            )
        self._flattened = list(loaders)

    @property
    def limits(self) -> list[int | float] | None:
        """The maximum number of batches per pass over each loader; None means all. One number applies to every loader.

        In ``"max_size_cycle"`` mode, a shorter loader starts over at its limit.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: Limit | Sequence[int | float]) -> None:
        if limits is None:
            self._limits = None
            return
        values = list(limits) if isinstance(limits, Sequence) else [limits] * len(self._flattened)
        if len(values) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.limits={values} does not have one entry per loader ({len(values)} instead of "
                f"{len(self._flattened)}). Set a single number for all loaders, or one number for each loader."
            )
        if any(value < 0 for value in values):
            raise ValueError(f"CombinedLoader.limits={values} has a negative entry. Use 0 or more, or float('inf').")
        self._limits = values

    @property
    def sampler(self) -> Any:
        """Each loader's sampler (None if it has none), in the structure of ``iterables``."""
        return self._build([getattr(loader, "sampler", None) for loader in self._flattened])

    @property
    def batch_sampler(self) -> Any:
        """Each loader's batch sampler (None if it has none), in the structure of ``iterables``."""
        return self._build([getattr(loader, "batch_sampler", None) for loader in self._flattened])

    def __len__(self) -> int:
        lengths = self._lengths()
        if None in lengths:
            index = lengths.index(None)
            raise TypeError(
                f"The length of this CombinedLoader is unknown, because loader {index} "
                f"({type(self._flattened[index]).__name__}) has no __len__. The loader's entry in `limits` is only "
                "an upper bound. If you need the length, define __len__ in the loader."
            )
        known = [length for length in lengths if length is not None]
        if self._mode == "sequential":
            return sum(known)
        return min(known, default=0) if self._mode == "min_size" else max(known, default=0)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self._mode != "sequential":
            return zip(self.batches(), count(), repeat(0))
        passes = (zip(_closing(self._limited(index)), count(), repeat(index)) for index in range(len(self._flattened)))
        return chain.from_iterable(passes)

    @property
    def counts_passes(self) -> bool:
        """Whether each loader's pass and position can be computed from the number of batches."""
        return self._mode in ("min_size", "max_size") or (
            self._mode == "max_size_cycle" and None not in self._lengths() and 0 not in self._lengths()
        )

    def batches(self, start: int = 0, open_leaf: Open | None = None) -> Iterator[Any]:
        """Iterate over the combined batches without the indices.

        Args:
            start: number of batches to skip at the beginning; must be 0 unless :attr:`counts_passes` is True.
            open_leaf: ``open_leaf(loader, start, index, number)`` returns the iterator for a loader's pass ``number``,
                starting at batch ``start``.
        """
        if self._mode == "sequential":
            return self._one_by_one()
        passes = [_Pass(self, index, start, open_leaf) for index in range(len(self._flattened))]
        return self._side_by_side(passes, start)

    def _one_by_one(self) -> Iterator[Any]:
        for index in range(len(self._flattened)):
            yield from _closing(self._limited(index))

    def _side_by_side(self, passes: list[_Pass], start: int) -> Iterator[Any]:
        build = self._build
        try:
            for parts in self._parts(passes, start):
                yield build(parts)
        finally:
            for one in passes:
                close_iterator(one.iterator)

    def reset(self) -> None:
        """Stop earlier iterations and shut down persistent workers."""
        for loader in self._flattened:
            end_persistent_workers(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loaders, with None for each loader that has no ``state_dict``."""
        return {
            "loaders": [loader.state_dict() if hasattr(loader, "state_dict") else None for loader in self._flattened]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. The loaders must be the same, in the same order."""
        states = state_dict["loaders"]
        if len(states) != len(self._flattened):
            raise ValueError(
                f"The state is from a CombinedLoader with a different number of loaders ({len(states)} instead of "
                f"{len(self._flattened)}). Create the CombinedLoader with the same loaders as the saved one."
            )
        for loader, state in zip(self._flattened, states, strict=True):
            if state is not None:
                loader.load_state_dict(state)

    def _limit(self, index: int) -> int | None:
        if self._limits is None or self._limits[index] == float("inf"):
            return None
        return int(self._limits[index])

    def _lengths(self) -> list[int | None]:
        """Return the number of batches in a pass over each loader; None if unknown."""
        lengths = []
        for index, loader in enumerate(self._flattened):
            length, limit = length_of(loader), self._limit(index)
            lengths.append(length if length is None or limit is None else min(length, limit))
        return lengths

    def _limited(self, index: int) -> tuple[Iterator[Any], Iterator[Any]]:
        """Start a pass over a loader; return an iterator to read, which ends at the limit, and an iterator to close."""
        loader = self._flattened[index]
        iterator = iterate(loader)
        return islice(within_length(loader, iterator), self._limit(index)), iterator

    def _parts(self, passes: list[_Pass], start: int) -> Iterator[Sequence[Any]]:
        """Iterate over the steps, yielding the batches of all loaders for each step."""
        if self._mode == "max_size_cycle":
            return self._cycled(passes, start)
        sources = [one.source for one in passes]
        return zip(*sources) if self._mode == "min_size" else zip_longest(*sources)  # noqa: B905

    def _cycled(self, passes: list[_Pass], start: int) -> Iterator[Sequence[Any]]:
        lengths = self._lengths()
        total = max((length for length in lengths if length is not None), default=0)
        unread = {index for index, one in enumerate(passes) if one.number == 0}  # loaders that have not ended yet
        steps = range(start, total) if None not in lengths else count()
        for _ in steps:
            parts = [next(one.source, _END) for one in passes]
            ended = [index for index, part in enumerate(parts) if part is _END]
            unread.difference_update(ended)
            if not unread:
                return
            for index in ended:
                parts[index] = passes[index].start_over()
            yield parts


class _Pass:
    """A pass over one loader. Read ``source``, which ends at the limit, and close ``iterator`` afterward."""

    def __init__(self, combined: CombinedLoader, index: int, start: int, open_leaf: Open | None) -> None:
        self.combined, self.index = combined, index
        self.loader, self.limit = combined.flattened[index], combined._limit(index)
        self.open_leaf = open_leaf
        length = combined._lengths()[index]
        self.number, rest = 0, start
        if start and length and combined.mode == "max_size_cycle":
            # A fully read pass ends only when its next batch is due, after the other loaders have yielded theirs.
            self.number, rest = divmod(start - 1, length)
            rest += 1
        for number in range(self.number):
            pass_over(self.loader, number == 0, self.limit)
        self.open(rest)

    def open(self, start: int) -> None:
        loader, limit = self.loader, self.limit
        self.iterator = (
            iterate(loader) if self.open_leaf is None else self.open_leaf(loader, start, self.index, self.number)
        )
        inside = within_length(loader, self.iterator, start)
        self.source = inside if limit is None else islice(inside, max(limit - start, 0))

    def start_over(self) -> Any:
        """Start a new pass and return its first batch."""
        close_iterator(self.iterator)
        self.number += 1
        self.open(0)
        part = next(self.source, _END)
        if part is _END:
            raise ValueError(
                f"Loader {self.index} ({type(self.loader).__name__}) of this CombinedLoader ended before the longest "
                "loader and yielded no batches when restarted. An empty loader, or an iterator that can be read only "
                "once, cannot cycle. Pass a DataLoader or a list, or use mode='max_size' or 'min_size'."
            )
        return part


_END = object()


def is_loader(value: Any) -> bool:
    """Return True if a value is a loader: a DataLoader, or an iterable that cannot be a batch or a part of one."""
    if isinstance(value, (DataLoader, CombinedLoader)):
        return True
    if isinstance(value, (type, str, bytes, Number, Sequence, Mapping, Set, Tensor)):
        return False
    return hasattr(value, "__iter__") and not hasattr(value, "__array__") and not hasattr(value, "to")


def holds_loaders(value: Any) -> bool:
    """Return True if a list, tuple, mapping or dataclass contains a loader, at any depth."""
    return any(is_loader(entry) or holds_loaders(entry) for entry in _entries(value))


def close_iterator(iterator: Iterator[Any]) -> None:
    """Stop an unfinished iterator: close a generator, or shut down a DataLoader's non-persistent workers."""
    if isinstance(iterator, Generator):
        iterator.close()
    else:
        shut_down_workers(iterator)


def end_persistent_workers(loader: Any) -> None:
    """Shut down any worker processes that a loader keeps for its next pass. That pass then starts new workers.

    If workers were left to the garbage collector, each would take five seconds to exit, because torch first closes the
    queues through which it tells workers to exit (torch 2.13, ``_MultiProcessingDataLoaderIter._shutdown_workers``).
    """
    if isinstance(loader, DataLoader) and (running := running_iterator(loader)) is not None:
        forget_iterator(loader)
        shut_down_workers(running, persistent=True)


def _closing(limited: tuple[Iterator[Any], Iterator[Any]]) -> Iterator[Any]:
    source, iterator = limited
    try:
        yield from source
    finally:
        close_iterator(iterator)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_loader(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _compile(value: Any, leaves: list[Any], path: str, outermost: bool = False) -> Build:
    """Collect a structure's loaders in ``leaves``; return a function that puts one value in place of each loader."""
    is_container = isinstance(value, (list, tuple, Mapping)) or bool(_entries(value))
    ranges = any(type(entry) is range for entry in _entries(value))  # a range is a loader, and never a batch
    if not is_container or not (outermost or ranges or holds_loaders(value)):
        return _compile_leaf(value, leaves, path)
    if isinstance(value, Mapping):
        builds = {key: _compile(entry, leaves, f"{path}[{key!r}]") for key, entry in value.items()}
        return lambda parts: _like(value, {key: build(parts) for key, build in builds.items()})
    if isinstance(value, (list, tuple)):
        items = [_compile(entry, leaves, f"{path}[{index}]") for index, entry in enumerate(value)]
        make = getattr(type(value), "_make", type(value))
        return lambda parts: make([build(parts) for build in items])
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: _compile(getattr(value, name), leaves, f"{path}.{name}") for name in names}
    return lambda parts: _with_fields(value, {name: build(parts) for name, build in fields.items()})


def _compile_leaf(value: Any, leaves: list[Any], path: str) -> Build:
    iterable = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if not iterable or isinstance(value, (str, bytes, Mapping, type)):
        raise TypeError(
            f"CombinedLoader: {path} is {value!r} ({type(value).__name__}), which is not a loader. Pass a DataLoader "
            "or another iterable of batches."
        )
    index = len(leaves)
    leaves.append(value)
    return lambda parts: parts[index]


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return ``values`` as a mapping of the same type as ``mapping``."""
    if type(mapping) is dict:
        return values
    result: Any = copy.copy(mapping)
    for key, value in values.items():
        result[key] = value
    return result


def _with_fields(instance: Any, values: dict[str, Any]) -> Any:
    result = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result
