"""Distribute one model across a mesh: split layers, pipeline stages, and sharded or replicated parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import CheckpointError

from ...devices.kinds import kind_of
from ...torch_private import REDISTRIBUTES, flatten_mesh
from .. import sharded_tensors as parts
from ..distributed import DistributedStrategy, passes_on
from ..fsdp.strategy import FSDPStrategy
from ..precision.base import Precision
from .context_parallel import SplitSequences, check_layers
from .context_parallel_loaders import SplitBatches
from .microbatches import ScheduleName
from .pipeline_strategy import PipelineSteps
from .tensor_parallel import SplitLoss, Splitter

if TYPE_CHECKING:
    from torch.optim import Optimizer


T = TypeVar("T")

#: The mesh's dimensions, outermost first, so that a tensor-parallel group has neighboring ranks on one machine.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: The argument for each dimension.
ARGUMENTS = {
    "pp": "pipeline_parallel",
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}
#: Options of FSDPStrategy that only have an effect if parameters are sharded.
_SHARDING_ONLY = ("mixed_precision", "cpu_offload")


class ModelParallelStrategy(FSDPStrategy):
    """``"model_parallel"``: arranges processes in a mesh; each mesh dimension distributes the work in its own way.

    The product of the sizes must be the number of processes. The ranks of a tensor-, context- or pipeline-parallel
    group see the same data and draw the same random numbers, so dropout matches on ranks that hold the same tensors.

    Args:
        precision: dtypes and loss scaling; the Trainer's if None.
        data_parallel_replicate: number of copies of the (sharded) model.
        data_parallel_shard: number of processes across which each parameter is sharded, as in FSDPStrategy; ``"auto"``
            uses all remaining processes.
        tensor_parallel: number of processes across which each layer is split; ``"auto"`` uses all processes on one
            machine.
        pipeline_parallel: number of pipeline processes, which hold successive layers.
        context_parallel: number of processes across which each sequence is split.
        plan: how layers are split: a mapping from patterns of layer names (``"net.blocks.*.attn.q"``) to ``"colwise"``,
            ``"rowwise"`` or a ``ParallelStyle`` from torch.distributed.tensor.parallel. ``"auto"`` recognizes, by name
            and shape, pairs of linear layers, and attention layers with separate q, k and v. Each process then computes
            some of an attention layer's heads: attributes such as ``num_heads`` are divided, and ``forward`` must not
            hard-code the width. Use ``q.view(batch, length, self.num_heads, -1)``.
        loss_parallel: whether to split the layer that computes the logits too, by classes, so that no process holds all
            logits. Only ``cross_entropy`` (without label smoothing) accepts such logits, in training and evaluation.
        context_parallel_dims: the sequence dimension of a batch's tensors, for ``context_parallel``: ``1`` for all
            tensors, or ``{"input_ids": 1, "labels": 1, "position_ids": 1}`` (for a tuple, ``{0: 1}``). The step gets
            one part of each sequence, so the batch must contain positions, and labels that are already shifted. The
            loss must be a mean over that part, or be returned with ``num_items``. Attention
            (``scaled_dot_product_attention``) covers all parts. Evaluation runs on full sequences. With ``{}``, a step
            gets full sequences, and your loop splits them itself (``accelerator.maybe_context_parallel``). With
            ``"loader"``, the Accelerator's prepared loaders split the sequences, as for
            ``ParallelismConfig(sp_size=...)``.
        pipeline_schedule: the order in which micro-batches pass through the stages: ``"gpipe"``, ``"1f1b"`` (default)
            or ``"interleaved_1f1b"``.
        microbatches: number of micro-batches per batch for the pipeline; four per pipeline process if None.
        virtual_stages: number of stages on each process, for the interleaved schedule; 2 by default.
        split_points: names of the first modules of the second and later stages; if None, the children of the container
            with the most parameters are distributed evenly.
        **options: arguments of FSDPStrategy, such as ``wrap``, ``mixed_precision`` and ``activation_checkpointing``.
    """

    names: ClassVar[tuple[str, ...]] = ("model_parallel",)

    def __new__(cls, *args: Any, **options: Any) -> ModelParallelStrategy:
        """Create the subclass that runs pipelines if ``pipeline_parallel`` is greater than 1."""
        stages = options.get("pipeline_parallel", 1)
        if cls is ModelParallelStrategy and isinstance(stages, int) and stages > 1:
            return super().__new__(PipelineParallelStrategy)  # type: ignore[reportArgumentType]
        return super().__new__(cls)

    @passes_on(FSDPStrategy.__init__, decided=("sharding", "device_mesh"))
    def __init__(
        self,
        precision: Precision | None = None,
        *,
        data_parallel_replicate: int = 1,
        data_parallel_shard: int | Literal["auto"] = "auto",
        tensor_parallel: int | Literal["auto"] = 1,
        pipeline_parallel: int = 1,
        context_parallel: int = 1,
        plan: Mapping[str, Any] | Literal["auto"] = "auto",
        loss_parallel: bool = False,
        context_parallel_dims: int | Mapping[Any, int] | Literal["loader"] | None = None,
        pipeline_schedule: ScheduleName | None = None,
        microbatches: int | None = None,
        virtual_stages: int | None = None,
        split_points: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(precision, **options)
        for_pipelines = {
            "pipeline_schedule": pipeline_schedule,
            "microbatches": microbatches,
            "virtual_stages": virtual_stages,
            "split_points": split_points,
        }
        for name, value in for_pipelines.items():
            if value is not None and pipeline_parallel == 1:
                raise ValueError(
                    f"ModelParallelStrategy({name}={value!r}) has no effect without a pipeline. Set "
                    f"pipeline_parallel to the number of processes that hold successive layers, or leave {name} out."
                )
        self.asked: dict[str, int | str] = {
            "pp": _size("pp", pipeline_parallel, auto=False),
            "dp_replicate": _size("dp_replicate", data_parallel_replicate, auto=False),
            "dp_shard": _size("dp_shard", data_parallel_shard),
            "cp": _size("cp", context_parallel, auto=False),
            "tp": _size("tp", tensor_parallel),
        }
        #: The size of each mesh dimension, once the number of processes is known.
        self.axis_sizes: dict[str, int] = {}
        #: All processes, with dimensions named as in AXES; created by ``setup_environment``.
        self.mesh: DeviceMesh | None = None
        self.plan: Any = plan
        self.loss_parallel = loss_parallel
        self._flat: DeviceMesh | None = None
        self.context_dims = context_parallel_dims
        self._sequences: SplitSequences | None = None
        if context_parallel > 1 and context_parallel_dims is None:
            raise ValueError(
                f"ModelParallelStrategy(context_parallel={context_parallel}) must know which dimension of a batch's "
                "tensors is the sequence dimension. Pass context_parallel_dims=1 for dimension 1 of all tensors, or "
                "context_parallel_dims={'input_ids': 1, 'labels': 1, 'position_ids': 1}."
            )
        if self.ignored_modules is not None and (tensor_parallel != 1 or pipeline_parallel != 1):
            raise ValueError(
                "ModelParallelStrategy(ignored_modules=...) only works if modules are not split, but this strategy "
                f"has tensor_parallel={tensor_parallel!r} and pipeline_parallel={pipeline_parallel}. Leave "
                "ignored_modules out, or use plan={...} to exclude these modules from the split."
            )
        self._needs_sharding = any(options.get(name) for name in _SHARDING_ONLY)
        self._splitter: Splitter | None = None
        self._data_group: Any = None
        self._parts_group: Any = None

    # ---- placement: the processes as a mesh --------------------------------------------------------------------------

    def _mesh_shape(self) -> tuple[int, ...]:
        self.axis_sizes = find_sizes(self.asked, self.world_size, self.world_size // self.num_nodes)
        shape = self.axis_sizes["dp_replicate"], self.axis_sizes["dp_shard"]
        return shape if shape[0] > 1 else shape[1:]

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.mesh is None:
            self._mesh_shape()
            sizes = tuple(self.axis_sizes[axis] for axis in AXES)
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=AXES)
            logging.getLogger(REDISTRIBUTES).addFilter(_is_of_use)
        if self.axis_sizes["cp"] > 1 and self._sequences is None and self.context_dims is not None:
            kind = SplitBatches if self.context_dims == "loader" else SplitSequences
            self._sequences = kind(self.mesh["cp"], self.context_dims)  # type: ignore[arg-type]

    def sharding_mesh(self) -> DeviceMesh:
        """Return the mesh of the processes across which parameters are sharded."""
        return self._parameters_over(*(["dp_replicate"] if self.axis_sizes["dp_replicate"] > 1 else []), "dp_shard")

    def _parameters_over(self, *axes: str) -> DeviceMesh:
        """Return the mesh with the given dimensions, across which parameters are sharded or replicated.

        Processes that have different parts of a sequence see different data, just as processes with different samples
        do, so parameters are sharded across these processes too.
        """
        if self._flat is None and self.axis_sizes["cp"] > 1:
            flat = [axis for axis in AXES if axis != "cp"]
            sizes = [self.axis_sizes[axis] * (self.axis_sizes["cp"] if axis == "dp_shard" else 1) for axis in flat]
            self._flat = init_device_mesh(self.device.type, tuple(sizes), mesh_dim_names=tuple(flat))
        mesh = self._flat or self.mesh
        if mesh is None:
            raise RuntimeError("ModelParallelStrategy has no mesh yet. Call setup_environment() first.")
        return mesh[axes]

    def place_on(self, axis: str) -> int:
        """Return this process's coordinate along a mesh dimension, 0-based."""
        inner = math.prod(self.axis_sizes[a] for a in AXES[AXES.index(axis) + 1 :])
        return self.global_rank // inner % self.axis_sizes[axis]

    @property
    def spreads_data(self) -> bool:
        """Whether parameters are sharded or replicated across processes that see different data."""
        return self.num_data_ranks * self.axis_sizes["cp"] > 1 or self._needs_sharding

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"mesh": None, "_flat": None, "_sequences": None}

    # ---- placement: the module in parts ------------------------------------------------------------------------------

    def _shard(self, module: nn.Module) -> None:
        if self.axis_sizes["cp"] > 1:
            check_layers(module)
        self._splitter = splitter = self._make_splitter(module)
        super()._shard(module)
        if splitter is not None:
            splitter.finish()
            self._splitter = None

    def _make_splitter(self, module: nn.Module) -> Splitter | None:
        """Return the object that splits layers for tensor parallelism; None if there is no tensor parallelism."""
        if self.axis_sizes["tp"] == 1:
            return None
        plan = None if self.plan == "auto" else self.plan
        return Splitter(module, self._parameters_over("tp"), plan, self._splits_loss)

    @property
    def _splits_loss(self) -> bool:
        return self.loss_parallel and self.axis_sizes["tp"] > 1

    def _blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        return super()._blocks(module) if self.spreads_data or self.activation_checkpointing else {}

    def _prepare(self, name: str, part: nn.Module) -> None:
        splitter = self._splitter
        if splitter is not None and name in splitter.styles:
            self._give_rank_zeros_values(part)
            splitter.split(name)
        elif splitter is not None and name:
            splitter.check(name)

    def _shard_group(self, part: nn.Module, reshard: bool | int | None) -> None:
        if self.spreads_data:
            super()._shard_group(part, reshard)
        else:
            self._give_rank_zeros_values(part)

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        self._agree_on_random_numbers()
        return super().wrap_for_training(module)

    def _agree_on_random_numbers(self) -> None:
        """Make ranks draw the same random numbers if they see the same data, and different numbers otherwise."""
        kind = kind_of(self.device)
        host, on_device = self.broadcast((torch.get_rng_state(), kind.random_state(self.device)))
        torch.set_rng_state(host)
        if on_device is not None:
            kind.set_random_state(on_device, self.device)
        part = self.data_rank * self.axis_sizes["cp"] + self.place_on("cp")
        if part:
            torch.manual_seed(torch.initial_seed() + part)

    @property
    def _has_plain_parameters(self) -> bool:
        return True

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        if self._splits_loss:
            step = SplitLoss().bind(step, training)
        if self._sequences is not None:
            step = self._sequences.bind(step, training)
        if self.spreads_data:
            return super().bind_step(step, wrapped, training)
        return DistributedStrategy.bind_step(self, step, wrapped, training)

    def explain(self, error: BaseException) -> BaseException | None:
        size, text = self.axis_sizes.get("tp", 1), str(error)
        if size > 1 and isinstance(error, RuntimeError):
            if "is invalid for input of size" in text or "must match the size of tensor" in text:
                return RuntimeError(
                    f"{text}. With tensor_parallel={size}, each process computes 1/{size} of an attention layer's "
                    "heads, so q, k and v are narrower than the module's input. Do not hard-code the width: use "
                    "q.view(batch, length, self.num_heads, -1) before the attention (attributes such as num_heads "
                    "count this process's heads) and y.reshape(batch, length, -1) after it. Or use plan={...} to leave "
                    "the layer out."
                )
            if "mixed torch.Tensor and DTensor" in text:
                return RuntimeError(
                    "An operation got both a sharded parameter and a plain tensor. Call the parameter's layer "
                    "instead of using the weight directly (self.layer(x), not x @ self.layer.weight.T), or use "
                    "plan={...} to leave the layer out. Outside a step, use trainer.strategy.model_state(module)."
                )
        if self._sequences is not None and isinstance(error, CheckpointError):
            return RuntimeError(
                "A layer with activation checkpointing ran differently when the backward pass repeated it. If its "
                "sequences are split (maybe_context_parallel), call backward inside the same `with` block as the "
                "forward pass."
            )
        return super().explain(error)

    # ---- communication -----------------------------------------------------------------------------------------------

    @property
    def data_rank(self) -> int:
        return self.place_on("dp_replicate") * self.axis_sizes["dp_shard"] + self.place_on("dp_shard")

    @property
    def num_data_ranks(self) -> int:
        return self.axis_sizes["dp_replicate"] * self.axis_sizes["dp_shard"]

    @property
    def data_group(self) -> Any:
        if self.num_data_ranks == self.world_size or self.mesh is None:
            return None
        if self._data_group is None:
            self._data_group = flatten_mesh(self.mesh["dp_replicate", "dp_shard"], "dp").get_group()
        return self._data_group

    @property
    def parts_group(self) -> Any:
        if self.axis_sizes["cp"] == 1 or self.mesh is None:
            return self.data_group
        if self._parts_group is None and self.axis_sizes["tp"] > 1:
            self._parts_group = flatten_mesh(self.mesh["dp_replicate", "dp_shard", "cp"], "dp_cp").get_group()
        return self._parts_group

    def compute_metric(self, metric: Any) -> Any:
        """Compute the metric across ``data_group`` only, because processes that split layers see the same samples."""
        group = self.data_group
        if group is None:
            return super().compute_metric(metric)
        before, metric.process_group = metric.process_group, group
        try:
            return metric.compute()
        finally:
            metric.process_group = before

    def check_parameters(self, module: nn.Module) -> None:
        if self.spreads_data:
            super().check_parameters(module)

    def complete_gradients(self, optimizer: Optimizer) -> None:
        if self.spreads_data:
            super().complete_gradients(optimizer)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        backward = super().backward if self.spreads_data else partial(DistributedStrategy.backward, self)
        if self._sequences is not None and self._sequences.dims != {}:
            with self._sequences.attention:  # for forward passes that activation checkpointing repeats
                return self._backward(backward, loss, how)
        return self._backward(backward, loss, how)

    def _backward(self, backward: Callable[..., None], loss: Tensor, how: Callable[[Tensor], Any] | None) -> None:
        if not self._splits_loss:
            return backward(loss, how)
        with loss_parallel():
            return backward(loss, how)

    def split_sequences(
        self, tensors: Sequence[Tensor], dims: Sequence[int], unrestored: Collection[Tensor] = ()
    ) -> AbstractContextManager[None]:
        if self._sequences is None or isinstance(self._sequences, SplitBatches):
            return super().split_sequences(tensors, dims, unrestored)
        if self._sequences.dims != {}:
            raise RuntimeError(
                f"ModelParallelStrategy(context_parallel_dims={self._sequences.dims!r}) already splits sequences in "
                "each step. To split them in your own loop (maybe_context_parallel), pass context_parallel_dims={}."
            )
        return self._sequences.split(tensors, dims, unrestored)

    def batch_cutter(self) -> Callable[[Any], Any] | None:
        return self._sequences.cut if isinstance(self._sequences, SplitBatches) else None

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        parameters = list(parameters)
        parts.settle(parameters)
        return super().clip_by_norm(parameters, max_norm, norm_type)

    def clip_by_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        parameters = list(parameters)
        parts.settle(parameters)
        super().clip_by_value(parameters, clip_value)

    # ---- state -------------------------------------------------------------------------------------------------------

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        return super().window_gradients(module) if self.spreads_data and self.axis_sizes["tp"] == 1 else None


