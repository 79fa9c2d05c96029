"""Find the attributes and hyperparameters that hold a setting such as ``batch_size`` or ``lr``."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from .. import messages

LR_NAMES = ("lr", "learning_rate")
_NOTHING = object()


class TunedAttribute(NamedTuple):
    """An attribute or a mapping entry that holds a setting.

    Attributes:
        holder: the object or mapping.
        key: name of the attribute or entry.
        words: name to use in messages.
    """

    holder: Any
    key: str
    words: str

    def get(self) -> Any:
        """Return the current value."""
        return _get(self.holder, self.key)

    def set(self, value: Any) -> None:
        """Set the value."""
        if isinstance(self.holder, MutableMapping):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


def _get(holder: Any, key: str) -> Any:
    return holder.get(key, _NOTHING) if isinstance(holder, Mapping) else getattr(holder, key, _NOTHING)


def _at(holder: Any, path: str, words: str) -> TunedAttribute | None:
    """Return the attribute at a path such as ``"optimizer.lr"``; None if it does not exist or cannot be set."""
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
    return TunedAttribute(holder, key, f"{words}.{path}")


def find(owners: Sequence[Any], path: str) -> list[TunedAttribute]:
    """Return every attribute and hyperparameter with this name or dotted path. Owners that are None are skipped."""
    found = []
    for owner in owners:
        if owner is None:
            continue
        name = type(owner).__name__
        found.append(_at(owner, path, name))
        if not path.startswith("hparams."):
            found.append(_at(owner.hparams, path, f"{name}.hparams"))
    return [place for place in found if place is not None]


def find_one_of(owners: Sequence[Any], asked: str, names: Sequence[str], argument: str) -> list[TunedAttribute]:
    """Return the attributes and hyperparameters that hold a setting.

    Look for the name ``asked`` or, if that is empty, for the first of ``names`` that exists.
    """
    for name in [asked] if asked else names:
        found = find(owners, name)
        if found:
            return found
    who = [type(owner).__name__ for owner in owners if owner is not None]
    lacks = f"{who[0]} has no" if len(who) == 1 else f"Neither {' nor '.join(who)} has an"
    there = sorted({str(key) for owner in owners if owner is not None for key in owner.hparams})
    wanted = repr(asked) if asked else messages.names(names)
    hint = f" Existing hyperparameters: {messages.names(there, 'and')}." if there else ""
    raise AttributeError(
        f"{lacks} attribute or hyperparameter {wanted} to set.{hint} Store the value in __init__ "
        f"(self.{names[0]} = {names[0]}, or save_hyperparameters()) and use the stored value, or pass the name of "
        f"the attribute that holds it, such as {argument}='hparams.training.{names[0]}'."
    )


def lr_places(module: Any, datamodule: Any, attr_name: str) -> list[TunedAttribute]:
    """Return the attributes and hyperparameters that hold the learning rate."""
    return find_one_of([module, datamodule], attr_name, LR_NAMES, "attr_name")
