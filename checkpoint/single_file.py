"""A checkpoint in a single file, written completely or not at all, and read without running any code in it."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
from contextlib import suppress
from typing import IO, Any

import torch
from torch import Tensor

from .. import messages
from ..torch_private import storage_key
from . import atomic_write, manifest, storage
from .checksums import Problem, file_problem
from .manifest import FORMAT
from .objects import open_section
from .pickled_code import CALLS, CREATES, REFERS, uses
from .plain_data import plain
from .storage import Location, Remote, location

# ---- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: dict[str, Any], path: str | os.PathLike[str] | Remote, whole: bool = True) -> None:
    """Write a checkpoint so that ``path`` is always either the old file or the complete new one, even after a crash.

    The bytes are written to a hidden ``.tmp`` file in the same folder and synced to disk before that file replaces
    ``path``. Tensors are streamed, so the whole file is never in memory. A ``NewPath`` never replaces an existing file.
    ``whole`` is False for a file in a checkpoint folder, because the folder has its own manifest.

    Raises:
        TypeError: if a value is neither plain data nor a tensor; the message shows its path.
        FileExistsError: if a file exists at a ``NewPath``.
        OSError: if the file could not be written. An earlier file at ``path`` is then unchanged.
    """
    target = location(path)
    if target.is_dir() and not manifest.is_folder(target):
        raise IsADirectoryError(errno.EISDIR, "A checkpoint is a single file, but this path is a folder", str(path))
    stream = _Stream()
    try:
        checkpoint = plain(checkpoint, "checkpoint")
        new = isinstance(path, storage.NewPath)
        with atomic_write.written_aside(target, new) as temporary, _File(temporary, "x+") as stream.raw:
            _save(checkpoint, stream)
            if whole:
                manifest.append(stream.raw, manifest.of(checkpoint))
            os.fsync(stream.raw.fileno())
    except BaseException as error:
        taken = isinstance(error, FileExistsError) and error.filename == str(target)
        if isinstance(error, OSError) and not taken:
            raise _not_written(error, checkpoint, target, stream.written) from error
        if isinstance(error, RecursionError):
            raise ValueError(
                "The checkpoint cannot be written, because it contains data that is nested too deeply or contains "
                "itself. Check what your state_dict() and on_save_checkpoint() methods add to the checkpoint."
            ) from None
        raise


class _File(io.FileIO):
    """An unbuffered file.

    A data loader worker forked during a write has a copy of this process's memory. If the file had a buffer, the worker
    would write its contents a second time when it exits and closes its files.
    """

    def write(self, data: Any) -> int:
        """Write all of the data, with several system calls if a single one writes only part of it."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            rest = rest[super().write(rest) :]
        return size


