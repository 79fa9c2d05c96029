"""Collect arguments for the strategy classes from plugins, handlers and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import messages
from ..settings import Settings
from .deepspeed.settings import DeepSpeedSettings
from .fsdp.settings import FSDPSettings

#: Mesh dimensions in plugins and settings, with the ModelParallelStrategy argument for each.
SIZES = {
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}


@dataclass(frozen=True)
class Options:
    """The user's arguments for each strategy class; None for a class without arguments.

    Attributes:
        fsdp: arguments for FSDPStrategy.
        deepspeed: arguments for DeepSpeedStrategy.
        mesh: arguments for ModelParallelStrategy, including sizes whose product is the number of processes.
        ddp: arguments for DDPStrategy.
        process_group: arguments for every multi-process strategy.
        written: the text that the user wrote for each group of arguments, for error messages.
    """

    fsdp: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    mesh: Mapping[str, Any] | None = None
    ddp: Mapping[str, Any] | None = None
    process_group: Mapping[str, Any] | None = None
    written: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.deepspeed is not None and (self.fsdp is not None or self.mesh is not None):
            other = self.written["fsdp" if self.fsdp is not None else "mesh"]
            if (self.mesh or {}).get("context_parallel_dims") == "loader":
                why, mend = "sp_size works without DeepSpeed and shards parameters itself", "Leave DeepSpeed out"
            else:
                why, mend = "DeepSpeed splits the model itself", "Leave one of them out"
            raise ValueError(
                f"{self.written['deepspeed']} and {other} contradict each other: {why}. {mend}. These "
                "arguments may come from the settings use_deepspeed, use_fsdp or use_parallelism_config."
            )

    @property
    def given(self) -> str:
        """All options as the user wrote them, joined into one string, which may be empty."""
        return " and ".join(text for name, text in self.written.items() if getattr(self, name) is not None)

    @property
    def size(self) -> int:
        """Number of processes in the mesh; 1 if there is no mesh."""
        return math.prod((self.mesh or {}).get(argument, 1) for argument in SIZES.values())

    @property
    def wanted(self) -> str | None:
        """The name of the strategy that these options need; None if they work with any strategy."""
        mesh = self.mesh or {}
        if self.deepspeed is not None:
            return "deepspeed"
        if mesh.get("tensor_parallel", 1) > 1 or mesh.get("context_parallel", 1) > 1:
            return "model_parallel"
        return "fsdp" if self.fsdp is not None or mesh.get("data_parallel_shard", 1) > 1 else None

    def arguments(self, name: str, kind: str) -> dict[str, Any]:
        """Return the arguments for the strategy with this name and class, and report options that have no effect."""
        if self.ddp is not None and kind != "DDPStrategy":
            messages.info_once(
                f"{self.written['ddp']} has no effect with strategy {name!r}, which does not use "
                "DistributedDataParallel."
            )
        own = {"DDPStrategy": self.ddp, "DeepSpeedStrategy": self.deepspeed}.get(kind, self.fsdp)
        found = {**(self.process_group or {}), **(own or {})}
        mesh = self.mesh if self.mesh is not None and self.size > 1 else {}
        if kind == "FSDPStrategy":
            return found | {argument: size for argument, size in mesh.items() if argument.startswith("data_parallel")}
        if kind != "ModelParallelStrategy":
            return found
        if mesh and found.pop("sharding", None) == "hybrid":
            raise ValueError(
                f"{self.written['fsdp']} asks for HYBRID_SHARD, which cannot be combined with the tensor parallelism "
                f"of {self.written['mesh']}. Use dp_replicate_size and dp_shard_size instead of HYBRID_SHARD."
            )
        return found | dict(mesh)

    def refuse(self, strategy: str) -> None:
        """Raise an error if there are any options, because this strategy does not accept them."""
        if self.given:
            raise ValueError(
                f"{self.given} cannot be combined with strategy {strategy}. Pass these arguments to a Strategy object, "
                "or leave strategy out."
            )

    def check_size(self, num_processes: int) -> None:
        """Raise an error if the product of the mesh's sizes does not equal the number of processes."""
        if self.mesh is not None and self.size != num_processes:
            raise ValueError(
                f"{self.written['mesh']} needs {self.size} processes, but this run has {num_processes}. Change one of "
                f"the sizes, or run: paceline launch --num_processes {self.size} ..."
            )


def mesh_options(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Convert mesh sizes, keyed by dimension, to ModelParallelStrategy arguments."""
    return {argument: sizes[dim] for dim, argument in SIZES.items()} | {"context_parallel": sizes["cp"] * sizes["sp"]}


def options_in(settings: Settings) -> Options:
    """Return the options from the settings for FSDP, DeepSpeed and the parallelism config."""
    written = {"fsdp": "use_fsdp", "deepspeed": "use_deepspeed", "mesh": "use_parallelism_config"}
    found: dict[str, Any] = {
        name: kind().filled(settings).options()
        for name, kind in (("fsdp", FSDPSettings), ("deepspeed", DeepSpeedSettings))
        if settings[written[name]]
    }
    if settings["use_parallelism_config"]:
        sizes = {dim: settings[f"parallelism_config_{dim}_size"] for dim in (*SIZES, "sp")}
        for dim in ("cp", "sp"):
            if sizes[dim] > 1:
                raise ValueError(
                    f"The setting parallelism_config_{dim}_size={sizes[dim]} splits sequences, but the Trainer cannot "
                    "tell which dimensions of a batch are sequences. Use "
                    f"Trainer(strategy=ModelParallelStrategy(context_parallel={sizes[dim]}, "
                    "context_parallel_dims=...)), or leave the setting out."
                )
        found["mesh"] = mesh_options(sizes)
    return Options(**found, written=written)
