"""The arithmetic of several processes reading one stream: which part of it each takes, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple


class Part(NamedTuple):
    """What one process takes in one round.

    Attributes:
        items: in the stream's order; never empty.
        share: what the mean over ``items`` counts in the mean over all processes. 1.0 if all took as many, 0.0 if the
            items are only there because the others have some.
    """

    items: Sequence[Any]
    share: float


@dataclass(frozen=True)
class Division:
    """How a stream is divided. In a round the processes together take the next ``world * size`` items, in rank order.

    Training: one process with batches of ``world * size`` would see the same, batch by batch. What is left at the end
    is spread evenly. A rank that gets nothing of it repeats an item, with a share of 0, so that all ranks have as many
    batches.

    Evaluation: no item twice. If the last round had fewer items than there are ranks, the two last rounds share theirs.
    Where that is impossible (``size`` 1, or fewer items than ranks altogether) the rest of the ranks repeat an item,
    with a share of 0.

    Attributes:
        rank: of this process.
        world: number of processes.
        size: most items that a process takes in a round.
        drop_last: every part has exactly ``size`` items. Training leaves out a last round that is not full, evaluation
            what does not fill one process's part.
        evaluation: which of the two rules holds.
        repeats: False: in training too, a rank that gets nothing of the last round has a batch less than the others.
    """

    rank: int
    world: int
    size: int
    drop_last: bool = False
    evaluation: bool = False
    repeats: bool = True

    @property
    def round_size(self) -> int:
        """Items in a full round."""
        return self.world * self.size

    def parts(self, items: Iterator[Any]) -> Iterator[Part]:
        """The parts of this rank, out of a stream that is read as far as needed to know the next one."""
        take = _taker(items)
        chunk = take(self.round_size)
        while len(chunk) == self.round_size:
            following: list[Any] = []
            if self._may_balance():
                following = take(self.world)
                if 0 < len(following) < self.world:
                    both = chunk + following
                    yield Part(self._spread(both[: -self.world]), 1.0)
                    yield Part([both[self.rank - self.world]], 1.0)
                    return
            yield Part(chunk[self.rank * self.size : (self.rank + 1) * self.size], 1.0)
            chunk = following + take(self.round_size - len(following))
        last = self._last(chunk)
        if last is not None:
            yield last

    def count(self, total: int) -> int:
        """Rounds in a stream of ``total`` items."""
        rounds, rest = divmod(total, self.round_size)
        return rounds + (self._last(range(rest)) is not None)

    def share(self, total: int) -> float:
        """The share of the last part in a stream of ``total`` items."""
        rounds, rest = divmod(total, self.round_size)
        last = self._last(range(rest))
        if last is None or (rounds and rest < self.world and self._may_balance()):
            return 1.0
        return last.share

    def items(self, total: int) -> int:
        """How many items this rank takes (a repeated one included) of a stream of ``total``."""
        rounds, rest = divmod(total, self.round_size)
        if rounds and 0 < rest < self.world and self._may_balance():
            spread = self._spread(range(self.round_size + rest - self.world))
            return (rounds - 1) * self.size + len(spread) + 1
        last = self._last(range(rest))
        return rounds * self.size + (0 if last is None else len(last.items))

    def _may_balance(self) -> bool:
        return self.evaluation and self.size > 1 and not self.drop_last

    def _last(self, rest: Sequence[Any]) -> Part | None:
        """This rank's part of a last round that is not full, None if there is no such round."""
        if self.drop_last:
            present = len(rest) // self.size if self.evaluation else 0
            own = min(self.rank, present - 1)
            share = 1.0 if self.rank < present else 0.0
            return Part(rest[own * self.size : (own + 1) * self.size], share) if present else None
        if not rest:
            return None
        part = self._spread(rest)
        if not part:
            return Part(rest[-1:], 0.0) if self.repeats else None
        return Part(part, 1.0 if self.evaluation else len(part) * self.world / len(rest))

    def _spread(self, items: Sequence[Any]) -> Sequence[Any]:
        """This rank's part of items that are spread over all ranks: sizes differ by at most 1, larger ones first."""
        low, larger = divmod(len(items), self.world)
        start = self.rank * low + min(self.rank, larger)
        return items[start : start + low + (self.rank < larger)]


class Shard:
    """Base of what stands in a loader for one process's part of it.

    Attributes:
        division: how it is divided.
        order_seed: what is drawn from where a sampler or data set has no generator of its own; None for the random
            states of the process.
        alike: worker processes must draw the same on all ranks, since each reads a whole stream.
    """

    division: Division
    order_seed: int | None = None
    alike: bool = True


def _taker(items: Iterable[Any]) -> Callable[[int], list[Any]]:
    iterator = iter(items)
    return lambda count: list(islice(iterator, count))
