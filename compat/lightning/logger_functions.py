"""Helper functions with which programs written for Lightning build loggers of their own."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def convert_params(params: Mapping[str, Any] | Namespace | None) -> Any:
    """Return hyperparameters as a dict; for None, return an empty dict."""
    if isinstance(params, Namespace):
        return vars(params)
    return {} if params is None else params


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Flatten nested dicts by joining their keys. The items of a list of dicts are numbered."""
    return dict(_leaves(params, delimiter, parent_key))


def _leaves(params: Mapping[Any, Any], delimiter: str, above: str) -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        key = f"{above}{delimiter}{name}" if above else str(name)
        inner = value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = dataclasses.asdict(value)
        elif isinstance(value, Namespace):
            inner = vars(value)
        elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
            for index, one in enumerate(value):
                yield from _leaves(one, delimiter, f"{key}/{index}")
            continue
        if isinstance(inner, Mapping):
            yield from _leaves(inner, delimiter, key)
        else:
            yield key, inner


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replace classes by their names, and other callables by their result or, failing that, by their name."""
    return {key: _described(value) for key, value in params.items()}


def _described(value: Any) -> Any:
    if inspect.isclass(value):
        return value.__name__
    if not callable(value):
        return value
    name = getattr(value, "__name__", None)
    try:
        result = value()
    except Exception:
        return name
    return name if callable(result) else result


def sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Convert NumPy scalars in ``params`` to Python numbers, and other objects to text. Return ``params``."""
    for key, value in params.items():
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value.item()
        params[key] = value if type(value) in (bool, int, float, str, Tensor) else str(value)
    return params


def convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values that JSON cannot represent to text."""
    return {key: value if _fits_json(value) else str(value) for key, value in params.items()}


def _fits_json(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError):
        return False
    return True


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Put ``prefix`` and ``separator`` in front of each name; an empty prefix changes nothing."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


def scan_checkpoints(callback: Any, logged_model_time: Mapping[str, float]) -> list[tuple[float, str, Any, str]]:
    """Return a callback's files that changed after their time in ``logged_model_time``, with times, scores and tags.

    The oldest file comes first. The tag is ``"latest"``, ``"best"`` or ``"best_k"``.
    """
    files = {}
    for path, score, tag in (
        ("last_model_path", "current_score", "latest"),
        ("best_model_path", "best_model_score", "best"),
    ):
        if hasattr(callback, path) and hasattr(callback, score):
            files[getattr(callback, path)] = getattr(callback, score), tag
    files |= {path: (score, "best_k") for path, score in getattr(callback, "best_k_models", {}).items()}
    found = [(os.path.getmtime(path), path, *rest) for path, rest in files.items() if os.path.isfile(path)]
    found.sort(key=lambda one: one[:2])
    return [one for one in found if logged_model_time.get(one[1], float("-inf")) < one[0]]
