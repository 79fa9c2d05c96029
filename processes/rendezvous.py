"""How machines meet at a given address: torch elastic's static rendezvous, and a last word when a machine leaves."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_NAME = "paceline-static"
#: What machine 0 waits for the others at the end; they are already as far unless one of them has died.
_LEAVING = timedelta(seconds=5)


class Rendezvous(StaticTCPRendezvous):
    """Torch's, but machine 0, which has the store, leaves last: the others would lose it amid their last question."""

    def get_backend(self) -> str:
        return _NAME

    def shutdown(self) -> bool:
        """Tell machine 0 that this one leaves, or be the last to leave."""
        store: Any = self._store
        if store is None:
            return True
        with suppress(RuntimeError):  # a machine that has died cannot say so, nor be told
            if self.rank:
                store.set(f"left/{self.rank}", "")
            elif self.world_size > 1:
                store.wait([f"left/{rank}" for rank in range(1, self.world_size)], _LEAVING)
        return True


def create(parameters: RendezvousParameters) -> Rendezvous:
    """What torch elastic calls for the name; the parameters are those of ``static``."""
    address, _, port = parameters.endpoint.rpartition(":")
    rank, timeout = (parameters.get_as_int(name) for name in ("rank", "timeout"))
    return Rendezvous(address, int(port), rank or 0, parameters.max_nodes, parameters.run_id, timeout or 900)


def register() -> str:
    """Make the name known to torch elastic; returns it."""
    rendezvous_handler_registry.register(_NAME, create)
    return _NAME
