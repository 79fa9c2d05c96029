"""What ``Trainer(...)`` accepts: every check of a value, and of values that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ..loggers import messages


def check_limit(name: str, value: Any) -> int | float:
    """A number of batches (int) or a share of them (float from 0 to 1); None means all."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"Trainer({name}={value!r}) is a {type(value).__name__}. Pass a number of batches or a fraction."
        )
    if value < 0 or (isinstance(value, float) and value > 1):
        raise ValueError(
            f"Trainer({name}={value!r}) is out of range. Pass an int of 0 or more (batches) or a float from 0.0 to 1.0 "
            "(share of the batches)."
        )
    return value


def check_count(name: str, value: Any, least: int = 0, none: bool = False, unlimited: bool = False) -> Any:
    """A whole number of at least ``least``; also None or -1 (no limit) where those are allowed."""
    if value is None and none:
        return None
    allowed = (
        f"an integer of {least} or more" + (", -1 for no limit" if unlimited else "") + (", or None" if none else "")
    )
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Trainer({name}={value!r}) is a {type(value).__name__}. Pass {allowed}.")
    if value < least and not (unlimited and value == -1):
        raise ValueError(f"Trainer({name}={value!r}) is out of range. Pass {allowed}.")
    return value


def check_fast_dev_run(value: Any) -> int:
    """True means one batch of each kind."""
    if not isinstance(value, (bool, int)):
        raise TypeError(
            f"Trainer(fast_dev_run={value!r}) is a {type(value).__name__}. Pass True, or a number of batches."
        )
    if value < 0:
        raise ValueError(f"Trainer(fast_dev_run={value!r}) is out of range. Pass True, or a number of batches.")
    return int(value)


def seconds(name: str, value: str | timedelta | Mapping[str, int]) -> float:
    """A duration in seconds, from ``"DD:HH:MM:SS"``, a timedelta or its keyword arguments."""
    try:
        if isinstance(value, str):
            days, hours, minutes, secs = (int(part) for part in value.strip().split(":"))
            value = timedelta(days=days, hours=hours, minutes=minutes, seconds=secs)
        elif isinstance(value, Mapping):
            value = timedelta(**value)
        total = value.total_seconds()
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"Trainer({name}={value!r}) is not a duration. Pass 'DD:HH:MM:SS', a datetime.timedelta, or its arguments "
            "as a dict such as {'hours': 2}."
        ) from None
    if total <= 0:
        raise ValueError(f"Trainer({name}={value!r}) is not a positive duration.")
    return total


def check_val_interval(value: Any, every_n_epochs: int | None) -> tuple[int | float, float | None]:
    """``val_check_interval`` as (batches or fraction, seconds or None)."""
    if value is None:
        value = 1.0
    if isinstance(value, (str, timedelta, Mapping)):
        return 1.0, seconds("val_check_interval", value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"Trainer(val_check_interval={value!r}) is a {type(value).__name__}. Pass a fraction of an epoch "
            "(float), a number "
            "of batches (int), or a duration."
        )
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"Trainer(val_check_interval={value}) is out of range. Pass a float in (0.0, 1.0], or an int.")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"Trainer(val_check_interval={value}) is out of range. Pass 1 or more batches.")
    if every_n_epochs is None and isinstance(value, float):
        raise ValueError(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={value}): without an epoch to take a fraction "
            "of, pass "
            "val_check_interval as a number of batches (int) or a duration."
        )
    return value, None


def check_clipping(value: Any, algorithm: str | None) -> None:
    """``gradient_clip_val`` is a positive number or None, the algorithm "norm" or "value"."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise ValueError(
            f"Trainer(gradient_clip_val={value!r}) is not a positive number. Pass one, or None to leave gradients."
        )
    if algorithm not in (None, "norm", "value"):
        raise ValueError(messages.unknown("gradient_clip_algorithm", algorithm, ("norm", "value")))
    if value is None and algorithm is not None:
        raise ValueError(
            f"Trainer(gradient_clip_algorithm={algorithm!r}) without gradient_clip_val clips nothing. Pass "
            "gradient_clip_val too."
        )


def check_barebones(given: Mapping[str, Any]) -> None:
    """``barebones=True`` and what it switches off may not be asked for together."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"Trainer(barebones=True, {name}={value!r}) contradict each other: barebones switches that off to "
                "measure the "
                f"bare loop. Leave {name} out, or barebones."
            )


def check_flags(given: Mapping[str, Any]) -> None:
    """Options that exclude each other or do not exist."""
    if given["profiler"] is not None:
        raise ValueError(
            f"Trainer(profiler={given['profiler']!r}): this version of Paceline has no profilers. Leave it out, and "
            "use "
            "torch.profiler around Trainer.fit."
        )
    if given["deterministic"] not in (None, True, False, "warn"):
        raise ValueError(
            messages.unknown("value for deterministic:", given["deterministic"], ("warn",), ", or True or False")
        )
    if given["deterministic"] and given["benchmark"]:
        raise ValueError(
            "Trainer(deterministic=True, benchmark=True) contradict each other: benchmarking picks kernels by their "
            "speed in "
            "this run. Leave one out."
        )
    if not isinstance(given["compile"], (bool, Mapping)):
        raise TypeError(
            f"Trainer(compile={given['compile']!r}) is a {type(given['compile']).__name__}. Pass True, or a dict of "
            "arguments for "
            "torch.compile such as {'mode': 'max-autotune'}."
        )
    if given["overfit_batches"] and given["fast_dev_run"]:
        raise ValueError(
            "Trainer(overfit_batches, fast_dev_run) contradict each other: both limit the batches. Leave one out."
        )
    if given["barebones"]:
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
        more = ("fast_dev_run", "detect_anomaly", "log_every_n_steps")
        check_barebones({name: given[name] for name in (*off, *more)})
