"""Binds methods so that one or more doctors can time them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..doctor.own_loop import OwnLoop

#: Attribute that stores the original values of the bound names while the methods are timed.
UNTIMED = "_untimed"


def time_methods(owner: Any, parts: Mapping[str, str], observers: Sequence[OwnLoop]) -> None:
    """Set the observers that time an object's methods.

    Args:
        owner: the object.
        parts: the part of a training step that each method's time counts toward, keyed by method name.
        observers: the observers; if there are none, the original methods are restored.
    """
    own = vars(owner)
    if UNTIMED in own:
        for name in parts:
            own.pop(name, None)
        own.update(own.pop(UNTIMED))
    if observers:
        own[UNTIMED] = {name: own[name] for name in parts if name in own}
        for name, part in parts.items():
            for observer in observers:
                own[name] = observer.around(part, getattr(owner, name))
