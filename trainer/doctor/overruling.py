"""A Trainer in a script that ``paceline doctor`` runs: what the plan wants counts, whatever the script says."""

from __future__ import annotations

from typing import Any

from .plan import Plan

#: Arguments of the Trainer that a trial may change.
ARGUMENTS = ("devices", "strategy", "compile", "accumulate_grad_batches", "precision")


def overruled(given: dict[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments as the plan wants them; as they are where there is none."""
    plan = Plan.found()
    if plan is None:
        return given
    from .planned import PlannedDoctor

    changed = {name: plan.change[name] for name in ARGUMENTS if name in plan.change}
    accumulate = changed.get("accumulate_grad_batches", given["accumulate_grad_batches"])
    steps = max(1, plan.steps // accumulate)
    least = given["max_steps"]
    return {
        **given,
        **changed,
        "profiler": PlannedDoctor(plan),
        "max_steps": steps if least in (-1, None) else min(steps, least),
        "max_epochs": given["max_epochs"] if given["max_epochs"] is not None else -1,
        "min_steps": None,
        "min_epochs": None,
        "barebones": False,
    }
