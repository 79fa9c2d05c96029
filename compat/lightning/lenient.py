"""Warnings instead of errors for contradictory arguments that Lightning accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import messages
from ...trainer import arguments


def install() -> None:
    """Turn argument checks that Lightning does not perform into warnings."""
    arguments.check_overfitting = overfitting_wins(arguments.check_overfitting)
    arguments.check_range = maximum_wins(arguments.check_range)
    arguments.check_clipping = clipping_needs_a_value(arguments.check_clipping)


def overfitting_wins(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to warn about limits that ``overfit_batches`` overrides."""

    def warn(overfit_batches: Any, **limits: Any) -> None:
        check(overfit_batches, fast_dev_run=limits.pop("fast_dev_run"))
        for name, value in limits.items() if overfit_batches else ():
            if value:
                messages.warn(
                    f"Trainer(overfit_batches={overfit_batches!r}) overrides {name}={value!r}. Pass only one of them."
                )

    return warn


def maximum_wins(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to only warn if the minimum number of epochs or steps exceeds the maximum."""

    def warn(unit: str, least: int | None, most: int | None) -> None:
        try:
            check(unit, least, most)
        except ValueError as error:
            messages.warn(f"{error} The fit ends at max_{unit}={most}.")

    return warn


def clipping_needs_a_value(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to only warn that a clipping algorithm without a clipping value has no effect."""

    def warn(value: Any, algorithm: str | None) -> None:
        if value is None and algorithm is not None:
            check(1.0, algorithm)
            messages.warn(
                f"Trainer(gradient_clip_algorithm={algorithm!r}) has no effect without gradient_clip_val. Set "
                "gradient_clip_val, or leave out gradient_clip_algorithm."
            )
        else:
            check(value, algorithm)

    return warn


def check_mode(test: Any) -> None:
    """Check the mode of ``lr_find``, but not the rates and the number of steps."""
    modes = ("exponential", "linear")
    if test.mode not in modes:
        raise ValueError(messages.unknown("lr_find mode", test.mode, modes))
