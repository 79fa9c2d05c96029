"""``ParallelismConfig``: the dimensions of parallelism and their sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from .. import messages
from ..settings import fill
from ..strategies.options import mesh_options
from ..torch_private import flatten_mesh

_COMM = ("allgather", "alltoall")
#: The dimensions of the mesh, outermost first.
DIMS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclass
class TorchTensorParallelConfig:
    """Settings for tensor parallelism.

    Args:
        enable_async_tp: not supported.
        plan: how to split layers: a mapping from patterns of layer names to ``"colwise"`` or ``"rowwise"``.
            ``"auto"`` chooses by layer name.
    """

    enable_async_tp: bool = False
    plan: Any = "auto"


@dataclass
class TorchContextParallelConfig:
    """Settings for context parallelism.

    Args:
        cp_comm_strategy: how attention gets the keys and values of other processes. ``"allgather"`` (the default)
            gathers all keys and values in one step; ``"alltoall"`` does the same.
    """

    cp_comm_strategy: Literal["allgather", "alltoall"] | str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy not in (None, *_COMM):
            raise ValueError(messages.unknown("cp_comm_strategy", self.cp_comm_strategy, _COMM))
        messages.ignored(
            type(self).__name__,
            "keys and values are always gathered in one step",
            cp_comm_strategy="alltoall" if self.cp_comm_strategy == "alltoall" else None,
        )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings for DeepSpeed's Ulysses. They have no effect, because ``sp_size`` works without DeepSpeed."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


class _Enabled(property):
    """Property that is True if a dimension has more than one process."""

    def __init__(self, dim: str, doc: str) -> None:
        super().__init__(lambda config: config.size(dim) > 1, doc=doc)

    def __get__(self, config: Any, owner: type | None = None) -> bool:  # type: ignore[override]
        return super().__get__(config, owner)


@dataclass
class ParallelismConfig:
    """Sizes of the dimensions of parallelism. Their product is the number of processes.

    A size of None is taken from the settings (``parallelism_config_...``); if they do not set the size, it is 1.

    Args:
        dp_replicate_size: number of copies of the (sharded) model.
        dp_shard_size: number of processes across which each parameter is sharded.
        tp_size: number of processes across which each layer is split.
        tp_handler: settings for tensor parallelism.
        cp_size: number of processes across which each sequence is split inside ``accelerator.maybe_context_parallel``.
            Parameters are sharded across these processes too.
        cp_handler: settings for context parallelism.
        sp_size: number of processes across which each sequence is split by the loaders that are prepared together with
            a model. Batches are dicts with ``input_ids`` and ``position_ids``; ``shift_labels`` replaces ``labels``.
            Parameters are sharded across these processes too.
        cp_backend, sp_backend: accept only their default values.
        sp_handler: has no effect.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] = "torch"
    sp_size: int | None = None
    sp_backend: Literal["deepspeed"] = "deepspeed"
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for dim in DIMS:
            size = getattr(self, f"{dim}_size")
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(
                    f"ParallelismConfig: {dim}_size={size!r} is not a valid number of processes. Pass 1 or more."
                )
        for name, only in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != only:
                raise ValueError(messages.unknown(f"ParallelismConfig {name}", getattr(self, name), [only]))
        why = "sequences may have any length, and the model's own attention is used, without DeepSpeed"
        messages.ignored(type(self).__name__, why, sp_handler=self.sp_handler)
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                f"ParallelismConfig: cp_size={self.cp_size} and sp_size={self.sp_size} both split sequences. Set one "
                "of them to 1."
            )

    def filled(self, settings: Mapping[str, Any] | None) -> ParallelismConfig:
        """Return a copy with unset sizes taken from the settings, or else set to 1."""
        names = {f"{dim}_size": f"parallelism_config_{dim}_size" for dim in DIMS}
        found = fill(self, settings, names)
        return replace(found, **{name: getattr(found, name) or 1 for name in names})

    # ---- sizes -----------------------------------------------------------------------------------------------------

    def size(self, dim: str) -> int:
        """Return the number of processes along a dimension."""
        return getattr(self, f"{dim}_size") or 1

    @property
    def total_size(self) -> int:
        """The product of all sizes."""
        return math.prod(self.size(dim) for dim in DIMS)

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that see different data."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that share each sample."""
        return self.size("tp") * self.size("cp") * self.size("sp")

    dp_replicate_enabled = _Enabled("dp_replicate", "Whether the model is replicated.")
    dp_shard_enabled = _Enabled("dp_shard", "Whether parameters are sharded.")
    tp_enabled = _Enabled("tp", "Whether layers are split.")
    cp_enabled = _Enabled("cp", "Whether sequences are split.")
    sp_enabled = _Enabled("sp", "Whether loaders split sequences.")

    # ---- the mesh --------------------------------------------------------------------------------------------------

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions with more than one process, outermost first."""
        return [dim for dim in DIMS if self.size(dim) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Active mesh dimensions along which processes read different data."""
        return [dim for dim in self.active_mesh_dims if dim in ("dp_replicate", "dp_shard")]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Active mesh dimensions along which processes work on the same samples."""
        return [dim for dim in self.active_mesh_dims if dim in ("tp", "cp", "sp")]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Active mesh dimensions across which parameters are sharded."""
        return [dim for dim in self.active_mesh_dims if dim in ("dp_shard", "cp", "sp")]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Active mesh dimensions across which a loss is averaged."""
        return [dim for dim in self.active_mesh_dims if dim in ("dp_replicate", "dp_shard", "cp", "sp")]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions for ``fully_shard``: the replicate dimension (if active) and the flattened shard dimension."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Create the mesh of the active dimensions, including flattened ones; return None if there is one process.

        Every process must call this after joining the process group.
        """
        if not self.active_mesh_dims:
            return None
        sizes = tuple(self.size(dim) for dim in self.active_mesh_dims)
        mesh = device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=tuple(self.active_mesh_dims))
        for name, dims in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if dims:
                flatten_mesh(mesh[dims], name)  # type: ignore[index]
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh; if it does not exist and ``device_type`` is given, create it first."""
        if self.device_mesh is None and device_type is not None:
            return self.build_device_mesh(device_type)
        if self.device_mesh is not None and device_type not in (None, self.device_mesh.device_type):
            raise ValueError(
                f"The mesh of this ParallelismConfig is for {self.device_mesh.device_type!r}, but {device_type!r} was "
                "requested. Create another ParallelismConfig for that device type."
            )
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return {name: asdict(value) if is_dataclass(value) else value for name, value in found.items()}  # type: ignore[arg-type]

    # ---- the strategy ----------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return the arguments for ModelParallelStrategy."""
        if self.tp_handler is not None and self.tp_handler.enable_async_tp:
            raise NotImplementedError(
                "TorchTensorParallelConfig: enable_async_tp=True is not supported. Leave it out. Layers are split the "
                "same way, but communication does not overlap with matrix multiplications."
            )
        for dim, handler in (("cp", self.cp_handler), ("tp", self.tp_handler)):
            if self.size(dim) == 1:
                messages.ignored(type(self).__name__, f"{dim}_size is 1", **{f"{dim}_handler": handler})
        found = mesh_options({dim: self.size(dim) for dim in DIMS})
        if self.sp_enabled:
            found["context_parallel_dims"] = "loader"
        if self.cp_enabled:
            found["context_parallel_dims"] = {}  # the loop splits sequences with maybe_context_parallel
            if self.cp_handler is not None and self.cp_handler.cp_comm_strategy == "alltoall":
                messages.info_once(
                    "TorchContextParallelConfig(cp_comm_strategy='alltoall') is treated as 'allgather', so attention "
                    "gathers the keys and values of all processes in one step. The results are the same."
                )
        if self.tp_enabled and self.tp_handler is not None:
            found["plan"] = self.tp_handler.plan
        return found

    @property
    def written(self) -> str:
        """The sizes greater than 1, written as code, for error messages."""
        return f"ParallelismConfig({', '.join(f'{dim}_size={self.size(dim)}' for dim in self.active_mesh_dims)})"


def check_buffers(buffers: Sequence[Tensor], dims: Sequence[int], unrestored: Collection[Tensor]) -> None:
    """Raise a ValueError if these arguments of ``maybe_context_parallel`` are not valid."""
    known = {id(buffer) for buffer in buffers}
    if len(buffers) != len(dims):
        problem = (
            f"different numbers of buffers and buffer_seq_dims ({len(buffers)} and {len(dims)}). Pass one dimension "
            "for each buffer."
        )
    elif len(known) < len(buffers):
        problem = "the same tensor twice in buffers. Pass it once, or pass a copy."
    elif any(id(buffer) not in known for buffer in unrestored):
        problem = "a tensor in no_restore_buffers that is not in buffers. Pass a subset of buffers."
    elif trained := [index for index, buffer in enumerate(buffers) if buffer.requires_grad]:
        problem = (
            f"buffers[{trained[0]}], which requires gradients. Pass only data, such as tokens and positions, because "
            "tensors that are computed inside the context are already split."
        )
    else:
        return
    raise ValueError(f"accelerator.maybe_context_parallel got {problem}")
