"""Records of logged names: their options, last values and reductions over the epoch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import messages
from ..devices.kinds import kind_of
from ..processes.device_transfer import full_value
from ..torch_private import is_in_parts
from .phases import Moment

if TYPE_CHECKING:
    from ..strategies.base import Strategy

REDUCTIONS = ("mean", "sum", "min", "max")


#: Maximum number of groups in a table.
MOST_GROUPS = 16


class RecordOptions(NamedTuple):
    """The arguments of ``self.log`` that must not change from call to call."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool | None
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool


class Record:
    """The last value logged under a name. Subclasses also reduce the values over the epoch.

    A value on the CPU is kept as a Python number, which is cheaper than detaching the tensor and safe from in-place
    changes. A value on another device is copied on that device, so that the host does not wait for it.

    Attributes:
        fresh: whether the value has been updated since it was last sent to the loggers.
        seen: whether the value has been updated since the epoch began.
        shared: the epoch's value (across all processes if they share it); None if an update has made it out of date.
        alone: whether the value is not shared, or no other process logs the name.
        dtype: the dtype of the tensor that callbacks monitor.
        resumed: whether the record was restored from a checkpoint and has not been updated since.
        hook: the hook that logged the name first; empty if that happened in another process.
        together: whether processes share each step's value (:mod:`.shared_step_values`).
        is_void: whether the epoch's value was requested from a torchmetrics object that had no value.
    """

    reduction = "last"

    def __init__(
        self, name: str, suffix: str, options: RecordOptions, on_step: bool, on_epoch: bool, weigh: Callable[[str], int]
    ) -> None:
        self.key = key = name + suffix
        self.options = options
        self.on_step, self.on_epoch = on_step, on_epoch
        self.logger = options.logger is not False
        self.step_key = f"{name}_step{suffix}" if on_step and on_epoch else key
        self.epoch_key = f"{name}_epoch{suffix}" if on_step and on_epoch else key
        self.graph = options.enable_graph
        self.together, self.hook = False, ""
        self.weigh = weigh
        self.dtype = torch.get_default_dtype()
        self.fresh = self.seen = self.resumed = False
        self.value: Any = None
        self.shared: Tensor | float | None = None
        self.is_void = False
        self.alone = not self.is_shared

    @property
    def keys(self) -> tuple[str, str, str]:
        """The names under which the values can be read."""
        return self.key, self.step_key, self.epoch_key

    def update(self, value: Any, batch_size: int | None) -> None:
        """Store the value of one call to ``self.log``."""
        if self.graph:
            self.value = value if isinstance(value, Tensor) else number(self.key, value)
        elif isinstance(value, Tensor) and value.is_cpu and not value.ndim:
            self.value = value.item()
        else:
            self.value = taken(self.key, value)
        self.fresh = self.seen = True
        self.shared = None

    def step_value(self) -> Tensor | float | None:
        """Return the last value: a number, or a scalar tensor on its device; None before the first call."""
        return scalar(self.key, self.value) if isinstance(self.value, Tensor) else self.value

    def compute(self, strategy: Strategy) -> Tensor | float | None:
        """Return the epoch's value: a number, or a scalar tensor on its device; None if a metric has no value.

        If the value is shared, all processes must call this.
        """
        raise NotImplementedError

    def fits(self, options: RecordOptions) -> bool:
        """Return True if the options match the restored ones. Reductions are compared by name; groups are ignored."""
        plain = options._replace(reduce_fx=reduction_of(self.key, options.reduce_fx), sync_dist_group=None)
        return plain == self.options

    @property
    def is_shared(self) -> bool:
        """Whether the epoch's value is reduced across all processes; if so, all of them must compute it together."""
        return self.options.sync_dist is not False and not self.options.rank_zero_only

    def result(self, strategy: Strategy) -> Tensor | float:
        """Return the epoch's value, recomputed if the record was updated since the last call; NaN if there is none."""
        if self.shared is None:
            value = self.compute(strategy)
            self.is_void = value is None
            self.shared = math.nan if value is None else value
        return self.shared

    def reset(self) -> None:
        """Clear the values for a new epoch."""
        self.value = self.shared = None
        self.fresh = self.seen = False

    def dump(self) -> dict[str, Any]:
        """Return the state of the current epoch, except the last value."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`dump`."""

    def merge(self, state: dict[str, Any]) -> None:
        """Add the state from another process's :meth:`dump`."""


