"""``GradientState()``, which returns the state of the newest Accelerator's accumulation window."""

from __future__ import annotations

import weakref
from typing import Any

from ...accelerator import accumulation


class _OfTheLast(type):
    """Makes ``GradientState()`` return the newest Accelerator's state, while ``isinstance`` accepts all states."""

    last: weakref.ref[accumulation.GradientState] | None = None
    alone: accumulation.GradientState | None = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = None if _OfTheLast.last is None else _OfTheLast.last()
        if found is None:
            found = _OfTheLast.alone = _OfTheLast.alone or accumulation.GradientState()
        return found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, accumulation.GradientState)


class GradientState(accumulation.GradientState, metaclass=_OfTheLast):
    """The accumulation state of the newest Accelerator; each Accelerator has its own state.

    If there is no Accelerator, this is a state with the default settings.
    """

    @staticmethod
    def _reset_state() -> None:
        """Discard the state, so that the next Accelerator or the next call creates a new state."""
        _OfTheLast.last = _OfTheLast.alone = None


def newest_is(state: accumulation.GradientState, replace: bool = True) -> None:
    """Make ``GradientState()`` return this state; without ``replace``, only if no Accelerator provides a state yet."""
    if replace or _OfTheLast.last is None or _OfTheLast.last() is None:
        _OfTheLast.last = weakref.ref(state)
