"""A checkpoint's manifest: JSON with metadata and checksums, which is written last and can be read on its own.

In a single file, the manifest is an additional record of the zip archive, ``<archive>/manifest.json``
(``unzip -p FILE '*/manifest.json'``); in a folder, it is the file ``manifest.json``. A checkpoint with a manifest is
complete. This module does not need torch.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from .storage import Location, Remote, location

#: The file in a checkpoint folder that holds everything except the large tensors.
CONTENTS = "contents.ckpt"
#: Name of a manifest's file, or end of the name of its record.
NAME = "manifest.json"
SUFFIX = ".ckpt"
#: Name of the checkpoint in a folder that ``Accelerator.save_state`` wrote.
STATE = f"state{SUFFIX}"

#: Version of the layout of checkpoints and manifests. Higher versions are rejected.
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint, including a list of its files.

    Attributes:
        format: version of the checkpoint's layout.
        kind: ``"file"`` or ``"folder"``.
        weights_only: whether the checkpoint contains only weights; no fit can resume from such a checkpoint.
        epoch: number of completed epochs, not counting the current one.
        global_step: number of optimizer steps.
        sequence: number of this save, counted across this run and earlier runs in the same folders; 0 outside a fit.
        monitor: name of the metric that ranked the checkpoint.
        score: value of that metric; None if there is no such metric or its value is not finite.
        world_size: number of processes in the run.
        versions: versions of paceline, torch and python.
        runs: IDs of the run that wrote the checkpoint; each checkpoint callback gives the run an ID.
        line: ID of the callback that manages the checkpoint; a resumed run keeps this ID. Empty if no callback manages
            the checkpoint.
        written: time in UTC, ISO 8601.
        files: size in bytes and CRC-32 of each file in a folder (except the manifest), or of each record in a file.
    """

    format: int = FORMAT
    kind: str = "file"
    weights_only: bool = False
    epoch: int = 0
    global_step: int = 0
    sequence: int = 0
    monitor: str | None = None
    score: float | None = None
    world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    line: str = ""
    written: str = ""
    files: dict[str, list[int]] = field(default_factory=dict)

    @property
    def inside(self) -> str:
        """The subfolder that holds the files of a remote checkpoint folder; ``""`` for a local folder."""
        return next((name.removesuffix(CONTENTS) for name in self.files if name.endswith(CONTENTS)), "").rstrip("/")


def of(checkpoint: dict[str, Any], files: dict[str, list[int]] | None = None) -> Manifest:
    """Return the manifest for a checkpoint that is about to be written.

    Its sequence number and score come from ``checkpoint["paceline"]["manifest"]``. ``files`` maps each file in a folder
    to its size and checksum; ``files`` is None for a single file, because the zip archive itself records sizes and
    checksums.
    """
    section = checkpoint.get("paceline", {})
    facts = section.get("manifest", {})
    score = facts.get("score")
    return Manifest(
        kind="file" if files is None else "folder",
        weights_only="optimizer_states" not in checkpoint,
        epoch=checkpoint.get("epoch", 0),
        global_step=checkpoint.get("global_step", 0),
        sequence=facts.get("sequence", 0),
        monitor=facts.get("monitor"),
        score=score if score is not None and math.isfinite(score) else None,
        world_size=section.get("world_size", 1),
        versions=section.get("versions", {}),
        runs=section.get("runs", []),
        line=facts.get("line", ""),
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files=files or {},
    )


def append(stream: Any, manifest: Manifest) -> None:
    """Add the manifest to a zip file that is otherwise complete and open for reading and writing."""
    with zipfile.ZipFile(stream, "a") as archive:
        inside = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{inside}/{NAME}", _text(manifest))


def write(folder: Path, manifest: Manifest) -> None:
    """Write a folder's manifest file and sync it to disk."""
    with (folder / NAME).open("x", encoding="utf-8") as stream:
        stream.write(_text(manifest))
        stream.flush()
        os.fsync(stream.fileno())


def _text(manifest: Manifest) -> str:
    """Return the manifest as JSON, including a checksum of itself."""
    found = asdict(manifest)
    return _dump({"checksum": zlib.crc32(_dump(found).encode()), **found})


def _dump(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False)


def _parsed(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if text != _dump(found).encode():
        raise ValueError("it was edited, or something was appended to it")
    if found.pop("checksum") != zlib.crc32(_dump(found).encode()):
        raise ValueError("it does not match its checksum")
    return found


def read(path: str | os.PathLike[str] | Remote) -> Manifest | None:
    """Return the manifest of a checkpoint; None if another tool wrote the checkpoint without one.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if the file is damaged or is not a checkpoint.
    """
    where = location(path)
    if where.is_dir():
        return read_folder(where)
    with where.open("rb") as stream:
        return read_file(stream)


def read_or_none(path: str | os.PathLike[str] | Remote) -> Manifest | None:
    """Like :func:`read`, but also return None if the checkpoint is damaged, unreachable or gone."""
    try:
        return read(path)
    except (OSError, ValueError, ImportError):
        return None


def read_folder(path: Location) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises:
        ValueError: if the manifest is missing or damaged, or if the folder is not a checkpoint.
    """
    if not is_folder(path):
        raise ValueError("it is a folder that is not a checkpoint")
    try:
        return _made(_parsed((path / NAME).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"its file {NAME!r} is missing") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"its file {NAME!r} has changed since it was written ({error})") from error


def read_file(stream: IO[bytes]) -> Manifest | None:
    """Return the manifest in an open, seekable file; None if there is none."""
    if stream.read(1) == b"\x80":  # a pickle, which torch wrote before it used zip files
        return None
    try:
        with zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if name.partition("/")[2] == NAME]
            if not names:
                return None
            records = {r.filename: [r.file_size, r.CRC] for r in archive.infolist() if r.filename not in names}
            return _made({**_parsed(archive.read(names[-1])), "files": records})
    except (
        zipfile.BadZipFile,
        ValueError,
        EOFError,
        LookupError,
        NotImplementedError,
        struct.error,
        zlib.error,
    ) as error:
        raise ValueError(f"its records cannot be read ({error})") from error


def _made(found: dict[str, Any]) -> Manifest:
    """Create a manifest from JSON data, ignoring fields that a later version added."""
    return Manifest(**{field.name: found[field.name] for field in fields(Manifest) if field.name in found})


def is_folder(path: str | os.PathLike[str] | Remote) -> bool:
    """Return True if the path is a checkpoint folder, whether complete or not."""
    return any((location(path) / name).is_file() for name in (NAME, CONTENTS))


def checkpoints_in(folder: str | os.PathLike[str] | Remote, depth: int = 0) -> Iterator[Location]:
    """Yield the checkpoints in a folder: files and folders named ``*.ckpt`` that are not hidden.

    The folder does not have to exist. ``depth`` is the number of subfolder levels to search.
    """
    try:
        entries = sorted(location(folder).iterdir(), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.name.endswith(SUFFIX):
            yield entry
        elif depth and entry.is_dir():
            yield from checkpoints_in(entry, depth - 1)
