"""The checkpoints that a command is about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...checkpoint import manifest
from ...checkpoint.manifest import Manifest
from ...checkpoint.storage import Location, Remote, location
from ...checkpoint.verify import folder_problem

#: How many levels of folders are looked through: name/version_N/checkpoints, and one that a file name makes.
DEPTH = 4


class Found(NamedTuple):
    """A checkpoint.

    Attributes:
        path: the file or folder.
        known: what it says about itself; None if it has no manifest, or a broken one.
        problem: what is wrong with it, as far as that shows without reading all of it; None if nothing.
    """

    path: Location
    known: Manifest | None
    problem: str | None

    @property
    def state(self) -> str:
        """In a word or a sentence."""
        return self.problem or ("no manifest" if self.known is None else "ok")

    @property
    def size(self) -> int:
        """In bytes."""
        if not self.path.is_dir():
            return self.path.stat().st_size
        below = self.path.files_below() if isinstance(self.path, Remote) else self.path.rglob("*")
        return sum(path.stat().st_size for path in below)

    @property
    def kind(self) -> str:
        """Whether a fit can go on from it, and its form."""
        if self.known is None:
            return "sharded" if self.path.is_dir() else "file"
        form = "sharded" if self.known.kind == "folder" else "whole"
        return "weights" if self.known.weights_only else form


def checkpoints(path: str, depth: int = DEPTH) -> Iterator[Found]:
    """Those in a folder and below it, by folder and the number of the save; or the one that ``path`` is.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: there is none in the folder.
    """
    where = location(path)
    if not where.exists():
        raise FileNotFoundError(f"There is nothing at {path!r}. Pass a checkpoint, or a folder that has some in it.")
    if not where.is_dir() or manifest.is_folder(where):
        yield _look_at(where)
        return
    found = [_look_at(inside) for inside in manifest.checkpoints_in(where, depth)]
    if not found:
        raise ValueError(f"There is no checkpoint (*{manifest.SUFFIX}) in {path!r}. Pass the folder that has them.")
    found.sort(key=lambda one: (one.path.parent.parts, one.known.sequence if one.known else 0, one.path.name))
    yield from found


def the_one(path: str) -> Location:
    """The checkpoint that a path means; of a folder that ``Accelerator.save_state`` wrote, the state in it."""
    where = location(path)
    inside = where / manifest.STATE
    return inside if inside.exists() else where


def _look_at(path: Location) -> Found:
    try:
        known = manifest.read(path)
        if known is None or known.kind == "file":
            return Found(path, known, None)
        wrong = folder_problem(path, share=-1)  # the sizes only
        return Found(path, known, wrong and f"damaged: {wrong.why}")
    except (OSError, ValueError) as error:
        return Found(path, None, f"damaged: {error}")
