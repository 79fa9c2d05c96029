"""Copying and pickling a Trainer: its arguments, and what the last run has left to be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer

#: What binds a run to its data, processes, threads and files; ``model`` may be in a wrapper of the strategy's.
_OF_A_RUN = ("model", "_hooks", "_fit", "_source", "_stops", "_metrics", "_managed", "_claims", "saver", "_trials")


def state_of(trainer: Trainer) -> dict[str, Any]:
    """What a copy is made of: no data, and nothing of a run that is under way."""
    module, data = trainer._module, trainer.datamodule
    return {
        "own": {name: value for name, value in vars(trainer).items() if name not in _OF_A_RUN},
        "metrics": trainer._metrics.state_dict(),
        "sent": trainer._metrics.sent,
        "attached": (module is not None and module._trainer is trainer, data is not None and data.trainer is trainer),
    }


def put_back(trainer: Trainer, state: dict[str, Any]) -> None:
    """Make a Trainer of :func:`state_of`."""
    own = state["own"]
    vars(trainer).update(own)  # the strategy and the counters, which the rest refers to
    trainer._clear()
    vars(trainer).update({name: value for name, value in own.items() if name != "_optimizers"})
    trainer.model = trainer._module
    trainer.optimizers = own["_optimizers"]
    trainer.state.fn = trainer.state.stage = None
    trainer._metrics.load_state_dict(state["metrics"])
    trainer._metrics.sent = state["sent"]
    has_module, has_data = state["attached"]
    if has_module and trainer._module is not None:
        trainer._module.trainer = trainer
        trainer._module._end_run()
    if has_data and trainer.datamodule is not None:
        trainer.datamodule.trainer = trainer
