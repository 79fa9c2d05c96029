"""One model spread over processes: tensor-parallel layers, pipeline stages, sharded and replicated data, one mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from .distributed import DistributedStrategy
from .precision.base import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The mesh's dimensions, outermost first: ranks of one tensor-parallel group are neighbors, on one machine.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: The argument for each of them.
ARGUMENTS = {
    "pp": "pipeline_parallel",
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}


class ModelParallelStrategy(DistributedStrategy):
    """``"model_parallel"``: the processes form a mesh, whose dimensions share the work in different ways.

    The product of the sizes is the number of processes. The ranks of one tensor-, context- and pipeline-parallel group
    see the same data.

    Args:
        precision: dtypes and loss scaling; the Trainer's if None.
        data_parallel_replicate: replicas of the (sharded) model.
        data_parallel_shard: over how many processes parameters are sharded (FSDP2); ``"auto"``: what is left.
        tensor_parallel: over how many processes each layer is split; ``"auto"``: those of one machine.
        pipeline_parallel: number of groups that hold successive layers.
        context_parallel: over how many processes a sequence is split.
        process_group_backend: None: gloo for the CPU, NCCL for CUDA.
        timeout: how long a collective waits for the other processes.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        numa: bind each process to the cores of its GPU's NUMA node.
    """

    names: ClassVar[tuple[str, ...]] = ("model_parallel",)
    communicates_forward: ClassVar[bool] = True

    def __init__(
        self,
        precision: Precision | None = None,
        *,
        data_parallel_replicate: int = 1,
        data_parallel_shard: int | str = "auto",
        tensor_parallel: int | str = 1,
        pipeline_parallel: int = 1,
        context_parallel: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "popen",
        numa: bool = False,
    ) -> None:
        super().__init__(
            precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            numa=numa,
        )
        self.asked: dict[str, int | str] = {
            "pp": _size("pp", pipeline_parallel, auto=False),
            "dp_replicate": _size("dp_replicate", data_parallel_replicate, auto=False),
            "dp_shard": _size("dp_shard", data_parallel_shard),
            "cp": _size("cp", context_parallel, auto=False),
            "tp": _size("tp", tensor_parallel),
        }
        #: The size of each mesh dimension, once the number of processes is known.
        self.sizes: dict[str, int] = {}
        #: All processes, dimensions named as in AXES; exists from ``setup_environment`` on.
        self.mesh: DeviceMesh | None = None

    # ---- processes ----------------------------------------------------------------------------------------------

    def place(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        super().place(devices, num_nodes)
        self.sizes = find_sizes(self.asked, self.world_size, self.world_size // self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self.sizes = find_sizes(self.asked, self.world_size, self.world_size // self.num_nodes)
            self.mesh = init_device_mesh(self.device.type, tuple(self.sizes[a] for a in AXES), mesh_dim_names=AXES)

    def place_in(self, axis: str) -> int:
        """This process's coordinate along a mesh dimension, 0-based."""
        inner = math.prod(self.sizes[a] for a in AXES[AXES.index(axis) + 1 :])
        return self.global_rank // inner % self.sizes[axis]

    @property
    def data_rank(self) -> int:
        return self.place_in("dp_replicate") * self.sizes["dp_shard"] + self.place_in("dp_shard")

    @property
    def num_data_ranks(self) -> int:
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    # ---- module and optimizers -------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        return super().setup_module(module)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"mesh": None}


def _size(axis: str, value: Any, auto: bool = True) -> int | str:
    if auto and value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        more = ", or 'auto'" if auto else ""
        raise ValueError(
            f"ModelParallelStrategy({ARGUMENTS[axis]}={value!r}) is not a number of processes. Pass 1 or more{more}."
        )
    return value


def find_sizes(asked: dict[str, int | str], world_size: int, per_node: int) -> dict[str, int]:
    """The size of each mesh dimension.

    Args:
        asked: what the user wrote, by dimension.
        world_size: number of processes.
        per_node: processes of one machine, which ``tensor_parallel="auto"`` takes.

    Raises:
        ValueError: their product is not the number of processes.
    """
    sizes = {axis: per_node if axis == "tp" and size == "auto" else size for axis, size in asked.items()}
    others = math.prod(size for size in sizes.values() if isinstance(size, int))
    found = {axis: world_size // others if size == "auto" else int(size) for axis, size in sizes.items()}
    product = math.prod(found.values())
    if product != world_size:
        factors = " x ".join(f"{ARGUMENTS[axis]}={size}" for axis, size in sizes.items() if size != 1)
        what = f"is {others}, which does not divide" if "auto" in sizes.values() else f"is {others}, not"
        raise ValueError(
            f"ModelParallelStrategy: {factors} {what} the number of processes, {world_size}. Change one of the sizes, "
            "or start as many processes (devices=, num_nodes=)."
        )
    return found
