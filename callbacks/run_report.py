"""Callback that writes a report page for each run: curves, speed, time breakdown, checkpoints, settings and outcome."""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import messages
from ..checkpoint import storage
from ..devices.kinds import kind_of
from ..report import system_info
from ..report.record import RunClock, RunRecord
from .base import Callback
from .checkpoint_retention import Checkpoint

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: Seconds after which a row is written even if nothing was logged.
TICK_SECONDS = 10.0
#: Hooks that are active only on rank 0, while a run is recorded.
_TIMED = ("on_train_batch_start", "on_train_batch_end")
_MOST_RATES = 8
_MOST_TRACEBACK = 20000


class RunReport(Callback):
    """Record a run, and write a report page when the run ends, even if it ends with an exception.

    ``run_report.jsonl`` grows during the run. When the run ends, this record becomes ``run_report.html``, a single
    self-contained file. If the process is killed (``kill -9``, out of memory), the record remains, and
    ``paceline report FOLDER`` creates the page. A resumed run continues its record. ``paceline report A B`` compares
    two runs side by side.

    The page shows all logged values as curves; learning rates; speed; a time breakdown, measured on the host (waiting
    for data, steps, evaluation, checkpoints, other); existing checkpoints; arguments and settings with their origin;
    hyperparameters; versions, devices, command and git state; and how the run ended, with the exception if there was
    one. No logger is required.

    Only rank 0 records and writes. Two hooks read the clock to time a step, and one line is written whenever values are
    logged. The host never waits for the device, so step times on a GPU are times on the host's clock.

    Args:
        dirpath: the folder for both files; None means the run's folder (``trainer.log_dir``).

    Example:
        >>> trainer = Trainer(callbacks=[RunReport()])  # doctest: +SKIP
    """

    runs_last = True

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        if dirpath is not None and storage.is_remote(dirpath):
            raise ValueError(
                f"RunReport: dirpath={os.fspath(dirpath)!r} is a remote URL, but the record must be a local "
                "file, because lines are appended to it. Pass a local or mounted folder."
            )
        self.dirpath = None if dirpath is None else os.path.abspath(dirpath)
        self._clock = RunClock()
        self._record: RunRecord | None = None
        self._of: Any = None
        self._error: BaseException | None = None
        self._done = False
        self._next_tick = 0.0

    @property
    def path(self) -> str | None:
        """The path of the page, which may not exist yet; None on ranks other than 0 and before the path is known."""
        record = None if self._record is None else self._record.path
        return None if record is None else str(record.with_suffix(".html"))

    def on_profile(self, trainer: Trainer, pl_module: TrainingModule, profiler: str, seconds: dict[str, float]) -> None:
        self.add_split(profiler, seconds)

    def add_split(self, source: str, seconds: Mapping[str, float]) -> None:
        """Add another time breakdown to the page, such as a profiler's times inside a step.

        Args:
            source: name of the measurement; a later call with the same name replaces the earlier one.
            seconds: maps each part to its seconds.

        Raises:
            TypeError: if ``seconds`` is not a mapping, or a value is not a number.
            ValueError: if a value is negative or not finite.
        """
        _check_split(source, seconds)
        if self._record is not None:
            self._record.write("split", source=source, seconds=dict(seconds))

    # ---- a run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._error, self._done = None, False
        self._undefine(RunReport, *_TIMED)
        if trainer.fast_dev_run:
            self._record = None
            return
        self._clock = RunClock()
        folder = self._folder(trainer) if trainer.is_global_zero else None
        record = self._record
        if record is None or self._of is None or self._of() is not trainer:
            log_dir = trainer.log_dir
            record = self._record = RunRecord(folder, log_dir, lambda: _now(trainer), self._clock)
            self._of = weakref.ref(trainer)
        else:
            record.open_again(lambda: _now(trainer), self._clock)
        trainer.loggers = [*trainer.loggers, record]
        if folder is not None:
            self._next_tick = perf_counter() + TICK_SECONDS
            self._time_batches()
            record.write("start", fn=stage, **_facts(trainer, pl_module))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._settle()

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._settle()
        if self._record is not None:
            self._record.write("data", **_data(trainer))
            self._record.row({})
        self._clock.to("rest")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._clock.to("data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int) -> None:
        clock, now = self._clock, perf_counter()
        clock.seconds[clock.part] += now - clock.mark
        clock.mark, clock.part = now, "step"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int
    ) -> None:
        clock, now = self._clock, perf_counter()
        clock.seconds[clock.part] += now - clock.mark
        clock.mark, clock.part = now, "data"
        if now >= self._next_tick and self._record is not None:
            self._next_tick = now + TICK_SECONDS
            self._record.row({})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._clock.to("rest")

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._clock.to("rest")
        if self._record is not None:
            self._record.row({})

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._done = True

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._settle()
        if not trainer.sanity_checking:
            self._clock.logged()
            self._clock.to("evaluation")

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.sanity_checking:
            self._clock.to("data" if trainer.state.fn == "fit" else "rest")
        self._done = trainer.state.fn != "fit"

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        self._error = exception

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._time_batches()
        record, error = self._record, self._error
        if record is None:
            return
        trainer.loggers = [logger for logger in trainer.loggers if logger is not record]
        self._error = None  # its traceback keeps the batches alive
        if record.folder is None:
            return
        self._settle()
        record.row({})
        record.write("end", fn=stage, status=self._status(trainer, error), **_end(trainer, error))
        record.close()
        if record.path is not None and (self._done or error is not None):
            self._write_page(record.path)

    def _status(self, trainer: Trainer, error: BaseException | None) -> str:
        if error is None:
            return "finished" if self._done else "went back to a checkpoint"
        signum = trainer.state.signum
        if signum:
            return f"interrupted by {signal.Signals(signum).name}"
        return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _time_batches(self) -> None:
        """Restore the batch hooks, which are disabled while nothing is recorded."""
        for name in _TIMED:
            if vars(self).get(name, self) is None:
                delattr(self, name)

    def _settle(self) -> None:
        if self._record is not None:
            self._record.settle()

    def _folder(self, trainer: Trainer) -> str:
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir
        return os.getcwd() if storage.is_remote(folder) else str(folder)

    @staticmethod
    def _write_page(record: Path) -> None:
        """Write the page. If that fails, only warn."""
        from ..report.history import read
        from ..report.run_page import single, write

        try:
            path = write(record.with_suffix(".html"), single(read(record)))
        except Exception as error:
            messages.warn(
                f"The report page of this run could not be created ({type(error).__name__}: {error}). The record is "
                f"complete, so you can try again with `paceline report {record}`."
            )
            return
        messages.info_once(f"Report of the run: {messages.path(path)}")

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_record": None, "_of": None, "_error": None}
        return {k: v for k, v in vars(self).items() if v is not None or k not in _TIMED} | fresh


