"""Finds the checkpoints that a command works on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...checkpoint import manifest
from ...checkpoint.checksums import folder_problem
from ...checkpoint.manifest import Manifest
from ...checkpoint.storage import Location, Remote, location

#: Levels of subfolders to search: name/version_N/checkpoints, plus one level from a file name template.
DEPTH = 4


class FoundCheckpoint(NamedTuple):
    """A checkpoint that a command works on.

    Attributes:
        path: the file or folder.
        known: the manifest; None if it is missing or broken.
        problem: the problem that a quick check found; None if it found no problem.
    """

    path: Location
    known: Manifest | None
    problem: str | None

    @property
    def state(self) -> str:
        """The checkpoint's state, in a word or a sentence."""
        return self.problem or ("no manifest" if self.known is None else "ok")

    @property
    def size(self) -> int:
        """The checkpoint's size in bytes."""
        if not self.path.is_dir():
            return self.path.stat().st_size
        below = self.path.files_below() if isinstance(self.path, Remote) else self.path.rglob("*")
        return sum(path.stat().st_size for path in below)

    @property
    def kind(self) -> str:
        """The kind of checkpoint: ``"weights"`` (only weights), or ``"whole"`` or ``"sharded"`` (can be resumed from).

        ``"file"`` means that the kind cannot be determined.
        """
        if self.known is None:
            return "sharded" if self.path.is_dir() else "file"
        form = "sharded" if self.known.kind == "folder" else "whole"
        return "weights" if self.known.weights_only else form


def checkpoints(path: str, depth: int = DEPTH) -> Iterator[FoundCheckpoint]:
    """Yield the checkpoint ``path``, or all checkpoints in the folder ``path``, ordered by subfolder and save number.

    Raises:
        FileNotFoundError: if ``path`` does not exist.
        ValueError: if the folder contains no checkpoints.
    """
    where = location(path)
    if not where.exists():
        raise FileNotFoundError(f"{path!r} does not exist. Pass a checkpoint, or a folder that contains checkpoints.")
    if not where.is_dir() or manifest.is_folder(where):
        yield _look_at(where)
        return
    found = [_look_at(inside) for inside in manifest.checkpoints_in(where, depth)]
    if not found:
        raise ValueError(
            f"There is no checkpoint (*{manifest.SUFFIX}) in {path!r}. Pass a folder that contains checkpoints."
        )
    found.sort(key=lambda one: (one.path.parent.parts, one.known.sequence if one.known else 0, one.path.name))
    yield from found


def the_one(path: str) -> Location:
    """Return the checkpoint at a path. For a folder from ``Accelerator.save_state``, return the state inside it."""
    where = location(path)
    inside = where / manifest.STATE
    return inside if inside.exists() else where


def _look_at(path: Location) -> FoundCheckpoint:
    try:
        known = manifest.read(path)
        if known is None or known.kind == "file":
            return FoundCheckpoint(path, known, None)
        wrong = folder_problem(path, share=-1)  # only the sizes
        return FoundCheckpoint(path, known, wrong and f"damaged: {wrong.why}")
    except (OSError, ValueError) as error:
        return FoundCheckpoint(path, None, f"damaged: {error}")
