"""Local paths and remote URLs of checkpoints, and operations that work on both of them.

A local path is a :class:`pathlib.Path`. A remote URL, such as ``s3://bucket/run``, is a :class:`Remote`, which
implements the required path methods through fsspec.

Credentials and endpoints are configured for the protocol's package (for S3, in ``~/.aws`` and ``AWS_ENDPOINT_URL``) or
in fsspec's own settings (``~/.config/fsspec``, ``FSSPEC_S3_...``).
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

from .. import messages

T = TypeVar("T", bound="Callable[..., Any]")

#: Protocols for which a complete upload replaces a file in one step, and folders do not have to be created.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2", "hf", "memory"}
_USUAL = ("s3", "gs", "abfs", "hf", "sftp", "smb", "hdfs", "memory", "file")
#: Matches a URL. pathlib turns its two slashes into one.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+):/+")


class _Stat(NamedTuple):
    st_size: int
    st_mtime_ns: int


def _os_errors(method: T) -> T:
    """Decorator that turns every failure of a remote file system into an ``OSError``."""

    @wraps(method)
    def call(self: Remote, *args: Any, **kwargs: Any) -> Any:
        _must_be_known(self.parts[0].removesuffix("://"), str(self))
        try:
            return method(self, *args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            raise OSError(
                f"{str(self)!r} cannot be reached ({type(error).__name__}: {error}). Check the URL, the network and "
                "the credentials. The credentials come from the environment and fsspec's settings."
            ) from error

    return call  # type: ignore[return-value]


class Remote:
    """A file or folder at a remote URL. The methods work like pathlib's methods of the same name."""

    def __init__(self, address: str) -> None:
        protocol, _, path = address.partition("://")
        self._protocol = protocol.lower()
        self._path = posixpath.normpath(path) if path.strip("/") else path

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path}"

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | os.PathLike[str]) -> Remote:
        return Remote(f"{self._protocol}://{posixpath.join(self._path, os.fspath(name))}")

    @property
    def name(self) -> str:
        """The last component of the path."""
        return posixpath.basename(self._path)

    @property
    def parts(self) -> tuple[str, ...]:
        """The protocol and all components of the path."""
        return (f"{self._protocol}://", *(part for part in self._path.split("/") if part))

    @property
    def parent(self) -> Remote:
        """The parent folder; at the top, this URL itself."""
        return Remote(f"{self._protocol}://{posixpath.dirname(self._path)}")

    @property
    def parents(self) -> list[Remote]:
        """All parent folders, nearest first."""
        above = self.parent
        return [] if above == self else [above, *above.parents]

    def with_name(self, name: str) -> Remote:
        """Return this URL with a different last component."""
        return self.parent / name

    # ---- queries -----------------------------------------------------------------------------------------------------

    def _reach(self) -> tuple[Any, str]:
        """Return the fsspec file system, and the path in the form that it uses."""
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(str(self))
        fs.invalidate_cache()  # another process may have written files since the last listing
        return fs, path

    @_os_errors
    def exists(self) -> bool:
        """Return True if a file or folder exists at this URL."""
        fs, path = self._reach()
        return fs.exists(path)

    @_os_errors
    def is_dir(self) -> bool:
        """Return True if this is a folder, which means that something exists below it."""
        fs, path = self._reach()
        return fs.isdir(path)

    @_os_errors
    def is_file(self) -> bool:
        """Return True if this is a file."""
        fs, path = self._reach()
        return fs.isfile(path)

    @_os_errors
    def iterdir(self) -> Iterator[Remote]:
        """Iterate over the files and folders in this folder."""
        fs, path = self._reach()
        return iter([self / posixpath.basename(found.rstrip("/")) for found in fs.ls(path, detail=False)])

    @_os_errors
    def files_below(self) -> list[Remote]:
        """Return all files in this folder and its subfolders."""
        fs, path = self._reach()
        return [self / posixpath.relpath(found, path) for found in fs.find(path)]

    @_os_errors
    def stat(self) -> _Stat:
        """Return the size in bytes and the modification time (0 if the file system does not record one)."""
        fs, path = self._reach()
        size = fs.info(path).get("size") or 0
        try:
            changed = fs.modified(path).timestamp()
        except (NotImplementedError, LookupError, AttributeError):
            changed = 0.0
        return _Stat(size, int(changed * 1e9))

    # ---- reading and writing -----------------------------------------------------------------------------------------

    @_os_errors
    def open(self, mode: str = "rb", **options: Any) -> IO[Any]:
        """Open the file like the built-in ``open``. Data is fetched in pieces as it is read."""
        fs, path = self._reach()
        return fs.open(path, mode, **options)

    @_os_errors
    def read_bytes(self) -> bytes:
        """Return the contents of the file, which must fit in memory."""
        fs, path = self._reach()
        return fs.cat_file(path)

    @_os_errors
    def download(self, target: Path) -> None:
        """Download the file to a local path."""
        fs, path = self._reach()
        fs.get_file(path, str(target))

    @_os_errors
    def upload(self, source: Path) -> None:
        """Upload a local file to this URL. An existing file is replaced only once the upload is complete."""
        fs, path = self._reach()
        if self._protocol.rpartition(":")[2] in _OBJECT_STORES:
            fs.put_file(str(source), path)
            return
        folder, _, name = path.rpartition("/")
        aside = f"{folder}/.{name}.{uuid4().hex[:12]}.tmp"
        fs.makedirs(folder, exist_ok=True)
        try:
            fs.put_file(str(source), aside)
            fs.mv(aside, path)
        except BaseException:
            if fs.exists(aside):
                fs.rm_file(aside)
            raise

    @_os_errors
    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        fs, path = self._reach()
        try:
            fs.rm_file(path)
        except (FileNotFoundError, KeyError):
            if not missing_ok:
                raise


