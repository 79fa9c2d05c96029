"""Callback that runs Python's garbage collector at the same steps on all ranks, instead of at arbitrary times."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: Python still collects when this many more containers were allocated than freed since the last collection.
MOST_UNSEEN = 100_000
#: Of this many collections, one may scan all objects that are not frozen.
FULL_EVERY = 10
#: A full scan runs if new objects exceed this fraction of those that the last full scan left; Python uses the same
#: rule.
GROWTH = 0.25
#: Fewer frozen objects than this are Python's own: a full collection of Python 3.12 freezes its immortal objects
#: (PEP 683), some 400.
OWN_FROZEN = 5000 if sys.version_info[:2] == (3, 12) else 0


class GarbageCollection(Callback):
    """During training, run Python's garbage collector only at fixed steps, which are the same on all ranks.

    By default, Python scans its objects at arbitrary times, whenever many have been allocated. With many objects (for
    example, a dataset stored as a list), a full scan takes a large fraction of a second. With several processes, the
    other ranks wait for the scanning rank at the next gradient reduction. Each rank pauses at different steps, so the
    pauses add up. With this callback, all ranks pause at the same time. After the first step, all existing objects are
    frozen, so no collection scans them again.

    During validation, between fits and in data loader workers, Python collects as usual. When the fit ends, even
    because of an exception or a signal, the collector's settings are restored and the objects are unfrozen.

    Objects in reference cycles, and the tensors they hold, live longer: up to ``every_n_steps`` steps, or, if they
    survive a collection, until the next full one. A frozen object is freed as usual when its last reference is gone; if
    it is in a cycle, it is freed only after the fit.

    Args:
        every_n_steps: optimizer steps between two collections of new objects. One collection in ten, and an additional
            one at the end of each epoch, scans all objects that are not frozen, but only if their number has grown by a
            quarter since the last full scan. If None, this callback only freezes objects, and Python decides when to
            collect.
        freeze: after the first step, run a full collection and freeze the remaining objects. If objects were frozen
            before the fit, they stay frozen and no others are frozen. This is the case in forked ranks
            (``"ddp_notebook"``), where all objects that existed at the fork are frozen.

    Example:
        >>> trainer = Trainer(callbacks=[GarbageCollection()])  # doctest: +SKIP
    """

    def __init__(self, every_n_steps: int | None = 50, freeze: bool = True) -> None:
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and not (whole and every_n_steps > 0):
            raise ValueError(
                f"GarbageCollection: every_n_steps={every_n_steps!r} must be a whole number of at least 1, or None to "
                "let Python decide when to collect."
            )
        if every_n_steps is None and not freeze:
            raise ValueError(
                "GarbageCollection(every_n_steps=None, freeze=False) would do nothing. Pass a number for "
                "every_n_steps, pass freeze=True, or remove the callback."
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
        """Run a collection.

        The first call, before the second step, freezes objects and starts the regular collections.
        """
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
    """Return the number of objects that a full collection would scan; exact only right after a full collection."""
    return len(gc.get_objects(generation=2))


def frozen_objects() -> int:
    """Return the number of objects that :func:`gc.freeze` has frozen."""
    found = gc.get_freeze_count()
    return found if found > OWN_FROZEN else 0


class _ProcessCollector:
    """The process's garbage collector, which several fits may use at the same time."""

    def __init__(self) -> None:
        self.holders = 0
        self.froze = False
        self.copied = False
        self.thresholds = gc.get_threshold()
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forked)

    def hold(self, on: bool) -> None:
        """If ``on``, raise the thresholds so that Python collects only as a last resort.

        Otherwise, restore the thresholds once no fit needs the raised ones.
        """
        with self.lock:
            if on and not self.holders:
                self.thresholds = gc.get_threshold()
                if 0 < self.thresholds[0] < MOST_UNSEEN:
                    gc.set_threshold(MOST_UNSEEN, *self.thresholds[1:])
            self.holders += 1 if on else -1
            if not self.holders:
                gc.set_threshold(*self.thresholds)

    def freeze(self) -> bool:
        """Freeze all objects and return True, or return False if some are already frozen.

        Python can only unfreeze all objects at once.
        """
        with self.lock:
            frozen = frozen_objects()
            if frozen and not (self.froze or self.copied):
                messages.info_once(
                    f"GarbageCollection does not freeze any objects, because {frozen} were already frozen before "
                    "the fit and Python can only unfreeze all objects at once. Call gc.unfreeze() before the fit, or "
                    "pass freeze=False."
                )
            if frozen:
                return False
            gc.freeze()
            self.froze = True
            return True

    def unfreeze(self) -> None:
        """Unfreeze all objects."""
        with self.lock:
            self.froze = False
            gc.unfreeze()

    def forked(self) -> None:
        """Restore the thresholds in a child process, such as a data loader worker. Frozen objects stay frozen."""
        self.lock = threading.Lock()
        self.copied = True
        if self.holders:
            self.holders = 0
            gc.set_threshold(*self.thresholds)


_PROCESS = _ProcessCollector()
