"""Templates for file names that contain metrics, such as ``"{epoch:02d}-{val_loss:.2f}"``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import Formatter

from torch import Tensor

#: The value of a metric that was not logged.
MISSING: float = math.nan


def fields(template: str) -> list[str]:
    """Return the names of the metrics in a template."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def fill(template: str, values: Mapping[str, Tensor | float], equals: str | None = None) -> str:
    """Fill a template with values.

    Args:
        template: text that contains ``{name}`` or ``{name:format}``; a name may contain dots and slashes.
        values: numbers and tensors with one element; missing names are filled with ``MISSING``.
        equals: text between name and value in ``name<equals>value``; None writes only the value. If the name is
            written, each ``/`` in it becomes ``_``.
    """
    parts: list[str] = []
    for text, name, spec, _ in Formatter().parse(template):
        parts.append(text)
        if name is not None:
            if equals is not None:
                parts.append(name.replace("/", "_") + equals)
            parts.append(_written(values.get(name, MISSING), spec or ""))
    return "".join(parts)


def check(template: str, what: str) -> None:
    """Raise ``ValueError`` if a template cannot be filled with numbers; ``what`` names the argument in the error."""
    try:
        for _, name, spec, conversion in Formatter().parse(template):
            if name == "" or (name or "").isdigit():
                raise ValueError("a pair of braces without a metric name")
            if conversion:
                raise ValueError(f"a conversion, '!{conversion}'")
            if name is not None and not (_takes(0.0, spec or "") or _takes(0, spec or "")):
                raise ValueError(f"the format {spec!r} of {name!r} is not a number format")
    except ValueError as error:
        raise ValueError(
            f"{what} got {template!r}, which is not a valid template: {error}. "
            "Write metrics as in '{epoch:02d}' or '{val_loss:.2f}', and double each literal brace."
        ) from None


def _takes(number: float, spec: str) -> bool:
    try:
        format(number, spec)
    except ValueError:
        return False
    return True


def _written(value: Tensor | float, spec: str) -> str:
    number = value.item() if isinstance(value, Tensor) else value
    if _takes(number, spec):
        return format(number, spec)
    # The format is for integers, but the metric is not an integer.
    return format(round(number), spec) if math.isfinite(number) else str(number)
