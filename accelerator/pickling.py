"""Copying and pickling an Accelerator: a copy stands where ``save_state`` and ``load_state`` would bring a new one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..processes.cpu_memory import keep_freed_memory
from .accumulation_state import placements_of
from .errors import answer
from .models import refuse_processes
from .process_state import AcceleratorState, PartialState

if TYPE_CHECKING:
    from .accelerator import Accelerator

#: Made anew with the copy.
_LEFT_OUT = ("state", "_placements", "_windows", "_backward", "_replicas")
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "dynamo_plugin", "parallelism_config")


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """What a copy is made of: models with the gradients that wait, and each loader's position in its pass.

    Raises:
        TypeError: it stands in a group of processes.
    """
    refuse_processes(accelerator.strategy, "An Accelerator")
    methods = type(accelerator)
    own = {name: value for name, value in vars(accelerator).items() if not callable(getattr(methods, name, None))}
    index = {id(model): number for number, model in enumerate(accelerator._models)}
    windows = accelerator._windows.items()
    return {
        "own": {name: value for name, value in own.items() if name not in _LEFT_OUT},
        "placements": placements_of(accelerator),
        "windows": [([index[one] for one in key], window) for key, window in windows if set(key) <= index.keys()],
        "positions": [loader.state_dict() for loader in accelerator._dataloaders],
        "plugins": {name: getattr(accelerator.state, name) for name in _PLUGINS},
        "precision": accelerator.state.mixed_precision,
    }


def put_back(accelerator: Accelerator, state: dict[str, Any]) -> None:
    """Make an Accelerator of :func:`state_of`; the first in a process takes its place there."""
    vars(accelerator).update(state["own"])
    accelerator.strategy.setup_environment()
    keep_freed_memory(accelerator.strategy.device)
    accelerator.state = AcceleratorState.of(
        PartialState.of(accelerator.strategy), state["precision"], **state["plugins"]
    )
    models = accelerator._models
    accelerator._placements = {id(model): one for model, one in zip(models, state["placements"], strict=True)}
    accelerator._windows = {tuple(id(models[one]) for one in key): window for key, window in state["windows"]}
    accelerator._backward, accelerator._replicas, accelerator._checked = None, [], False
    for loader, position in zip(accelerator._dataloaders, state["positions"], strict=True):
        loader.gradient_state = accelerator.gradient_state
        loader.load_state_dict(position)
    connect(accelerator)


def connect(accelerator: Accelerator) -> None:
    """Let what was prepared call its Accelerator.

    They refer to it weakly, so that a loader, and its workers, end when nobody has them any more.
    """
    own = weakref.ref(accelerator)
    accelerator.gradient_state.on_pass = partial(_settle_buffers, own)
    accelerator.gradient_state.explain = partial(answer, own, None)
    for placement in accelerator._placements.values():
        placement.explain_with(own)
    for optimizer in accelerator._optimizers:
        optimizer.explain = partial(answer, own, optimizer.placement)


def _settle_buffers(accelerator: Callable[[], Accelerator | None], loader: Any) -> None:
    """A pass begins: models that are evaluated get rank 0's buffers, which are those that a checkpoint holds."""
    found = accelerator()
    for model in found._placements.values() if found is not None else ():
        if not model.frozen:
            model.strategy.find_latecomers(model.module)
            if not model.module.training:
                model.strategy.before_evaluation(model.module)
