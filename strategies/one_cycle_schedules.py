"""Make learning-rate schedules of fixed length keep their last values if training continues past their end."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR

from .. import messages
from ..torch_private import INNER_SCHEDULERS

#: Schedules that may end, or that contain one that may end. Call :func:`advance` instead of their ``step``.
MAY_END = (OneCycleLR, SequentialLR, ChainedScheduler)


def advance(scheduler: Any) -> None:
    """Advance a schedule. A one-cycle schedule that has ended keeps its last values, even inside another schedule.

    Torch itself would extrapolate the curve in the first step after the end of the schedule, and raise an error in the
    second.
    """
    over = [one for one in _one_cycles(scheduler) if one.last_epoch >= one.total_steps - 1]
    for one in over:
        vars(one)["step"] = partial(_keep_last_values, one)
    try:
        scheduler.step()
    finally:
        for one in over:
            del vars(one)["step"]


def _one_cycles(scheduler: Any) -> list[OneCycleLR]:
    if isinstance(scheduler, OneCycleLR):
        return [scheduler]
    inner = getattr(scheduler, INNER_SCHEDULERS, ())
    return [one for other in inner for one in _one_cycles(other)]


def _keep_last_values(scheduler: OneCycleLR) -> None:
    last = scheduler.get_last_lr()
    if scheduler.last_epoch >= scheduler.total_steps:  # an optimizer step has run after the end of the schedule
        rates = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(map(float, last)))
        messages.warn_once(
            f"{type(scheduler).__name__}(total_steps={scheduler.total_steps}) has ended, but training continues, so "
            f"the learning rate stays at its last value, {rates}. Set total_steps to the number of optimizer steps in "
            "the whole run or, inside a SequentialLR, in this schedule's part of the run. If the schedule's state "
            "was loaded from a checkpoint, total_steps is the saved value."
        )
    for group, rate in zip(scheduler.optimizer.param_groups, last, strict=False):  # a chain may have changed it
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler.last_epoch += 1
