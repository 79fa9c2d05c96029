"""All findings. Each is a function of the measured facts that returns a Finding or None.

A finding says what is slow, why, how much of the time it takes, what to change, and the expected gain. The gain is
estimated from the measured times; ``paceline doctor --try`` measures it.
"""

from __future__ import annotations

from collections.abc import Callable

from .data_findings import data_bound, pageable_copies, too_few_workers, too_many_workers
from .finding import Case, Finding
from .machine_findings import (
    collection_pauses,
    fragmentation,
    memory_nearly_full,
    numa_distance,
    oversubscribed_threads,
)
from .process_findings import communication_bound, model_too_small, stragglers
from .step_findings import batch_too_small, checkpoint_share, evaluation_share, host_syncs, logging_share, recompiles

#: All findings; a report sorts them by their fraction of the time.
FINDINGS: tuple[Callable[[Case], Finding | None], ...] = (
    data_bound,
    too_few_workers,
    too_many_workers,
    pageable_copies,
    host_syncs,
    batch_too_small,
    recompiles,
    memory_nearly_full,
    fragmentation,
    model_too_small,
    communication_bound,
    stragglers,
    evaluation_share,
    checkpoint_share,
    logging_share,
    oversubscribed_threads,
    numa_distance,
    collection_pauses,
)


def examine(case: Case) -> list[Finding]:
    """Return all findings that apply, the largest fraction of the time first, notes last."""
    if not case or not all(facts.steps for facts in case):
        return []
    found = [finding for look in FINDINGS if (finding := look(case)) is not None]
    return sorted(found, key=lambda finding: (finding.is_note, -finding.share))
