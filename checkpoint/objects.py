"""Store objects that are not plain data in a separate, pickled section.

Unpickling runs code that the file specifies (https://docs.python.org/3/library/pickle.html). A safe load opens only
objects that consist of classes that the program has allowed (``torch.serialization.safe_globals``).
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from .. import messages
from .plain_data import plain

#: Key of the section in the ``"paceline"`` entry of a checkpoint.
SECTION = "objects"
#: Entries whose own entries are checked one by one.
_NESTED = ("hyper_parameters", "datamodule_hyper_parameters", "callbacks")
#: Entries with a run's state, which must not contain objects.
_STATE = ("epoch", "global_step", "state_dict", "loops", "paceline", "optimizer_states", "lr_schedulers")


def set_apart(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with its objects pickled into a separate section, keyed by their original paths.

    Args:
        checkpoint: the checkpoint, with hyperparameters and everything that ``on_save_checkpoint`` added.

    Raises:
        TypeError: if an object cannot be pickled; the message shows its path and type.
    """
    found: dict[str, dict[str, Any]] = {}
    kept = {}
    for key, value in checkpoint.items():
        if key in _NESTED and isinstance(value, Mapping):
            kept[key] = {name: one for name, one in value.items() if not _taken(found, f"{key}/{name}", one)}
        elif key in _STATE or not _taken(found, str(key), value):
            kept[key] = value
    if found:
        kept["paceline"] = {**checkpoint["paceline"], SECTION: found}
    return kept


def can_be_kept(value: Any) -> bool:
    """Return True if a checkpoint can store a value, as plain data or as a pickled object."""
    try:
        _taken({}, "", value)
    except TypeError:
        return False
    return True


def _taken(found: dict[str, dict[str, Any]], place: str, value: Any) -> bool:
    try:
        plain(value, "checkpoint" + "".join(f"[{key!r}]" for key in place.split("/", 1)))
    except TypeError as problem:
        try:
            found[place] = {"type": _type_of(value), "pickled": _pickled(value)}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"{problem} It cannot be pickled either: {error}.") from error
        return True
    return False


def _type_of(value: Any) -> str:
    """Return the name of a value's class, or up to five names of the classes in a dict, list or tuple."""
    inside: dict[str, None] = {}
    waiting, seen = [value], set[int]()
    while waiting and len(inside) < 5:
        one = waiting.pop(0)
        if type(one) not in (dict, list, tuple):
            inside[f"{type(one).__module__}.{type(one).__qualname__}"] = None
        elif id(one) not in seen:
            seen.add(id(one))
            waiting += [entry for entry in (one.values() if isinstance(one, dict) else one) if not _is_plain(entry)]
    return ", ".join(inside) or f"builtins.{type(value).__qualname__}"


def _is_plain(value: Any) -> bool:
    try:
        plain(value, "")
    except TypeError:
        return False
    return True


def types(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of the pickled objects in a checkpoint, keyed by path, such as ``"hyper_parameters/loss"``."""
    section = checkpoint.get("paceline", {}).get(SECTION, {})
    return {place: one["type"] for place, one in section.items()}


def types_within(checkpoint: Mapping[str, Any], entry: str) -> dict[str, str]:
    """Return the type of each pickled object inside an entry of a checkpoint, keyed by the object's name."""
    start = f"{entry}/"
    return {place.removeprefix(start): kind for place, kind in types(checkpoint).items() if place.startswith(start)}


def names(found: Mapping[str, str]) -> list[str]:
    """Describe pickled objects by path and type, for a message."""
    return [f"{place} ({kind})" for place, kind in found.items()]


def is_trusted(weights_only: bool | None) -> bool:
    """Return True if the caller's ``weights_only`` or torch's environment variables allow arbitrary code to run.

    As in ``torch.load``, ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` forbids running code, and
    ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` allows it if ``weights_only`` is None.
    """
    if _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return False
    return _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") if weights_only is None else not weights_only


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "y", "yes", "true")


def open_section(checkpoint: dict[str, Any], name: str, trusted: bool, map_location: Any = "cpu") -> dict[str, Any]:
    """Put a checkpoint's objects back at their paths.

    Args:
        checkpoint: the checkpoint, which is changed in place and returned.
        name: name of the file.
        trusted: whether to open all objects, which runs code that the file specifies. If False, only objects whose
            classes the program has allowed are opened; the others stay in the section.
        map_location: where to put the objects' tensors, as for ``torch.load``.
    """
    section = checkpoint.get("paceline", {}).get(SECTION, {})
    for place, one in list(section.items()):
        try:
            value = _unpickled(one["pickled"], trusted, map_location)
        except Exception:  # what unpickling raises depends on the classes
            if trusted:
                raise
            continue
        del section[place]
        key, _, inner = place.partition("/")
        owner = checkpoint.setdefault(key, {}) if inner and key in _NESTED else checkpoint
        owner[inner if owner is not checkpoint else place] = value
    if trusted:
        messages.info_once(
            f"With weights_only=False, or torch's variable, loading {name!r} runs code that the file specifies.",
            key="code of a file",
        )
    return checkpoint


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpickled(data: bytes, trusted: bool, map_location: Any) -> Any:
    if data.startswith(b"PK"):
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=not trusted)
    if not trusted:
        raise pickle.UnpicklingError("This object was pickled without torch, so its classes cannot be checked.")
    return pickle.loads(data)