class Table(dict[str, Record]):
    """The records of one stage, one point in the run (such as a step or an epoch end) and one loader, by name.

    ``groups`` maps names, or the ids of a collection and its metrics, to the records of a ``self.log_dict`` call.
    """

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: dict[Any, Group] = {}

    def group(self, key: Any, group: Group) -> None:
        """Store a group; drop all earlier groups if there are too many, for example because the names keep changing."""
        if len(self.groups) >= MOST_GROUPS:
            self.groups.clear()
        self.groups[key] = group


class Group:
    """The records of one ``self.log_dict`` call, kept so that later calls do not look them up by name.

    A call with different ``arguments`` creates another group. ``collection``: a ``MetricCollection``, or None for a
    dict.
    """

    __slots__ = ("arguments", "collection", "records")

    def __init__(self, records: list[Record], arguments: Mapping[str, Any], collection: Any) -> None:
        self.records, self.arguments, self.collection = records, arguments, collection

    def update(self, values: Mapping[str, Any], batch_size: int | None) -> None:
        """Update all records; metrics store their own values."""
        if self.collection is None:
            for record, value in zip(self.records, values.values(), strict=True):
                if isinstance(value, Tensor) and type(value) is not Tensor:
                    value = full_value(value)
                record.update(value, batch_size)
            return
        for record in self.records:
            record.fresh = record.seen = True
            record.shared = None


class SumRecord(Record):
    """Sum over the epoch, in float64 if the device supports it, so that a million float32 terms lose no precision."""

    reduction = "sum"
    weighted = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total: Tensor | None = None
        self.rest = 0.0
        self.weight = 0

    def update(self, value: Any, batch_size: int | None) -> None:
        weight = 1 if not self.weighted else self.weigh(self.key) if batch_size is None else batch_size
        kept = value
        if isinstance(value, Tensor) and not value.is_cpu:
            kept = self._add(value.detach(), weight)
        else:
            if isinstance(value, Tensor):
                kept = (scalar(self.key, value) if value.ndim else value).item()
            elif type(value) is not float:
                kept = number(self.key, value)
            self.rest += kept * weight
        self.weight += weight
        self.value = value if self.graph else kept
        self.fresh = self.seen = True
        self.shared = None

    def _add(self, value: Tensor, weight: int) -> Tensor | None:
        """Add a value on its device; return a copy as the step's value, or None if step values are not logged."""
        value = scalar(self.key, value)
        if self.total is None:
            kind = kind_of(value.device).widest_float
            self.total = torch.zeros((), dtype=kind, device=value.device)
        self.total.add_(value, alpha=weight)
        return value.clone() if self.on_step else None

    def _sums(self, strategy: Strategy) -> tuple[Tensor | float, Tensor | float]:
        total = self.rest if self.total is None else self.total + self.rest
        if self.alone or strategy.world_size == 1:
            return total, self.weight
        total = torch.as_tensor(total, dtype=torch.float64).to(strategy.device)
        both = torch.stack([total, torch.full_like(total, self.weight)])
        both = strategy.reduce(both, "sum", self.options.sync_dist_group or strategy.data_group)
        return both[0], both[1]

    def compute(self, strategy: Strategy) -> Tensor | float:
        return self._sums(strategy)[0]

    def reset(self) -> None:
        super().reset()
        self.total, self.rest, self.weight = None, 0.0, 0

    def dump(self) -> dict[str, Any]:
        total = None if self.total is None else self.total.clone()
        return {"total": total, "rest": self.rest, "weight": self.weight}

    def load(self, state: dict[str, Any]) -> None:
        self.total, self.rest, self.weight = state["total"], state["rest"], state["weight"]

    def merge(self, state: dict[str, Any]) -> None:
        """Add another process's sums."""
        if state["total"] is not None:
            self.total = state["total"] if self.total is None else self.total + state["total"]
        self.rest += state["rest"]
        self.weight += state["weight"]


class MeanRecord(SumRecord):
    """Mean over the epoch's samples: sum(value * batch size) / sum(batch size)."""

    reduction = "mean"
    weighted = True

    def compute(self, strategy: Strategy) -> Tensor | float:
        total, weight = self._sums(strategy)
        return total / weight if isinstance(total, Tensor) or weight else math.nan


