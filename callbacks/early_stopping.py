"""Callback that stops training when a metric stops improving, reaches a threshold, or diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .. import messages
from ..loggers.values import words_in
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class EarlyStoppingReason(Enum):
    """Why :class:`EarlyStopping` stopped training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Monitor a logged metric and stop training when it has not improved for ``patience`` checks.

    If the processes log different values, the mean of these values is used.

    Args:
        monitor: name of the metric, as passed to ``self.log``.
        min_delta: a change must be larger than this to count as an improvement.
        patience: number of consecutive checks without improvement after which training stops. There is a check after
            each epoch or each validation (see ``check_on_train_epoch_end``). After a resume, the count continues, but
            the new ``patience`` applies.
        verbose: also report improvements; the reason for stopping is always reported.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.
        strict: whether a metric that was not logged is an error. If False, warn once and skip the check.
        check_finite: stop as soon as the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: check after each training epoch (True) or after each validation (False). If None,
            check after each epoch if the fit has no validation or exactly one at the end of each epoch; otherwise,
            check after each validation.
        log_rank_zero_only: if True, only rank 0 prints this callback's messages; if False, every process does.

    Attributes:
        wait_count: checks since the last improvement.
        best_score: the best value so far, a scalar of shape ().
        stopped_epoch: epoch (0-based) in which this callback stopped training; 0 if it did not.
        stopping_reason: an :class:`EarlyStoppingReason`.
        stopping_reason_message: the reason in words; None if this callback did not stop training.
    """

    monitors_metrics = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        check_mode("EarlyStopping", mode)
        if not isinstance(monitor, str) or not monitor:
            raise TypeError(
                f"EarlyStopping: monitor={monitor!r} is not the name of a metric. "
                "Pass the name used in self.log, such as 'val_loss'."
            )
        check_direction("EarlyStopping", monitor, mode)
        if not min_delta >= 0:
            raise ValueError(
                f"EarlyStopping(min_delta={min_delta!r}) would count a worse metric as an improvement. Pass the size "
                "of the smallest improvement, which is 0 or more in both modes."
            )
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
            raise ValueError(
                f"EarlyStopping: patience={patience!r} must be a non-negative integer (the number of checks without "
                "improvement after which training stops)."
            )
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._validated = self._stopped_before = False

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """The function that returns whether one value is better than another: ``torch.lt`` or ``torch.gt``."""
        return torch.lt if self.mode == "min" else torch.gt

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._validated = False
        if self._stopped_before:
            self._stopped_before = False
            trainer.should_stop = True
            messages.info(
                f"Early stopping already ended this run, so nothing is left to train. {self.stopping_reason_message} "
                "To continue, raise the patience of EarlyStopping, or leave 'callbacks' out of fit(restore=)."
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._at_epoch_end(trainer):
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated = True
        if not self._at_epoch_end(trainer):
            self._check(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = torch.as_tensor(state_dict["best_score"])
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        exhausted = self.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
        if exhausted and self.wait_count < self.patience and state_dict["patience"] < self.patience:
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
        self._stopped_before = self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED

    def _at_epoch_end(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return metrics_are_complete_at_epoch_end(trainer)

    def _check(self, trainer: Trainer) -> None:
        value = self._value(trainer)
        if value is None or trainer.fast_dev_run:
            return
        reason, text = self._judge(value)
        stop = reason is not EarlyStoppingReason.NOT_STOPPED
        if trainer.strategy.agree(stop):
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason = reason
            self.stopping_reason_message = text if stop else "Another process requested the stop."
        if text and (self.verbose or trainer.should_stop):
            self._say(trainer, text)

    def _value(self, trainer: Trainer) -> Tensor | None:
        """Return the metric as a scalar on the CPU, or None to skip this check. This waits for the device."""
        metrics, strategy = trainer.callback_metrics, trainer.strategy
        own = metrics[self.monitor].detach().squeeze().cpu() if self.monitor in metrics else None
        if strategy.world_size > 1:  # each process may have its own value, but a checkpoint keeps the state of only one
            found = [value for value in strategy.gather_objects(own) if value is not None]
            own = value_of_all(found) if found else None
        if own is not None:
            return own
        text = never_logged("EarlyStopping", self.monitor, metrics, trainer.enable_validation)
        may_come = trainer.enable_validation and not self._validated
        if self.strict and not may_come:
            raise ValueError(text)
        messages.warn_once(
            f"{text} EarlyStopping skips its checks until {self.monitor!r} is logged.",
            key=f"EarlyStopping {self.monitor}",
        )
        return None

    def _better(self, value: Tensor, than: float | Tensor) -> bool:
        return bool(self.monitor_op(value, than))

    def _judge(self, value: Tensor) -> tuple[EarlyStoppingReason, str | None]:
        """Compare a value with the best one and the thresholds; return the reason to stop, if any, and a message."""
        name, sign = self.monitor, 1 if self.mode == "min" else -1
        if self.check_finite and not torch.isfinite(value):
            return EarlyStoppingReason.NON_FINITE_METRIC, (
                f"{name!r} is {value:g}, which is not finite (best so far: {self.best_score:.6g}), so training stops."
            )
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return EarlyStoppingReason.STOPPING_THRESHOLD, (
                f"Stopping threshold reached: {name!r} is {value:.6g}, better than {self.stopping_threshold:g}. "
                "Training stops."
            )
        if self.divergence_threshold is not None and self._better(-value, -self.divergence_threshold):
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, (
                f"Divergence threshold reached: {name!r} is {value:.6g}, worse than {self.divergence_threshold:g}. "
                "Training stops."
            )
        if self._better(value + sign * abs(self.min_delta), self.best_score):
            text = f"{name!r} improved from {self.best_score:.6g} to {value:.6g}."
            self.best_score, self.wait_count = value.clone(), 0
            return EarlyStoppingReason.NOT_STOPPED, text
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, None
        return EarlyStoppingReason.PATIENCE_EXHAUSTED, (
            f"{name!r} did not improve on {self.best_score:.6g} in {self.wait_count} "
            f"check{'' if self.wait_count == 1 else 's'}, so training stops."
        )

    def _say(self, trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero:
            messages.info(text)
        elif not self.log_rank_zero_only:
            messages.log.info("[rank %d] %s", trainer.global_rank, text)


def check_mode(who: str, mode: str) -> None:
    """Raise unless ``mode`` is ``"min"`` or ``"max"``."""
    if mode not in ("min", "max"):
        raise ValueError(
            f"{messages.unknown(f'{who} mode', mode, ('min', 'max'))} "
            "The mode says whether smaller or larger values of the metric are better."
        )


def check_direction(who: str, monitor: str | None, mode: str) -> None:
    """Warn about ``mode="min"``, the default, if the metric's name suggests that higher is better."""
    if mode != "min" or monitor is None:
        return
    words = words_in(monitor)
    if not words.isdisjoint(_HIGHER.split()) and words.isdisjoint(_LOWER.split()):
        messages.warn_once(
            f"{who}(monitor={monitor!r}, mode='min') treats the lowest {monitor!r} as the best, but the metric's name "
            "suggests that higher is better. Pass mode='max', or rename the metric."
        )


