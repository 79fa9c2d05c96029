from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    name: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int

    def export(self) -> None: ...


def find_cluster() -> Cluster | None:
    e = os.environ
    if "RANK" not in e:
        return None
    w, lw = int(e["WORLD_SIZE"]), int(e["LOCAL_WORLD_SIZE"])
    return Cluster(
        "torchrun",
        int(e["RANK"]),
        int(e["LOCAL_RANK"]),
        w,
        lw,
        int(e["RANK"]) // lw,
        w // lw,
        e["MASTER_ADDR"],
        int(e["MASTER_PORT"]),
    )
