"""Find the newest checkpoint that a run can start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .. import messages
from . import manifest
from .checksums import problem
from .manifest import FORMAT, Manifest
from .read import read
from .storage import Location, absolute, location


@dataclass(frozen=True)
class SearchFolders:
    """Folders in which a run looks for checkpoints.

    Attributes:
        own: folders that the run's callbacks save to.
        earlier: folders of earlier runs, newest first.
        depth: number of subfolder levels in the names of the callbacks' files.
    """

    own: list[Location]
    earlier: list[Location]
    depth: int

    @classmethod
    def of(cls, savers: Sequence[tuple[str | None, str | None]], runs: Iterable[str]) -> SearchFolders:
        """Return a run's folders, and earlier runs' folders if a callback saves to the default folder.

        This creates no folders, because a resumed fit uses the folders of the run that it resumes.

        Args:
            savers: the folder (None if not chosen yet) and file name of each callback that saves checkpoints.
            runs: the folders of all runs; a run's checkpoints are in its subfolder ``checkpoints`` by default.
        """
        depth = max(((name or "").count("/") for _, name in savers), default=0)
        own = list(dict.fromkeys(location(folder) for folder, _ in savers if folder))
        default = [location(absolute(run)) / "checkpoints" for run in runs]
        if all(folder for folder, _ in savers) and not any(folder in own for folder in default):
            return cls(own, [], depth)
        return cls(own, [path for path in sorted(default, key=_version, reverse=True) if path not in own], depth)

    def checkpoints(self, folders: Iterable[Location]) -> Iterator[Location]:
        """Yield the checkpoints in the given folders."""
        for folder in folders:
            yield from manifest.checkpoints_in(folder, self.depth)


def newest_checkpoint(word: str, fn: str, folders: SearchFolders) -> Location | None:
    """Return the newest valid checkpoint, and report newer checkpoints that cannot be used.

    A fit skips checkpoints that contain only weights. ``word`` is the ``ckpt_path`` that the user passed, which is
    ``"last"`` or ``"auto"``.
    """
    where = folders.own + folders.earlier
    chosen, passed_over = newest_valid(folders.checkpoints(where), fn)
    listed = ", ".join(f"{path} ({why})" for path, why in passed_over.items())
    harmless = all(why == _WEIGHTS_ONLY for why in passed_over.values())
    if chosen is None:
        say = messages.info if harmless and word == "auto" else messages.warn
        there = f"there is no valid checkpoint in {', '.join(map(str, where))}"
        broken = f" Skipped: {listed}." if listed else ""
        say(
            f"ckpt_path={word!r}: {there if where else 'no earlier run has saved a checkpoint'}, so the run starts "
            f"fresh.{broken}"
        )
    elif listed:
        say = messages.info if harmless else messages.warn
        say(f"ckpt_path={word!r} skips {listed} and uses {chosen}.")
    return chosen


_WEIGHTS_ONLY = "weights only"


def newest_valid(paths: Iterable[Location], fn: str = "fit") -> tuple[Location | None, dict[Location, str]]:
    """Return the newest checkpoint that a run can start from, and why newer ones cannot be used, keyed by path."""
    order, passed_over = _newest_first(paths)
    for path, known in order:
        why = _why_not(path, known, fn)
        if why is None:
            return path, passed_over
        passed_over[path] = why
    return None, passed_over


def _newest_first(paths: Iterable[Location]) -> tuple[list[tuple[Location, Manifest | None]], dict[Location, str]]:
    """Return readable checkpoints with their manifests, in the order to try them, and why others cannot be read.

    Checkpoints are ordered by save number rather than by time, because a clock may have been set back. Files from other
    tools have no save number and come last, ordered by time.
    """
    found: list[tuple[tuple[int, int, int], Location, Manifest | None]] = []
    broken: dict[Location, str] = {}
    for path in paths:
        try:
            known = manifest.read(path)
            number = known.sequence if known else -1
            found.append(((number, _version(path) if known else -1, path.stat().st_mtime_ns), path, known))
        except (OSError, ValueError) as error:
            broken[path] = _damage(path) or str(error)
    found.sort(key=lambda one: one[0], reverse=True)
    return [(path, known) for _, path, known in found], broken


def _why_not(path: Location, known: Manifest | None, fn: str) -> str | None:
    """Return why a run cannot start from a checkpoint; None if it can."""
    if known is None:
        return _damage(path) or _why_not_foreign(path, fn)
    if known.format > FORMAT:
        return f"written by a newer version of paceline, in format {known.format}"
    return _WEIGHTS_ONLY if fn == "fit" and known.weights_only else _damage(path)


def _damage(path: Location) -> str | None:
    try:
        found = problem(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if found is None else found.why


def _why_not_foreign(path: Location, fn: str) -> str | None:
    try:
        found = read(path, map_location="meta")  # the tensors are not loaded
    except Exception as error:  # a broken file is the expected case
        return f"{type(error).__name__}: {error}"
    return _WEIGHTS_ONLY if fn == "fit" and "optimizer_states" not in found else None


def newer_of_its_run(path: Location) -> Location | None:
    """Return a checkpoint in the folder of ``path`` that the run of ``path`` wrote later; None if there is none."""
    found, _ = _newest_first(manifest.checkpoints_in(path.parent))
    own = next((known for other, known in found if other.name == path.name), None)
    if own is None:
        return None
    later = (
        other
        for other, known in found
        if known and known.sequence > own.sequence and not known.weights_only and set(known.runs) & set(own.runs)
    )
    return next(later, None)


def highest_sequence(folders: SearchFolders) -> int:
    """Return the highest save number in the folders; 0 if there is none.

    Of the version folders of earlier runs, this function reads only the newest one with checkpoints, because it has the
    highest save numbers.
    """
    found = (_highest(folders.checkpoints([folder])) for folder in folders.earlier)
    return max(_highest(folders.checkpoints(folders.own)), next(filter(None, found), 0))


def _highest(paths: Iterable[Location]) -> int:
    order, _ = _newest_first(paths)
    return max((known.sequence for _, known in order if known), default=0)


def _version(path: Location) -> int:
    """Return the N of the ``version_N`` folder in a path; -1 if there is none."""
    numbers = [part.removeprefix("version_") for part in path.parts if part.startswith("version_")]
    return int(numbers[-1]) if numbers and numbers[-1].isdecimal() else -1
