"""A Trainer in a script that ``paceline doctor`` runs: what the plan wants counts, whatever the script says."""

from __future__ import annotations

from typing import Any

from .script_options import Plan

#: Arguments of the Trainer that a trial may change.
ARGUMENTS = ("devices", "strategy", "compile", "accumulate_grad_batches", "precision")


def overruled(given: dict[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments as the plan wants them; as they are where there is none."""
    plan = Plan.found()
    if plan is None:
        return given
    from .script_run import PlannedDoctor

    return {
        **given,
        **{name: plan.change[name] for name in ARGUMENTS if name in plan.change},
        "profiler": PlannedDoctor(plan),
        "min_steps": None,
        "min_epochs": None,
        "barebones": False,
    }