Location: TypeAlias = Path | Remote


class NewPath(str):
    """A path that must not exist yet.

    If another process creates a file there in the meantime, that file is not replaced.
    """

    __slots__ = ()


def location(path: str | os.PathLike[str] | Remote) -> Location:
    """Convert a path to a :class:`pathlib.Path`, or to a :class:`Remote` if it has a protocol other than ``file``."""
    if isinstance(path, Remote):
        return path
    text = os.fspath(path)
    found = _ADDRESS.match(text)
    if found is None or not (isinstance(path, Path) or "://" in text):
        return Path(text)
    protocol, rest = found[1], text[found.end(1) + 3 :] if "://" in text else text[found.end() :]
    if protocol.lower() in ("file", "local"):
        return Path(rest if rest.startswith("/") or "://" in text else f"/{rest}")
    return Remote(f"{protocol}://{rest}")


def is_remote(path: str | os.PathLike[str] | Remote) -> bool:
    """Return True if a path is a remote URL."""
    return isinstance(location(path), Remote)


def absolute(path: str | os.PathLike[str] | Remote) -> str:
    """Return the absolute path or the URL as a string.

    Raises:
        ModuleNotFoundError: if the package that implements the protocol is not installed.
        ValueError: if the protocol is unknown.
    """
    where = location(path)
    if isinstance(where, Path):
        # In a Path, "./~/name" (in a folder that is named "~") has lost its "./".
        text = path if isinstance(path, str) and "://" not in path else str(where)
        return os.path.abspath(os.path.expanduser(text))
    _must_be_known(where.parts[0].removesuffix("://"), str(where))
    return str(where)


def join(folder: str, *names: str) -> str:
    """Append names to the path or URL of a folder; the path may be ``""``."""
    where = location(folder)
    for name in names:
        where = where / name
    return str(where)


def is_inside(path: str, folder: str) -> bool:
    """Return True if a path is inside a folder, at any depth."""
    return location(absolute(folder)) in location(absolute(path)).parents


def relative(path: str, folder: str) -> str:
    """Return a path relative to a folder, with ``..`` if needed, or the path itself if the file systems differ."""
    where, start = location(path), location(folder)
    if isinstance(where, Path) and isinstance(start, Path):
        return os.path.relpath(path, folder)
    if isinstance(where, Remote) and isinstance(start, Remote) and where.parts[0] == start.parts[0]:
        return posixpath.relpath("/".join(where.parts[1:]), "/".join(start.parts[1:]))
    return str(where)


def remove(path: str | Location) -> None:
    """Delete a file or folder.

    A checkpoint folder is first renamed (or loses its manifest), so that an interrupted deletion never leaves a partial
    checkpoint that looks valid.

    Raises:
        OSError: if the file or folder could not be deleted.
    """
    where = location(path)
    if isinstance(where, Remote):
        remove_all(where.files_below() if where.is_dir() else [where])
    elif where.is_dir() and not where.is_symlink():
        hidden = where.with_name(f".{uuid4().hex}.tmp")
        where.rename(hidden)
        shutil.rmtree(hidden)
    else:
        os.remove(where)


def remove_all(files: Iterable[Remote]) -> None:
    """Delete files, starting with the manifest, because a folder without a manifest is not a checkpoint."""
    for found in sorted(files, key=lambda one: one.name != "manifest.json"):
        found.unlink(missing_ok=True)


@contextmanager
def local_copy(where: Location) -> Iterator[Path]:
    """Context manager that yields ``where`` if it is local, else a downloaded copy that is deleted on exit."""
    if isinstance(where, Path):
        yield where
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="paceline-") as folder:
        copy = Path(folder, where.name)
        where.download(copy)
        yield copy


def _must_be_known(protocol: str, address: str) -> None:
    protocol = protocol.rpartition(":")[2]
    try:
        from fsspec import get_filesystem_class
        from fsspec.registry import known_implementations
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(messages.missing(f"The URL {address!r}", "fsspec")) from error
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        needed = f"fsspec[{protocol}]" if package == "fsspec" else package
        raise ModuleNotFoundError(messages.missing(f"The URL {address!r}", needed)) from error
    except ValueError:
        raise ValueError(
            f"{address!r}: {messages.unknown('protocol', protocol, _USUAL, more=', or pass a local path')}"
        ) from None