class ExtremeRecord(Record):
    """Smallest or largest value of the epoch; NaN if any value was NaN."""

    def __init__(self, *args: Any, reduction: str) -> None:
        super().__init__(*args)
        self.reduction = reduction
        self.extreme: Tensor | float | None = None

    def update(self, value: Any, batch_size: int | None) -> None:
        super().update(value, batch_size)
        now = taken(self.key, value) if self.graph else self.value
        self.extreme = now if self.extreme is None else self._pick(self.extreme, now)

    def _pick(self, a: Tensor | float, b: Tensor | float) -> Tensor | float:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]
            pick = torch.minimum if self.reduction == "min" else torch.maximum
            return pick(torch.as_tensor(a, device=device), torch.as_tensor(b, device=device))
        if a != a or b != b:
            return math.nan
        return min(a, b) if self.reduction == "min" else max(a, b)

    def compute(self, strategy: Strategy) -> Tensor | float:
        if self.alone or strategy.world_size == 1:
            return math.nan if self.extreme is None else self.extreme
        none = math.inf if self.reduction == "min" else -math.inf  # a process without a batch does not count
        value = torch.as_tensor(none if self.extreme is None else self.extreme, dtype=self.dtype).to(strategy.device)
        return strategy.reduce(value, "min" if self.reduction == "min" else "max", self.options.sync_dist_group)

    def reset(self) -> None:
        super().reset()
        self.extreme = None

    def dump(self) -> dict[str, Any]:
        return {"extreme": self.extreme}

    def load(self, state: dict[str, Any]) -> None:
        self.extreme = state["extreme"]

    def merge(self, state: dict[str, Any]) -> None:
        """Combine this process's extreme with another process's."""
        self.extreme = self._pick(self.extreme, state["extreme"]) if self.extreme is not None else state["extreme"]


class MetricRecord(Record):
    """A torchmetrics ``Metric``, which the trainer computes at the end of the epoch and then resets."""

    reduction = "metric"

    def __init__(self, *args: Any, metric: Any) -> None:
        super().__init__(*args)
        self.metric = metric

    def update(self, value: Any, batch_size: int | None) -> None:
        if value is not self.metric:
            raise ValueError(
                f"self.log({self.key!r}) got a different {type(value).__name__} object than last time, so the "
                "metric's state would be lost. Create the metric once in __init__ and log that object."
            )
        self.fresh = self.seen = True
        self.shared = self.value = None

    @property
    def is_shared(self) -> bool:
        return not self.options.rank_zero_only

    def step_value(self) -> Tensor | float | None:
        if not self.seen or self.value is not None:
            return self.value
        value = self.metric._forward_cache
        value = self.metric.compute() if value is None else value
        return None if value is None else scalar(self.key, value.detach())

    def compute(self, strategy: Strategy) -> Tensor | None:
        with torch.inference_mode(False), torch.no_grad():  # torchmetrics copies states, which a later batch updates
            if self.alone:
                with not_synced(self.metric):
                    value = self.metric.compute()
            else:
                value = strategy.compute_metric(self.metric)
        if value is None:
            return None
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"The metric logged as {self.key!r} ({type(self.metric).__name__}) computes {describe(value)}, not a "
                "single number. Log each part by name with self.log_dict, or choose an average= that returns a scalar."
            )
        return value.detach().reshape(())

    def reset(self) -> None:
        super().reset()
        with torch.inference_mode(False):  # states created in inference mode could not be updated outside of it
            self.metric.reset()


@contextmanager
def not_synced(metric: Any) -> Iterator[None]:
    """Context manager inside which a torchmetrics ``Metric`` computes from this process's data only."""
    before, metric._to_sync = metric._to_sync, False
    try:
        yield
    finally:
        metric._to_sync = before