#: Words in the names of metrics for which higher is better, and words that mean the opposite (``dice_loss``).
_HIGHER = (
    "acc accuracy ap auc aupr auprc auroc bertscore bleu chrf cider correlation dice f1 fbeta fscore iou jaccard kappa "
    "map mcc meteor miou mrr ndcg pearson pesq precision psnr r2 recall reward roc rouge sensitivity spearman "
    "specificity ssim stoi top1 top3 top5 top10"
)
_LOWER = (
    "bytes calls ce cer cost count diff distance drop duration eer entropy epochs err error errors fails failures fnr "
    "fpr gap hours latency length loss losses mae memory minus minutes misses mistakes ms mse nll number params "
    "perplexity rmse sec seconds size std steps time uncertainty var variance wer"
)


def value_of_all(values: list[Tensor]) -> Tensor:
    """Return the value of a metric for all processes: their common value, or the mean if their values differ."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.stack(values).double().mean().to(values[0].dtype)


def metrics_are_complete_at_epoch_end(trainer: Trainer) -> bool:
    """Return True if all metrics are known when an epoch ends, because validation runs exactly then or not at all."""
    if not trainer.enable_validation:
        return True
    if trainer.check_val_every_n_epoch != 1 or trainer.val_check_seconds is not None:
        return False
    # 1.0 means once per epoch; the integer 1 means after every batch.
    return isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0


def never_logged(who: str, monitor: str, logged: Iterable[str], validates: bool = True) -> str:
    """Return the error message for a monitored metric that was not logged. It lists what was logged and suggests a fix.

    ``validates``: whether the fit runs validation. If it does not, the metric is probably logged in validation hooks.
    """
    logged = sorted(logged)
    there = f"Logged so far: {messages.names(logged, last='and')}." if logged else "Nothing has been logged so far."
    fix = (
        ""
        if validates
        else "This fit has no validation. If the metric is logged during validation, pass val_dataloaders. "
    )
    return (
        f"{who}(monitor={monitor!r}) has no value to monitor, because {monitor!r} was not logged."
        f"{messages.did_you_mean(monitor, logged)} {there} "
        f"{fix}Call self.log({monitor!r}, ...), or monitor a metric that is logged."
    )
