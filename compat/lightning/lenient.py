"""Arguments that contradict each other: Lightning accepts them, so they are a warning instead of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import messages
from ...trainer import arguments


def install() -> None:
    """Replace the checks of arguments that Lightning does not have."""
    arguments.check_overfitting = overfitting_wins(arguments.check_overfitting)
    arguments.check_range = maximum_wins(arguments.check_range)
    arguments.check_clipping = clipping_needs_a_value(arguments.check_clipping)


def overfitting_wins(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to warn about limits that ``overfit_batches`` replaces."""

    def warn(overfit_batches: Any, **limits: Any) -> None:
        check(overfit_batches, fast_dev_run=limits.pop("fast_dev_run"))
        for name, value in limits.items() if overfit_batches else ():
            if value:
                messages.warn(
                    f"Trainer(overfit_batches={overfit_batches!r}) replaces {name}={value!r}. Pass only one of them."
                )

    return warn


def maximum_wins(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to warn about a minimum of epochs or steps above the maximum, which ends the fit."""

    def warn(unit: str, least: int | None, most: int | None) -> None:
        try:
            check(unit, least, most)
        except ValueError as error:
            messages.warn(f"{error} The fit ends at max_{unit}={most}.")

    return warn


def clipping_needs_a_value(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``check`` to warn about an algorithm for clipping without a value, which clips nothing."""

    def warn(value: Any, algorithm: str | None) -> None:
        if value is None and algorithm is not None:
            check(1.0, algorithm)
            messages.warn(f"Trainer(gradient_clip_algorithm={algorithm!r}) clips nothing without gradient_clip_val.")
        else:
            check(value, algorithm)

    return warn


def check_mode(test: Any) -> None:
    """Check the mode of ``lr_find``, but not the rates and the number of steps."""
    modes = ("exponential", "linear")
    if test.mode not in modes:
        raise ValueError(messages.unknown("mode of lr_find", test.mode, modes))
