"""Trainer arguments in a script that ``paceline doctor`` runs, where the plan's arguments override the script's."""

from __future__ import annotations

from typing import Any

from .script_options import Plan

#: Trainer arguments that a plan may change.
ARGUMENTS = ("devices", "strategy", "compile", "accumulate_grad_batches", "precision")


def overruled(given: dict[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments with the plan's changes; return them unchanged if there is no plan."""
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