def make_record(
    name: str,
    value: Any,
    options: RecordOptions,
    moment: Moment,
    hook: str,
    dataloader_idx: int | None,
    weigh: Callable[[str], int],
) -> Record:
    """Check the first ``self.log`` call with a name and create the matching record.

    Raises:
        TypeError: the name is not a string, or the value is not a number.
        ValueError: the tensor has more than one element, the flags contradict each other, or the reduction is unknown.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"self.log got {name!r} ({type(name).__name__}) as the name. Pass a string first, then the value."
        )
    if "/dataloader_idx_" in name:
        raise ValueError(f"self.log({name!r}): the trainer adds '/dataloader_idx_' itself. Choose a name without it.")
    on_step, on_epoch = _cadence(name, options, moment, hook)
    suffix = ""
    if dataloader_idx is not None and options.add_dataloader_idx:
        suffix = f"/dataloader_idx_{dataloader_idx}"
    common = (name, suffix, options, on_step, on_epoch, weigh)
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
        return MetricRecord(*common, metric=value)
    check_value(name, value, options.rank_zero_only)
    reduction = reduction_of(name, options.reduce_fx)
    record: Record
    if not on_epoch:
        record = Record(*common)
    elif reduction in ("min", "max"):
        record = ExtremeRecord(*common, reduction=reduction)
    else:
        record = MeanRecord(*common) if reduction == "mean" else SumRecord(*common)
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        record.dtype = torch.float64
    return record


def _cadence(name: str, options: RecordOptions, moment: Moment, hook: str) -> tuple[bool, bool]:
    on_step = moment.on_step if options.on_step is None else options.on_step
    on_epoch = not moment.on_step if options.on_epoch is None else options.on_epoch
    if on_step and not moment.step_allowed:
        raise ValueError(
            f"self.log({name!r}, on_step=True) was called in {hook}, which runs once per epoch. Leave out on_step, or "
            "log the value in a step."
        )
    if not on_step and not on_epoch:
        raise ValueError(
            f"self.log({name!r}, on_step=False, on_epoch=False) would discard the value. Set on_step or on_epoch to "
            "True."
        )
    return on_step, on_epoch


def reduction_of(name: str, reduce_fx: str | Callable[..., Any]) -> str:
    """Return a reduction's name in lowercase; raise if the name is unknown."""
    functions = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max"}
    functions |= {min: "min", max: "max", sum: "sum"}
    found = functions.get(reduce_fx, reduce_fx) if callable(reduce_fx) else str(reduce_fx).lower()
    found = "mean" if found == "avg" else found
    if found not in REDUCTIONS:
        shown = getattr(reduce_fx, "__name__", reduce_fx)
        raise ValueError(
            f"self.log({name!r}): {messages.unknown('reduce_fx', shown, REDUCTIONS, ', or log a torchmetrics Metric')}"
        )
    return str(found)


def check_value(name: str, value: Any, rank_zero_only: bool = False) -> None:
    """Raise if ``value`` is not a number or a tensor with one element; warn about integers."""
    if isinstance(value, Tensor):
        scalar(name, value)
        if rank_zero_only and is_in_parts(value):
            raise ValueError(
                f"self.log({name!r}, rank_zero_only=True) got a sharded tensor, of which each process has only a part. "
                "Call its full_tensor() on all processes and log the result, or leave out rank_zero_only."
            )
        if value.is_complex():
            raise TypeError(
                f"self.log({name!r}) got a complex tensor, but a real number is needed. Log value.abs(), for example."
            )
        integral = not value.is_floating_point()
    else:
        number(name, value)
        integral = isinstance(value, (int, bool))
    if integral:
        to_float = "value.float()" if isinstance(value, Tensor) else "float(value)"  # float() would wait for a device
        messages.warn_once(
            f"self.log({name!r}) got an integer, which is stored as {torch.get_default_dtype()}. Pass {to_float} to "
            "avoid this warning."
        )


def scalar(name: str, value: Tensor) -> Tensor:
    """Reshape ``value`` to shape (); if it has more than one element, raise an error that mentions ``name``."""
    if value.ndim == 0:
        return value
    if value.numel() != 1:
        raise ValueError(
            f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}, but a single number is needed. Log "
            "value.mean(), or use self.log_dict with a name for each part."
        )
    return value.reshape(())


def number(name: str, value: Any) -> float:
    """Return ``value`` as a float; if it is not a number, raise an error that mentions ``name``."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):  # not a number: raised below
        pass
    raise TypeError(
        f"self.log({name!r}) got {describe(value)}, but a number, a tensor with one element or a torchmetrics Metric "
        "is needed. For text, use the logger itself (self.logger.experiment); for several values, use self.log_dict."
    )


def taken(name: str, value: Any) -> Tensor | float:
    """Return the current value: a number, or a copy on the device if reading it would wait for the device."""
    if type(value) is float:
        return value
    if not isinstance(value, Tensor):
        return number(name, value)
    if value.ndim:
        value = scalar(name, value)
    return value.item() if value.is_cpu else value.detach().clone()


def as_tensor(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return a value to monitor as a scalar tensor that autograd can use (not an inference tensor)."""
    with torch.inference_mode(False):
        if not isinstance(value, Tensor):
            return torch.tensor(value, dtype=dtype)
        value = value.to(dtype)
        return value.clone() if value.is_inference() else value


def describe(value: Any) -> str:
    """Return a short description of a value for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
