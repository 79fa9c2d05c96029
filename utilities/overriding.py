"""Find out whether a user's class overrides a method."""

from __future__ import annotations

from typing import Any

from ..callbacks.base import Callback, overridden
from ..data.datamodule import DataModule
from ..strategies.base import Strategy
from ..trainer.module import TrainingModule

_PARENTS = (TrainingModule, DataModule, Callback, Strategy)


def is_overridden(method_name: str, instance: object | None, parent: type | None = None) -> bool:
    """Return True if ``instance`` or its class overrides a method of the base class.

    Args:
        method_name: the method's name.
        instance: the object to check; if None, the result is False.
        parent: the base class; if None, whichever of TrainingModule, DataModule, Callback and Strategy matches.

    Raises:
        ValueError: no base class matches, or ``parent`` has no such method.
    """
    if instance is None:
        return False
    if parent is None:
        parent = next((one for one in _PARENTS if isinstance(instance, one)), None)
        if parent is None:
            raise ValueError(
                f"is_overridden({method_name!r}): {type(instance).__name__} is not a TrainingModule, DataModule, "
                "Callback or Strategy. Pass its base class as parent."
            )
    if not hasattr(parent, method_name):
        raise ValueError(
            f"is_overridden({method_name!r}): {parent.__name__} has no method with this name. Check the spelling, or "
            "pass another parent."
        )
    method: Any = overridden(instance, method_name, parent)
    return method is not None
