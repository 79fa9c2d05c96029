"""Convert values to plain data, which a checkpoint can store and load without running code."""

from __future__ import annotations

import enum
import os
import sys
from collections import Counter, OrderedDict
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

_LEAVES = (type(None), bool, int, float, complex, str, bytearray, torch.dtype, torch.device, torch.Size)
_TENSORS = (Tensor, torch.nn.Parameter)


def plain(value: Any, where: str) -> Any:
    """Convert ``value`` to plain data, which refers to no code; return it unchanged if it already is plain data.

    Plain data consists of None, numbers, strings, bytes, tensors, dtypes, devices, and dicts, lists, tuples and sets of
    them. Numpy scalars become Python numbers, paths become strings, and instances of subclasses of str, dict and list
    become instances of these types.

    ``where`` is the name of ``value`` in the error message, for example ``"callbacks['EMA']"``.

    Raises:
        TypeError: if the value contains anything else; the message shows its path and type, and how to fix it.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is bytes:
        return value or bytearray()  # empty bytes are pickled as a call to bytes(), which loading rejects
    if kind in _TENSORS:
        return value if not vars(value) else _tensor_with_attributes(value, where)
    if isinstance(value, dict):
        return _plain_dict(value, where)
    if kind in (tuple, set) or isinstance(value, list):
        return _plain_items(value, where)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return str(value)
    return _converted(value, where)


def _tensor_with_attributes(value: Tensor, where: str) -> Tensor:
    for name, attribute in vars(value).items():
        plain(attribute, f"{where}.{name}")
    return value


def _plain_dict(value: dict[Any, Any], where: str) -> dict[Any, Any]:
    items = {_plain_key(k, where): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if type(value) in (dict, OrderedDict, Counter):
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        for name, attribute in attributes.items():
            plain(attribute, f"{where}.{name}")
        if all(a is b and c is d for (a, c), (b, d) in zip(items.items(), value.items(), strict=True)):
            return value
    return OrderedDict(items) if isinstance(value, OrderedDict) else items


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, Tensor):
        raise TypeError(f"{where} has a tensor as a key, which a checkpoint cannot store. Use key.item() as the key.")
    return plain(key, f"a key of {where}")


def _plain_items(value: Any, where: str) -> Any:
    items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    kind = type(value) if type(value) in (list, tuple, set) else list
    if kind is type(value) and all(a is b for a, b in zip(items, value, strict=True)):
        return value
    return kind(items)


def _converted(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in torch.serialization.get_safe_globals():
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        return plain(float(item) if type(item) is kind else item, where)
    raise TypeError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store, because loading "
        "it would have to run code. Save plain data instead (numbers, strings, tensors, and dicts, lists and tuples "
        f"of them), such as {_advice(value)}."
    )


def _advice(value: Any) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "torch.from_numpy(array)"
    if isinstance(value, Tensor):
        return "tensor.as_subclass(torch.Tensor)"
    if isinstance(value, enum.Enum):
        return "member.value"
    if isinstance(value, tuple):
        return "tuple(value) or value._asdict()"
    if isinstance(value, (set, frozenset)):
        return "set(value)"
    if hasattr(value, "state_dict"):
        return "value.state_dict()"
    if callable(value):
        return "its name, and look it up when loading"
    return "dataclasses.asdict(value)" if is_dataclass(value) else "vars(value) or str(value)"
