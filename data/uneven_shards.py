"""Arithmetic for splitting a stream among several processes, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple


class RoundShare(NamedTuple):
    """The items that one process takes from a stream in one round.

    Attributes:
        items: the items in the stream's order; never empty.
        share: weight of the mean over ``items`` in the mean over all processes. It is 1.0 if all processes took the
            same number of items, and 0.0 if the items are only repeats, added because other processes have items.
    """

    items: Sequence[Any]
    share: float


@dataclass(frozen=True)
class Division:
    """How a stream is divided. In each round, the processes take the next ``world * size`` items, in rank order.

    In training, the processes together take the same items, batch by batch, as one process with batches of
    ``world * size``. Items left at the end are spread evenly. A rank that gets none of these items repeats an earlier
    one with a share of 0, so that all ranks have the same number of batches.

    In evaluation, no item is counted twice. If the last round would have fewer items than there are ranks, the last two
    rounds are redistributed. If that is impossible (``size`` is 1, or there are fewer items than ranks), the ranks
    without items repeat an item with a share of 0.

    Attributes:
        rank: rank of this process.
        world: number of processes.
        size: maximum number of items that a process takes in a round.
        drop_last: whether every part must have exactly ``size`` items. In training, an incomplete last round is
            dropped; in evaluation, only the items that do not fill one process's share are dropped.
        evaluation: whether the evaluation rule applies.
        repeats: whether, in training, a rank that gets no items in the last round repeats an item. If False, such a
            rank has one batch fewer than the others.
    """

    rank: int
    world: int
    size: int
    drop_last: bool = False
    evaluation: bool = False
    repeats: bool = True

    @property
    def round_size(self) -> int:
        """The number of items in a full round."""
        return self.world * self.size

    def parts(self, items: Iterator[Any]) -> Iterator[RoundShare]:
        """Yield this rank's parts of a stream. The stream is read only as far as the next part requires."""
        take = _taker(items)
        chunk = take(self.round_size)
        while len(chunk) == self.round_size:
            following: list[Any] = []
            if self._may_balance():
                following = take(self.world)
                if 0 < len(following) < self.world:
                    both = chunk + following
                    yield RoundShare(self._spread(both[: -self.world]), 1.0)
                    yield RoundShare([both[self.rank - self.world]], 1.0)
                    return
            yield RoundShare(chunk[self.rank * self.size : (self.rank + 1) * self.size], 1.0)
            chunk = following + take(self.round_size - len(following))
        last = self._last(chunk)
        if last is not None:
            yield last

    def count(self, total: int) -> int:
        """Return the number of rounds in a stream of ``total`` items."""
        rounds, rest = divmod(total, self.round_size)
        return rounds + (self._last(range(rest)) is not None)

    def share(self, total: int) -> float:
        """Return the share of this rank's last part in a stream of ``total`` items."""
        rounds, rest = divmod(total, self.round_size)
        last = self._last(range(rest))
        if last is None or (rounds and rest < self.world and self._may_balance()):
            return 1.0
        return last.share

    def items(self, total: int) -> int:
        """Return the number of items, including a repeated one, that this rank takes from ``total`` items."""
        rounds, rest = divmod(total, self.round_size)
        if rounds and 0 < rest < self.world and self._may_balance():
            spread = self._spread(range(self.round_size + rest - self.world))
            return (rounds - 1) * self.size + len(spread) + 1
        last = self._last(range(rest))
        return rounds * self.size + (0 if last is None else len(last.items))

    def _may_balance(self) -> bool:
        return self.evaluation and self.size > 1 and not self.drop_last

    def _last(self, rest: Sequence[Any]) -> RoundShare | None:
        """Return this rank's share of an incomplete last round; None if there is no such round."""
        if self.drop_last:
            present = len(rest) // self.size if self.evaluation else 0
            own = min(self.rank, present - 1)
            share = 1.0 if self.rank < present else 0.0
            return RoundShare(rest[own * self.size : (own + 1) * self.size], share) if present else None
        if not rest:
            return None
        part = self._spread(rest)
        if not part:
            return RoundShare(rest[-1:], 0.0) if self.repeats else None
        return RoundShare(part, 1.0 if self.evaluation else len(part) * self.world / len(rest))

    def _spread(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's share of items that are spread evenly; the first ranks may get one item more."""
        low, larger = divmod(len(items), self.world)
        start = self.rank * low + min(self.rank, larger)
        return items[start : start + low + (self.rank < larger)]


class Shard:
    """Base class of objects that select one process's shard of a loader's data.

    Attributes:
        division: how the loader is divided.
        order_seed: seed for a sampler or dataset without its own generator; None means to use the process's random
            states.
        alike: whether worker processes must draw the same random numbers on all ranks, because each worker reads a full
            stream.
    """

    division: Division
    order_seed: int | None = None
    alike: bool = True


def _taker(items: Iterable[Any]) -> Callable[[int], list[Any]]:
    iterator = iter(items)
    return lambda count: list(islice(iterator, count))
