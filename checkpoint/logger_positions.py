"""Save the loggers' positions in checkpoints, so that a resumed run continues the logs at these positions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from . import manifest
from .find import newer_of_its_run
from .manifest import CONTENTS
from .sharded_folder import together
from .storage import Remote, is_remote, location

if TYPE_CHECKING:
    from ..loggers.base import Logger
    from ..trainer.run import Run


def gather(run: Run) -> dict[str, Any]:
    """Return the loggers' states, keyed by logger name (see :func:`named`); empty on ranks other than 0."""
    pairs = named(run.trainer.loggers if run.strategy.is_global_zero else [])
    return {name: state for name, logger in pairs if (state := logger.state_dict())}


def take_over(run: Run, path: str | os.PathLike[str] | Remote) -> None:
    """If possible, let the loggers continue the logs of the run that wrote a checkpoint.

    Every rank must call this before the loggers create folders; rank 0 decides for all ranks. If the checkpoint is not
    the newest of its run, the loggers start a new run with new folders instead, unless the user chose the folder.
    """

    def look() -> dict[str, Any]:
        found = _recognized(run, section_of(path)) if run.strategy.is_global_zero else {}
        newer = newer_of_its_run(location(path)) if found else None
        if newer is not None:
            messages.info(
                f"{path} is not the newest checkpoint of its run ({newer.name} is newer), so this fit is logged as a "
                "new run, and the original run's logs stay intact."
            )
            return {}
        if found and not is_remote(path):
            run.folder_locks.take([str(location(path).parent)], alone=True)
        return found

    found = run.strategy.broadcast(together(run.strategy, "used", look))
    for name, logger in named(run.trainer.loggers):
        if name in found:
            logger.take_over(found[name])
    say_where("Logging continues in", (logger for name, logger in named(run.trainer.loggers) if name in found))


def say_where(beginning: str, loggers: Iterable[Logger]) -> None:
    """Print the folders that the loggers write to, once per process."""
    folders = dict.fromkeys(messages.path(folder) for logger in loggers if (folder := logger.records_dir))
    if folders:
        text = ", ".join(folders)
        messages.info_once(f"{beginning} {text}", key=f"records in {text}")


def restore(run: Run, section: Mapping[str, Any]) -> None:
    """Restore the positions of the loggers that continue the logs of the checkpoint's run."""
    if run.strategy.is_global_zero:
        found = _recognized(run, section)
        for name, logger in named(run.trainer.loggers):
            if name in found:
                logger.load_state_dict(found[name])


def named(loggers: Iterable[Logger]) -> Iterator[tuple[str, Logger]]:
    """Yield each logger with its name in a checkpoint.

    The name consists of the logger's class and its index among the loggers of that class.
    """
    seen: Counter[str] = Counter()
    for logger in loggers:
        kind = type(logger).__qualname__
        yield f"{kind} {seen[kind]}", logger
        seen[kind] += 1


def _recognized(run: Run, section: Mapping[str, Any]) -> dict[str, Any]:
    states = section.get("loggers") or {}
    pairs = [(name, logger) for name, logger in named(run.trainer.loggers) if name in states]
    return {name: states[name] for name, logger in pairs if logger.recognizes(states[name])}


def section_of(path: str | os.PathLike[str] | Remote) -> Mapping[str, Any]:
    """Return the ``"paceline"`` section of a checkpoint without loading tensors; empty if the file cannot be read."""
    where = location(path)
    try:
        if manifest.is_folder(where):
            where = where / manifest.read_folder(where).inside / CONTENTS
        if isinstance(where, Path):
            return torch.load(where, map_location="meta", mmap=True, weights_only=True)["paceline"]
        with where.open() as stream:
            return torch.load(stream, map_location="meta", weights_only=True)["paceline"]
    except Exception:  # reading the full checkpoint later gives a better error
        return {}
