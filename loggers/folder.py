"""Base class for loggers that write each run to its own folder."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import messages
from .base import Logger, rank_zero_experiment
from .values import mapping, plain

HPARAMS_FILE = "hparams.yaml"
#: The file's text if there are no hyperparameters.
_NOTHING = "{}\n"


class FolderLogger(Logger):
    """Writes each run to ``save_dir/name/version_N``, with its hyperparameters in ``hparams.yaml``.

    The version is chosen on first use, as one more than the highest existing number. Creating the folder reserves it,
    so two runs that start at the same moment get different folders. A version that you pass is used unchanged. If its
    folder exists, the run continues there and overwrites nothing.

    A resumed fit continues in the folder of the run that wrote the checkpoint, and removes the values that the run
    logged after that checkpoint. A hidden file in the folder identifies the run, so the folder may be moved, and other
    runs' folders are not touched. If you pass a version, the logger keeps it, and the log continues only if the
    checkpoint belongs to the same version.

    The object can be pickled and deep-copied. A copy opens its own files and appends to them.

    Args:
        save_dir: the folder for all experiments, on a local or mounted file system.
        name: the experiment's name, used as a folder in ``save_dir``; with None or ``""``, versions are directly in
            ``save_dir``.
        version: a number for ``version_N``, a string to use as the folder's name, or None for a new number.
        prefix: prefix for each metric's name, followed by a dash.
    """

    NAME_HPARAMS_FILE = HPARAMS_FILE
    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        who = type(self).__name__
        if "://" in os.fspath(save_dir):
            raise ValueError(
                f"{who}: save_dir={os.fspath(save_dir)!r} is a URL, but this logger writes local files. Pass a local "
                "or mounted folder, and copy that folder after the run."
            )
        if not _is_version(version):
            raise ValueError(
                f"{who}: version={version!r} must be a non-negative integer or a folder name. Pass version=3 or "
                "version='my_run', or leave out version to use the next free number."
            )
        self.hparams: dict[str, Any] = {}
        self._save_dir = os.fspath(save_dir)
        self._name = name or ""
        self._version = version
        self._is_named = version is not None
        self._prefix = f"{prefix}{self.LOGGER_JOIN_CHAR}" if prefix else ""
        self._step = -1
        self._experiment: Any = None
        self._hparams_written = False
        self._run = uuid.uuid4().hex
        self._run_marked = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        if self._version is None:
            with self._writing():
                self._version = self._claim()
        return self._version

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self._save_dir, self.name or "")

    @property
    def log_dir(self) -> str:
        return self._dir_of(self.version)

    def run_dirs(self) -> list[str]:
        """Return the folders of all numbered versions, or only this version's if the user passed a version."""
        if self._is_named:
            return [self.log_dir]
        return [self._dir_of(path.name) for path in sorted(Path(self.root_dir).glob("version_*"))]

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is not None and self._is_deleted():
            with self._writing():
                self._restore()
        if self._experiment is None:
            with self._writing():
                os.makedirs(self.log_dir, exist_ok=True)
                self._experiment = self._open()
        return self._experiment

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Add values to the run's hyperparameters and write them to ``hparams.yaml``. Log ``metrics`` at step 0."""
        self.hparams.update(plain(mapping(params)))
        if not messages.is_rank_zero():
            return
        with self._writing():
            self._write_hparams()
        if metrics:
            self.log_metrics(metrics, step=0)

    def save(self) -> None:
        """Write ``hparams.yaml`` if it is missing from the run's folder. Subclasses also flush their logged values."""
        if self._hparams_written or self._version is None or not messages.is_rank_zero():
            return
        if os.path.isdir(self.log_dir) and not os.path.exists(os.path.join(self.log_dir, HPARAMS_FILE)):
            with self._writing():
                self._write_hparams()

    def state_dict(self) -> dict[str, Any]:
        if not self._run_marked:
            with self._writing():
                os.makedirs(self.log_dir, exist_ok=True)
                _write(self._mark_of(self.version), self._run)
            self._run_marked = True
        return {"version": self.version, "run": self._run, "step": self._step}

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Return True if this logger may use the version in ``state``, and that version's folder belongs to the run."""
        version = state.get("version")
        if version is None or self._version not in (None, version):
            return False
        mark = self._mark_of(version)
        return mark.is_file() and mark.read_text(encoding="utf-8") == state["run"]

    def take_over(self, state: Mapping[str, Any]) -> None:
        self._version, self._run, self._run_marked = state["version"], state["run"], True
        settings = Path(self.log_dir) / HPARAMS_FILE
        if settings.is_file():
            import yaml

            self.hparams = {**(yaml.safe_load(settings.read_text(encoding="utf-8")) or {}), **self.hparams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]

    def _dir_of(self, version: int | str) -> str:
        return os.path.join(self.root_dir, version if isinstance(version, str) else f"version_{version}")

    def _mark_of(self, version: int | str) -> Path:
        """Return the path of the file that identifies the folder's run. Several loggers may share a folder."""
        return Path(self._dir_of(version)) / f".{type(self).__name__}.run"

    def _is_deleted(self) -> bool:
        """Return True if the log was deleted after it was written."""
        return not os.path.isdir(self.log_dir)

    def _restore(self) -> None:
        """Warn that the log was deleted during the run, and start a new log in the same folder."""
        messages.warn(
            f"The log in {messages.path(self.log_dir)} was deleted while the run was writing it, so its contents are "
            "lost. Logging continues in a new file in the same folder."
        )
        os.makedirs(self.log_dir, exist_ok=True)
        self._run_marked = False
        if self.hparams:
            self._write_hparams()
        self._begin_again()

    def _begin_again(self) -> None:
        """Make the next access to ``experiment`` open a new file."""
        self._experiment = None

    def _open(self) -> Any:
        """Create the logger's writer. The run's folder already exists."""
        raise NotImplementedError(f"{type(self).__name__} must define _open(self), which creates its writer.")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context manager that explains errors about a folder that cannot be written to."""
        try:
            yield
        except OSError as error:
            raise self._explained(error) from error

    def _explained(self, error: OSError) -> OSError:
        text = (
            f"{error.strerror or error}: {type(self).__name__} cannot write to its folder. Make the folder writable, "
            "free disk space, or choose another folder (save_dir of the logger, default_root_dir of the Trainer). "
            "Folder"
        )
        return OSError(error.errno, text, self.root_dir)

    def _next_step(self, step: int | None) -> int:
        self._step = self._step + 1 if step is None else int(step)
        return self._step

    def _claim(self) -> int:
        root = Path(self.root_dir)
        taken = [p.name.removeprefix("version_") for p in root.glob("version_*")]
        number = max((int(text) for text in taken if text.isdecimal()), default=-1) + 1
        if not messages.is_rank_zero():
            return number
        root.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                (root / f"version_{number}").mkdir()
            except FileExistsError:
                number += 1
            else:
                return number

    def _write_hparams(self) -> None:
        import yaml

        path = Path(self.log_dir) / HPARAMS_FILE
        text = yaml.safe_dump(self.hparams, sort_keys=False, allow_unicode=True)
        if path.exists() and not self._hparams_written and path.read_text(encoding="utf-8") not in (text, _NOTHING):
            _set_aside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
        self._hparams_written = True

    def __getstate__(self) -> dict[str, Any]:
        self.save()
        return {**self.__dict__, "_experiment": None}


def _write(path: Path, text: str) -> None:
    """Replace a file atomically and flush it to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def to_disk(path: str | os.PathLike[str]) -> None:
    """Flush a file (if it exists) and its directory entry to disk."""
    for part in (path, os.path.dirname(path)) if os.path.exists(path) else ():
        handle = os.open(part, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def call_at_exit(owner: object, action: Callable[[], object]) -> None:
    """Call ``action`` when ``owner`` is garbage-collected or the program ends, but never in a forked child."""
    weakref.finalize(owner, _if_same_process, os.getpid(), action)


def _if_same_process(pid: int, action: Callable[[], object]) -> None:
    if os.getpid() == pid:
        action()


def _is_version(version: Any) -> bool:
    if isinstance(version, str):
        return bool(version)
    return version is None or (isinstance(version, int) and not isinstance(version, bool) and version >= 0)


def _set_aside(path: Path) -> None:
    """Rename the hyperparameter file from an earlier run of this version to ``hparams_1.yaml`` and so on."""
    number = 1
    while (kept := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, kept)
