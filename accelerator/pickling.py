"""Copying and pickling an Accelerator: a copy stands where ``save_state`` and ``load_state`` would bring a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..processes.cpu_memory import keep_freed_memory
from .models import refuse_processes
from .process_state import AcceleratorState, PartialState

if TYPE_CHECKING:
    from .accelerator import Accelerator

_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "dynamo_plugin", "parallelism_config")


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """What a copy is made of: models with the gradients that wait, and each loader's position in its pass.

    Raises:
        TypeError: it stands in a group of processes.
    """
    refuse_processes(accelerator.strategy, "An Accelerator")
    methods = type(accelerator)
    own = {name: value for name, value in vars(accelerator).items() if not callable(getattr(methods, name, None))}
    return {
        "own": {name: value for name, value in own.items() if name != "state"},
        "plugins": {name: getattr(accelerator.state, name) for name in _PLUGINS},
        "precision": accelerator.state.mixed_precision,
    }


def put_back(accelerator: Accelerator, state: dict[str, Any]) -> None:
    """Make an Accelerator of :func:`state_of`; the first in a process takes its place there."""
    vars(accelerator).update(state["own"])
    keep_freed_memory(accelerator.strategy.device)
    place = PartialState.of(accelerator.strategy)
    accelerator.state = AcceleratorState.of(place, state["precision"], **state["plugins"])
