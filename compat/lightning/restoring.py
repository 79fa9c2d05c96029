"""Restoring a checkpoint in the middle of a fit, one part at a time, as callbacks do with Lightning's connector."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ... import messages
from ...checkpoint.read import read
from ...checkpoint.restore import call, is_strict, load_weights, restore_precision
from ...trainer import checkpoint_contents
from ...trainer.profiling import by_datamodule
from ...trainer.trainer import Trainer

#: The checkpoint that each Trainer has read but not yet finished to restore.
_read: weakref.WeakKeyDictionary[Trainer, dict[str, Any]] = weakref.WeakKeyDictionary()


def loaded(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that :func:`start` has read; an empty dict if there is none."""
    return _read.get(trainer, {})


def take(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore from ``checkpoint`` from here on."""
    _read[trainer] = checkpoint


def start(trainer: Trainer, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
    """Read a checkpoint, once background saves are on disk. Every rank must call this."""
    if not checkpoint_path:
        return
    trainer.saver.wait()
    trainer.strategy.barrier("resume_start")
    messages.info(f"Restoring states from {messages.path(checkpoint_path)}")
    _read[trainer] = read(checkpoint_path, strategy=trainer.strategy, trusted=weights_only is False)


def restore_datamodule(trainer: Trainer) -> None:
    """Restore the state of the DataModule, if the checkpoint has one."""
    run = trainer.current_run
    state = loaded(trainer).get(type(run.datamodule).__qualname__)
    if run.datamodule is not None and state is not None:
        by_datamodule(run, "load_state_dict")(state)


def restore_model(trainer: Trainer) -> None:
    """Restore the module's weights."""
    checkpoint, run = loaded(trainer), trainer.current_run
    if checkpoint:
        call(run.module, "on_load_checkpoint", checkpoint)
        load_weights(run.module, checkpoint["state_dict"], is_strict(run.module), run.strategy.load_model_state)


def restore_callbacks(trainer: Trainer) -> None:
    """Restore the callbacks' states."""
    checkpoint = loaded(trainer)
    if checkpoint:
        checkpoint_contents.restore_callbacks(trainer.current_run, checkpoint)


def restore_precision_state(trainer: Trainer) -> None:
    """Restore the loss scale."""
    checkpoint = loaded(trainer)
    saved = checkpoint.get("paceline", {}).get("precision") or checkpoint.get("MixedPrecision")
    restore_precision(trainer.strategy.precision, saved)


def restore_optimizers(trainer: Trainer) -> None:
    """Restore the optimizers.

    Raises:
        KeyError: the checkpoint contains only weights.
    """
    checkpoint = loaded(trainer)
    if checkpoint:
        states = _part(checkpoint, "optimizer_states", "optimizer")
        checkpoint_contents.restore_optimizers(trainer.current_run, states, None, True)


def restore_schedulers(trainer: Trainer) -> None:
    """Restore the learning rate schedulers.

    Raises:
        KeyError: the checkpoint contains only weights.
    """
    checkpoint = loaded(trainer)
    if checkpoint:
        checkpoint_contents.restore_schedulers(trainer.current_run, _part(checkpoint, "lr_schedulers", "scheduler"))


def restore_optimizers_and_schedulers(trainer: Trainer) -> None:
    """Restore the optimizers and, if there are any, the learning rate schedulers."""
    restore_optimizers(trainer)
    if trainer.lr_scheduler_configs:
        restore_schedulers(trainer)


def _part(checkpoint: dict[str, Any], key: str, what: str) -> Any:
    if key not in checkpoint:
        raise KeyError(
            f"The checkpoint contains only weights (it was saved with save_weights_only=True), so no {what} can be "
            "restored from it. Save with save_weights_only=False."
        )
    return checkpoint[key]


def end(trainer: Trainer) -> None:
    """Forget the checkpoint, once all processes are here."""
    if _read.pop(trainer, None) is not None:
        trainer.strategy.barrier("resume_end")


#: The steps of a restore, by the names of Lightning's connector.
STEPS: dict[str, Callable[..., None]] = {
    "resume_start": start,
    "restore_datamodule": restore_datamodule,
    "restore_model": restore_model,
    "restore_callbacks": restore_callbacks,
    "restore_precision_plugin_state": restore_precision_state,
    "restore_optimizers_and_schedulers": restore_optimizers_and_schedulers,
    "restore_optimizers": restore_optimizers,
    "restore_lr_schedulers": restore_schedulers,
    "resume_end": end,
}
