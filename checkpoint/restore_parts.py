"""The parts of a checkpoint that a fit may restore or leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from .. import messages

#: All of them. ``Trainer.fit`` says what each is.
Part = Literal["model", "optimizer", "schedulers", "loops", "rng", "callbacks"]
PARTS: tuple[Part, ...] = get_args(Part)


def check_parts(restore: str | Iterable[str]) -> tuple[Part, ...]:
    """The parts asked for, in order.

    Raises:
        ValueError: there is no part of that name.
    """
    given = (restore,) if isinstance(restore, str) else tuple(restore)
    for name in given:
        if name not in PARTS:
            raise ValueError(messages.unknown("restore for Trainer.fit", name, PARTS))
    return tuple(name for name in PARTS if name in given)
