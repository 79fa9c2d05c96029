"""Collects facts about the environment of a run: versions, machine and code. Only :func:`machine` imports torch."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

#: Packages whose versions are reported.
PACKAGES = ("torch", "torchmetrics", "tensorboard", "wandb", "safetensors", "deepspeed", "transformers", "accelerate")
_GIT_SECONDS = 5.0
_SECRET = re.compile(r"(?i)(token|secret|passw|credential|api[-_]?key|auth)")


def versions() -> dict[str, str | None]:
    """Return the versions of this package, Python and :data:`PACKAGES`; None for a package that is not installed."""
    own = sys.modules[__name__.partition(".")[0]].__version__
    return {"paceline": own, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine(with_gpus: bool = True) -> dict[str, Any]:
    """Return the operating system, processors and GPUs.

    ``with_gpus`` queries the accelerators, which costs time and memory in a process that does not use them otherwise.
    """
    import torch

    from ..devices.kinds import kind_of, present

    kind = present()
    gpus = [kind.name_of(index) for index in range(kind.count() if with_gpus and kind.name != "cpu" else 0)]
    return {
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "mps": kind_of("mps").is_available(),
    }


def process() -> dict[str, Any]:
    """Return the host, process, folder and command, without anything in the command that looks like a secret."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "begun": begun(pid),
        "folder": os.getcwd(),
        "command": _command(sys.argv),
    }


def begun(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it has exited or the system does not provide it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _command(words: list[str]) -> str:
    shown, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = bool(_SECRET.search(name)) and name.startswith("-")
        shown.append("***" if hide else f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return " ".join(shown)


def git_state() -> dict[str, Any]:
    """Return the commit, branch and number of changed files of the running code; empty if there is no git repository.

    The code is in the program's folder, or in the working directory if the program has no file. Untracked files are not
    included, because finding them takes a long time in a large tree.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = str(Path(main).resolve().parent) if main else os.getcwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or None,
        "changed files": None if changed is None else len(changed.splitlines()),
        "folder": _git(folder, "rev-parse", "--show-toplevel"),
    }


def _git(folder: str, *words: str) -> str | None:
    """Return git's output; None if git is missing, fails or takes too long."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        found = subprocess.run(
            ["git", "-C", folder, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
