"""The profiler interface, and a profiler that does nothing.

Running code never checks for a profiler, because functions to be timed are bound once through :meth:`Profiler.around`,
which returns them unchanged if there is no profiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import messages

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..trainer.trainer import Trainer

T = TypeVar("T")
_END = object()


class Profiler:
    """Base class for profilers, which time named actions. Define :meth:`start`, :meth:`stop` and :meth:`summary`.

    Actions have the same names as in Lightning: ``run_training_epoch``, ``run_training_batch``,
    ``[_TrainingEpochLoop].train_dataloader_next``, ``[Strategy]DDPStrategy.backward``, ``[Callback]Mine.on_fit_start``,
    ``[TrainingModule]Mine.on_train_start``, ``save_checkpoint``, ...

    Args:
        dirpath: the folder for reports; if None, each run sets it to the logger's folder or ``default_root_dir``.
        filename: part of the file names (``fit-<filename>.txt``); None or ``"-"`` prints the report instead.
    """

    #: Whether anything is timed.
    active = True

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._in_log_dir = dirpath is None
        self._stage: str | None = None
        self._local_rank: int | None = None

    # ---- profiling -------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """Start an action. Actions may be nested."""
        raise NotImplementedError(f"{type(self).__name__} has no start method. Define start(self, action_name).")

    def stop(self, action_name: str) -> None:
        """End an action, even after an exception."""
        raise NotImplementedError(f"{type(self).__name__} has no stop method. Define stop(self, action_name).")

    def summary(self) -> str:
        """Return the report as a string; an empty string is not shown."""
        return ""

    def split(self) -> dict[str, float]:
        """Return the run's time so far in seconds, split into parts that do not overlap, for a ``RunReport`` page.

        The result is empty if the profiler cannot split the time.
        """
        return {}

    def _unknown(self, action_name: str) -> ValueError:
        return ValueError(
            f"Profiler.stop({action_name!r}): no action with that name is running. Call start({action_name!r}) first."
        )

    # ---- around code -----------------------------------------------------------------------------

    @contextmanager
    def profile(self, action_name: str) -> Iterator[Self]:
        """Time a block: ``with self.trainer.profiler.profile("my part"): ...``."""
        self.start(action_name)
        try:
            yield self
        finally:
            self.stop(action_name)

    def around(self, action_name: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return a timed version of ``function``, or ``function`` itself if this profiler is not ``active``."""
        if not self.active:
            return function
        return partial(_timed, self.start, self.stop, action_name, function)

    def iterate(self, action_name: str, iterator: Iterable[T]) -> Iterator[T]:
        """Return an iterator over ``iterator`` that times each call of ``next``."""
        return self._timed_batches(action_name, iterator) if self.active else iter(iterator)

    def _timed_batches(self, action_name: str, iterator: Iterable[T]) -> Iterator[T]:
        fetch = self.around(action_name, partial(next, iter(iterator), _END))
        while (value := fetch()) is not _END:
            yield value  # type: ignore[misc]

    # ---- a run -----------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        """Called in every process when a run begins.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: this process's local rank; None in a run with a single process.
            log_dir: the folder for files if no ``dirpath`` was given.
        """
        self._stage, self._local_rank = stage, local_rank
        if self._in_log_dir:
            self.dirpath = log_dir

    def connect(self, trainer: Trainer) -> None:
        """Called when the run's module and data are known, before functions are bound."""

    def loader_to_prepare(self, loader: Any) -> Any:
        """Return the training loader to prepare instead of the user's ``loader``."""
        return loader

    def attach(self, trainer: Trainer) -> None:
        """Called when all functions are bound, before the first batch is fetched."""

    def finish(self, trainer: Trainer) -> None:
        """Called when the run has ended normally on all ranks. The ranks can still communicate."""

    def interrupted(self) -> None:
        """Called when an error or a signal ends the run in this process. Other processes may no longer respond."""

    def ended(self) -> None:
        """Called after a fit and its teardown, in each process that called ``fit``."""

    def describe(self) -> None:
        """Write or print the report. Each process writes its own file, but only rank 0 prints."""
        text = self.summary()
        if not text:
            return
        if self.filename and self.filename != "-" and self.dirpath is not None:
            path = self.path(".txt")
            with open(path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            messages.info(text)

    def teardown(self, stage: str | None) -> None:
        """Release resources at the end of a run, even after an error."""
        self._stage = None

    def path(self, extension: str, *more: str) -> Path:
        """Return the file path for this stage and process; create the folder if needed.

        The name is ``fit-<filename>-<more>-<local rank><extension>``, without the rank in a single-process run.
        """
        folder = Path(os.getcwd() if self.dirpath is None else self.dirpath)
        folder.mkdir(parents=True, exist_ok=True)
        name = self.filename if self.filename != "-" else None
        rank = None if self._local_rank is None else str(self._local_rank)
        return folder / ("-".join(part for part in (self._stage, name, *more, rank) if part) + extension)


def _timed(start: Callable[..., Any], stop: Callable[..., Any], name: str, function: Any, *args: Any, **kw: Any) -> Any:
    start(name)
    try:
        return function(*args, **kw)
    finally:
        stop(name)


class PassThroughProfiler(Profiler):
    """Profiler that does nothing, so that ``trainer.profiler.profile(...)`` in user code costs almost nothing."""

    active = False

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass
