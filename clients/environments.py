"""The clients' virtual environments. Each is created once, and again when one of its source files changes."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path


class Environment:
    """A virtual environment.

    Args:
        folder: the environment's folder.
        sources: the files that the environment is built from, such as a lock file.

    Attributes:
        python: the environment's Python interpreter.
        packages: the folder with its installed packages.
    """

    def __init__(self, folder: Path, *sources: Path) -> None:
        self.folder, self.sources = folder, sources
        self.python = folder / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        self._stamp = folder / "installed.txt"

    def is_current(self) -> bool:
        """Return True if the environment is complete and its sources have not changed since."""
        return self._stamp.exists() and self._stamp.read_text() == self._contents()

    def finish(self) -> None:
        """Record that the environment is complete."""
        self._stamp.write_text(self._contents())

    def create(self, *, shared: bool, first: str = "", interpreter: str | None = None) -> None:
        """Create the environment without packages of its own; delete the old one.

        Args:
            shared: whether the environment sees the packages of the running Python.
            first: a line of code that the environment's Python runs whenever it starts.
            interpreter: the command of another Python; None means the running one.
        """
        _run(interpreter or sys.executable, "-m", "venv", "--clear", self.folder)
        if shared:  # the setuptools of a new environment would hide the newer one of the running Python
            _run(self.python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
        lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()] if shared else []
        if lines or first:
            (self.packages / "below.pth").write_text("\n".join([*lines, first]) + "\n")

    def install(self, *arguments: str | Path) -> None:
        """Run ``pip install`` in the environment."""
        pip = (self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        _run(*pip, *arguments)

    def resolve(self, *arguments: str | Path) -> None:
        """Run ``uv pip install`` in the environment, with pip's own settings.

        This is for packages without a lock: uv chooses their versions in seconds, but pip can take half an hour.
        """
        self.install("uv")
        settings = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
        taken = {name: os.environ[pips] for name, pips in settings.items() if pips in os.environ}
        uv = (self.folder / "bin" / "uv", "pip", "install", "--quiet", "--python", self.python)
        _run(*uv, *arguments, UV_CACHE_DIR=str(self.folder / "cache"), **taken)

    def _contents(self) -> str:
        return "\n".join(source.read_text() for source in self.sources)


def with_lock(folder: Path, lock: Path) -> Path:
    """Return the Python of an environment that adds the packages in ``lock`` to those of the running Python."""
    environment = Environment(folder, lock)
    if not environment.is_current():
        environment.create(shared=True)
        environment.install("--no-deps", "-r", lock)
        environment.finish()
    return environment.python


def _run(*command: str | Path, **variables: str) -> None:
    """Run a command without the paths of the running environment; end this program if it fails."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    status = subprocess.run(command, env=outside | variables, check=False).returncode
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} failed with status {status}.")
