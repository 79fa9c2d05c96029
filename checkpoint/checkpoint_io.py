"""Plugins for ``Trainer(plugins=[...])`` that define how single-file checkpoints are written, read and removed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from . import single_file, storage
from .objects import is_trusted
from .read import read


class CheckpointIO(ABC):
    """Base class for plugins that write and read checkpoints in their own way.

    Strategies that write sharded checkpoints (folders to which each process writes its own shards) do not use a
    CheckpointIO. ``load_checkpoint`` must return the checkpoint that was passed to ``save_checkpoint``.
    ``paceline checkpoint`` and ``ckpt_path="last"`` only understand files that :class:`TorchCheckpointIO` writes.
    """

    #: Whether training continues while a checkpoint is written; None means only if that is faster.
    in_background: ClassVar[bool | None] = False

    @property
    def has_own_form(self) -> bool:
        """Whether this plugin's files differ from the files of :class:`TorchCheckpointIO`."""
        return True

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, on rank 0.

        Args:
            checkpoint: the state of a run: numbers, strings, tensors and containers of them.
            path: path of the file.
            storage_options: the argument of ``Trainer.save_checkpoint``.
        """

    @abstractmethod
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. Every rank calls this.

        Args:
            path: path of the file.
            map_location: device for the tensors, as in ``torch.load``; None means the CPU.
            weights_only: the same as for ``torch.load``.
        """

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, on rank 0."""

    def teardown(self) -> None:
        """Release resources when a run ends."""


class TorchCheckpointIO(CheckpointIO):
    """Paceline's own format: a single file that ``torch.load`` can read.

    The file contains checksums, and is written completely or not at all.
    """

    in_background = None

    @property
    def has_own_form(self) -> bool:
        return type(self).save_checkpoint is not TorchCheckpointIO.save_checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ValueError(
                f"save_checkpoint does not support storage_options={storage_options!r}. Storage options come from the "
                "environment and fsspec's settings (FSSPEC_S3_..., ~/.config/fsspec), so that every process that "
                "reads the checkpoint finds the same options. Leave the argument out, or pass a CheckpointIO that "
                "supports it: Trainer(plugins=[...])."
            )
        single_file.write(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(path, "cpu" if map_location is None else map_location, trusted=is_trusted(weights_only))

    def remove_checkpoint(self, path: Any) -> None:
        storage.remove(path)


class AsyncCheckpointIO(CheckpointIO):
    """Makes a Trainer write checkpoints in the background, where another CheckpointIO writes a copy of the tensors.

    A direct call to :meth:`save_checkpoint` returns only once the checkpoint is written.

    Args:
        checkpoint_io: the CheckpointIO that writes and reads the files; None means :class:`TorchCheckpointIO`.
    """

    in_background = True

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io or TorchCheckpointIO()

    @property
    def has_own_form(self) -> bool:
        return self.checkpoint_io.has_own_form

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        self.checkpoint_io.teardown()
