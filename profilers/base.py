"""The interface of a profiler, and the one that does nothing.

Nothing of a run asks whether there is a profiler: what is to be timed is wrapped when it is bound (``wiring.py``), and
only then.
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
    """Times named actions. Write one's own with :meth:`start`, :meth:`stop` and :meth:`summary`.

    Actions have the names they have in Lightning: ``run_training_epoch``, ``run_training_batch``,
    ``[_TrainingEpochLoop].train_dataloader_next``, ``[Strategy]DDPStrategy.backward``, ``[Callback]Mine.on_fit_start``,
    ``[TrainingModule]Mine.on_train_start``, ``save_checkpoint``, ...

    Args:
        dirpath: the folder of what is written; None: that of the run's logger, or the ``default_root_dir``.
        filename: what files are named after (``fit-<filename>.txt``); None or ``"-"``: the report is said, not written.
    """

    #: Whether there is anything to be wrapped.
    active = True

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._folder: str | Path | None = dirpath
        self._stage: str | None = None
        self._local_rank = 0

    # ---- what a profiler does --------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """An action begins. Actions may be inside of each other."""
        raise NotImplementedError(f"{type(self).__name__} has no start(action_name). Define it.")

    def stop(self, action_name: str) -> None:
        """The action is over; also when it raised."""
        raise NotImplementedError(f"{type(self).__name__} has no stop(action_name). Define it.")

    def summary(self) -> str:
        """What was found, as text; an empty one says nothing."""
        return ""

    def split(self) -> dict[str, float]:
        """Seconds of the run so far by part, parts that do not overlap: for the page of a ``RunReport``.

        Empty: there is no such split.
        """
        return {}

    # ---- around code --------------------------------------------------------------------

    @contextmanager
    def profile(self, action_name: str) -> Iterator[Self]:
        """Time a block: ``with self.trainer.profiler.profile("my part"): ...``."""
        self.start(action_name)
        try:
            yield self
        finally:
            self.stop(action_name)

    def around(self, action_name: str, function: Callable[..., T]) -> Callable[..., T]:
        """``function``, with each call timed."""
        return partial(_timed, self.start, self.stop, action_name, function)

    def iterate(self, action_name: str, iterator: Iterable[T]) -> Iterator[T]:
        """``iterator``, with each ``next`` timed."""
        fetch = self.around(action_name, partial(next, iter(iterator), _END))
        while (value := fetch()) is not _END:
            yield value  # type: ignore[misc]

    # ---- a run --------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        """A run begins, in every process.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: this process's.
            log_dir: where files go if no ``dirpath`` was given.
        """
        self._stage, self._local_rank = stage, local_rank or 0
        self._folder = log_dir if self.dirpath is None else self.dirpath

    def connect(self, trainer: Trainer) -> None:
        """Module and data of the run are known, nothing of them is bound yet."""

    def attach(self, trainer: Trainer) -> None:
        """Everything is bound, and the first batch not yet fetched."""

    def finish(self, trainer: Trainer) -> None:
        """The run has come to its end, on all ranks, which may still talk to each other."""

    def interrupted(self) -> None:
        """An error or a signal ends the run here, in this process at least: others may not answer any more."""

    def ended(self) -> None:
        """A fit is over and everything torn down, in each process that called it."""

    def describe(self) -> None:
        """Write the report, or say it: rank 0 alone says it, each process writes its own file."""
        text = self.summary()
        if not text:
            return
        if self.filename and self.filename != "-" and self._folder is not None:
            path = self.path(".txt")
            with open(path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            messages.info(text)

    def teardown(self, stage: str | None) -> None:
        """The run is over, also after an error; let go of what is held."""
        self._stage = None

    def path(self, extension: str, *more: str) -> Path:
        """The file for this stage and process: ``fit-<filename>-<more>-<rank>.<extension>``, rank 0 without its number.

        The folder is made.
        """
        folder = Path(os.getcwd() if self._folder is None else self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = self.filename if self.filename != "-" else None
        rank = str(self._local_rank) if self._local_rank else None
        return folder / ("-".join(part for part in (self._stage, name, *more, rank) if part) + extension)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def _timed(
    start: Callable[[str], None],
    stop: Callable[[str], None],
    name: str,
    function: Callable[..., T],
    *args: Any,
    **kw: Any,
) -> T:
    start(name)
    try:
        return function(*args, **kw)
    finally:
        stop(name)


class PassThroughProfiler(Profiler):
    """No profiler. ``trainer.profiler.profile(...)`` in a module's code costs next to nothing."""

    active = False

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass
