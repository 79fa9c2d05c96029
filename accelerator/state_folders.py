"""Names an Accelerator's state folders, finds the newest one, deletes old ones, and moves hook files into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from .. import messages
from ..checkpoint import atomic_write, manifest, storage
from ..checkpoint.checksums import sums
from ..checkpoint.find import newest_valid
from ..checkpoint.logger_positions import section_of
from ..checkpoint.manifest import STATE
from ..checkpoint.sharded_folder import together
from ..checkpoint.storage import Location, Remote, location

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .plugins import ProjectConfiguration

#: Subfolder of the project for numbered states.
CHECKPOINTS = "checkpoints"
_NUMBERED = "checkpoint_"
_ROOM, _BEFORE = "hooks", "before"
#: Files that hooks wrote: maps each path in the folder to its size in bytes and CRC-32.
Files = dict[str, list[int]]


class MissingStateError(FileNotFoundError, ValueError):
    """There is no state to load. Programs written for Accelerate catch its ValueError in order to start anew."""


@dataclass(eq=False)
class Folders:
    """The folders where one Accelerator saves its states.

    Attributes:
        project: determines where folders are created and how many are kept.
        line: ID of the run; a resumed run keeps the same ID.
        sequence: number of the last save.
        folders: folders where this process has saved, newest last.
        counted: parent folders whose earlier saves have been counted.
    """

    strategy: Strategy
    project: ProjectConfiguration
    line: str = field(default_factory=lambda: uuid4().hex[:12])
    sequence: int = 0
    folders: list[Location] = field(default_factory=list)
    counted: set[Location] = field(default_factory=set)

    def next(self, folder: Location) -> int:
        """Return the next save's number, which is higher than those of all other saves in the same parent folder."""
        if folder.parent not in self.counted:
            self.counted.add(folder.parent)
            found = [known.sequence for state in states_in(folder.parent) if (known := manifest.read_or_none(state))]
            self.sequence = max([self.sequence, *found])
        self.sequence += 1
        return self.sequence

    def saved(self, folder: Location) -> None:
        """Record a completed save."""
        self.folders = [other for other in self.folders if other != folder] + [folder]

    # ---- names -------------------------------------------------------------------------------------------------------

    def to_save(self, output_dir: Any) -> Location:
        """Return the folder for the next state, the same on every rank: ``output_dir``, or the next numbered folder."""
        if output_dir is not None:
            return location(output_dir)
        if not self.project.automatic_checkpoint_naming:
            raise ValueError(
                "accelerator.save_state() got no folder. Pass output_dir=..., or use numbered folders: "
                "Accelerator(project_config=ProjectConfiguration(project_dir='runs', "
                "automatic_checkpoint_naming=True))."
            )
        return self.strategy.broadcast(_next_numbered(self._root("save_state") / CHECKPOINTS, self.project))

    def _root(self, asked: str) -> Location:
        folder = self.project.project_dir
        if folder is None:
            raise ValueError(
                f"accelerator.{asked}() uses numbered folders in project_dir (automatic_checkpoint_naming=True), but "
                "project_dir is not set. Pass Accelerator(project_dir=...)."
            )
        return location(folder)

    # ---- the newest --------------------------------------------------------------------------------------------------

    def to_load(self, input_dir: Any) -> Location:
        """Return the checkpoint that ``load_state`` reads, which is the newest valid one if ``input_dir`` is None."""
        if input_dir is None:
            return self._newest()
        where = location(input_dir)
        if (where / STATE).exists():
            return where / STATE
        if where.name.endswith(manifest.SUFFIX) and where.exists():
            return where
        raise MissingStateError(_nothing_in(where))

    def _newest(self) -> Location:
        config = self.project
        folders: list[Location] = []
        if config.automatic_checkpoint_naming:
            folders = [self._root("load_state") / CHECKPOINTS]
        elif config.project_dir is not None:
            folders = [location(config.project_dir) / CHECKPOINTS, location(config.project_dir)]
        if not folders and not self.folders:
            raise ValueError(
                "accelerator.load_state() got no folder. Pass input_dir=..., or Accelerator(project_dir=...) to load "
                "the project's newest state."
            )
        own = [folder / STATE for folder in self.folders if (folder / STATE).exists()]
        found = dict.fromkeys([*own, *(state for folder in folders for state in states_in(folder))])
        newest, passed_over = newest_valid(found)
        listed = ", ".join(f"{state.parent} ({why})" for state, why in passed_over.items())
        if newest is None:
            where = messages.names(map(str, folders or self.folders), "and")
            broken = f" Skipped: {listed}." if listed else ""
            raise MissingStateError(
                f"accelerator.load_state(): there is no valid state in {where}.{broken} Save a state first, or pass "
                "input_dir."
            )
        if listed:
            messages.warn(f"accelerator.load_state() skipped {listed} and is loading {newest.parent}.")
        return newest

    # ---- how many are kept -------------------------------------------------------------------------------------------

    def delete_old(self, newest: Location) -> None:
        """Delete this node's oldest states beyond ``total_limit``, including those saved before the run was resumed.

        Numbered folders are deleted entirely. In other folders, only the saved files are deleted, and then the folder
        itself if it is empty.
        """
        limit = self.project.total_limit
        if limit is None:
            return
        found = dict.fromkeys([*states_in(newest.parent), *(folder / STATE for folder in self.folders)])
        known = {state: one for state in found if (one := manifest.read_or_none(state)) and one.line == self.line}
        order = sorted(known, key=lambda state: known[state].sequence)
        for state in [state for state in order if state.parent != newest][: max(len(order) - max(limit, 1), 0)]:
            try:
                _delete(state)
            except FileNotFoundError:  # another node that shares the disk has deleted it
                continue
            except OSError as error:
                tell = messages.warn if self.strategy.is_global_zero else messages.info_anywhere
                tell(
                    f"{newest} was saved, but the older state {state.parent} (beyond total_limit={limit}) could not be "
                    f"deleted: {error}. Delete the older state's folder yourself."
                )