def _is_of_use(record: logging.LogRecord) -> bool:
    """Log filter that drops torch's hint that tensors are split in two dimensions, which every process would repeat."""
    return "sequential" not in str(record.msg)


class PipelineParallelStrategy(PipelineSteps, ModelParallelStrategy):
    """The strategy that ``ModelParallelStrategy(pipeline_parallel=...)`` creates."""


def _size(axis: str, value: Any, auto: bool = True) -> int | str:
    if auto and value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        more = ", or 'auto'" if auto else ""
        raise ValueError(
            f"ModelParallelStrategy: {ARGUMENTS[axis]}={value!r} is not a valid number of processes. Pass 1 or "
            f"more{more}."
        )
    return value


def find_sizes(asked: Mapping[str, int | str], world_size: int, per_node: int) -> dict[str, int]:
    """Return the size of each mesh dimension.

    ``tensor_parallel="auto"`` means ``per_node``, the number of processes on one machine.

    Raises:
        ValueError: the product of the sizes is not the number of processes.
    """
    sizes = {axis: per_node if axis == "tp" and size == "auto" else size for axis, size in asked.items()}
    others = math.prod(size for size in sizes.values() if isinstance(size, int))
    found = {axis: world_size // others if size == "auto" else int(size) for axis, size in sizes.items()}
    if math.prod(found.values()) != world_size:
        factors = " x ".join(f"{ARGUMENTS[axis]}={size}" for axis, size in sizes.items() if size not in (1, "auto"))
        what = f"is {others}, which does not divide" if "auto" in sizes.values() else f"is {others}, which is not"
        raise ValueError(
            f"ModelParallelStrategy: {factors} {what} the number of processes, {world_size}. Change one of the sizes, "
            "or change the number of processes (devices=, num_nodes=)."
        )
    return found
