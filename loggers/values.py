"""Convert logged values to numbers or plain nested data, and find the words in their names."""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_WORD = re.compile(r"[^a-z0-9]+")
_DIGITS = re.compile(r"\d+")
_STAGE = re.compile(r"(?:train|val|test)(?=[a-z])")


def number(name: str, value: Any) -> float:
    """Return ``value`` as a Python number.

    The value may be a number, or a tensor or array of one element. For a tensor on a GPU, the host waits for the
    device. The Trainer passes Python numbers.

    Raises:
        TypeError: if the value is not a single number.
    """
    if type(value) in (float, int):
        return value
    single = _single(value)
    if isinstance(single, int):
        return int(single)
    try:
        return single.__float__()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"The metric {name!r} cannot be logged, because {_describe(value)} is not a single number. First reduce "
            "the value to a number or a tensor of one element, for example with .mean()."
        ) from None


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return all values as Python numbers, joining the names in nested mappings (``"loss/train"``)."""
    return {prefix + name: number(name, value) for name, value in _leaves(metrics)}


def record(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested names (``"loss/train"``) and convert numbers to Python numbers; leave other values unchanged."""
    leaves = ((prefix + name, value, _single(value)) for name, value in _leaves(values))
    return {name: number(name, value) if _is_number(single) else value for name, value, single in leaves}


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop None values, also from nested mappings, and drop mappings that become empty as a result."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            inside = present(value)
            if inside:
                kept[name] = inside
        elif value is not None:
            kept[name] = value
    return kept


def mapping(params: Any) -> dict[str, Any]:
    """Return a dict, ``Namespace`` or dataclass as a dict; return an empty dict for None.

    Raises:
        TypeError: if ``params`` is anything else.
    """
    if params is None:
        return {}
    items = _items(params)
    if items is None:
        raise TypeError(
            f"Hyperparameters cannot be logged from {_describe(params)}, because every hyperparameter needs a name. "
            "Pass a dict, an argparse.Namespace or a dataclass."
        )
    return items


def plain(value: Any) -> Any:
    """Convert ``value`` to plain dicts, lists, numbers, strings and None. Other objects become strings."""
    if isinstance(value, Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    items = _items(value)
    if items is not None:
        return {str(name): plain(item) for name, item in items.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    single = _single(value)
    for kind in (bool, int, float):
        if isinstance(single, kind):
            return kind(single)
    return _text(value)


def flat(params: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten nested settings, joining names (``"optimizer/lr"``) and converting values except numbers to strings."""
    leaves = _leaves(plain(params))
    return {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in leaves}


@lru_cache(1024)
def words_in(name: str) -> frozenset[str]:
    """Return the lower-case words in a name, with and without digits: ``"val/MSELoss2"`` has ``mse`` and ``loss``.

    Camel case is read both split and unsplit (``mIoU`` is also ``miou``), and words are also read without the stage
    that they begin with (``valacc`` has ``acc``).
    """
    parts = [part for text in (_CAMEL.sub(" ", name), name) for part in _NO_WORD.split(text.lower())]
    words = {*parts, *(word for part in parts for word in _DIGITS.split(part))}
    return frozenset(words | {_STAGE.sub("", word, count=1) for word in words}) - {""}


def _leaves(items: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in items.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def _items(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _single(value: Any) -> Any:
    """Return the element of a one-element tensor or array, or else ``value``. Imports neither torch nor numpy."""
    if not hasattr(value, "item"):
        return value
    size = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    return value.item() if size == 1 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (hasattr(value, "__float__") and not hasattr(value, "shape"))


def _text(value: Any) -> str:
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return ".".join(part for part in (value.__module__, value.__qualname__) if part)
    return str(value)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} (of type {type(value).__name__})"
