"""All findings. Each one is a function that takes the measured facts and returns a Finding or None.

A finding says what is slow, why it is slow, what fraction of the time it takes, what to change, and the expected gain.
The gain is estimated from the measured times; ``paceline doctor --try`` measures the gain.
"""

from __future__ import annotations

from collections.abc import Callable

from . import data_findings, machine_findings, process_findings, step_findings
from .finding import Case, Finding

FINDINGS: tuple[Callable[[Case], Finding | None], ...] = (
    *data_findings.FINDINGS,
    *step_findings.FINDINGS,
    *process_findings.FINDINGS,
    *machine_findings.FINDINGS,
)


def examine(case: Case) -> list[Finding]:
    """Return all findings that apply, with the largest fraction of the time first and notes last."""
    if not case or not all(facts.steps for facts in case):
        return []
    found = [finding for look in FINDINGS if (finding := look(case)) is not None]
    return sorted(found, key=lambda finding: (finding.is_note, -finding.share))
