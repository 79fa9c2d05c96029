"""Callback that saves a checkpoint when an exception ends a fit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .. import messages
from ..checkpoint import storage
from .checkpoint_retention import Checkpoint

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Save a checkpoint when an exception or Ctrl-C ends a fit; ``fit(ckpt_path="last")`` finds it.

    An existing file is overwritten. Nothing is written during the first batch, with ``fast_dev_run``, or if a signal
    ended the fit and a ``ModelCheckpoint`` has saved the current step.

    Args:
        dirpath: a folder, or a URL such as ``s3://bucket/run``.
        filename: file name without a suffix.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        if not filename:
            raise ValueError(
                f"OnExceptionCheckpoint: filename={filename!r} is empty, so the file would have no name. Pass a name "
                "without a suffix, or leave the argument out to use 'on_exception'."
            )
        self.dirpath = storage.absolute(dirpath)
        self.filename = filename.removesuffix(self.FILE_EXTENSION)

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint, whether or not it exists."""
        return storage.join(self.dirpath or "", f"{self.filename}{self.FILE_EXTENSION}")

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        state = trainer.state
        training = state.fn == "fit" and state.stage in ("train", "validate")
        training = training and (state.global_step > 0 or state.batches > 0)
        if not training or trainer.fast_dev_run:
            return
        if state.signum and any(callback.has_saved(state.global_step) for callback in trainer.callbacks):
            return
        what = type(exception).__name__
        try:
            trainer.save_checkpoint(self.ckpt_path)
            messages.info(f"{what} ended the fit. The state was saved in {self.ckpt_path!r}.")
        except Exception as error:  # so that the original exception is raised
            messages.warn(f"The state could not be saved after the {what}: {error}")
