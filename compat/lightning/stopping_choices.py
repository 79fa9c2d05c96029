"""The methods with which subclasses of Lightning's EarlyStopping choose when to check and when to stop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ... import messages
from ...callbacks.base import overridden
from ...callbacks.early_stopping import EarlyStopping, EarlyStoppingReason, never_logged

_DECIDES = "_evaluate_stopping_criteria"
_IMPROVES = "_improvement_message"
_CHECKS = "_run_early_stopping_check"
_SKIPS = "_should_skip_check"
_HAS_METRIC = "_validate_condition_metric"
_SAYS = "_log_info"


def install() -> None:
    """Give EarlyStopping these methods, and call a subclass's own."""
    kind: Any = EarlyStopping
    theirs: dict[str, Any] = {
        _DECIDES: _deciding(kind._judge),
        _IMPROVES: lambda callback, current: f"{callback.monitor!r} improved to {current:.6g}.",
        _CHECKS: kind._check,
        _SKIPS: lambda callback, trainer: trainer.state.fn != "fit" or trainer.sanity_checking,
        _HAS_METRIC: _has_metric,
        _SAYS: staticmethod(_say),
        "_check_on_train_epoch_end": property(
            lambda callback: callback.check_on_train_epoch_end,
            lambda callback, value: setattr(callback, "check_on_train_epoch_end", value),
        ),
    }
    for name, member in theirs.items():
        setattr(kind, name, member)
    kind.__init__ = _with_signed_delta(kind.__init__)
    kind.on_validation_end = _outside_fits(kind.on_validation_end)
    kind._check = _checking
    kind._judge = _asking(kind._judge)
    kind._value = _if_there(kind._value)
    kind._say = _saying


def _own(callback: Any, name: str) -> Any:
    return overridden(callback, name, EarlyStopping)


def _with_signed_delta(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` to set ``min_delta`` as in Lightning: negative if a smaller metric is better."""

    @functools.wraps(init)
    def create(callback: Any, *args: Any, **kwargs: Any) -> None:
        init(callback, *args, **kwargs)
        callback.min_delta *= -1 if callback.mode == "min" else 1

    return create


def _deciding(judge: Callable[..., Any]) -> Callable[[Any, Tensor], tuple[bool, str | None]]:
    """Return Lightning's form of ``judge``: whether to stop, and a message. It sets ``stopping_reason``."""

    def decide(callback: Any, current: Tensor) -> tuple[bool, str | None]:
        reason, text = judge(callback, current)
        stop = reason is not EarlyStoppingReason.NOT_STOPPED
        if stop:
            callback.stopping_reason = reason
        return stop, text

    return decide


def _asking(judge: Callable[..., Any]) -> Callable[[Any, Tensor], Any]:
    """Wrap ``judge`` to ask a subclass that decides, or that words improvements, itself."""

    def ask(callback: Any, value: Tensor) -> Any:
        decides, words = _own(callback, _DECIDES), _own(callback, _IMPROVES)
        if decides is not None:
            stop, text = decides(value)
            if not stop:
                return EarlyStoppingReason.NOT_STOPPED, text
            given = callback.stopping_reason
            unknown = given is EarlyStoppingReason.NOT_STOPPED
            return EarlyStoppingReason.PATIENCE_EXHAUSTED if unknown else given, text
        before = callback.best_score
        reason, text = judge(callback, value)
        after = callback.best_score
        if words is not None and after is not before:
            callback.best_score = before
            text = words(value)
            callback.best_score = after
        return reason, text

    return ask


def _checking(callback: Any, trainer: Any) -> None:
    skips = _own(callback, _SKIPS)
    if skips is None or not skips(trainer):
        getattr(callback, _CHECKS)(trainer)


def _outside_fits(on_validation_end: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``on_validation_end`` to check outside of a fit, or in a sanity check, if a subclass decides so."""

    @functools.wraps(on_validation_end)
    def end(callback: Any, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            on_validation_end(callback, trainer, pl_module)
        elif _own(callback, _SKIPS) is not None and not callback._at_epoch_end(trainer):
            callback._check(trainer)

    return end


def _if_there(value: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``_value`` to ask a subclass whether the metric is there."""

    def read(callback: Any, trainer: Any) -> Any:
        has_metric = _own(callback, _HAS_METRIC)
        return None if has_metric is not None and not has_metric(trainer.callback_metrics) else value(callback, trainer)

    return read


def _has_metric(callback: Any, logs: Mapping[str, Tensor]) -> bool:
    """Return True if the metric was logged; if not, raise if ``strict``, and otherwise warn."""
    if callback.monitor in logs:
        return True
    text = never_logged("EarlyStopping", callback.monitor, logs)
    if callback.strict:
        raise RuntimeError(text)
    messages.warn_once(text, key=f"EarlyStopping {callback.monitor}")
    return False


def _say(trainer: Any, message: str, log_rank_zero_only: bool) -> None:
    """Report a message on rank 0 or, unless ``log_rank_zero_only``, on every rank."""
    if trainer is None or trainer.is_global_zero:
        messages.info(message)
    elif not log_rank_zero_only:
        messages.log.info("[rank %d] %s", trainer.global_rank, message)


def _saying(callback: Any, trainer: Any, text: str) -> None:
    getattr(callback, _SAYS)(trainer, text, callback.log_rank_zero_only)
