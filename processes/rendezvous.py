"""A variant of torch elastic's static rendezvous (machines meet at a fixed address) in which machine 0 leaves last."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_NAME = "paceline-static"
#: How long machine 0 waits for the others at the end. All finish at about the same time unless a machine has died.
_LEAVING = timedelta(seconds=5)


class Rendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous, except that machine 0, whose store other machines may still be using, leaves last."""

    def get_backend(self) -> str:
        return _NAME

    def shutdown(self) -> bool:
        """Tell machine 0 that this machine is leaving; on machine 0, wait until the others have left."""
        store: Any = self._store
        if store is None:
            return True
        with suppress(RuntimeError):  # machine 0 or another machine has died
            if self.rank:
                store.set(f"left/{self.rank}", "")
            elif self.world_size > 1:
                store.wait([f"left/{rank}" for rank in range(1, self.world_size)], _LEAVING)
        return True


def create(parameters: RendezvousParameters) -> Rendezvous:
    """Create the rendezvous for torch elastic, from the same parameters as torch's ``static`` rendezvous."""
    address, _, port = parameters.endpoint.rpartition(":")
    rank, timeout = (parameters.get_as_int(name) for name in ("rank", "timeout"))
    return Rendezvous(address, int(port), rank or 0, parameters.max_nodes, parameters.run_id, timeout or 900)


def register() -> str:
    """Register the rendezvous with torch elastic and return its name."""
    rendezvous_handler_registry.register(_NAME, create)
    return _NAME
