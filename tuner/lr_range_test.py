"""Learning rate range test: train with a growing learning rate and find where the loss falls fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .. import messages
from ..torch_private import INNER_SCHEDULERS
from ..trainer.optimizers import configure
from . import trial
from .attribute_lookup import TunedAttribute, lr_places
from .trial_run import keep_run, refuse_strategy, trial_in_run

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.run import Run

Mode = Literal["exponential", "linear"]
_SMOOTHING = 0.98
#: Number of steps at the start during which the loss depends more on the batches than on the rate. In these steps, the
#: loss cannot stop the test.
SETTLING = 10


@dataclass
class LRFinder:
    """The result of a range test (Smith, Cyclical Learning Rates for Training Neural Networks, WACV 2017).

    Attributes:
        mode: how the learning rate grew, ``"exponential"`` or ``"linear"``.
        lr_min: the first rate.
        lr_max: the rate of the last step, unless the loss diverged earlier and ended the test.
        num_training: requested number of steps.
        results: the rates under ``"lr"``, and the smoothed loss at each rate, averaged across ranks, under ``"loss"``.
    """

    mode: Mode
    lr_min: float
    lr_max: float
    num_training: int
    results: dict[str, list[float]] = field(default_factory=lambda: {"lr": [], "loss": []}, repr=False)
    _optimal_idx: int | None = field(default=None, repr=False)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate where the loss falls fastest on a log scale; None if there are too few steps.

        Rates past the lowest loss are ignored, because a drop means nothing once the loss has diverged.

        Args:
            skip_begin: number of steps to skip at the start, where the smoothed loss is noisy.
            skip_end: number of steps to skip at the end, where the loss diverges.
        """
        last = len(self.results["loss"]) - max(skip_end, 0)
        indices = [i for i in range(max(skip_begin, 0), last) if math.isfinite(self.results["loss"][i])]
        if len(indices) < 2:
            messages.warn(self._why_none(skip_begin, skip_end))
            self._optimal_idx = None
            return None
        lowest = min(indices, key=self.results["loss"].__getitem__)
        indices = [i for i in indices if i <= lowest] if lowest > indices[0] else indices
        losses = torch.tensor([self.results["loss"][i] for i in indices], dtype=torch.float64)
        rates = torch.tensor([self.results["lr"][i] for i in indices], dtype=torch.float64).log()
        (slope,) = torch.gradient(losses, spacing=(rates,))
        self._optimal_idx = indices[int(slope.argmin())]
        return self.results["lr"][self._optimal_idx]

    def _why_none(self, skip_begin: int, skip_end: int) -> str:
        """Explain why the test has no suggestion, and what to do."""
        losses = self.results["loss"]
        if not losses:
            return (
                "This LRFinder cannot suggest a learning rate, because lr_find runs no steps with fast_dev_run. "
                "Leave out fast_dev_run."
            )
        first = 1 + max((i for i, loss in enumerate(losses) if math.isfinite(loss)), default=-1)
        if first == len(losses):
            return (
                f"The range test ran {len(losses)} step{'s' * (len(losses) != 1)}, too few to suggest a learning rate, "
                f"because the first {skip_begin} and the last {skip_end} are skipped. Raise num_training, or lower "
                "max_lr or skip_begin."
            )
        rate = self.results["lr"][first]
        if first == 0:
            cause = (
                "The rate cannot be the cause before the first update, so check the batches, the loss and the precision"
            )
        else:
            cause = f"If {rate:.4g} is too high, lower min_lr and max_lr; otherwise check the batches and the loss"
        return (
            f"The range test found no learning rate: the loss was {losses[first]} from step {first + 1} on, at a rate "
            f"of {rate:.4g}. {cause}. Trainer(detect_anomaly=True) shows which operation failed."
        )

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot the loss against the learning rate with matplotlib, and return the figure.

        Args:
            suggest: mark the suggested rate.
            show: open a window with the plot.
            ax: matplotlib axes to draw into, instead of a new figure.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "LRFinder.plot() needs matplotlib, which is not installed. Run: pip install matplotlib, or read the "
                "numbers from .results."
            ) from error
        figure, ax = pyplot.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if self.mode == "exponential":
            ax.set_xscale("log")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            at = self._optimal_idx
            ax.plot(self.results["lr"][at], self.results["loss"][at], marker="o", markersize=10, color="red")
        if show:
            pyplot.show()
        return figure


