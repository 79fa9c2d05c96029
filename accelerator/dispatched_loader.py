"""Loaders that are read only by process 0, which sends batches to the other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from ..data.batches import Batches, batch_size_of, conflicting_sizes
from ..data.uneven_shards import Division, Shard
from ..strategies.base import Strategy


class Handed(NamedTuple):
    """The message that a process receives in each round.

    Attributes:
        batch: the batch, or None if the pass has ended or reading failed.
        share: weight of the batch's mean in the mean across all processes; 0.0 if the batch only repeats another
            process's rows.
        over: whether the pass has ended.
        failure: the error text if reading failed, otherwise empty.
    """

    batch: Any = None
    share: float = 1.0
    over: bool = False
    failure: str = ""


class Dispatched(Shard):
    """A loader that is read only by process 0, which sends one batch to every process in each round.

    Batches may have different shapes, because they are never concatenated. If the last round has fewer batches than
    processes, the batches are split in order. A process that is left without rows gets a repeated row with weight 0.

    Args:
        loader: the loader that process 0 reads.
        split: whether to split each batch across processes.
    """

    alike = False

    def __init__(self, loader: Any, strategy: Strategy, split: bool) -> None:
        self.paceline_whole = loader
        self.strategy = strategy
        self.start = 0
        self.worker_seed: int | None = None
        self.share = 1.0
        self.division = Division(strategy.data_rank, strategy.num_data_ranks, 1)
        self._split = split
        self._per_round = 1 if split else strategy.num_data_ranks
        self._owners = strategy.gather_objects(strategy.data_rank)

    def __len__(self) -> int:
        batches, whole = len(self.paceline_whole), not self._drops_last()
        return (batches + (self._per_round - 1) * whole) // self._per_round

    def __iter__(self) -> Iterator[Any]:
        if self.strategy.global_rank:
            return self._hand_out(None)
        batches = Batches(self.paceline_whole, skip=self.start * self._per_round, seed=self.worker_seed)
        try:
            source = iter(batches)  # before the first batch, because skipping batches may draw random numbers
        except Exception as error:
            self._tell(error)
            raise
        return self._hand_out(self._read(batches, source))

    def _hand_out(self, reading: Iterator[list[Handed]] | None) -> Iterator[Any]:
        while not (handed := self._next(reading)).over:
            if handed.failure:
                raise RuntimeError(
                    f"Rank 0, which reads the data for all ranks (dispatch_batches=True), failed: {handed.failure}. "
                    "See rank 0's traceback for details."
                )
            self.share = handed.share
            yield handed.batch

    def _next(self, reading: Iterator[list[Handed]] | None) -> Handed:
        if reading is None:
            return self.strategy.scatter_objects(None)
        try:
            parts = next(reading, None) or [Handed(over=True)] * self.division.world
        except Exception as error:
            self._tell(error)
            raise
        return self.strategy.scatter_objects([parts[owner] for owner in self._owners])

    def _tell(self, error: Exception) -> None:
        """Send an error to the other processes, so that they fail too instead of waiting forever."""
        failed = Handed(failure=f"{type(error).__name__}: {error}")
        self.strategy.scatter_objects([failed] * len(self._owners))

    def _read(self, batches: Batches, source: Iterator[Any]) -> Iterator[list[Handed]]:
        world = self.division.world
        with closing(batches):
            while found := list(islice(source, self._per_round)):
                if len(found) < self._per_round and self._drops_last():
                    return
                yield deal(found, world, must_cut=self._split)

    def _drops_last(self) -> bool:
        loader = self.paceline_whole
        return bool(getattr(loader, "drop_last", False) or getattr(loader.batch_sampler, "drop_last", False))


def deal(batches: list[Any], world: int, must_cut: bool = False) -> list[Handed]:
    """Distribute up to ``world`` batches to ``world`` processes in order; split the batches if there are too few."""
    count, parts = len(batches), []
    for index, batch in enumerate(batches):
        pieces = (index + 1) * world // count - index * world // count
        parts += [(batch, _rows(batch) or 1)] if pieces == 1 else cut(batch, pieces, must_cut)
    total = sum(rows for _, rows in parts)
    return [Handed(batch, rows * world / total) for batch, rows in parts]


def cut(batch: Any, pieces: int, must: bool = False) -> list[tuple[Any, int]]:
    """Split a batch into parts whose sizes differ by at most 1; return each part with its number of real rows.

    A part that would be empty repeats the last row and has 0 real rows. A batch whose tensors differ in the size of the
    first dimension is not split. Instead, each part is the entire batch, and counts as 1 row in the first part and as 0
    rows in the others.
    """
    rows = _rows(batch)
    if rows is None and must:
        raise ValueError(
            f"split_batches=True splits every batch into {pieces} parts, but this batch ({type(batch).__name__}) "
            "contains no tensors, or tensors that differ in the size of the first dimension. Leave out "
            "split_batches so that each process gets full batches."
        )
    if not rows:
        return [(batch, 1)] + [(batch, 0)] * (pieces - 1)
    parts = []
    for rank in range(pieces):
        low, larger = divmod(rows, pieces)
        start = rank * low + min(rank, larger)
        taken = low + (rank < larger)
        piece = slice(start, start + taken) if taken else slice(rows - 1, rows)
        parts.append((_slice(batch, piece, rows), taken))
    return parts


def _rows(batch: Any) -> int | None:
    return None if conflicting_sizes(batch) else batch_size_of(batch)


def _slice(value: Any, piece: slice, rows: int) -> Any:
    """Return the given rows of every tensor, and of every list with one entry per row."""
    if isinstance(value, Tensor):
        return value[piece] if value.dim() else value
    if isinstance(value, Mapping):
        return type(value)({key: _slice(entry, piece, rows) for key, entry in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(isinstance(entry, (Tensor, Mapping, list, tuple)) for entry in value):
            return value[piece]
        entries = [_slice(entry, piece, rows) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value
