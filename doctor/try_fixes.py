"""``--try``: does a short run with each promising change, and compares its speed with that of the original run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..devices.kinds import kind_of
from .data_findings import cores_each, wanted_workers
from .measurements import Facts
from .report import Report

#: Names of the changes that can be tried.
NAMES = ("num_workers", "pin_memory", "batch_size", "processes", "compile", "accumulation")


def candidates(facts: Facts) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, description and plan of each change worth trying; in a user's own loop, only loader changes."""
    loader = facts.loader
    workers = loader.get("num_workers")
    if workers is not None:
        cores = cores_each(facts)
        sweep = {0, 1, 2, 4, 8, 16, cores, min(wanted_workers(facts), cores)}
        for count in sorted(count for count in sweep if count <= cores and count != workers):
            yield "num_workers", f"num_workers={count} (was {workers})", {"num_workers": count}
        if kind_of(facts.device).overlaps_copies() and not loader.get("pin_memory"):
            yield "pin_memory", "pin_memory=True", {"pin_memory": True}
        if loader.get("batch_size"):
            for factor in (2, 4):
                size = loader["batch_size"]
                yield "batch_size", f"batch_size={size * factor} (was {size})", {"batch_factor": factor}
    if facts.own_loop:
        return
    if facts.world_size > 1:
        yield "processes", f"one process (was {facts.world_size})", {"devices": 1, "strategy": "auto"}
        factor = facts.accumulate * 4
        yield "accumulation", f"accumulate_grad_batches={factor}", {"accumulate_grad_batches": factor}
    yield "compile", "compile=True", {"compile": True}
    if facts.world_size == 1:
        yield "compile", "compile='step'", {"compile": "step"}


def names(text: str) -> set[str]:
    """Parse a list of names such as ``"num_workers,compile"``.

    Raises:
        ValueError: if a name is unknown, or there are no names.
    """
    found = {name.strip() for name in text.split(",")} - {""}
    unknown = sorted(found - set(NAMES))
    if unknown or not found:
        what = f"{unknown[0]!r} is not a change that can be tried" if unknown else f"--only {text!r} names no change"
        raise ValueError(f"{what}. Choose from {', '.join(NAMES)}.")
    return found


def speed(ranks: list[Facts]) -> float:
    """Return the samples per second of all processes together, or batches per second if the batch size is unknown."""
    return sum((facts.batch_size or 1) / facts.step for facts in ranks if facts.step)


def tried(
    report: Report,
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    say: Callable[[str], None],
    only: set[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Try all applicable changes; yield a row for the original run, then a row for each change.

    ``measure`` runs the script with a change and returns the report's data. ``say`` prints which change is tried next.
    ``only`` contains the names of the changes to try; None tries all changes.
    """
    first = report.ranks[0]
    before = speed(report.ranks)
    yield _row("unchanged", before, before, first.step)
    for name, words, change in candidates(first):
        if only is not None and name not in only:
            continue
        say(f"Trying {words} ...")
        try:
            found = Report.from_dict(measure(change)).ranks
        except (RuntimeError, OSError) as error:
            yield {"what": words, "error": str(error).splitlines()[0][:80]}
            continue
        fast = speed(found)
        yield _row(words, fast, before, found[0].step) if fast else {"what": words, "error": "ended too soon"}


def mark_best(rows: list[dict[str, Any]]) -> None:
    """Mark the row with the most samples per second."""
    if rows:
        max(rows, key=lambda row: row.get("samples_per_second", 0.0))["best"] = True


def _row(what: str, found: float, before: float, step: float) -> dict[str, Any]:
    factor = found / before if before else None
    return {"what": what, "samples_per_second": found, "factor": factor, "step_seconds": step}
