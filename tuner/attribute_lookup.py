"""Where a setting such as ``batch_size`` or ``lr`` lies: an attribute or a hyperparameter, by its name or its path."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from .. import messages

LR_NAMES = ("lr", "learning_rate")
_NOTHING = object()


class Place(NamedTuple):
    """One place that holds a setting.

    Attributes:
        holder: the object or mapping.
        key: the name in it.
        words: what it is called in messages.
    """

    holder: Any
    key: str
    words: str

    def get(self) -> Any:
        """The value there."""
        return _get(self.holder, self.key)

    def set(self, value: Any) -> None:
        """Put a value there."""
        if isinstance(self.holder, MutableMapping):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


def _get(holder: Any, key: str) -> Any:
    return holder.get(key, _NOTHING) if isinstance(holder, Mapping) else getattr(holder, key, _NOTHING)


def _at(holder: Any, path: str, words: str) -> Place | None:
    """The place at a path such as ``"optimizer.lr"`` below ``holder``; None if there is none that can be set."""
    *way, key = path.split(".")
    for step in way:
        holder = _get(holder, step)
        if holder is _NOTHING:
            return None
    if _get(holder, key) is _NOTHING:
        return None
    rule = getattr(type(holder), key, None)
    if isinstance(rule, property) and rule.fset is None:
        return None
    return Place(holder, key, f"{words}.{path}")


def find(owners: Sequence[Any], path: str) -> list[Place]:
    """All places of a name: attributes of the owners, and entries of their hyperparameters.

    Args:
        owners: the module and the DataModule, of which either may be None.
        path: a name, or a dotted path.
    """
    found = []
    for owner in owners:
        if owner is None:
            continue
        name = type(owner).__name__
        found.append(_at(owner, path, name))
        if not path.startswith("hparams."):
            found.append(_at(owner.hparams, path, f"{name}.hparams"))
    return [place for place in found if place is not None]


def find_one_of(owners: Sequence[Any], asked: str, names: Sequence[str], argument: str) -> list[Place]:
    """The places of the first name that has any.

    Args:
        owners: as for :func:`find`.
        asked: the name that the user gave; empty: the first of ``names`` that there is.
        names: usual ones.
        argument: how the user gives one, in the error.

    Raises:
        AttributeError: there is none.
    """
    for name in [asked] if asked else names:
        found = find(owners, name)
        if found:
            return found
    who = " or ".join(type(owner).__name__ for owner in owners if owner is not None)
    there = sorted({str(key) for owner in owners if owner is not None for key in owner.hparams})
    wanted = repr(asked) if asked else messages.names(names)
    hint = f" The hyperparameters are {messages.names(there, 'and')}." if there else ""
    raise AttributeError(
        f"{who} has neither an attribute nor a hyperparameter {wanted} to set.{hint} Keep the value in __init__ "
        f"(self.{names[0]} = {names[0]}, or save_hyperparameters()) and use it from there, or name another place: "
        f"{argument}='hparams.training.{names[0]}'."
    )


def owners(module: Any, datamodule: Any) -> list[Any]:
    """Who may hold a setting."""
    return [module, datamodule]


def lr_places(module: Any, datamodule: Any, attr_name: str) -> list[Place]:
    """Where the learning rate lies."""
    return find_one_of(owners(module, datamodule), attr_name, LR_NAMES, "attr_name")
