"""Collect a checkpoint's contents from a run, and restore a run from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import messages
from ..callbacks.base import accumulation_of
from ..checkpoint import lightning_format, logger_positions
from ..checkpoint.hyperparameters import CONFIG, is_config, plain_config
from ..checkpoint.manifest import FORMAT
from ..checkpoint.objects import can_be_kept, set_apart
from ..checkpoint.restore import PARTS, call, is_strict, load_weights, optimizer_problem, restore_precision, versions
from ..data.loaders import samples_in_batch
from .profiling import by_datamodule
from .resume import Resumed, gather_ranks, progress

if TYPE_CHECKING:
    from .run import Run


class ChildRunData(NamedTuple):
    """The data that this process needs to write checkpoints of a run that took place in other processes.

    Attributes:
        ranks: each rank's own state (see :mod:`.resume`).
        batch_samples: samples in a full batch across all ranks.
        data_ranks: number of shards that the dataset was split into.
        lacks: why the optimizers could not be transferred to this process, or an empty string.
    """

    ranks: list[dict[str, Any]]
    batch_samples: int | None
    data_ranks: int
    lacks: str = ""


def child_run_data(run: Run) -> ChildRunData:
    """Return the data that another process needs to write this run's checkpoints; every rank must call this."""
    return ChildRunData(gather_ranks(run), _batch_samples(run), run.strategy.num_data_ranks)


# ---- gather ----------------------------------------------------------------------------------------------------------


def gather(run: Run, weights_only: bool = False) -> dict[str, Any]:
    """Collect everything needed to resume the run; every rank must call this.

    With ``weights_only``, collect only weights, hyperparameters and counters. The ``on_save_checkpoint`` hooks run
    either way, so that averaged weights, for example, are saved.
    """
    module = run.module
    child_data, holder = run.child_data, run.holder
    if not weights_only and child_data is not None and child_data.lacks:
        raise RuntimeError(
            f"The optimizers and schedulers cannot be pickled ({child_data.lacks}), so they stayed in the training "
            "processes, and this process cannot save a checkpoint to resume from. Save during the run with a "
            "ModelCheckpoint, or save only the weights: save_checkpoint(path, weights_only=True)."
        )
    ranks = [] if weights_only else gather_ranks(run) if child_data is None else child_data.ranks
    counters = progress(run, ranks)
    checkpoint: dict[str, Any] = {
        "epoch": run.state.epoch,
        "global_step": run.state.global_step,
        "pytorch-lightning_version": lightning_format.LAYOUT_VERSION,
        "state_dict": holder.model_state(module),
        "loops": lightning_format.loops(counters),
        "paceline": _section(run, counters),
    }
    if not weights_only:
        _add_training(run, checkpoint)
        checkpoint["paceline"]["ranks"] = ranks
    _add_hyperparameters(module, checkpoint)
    if run.datamodule is not None:
        _add_datamodule(run, checkpoint)
    for hook in run.hooks.on_save_checkpoint:
        hook(checkpoint)
    return set_apart(checkpoint)


def _section(run: Run, counters: dict[str, Any]) -> dict[str, Any]:
    child_data = run.child_data
    return {
        "format": FORMAT,
        "versions": versions(),
        "fn": run.state.fn and run.state.fn.value,
        "stage": run.state.stage and run.state.stage.value,
        "world_size": run.strategy.world_size,
        "data_ranks": run.strategy.num_data_ranks if child_data is None else child_data.data_ranks,
        "batch_samples": _batch_samples(run) if child_data is None else child_data.batch_samples,
        "progress": counters,
        "manifest": {"sequence": run.count_save()},
    }


def _batch_samples(run: Run) -> int | None:
    """Return the number of samples in a full batch on all ranks; without a loader, the resumed checkpoint's number."""
    resumed = run.fit.resumed if run.fit is not None else None
    if run.source.train_loader is None and resumed is not None:
        return resumed.batch_samples
    return samples_in_batch(run.source.train_loader, run.strategy.num_data_ranks)


def _add_training(run: Run, checkpoint: dict[str, Any]) -> None:
    strategy, holder = run.strategy, run.holder
    states = ((callback.state_key, callback.state_dict()) for callback in run.trainer.callbacks)
    checkpoint["callbacks"] = {key: state for key, state in states if state}
    checkpoint["optimizer_states"] = [holder.optimizer_state(run.model, o) for o in run.optimizers]
    checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in run.lr_scheduler_configs]
    checkpoint["paceline"] |= {
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimizers],
        "precision": strategy.precision.state_dict(),
        "metrics": run.metrics.state_dict(),
        "loggers": logger_positions.gather(run),
    }


def _add_datamodule(run: Run, checkpoint: dict[str, Any]) -> None:
    _add_hyperparameters(run.datamodule, checkpoint)
    state = by_datamodule(run, "state_dict")()
    if state:
        checkpoint[type(run.datamodule).__qualname__] = state


