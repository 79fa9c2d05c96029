"""Better words for errors of a loop of one's own."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..data.worker_processes import explain_lost_worker, torchs_own
from ..memory.out_of_memory_error import ACCELERATOR, Situation, explained, needs_words

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .models import PreparedModel


def answer(
    reference: Callable[[], Accelerator | None], model: PreparedModel | None, error: BaseException
) -> BaseException | None:
    """An error of the same type that says what to do; None if there is nothing to add to ``error``.

    Args:
        reference: a weak one to the Accelerator; one that is gone has nothing to say.
        model: whose forward, backward or step it was; None: not known.
        error: what was raised.
    """
    lost = explain_lost_worker(error, "")
    if lost is not None:
        return lost
    accelerator = reference()
    strategy = model.strategy if model is not None else None if accelerator is None else accelerator.strategy
    better = None if strategy is None else strategy.explain(error)
    if better is not None or accelerator is None or strategy is None or not needs_words(error):
        return better
    state = accelerator.gradient_state
    loader = state.active_dataloader
    total = None if loader is None else loader.total_batch_size
    trained = [one for one in accelerator._placements.values() if not one.frozen]
    return explained(
        error,
        Situation(
            ACCELERATOR,
            "" if loader is None else f"pass {loader.epoch} over the data",
            strategy,
            list(accelerator._models),
            [one.optimizer for one in accelerator._optimizers],
            None if total is None else max(1, total // strategy.num_data_ranks),
            state.num_steps,
            training=bool(trained) and (model is None or model.module.training),
        ),
    )


def nobody() -> None:
    """Stands for the reference to an Accelerator where there is none."""


def answer_uncaught(reference: weakref.ref[Accelerator]) -> None:
    """Give the words also to an error that ends the program from where nothing of ours runs.

    So it is with a model in full precision in one process: its forward is its own, and costs nothing more.
    """
    before: Any = sys.excepthook
    if isinstance(before, partial) and before.func is _uncaught:
        before = before.args[1]  # the Accelerator made last speaks
    sys.excepthook = partial(_uncaught, reference, before)


def _uncaught(
    reference: weakref.ref[Accelerator], before: Any, kind: Any, error: BaseException, trace: TracebackType | None
) -> None:
    better = answer(reference, None, error) if isinstance(error, RuntimeError) else None
    if better is None:
        before(kind, error, trace)
    else:
        better.__cause__ = torchs_own(error)
        before(type(better), better, None)
