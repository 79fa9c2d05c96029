"""Verify that a checkpoint is intact, using the checksums of all its bytes. Nothing here needs torch."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO, NamedTuple

from . import manifest
from .storage import Location

_BUFFER_BYTES = 1 << 24
_DOS_FOLDER = 0x10
#: Bytes of the last record of a zip file; its last two bytes are the length of the comment after it.
_ENDING = 22
_LONGEST_ENDING = _ENDING + 0xFFFF


class Problem(NamedTuple):
    """Why a file or folder cannot be loaded.

    Attributes:
        why: text that continues "The checkpoint is damaged or cut short: ".
        foreign: whether it is not a checkpoint at all.
        fix: what to do instead; None for the usual advice.
    """

    why: str
    foreign: bool = False
    fix: str | None = None

    def error(self, name: str) -> ValueError:
        """The error to raise for the checkpoint ``name``."""
        if self.foreign:
            fix = self.fix or "Pass a file written by trainer.save_checkpoint or ModelCheckpoint."
            return ValueError(f"{name!r} is not a checkpoint: {self.why}. {fix}")
        fix = self.fix or "Use another one; if this is a copy, copy it again and compare the sizes."
        return ValueError(f"The checkpoint {name!r} is damaged or cut short: {self.why}. {fix}")


def problem(path: Location) -> Problem | None:
    """What is wrong with a checkpoint file or folder; None if its bytes are intact.

    A file without checksums, as torch wrote before it used zip files, is assumed to be correct.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_dir():
        return folder_problem(path)
    with path.open("rb") as stream:
        return file_problem(stream)


def file_problem(stream: IO[bytes]) -> Problem | None:
    """What is wrong with an open, seekable file. ``torch.load`` itself checks nothing and would load garbage."""
    stream.seek(0)
    head = stream.read(4)
    if not head:
        return Problem("it is empty")
    if head[:2] != b"PK":
        return None if head[:1] == b"\x80" else Problem(f"it starts with the bytes {head!r}", foreign=True)
    try:
        with zipfile.ZipFile(stream) as archive:
            endings = {record.rpartition("/")[2] for record in archive.namelist()}
            bad_record = _damaged_record(archive)
            end, size = _end(stream)
    except Exception as error:
        return Problem(f"its records cannot be read ({error!r})")
    if "constants.pkl" in endings:
        return Problem("it is a TorchScript program", foreign=True, fix="Load it with torch.jit.load.")
    if bad_record is not None:
        return Problem(f"its record {bad_record!r} does not match its checksum")
    if "data.pkl" not in endings:
        return Problem("it is a zip file with other contents", foreign=True)
    if size != end:
        why = f"it has {size} bytes and should end after {end}"
        return Problem(why, fix=f"If something was appended to it, cut that off: truncate -s {end} FILE.")
    return None


def _end(stream: IO[bytes]) -> tuple[int, int]:
    """Where a zip file should end according to its own records, and its size. Readers ignore appended bytes."""
    size = stream.seek(0, os.SEEK_END)
    start = max(0, size - _LONGEST_ENDING)
    stream.seek(start)
    ending = stream.read()
    place = ending.rindex(b"PK\x05\x06")
    comment = int.from_bytes(ending[place + _ENDING - 2 : place + _ENDING], "little")
    return start + place + _ENDING + comment, size


def _damaged_record(archive: zipfile.ZipFile) -> str | None:
    """The first damaged record. If all checksums are 0, torch was set not to write any, and nothing is checked."""
    records = archive.infolist()
    if any(record.CRC for record in records):
        damaged = archive.testzip()
        return damaged or next((record.filename for record in records if _is_odd(record)), None)
    return None


def _is_odd(record: zipfile.ZipInfo) -> bool:
    """Whether torch would read other bytes than the checksum covers: another length, or none for a folder entry."""
    return record.file_size != record.compress_size or bool(record.external_attr & _DOS_FOLDER)


def folder_problem(folder: Location, share: int = 0, shares: int = 1) -> Problem | None:
    """What is wrong with the files of a folder.

    The sizes of all files are checked, but only the checksums of this process's share: one in every ``shares`` files,
    or none if ``share`` is negative.
    """
    if not manifest.is_folder(folder):
        return Problem("it has no manifest, so it is not a checkpoint or was never completed", foreign=True)
    try:
        files = manifest.read_folder(folder).files
    except ValueError as error:
        return Problem(str(error))
    for index, (name, (size, checksum)) in enumerate(files.items()):
        path = folder / name
        if not path.exists():
            return Problem(f"its file {name!r} is missing")
        if path.stat().st_size != size:
            return Problem(f"its file {name!r} has {path.stat().st_size} bytes and should have {size}")
        if index % shares == share and _checksum(path) != checksum:
            return Problem(f"its file {name!r} does not match its checksum")
    return None


def sums(paths: Sequence[Location]) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of files, by name."""
    return {path.name: [path.stat().st_size, _checksum(path)] for path in paths}


def _checksum(path: Location) -> int:
    found = 0
    with path.open("rb") as stream:
        while data := stream.read(_BUFFER_BYTES):
            found = zlib.crc32(data, found)
    return found
