"""Convert the contents of a file with pickled objects to a checkpoint of plain data."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import objects


def converted(contents: Any, name: str) -> tuple[dict[str, Any], list[str]]:
    """Convert a file's contents to a checkpoint of plain data; also return the names of objects with no plain form.

    A module becomes its ``state_dict``, a Namespace becomes a dict, and a numpy array becomes a tensor. If the file is
    a checkpoint, other objects go to a section of their own; see :mod:`.objects`.

    Raises:
        TypeError: if the file contains neither a dict nor a module, or an object cannot be pickled.
    """
    if isinstance(contents, nn.Module):
        return {"state_dict": contents.state_dict()}, []
    found = _plainer(contents)
    if not isinstance(found, dict):
        raise TypeError(
            f"{name!r} contains a single object of type {type(contents).__module__}.{type(contents).__qualname__}, not "
            "a dict of values or a module, so it cannot be converted. Save its state_dict() under the key 'state_dict'."
        )
    if "state_dict" not in found:
        return found, []
    found = objects.set_apart({**found, "paceline": found.get("paceline", {})})
    return found, objects.names(objects.types(found))


def _plainer(value: Any) -> Any:
    """Replace Namespaces with dicts and numpy arrays with tensors, also inside dicts, lists and tuples."""
    if isinstance(value, Namespace):
        return _plainer(vars(value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        items = {key: _plainer(item) for key, item in value.items()}
        return value if all(item is value[key] for key, item in items.items()) else items
    if type(value) in (list, tuple):
        return type(value)(map(_plainer, value))
    return value
