"""Write a run's checkpoints, one at a time, and in the background if possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import sharded_folder, storage
from ..checkpoint.checkpoint_io import CheckpointIO
from ..checkpoint.plain_data import plain
from ..checkpoint.snapshot import Buffers, size_bytes
from ..processes.timings import phase
from . import phases
from .checkpoint_contents import gather
from .profiling import timed_in_run

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .run import Run

#: States smaller than this are written without a background thread. Measured: writing 1 MiB to disk takes 28 ms and
#: copying it for a thread 0.4 ms; for 64 MiB, 204 ms and 22 ms.
WORTH_BYTES = 1 << 20


@dataclass
class _Write:
    """One checkpoint to write; :meth:`Saver.save` describes ``after`` and ``settled``."""

    checkpoint: dict[str, Any]
    paths: Sequence[str | Path]
    storage_options: Any
    in_parts: bool
    io: CheckpointIO
    strategy: Strategy
    after: Callable[[], Any]
    settled: Callable[[BaseException | None], Any]
    error: BaseException | None = None

    def run(self) -> None:
        """Write all files; if that fails, store the error."""
        try:
            for path in self.paths:
                if self.in_parts:
                    sharded_folder.write(self.checkpoint, path, self.strategy)
                elif self.strategy.is_global_zero:
                    self.io.save_checkpoint(self.checkpoint, path, self.storage_options)
            if self.strategy.is_global_zero:
                self.after()
        except BaseException as error:
            self.error = error
        self.checkpoint = {}


def _nothing(*_: Any) -> None: ...


class Saver:
    """Saves the checkpoints of one run.

    A background save copies the tensors into buffers that are reused across saves (pinned memory for GPU tensors, with
    a single synchronization). While training continues, a thread writes the buffers with the same code as a blocking
    save. At most one write is in flight; the next save waits for it. If a write fails, its error is raised by ``wait``,
    by the next save, or when the fit ends.

    Attributes:
        failed: whether a background write has failed on this process; ``wait`` raises its error.
    """

    def __init__(self, run: Run) -> None:
        self.failed = False
        self._run = run
        self._buffers = Buffers()
        self._write: _Write | None = None
        self._thread: threading.Thread | None = None

    @timed_in_run("save_checkpoint")
    @phase("saving a checkpoint")
    def save(
        self,
        paths: Sequence[str | Path],
        weights_only: bool = False,
        background: bool | None = False,
        after: Callable[[], Any] = _nothing,
        settled: Callable[[BaseException | None], Any] = _nothing,
        storage_options: Any = None,
    ) -> None:
        """Write one checkpoint of the run to every path. Every rank must call this.

        Args:
            paths: files, or folders if the strategy writes shards.
            weights_only: leave out everything that only a resume needs.
            background: return as soon as the state is copied; if None, do so only where this is faster (large states,
                remote storage).
            after: called on rank 0 once the files are on disk, in the thread that wrote them.
            settled: called in the main thread with the error, or with None if the write succeeded. For a background
                write, this happens during the next call to this saver.
            storage_options: passed to the CheckpointIO.

        Raises:
            OSError: a file of this save or the previous one could not be written.
        """
        self.wait()
        self._claim(paths)
        checkpoint, in_parts = self.gathered(weights_only)
        strategy, io = self._run.holder, self._run.trainer.checkpoint_io
        if background is not False and io.in_background is not None and not in_parts:
            background = io.in_background
        if background is None:
            slow = any(storage.is_remote(path) for path in paths)
            background = strategy.broadcast(slow or size_bytes(checkpoint) >= WORTH_BYTES)
        if background:
            strategy = strategy.beside() if in_parts else strategy
            checkpoint = self._copied(checkpoint) if in_parts or strategy.is_global_zero else {}
        self._write = _Write(checkpoint, paths, storage_options, in_parts, io, strategy, after, settled)
        if not background:
            self._write.run()
            self.wait()
            strategy.barrier("save_checkpoint")
        elif checkpoint:
            self._thread = threading.Thread(target=self._write_out, args=[self._write], name="paceline-save")
            self._thread.start()

    def _write_out(self, write: _Write) -> None:
        write.run()
        self.failed = write.error is not None

    def _claim(self, paths: Sequence[Any]) -> None:
        """Create the folders and lock them for the rest of the run."""
        if self._run.state.fn is None or not self._run.strategy.is_global_zero:
            return
        places = [storage.location(path) for path in paths]
        folders = {place.parent for place in places if isinstance(place, Path)}
        with suppress(OSError):  # if a folder cannot be written to, the write raises
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        self._run.folder_locks.take(map(str, folders))

    def gathered(self, weights_only: bool) -> tuple[dict[str, Any], bool]:
        """Return the run's current checkpoint, and whether its tensors are sharded. Every rank must call this."""
        run = self._run
        run.metrics.drain()
        for logger in run.trainer.loggers if run.strategy.is_global_zero else []:
            logger.save()
        place = run.metrics.enter(phases.SAVE)
        try:
            with run.holder.states_in_parts() as in_parts:
                return gather(run, weights_only), in_parts
        finally:
            run.metrics.back(place)

    def _copied(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Copy the checkpoint, so that further training does not change what is saved, and return the copy.

        This method, rather than the writer thread, raises an error if a value cannot be stored in a file.
        """
        return self._buffers.copy(plain(checkpoint, "checkpoint"))

    @timed_in_run("wait_for_checkpoint")
    def wait(self, together: bool = True) -> None:
        """Wait for the write in flight, and raise its error on every rank.

        All ranks must call this, unless ``together`` is False.
        """
        write = self._write
        if write is None:
            return
        if self._thread is not None:
            self._thread.join()
        self._thread = self._write = None
        self.failed, error = False, write.error
        try:
            if together:
                sharded_folder.together(self._run.holder, "saved", partial(_raise, error))
            else:
                _raise(error)
        except BaseException as known:
            write.settled(known)
            raise
        write.settled(None)

    def close(self) -> None:
        """Free the buffers. No write may be in flight."""
        self._buffers = Buffers()


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
