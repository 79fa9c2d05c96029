"""Standard library loggers for multi-process scripts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import messages
from ..processes.cluster_environment import find_cluster
from ..processes.process_group import host_room

_LEVEL_VARIABLES = ("PACELINE_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")
_TIMEOUT = timedelta(minutes=30)
#: The ``stacklevel`` of the caller of ``warning_once``. Python 3.10 counts logging's own frames too.
_ONCE_LEVEL = 3 if sys.version_info >= (3, 11) else 4


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger that logs only on the main process by default.

    Each method accepts two more arguments:

    * ``main_process_only=False``: every process logs the line, prefixed with its rank;
    * ``in_order=True``: every process logs the line, one process at a time. Every process must make the call.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line at one of the levels of :mod:`logging`."""
        everybody = not kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        msg, options = self.process(msg, kwargs)
        rank, count = _place()
        if count > 1 and (everybody or in_order):
            msg = f"[RANK {rank}] {msg}"
        for turn in range(count) if in_order else ():
            if turn == rank:
                self.logger.log(level, msg, *args, **options)
            _wait(count)
        if not in_order and (everybody or messages.is_rank_zero()):
            self.logger.log(level, msg, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Process a call's arguments as the standard adapter does, but keep the call's ``extra``."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Like ``warning``, but log each text only once per process."""
        said = (self.logger.name, str(msg), repr(args))
        if said not in _said:
            _said.add(said)
            self.warning(msg, *args, **{"stacklevel": _ONCE_LEVEL, **kwargs})


_said: set[tuple[str, str, str]] = set()


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger with the given name, usually ``__name__``, for multi-process scripts.

    The logger's level is set to ``log_level``, or else to the value of the environment variable ``PACELINE_LOG_LEVEL``
    (or ``ACCELERATE_LOG_LEVEL``). If neither is set, the level stays unchanged.
    """
    level = log_level or next((value for name in _LEVEL_VARIABLES if (value := os.environ.get(name))), None)
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of processes, even before they join a process group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    cluster = find_cluster()
    return (cluster.rank, cluster.world_size) if cluster is not None else (0, 1)


def _wait(count: int) -> None:
    if count == 1:
        return
    if not dist.is_initialized():
        raise RuntimeError(
            "logger.log(..., in_order=True) needs a process group, but the processes have not joined one yet, so they "
            "cannot wait for each other. Create an Accelerator (or a PartialState) first."
        )
    dist.barrier(host_room(_TIMEOUT)[0])
