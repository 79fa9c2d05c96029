"""One logged name: its options, its last value, its sum over the epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..loggers import messages
from .phases import Moment

if TYPE_CHECKING:
    from ..strategies.base import Strategy

REDUCTIONS = ("mean", "sum", "min", "max")


class Options(NamedTuple):
    """The arguments of ``self.log`` that may not change from call to call."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool


class Record:
    """A value kept for its last step only. Subclasses add what they keep over the epoch.

    Attributes:
        fresh: updated since the loggers last saw it.
        seen: updated since the epoch began.
    """

    reduction = "last"

    def __init__(
        self, name: str, suffix: str, options: Options, on_step: bool, on_epoch: bool, weigh: Callable[[str], int]
    ) -> None:
        self.key = key = name + suffix
        self.options = options
        self.on_step, self.on_epoch = on_step, on_epoch
        self.logger = options.logger is not False
        self.step_key = f"{name}_step{suffix}" if on_step and on_epoch else key
        self.epoch_key = f"{name}_epoch{suffix}" if on_step and on_epoch else key
        self.graph = options.enable_graph
        self.weigh = weigh
        self.fresh = self.seen = False
        self.value: Any = None

    def update(self, value: Any, batch_size: int | None) -> None:
        """Take in one call of ``self.log``."""
        if not isinstance(value, Tensor):
            self.value = number(self.key, value)
        else:
            self.value = value if self.graph else value.detach()
        self.fresh = self.seen = True

    def step_value(self) -> Tensor | None:
        """The last value, a scalar tensor, or None before the first."""
        if self.value is None:
            return None
        if not isinstance(self.value, Tensor):
            return torch.tensor(self.value, dtype=torch.get_default_dtype())
        return scalar(self.key, self.value)

    def compute(self, strategy: Strategy) -> Tensor:
        """The epoch's value, a scalar tensor."""
        raise NotImplementedError

    def reset(self) -> None:
        """Start a new epoch."""
        self.value = None
        self.fresh = self.seen = False

    def dump(self) -> dict[str, Any]:
        """What a checkpoint keeps of the running epoch."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take back :meth:`dump`."""


class SumRecord(Record):
    """Sums over the epoch, in float64 where the device has it: a million float32 terms lose nothing."""

    reduction = "sum"
    weighted = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total: Tensor | None = None
        self.rest = 0.0
        self.weight = 0

    def update(self, value: Any, batch_size: int | None) -> None:
        weight = 1 if not self.weighted else self.weigh(self.key) if batch_size is None else batch_size
        if isinstance(value, Tensor):
            detached = value.detach()
            if detached.ndim:
                detached = scalar(self.key, detached)
            if self.total is None:
                kind = torch.float32 if detached.device.type == "mps" else torch.float64
                self.total = torch.zeros((), dtype=kind, device=detached.device)
            self.total.add_(detached, alpha=weight)
            self.value = value if self.graph else detached
        else:
            self.value = number(self.key, value)
            self.rest += self.value * weight
        self.weight += weight
        self.fresh = self.seen = True

    def _sums(self, strategy: Strategy) -> tuple[Tensor, Tensor | int]:
        total = torch.tensor(self.rest, dtype=torch.float64) if self.total is None else self.total + self.rest
        if not self.options.sync_dist or strategy.world_size == 1:
            return total, self.weight
        total = total.to(strategy.device)
        both = torch.stack([total, torch.full_like(total, self.weight)])
        both = strategy.reduce(both, "sum", self.options.sync_dist_group)
        return both[0], both[1]

    def compute(self, strategy: Strategy) -> Tensor:
        return self._sums(strategy)[0].to(torch.get_default_dtype())

    def reset(self) -> None:
        super().reset()
        self.total, self.rest, self.weight = None, 0.0, 0

    def dump(self) -> dict[str, Any]:
        return {"total": None if self.total is None else self.total.clone(), "rest": self.rest, "weight": self.weight}

    def load(self, state: dict[str, Any]) -> None:
        self.total, self.rest, self.weight = state["total"], state["rest"], state["weight"]


class MeanRecord(SumRecord):
    """Mean over the epoch's samples: sum(value * batch size) / sum(batch size)."""

    reduction = "mean"
    weighted = True

    def compute(self, strategy: Strategy) -> Tensor:
        total, weight = self._sums(strategy)
        return (total / weight).to(torch.get_default_dtype())


class ExtremeRecord(Record):
    """Smallest or largest value of the epoch."""

    def __init__(self, *args: Any, reduction: str) -> None:
        super().__init__(*args)
        self.reduction = reduction
        self.pick = torch.minimum if reduction == "min" else torch.maximum
        self.extreme: Tensor | None = None

    def update(self, value: Any, batch_size: int | None) -> None:
        super().update(value, batch_size)
        now = self.value if isinstance(self.value, Tensor) else torch.tensor(self.value)
        now = scalar(self.key, now)
        self.extreme = now if self.extreme is None else self.pick(self.extreme, now.to(self.extreme.device))

    def compute(self, strategy: Strategy) -> Tensor:
        if self.extreme is None:
            raise RuntimeError(f"{self.key!r} has no value in this epoch. Log it at least once before it is computed.")
        value = self.extreme.to(torch.get_default_dtype())
        if self.options.sync_dist and strategy.world_size > 1:
            op = "min" if self.reduction == "min" else "max"
            value = strategy.reduce(value.to(strategy.device), op, self.options.sync_dist_group)
        return value

    def reset(self) -> None:
        super().reset()
        self.extreme = None

    def dump(self) -> dict[str, Any]:
        return {"extreme": self.extreme}

    def load(self, state: dict[str, Any]) -> None:
        self.extreme = state["extreme"]