@dataclass(frozen=True)
class RangeTest:
    """A range test with its settings. Call it with a prepared run.

    Args:
        attr_name: the attribute that holds the rate, as for ``Tuner.lr_find``; None if no attribute will be set.
    """

    min_lr: float = 1e-8
    max_lr: float = 1.0
    num_training: int = 100
    mode: Mode = "exponential"
    early_stop_threshold: float | None = 4.0
    attr_name: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("exponential", "linear"):
            raise ValueError(messages.unknown("lr_find mode", self.mode, ("exponential", "linear")))
        if not 0 < self.min_lr < self.max_lr or self.num_training < 2:
            raise ValueError(
                f"lr_find(min_lr={self.min_lr}, max_lr={self.max_lr}, num_training={self.num_training}): min_lr "
                "must be above 0 and below max_lr, and num_training must be at least 2."
            )

    def rate(self, step: int) -> float:
        """Return the learning rate for a step (0-based)."""
        share = step / (self.num_training - 1)
        if self.mode == "linear":
            return self.min_lr + (self.max_lr - self.min_lr) * share
        return self.min_lr * (self.max_lr / self.min_lr) ** share

    def __call__(self, run: Run) -> LRFinder:
        """Train with growing rates on the module, then restore everything."""
        check(run)
        module, name = run.module, self.attr_name
        places = [] if name is None else lr_places(module, run.datamodule, name)
        found = LRFinder(self.mode, self.min_lr, self.max_lr, self.num_training)
        kept = keep_run(run)
        try:
            if places and run.state.stage is None:
                warn_if_unread(module, places)
            with trial_in_run(run) as own:
                optimizer = own.optimizers[0]
                shares = shares_of(optimizer, places[0].get() if places else None)
                rate = lambda: set_rates(optimizer, shares, self.rate(len(found.results["lr"])))  # noqa: E731
                after = LossCurve(own, found, self.early_stop_threshold, self.rate)
                trial.train(own, rate, after)
        finally:
            kept.restore()
        return found


class LossCurve:
    """Records the loss of each accumulation window and decides when to stop the test.

    Attributes:
        head_start: number of steps with a loss of zero that the smoothing assumes before the first step.
    """

    head_start = 0

    def __init__(self, run: Run, found: LRFinder, threshold: float | None, rate: Any) -> None:
        self.run, self.found, self.threshold, self.rate = run, found, threshold, rate
        self.average, self.best, self.skipped = 0.0, math.inf, 0

    def __call__(self, losses: list[Tensor]) -> bool:
        """Record a window's losses and return whether to stop. Waits for the device and the other ranks."""
        strategy, results = self.run.strategy, self.found.results
        mine = [float(loss) for loss in losses]
        device = strategy.device if strategy.host_group is None else "cpu"
        both = torch.tensor([sum(mine), float(len(mine))], dtype=torch.float64, device=device)
        total, count = strategy.reduce(both, "sum", strategy.host_group).tolist()
        if not self.run.state.stepped or not count:  # fp16 found an overflow, or all batches were skipped
            return self.skip()
        step = len(results["lr"]) + 1
        self.average = _SMOOTHING * self.average + (1 - _SMOOTHING) * total / count
        smooth = self.average / (1 - _SMOOTHING ** (step + self.head_start))
        results["lr"].append(self.rate(step - 1))
        results["loss"].append(smooth)
        settled = step > SETTLING or not math.isfinite(smooth)
        exploded = self.threshold is not None and settled and not smooth <= self.threshold * self.best
        if step >= SETTLING:
            self.best = min(self.best, smooth)
        return exploded or step >= self.found.num_training or self.ends_early()

    def ends_early(self) -> bool:
        """Return True if the test ends here although steps are left."""
        return False

    def skip(self) -> bool:
        """Leave out a window without an update or without losses; return whether to stop."""
        self.skipped += 1
        return self.skipped > 10 * self.found.num_training


