"""The methods with which subclasses of Lightning's ModelCheckpoint choose when to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...callbacks.base import overridden
from ...callbacks.model_checkpoint import ModelCheckpoint

_SKIPS = "_should_skip_saving_checkpoint"
_AT_EPOCH_END = "_should_save_on_train_epoch_end"
_SAVES_RANKED = "_save_topk_checkpoint"
#: Attribute with the arguments of the save that a subclass's ``_save_topk_checkpoint`` carries out.
_ASKED = "_asked_save"


def install() -> None:
    """Add Lightning's private methods to ModelCheckpoint, and make it call a subclass's overrides of them."""
    kind: Any = ModelCheckpoint
    theirs: dict[str, Any] = {
        _SKIPS: _skips,
        _AT_EPOCH_END: kind._saves_at_epoch_end,
        "_save_on_train_epoch_end": property(
            lambda callback: callback.save_on_train_epoch_end,
            lambda callback, value: setattr(callback, "save_on_train_epoch_end", value),
        ),
        "_last_global_step_saved": property(_last_saved),
        _SAVES_RANKED: _saving_ranked(kind._save_as),
    }
    for name, member in theirs.items():
        setattr(kind, name, member)
    kind._saves_at_epoch_end = lambda callback, trainer: getattr(callback, _AT_EPOCH_END)(trainer)
    kind.may_save = _asking(kind.may_save)
    kind._save_as = _by_program(kind._save_as)
    kind.on_validation_end = _outside_fits(kind.on_validation_end)


def _last_saved(callback: Any) -> int:
    return max(callback._saved_step, callback._last_step, 0)


def _skips(callback: Any, trainer: Any) -> bool:
    """Return True if nothing may be saved now, or if the current step has already been saved."""
    running = trainer.state.fn == "fit" and not trainer.fast_dev_run and not trainer.sanity_checking
    return not running or _last_saved(callback) == trainer.global_step


def _asking(may_save: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap ``may_save`` to let a subclass decide, unless the current step has already been saved."""

    def ask(callback: Any, trainer: Any) -> bool:
        skips = overridden(callback, _SKIPS, ModelCheckpoint)
        if skips is None:
            return may_save(callback, trainer)
        if trainer.global_step and _last_saved(callback) == trainer.global_step:
            return may_save(callback, trainer)  # a late score, or last, may still be missing
        return not skips(trainer)

    return ask


def _outside_fits(on_validation_end: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``on_validation_end`` to save a checkpoint after ``validate`` if a subclass decides to save one."""

    def end(callback: Any, trainer: Any, module: Any) -> None:
        if trainer.state.fn == "fit":
            on_validation_end(callback, trainer, module)
            return
        skips = overridden(callback, _SKIPS, ModelCheckpoint)
        if skips is not None and not skips(trainer) and not callback._saves_at_epoch_end(trainer):
            callback._prepare(trainer)
            callback._save_epoch(trainer)

    return end


def _saving_ranked(save_as: Callable[..., None]) -> Callable[[Any, Any, Any], None]:
    """Return the method that writes a ranked file, which a subclass may wrap; ``last`` is written with it."""

    def save(callback: Any, trainer: Any, monitor_candidates: Any) -> None:
        scored, background = vars(callback).get(_ASKED, (True, False))
        if callback.save_top_k != 0:
            save_as(callback, trainer, monitor_candidates, True, scored, background)

    return save


def _by_program(save_as: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_save_as`` to let a subclass that defines ``_save_topk_checkpoint`` write the ranked file."""

    def save(callback: Any, trainer: Any, candidates: Any, ranked: bool, scored: bool, background: bool) -> None:
        own = overridden(callback, _SAVES_RANKED, ModelCheckpoint) if ranked else None
        if own is None:
            save_as(callback, trainer, candidates, ranked, scored, background)
            return
        setattr(callback, _ASKED, (scored, background))
        try:
            own(trainer, candidates)
        finally:
            delattr(callback, _ASKED)
        if callback.save_last and callback._last_step != trainer.global_step:
            save_as(callback, trainer, candidates, False, scored, background)

    return save