class _Stream:
    """The stream for ``torch.save``.

    It stores the first error instead of raising it, so that no later error masks the first.
    """

    raw: io.FileIO

    def __init__(self) -> None:
        self.written = 0
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.raw.write(data)
                self.written += len(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None: ...


def _save(checkpoint: dict[str, Any], stream: _Stream) -> None:
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(checkpoint, stream)  # pyright: ignore[reportArgumentType]
    finally:
        torch.serialization.set_crc32_options(checksums)
    if stream.error is not None:
        raise stream.error


def _not_written(error: OSError, checkpoint: dict[str, Any], target: Location, written: int) -> OSError:
    remote = isinstance(target, Remote)
    kept = "The existing file is unchanged. " if not remote and target.exists() else ""
    text = f"{error.strerror or error}: the checkpoint was not saved. {kept}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = sum(_storage_sizes(checkpoint).values())
        room = atomic_write.beside(target, "x").parent
        with suppress(OSError):
            text += f"{shutil.disk_usage(room).free:,} bytes are free in {room if remote else 'its folder'}. "
        elsewhere = "set TMPDIR" if remote else "save to a different folder (dirpath, default_root_dir)"
        text += (
            f"The checkpoint needs about {needed:,} bytes, of which {written:,} were written before the error. Free "
            f"disk space, keep fewer checkpoints (save_top_k), or {elsewhere}. Checkpoint"
        )
    elif remote:
        text += "Check the URL and the network, and that your credentials allow writing. Checkpoint"
    else:
        text += "Make the folder writable, or save to a different one (dirpath, default_root_dir). Checkpoint"
    return OSError(error.errno, text, str(target))


def _storage_sizes(value: Any) -> dict[int, int]:
    """Return the size in bytes of every storage that tensors anywhere in ``value`` use, keyed by its address."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage_key(storage): storage.nbytes()}
    sizes: dict[int, int] = {}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in inner:
        sizes.update(_storage_sizes(item))
    return sizes


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(
    path: str | os.PathLike[str] | Remote | IO[bytes], map_location: Any = "cpu", trusted: bool = False
) -> dict[str, Any]:
    """Verify the checksums of a checkpoint file that Paceline or Lightning wrote, and read it.

    Arguments and errors are the same as for :func:`.read.read`. A file at a remote URL is downloaded first.
    """
    if isinstance(path, (str, os.PathLike, Remote)):
        where = location(path)
        _must_be_file(where)
        with storage.local_copy(where) as copy, copy.open("rb") as file:
            return _read(file, str(where), map_location, trusted)
    return _read(path, str(getattr(path, "name", path)), map_location, trusted)


def load(path: str | os.PathLike[str] | Remote, map_location: Any = "cpu", trusted: bool = False) -> Any:
    """Read any file written by ``torch.save``, after verifying its checksums if it has any.

    Arguments and errors are the same as for :func:`.read.read`.
    """
    where = location(path)
    _must_be_file(where)
    with storage.local_copy(where) as copy, copy.open("rb") as file:
        return _load(file, str(where), map_location, trusted)


def _read(file: IO[bytes], name: str, map_location: Any, trusted: bool) -> dict[str, Any]:
    checkpoint = _load(file, name, map_location, trusted)
    _check_contents(checkpoint, name)
    return open_section(checkpoint, name, trusted, map_location)


def _load(file: IO[bytes], name: str, map_location: Any, trusted: bool) -> Any:
    found = file_problem(file)
    if found is not None:
        raise found.error(name)
    file.seek(0)
    try:
        return torch.load(file, map_location=map_location, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise _refused(file, name, error) from error
    except (EOFError, LookupError, ValueError, TypeError) as error:
        raise _damaged(name, f"torch.load says {error!r}") from error
    except RuntimeError as error:
        if "inline_container" in str(error) or "PytorchStreamReader" in str(error):
            raise _damaged(name, f"torch.load says {str(error).splitlines()[0]!r}") from error
        raise


def _must_be_file(path: Location) -> None:
    if path.is_dir():
        text = f"A checkpoint is a single file, but this path is a folder. {_files_in(path)} Checkpoint"
        raise IsADirectoryError(errno.EISDIR, text, str(path))
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, f"The file does not exist. {_neighbors(path)} Checkpoint", str(path))


def _neighbors(path: Location) -> str:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if folder != path.parent:
        return f"Its folder does not exist either. The nearest existing folder is {storage.absolute(folder)}."
    return f"{_files_in(folder)}{messages.did_you_mean(path.name, _names_in(folder))}"


def _names_in(folder: Location) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return [name for name in names if name.endswith((".ckpt", ".pt", ".pth"))] or names


def _files_in(folder: Location) -> str:
    names = _names_in(folder)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{storage.absolute(folder)} contains {', '.join(names[:10]) or 'no files'}{more}."


def _check_contents(checkpoint: Any, name: str) -> None:
    if not isinstance(checkpoint, dict):
        raise _no_checkpoint(name, f"it contains a single object of type {type(checkpoint).__name__}")
    section = checkpoint.get("paceline", {})
    version = section.get("format", 0)
    if version > FORMAT:
        raise ValueError(
            f"The checkpoint {name!r} has format {version} (written by paceline {section['versions']['paceline']}), "
            f"but this version of paceline reads only formats up to {FORMAT}. Upgrade paceline, or load only the "
            "weights with torch.load(path)['state_dict']."
        )
    if "state_dict" in checkpoint:
        return
    shown = messages.names(list(checkpoint)[:8], last="and") or "nothing"
    why = f"it has no 'state_dict', only {shown}{' and more' if len(checkpoint) > 8 else ''}"
    if checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise _no_checkpoint(name, why, "Load bare weights with module.load_state_dict(torch.load(path)) instead.")
    raise _no_checkpoint(name, why)


def _no_checkpoint(name: str, why: str, fix: str | None = None) -> ValueError:
    return Problem(why, foreign=True, fix=fix).error(name)


def _damaged(name: str, why: str) -> ValueError:
    return Problem(why).error(name)


def _refused(file: IO[bytes], name: str, error: pickle.UnpicklingError) -> ValueError:
    found: dict[str, str] = {}
    with suppress(Exception):
        found = uses(file)
    if not found:
        return _damaged(name, f"torch.load says {str(error).splitlines()[0]!r}")
    by_use = {use: [one for one in found if found[one] == use] for use in (CALLS, CREATES, REFERS)}
    does = [f"{use} {_some(names)}" for use, names in by_use.items() if names]
    return ValueError(
        f"The checkpoint {name!r} was not loaded and nothing in it was run, because it contains more than plain data "
        f"and tensors, and loading it {', and it '.join(does)}. If you trust the file, pass weights_only=False, which "
        f"runs that code, or write a plain copy with: paceline checkpoint convert {name} OUT --trust. Or allow the "
        "names with torch.serialization.add_safe_globals([...])."
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (messages.names(names[:5], "and") if not more else ", ".join(map(repr, names[:5]))) + more
