"""What a checkpoint says about itself: JSON that is written last, and read without loading anything else of it.

In a single file it is a further record of the zip, ``<archive>/manifest.json`` (``unzip -p FILE '*/manifest.json'``);
in a folder the file ``manifest.json``. A checkpoint that has one was written to its end. Nothing here needs torch.
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

#: In a checkpoint that is a folder, the file that holds everything but the big tensors.
CONTENTS = "contents.ckpt"
#: The name of the file, and the ending of the record, that holds a manifest.
NAME = "manifest.json"
SUFFIX = ".ckpt"
#: The checkpoint in a folder that an Accelerator's ``save_state`` wrote.
STATE = f"state{SUFFIX}"

#: The layout of checkpoints and manifests. What has a higher number is refused.
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, and what it consists of.

    Attributes:
        format: the layout it was written in.
        kind: ``"file"`` or ``"folder"``.
        weights_only: no fit can go on from it.
        epoch: epochs that were complete, the current one not counted.
        global_step: optimizer steps.
        sequence: its number among the saves of its run and of those before it in the same folders; 0 outside a fit.
        monitor: the metric it was ranked by.
        score: that metric, None if there is none or it is not finite.
        world_size: processes of the run.
        versions: of paceline, torch and python.
        runs: the marks of the run that wrote it.
        line: the mark of the callback that keeps it, the same in starts that went on from each other; else empty.
        written: time in UTC, ISO 8601.
        files: size in bytes and CRC-32 of each file of a folder (the manifest aside), or of each record of a file.
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
        """Where in a folder the files are: ``""``, or a folder of their own below it, as behind an address."""
        return next((name.removesuffix(CONTENTS) for name in self.files if name.endswith(CONTENTS)), "").rstrip("/")


def of(checkpoint: dict[str, Any], files: dict[str, list[int]] | None = None) -> Manifest:
    """The manifest for a checkpoint that is about to be written.

    Args:
        checkpoint: what the file holds; sequence number and score stand in its ``["paceline"]["manifest"]``.
        files: size and checksum of the files of a folder; None for a single file, whose zip has them itself.
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
    """Add the record to a zip file that is complete otherwise and open for reading and writing."""
    with zipfile.ZipFile(stream, "a") as archive:
        inside = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{inside}/{NAME}", _text(manifest))


def write(folder: Path, manifest: Manifest) -> None:
    """Write the file of a folder, and sync it to disk."""
    with (folder / NAME).open("x", encoding="utf-8") as stream:
        stream.write(_text(manifest))
        stream.flush()
        os.fsync(stream.fileno())


def _text(manifest: Manifest) -> str:
    """As JSON, with the checksum of all the rest."""
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
    """The manifest of a checkpoint; None if it has none, as files of other tools.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is damaged, or no checkpoint at all.
    """
    where = location(path)
    if where.is_dir():
        return read_folder(where)
    with where.open("rb") as stream:
        return read_file(stream)


def read_folder(path: Location) -> Manifest:
    """The manifest of a checkpoint that is a folder.

    Raises:
        ValueError: it is missing or damaged, or the folder is no checkpoint.
    """
    if not is_folder(path):
        raise ValueError("it is a folder that is no checkpoint")
    try:
        return _made(_parsed((path / NAME).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"its file {NAME!r} is missing") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"its file {NAME!r} is not what was written ({error})") from error


def read_file(stream: IO[bytes]) -> Manifest | None:
    """The manifest in an open file, which can seek."""
    if stream.read(1) == b"\x80":  # a pickle, as torch wrote before it used zip files
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
    """A manifest out of JSON; what a later version added to it is left out."""
    return Manifest(**{field.name: found[field.name] for field in fields(Manifest) if field.name in found})


def is_folder(path: str | os.PathLike[str] | Remote) -> bool:
    """Whether there is a checkpoint that is a folder, be it whole or not."""
    return any((location(path) / name).is_file() for name in (NAME, CONTENTS))


def checkpoints_in(folder: str | os.PathLike[str] | Remote, depth: int = 0) -> Iterator[Location]:
    """The checkpoints in a folder: what is called ``*.ckpt``, file or folder, unless it is hidden.

    Args:
        folder: which need not exist.
        depth: how many levels of folders to go down.
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
