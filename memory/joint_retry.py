"""Retry on several processes together: either all of them continue, or none does."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import messages
from ..processes.process_group import leave
from ..torch_private import default_store, forget_layouts, timeout_of

#: How long a failed rank waits for the others to finish their attempts on their own. After that, it leaves the process
#: group, so that collectives that are waiting for it fail.
GRACE_SECONDS = 5.0
_NOTICE_SECONDS = 60.0
_searches = count()

#: Ways in which an attempt can end on a rank.
DONE, OUT_OF_MEMORY, RELEASED, ERROR = "done", "out of memory", "released", "error"


class Outcome(NamedTuple):
    """How an attempt ended on one rank.

    Attributes:
        kind: :data:`DONE`, :data:`OUT_OF_MEMORY`, :data:`RELEASED` (the attempt failed because another rank ran out of
            memory) or :data:`ERROR`.
        text: the error's text; empty for :data:`DONE`.
        peak: peak GPU memory in bytes; 0 if unknown.
    """

    kind: str
    text: str = ""
    peak: int = 0


class Together:
    """Compares the outcomes of attempts across the processes of the default group, through the group's store.

    This class uses no collective, because a process group is unusable once its ranks have been interrupted at different
    points. In that case, all ranks leave the group and create a new one with the same options.
    """

    def __init__(self) -> None:
        self._search, self._attempt = next(_searches), 0
        self._store: Any = None
        self._kept: Any = None
        self.rank, self.size = 0, 1

    def meet(self) -> bool:
        """Return True if there are other processes. Until there is a process group, each call checks again."""
        if self._store is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._kept = default_store()  # this process may be serving the store, so keep it alive
            self._store = self._kept.clone()
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            group: Any = dist.group.WORLD
            self._backend = dist.get_backend_config(group)
            self._device = getattr(group, "bound_device_id", None)
            self._timeout = timeout_of(group, torch.device(self._device or "cpu"))
        return self._store is not None

    def _key(self, what: str) -> str:
        return f"paceline/attempts/{self._search}/{self._attempt}/{what}"

    def others_ran_out(self) -> bool:
        """Return True if another rank has reported that it ran out of memory in this attempt."""
        keys = [self._key(f"out/{rank}") for rank in range(self.size) if rank != self.rank]
        return any(self._store.check([key]) for key in keys)

    def compare(self, own: Outcome) -> list[Outcome]:
        """Wait until every rank has finished its attempt; return the outcomes, by rank."""
        failed = own.kind == OUT_OF_MEMORY
        if failed:
            self._store.set(self._key(f"out/{self.rank}"), "1")
        self._store.set(self._key(f"end/{self.rank}"), json.dumps(own))
        left = False
        if failed and not self._wait("end", GRACE_SECONDS):
            left = True
            leave()
            _forget_meshes()  # a reference to the group would keep its connections open
        self._wait("end", None)
        found = [Outcome(*json.loads(self._store.get(self._key(f"end/{rank}")))) for rank in range(self.size)]
        self._store.set(self._key(f"left/{self.rank}"), json.dumps(left))
        self._wait("left", None)
        apart = any(json.loads(self._store.get(self._key(f"left/{rank}"))) for rank in range(self.size))
        if apart and all(outcome.kind != ERROR for outcome in found):
            self._join_again()
        return found

    def _wait(self, what: str, seconds: float | None) -> bool:
        """Wait until all ranks have reported ``what``; return False if that takes longer than ``seconds``."""
        start, reported = time.monotonic(), False
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self._store.check([self._key(f"{what}/{rank}")])]:
            waited = time.monotonic() - start
            if seconds is not None and waited > seconds:
                return False
            if waited > _NOTICE_SECONDS and not reported:
                reported = True
                messages.info_anywhere(
                    f"Rank {self.rank} has finished its attempt and is waiting for {messages.ranks(missing)} to finish."
                )
            time.sleep(min(0.5, 0.02 + 0.1 * waited))
        return True

    def _join_again(self) -> None:
        leave()
        _forget_meshes()
        store = dist.PrefixStore(self._key("group"), self._store.clone())  # type: ignore[reportPrivateImportUsage]
        more = {} if self._device is None else {"device_id": self._device}
        dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout, **more
        )

    def same(self, value: Callable[[], int]) -> int:
        """Return rank 0's value on every rank. Every rank calls ``value``, because ``value`` may count its calls."""
        own = value()
        if self.rank == 0:
            self._store.set(self._key("next"), json.dumps(own))
        found = json.loads(self._store.get(self._key("next")))
        self._attempt += 1
        return found


def _forget_meshes() -> None:
    """Clear torch's caches of sharded tensor layouts, because the caches keep meshes and their process groups alive."""
    forget_layouts()
    gc.collect()
