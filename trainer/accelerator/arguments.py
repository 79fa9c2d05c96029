"""What ``Accelerator(...)`` was given, together with the settings of other places, as what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...strategies.base import Strategy
from ...strategies.choose import choose_strategy
from ..settings import Settings, resolve


@dataclass
class Arguments:
    """What an Accelerator is made of.

    Attributes:
        settings: every setting, with its origin.
        strategy: not set up yet.
        shards: the strategy replaces a model's parameters by parts of them.
        accumulation: the arguments of ``GradientState``.
        compiler: gives, for a model, what compiles its forward, or None.
    """

    settings: Settings
    strategy: Strategy
    shards: bool
    accumulation: dict[str, Any]
    compiler: Callable[[Any], Callable[[Any], Any] | None]
    handlers: Any
    dataloader_config: Any
    project_configuration: Any
    log_with: Any
    scheduler_steps: str
    output_dtype: str


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Read the arguments of ``Accelerator(...)``, by name."""
    from .loaders import DataLoaderConfiguration

    own = ("mixed_precision", "gradient_accumulation_steps", "cpu", "scheduler_steps", "output_dtype", "strategy")
    settings = resolve({name: given[name] for name in own})
    strategy = choose_strategy(
        settings["strategy"] or "auto",
        "cpu" if settings["cpu"] else "auto",
        precision=None if settings["mixed_precision"] == "no" else settings["mixed_precision"],
    )
    return Arguments(
        settings=settings,
        strategy=strategy,
        shards=strategy.communicates_forward,
        accumulation={"num_steps": settings["gradient_accumulation_steps"]},
        compiler=lambda module: None,
        handlers=None,
        dataloader_config=given["dataloader_config"] or DataLoaderConfiguration(),
        project_configuration=given["project_config"],
        log_with=given["log_with"],
        scheduler_steps=settings["scheduler_steps"],
        output_dtype=settings["output_dtype"],
    )
