"""Step values that all processes share: ``self.log(..., on_step=True, sync_dist=True)``.

The processes reduce values at two fixed points in every batch: after the step (before the end-of-batch hooks), and
after those hooks, for the values that the hooks logged. At the first batch, they agree on whether a point is needed at
all, so a run without such values has no further cost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import messages
from .metric_reductions import reduction_of

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .metric_reductions import Record

#: Number of elements in the first vector that is reduced; the same on every process, whatever it logged.
ROOM = 64
#: Number of elements before the values. They are 1 (0 from a process that only keeps step), the number of sums, the
#: number of extremes, two checksums of the names, each with its square, and the weight of this process's means. The
#: sums of the checksums show whether all of them are equal.
HEADER = 8


class Sharing:
    """A point (``where``) in each batch of a loader at which processes share values if ``used`` is True.

    Attributes:
        active: True if the processes share values here, or have not yet agreed whether to do so.
        muted: whether this process contributes no values to the next reduction, because its batch is only padding.
        pending: the records updated since the last reduction, by key.
    """

    def __init__(self, strategy: Strategy, where: str, used: bool) -> None:
        self.strategy, self.where = strategy, where
        self.active = used and strategy.world_size > 1
        self.muted = False
        self.pending: dict[str, Record] = {}
        self._agreed = self._late = False
        self._groups: dict[str, Any] = {}

    def add(self, record: Record) -> None:
        """Share a record's values at this point in every batch, if the user requested ``sync_dist``."""
        options, group = record.options, record.options.sync_dist_group
        asked = record.on_step and options.sync_dist and not options.rank_zero_only
        if record.together or not asked or self.strategy.world_size == 1:
            return
        if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            return
        record.together = True
        self._late |= self._agreed and group is None and "" not in self._groups
        self._groups[_name(group)] = group
        self.active = True
        take, pending = record.update, self.pending

        def update(value: Any, batch_size: int | None) -> None:
            take(value, batch_size)
            pending[record.key] = record

        record.update = update

    def waiting(self, record: Record) -> bool:
        """Return True if a record's value is yet to be shared here, with all processes."""
        return self.pending.get(record.key) is record and record.options.sync_dist_group is None

    def wait(self, record: Record) -> None:
        """Share a record's value that was :meth:`waiting` when the checkpoint was saved."""
        self.add(record)
        self.pending[record.key] = record

    def share(self, counts: bool = True, weight: float = 1.0) -> None:
        """Reduce the values logged since the last reduction; every process must call this after each of its batches.

        This process's values are included only if ``counts`` is True and ``self.muted`` is False; ``weight`` is the
        weight of this process's means in the reduction. Raises ValueError if the processes logged different names.
        """
        counts = counts and not self.muted
        self.muted = False
        if self._settled():
            by_group: dict[str, dict[str, Record]] = {name: {} for name in self._groups}
            for key, record in sorted(self.pending.items()):
                by_group[_name(record.options.sync_dist_group)][f"{_op(record)} {key}"] = record
            for name in sorted(by_group):
                self._reduce(self._groups[name], by_group[name], counts, weight)
        self.pending.clear()

    def idle(self, groups: list[str] | None) -> list[str]:
        """Take part in the reductions of ``groups`` (by default, all) without values; return those that had some."""
        self.pending.clear()
        if not self.active or not self._settled():
            return []
        groups = sorted(self._groups) if groups is None else groups
        return [name for name in groups if self._reduce(self._groups[name], {}, False)]

    def _settled(self) -> bool:
        """Return True if the processes share values here.

        The processes decide this at the first batch. If they start to share values only later, all of them must start
        in the same batch.
        """
        if not self._agreed:
            self._agreed = True
            if self.strategy.agree("" in self._groups):
                self._groups[""] = None
            self.active = bool(self._groups)
        elif self._late:
            self._late = False
            names = messages.names(sorted(self.pending), "and")
            if not self.strategy.same("step values", f"self.log({names}, sync_dist=True), here for the first time"):
                raise self._unlike(None, [f"{_op(record)} {key}" for key, record in self.pending.items()])
        return self.active

    def _reduce(self, group: Any, records: dict[str, Record], counts: bool, weight: float = 1.0) -> bool:
        """Reduce records across a group and store the results in them; return whether any process had values."""
        strategy, device = self.strategy, self.strategy.device
        sums = [r for r in records.values() if _op(r) in ("mean", "sum")]
        extremes = [r for r in records.values() if _op(r) in ("min", "max")]
        first, second = _checksums(records)
        room = torch.zeros(ROOM, dtype=torch.float64, device=device)
        values = room[:0]
        if counts:
            header = [1, len(sums), len(extremes), first, first**2, second, second**2, weight]
            values = _stacked(sums, device)
            if weight != 1.0:
                values = values * values.new_tensor([weight if _op(record) == "mean" else 1.0 for record in sums])
            room[:HEADER] = torch.tensor(header, dtype=torch.float64)
            room[HEADER : HEADER + len(sums)] = values[: ROOM - HEADER]
        room = strategy.reduce(room, "sum", group)
        *header, weights = room[:HEADER].tolist()
        found = [round(number) for number in header]
        processes = found[0]
        if any(processes * found[at + 1] != found[at] ** 2 for at in (3, 5)):
            raise self._unlike(group, list(records) if counts else None)
        if not processes:
            return False
        alike = [number // processes for number in found]
        shows = counts or (first, second) == (alike[3], alike[5])  # without values, only if it logs the same names
        shared = room[HEADER : HEADER + alike[1]]
        more = alike[1] - len(shared)
        if more:
            rest = values[ROOM - HEADER :] if counts else room.new_zeros(more)
            shared = torch.cat([shared, strategy.reduce(rest, "sum", group)])
        if shows:
            times = strategy.world_size / strategy.num_data_ranks  # how many times a sum counts the same data
            _give(sums, shared, [times if _op(record) == "sum" else weights for record in sums])
        if alike[2]:
            signs = [1.0 if _op(record) == "max" else -1.0 for record in extremes]
            most = room.new_full((alike[2],), -math.inf)
            if counts:
                most = _stacked(extremes, device) * room.new_tensor(signs)
            most = strategy.reduce(most, "max", group)
            if shows:
                _give(extremes, most, signs)
        return True

    def _unlike(self, group: Any, mine: list[str] | None) -> ValueError:
        """Return the error for names that only some processes logged; every process must call this."""
        found: list[Any] = self.strategy.gather_objects(("step values", mine), group)
        ranks = range(len(found)) if group is None else torch.distributed.get_process_group_ranks(group)
        have: dict[int, set[str]] = {}
        for rank, said in zip(ranks, found, strict=True):
            here = isinstance(said, tuple) and said[0] == "step values"  # otherwise, that rank gathers other data
            if not here or said[1] is not None:
                have[rank] = set(said[1]) if here else set()
        parts = []
        for label in sorted(set[str]().union(*have.values())):
            op, _, name = label.partition(" ")
            there = [rank for rank, names in have.items() if label in names]
            missing = [rank for rank, names in have.items() if rank not in there]
            if missing:
                parts.append(
                    f"{name!r} (reduce_fx={op!r}) on {messages.ranks(there)}, not on {messages.ranks(missing)}"
                )
        return ValueError(
            f"self.log(..., sync_dist=True) must log the same names on every rank in each batch, but {self.where} "
            f"logged {'; '.join(parts)}. Log the same names on all ranks, or pass sync_dist=False (each rank keeps its "
            "own value) or rank_zero_only=True (only rank 0 logs it)."
        )


def stand_by(places: Iterable[Sharing]) -> None:
    """Join the other processes' reductions, but contribute no values, because this batch is only padding."""
    for place in places:
        if place.active:
            place.share(counts=False)


def keep_step(places: Iterable[Sharing]) -> None:
    """Join the other processes' reductions until those processes have no batches left either."""
    going: dict[Sharing, list[str] | None] = dict.fromkeys(places)
    while going:
        going = {place: left for place, groups in going.items() if (left := place.idle(groups))}


def _name(group: Any) -> str:
    """Return a process group's name, the same in each of its processes; the group of all processes has the name ""."""
    return getattr(group, "group_name", "")


def _op(record: Record) -> str:
    return reduction_of(record.key, record.options.reduce_fx)


def _checksums(labels: Any) -> tuple[int, int]:
    """Return two 20-bit checksums of the labels.

    The squares of such small numbers stay exact in float64 when they are summed across thousands of processes.
    """
    digest = hashlib.blake2b("\n".join(labels).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") >> 12, int.from_bytes(digest[4:], "little") >> 12


def _stacked(records: list[Record], device: torch.device) -> Tensor:
    """Stack the step values into one vector, with a single transfer to a device other than the CPU."""
    values = [torch.as_tensor(record.step_value(), dtype=torch.float64).detach() for record in records]
    if all(value.is_cpu for value in values):
        return torch.tensor([value.item() for value in values], dtype=torch.float64).to(device)
    return torch.stack([value.to(device) for value in values])


def _give(records: list[Record], values: Tensor, divisors: list[float]) -> None:
    """Set the records' values, each divided by its divisor."""
    if records:
        found = values / values.new_tensor(divisors)
        for record, value in zip(records, found.tolist() if found.is_cpu else found.unbind(), strict=True):
            record.value = value