def states_in(folder: Location) -> Iterator[Location]:
    """Yield the states in a folder's subfolders, except hidden ones; yield nothing if the folder does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if not entry.name.startswith(".") and (entry / STATE).exists():
                yield entry / STATE


def _next_numbered(folder: Location, config: Any) -> Location:
    number = config.iteration
    if _is_taken(folder / f"{_NUMBERED}{number}"):
        taken = [_number(entry.name) for entry in folder.iterdir()]
        number = max([*taken, number]) + 1
        messages.info(
            f"{folder / f'{_NUMBERED}{config.iteration}'} already exists, so this state is saved as number {number}. "
            "accelerator.load_state() resumes from the newest state."
        )
        config.iteration = number
    return folder / f"{_NUMBERED}{number}"


def _is_taken(folder: Location) -> bool:
    """Return True if the folder contains anything other than the leftovers of a killed save."""
    return folder.exists() and not (folder.is_dir() and all(entry.name.startswith(".") for entry in folder.iterdir()))


def _number(name: str) -> int:
    digits = name.removeprefix(_NUMBERED)
    return int(digits) if name.startswith(_NUMBERED) and digits.isdecimal() else -1


def _nothing_in(where: Location) -> str:
    text = f"accelerator.load_state({str(where)!r}): the folder contains no {STATE}. "
    if not where.is_dir():
        return f"accelerator.load_state({str(where)!r}): the folder does not exist. Pass a folder from save_state."
    newest, _ = newest_valid(states_in(where))
    if newest is not None:
        return f"{text}The newest state inside it is {str(newest.parent)!r}. Pass that folder."
    names = {entry.name for entry in where.iterdir()}
    if names & {"random_states_0.pkl", "model.safetensors", "pytorch_model.bin"}:
        return (
            f"{text}The folder seems to contain another tool's files. You can still load the weights before calling "
            "prepare, with model.load_state_dict(safetensors.torch.load_file(...)) or torch.load(..., "
            "weights_only=True)."
        )
    return f"{text}The save never finished, or another program wrote the folder. Pass a folder that save_state wrote."


def newer_of_its_run(state: Location) -> str | None:
    """Return a folder next to this state's folder that holds a later state of its run, or None if there is none."""
    own = manifest.read_or_none(state)
    if own is None:
        return None
    found = ((one, known) for one in states_in(state.parent.parent) if (known := manifest.read_or_none(one)))
    return next(
        (str(one.parent) for one, known in found if known.line == own.line and known.sequence > own.sequence), None
    )


