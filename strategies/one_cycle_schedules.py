"""Learning-rate schedules of a fixed length, which keep their last values when training continues past their end."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR

from .. import messages
from ..torch_private import INNER_SCHEDULERS

#: Schedules that may end, or hold one that does: :func:`advance` moves them, their own ``step`` all others.
MAY_END = (OneCycleLR, SequentialLR, ChainedScheduler)


def advance(scheduler: Any) -> None:
    """Advance a schedule; a one-cycle schedule that is over, also one inside another, keeps its last values.

    Torch would compute the step after the last one beyond the end of the curve, and raise at the next one.
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
    if scheduler.last_epoch >= scheduler.total_steps:  # an optimizer step was made after the last one of the schedule
        rates = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(map(float, last)))
        messages.warn_once(
            f"{type(scheduler).__name__}(total_steps={scheduler.total_steps}) has ended, and the training continues: "
            f"the learning rate stays at its last value, {rates}. Set total_steps to the number of optimizer steps of "
            "the whole training, or of its part where the schedule is one of a SequentialLR; a state that is loaded "
            "brings the total_steps it was saved with."
        )
    for group, rate in zip(scheduler.optimizer.param_groups, last, strict=False):  # others in a chain have changed it
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler.last_epoch += 1
