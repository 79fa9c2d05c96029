"""The Finding class, and helpers that all findings share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .measurements import Facts


@dataclass(frozen=True)
class Finding:
    """Something that is slow.

    Args:
        key: machine-readable name.
        what: what is slow, and how long it takes.
        why: the cause.
        change: what to change.
        gain: expected gain, in words.
        share: fraction of the time that the problem takes, by which findings are sorted.
        is_note: whether the problem costs no time in this run, but would cost time on other hardware.
    """

    key: str
    what: str
    why: str
    change: str
    gain: str
    share: float = 0.0
    is_note: bool = False


Case = Sequence[Facts]

#: Smallest fraction of the time at which a hook is mentioned.
HOOK = 0.01


def percent(share: float) -> str:
    """Format a fraction as a percentage: ``0.384`` gives ``"38 %"``."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit: ``0.0123`` gives ``"12.3 ms"``."""
    if seconds >= 0.9995:
        return f"{seconds:.4g} s" if seconds >= 99.95 else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} us"


def there(case: Case, with_trainer: str, in_own_loop: str) -> str:
    """Return the advice for a Trainer or the advice for the user's own loop, depending on which was measured."""
    return in_own_loop if case[0].own_loop else with_trainer


def faster(share: float, without: str) -> str:
    """Describe the gain from saving the given fraction of a step's time."""
    times = f"{1 / max(1 - share, 0.01):.1f} times as fast"
    return f"A step without {without} takes {percent(1 - share)} of the time, so it is {times}."


def hooks(facts: Facts) -> dict[str, float]:
    """Return the slowest hooks with their fractions of the time; empty if no hook was timed."""
    shares = {name: seconds / facts.total for name, seconds in facts.hooks.items()} if facts.total else {}
    return {name: share for name, share in list(shares.items())[:3] if share >= HOOK}


def listed(shares: dict[str, float]) -> str:
    """List hooks with their fractions of the time: ``"A.on_fit_end (30 %), B.on_fit_end (4 %)"``."""
    return ", ".join(f"{name} ({percent(share)})" for name, share in shares.items())
