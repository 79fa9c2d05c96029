"""Verify that a checkpoint is intact, using checksums of all its bytes. This module does not need torch."""

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
#: Size in bytes of the last record in a zip file; its last two bytes are the length of the comment that follows.
_ENDING = 22
_LONGEST_ENDING = _ENDING + 0xFFFF


class Problem(NamedTuple):
    """Describes why a file or folder cannot be loaded.

    Attributes:
        why: text that continues "The checkpoint is damaged or truncated: ".
        foreign: whether the file or folder is not a checkpoint at all.
        fix: advice on what to do; None means the usual advice.
    """

    why: str
    foreign: bool = False
    fix: str | None = None

    def error(self, name: str) -> ValueError:
        """Return the error to raise for the checkpoint ``name``."""
        if self.foreign:
            fix = self.fix or "Pass a file written by trainer.save_checkpoint or ModelCheckpoint."
            return ValueError(f"{name!r} is not a checkpoint: {self.why}. {fix}")
        fix = self.fix or "Use a different checkpoint. If this is a copy, copy the file again and compare the sizes."
        return ValueError(f"The checkpoint {name!r} is damaged or truncated: {self.why}. {fix}")


def problem(path: Location) -> Problem | None:
    """Return what is wrong with a checkpoint file or folder; None if its bytes are intact.

    A file in torch's old format, which is not a zip file, has no checksums and is assumed to be intact.

    Raises:
        OSError: if the checkpoint cannot be read.
    """
    if path.is_dir():
        return folder_problem(path)
    with path.open("rb") as stream:
        return file_problem(stream)


def file_problem(stream: IO[bytes]) -> Problem | None:
    """Return what is wrong with an open, seekable file.

    ``torch.load`` does not check files, so it would load garbage from a damaged file.
    """
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
        why = f"it has {size} bytes but should end after {end}"
        return Problem(why, fix=f"If bytes were appended to the file, remove them with: truncate -s {end} FILE")
    return None


def _end(stream: IO[bytes]) -> tuple[int, int]:
    """Return the size that a zip file should have according to its own records, and its actual size.

    Zip readers ignore appended bytes, so the two can differ.
    """
    size = stream.seek(0, os.SEEK_END)
    start = max(0, size - _LONGEST_ENDING)
    stream.seek(start)
    ending = stream.read()
    place = ending.rindex(b"PK\x05\x06")
    comment = int.from_bytes(ending[place + _ENDING - 2 : place + _ENDING], "little")
    return start + place + _ENDING + comment, size


def _damaged_record(archive: zipfile.ZipFile) -> str | None:
    """Return the first damaged record, or None.

    If all checksums are 0, torch was configured not to write any, and nothing is checked.
    """
    records = archive.infolist()
    if any(record.CRC for record in records):
        damaged = archive.testzip()
        return damaged or next((record.filename for record in records if _is_odd(record)), None)
    return None


def _is_odd(record: zipfile.ZipInfo) -> bool:
    """Return True if torch would read bytes that the checksum does not cover, or no bytes at all (a folder entry)."""
    return record.file_size != record.compress_size or bool(record.external_attr & _DOS_FOLDER)


def folder_problem(folder: Location, share: int = 0, shares: int = 1) -> Problem | None:
    """Return what is wrong with the files of a checkpoint folder; None if all files are intact.

    The sizes of all files are checked. Checksums are verified only for this process's share of the files, which is one
    in every ``shares`` files, or none if ``share`` is negative.
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
            return Problem(f"its file {name!r} has {path.stat().st_size} bytes but should have {size}")
        if index % shares == share and _checksum(path) != checksum:
            return Problem(f"its file {name!r} does not match its checksum")
    return None


def sums(paths: Sequence[Location]) -> dict[str, list[int]]:
    """Return the size in bytes and the CRC-32 of each file, keyed by the file's name."""
    return {path.name: [path.stat().st_size, _checksum(path)] for path in paths}


def _checksum(path: Location) -> int:
    found = 0
    with path.open("rb") as stream:
        while data := stream.read(_BUFFER_BYTES):
            found = zlib.crc32(data, found)
    return found
