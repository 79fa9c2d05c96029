"""Find the checkpoint that ``ckpt_path`` refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import messages
from . import manifest
from .atomic_write import remove_temporaries
from .manifest import FORMAT, Manifest
from .read import read
from .storage import Location, absolute, is_remote, location
from .verify import problem

if TYPE_CHECKING:
    from ..trainer.run import Run


def find_checkpoint(run: Run, ckpt_path: Any, fn: str, reused: bool) -> Location | None:
    """Return the file for ``"best"``, ``"last"``, ``"auto"``, a path or None.

    ``reused``: whether the module was taken from the previous run; ``ckpt_path=None`` then means the best checkpoint of
    that run, if there is one.
    """
    if ckpt_path is None:
        return _best(run) if reused and fn != "fit" else None
    if ckpt_path == "best":
        best = _best(run)
        if best is None:
            raise ValueError(
                f"Trainer.{fn}(ckpt_path='best') found no best checkpoint, because none has been saved yet. Train with "
                "a ModelCheckpoint (enable_checkpointing=True) first, or pass the path of a file."
            )
        return best
    if ckpt_path in ("last", "auto"):
        newest = _newest(run, ckpt_path, fn)
        if newest is not None and fn == "fit":
            if run.claims.take([str(newest.parent)], alone=True):
                remove_temporaries(newest.parent)
            run.newest = newest
        return newest
    return location(ckpt_path)


def _best(run: Run) -> Location | None:
    return next((location(c.best_model_path) for c in run.trainer.checkpoint_callbacks if c.best_model_path), None)


def _newest(run: Run, word: str, fn: str) -> Location | None:
    """Return the newest valid checkpoint in this run's folders; a fit skips those that contain only weights."""
    own, earlier = _folders(run)
    folders = own + earlier
    chosen, passed_over = newest_valid(_checkpoints(run, folders), fn)
    listed = ", ".join(f"{path} ({why})" for path, why in passed_over.items())
    harmless = all(why == _WEIGHTS_ONLY for why in passed_over.values())
    if chosen is None:
        say = messages.info if harmless and word == "auto" else messages.warn
        where = ", ".join(map(str, folders))
        found = f"there is no valid checkpoint in {where}" if folders else "no earlier run has saved a checkpoint"
        broken = f" Skipped: {listed}." if listed else ""
        say(f"ckpt_path={word!r}: {found}, so the run starts fresh.{broken}")
    elif listed:
        say = messages.info if harmless else messages.warn
        say(f"ckpt_path={word!r} skipped {listed} and uses {chosen}.")
    return chosen


_WEIGHTS_ONLY = "weights only"


def newest_valid(paths: Iterable[Location], fn: str = "fit") -> tuple[Location | None, dict[Location, str]]:
    """Return the newest checkpoint that a run can start from, and the reason for each newer one that it cannot use."""
    order, passed_over = _newest_first(paths)
    for path, known in order:
        why = _why_not(path, known, fn)
        if why is None:
            return path, passed_over
        passed_over[path] = why
    return None, passed_over


def _newest_first(paths: Iterable[Location]) -> tuple[list[tuple[Location, Manifest | None]], dict[Location, str]]:
    """Return checkpoints in the order to try them, with their manifests, and the reason for each unreadable one.

    They are ordered by save number, so that a clock that was set back does not matter. Files from other tools have no
    save number and come last, ordered by time.
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
        return f"written by a newer version, in format {known.format}"
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
    """Return a checkpoint in the same folder that the same run wrote later; None if there is none."""
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


def highest_sequence(run: Run) -> int:
    """Return the highest save number in this run's folders; 0 if there is none.

    Of the earlier runs (in version folders), only the newest one that saved anything is read, because its numbers are
    the highest.
    """
    own, earlier = _folders(run)
    highest = _highest(run, own)
    return max(highest, next(filter(None, (_highest(run, [folder]) for folder in earlier)), 0))


def _highest(run: Run, folders: Iterable[Location]) -> int:
    order, _ = _newest_first(_checkpoints(run, folders))
    return max((known.sequence for _, known in order if known), default=0)


def _checkpoints(run: Run, folders: Iterable[Location]) -> Iterator[Location]:
    names = (getattr(callback, "filename", None) or "" for callback in _savers(run))
    depth = max((name.count("/") for name in names), default=0)
    for folder in folders:
        yield from manifest.checkpoints_in(folder, depth)


def _savers(run: Run) -> list[Any]:
    """Return the callbacks that save checkpoints to a folder, even if the folder is not known yet."""
    return [callback for callback in run.trainer.callbacks if hasattr(callback, "dirpath")]


def _folders(run: Run) -> tuple[list[Location], list[Location]]:
    """Return the folders that callbacks save to and, if one is (or will be) the default folder, earlier runs' folders.

    This must not create this run's own folders, because a resumed fit uses those of the run that it resumes.
    """
    root = run.trainer.default_root_dir
    asked = [callback.dirpath for callback in _savers(run)]
    folders = list(dict.fromkeys(location(folder) for folder in asked if folder))
    runs = run.trainer.loggers[0].run_dirs() if run.trainer.loggers and not is_remote(root) else [root]
    default = [location(absolute(run)) / "checkpoints" for run in runs]
    if None not in asked and not any(folder in folders for folder in default):
        return folders, []
    return folders, [path for path in sorted(default, key=_version, reverse=True) if path not in folders]


def _version(path: Location) -> int:
    """Return the N of the ``version_N`` folder in a path; -1 if there is none."""
    numbers = [part.removeprefix("version_") for part in path.parts if part.startswith("version_")]
    return int(numbers[-1]) if numbers and numbers[-1].isdecimal() else -1