def check(run: Run) -> None:
    """Raise an error unless the run has exactly one optimizer and its learning rate can be varied."""
    module, optimizers = run.module, run.optimizers
    owner = type(module).__name__
    refuse_strategy(run, "lr_find")
    if not module.automatic_optimization:
        raise RuntimeError(
            f"lr_find varies the learning rate of the optimizer that the trainer steps, but {owner} uses manual "
            "optimization (automatic_optimization is False). Try rates in your own loop, with one fit per rate."
        )
    if len(optimizers) != 1:
        raise RuntimeError(
            f"lr_find varies the learning rate of one optimizer, but {owner}.configure_optimizers() returned "
            f"{len(optimizers) or 'no'} optimizers. Return a single optimizer for the test."
        )
    if isinstance(optimizers[0], LBFGS):
        raise RuntimeError(
            f"lr_find does not work with LBFGS, which {owner} uses, because LBFGS evaluates the loss several times per "
            "step and chooses its own step length. Train with lr=1 and line_search_fn='strong_wolfe' instead."
        )
    if run.trainer.limit_train_batches == 0:
        raise ValueError(
            "lr_find needs training batches, but Trainer(limit_train_batches=0) allows none. Leave out "
            "limit_train_batches."
        )


def warn_if_unread(module: TrainingModule, places: list[TunedAttribute]) -> None:
    """Warn if ``configure_optimizers`` does not use the attributes that hold the learning rate."""
    before = [place.get() for place in places]
    value = before[0] if isinstance(before[0], (int, float)) and before[0] else 1e-3
    made = []
    try:
        for rate in (value, value / 2):
            for place in places:
                place.set(rate)
            made.append([_settings_of(optimizer) for optimizer in configure(module)[0]])
    finally:
        for place, one in zip(places, before, strict=True):
            place.set(one)
    if made[0] == made[1]:
        where, owner = messages.names([place.words for place in places], "and"), type(module).__name__
        messages.warn(
            f"lr_find sets {where}, but {owner}.configure_optimizers() creates the same optimizer regardless of that "
            "value, so a fit will not use the rate that lr_find found. Create the optimizer with "
            f"lr=self.{places[0].key}, or pass lr_find the name of the attribute that configure_optimizers() reads, "
            "such as attr_name='hparams.training.lr'."
        )


def _settings_of(optimizer: Optimizer) -> list[dict[str, str]]:
    """Return the settings of each parameter group, for comparison."""
    return [{k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


# ---- rates of an optimizer -------------------------------------------------------------------------------------------


def shares_of(optimizer: Optimizer, initial: Any) -> list[float]:
    """Return each group's rate as a fraction of ``initial`` or, if no group has that rate, of the largest rate."""
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    one = float(initial) if isinstance(initial, (int, float)) and float(initial) in rates else max(rates)
    return [rate / one for rate in rates] if one > 0 else [1.0] * len(rates)


def set_rates(optimizer: Optimizer, shares: list[float], rate: float) -> None:
    """Set each parameter group's learning rate to its share times ``rate``."""
    for group, share in zip(optimizer.param_groups, shares, strict=True):
        _put(group, "lr", rate * share)


def _put(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def change_rates(optimizer: Optimizer, schedulers: list[Any], shares: list[float], rate: float) -> None:
    """Change the learning rate in the middle of training, and scale the schedules' base rates in proportion."""
    factors = []
    for group, share in zip(optimizer.param_groups, shares, strict=True):
        before = float(group["lr"])
        factors.append(rate * share / before if before else 1.0)
        _put(group, "lr", rate * share)
        for key in ("initial_lr", "max_lr", "min_lr"):
            if key in group:
                _put(group, key, float(group[key]) * factors[-1])
    for scheduler in schedulers:
        for one in (scheduler, *getattr(scheduler, INNER_SCHEDULERS, ())):
            bases = getattr(one, "base_lrs", None)
            if bases is not None and len(bases) == len(factors):
                one.base_lrs = [base * factor for base, factor in zip(bases, factors, strict=True)]
