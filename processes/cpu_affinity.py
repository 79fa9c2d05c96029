"""Find this machine's NUMA nodes, divide them among the processes, and bind each process to its nodes' cores.

A core reads its own NUMA node's memory fastest. A process that may run on any core spreads its memory across the nodes;
a process that is bound to a node's cores before it allocates memory does not.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: The folder where Linux lists this machine's NUMA nodes.
NODES = Path("/sys/devices/system/node")
#: Environment variable that tells a process to bind itself. Its value is the folder that lists the NUMA nodes.
BIND = "PACELINE_BIND"


def nodes(folder: Path = NODES) -> list[set[int]]:
    """Return the cores that this process may use, in one set per NUMA node; a single set if the nodes are unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return [set(range(os.cpu_count() or 1))]
    usable = os.sched_getaffinity(0)
    listed = sorted(folder.glob("node*"), key=lambda path: int("0" + re.sub(r"\D", "", path.name)))
    files = [path / "cpulist" for path in listed if re.fullmatch(r"node\d+", path.name)]
    found = [parse(file.read_text()) & usable for file in files if file.exists()]
    return [cores for cores in found if cores] or [set(usable)]


def parse(text: str) -> set[int]:
    """Parse a list of cores: ``"0-2,8"`` -> ``{0, 1, 2, 8}``."""
    cores = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def share(local_rank: int, local_world_size: int, found: list[set[int]]) -> set[int]:
    """Return the cores of a process's NUMA node, or of several nodes if there are more nodes than processes."""
    first = local_rank * len(found) // local_world_size
    last = (local_rank + 1) * len(found) // local_world_size
    return set().union(*found[first : max(last, first + 1)])


def bind() -> None:
    """Bind this process to its share of the cores, if the launcher requested it through :data:`BIND`."""
    folder = os.environ.get(BIND)
    if folder and hasattr(os, "sched_setaffinity"):
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.sched_setaffinity(0, share(rank, size, nodes(Path(folder))))
