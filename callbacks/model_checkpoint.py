"""Callback that decides when a fit saves a checkpoint.

:mod:`.checkpoint_retention` decides which checkpoints are kept and how they are named. ``trainer.save_checkpoint``
decides what a checkpoint contains and writes it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .. import messages
from .checkpoint_retention import CheckpointKeeper
from .early_stopping import metrics_are_complete_at_epoch_end, never_logged
from .timer import to_timedelta

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class ModelCheckpoint(CheckpointKeeper):
    """Save checkpoints during a fit and keep the best, the newest, or all of them.

    *When.* A checkpoint is saved every ``every_n_epochs`` epochs, every ``every_n_train_steps`` optimizer steps, or
    every ``train_time_interval``; if none of the three is set, after every epoch. To save at several intervals, use
    several instances. A step is saved only once, and nothing is saved before the first step, during a sanity check, or
    with ``fast_dev_run``.

    *Which.* Without ``monitor``, the newest checkpoint (``save_top_k=1``) or all of them (``-1``) are kept. With
    ``monitor``, the ``save_top_k`` best ones are kept. A file with a NaN score ranks last and is never
    ``best_model_path``. ``last`` is a separate, complete file.

    *A validation metric with an interval in steps or time.* Between two validations, the metric belongs to older
    weights. The ranked file is therefore written after the next validation, with the metric of the weights that it
    contains. Only ``last`` and, with ``save_top_k=-1``, a file without a score are written immediately.

    *Deletion.* A file is deleted only after its successor is safely on disk. In addition, the file must be in
    ``dirpath``, this run must have written it (possibly before a resume, because each file records its run), and the
    run must not have been resumed from it.

    *Background saves.* Only one write runs at a time, and the next save waits for it. If a write fails, its error is
    raised by the next save, or when the fit ends. With one process and an interval in steps or time (or
    ``async_save=True``), the error is raised after the next batch. If an exception ends the fit, a write in progress is
    finished first. Files that the new file replaces are deleted once it is on disk.

    *Resume.* The ranking continues. Paths are saved relative to ``dirpath``, so the folder may be moved. Files that are
    neither in that folder nor next to the checkpoint that the fit resumed from are dropped from the ranking.

    Args:
        dirpath: a folder, or a URL such as ``s3://bucket/run``. The default is ``checkpoints`` in ``trainer.log_dir``,
            or in ``default_root_dir`` if that is a URL or there is no logger.
        filename: template without a suffix, such as ``"{epoch:02d}-{val_loss:.2f}"``. It may use any logged name,
            ``epoch`` and ``step``. A name that was not logged appears as ``nan``. The default is ``"{epoch}-{step}"``.
        monitor: name of the logged metric to rank by (the mean of its values, if they differ between processes), or
            ``"step"`` or ``"epoch"`` (with ``mode="max"``, the newest are kept). None means that checkpoints are not
            ranked.
        verbose: report what is saved and why.
        save_last: also keep ``last.ckpt``, which is rewritten at every save, after every epoch and when training ends.
            With ``"link"``, it is a symbolic link to the ranked file of the same step, or a complete file if that step
            has no ranked file. A link breaks if you delete its target.
        save_top_k: how many checkpoints to keep; -1 keeps all, 0 none.
        save_on_exception: save when an exception ends the fit. A signal that ends the fit always triggers a save.
        save_weights_only: save only the weights, without the optimizers and everything else that a resume needs.
        mode: ``"min"`` if a smaller metric is better, ``"max"`` if a larger one is.
        auto_insert_metric_name: whether ``{epoch}`` in the template becomes ``epoch=3`` (True) or ``3`` (False). A
            ``/`` in an inserted name becomes ``_``; a ``/`` in the template creates a folder.
        every_n_train_steps: optimizer steps (``trainer.global_step``) between two saves.
        train_time_interval: time between two saves, as a ``timedelta`` or in any form that ``Timer`` accepts.
        every_n_epochs: epochs between two saves; 0 saves only ``last``.
        save_on_train_epoch_end: save after the training epoch (True) or after validation (False). If None, save after
            the epoch if the fit has no validation or exactly one at the end of each epoch; otherwise, save after
            validation.
        enable_version_counter: append ``-v1``, ``-v2``, ... to a name that already exists; if False, overwrite the
            file.
        async_save: if True, write in the background: training continues as soon as the state is copied to memory
            buffers, which are kept for the next save. If False, wait for the disk. If None, write in the background if
            the state has 1 MiB or more.

    Attributes:
        best_model_path: the best file, or the newest file if ``monitor`` is None; ``""`` if there is none. During the
            fit, a background save may not have finished writing it yet.
        best_model_score: score of the file at ``best_model_path``, a scalar of shape (), or None.
        best_k_models: score of each ranked file by path; NaN for files without a score.
        kth_best_model_path: the file that will be replaced next; ``""`` while there are fewer than ``save_top_k``
            files.
        kth_value: score of the file at ``kth_best_model_path``; plus or minus infinity while there are fewer than
            ``save_top_k`` files.
        last_model_path: the newest ``last`` file, or ``""``.
        current_score: the latest score, or None.

    Raises:
        ValueError: during the fit, as soon as it is certain that ``monitor`` is not being logged.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | str | Mapping[str, float] | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        async_save: bool | None = None,
    ) -> None:
        kept = (save_last, save_top_k, save_weights_only, mode, auto_insert_metric_name, enable_version_counter)
        super().__init__(dirpath, filename, monitor, verbose, *kept, async_save)
        self.save_on_exception = save_on_exception
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self._set_rhythm(every_n_epochs, every_n_train_steps, train_time_interval)
        self._monitor_is_validated = False
        self._metric_before_validation: Tensor | None = None
        self._next_step: float = math.inf
        self._resumed: dict[str, Any] = {}
        self._begin(global_step=0)

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    @property
    def every_n_epochs(self) -> int:
        """The number of epochs between two saves; 0 if the interval is in steps or time."""
        return self._every_n_epochs

    def _set_rhythm(
        self, epochs: int | None, steps: int | None, interval: timedelta | str | Mapping[str, float] | None
    ) -> None:
        _check_rhythm(every_n_epochs=epochs, every_n_train_steps=steps, train_time_interval=interval)
        if epochs is None and steps is None and interval is None:
            epochs = 1
        self._every_n_epochs = epochs or 0
        self._every_n_train_steps = steps or 0
        self._train_time_interval = (
            None if interval is None else to_timedelta(interval, "ModelCheckpoint(train_time_interval=)")
        )
        self._by_epoch = not self._every_n_train_steps and self._train_time_interval is None
        if self._by_epoch and not self.async_save:
            self._undefine(ModelCheckpoint, "on_train_batch_end")

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begin(trainer.global_step)
        if self.save_on_train_epoch_end is False and self._by_epoch and not trainer.enable_validation:
            messages.warn_once(
                "ModelCheckpoint(save_on_train_epoch_end=False) saves after validation, but this fit has no "
                "validation, so no checkpoint will be saved at the end of an epoch. Remove the argument, or pass "
                "validation data."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int
    ) -> None:
        state = trainer.state
        if trainer.saver.failed and self._alone:
            trainer.saver.wait()
        if not state.stepped or state.global_step < self._next_step:
            return
        if self._train_time_interval is None or self._time_is_up(trainer):
            self._set_next(state.global_step)  # before the save, because the file contains the schedule
            self._save_between_validations(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._epochs_ended += 1
        if self._by_epoch and self._saves_at_epoch_end(trainer):
            self._save_epoch(trainer)
        elif self._waiting and not self._monitor_is_validated:
            self._save_what_waits(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._metric_before_validation = self._metric_between_steps(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn != "fit":
            return
        metric = self._metric_between_steps(trainer)
        self._monitor_is_validated = metric is not None and metric is not self._metric_before_validation
        if trainer.sanity_checking:
            return
        self._validations_ended += 1
        if self._waiting:
            self._save_what_waits(trainer)
        elif self._by_epoch and not self._saves_at_epoch_end(trainer):
            self._save_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.global_step != self._start_step:
            self.save(trainer, ranked=False)

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        if self.save_on_exception and trainer.state.fn == "fit":
            self.save_after(trainer, exception)

    def save_on_signal(self, trainer: Trainer, name: str) -> None:
        if trainer.global_step != self._start_step:
            super().save_on_signal(trainer, name)

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "monitor_is_validated": self._monitor_is_validated}
        state |= {"waiting": self._waiting, "start_step": self._start_step}
        if self._train_time_interval is not None:
            state["seconds_left"] = self._deadline - perf_counter()
        return state | self._resumed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._monitor_is_validated = state_dict.get("monitor_is_validated", False)
        self._resumed = {name: state_dict[name] for name in _COUNTED if name in state_dict}

    def _begin(self, global_step: int) -> None:
        """Schedule the first save of a fit that begins at ``global_step``; after a resume, keep the saved schedule."""
        state, self._resumed = self._resumed, {}
        self._start_step = state.get("start_step", global_step)
        self._epochs_ended = self._validations_ended = 0
        self._waiting = state.get("waiting", False)
        self._set_next(global_step)
        if self._train_time_interval is not None and "seconds_left" in state:
            self._deadline = perf_counter() + state["seconds_left"]

    def _set_next(self, global_step: int) -> None:
        every = self._every_n_train_steps
        if every:
            self._next_step = (global_step // every + 1) * every
        elif self._train_time_interval is not None:
            self._next_step = global_step + 1
            self._deadline = perf_counter() + self._train_time_interval.total_seconds()

    def _time_is_up(self, trainer: Trainer) -> bool:
        late = perf_counter() >= self._deadline
        return late if self._alone else trainer.strategy.agree(late)

    def _saves_at_epoch_end(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return metrics_are_complete_at_epoch_end(trainer)

    def _save_epoch(self, trainer: Trainer) -> None:
        every = self._every_n_epochs
        due = every > 0 and (trainer.current_epoch + 1) % every == 0
        self.save(trainer, ranked=due and self._monitor_has_value(trainer))

    def _save_between_validations(self, trainer: Trainer) -> None:
        if self._monitor_has_value(trainer) and not self._monitor_is_validated:
            self.save(trainer)
        else:
            self._waiting = self.save_top_k != 0
            self.save(trainer, ranked=self.save_top_k == -1, scored=False)

    def _metric_between_steps(self, trainer: Trainer) -> Tensor | None:
        """Return the monitored value; None if a training step logged it, because no validation will update it."""
        name = self.monitor or ""
        return None if trainer.current_run.metrics.is_step_value(name) else trainer.callback_metrics.get(name)

    def _save_what_waits(self, trainer: Trainer) -> None:
        if self._monitor_has_value(trainer):
            self._waiting = False
            self.save(trainer)

    def _monitor_has_value(self, trainer: Trainer) -> bool:
        """Return True if the monitored metric has a value, and False while it may still be logged.

        Raises:
            ValueError: if the metric should have been logged by now.
        """
        metrics = trainer.callback_metrics
        if self.monitor is None or self.monitor in metrics or self.monitor in self._monitor_candidates(trainer):
            return True
        text = never_logged("ModelCheckpoint", self.monitor, metrics, trainer.enable_validation)
        if not (self._validations_ended if trainer.enable_validation else self._epochs_ended):
            if not self._monitor_is_validated:
                messages.warn_once(
                    f"{text} Until {self.monitor!r} is logged, there is no best checkpoint.",
                    key=f"ModelCheckpoint {self.monitor}",
                )
            return False
        if not self._epochs_ended:
            text += " If it is a metric of the full training epoch, set save_on_train_epoch_end=True."
        raise ValueError(text)


#: State that a resumed fit takes over when training starts.
_COUNTED = ("waiting", "start_step", "seconds_left")


def _check_rhythm(**arguments: Any) -> None:
    for name in ("every_n_epochs", "every_n_train_steps"):
        value = arguments[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"ModelCheckpoint: {name}={value!r} must be a whole number of at least 1, or 0 for never.")
    # A time of zero counts as an interval, unlike a count of zero.
    given = [name for name, value in arguments.items() if value or isinstance(value, timedelta)]
    if len(given) > 1:
        texts = ", ".join(f"{name}={arguments[name]!r}" for name in given)
        raise ValueError(
            f"ModelCheckpoint({texts}) sets more than one saving interval. Keep one of them, or pass one "
            "ModelCheckpoint per interval to the Trainer."
        )
