"""The parts of a run that ``self.log`` distinguishes."""

from __future__ import annotations


class Moment:
    """A part of a run with its own rules for ``self.log``.

    Args:
        name: the name of the hook or step in error messages.
        on_step: default of ``on_step``; ``on_epoch`` defaults to its opposite.
        step_allowed: whether ``on_step=True`` is allowed.
        instead: if ``self.log`` cannot be used in this part, where to use it instead; otherwise an empty string.
    """

    __slots__ = ("instead", "name", "on_step", "step_allowed")

    def __init__(self, name: str, *, on_step: bool = False, step_allowed: bool = False, instead: str = "") -> None:
        self.name = name
        self.on_step = on_step
        self.step_allowed = step_allowed
        self.instead = instead


TRAIN_BATCH = Moment("a training batch", on_step=True, step_allowed=True)
EVAL_BATCH = Moment("an evaluation batch", step_allowed=True)

ON_TRAIN_START = Moment("on_train_start")
ON_TRAIN_EPOCH_START = Moment("on_train_epoch_start")
ON_TRAIN_EPOCH_END = Moment("on_train_epoch_end")
EVAL_MODE = Moment("a hook that switches the mode for {stage}", instead="on_{stage}_start")
SAVE = Moment("on_save_checkpoint", instead="the step or hook that leads to saving")
ON_EVAL_START = Moment("on_{stage}_start")
ON_EVAL_EPOCH_END = Moment("on_{stage}_epoch_end")

_STEP = "training_step or on_train_epoch_end"
SETUP = Moment("setup, configure_* or on_fit_start", instead=_STEP)
SANITY_HOOK = Moment("a sanity-check hook", instead="validation_step")
LR_SCHEDULER_STEP = Moment("lr_scheduler_step", instead="training_step (or use the LearningRateMonitor callback)")
BATCH_TRANSFER = Moment("a batch-transfer hook", instead="the step that gets the batch")
ON_TRAIN_END = Moment("on_train_end, on_fit_end or teardown", instead="on_train_epoch_end")
ON_EVAL_END = Moment("on_{stage}_end", instead="on_{stage}_epoch_end")
PREDICT = Moment("predict", instead="validation_step or test_step")
