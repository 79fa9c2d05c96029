"""A user's own loop in a script that ``paceline doctor`` runs."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .script_options import Plan, loader_change

if TYPE_CHECKING:
    from ..accelerator.accelerator import Accelerator


def examine_if_planned(accelerator: Accelerator) -> None:
    """Examine this Accelerator's loop if the environment contains a plan."""
    plan = Plan.found()
    if plan is not None:
        _examine(accelerator, plan)


def _examine(accelerator: Accelerator, plan: Plan) -> None:
    """Measure until the plan's batches are done or training ends; then write the report and exit."""
    from torch.utils.data import DataLoader

    from .own_loop import Wiring
    from .script_run import PlannedDoctor, changed

    examiner = PlannedDoctor(plan)
    examiner.setup("fit", accelerator.local_process_index)
    wiring = Wiring(accelerator, examiner)
    change, done = loader_change(plan.change), [False]

    def finish() -> None:
        if not done[0]:
            done[0] = True
            wiring.unwrap()
            examiner.end()
            examiner.describe()
            examiner.teardown("fit")

    def prepare(wrapped: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        return wrapped(*(changed(one, **change) if isinstance(one, DataLoader) else one for one in objects), **options)

    def limited(iterate: Callable[..., Iterator[Any]], action: str, iterator: Any) -> Iterator[Any]:
        for batch in iterate(action, iterator):
            yield batch
            plan.steps -= 1
            if plan.steps <= 0:
                finish()
                raise SystemExit(0)

    wiring.wrap()
    examiner.begin(wiring)
    vars(examiner)["iterate"] = partial(limited, examiner.iterate)
    own = vars(accelerator)
    if change:
        own["prepare"] = partial(prepare, own["prepare"])
    end_training = accelerator.end_training

    def end() -> None:
        finish()
        end_training()

    own["end_training"] = end
    atexit.register(finish_if_it_went_well, finish)


def finish_if_it_went_well(finish: Callable[[], None]) -> None:
    """Make the report at exit, unless the program failed: the report needs all processes."""
    if getattr(sys, "last_value", None) is None:
        finish()
