"""Track which checkpoint files in a folder this run wrote, so that it deletes only its own files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from .. import messages
from . import manifest, storage
from .storage import Remote, location


@dataclass
class RunFiles:
    """Recognizes the files that a run wrote.

    Attributes:
        folder: absolute path or URL of the folder; ``""`` until it is known.
        mark: a string unique to the run, stored in each of its checkpoints.
        line: a string shared by a chain of runs, each of which resumed from the newest checkpoint of the previous run.
            The string is stored in the manifests of the files that this object manages, but not in those of other files
            in the same folder.
    """

    folder: str
    mark: str = ""
    line: str = ""

    def sign(self, checkpoint: dict[str, Any]) -> None:
        """Add this run's mark to a checkpoint that is about to be written."""
        if self.mark:
            checkpoint.setdefault("paceline", {}).setdefault("runs", []).append(self.mark)

    def is_ours(self, path: str) -> bool:
        """Return True if this run wrote the file at a path, whether before or after the run was resumed."""
        found = manifest.read_or_none(path)
        return found is not None and self.mark in found.runs

    def step_of(self, path: str) -> int | None:
        """Return the step of a checkpoint that this run wrote; None for any other file."""
        found = manifest.read_or_none(path) if path else None
        return found.global_step if found is not None and self.mark in found.runs else None

    def go_on(self, start: str, leftovers: Collection[str], depth: int) -> list[str]:
        """Delete the files that ``start`` made unnecessary; return the files that the next save replaces.

        ``start`` is the checkpoint from which the run resumes, and ``leftovers`` are the files that were no longer
        needed once ``start`` was saved. The next save replaces all files that were saved after ``start``, and also
        ``start`` itself if it is one of ``leftovers``.
        """
        for path in leftovers:
            if path != start:
                self.delete(path)
        return [*([start] if start in leftovers else []), *self._later_than(start, depth)]

    def _later_than(self, path: str, depth: int) -> list[str]:
        """Return the checkpoints from the same chain of runs that were saved after the one at ``path``.

        The search covers up to ``depth`` levels of subfolders.
        """
        start = manifest.read_or_none(path)
        if start is None:
            return []
        found = (
            (str(other), manifest.read_or_none(str(other))) for other in manifest.checkpoints_in(self.folder, depth)
        )
        return [other for other, it in found if it and it.line == self.line and it.sequence > start.sequence]

    def unused(self, paths: Iterator[str], replaces: Collection[str]) -> str:
        """Return the first path at which no file exists, or at which this run's own file will be replaced anyway."""
        return next(path for path in paths if not location(path).exists() or (path in replaces and self.is_ours(path)))

    def delete(self, path: str, remove: Callable[[str], Any] | None = None) -> None:
        """Delete a file if it is in the folder and belongs to this run.

        Args:
            path: path of the file.
            remove: function that deletes files in a CheckpointIO's own format. Such files do not record the run that
                wrote them, so only the folder is checked.
        """
        if not storage.is_inside(path, self.folder) or not (remove or self.is_ours(path)):
            return
        try:
            (remove or storage.remove)(path)
        except OSError as error:
            messages.warn(
                f"The checkpoint {path!r} is no longer needed, but could not be deleted ({error}). Delete it manually."
            )

    def relative(self, path: str) -> str:
        """Return a file's path relative to the folder, as it is stored in checkpoints."""
        return storage.relative(path, self.folder) if path and self.folder else path

    def find(self, saved: str, beside: str, old_folder: str | None) -> str | None:
        """Return the current path of a file, or None if it is not found.

        Searches the folder, then ``beside``, which is the folder of the checkpoint that stores the path. ``saved`` is
        relative to the folder. In checkpoints that other tools wrote, ``saved`` is absolute and is first made relative
        to ``old_folder``, if that is known.
        """
        absolute = isinstance(location(saved), Remote) or os.path.isabs(saved)
        relative = storage.relative(saved, old_folder or str(location(saved).parent)) if absolute else saved
        for folder in (self.folder, beside):
            path = storage.absolute(storage.join(folder, relative))
            if location(path).exists():
                return path
        return saved if os.path.isabs(saved) and os.path.exists(saved) else None
