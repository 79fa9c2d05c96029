"""Findings about processes that work together."""

from __future__ import annotations

from statistics import median

from ...loggers.messages import ranks as named_ranks
from .facts import Facts
from .finding import Case, Finding, duration, faster, percent, there

#: Shares of the time from which on something is worth a word.
COMMUNICATION = 0.20
STRAGGLING = 0.15


def _own(facts: Facts) -> float:
    """Seconds a step in which a process does something itself."""
    return facts.step * (1 - facts.share("communication"))


def _on_the_way(case: Case) -> float:
    """Seconds a step that all ranks wait for gradients: what the last one to come waits is no waiting for another."""
    return min(facts.step * facts.share("communication") for facts in case)


def _some_are_missing(case: Case) -> bool:
    """Not all ranks are known: one that waits for gradients may wait for another that is late."""
    return len(case) < case[0].world_size


def model_too_small(case: Case) -> Finding | None:
    """One process alone would be faster."""
    n = case[0].world_size
    wait, compute = _on_the_way(case), max(facts.compute for facts in case)
    if n < 2 or _some_are_missing(case) or not compute or wait <= (n - 1) * compute:
        return None
    alone, together = n * compute, compute + wait
    return Finding(
        "model_too_small",
        f"{n} processes are slower than one: gradients take {duration(wait)} a step, computing {duration(compute)}.",
        f"One process would compute all {n} shares of a batch in at most {duration(alone)}; together they take "
        f"{duration(together)}.",
        there(case, "Trainer(devices=1)", "paceline launch --num_processes 1")
        + " with the whole batch; several processes pay when a step computes longer than it talks.",
        f"At least {together / alone:.1f} times as fast (paceline doctor --try measures it).",
        wait / max(together, 1e-12),
    )


def communication_bound(case: Case) -> Finding | None:
    """Gradients take longer than backward hides."""
    facts = case[0]
    wait = _on_the_way(case)
    share = wait / facts.step if facts.step else 0.0
    if facts.world_size < 2 or _some_are_missing(case) or share < COMMUNICATION or model_too_small(case):
        return None
    size = facts.parameter_bytes / 1e6
    often = there(case, "accumulate_grad_batches=4", "Accelerator(gradient_accumulation_steps=4)")
    half = " DDPStrategy(ddp_comm_hook='bf16') halves the bytes;" if facts.device == "cuda" else ""
    return Finding(
        "communication_bound",
        f"Waiting for gradients takes {percent(share)} of each step ({duration(wait)}), on every rank.",
        f"{size:.3g} MB of gradients go between {facts.world_size} processes, and backward hides only a part of it.",
        f"{often} communicates a quarter as often;{half} a larger batch computes longer for the same bytes.",
        f"A quarter as often, about {1 / (1 - share * 0.75):.1f} times as fast.",
        share,
    )


def stragglers(case: Case) -> Finding | None:
    """One process is slower than the others, who wait for it."""
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
    waiting = named_ranks(facts.rank for facts in others)
    return Finding(
        "stragglers",
        f"Rank {slowest.rank} takes {duration(lost)} a step longer than the others: {waiting} "
        f"wait{'s' if len(others) == 1 else ''} {percent(share)} of the time.",
        f"It is later in {part} by {duration(late[part])} a step.",
        "Look at what differs there: longer samples (sort or bucket them), other programs on its cores or GPU, a GPU "
        "that runs hot, a slower disk.",
        faster(share),
        share,
    )
