"""Explains errors that occur in the user's own training loop."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..data.worker_processes import explain_lost_worker, torchs_own
from ..memory.out_of_memory_error import ACCELERATOR, Situation, explained, needs_words

if TYPE_CHECKING:
    from .models import PreparedModel
    from .prepare import Prepared


class Errors:
    """Tells users what to do about errors in their models, optimizers and loops.

    Holds only weak references to prepared objects, so that a loader and its workers shut down as soon as the script
    drops the loader.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = weakref.ref(prepared)

    def explain(self, model: PreparedModel | None, error: BaseException) -> BaseException | None:
        """Return a new error that has the type of ``error`` and says what to do, or None if there is nothing to add."""
        prepared = self._prepared()
        owner = model or prepared
        better = explain_lost_worker(error, "") or (owner and owner.strategy.explain(error))
        if better is not None or owner is None or prepared is None or not needs_words(error):
            return better
        state = prepared.gradient_state
        loader = state.active_dataloader
        total = None if loader is None else loader.total_batch_size
        return explained(
            error,
            Situation(
                ACCELERATOR,
                "" if loader is None else f"pass {loader.epoch} over the data",
                owner.strategy,
                prepared.models,
                [one.optimizer for one in prepared.live_optimizers],
                None if total is None else max(1, total // owner.strategy.num_data_ranks),
                state.num_steps,
                training=bool(prepared.trained) and (model is None or model.module.training),
            ),
        )

    def explain_uncaught(self) -> None:
        """Install an exception hook that explains uncaught errors.

        In full precision on one process, the model's forward method is not wrapped, so only this hook sees its errors.
        """
        before: Any = sys.excepthook
        if isinstance(before, partial) and getattr(before.func, "__func__", None) is Errors._uncaught:
            before = before.args[0]  # only the newest Accelerator explains errors
        sys.excepthook = partial(self._uncaught, before)

    def _uncaught(self, before: Any, kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        better = self.explain(None, error) if isinstance(error, RuntimeError) else None
        if better is None:
            before(kind, error, trace)
        else:
            better.__cause__ = torchs_own(error)
            before(type(better), better, None)
