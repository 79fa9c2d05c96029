"""A checkpoint in a folder: each process writes and reads its own shards of the tensors, in parallel.

The folder contains three kinds of files: ``contents.ckpt``, which is a normal checkpoint file except that its sharded
tensors are on the meta device, without memory; the shards of these tensors, which torch.distributed.checkpoint writes
under the names that the tensors have in the checkpoint (such as ``state_dict.head.weight``); and ``manifest.json``,
with the checksums of all files. Any number of processes can read the folder, and all of them get the same complete
checkpoint.

At a remote URL, where folders cannot be renamed, the folder contains only the manifest, and each save puts the other
files in a new subfolder. Replacing the manifest switches from the old checkpoint to the new one.
"""

from __future__ import annotations

import copy
import errno
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from .. import messages
from ..strategies.base import Strategy
from ..torch_private import NAMES_IN_INDEX
from . import atomic_write, manifest, single_file, storage
from .checksums import folder_problem, sums
from .manifest import CONTENTS
from .storage import Location, Remote, location

T = TypeVar("T")

_METADATA = ".metadata"


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: dict[str, Any], path: Any, strategy: Strategy) -> None:
    """Write a checkpoint with sharded tensors. Every process must call this.

    All files are written to a hidden folder next to ``path`` and synced to disk before the folder is renamed. The
    manifest, with the checksums of all other files, is written last. For a remote URL, the hidden folder is in the
    local temporary folder, and each process uploads its files. Values that are not sharded are taken from rank 0.

    Raises:
        OSError: on every process, if the checkpoint could not be written. An earlier checkpoint at ``path`` is then
            unchanged.
    """
    from torch.distributed.tensor import DTensor

    target, new = location(path), isinstance(path, storage.NewPath)
    parts: dict[str, DTensor] = {}
    known: dict[int, Tensor] = {}

    def take_out(place: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in known:
            parts[place] = tensor
            known[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return known[id(tensor)]

    contents = _mapped(checkpoint, "", take_out)
    agreed = partial(together, strategy, "saved")
    temporary = atomic_write.beside(target, strategy.broadcast(atomic_write.temporary_name(target.name)))
    try:
        agreed(lambda: _make_folder(target, temporary, strategy.is_global_zero))
        agreed(lambda: _write_parts(parts, temporary, strategy))
        own = agreed(lambda: _deliver(sorted(temporary.glob(f"__{strategy.global_rank}_*")), temporary, target))
        files = {name: sum_ for found in strategy.gather_objects(own) for name, sum_ in found.items()}
        agreed(lambda: strategy.is_global_zero and _finish(contents, temporary, target, files, new))
    except BaseException:
        if strategy.is_global_zero:
            _clear(temporary, target)
        raise
    finally:
        if isinstance(target, Remote):
            atomic_write.remove(temporary)


def _mapped(value: Any, place: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a copy of ``value`` in which ``change(name, tensor)`` replaces every tensor.

    The name of a tensor consists of the keys that lead to it, joined by dots.
    """
    if isinstance(value, Tensor):
        return change(place, value)
    inside = f"{place}." if place else ""
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, inner in value.items():
            changed[key] = _mapped(inner, f"{inside}{key}", change)
        return changed
    if type(value) in (list, tuple):
        return type(value)(_mapped(inner, f"{inside}{index}", change) for index, inner in enumerate(value))
    return value


def together(strategy: Strategy, verb: str, work: Callable[[], T]) -> T:
    """Call ``work`` on every process; if one process fails, raise on all, so that none waits forever for the others."""
    problem: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        problem = error
    problems = strategy.gather_objects(problem and f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text:
            raise OSError(f"The checkpoint was not {verb}, because rank {rank} failed: {text}")
    return result


def _make_folder(target: Location, temporary: Path, make: bool) -> None:
    if isinstance(target, Remote):  # existing remote files are kept
        temporary.mkdir(parents=True, exist_ok=True)
        return
    if target.is_dir() and not manifest.is_folder(target):
        raise IsADirectoryError(
            errno.EISDIR,
            "A folder with this name already exists, but it is not a checkpoint. Choose a different name. Folder",
            str(target),
        )
    if make:
        temporary.mkdir(parents=True)


def _write_parts(parts: dict[str, Any], folder: Path, strategy: Strategy) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(parts, storage_writer=FileSystemWriter(folder), process_group=strategy.host_group)
    except CheckpointException as error:
        rank, failure = next(iter(error.failures.items()))
        raise OSError(
            f"The checkpoint was not saved, because rank {rank} could not write its shards to {str(folder.parent)!r} "
            f"({failure[0]!r}). Make the folder writable for every process, free disk space, or save to a different "
            "folder."
        ) from error


def _upload_folder(temporary: Path, target: Remote) -> Remote:
    """Return the remote subfolder for the files of one save, inside the folder that holds the manifest."""
    return target / temporary.name.split(".")[-2]


def _deliver(written: list[Path], temporary: Path, target: Location) -> dict[str, list[int]]:
    """Upload files if the target is remote. Return each file's size and checksum, keyed by its name in the manifest."""
    found = sums(written)
    if isinstance(target, Path):
        return found
    folder = _upload_folder(temporary, target)
    for path in written:
        (folder / path.name).upload(path)
    return {f"{folder.name}/{name}": sum_ for name, sum_ in found.items()}


def _finish(
    contents: dict[str, Any], temporary: Path, target: Location, files: dict[str, list[int]], new: bool
) -> None:
    elsewhere = [name for name in files if isinstance(target, Path) and not (temporary / name).exists()]
    if elsewhere:
        raise OSError(
            f"The checkpoint {str(target)!r} was not saved, because rank 0 cannot see {len(elsewhere)} of the "
            f"checkpoint's {len(files)} files, which other processes wrote to their own disks. Save to a folder that "
            "all machines share, or use FSDPStrategy(state_dict_type='full')."
        )
    single_file.write(contents, temporary / CONTENTS, whole=False)
    files |= _deliver([temporary / _METADATA, temporary / CONTENTS], temporary, target)
    manifest.write(temporary, manifest.of(contents, files))
    if isinstance(target, Path):
        atomic_write.sync_folder(temporary)
        atomic_write.take_place(temporary, target, new)
    else:
        _upload_manifest(temporary, target)


def _upload_manifest(temporary: Path, target: Remote) -> None:
    """Upload the manifest, which completes the checkpoint, and delete the previous checkpoint."""
    before: dict[str, list[int]] = {}
    with suppress(ValueError):  # there is no previous checkpoint, or it is damaged
        before = manifest.read_folder(target).files
    (target / manifest.NAME).upload(temporary / manifest.NAME)
    try:
        storage.remove_all(target / name for name in before)
        if target.is_file():  # at a URL, a file and a folder can have the same name
            target.unlink()
    except OSError as error:
        messages.warn(
            f"The checkpoint {str(target)!r} was saved, but the previous checkpoint could not be deleted ({error}). "
            "Delete the previous checkpoint manually."
        )


def _clear(temporary: Path, target: Location) -> None:
    """Delete the files of a save that failed."""
    atomic_write.remove(temporary)
    if isinstance(target, Remote):
        folder, current = _upload_folder(temporary, target), ""
        with suppress(OSError):
            with suppress(ValueError):
                current = manifest.read_folder(target).inside
            if current != folder.name:  # otherwise, the checkpoint was complete before something failed
                storage.remove_all(folder.files_below())


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(
    folder: Location, map_location: Any = "cpu", strategy: Strategy | None = None, trusted: bool = False
) -> dict[str, Any]:
    """Verify the checksums of a checkpoint folder and read it.

    The arguments are the same as for :func:`.read.read`. With a strategy, every process must call this.

    Raises:
        ValueError: if the folder is damaged or incomplete, or was written by a newer version.
    """
    agreed = partial(together, strategy or Strategy(), "read")
    agreed(lambda: _check(folder, strategy))
    inside = folder / manifest.read_folder(folder).inside
    contents = single_file.read(inside / CONTENTS, map_location, trusted)
    if torch.device(map_location) == torch.device("meta"):
        return contents
    wanted: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}

    def give_memory(place: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in known:
            room = torch.empty_like(tensor, device=map_location) if strategy is None else strategy.room_for(tensor)
            wanted[place] = known[id(tensor)] = room
        return known[id(tensor)]

    filled = _mapped(contents, "", give_memory)
    agreed(lambda: _load(inside, wanted))
    return filled


def _check(folder: Location, strategy: Strategy | None) -> None:
    found = folder_problem(folder, strategy.global_rank, strategy.world_size) if strategy else folder_problem(folder)
    if found is not None:
        raise found.error(str(folder))


def _load(folder: Location, wanted: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    index = _Metadata(folder / _METADATA).load()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return index

    reader = Reader("")
    reader.fs, reader.path = _Files(), folder  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(wanted, storage_reader=reader, no_dist=True)  # type: ignore[arg-type]


class _Files:
    """The file system interface that torch's reader needs, for local and remote paths."""

    def concat_path(self, folder: Location, name: str) -> Location:
        return folder / name

    def create_stream(self, path: Location, mode: str) -> IO[bytes]:
        return path.open(mode)


class _Metadata(pickle.Unpickler):
    """Reads torch's index of a folder. Like any part of a checkpoint, it must load without running code."""

    def __init__(self, path: Location) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self.name = str(path)

    def find_class(self, module: str, name: str) -> Any:
        known = (
            module == "torch.distributed.checkpoint.metadata"
            or (module, name) in _INDEX_NAMES
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if not known or "." in name:
            raise ValueError(
                f"The checkpoint {self.name!r} was not loaded and nothing in it was run, because its index would "
                f"import {module}.{name}, which a tensor index never needs. Use a checkpoint from a source that you "
                "trust."
            )
        return super().find_class(module, name)


_INDEX_NAMES = {
    ("torch", "Size"),
    *NAMES_IN_INDEX,
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