def _add_hyperparameters(owner: Any, checkpoint: dict[str, Any]) -> None:
    hparams = owner.hparams
    if not hparams:
        return
    kept, left_out = {}, {}
    for name, value in dict(plain_config(hparams, resolve=False)).items():
        if can_be_kept(value):
            kept[name] = value
        else:
            left_out[name] = type(value).__qualname__
    checkpoint[owner.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(owner, "_hparams_name", None) or "kwargs"
    checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = kept
    if is_config(hparams):
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = CONFIG
    if left_out:
        _say_left_out(type(owner).__name__, left_out)


def _say_left_out(owner: str, left_out: dict[str, str]) -> None:
    listed = ", ".join(f"{name} ({kind})" for name, kind in left_out.items())
    again = ", ".join(f"{name}=..." for name in left_out)
    messages.warn_once(
        f"Some hyperparameters of {owner} cannot be stored or pickled, so its checkpoints leave them out: {listed}. "
        f"Exclude them with self.save_hyperparameters(ignore={list(left_out)}), and pass them when loading: "
        f"{owner}.load_from_checkpoint(path, {again})."
    )


# ---- restore ---------------------------------------------------------------------------------------------------------


def restore_model(run: Run, checkpoint: dict[str, Any], parts: tuple[str, ...] = PARTS) -> None:
    """Restore the module's weights and the states of the DataModule and callbacks; hooks may change ``checkpoint``.

    Raises:
        RuntimeError: the weights do not match the module.
    """
    module = run.module
    call(module, "on_load_checkpoint", checkpoint)
    datamodule = run.datamodule
    if "model" in parts:
        load_weights(module, checkpoint["state_dict"], is_strict(module), run.strategy.load_model_state)
        state = checkpoint.get(type(datamodule).__qualname__)
        if datamodule is not None and state is not None:
            by_datamodule(run, "load_state_dict")(state)
    if "callbacks" in parts:
        restore_callbacks(run, checkpoint)


def restore_callbacks(run: Run, checkpoint: dict[str, Any]) -> None:
    """Restore the callbacks' states; their hooks may change ``checkpoint``."""
    for callback in run.trainer.callbacks:
        call(callback, "on_load_checkpoint", run.trainer, run.module, checkpoint)
    states = dict(checkpoint.get("callbacks", {}))
    for callback in run.trainer.callbacks:
        state = states.pop(callback.state_key, None)
        if state is not None:
            callback.load_state_dict(state)
    if states:
        messages.warn(
            "The checkpoint contains the state of callbacks that this Trainer does not have: "
            f"{messages.names(states, last='and')}. Their state is dropped. To restore it, pass these callbacks to "
            "Trainer(callbacks=[...]) with the same arguments as before."
        )


def restore_training(run: Run, checkpoint: dict[str, Any], parts: tuple[str, ...] = PARTS) -> Resumed:
    """Restore optimizers, schedulers, loss scale and counters; the run's optimizers must already exist.

    Returns:
        The remaining state, which the loop restores at the resume position.

    Raises:
        ValueError: the checkpoint contains only weights, or its optimizers or schedulers differ from this run's.
    """
    section = checkpoint.get("paceline", {})
    if parts != ("model",) and "optimizer_states" not in checkpoint:
        raise ValueError(
            "The checkpoint contains only weights (it was saved with weights_only=True or save_weights_only=True), so "
            "fit cannot resume from it. To use its weights in a new fit, call "
            f"{type(run.module).__name__}.load_from_checkpoint(path) and then trainer.fit without ckpt_path, or call "
            "trainer.fit(..., restore=['model'])."
        )
    if parts != ("model",) and "accelerator" in section:
        raise ValueError(
            "The checkpoint was written by Accelerator.save_state in a custom training loop, which fit cannot resume. "
            "Resume it with Accelerator.load_state, or use its weights in a new fit: trainer.fit(..., "
            "restore=['model'])."
        )
    if "optimizer" in parts:
        restore_optimizers(run, checkpoint["optimizer_states"], section.get("optimizers"), "schedulers" in parts)
        restore_precision(run.strategy.precision, section.get("precision") or checkpoint.get("MixedPrecision"))
    if "schedulers" in parts:
        restore_schedulers(run, checkpoint.get("lr_schedulers", []))
    resumed = Resumed(run, checkpoint, parts)
    if "loops" in parts:
        counters = run.state.state_dict() | (section.get("progress") or lightning_format.progress(checkpoint))
        scheduled = accumulation_of(run.trainer.callbacks, counters["epoch"])
        run.state.load_state_dict(resumed.position(counters, scheduled or run.trainer.accumulate_grad_batches))
        if "metrics" in section:
            run.metrics.load_state_dict(section["metrics"])
        logger_positions.restore(run, section)
    if not section:
        messages.info(
            "The checkpoint was not written by Paceline. The epoch and step were derived from its counters. It "
            "contains no RNG state, so random numbers will differ from those of the saved run."
        )
    return resumed


def restore_schedulers(run: Run, states: list[dict[str, Any]]) -> None:
    """Restore the schedulers' states."""
    configs = run.lr_scheduler_configs
    _same_count("learning rate schedulers", len(states), len(configs))
    for config, state in zip(configs, states, strict=True):
        config.scheduler.load_state_dict(state)


def _same_count(what: str, saved: int, given: int) -> None:
    if saved != given:
        raise ValueError(
            f"The number of {what} in the checkpoint is {saved}, but configure_optimizers returned {given}. Return the "
            f"same {what} as when the checkpoint was saved, or load only the weights (load_from_checkpoint) and start "
            "a new fit."
        )


def restore_optimizers(run: Run, states: list[dict[str, Any]], names: list[str] | None, settings: bool) -> None:
    """Restore the optimizers' states and, if ``settings`` is True, the settings of their parameter groups."""
    _same_count("optimizers", len(states), len(run.optimizers))
    for index, (optimizer, state) in enumerate(zip(run.optimizers, states, strict=True)):
        problem = optimizer_problem(optimizer, state, names[index] if names else "another optimizer")
        if problem:
            raise ValueError(
                f"The checkpoint does not match optimizer {index} ({type(optimizer).__name__}): {problem}. Create the "
                "optimizer in configure_optimizers as it was when the checkpoint was saved, or load only the weights "
                "(load_from_checkpoint) and start a new fit."
            )
        own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        run.strategy.load_optimizer_state(run.model, optimizer, state)
        if not settings:
            for group, before in zip(optimizer.param_groups, own, strict=True):
                group.update(before)
