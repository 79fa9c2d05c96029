"""Findings about how processes work together."""

from __future__ import annotations

from statistics import median

from ..messages import ranks as named_ranks
from .finding import Case, Finding, duration, faster, hooks, listed, percent, there
from .measurements import Facts
from .step_clock import WORDS

#: Fractions of the time above which a finding is reported.
COMMUNICATION = 0.20
STRAGGLING = 0.15


def _own(facts: Facts) -> float:
    """Return a process's own seconds per step, excluding the time that it waits for other processes."""
    return facts.step * (1 - facts.share("communication"))


def _on_the_way(case: Case) -> float:
    """Return how many seconds per step the gradients are in transit.

    This is the shortest wait of all ranks, because the slowest rank waits only for the gradients, not for other ranks.
    """
    return min(facts.step * facts.share("communication") for facts in case)


def _some_are_missing(case: Case) -> bool:
    """Return True if some ranks were not measured. If so, a wait for gradients may be a wait for one of these ranks."""
    return len(case) < case[0].world_size


def model_too_small(case: Case) -> Finding | None:
    """Report that a single process would be faster than all processes together."""
    n = case[0].world_size
    wait, compute = _on_the_way(case), max(facts.compute for facts in case)
    if n < 2 or _some_are_missing(case) or not compute or wait <= (n - 1) * compute:
        return None
    alone, together = n * compute, compute + wait
    return Finding(
        "model_too_small",
        f"{n} processes are slower than a single one, because a step waits {duration(wait)} for gradients but "
        f"computes for only {duration(compute)}.",
        f"One process would compute the whole batch in at most {duration(alone)}, whereas {n} processes take "
        f"{duration(together)}.",
        f"Use {there(case, 'Trainer(devices=1)', 'paceline launch --num_processes 1')} with the whole batch. Several "
        "processes pay off if a step spends more time on computing than on communicating.",
        f"A step will be at least {together / alone:.1f} times as fast; paceline doctor --try measures the speedup.",
        wait / max(together, 1e-12),
    )


def communication_bound(case: Case) -> Finding | None:
    """Report gradient communication that takes longer than the backward pass can hide."""
    facts = case[0]
    wait = _on_the_way(case)
    share = wait / facts.step if facts.step else 0.0
    if facts.world_size < 2 or _some_are_missing(case) or share < COMMUNICATION or model_too_small(case):
        return None
    size = facts.parameter_bytes / 1e6
    often = there(case, "accumulate_grad_batches=4", "Accelerator(gradient_accumulation_steps=4)")
    half = " DDPStrategy(ddp_comm_hook='bf16') halves the bytes to send." if facts.device == "cuda" else ""
    return Finding(
        "communication_bound",
        f"Waiting for gradients takes {percent(share)} of each step ({duration(wait)}) on every rank.",
        f"{facts.world_size} processes exchange {size:.3g} MB of gradients, and only a part of this communication "
        "overlaps with the backward pass.",
        f"Set {often} to communicate only a quarter as often, or use a larger batch, which increases computation but "
        f"not communication.{half}",
        f"With a quarter of the communication, training is about {1 / (1 - share * 0.75):.1f} times as fast.",
        share,
    )


def stragglers(case: Case) -> Finding | None:
    """Report a process that is so slow that the other processes wait for it."""
    slowest = max(case, key=_own)
    others = [facts for facts in case if facts.rank != slowest.rank]
    if not others:
        return None
    typical = median(_own(facts) for facts in others)
    lost = _own(slowest) - typical
    share = lost / slowest.step if slowest.step else 0.0
    if share < STRAGGLING:
        return None
    late = {
        name: slowest.parts.get(name, 0.0) / max(slowest.steps, 1)
        - median(facts.parts.get(name, 0.0) / max(facts.steps, 1) for facts in others)
        for name in slowest.parts
        if name != "communication"
    }
    part = max(late, key=lambda name: late[name])
    named = listed(hooks(slowest)) if part == "callbacks" else ""
    waiting = named_ranks(facts.rank for facts in others)
    return Finding(
        "stragglers",
        f"Rank {slowest.rank} takes {duration(lost)} longer for a step than the other ranks, and {waiting} "
        f"wait{'s' if len(others) == 1 else ''} {percent(share)} of the time.",
        f"Rank {slowest.rank} spends {duration(late[part])} more per step on "
        f"{WORDS[part]}{f': {named}' if named else ''}.",
        "Look for differences between that rank and the others: longer samples (sort or bucket them), other programs "
        "on its cores or GPU, an overheated GPU, a slower disk.",
        faster(share, "the wait"),
        share,
    )


FINDINGS = (model_too_small, communication_bound, stragglers)
