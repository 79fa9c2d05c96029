"""Callback that logs learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log the learning rate of every optimizer, with or without a scheduler.

    Values are named ``lr-SGD``; a second optimizer of the same class is ``lr-SGD-1``, and parameter groups are
    ``lr-SGD/pg1``, ``lr-SGD/pg2`` (with the group's ``"name"`` in place of ``pg1``, if it has one). A ``name`` in a
    scheduler's configuration replaces ``lr-SGD``.

    Args:
        logging_interval: ``"step"`` logs before an optimizer step whenever the trainer logs step values
            (``log_every_n_steps``); the logged rate is the one that the step uses. ``"epoch"`` logs when an epoch
            starts. None uses each scheduler's own interval, and ``"step"`` for optimizers without a scheduler.
        log_momentum: also log the momentum (``lr-SGD-momentum``; the first beta for Adam; 0 for optimizers without
            momentum).
        log_weight_decay: also log the weight decay (``lr-SGD-weight_decay``).
        log_key_prefix: prefix of every name, such as ``"optim/"``; None means no prefix.

    Attributes:
        lrs: the learning rates logged so far, by full name.
        last_momentum_values: the last logged momentum, by full name; None if none has been logged yet.
        last_weight_decay_values: the last logged weight decay, by full name; None if none has been logged yet.

    Other callbacks can monitor these values, because they are in ``trainer.callback_metrics``.

    Raises:
        RuntimeError: if the trainer has no logger when training starts.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = "",
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            more = ", or pass None to use each scheduler's own interval"
            raise ValueError(messages.unknown("logging_interval", logging_interval, ("step", "epoch"), more))
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_at: dict[int, int] = {}
        if logging_interval == "epoch":
            self._undefine(LearningRateMonitor, "on_before_optimizer_step")

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._require_logger(trainer, "the learning rates")
        if not trainer.optimizers:
            messages.warn(
                f"LearningRateMonitor has nothing to log, because {type(pl_module).__name__} has no optimizer. "
                "Return one from configure_optimizers, or remove the callback."
            )
        elif self.log_momentum and not any(_momentum(o.param_groups[0]) for o in trainer.optimizers):
            messages.warn(
                "LearningRateMonitor(log_momentum=True) logs 0, because no optimizer uses momentum. Set a momentum in "
                "the optimizer, or remove log_momentum=True.",
                messages.ValueWarning,
            )
        self._logged_at.clear()
        names = [name for optimizer in trainer.optimizers for name, _ in self._groups(trainer, optimizer)]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = dict.fromkeys(f"{name}-momentum" for name in names)
        self.last_weight_decay_values = dict.fromkeys(f"{name}-weight_decay" for name in names)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        if not trainer.logs_this_step:
            return
        update = trainer.state.updates if trainer.state.stepped else trainer.state.updates + 1
        stepped = trainer.optimizers if pl_module.automatic_optimization else [optimizer]
        due = [one for one in stepped if self._interval(trainer, one) != "epoch"]
        for one in due:
            if self._logged_at.get(id(one)) != update:
                self._logged_at[id(one)] = update
                self._log(trainer, [one], trainer.state.x_axis(update))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.next_batch > 0:
            return  # already logged when the epoch began, before the fit resumed inside it
        due = [optimizer for optimizer in trainer.optimizers if self._due_at_epoch(trainer, optimizer)]
        self._log(trainer, due, trainer.state.updates)

    def _interval(self, trainer: Trainer, optimizer: Optimizer) -> str:
        if self.logging_interval is not None:
            return self.logging_interval
        intervals = {config.interval for config in schedulers_of(trainer, optimizer)}
        return "epoch" if intervals == {"epoch"} else "step"

    def _due_at_epoch(self, trainer: Trainer, optimizer: Optimizer) -> bool:
        return self._interval(trainer, optimizer) == "epoch"

    def _log(self, trainer: Trainer, optimizers: list[Optimizer], step: int) -> None:
        values: dict[str, float] = {}
        for optimizer in optimizers:
            for name, group in self._groups(trainer, optimizer):
                values.update(self._values(name, group))
        if values:
            trainer.log_metrics(values, step)
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def _groups(self, trainer: Trainer, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((self.log_key_prefix + name, group) for name, group in _groups(trainer, optimizer))

    def _values(self, name: str, group: dict[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield one group's values by full name. This waits for the device if a learning rate is a GPU tensor."""
        lr = float(group["lr"])
        if name not in self.lrs and (alone := name.removesuffix("/pg1")) in self.lrs:
            self.lrs[name] = self.lrs.pop(alone)  # its optimizer now has more than one group
        self.lrs.setdefault(name, []).append(lr)
        yield name, lr
        if self.log_momentum:
            self.last_momentum_values[f"{name}-momentum"] = momentum = _momentum(group)
            yield f"{name}-momentum", momentum
        if self.log_weight_decay and "weight_decay" in group:
            self.last_weight_decay_values[f"{name}-weight_decay"] = decay = float(group["weight_decay"])
            yield f"{name}-weight_decay", decay


def _momentum(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0))


def schedulers_of(trainer: Trainer, optimizer: Optimizer) -> list[Any]:
    """Return the configurations of the schedulers that advance the optimizer's learning rate."""
    return [c for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]


def _name(trainer: Trainer, optimizer: Optimizer) -> str:
    """Return ``lr-SGD`` or the scheduler's name, with the suffix ``-1``, ``-2`` ... if the name is already in use."""
    seen: Counter[str] = Counter()
    for other in trainer.optimizers:
        given = [config.name for config in schedulers_of(trainer, other) if config.name]
        name = given[0] if given else f"lr-{type(other).__name__}"
        if other is optimizer:
            return f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1
    return f"lr-{type(optimizer).__name__}"


def _groups(trainer: Trainer, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """Return every parameter group with the name to log it under; groups may be added during the run."""
    base = _name(trainer, optimizer)
    groups = optimizer.param_groups
    if len(groups) == 1 and "name" not in groups[0]:
        return [(base, groups[0])]
    names = [str(group.get("name", f"pg{number}")) for number, group in enumerate(groups, 1)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Two parameter groups of {type(optimizer).__name__} have the same name ({', '.join(names)}), "
            'so LearningRateMonitor cannot tell them apart. Give each group a different "name".'
        )
    return [(f"{base}/{name}", group) for name, group in zip(names, groups, strict=True)]