def _delete(state: Location) -> None:
    folder = state.parent
    if folder.parent.name == CHECKPOINTS and _number(folder.name) >= 0:
        storage.remove(folder)
        return
    files = files_of(state)
    storage.remove(state)
    if isinstance(folder, Path):
        _delete_files(folder, files)
        with suppress(OSError):
            folder.rmdir()


# ---- hook files --------------------------------------------------------------------------------------------------


def files_of(state: Location) -> Files:
    """Return the files that hooks wrote next to a state."""
    return section_of(state).get("accelerator", {}).get("files", {})


class HookFiles:
    """Makes the files that hooks write appear together with a state, or not at all.

    Hooks write to a hidden folder inside the state's folder. Just before the state is renamed into place, the
    files are moved to the state's folder. The files that they replace are kept in the hidden folder until the state is
    complete; see :func:`settle_files`. Every rank must create this object.

    Args:
        folder: the state's folder.
        strategy: the strategy.
        writes: whether this rank moves the files into place on its node's disk.
    """

    def __init__(self, folder: Location, strategy: Strategy, writes: bool) -> None:
        self.folder = folder
        self.strategy = strategy
        self.writes = writes
        self.files: Files = {}
        name = strategy.broadcast(atomic_write.temporary_name(_ROOM))
        self._room = atomic_write.beside(folder / STATE, name)
        self.path = self._room / "new" / (folder.name or "state")

    def written_by(self, write: Callable[[str], None]) -> None:
        """Run the hooks on every rank by calling ``write`` with the folder for the hooks' files."""
        strategy = self.strategy
        try:
            together(strategy, "saved", lambda: self.path.mkdir(parents=True, exist_ok=True))
            together(strategy, "saved", lambda: write(str(self.path)))
            if self.writes:
                self.files = dict(_sums_below(self.path))
        except BaseException:
            self.remove()
            raise

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which the state is written; if writing fails, the old hook files are restored."""
        before = files_of(self.folder / STATE) if (self.folder / STATE).exists() else {}
        moved: list[str] = []
        try:
            for name in self.files:
                moved.append(name)
                self._put(name)
            yield
        except BaseException:
            for name in moved:
                self._take_back(name)
            raise
        if isinstance(self.folder, Path):
            _delete_files(self.folder, before.keys() - self.files.keys())

    def _put(self, name: str) -> None:
        source, target = self.path / name, self.folder / name
        if isinstance(target, Remote):
            target.upload(source)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            kept = self._room / _BEFORE / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(target, kept)
            except OSError:  # the file system does not support links
                shutil.copy2(target, kept)
        with nullcontext() if self.strategy.is_global_zero else suppress(FileNotFoundError):  # nodes may share a disk
            source.replace(target)

    def _take_back(self, name: str) -> None:
        kept, target = self._room / _BEFORE / name, self.folder / name
        if isinstance(target, Remote):
            return
        if kept.exists():
            kept.replace(target)
        elif not (self.path / name).exists():
            target.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the hidden folder on every rank, because nodes may not share a disk."""
        atomic_write.remove(self._room)


def _sums_below(folder: Path) -> Iterator[tuple[str, list[int]]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield path.relative_to(folder).as_posix(), sums([path])[path.name]


def _delete_files(folder: Path, names: Iterable[str]) -> None:
    parents = set()
    for name in names:
        (folder / name).unlink(missing_ok=True)
        parents |= {parent for parent in (folder / name).parents if folder in parent.parents}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with suppress(OSError):
            parent.rmdir()


def settle_files(state: Location, files: Files) -> list[str]:
    """On rank 0, restore a state's hook files if a later save was killed before it finished.

    Returns:
        The hook files that no longer match the state and cannot be restored.
    """
    folder = state.parent
    wrong = [name for name, sum_ in files.items() if not _is(folder / name, sum_)]
    if not isinstance(folder, Path):
        return wrong
    for name in list(wrong):
        rooms = (room / _BEFORE / name for room in folder.glob(f".{_ROOM}.*.tmp"))
        kept = next((path for path in rooms if _is(path, files[name])), None)
        if kept is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            kept.replace(folder / name)
            wrong.remove(name)
    return wrong


def _is(path: Location, sum_: list[int]) -> bool:
    return path.exists() and path.stat().st_size == sum_[0] and sums([path])[path.name] == sum_