# ---- contents --------------------------------------------------------------------------------------------------------


def _check_split(source: str, seconds: Any) -> None:
    """Raise unless ``seconds`` maps parts to valid times."""
    call = f"RunReport.add_split({source!r}, {seconds!r})"
    fix = "Pass the seconds of each part, such as {'forward': 1.2, 'backward': 2.3}."
    if not isinstance(seconds, Mapping):
        raise TypeError(f"{call}: seconds is {messages.a(seconds)}, not a dict. {fix}")
    for part, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{call}: {part!r} is {messages.a(value)}, not a number. {fix}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{call}: {part!r} is {value}, but a time must be finite and not negative. {fix}")


def _now(trainer: Trainer) -> dict[str, Any]:
    """Return the run's state for a row. Learning rates in device tensors are left out, so the host does not wait."""
    state = trainer.state
    return {
        "epoch": state.epoch,
        "updates": state.updates,
        "batches": state.batches,
        "lr": _rates(trainer.optimizers) if state.fn == "fit" else {},
    }


def _rates(optimizers: list[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for place, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__ + (f" {place}" if len(optimizers) > 1 else "")
        groups = getattr(optimizer, "param_groups", ())
        for number, group in enumerate(groups):
            rate = group.get("lr")
            if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) or len(found) >= _MOST_RATES:
                continue
            found[f"{name}, group {number}" if len(groups) > 1 else name] = float(rate)
    return found


def _facts(trainer: Trainer, module: TrainingModule) -> dict[str, Any]:
    """Return the facts about the run that are known before it begins."""
    strategy = trainer.strategy
    return {
        "name": type(module).__name__,
        "experiment": _experiment(trainer),
        "process": system_info.process(),
        "versions": system_info.versions(),
        "machine": system_info.machine(with_gpus=strategy.device.type != "cpu"),
        "git": system_info.git_state(),
        "strategy": {
            "strategy": type(strategy).__name__,
            "device": str(strategy.device),
            "precision": strategy.precision.name,
            "world_size": trainer.world_size,
            "num_nodes": trainer.num_nodes,
        },
        "seed": os.environ.get("PACELINE_GLOBAL_SEED", f"{torch.initial_seed()} (torch's)"),
        "parameters": _parameters(module),
        "settings": [list(row) for row in trainer.settings_in_force],
    }


def _experiment(trainer: Trainer) -> str:
    """Return the first logger's name and version, such as ``"paceline_logs / version_0"``; "" if there is no logger."""
    logger = next((logger for logger in trainer.loggers if not isinstance(logger, RunRecord)), None)
    if logger is None:
        return ""
    version = f"version_{logger.version}" if isinstance(logger.version, int) else logger.version
    return " / ".join(str(part) for part in (logger.name, version) if part)


def _parameters(module: TrainingModule) -> int | None:
    try:
        return sum(parameter.numel() for parameter in module.parameters())
    except (ValueError, RuntimeError):  # not created yet
        return None


def _data(trainer: Trainer) -> dict[str, Any]:
    """Return facts about the training batches and the checkpoint folders, both known only when training starts."""
    folders = dict.fromkeys(c.dirpath for c in trainer.callbacks if isinstance(c, Checkpoint) and c.dirpath)
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    count = trainer.num_training_batches
    return {
        "batch_size": size if isinstance(size, int) else None,
        "ranks": trainer.strategy.num_data_ranks,
        "accumulate": trainer.accumulate_grad_batches,
        "batches": count if isinstance(count, int) else None,
        "checkpoints": [folder for folder in folders if not storage.is_remote(folder)],
    }


def _end(trainer: Trainer, error: BaseException | None) -> dict[str, Any]:
    """Return how the run ended."""
    found: dict[str, Any] = {"asked": trainer.state.should_stop, "peak_bytes": _peaks(trainer)}
    if error is not None:
        text = "".join(traceback.format_exception(error))
        found["error"] = {"type": type(error).__name__, "text": str(error), "traceback": text[-_MOST_TRACEBACK:]}
    return found


def _peaks(trainer: Trainer) -> dict[str, int]:
    """Return this process's peak memory in bytes, on the device and on the host."""
    found = {}
    device = trainer.strategy.device
    if kind_of(device).counts_memory():
        found["device"] = kind_of(device).peak_memory(device)
    if sys.platform.startswith(("linux", "darwin")):
        import resource

        unit = 1024 if sys.platform.startswith("linux") else 1
        found["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return found
