"""Binds methods so that the doctor, or several of them, can time them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..doctor.own_loop import OwnLoop

#: Attribute that keeps what the bound names were before, while the methods are timed.
UNTIMED = "_untimed"


def time_methods(owner: Any, parts: Mapping[str, str], observers: Sequence[OwnLoop]) -> None:
    """Bind an object's methods so that they are timed for these observers only.

    Args:
        owner: the object.
        parts: the part of a step that each method's time counts toward, by the method's name.
        observers: without any, the methods are as before.
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