class MetricRecord(Record):
    """A torchmetrics ``Metric``: computed at the end of the epoch and reset by the trainer."""

    reduction = "metric"

    def __init__(self, *args: Any, metric: Any) -> None:
        super().__init__(*args)
        self.metric = metric

    def update(self, value: Any, batch_size: int | None) -> None:
        if value is not self.metric:
            raise ValueError(
                f"self.log({self.key!r}) got another {type(value).__name__} object than before; its state would be "
                "lost. "
                "Create the metric once in __init__ and log that object."
            )
        self.fresh = self.seen = True

    def step_value(self) -> Tensor | None:
        if not self.seen:
            return None
        value = self.metric._forward_cache
        return scalar(self.key, (self.metric.compute() if value is None else value).detach())

    def compute(self, strategy: Strategy) -> Tensor:
        value = self.metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"The metric logged as {self.key!r} ({type(self.metric).__name__}) computes {describe(value)}, not one "
                "number. Log its parts by name with self.log_dict, or choose an average= that gives a scalar."
            )
        return value.detach().reshape(())

    def reset(self) -> None:
        super().reset()
        self.metric.reset()


def make_record(
    name: str,
    value: Any,
    options: Options,
    moment: Moment,
    hook: str,
    dataloader_idx: int | None,
    weigh: Callable[[str], int],
) -> Record:
    """Check a first call of ``self.log`` and make the record that fits it.

    Raises:
        TypeError: the name is no string, or the value is no number.
        ValueError: a tensor of more than one element, contradictory flags, an unknown reduction.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"self.log got {name!r} ({type(name).__name__}) as the name. Pass a string first, then the value."
        )
    if "/dataloader_idx_" in name:
        raise ValueError(f"self.log({name!r}): '/dataloader_idx_' is added by the trainer. Choose a name without it.")
    on_step, on_epoch = _cadence(name, options, moment, hook)
    suffix = ""
    if dataloader_idx is not None and options.add_dataloader_idx:
        suffix = f"/dataloader_idx_{dataloader_idx}"
    common = (name, suffix, options, on_step, on_epoch, weigh)
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
        return MetricRecord(*common, metric=value)
    check_value(name, value)
    reduction = _reduction(name, options.reduce_fx)
    if not on_epoch:
        return Record(*common)
    if reduction in ("min", "max"):
        return ExtremeRecord(*common, reduction=reduction)
    return MeanRecord(*common) if reduction == "mean" else SumRecord(*common)


def _cadence(name: str, options: Options, moment: Moment, hook: str) -> tuple[bool, bool]:
    on_step = moment.on_step if options.on_step is None else options.on_step
    on_epoch = not moment.on_step if options.on_epoch is None else options.on_epoch
    if on_step and not moment.step_allowed:
        raise ValueError(
            f"self.log({name!r}, on_step=True) was called in {hook}, which runs once an epoch. "
            "Leave on_step out, or log it in a step."
        )
    if not on_step and not on_epoch:
        raise ValueError(
            f"self.log({name!r}, on_step=False, on_epoch=False) would keep the value nowhere. Set one of them to True."
        )
    return on_step, on_epoch


def _reduction(name: str, reduce_fx: str | Callable[..., Any]) -> str:
    functions = {
        torch.mean: "mean",
        torch.sum: "sum",
        torch.min: "min",
        torch.max: "max",
        min: "min",
        max: "max",
        sum: "sum",
    }
    found = functions.get(reduce_fx, reduce_fx) if callable(reduce_fx) else {"avg": "mean"}.get(reduce_fx, reduce_fx)
    if found not in REDUCTIONS:
        shown = getattr(reduce_fx, "__name__", reduce_fx)
        raise ValueError(
            messages.unknown(f"reduce_fx for self.log({name!r})", shown, REDUCTIONS, ", or log a torchmetrics Metric")
        )
    return str(found)


def check_value(name: str, value: Any) -> None:
    """Raise if ``value`` is not a number or a tensor with one element; tell about integers."""
    if isinstance(value, Tensor):
        scalar(name, value)
        integral = not (value.is_floating_point() or value.is_complex())
    else:
        number(name, value)
        integral = isinstance(value, (int, bool))
    if integral:
        messages.warn_once(
            f"self.log({name!r}) got an integer; it is kept as {torch.get_default_dtype()}. Pass float(value) to say "
            "so."
        )


def scalar(name: str, value: Tensor) -> Tensor:
    """``value`` with shape (), or an error that names it."""
    if value.ndim == 0:
        return value
    if value.numel() != 1:
        raise ValueError(
            f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}; one number is needed. "
            "Log value.mean(), or use self.log_dict with a name for each part."
        )
    return value.reshape(())


def number(name: str, value: Any) -> float:
    """``value`` as a float, or an error that names it."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(
            f"self.log({name!r}) got {describe(value)}; a number, a tensor with one element or a torchmetrics Metric "
            "is "
            "needed. For text use the logger itself (self.logger.experiment); for several values self.log_dict."
        )
    return float(value)


def describe(value: Any) -> str:
    """A short picture of a value for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
