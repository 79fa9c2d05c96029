"""Type names for the annotations of programs written for Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..trainer.optimizers import SchedulerConfig

_NUMBER = int | float
_METRIC = Any
_PATH = str | PathLike[str]
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = _DEVICE | Callable[[Any, str], Any] | dict[_DEVICE, _DEVICE] | None
STEP_OUTPUT = Tensor | Mapping[str, Any] | None
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerConfig = SchedulerConfig


class LRSchedulerConfigType(TypedDict, total=False):
    """A dict that describes a scheduler, as ``configure_optimizers`` may return it."""

    scheduler: Any
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """A dict that describes an optimizer, as ``configure_optimizers`` may return it."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """A dict that describes an optimizer and its scheduler, as ``configure_optimizers`` may return it."""

    optimizer: Optimizer
    lr_scheduler: Any


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[Any]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)


class TrainingStep(Protocol):
    """Anything that can be called as a training step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Optimizable(Protocol):
    """Anything that can be stepped like an optimizer."""

    param_groups: list[dict[Any, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""
