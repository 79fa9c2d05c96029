"""Facts about where a run is made: versions, machine, code. Only :func:`machine` imports torch."""

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

#: Packages whose version says something about a run.
PACKAGES = ("torch", "torchmetrics", "tensorboard", "wandb", "safetensors", "deepspeed", "transformers", "accelerate")
_GIT_SECONDS = 5.0
_SECRET = re.compile(r"(?i)(token|secret|passw|credential|api[-_]?key|auth)")


def versions() -> dict[str, str | None]:
    """Of the package, of python, and of :data:`PACKAGES`; None where one is not installed."""
    own = sys.modules[__name__.partition(".")[0]].__version__
    return {"paceline": own, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine(with_gpus: bool = True) -> dict[str, Any]:
    """Operating system, processors, GPUs.

    Args:
        with_gpus: ask CUDA, which takes time and memory in a process that does not use it otherwise.
    """
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() if with_gpus else 0)]
    return {
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "mps": torch.backends.mps.is_available(),
    }


def process() -> dict[str, Any]:
    """Host, process, folder and command; what looks like a secret in the command is left out."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "begun": begun(pid),
        "folder": os.getcwd(),
        "command": _command(sys.argv),
    }


def begun(pid: int) -> int | None:
    """When a process began, in ticks since the machine booted; None if it has ended or the system does not say."""
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
    """Commit, branch and number of changed files of the code that runs; empty where there is no git to be asked.

    Asked for is the folder of the program, or the working directory if there is none. Files that git does not track
    are not looked for: in a large tree that takes long.
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
    """What git answers; None if there is none, it fails, or it takes too long."""
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
