"""One model spread over processes: tensor-parallel layers, pipeline stages, sharded and replicated data, one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from . import dtensors
from .base import move_optimizer_state
from .distributed import DistributedStrategy
from .precision.base import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

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
        plan: how layers are split for tensor parallelism: pattern of layer names (``"net.blocks.*.attn.q"``) ->
            ``"colwise"``, ``"rowwise"`` or a ``ParallelStyle`` of torch.distributed.tensor.parallel. ``"auto"``: attentions
            with separate q, k, v and pairs of linear layers are found by their names and shapes.
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
        plan: Mapping[str, Any] | Literal["auto"] | None = None,
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
        self.plan: Mapping[str, Any] | str = "auto" if plan is None else plan
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
        module = self.precision.convert_module(module)
        self._agree_on_weights(module)
        if self.sizes["tp"] > 1 and self.mesh is not None and not self._is_split(module):
            from .tensor_parallel import split

            split(module, self.mesh["tp"], None if self.plan == "auto" else self.plan)
        return module.to(self.device)

    @staticmethod
    def _is_split(module: nn.Module) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in module.parameters())

    def _agree_on_weights(self, module: nn.Module) -> None:
        """Every process begins with rank 0's values."""
        if self._is_split(module):
            return
        for tensor in (*module.parameters(), *module.buffers()):
            value = tensor.detach().to(self.device)
            dist.broadcast(value, 0)
            tensor.data.copy_(value)

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        self._agree_on_random_numbers()
        return super().wrap_for_training(module)

    def _agree_on_random_numbers(self) -> None:
        """Processes that see the same data draw the same numbers (dropout), those that see others draw others."""
        state = self.broadcast(torch.get_rng_state())
        torch.set_rng_state(state)
        if self.data_rank:
            torch.manual_seed(torch.initial_seed() + self.data_rank)

    # ---- one step --------------------------------------------------------------------------------------------------

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        dtensors.scale_gradients(_parameters(optimizer), factor)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return dtensors.clip_by_norm(parameters, max_norm, norm_type)

    def clip_by_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        dtensors.clip_by_value(parameters, clip_value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        dtensors.settle(_parameters(optimizer))
        with implicit_replication():  # an optimizer's lists hold whole and split parameters
            return super().optimizer_step(optimizer, closure)

    # ---- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        return dtensors.whole_model_state(module, self.is_global_zero)

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        return dtensors.load_model_state(module, state, strict)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        return dtensors.whole_optimizer_state(optimizer, self.is_global_zero)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        dtensors.load_optimizer_state(optimizer, state)
        move_optimizer_state(optimizer, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"mesh": None}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
