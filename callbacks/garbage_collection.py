"""Lets Python's garbage collector run between steps that all ranks agree on, instead of in the middle of any."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: Python collects by itself, all the same, where so many more containers were made than freed since a collection.
MOST_UNSEEN = 100_000
#: One collection in so many may go over everything that is not frozen.
FULL_EVERY = 10
#: It does if more than this share of what the last one left has arisen since, which is Python's own rule.
GROWTH = 0.25


class GarbageCollection(Callback):
    """Collects Python's garbage every n steps, on all ranks in front of the same step, and not in between.

    Python walks over its objects when many have been made, wherever the program is. With many objects (a data set that
    is a list, say) a walk over all of them takes a good part of a second; on several processes the others wait at the
    next gradient, each rank has its pauses at other steps, and they add up. Here the ranks have them at the same time,
    and after the first step all objects that are there by then are frozen: no collection looks at them any more.

    While a validation runs, between fits, and in the workers of loaders Python collects as always. When the fit ends,
    also by an exception or a signal, the collector is as it was before, and what was frozen is not.

    Objects in reference cycles, and the tensors they hold, live longer: those that one step makes and leaves up to
    ``every_n_steps`` steps, those that outlive a collection until a full one.
    What is frozen is freed as always when its last reference goes, but if it is in a cycle, only after the fit.

    Args:
        every_n_steps: optimizer steps between two collections of what has arisen since; one in ten goes over all that
            is not frozen, if that has grown by a quarter. None: Python collects when it likes, objects are frozen.
        freeze: freeze the objects that are there after the first step, which is preceded by a full collection. If
            somebody else has frozen objects before the fit, these stay frozen, and no more are. So it is in forked
            ranks (``"ddp_notebook"``), where all that was there when they were forked is frozen.

    Example:
        >>> trainer = Trainer(callbacks=[GarbageCollection()])  # doctest: +SKIP
    """

    def __init__(self, every_n_steps: int | None = 50, freeze: bool = True) -> None:
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and not (whole and every_n_steps > 0):
            raise ValueError(
                f"GarbageCollection(every_n_steps={every_n_steps!r}) is no number of steps. Pass a whole number from 1 "
                "on, or None to leave it to Python when it collects."
            )
        if every_n_steps is None and not freeze:
            raise ValueError(
                "GarbageCollection(every_n_steps=None, freeze=False) would do nothing. Pass one of them, or leave the "
                "callback out."
            )
        self.every_n_steps = every_n_steps
        self.freeze = freeze
        self._clear()

    def _clear(self) -> None:
        self._next = float("inf")
        self._begun = self._froze = self._holds = False
        self._collections = self._left = self._since = 0

    # ---- a fit -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._next = trainer.state.updates + 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int) -> None:
        if trainer.state.updates >= self._next:
            self._due(trainer.state.updates)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._hold(False)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._begun and self.every_n_steps is not None:
            self._hold(True)
            self._since = max(self._since, _long_lived() - self._left)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._holds:
            self._collect(full=True)

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._hold(False)
        if self._froze:
            _PROCESS.unfreeze()
        self._clear()

    def _due(self, updates: int) -> None:
        """A collection, or the beginning: in front of the batch that follows the first step."""
        every = self.every_n_steps
        self._next = float("inf") if every is None else (updates // every + 1) * every
        if not self._begun:
            self._begin()
        else:
            self._collections += 1
            self._collect(full=self._collections % FULL_EVERY == 0)

    def _begin(self) -> None:
        self._begun = True
        gc.collect()
        if self.freeze:
            self._froze = _PROCESS.freeze()
        if self.every_n_steps is not None:
            self._left = _long_lived()
            self._hold(True)

    def _hold(self, on: bool) -> None:
        if on is not self._holds:
            self._holds = on
            _PROCESS.hold(on)

    def _collect(self, full: bool) -> None:
        young = gc.get_count()[0]
        if full and self._since + young > GROWTH * self._left:
            gc.collect()
            self._left, self._since = _long_lived(), 0
        else:
            self._since += max(0, young - gc.collect(1))

    def __getstate__(self) -> dict[str, Any]:
        return {"every_n_steps": self.every_n_steps, "freeze": self.freeze}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def _long_lived() -> int:
    """Objects that a full collection would go over, right after one."""
    return len(gc.get_objects(generation=2))


class _Process:
    """The collector is the process's: several fits may want something of it at a time."""

    def __init__(self) -> None:
        self.holders = 0
        self.froze = False
        self.copied = False
        self.thresholds = gc.get_threshold()
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forked)

    def hold(self, on: bool) -> None:
        """Have Python collect by itself as a last resort only, or as it did before, if no other fit goes on."""
        with self.lock:
            if on and not self.holders:
                self.thresholds = gc.get_threshold()
                if 0 < self.thresholds[0] < MOST_UNSEEN:
                    gc.set_threshold(MOST_UNSEEN, *self.thresholds[1:])
            self.holders += 1 if on else -1
            if not self.holders:
                gc.set_threshold(*self.thresholds)

    def freeze(self) -> bool:
        """Freeze all objects, unless some are: Python can only unfreeze them all. Whether it was done."""
        with self.lock:
            frozen = gc.get_freeze_count()
            if frozen and not (self.froze or self.copied):
                messages.info_once(
                    f"GarbageCollection freezes nothing: {frozen} objects were frozen before the fit, and Python can "
                    "only unfreeze all at once. Call gc.unfreeze() before the fit, or pass freeze=False."
                )
            if frozen:
                return False
            gc.freeze()
            self.froze = True
            return True

    def unfreeze(self) -> None:
        """Undo it."""
        with self.lock:
            self.froze = False
            gc.unfreeze()

    def forked(self) -> None:
        """In a child process, such as a loader's worker, nobody collects by hand. What is frozen stays so."""
        self.lock = threading.Lock()
        self.copied = True
        if self.holders:
            self.holders = 0
            gc.set_threshold(*self.thresholds)


_PROCESS = _Process()
