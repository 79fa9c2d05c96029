"""What plugins, handlers and settings say about a strategy, as plain arguments of the strategy classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import messages
from ..settings import Settings

#: The dimensions of a mesh in plugins and settings, and the arguments of ModelParallelStrategy for them.
SIZES = {
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "tp": "tensor_parallel",
}


@dataclass(frozen=True)
class Options:
    """Arguments for each class of strategies; None: nothing was said for it.

    Attributes:
        ddp: of DDPStrategy.
        fsdp: of FSDPStrategy.
        deepspeed: of DeepSpeedStrategy.
        mesh: of ModelParallelStrategy; the product of its sizes is the number of processes.
        process_group: of every strategy for several processes.
        written: for each of these, what the user wrote, for errors.
    """

    ddp: Mapping[str, Any] | None = None
    fsdp: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    mesh: Mapping[str, Any] | None = None
    process_group: Mapping[str, Any] | None = None
    written: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.deepspeed is not None and (self.fsdp is not None or self.mesh is not None):
            other = self.written["fsdp" if self.fsdp is not None else "mesh"]
            raise ValueError(
                f"{self.written['deepspeed']} and {other} contradict each other: DeepSpeed spreads the model itself. "
                "Leave one out (use_deepspeed, use_fsdp and use_parallelism_config of the settings count too)."
            )

    @property
    def given(self) -> str:
        """What the user wrote, all of it; empty if that is nothing."""
        names = ("fsdp", "deepspeed", "mesh", "ddp", "process_group")
        return " and ".join(self.written[name] for name in names if getattr(self, name) is not None)

    def wanted(self) -> str | None:
        """Name of the strategy that these options ask for; None: they go with any."""
        sizes = self.mesh or {}
        if self.deepspeed is not None:
            return "deepspeed"
        if sizes.get("tensor_parallel", 1) > 1:
            return "model_parallel"
        return "fsdp" if self.fsdp is not None or sizes.get("data_parallel_shard", 1) > 1 else None

    def arguments(self, name: str, kind: str) -> dict[str, Any]:
        """The arguments for one strategy; says once which options have no effect on it.

        Args:
            name: of the strategy.
            kind: name of its class.
        """
        found = dict(self.process_group or {})
        if kind == "DDPStrategy":
            return {**found, **(self.ddp or {})}
        if self.ddp is not None:
            messages.info_once(
                f"{self.written['ddp']} has no effect with strategy {name!r}, which does not use "
                "DistributedDataParallel."
            )
        if kind == "DeepSpeedStrategy":
            return {**found, **(self.deepspeed or {})}
        found |= self.fsdp or {}
        if self.mesh is None or _product(self.mesh) == 1:
            return found
        if kind == "FSDPStrategy":
            return {**found, **{size: self.mesh[size] for size in ("data_parallel_replicate", "data_parallel_shard")}}
        if found.pop("sharding", None) == "hybrid":
            raise ValueError(
                f"{self.written['fsdp']} asks for HYBRID_SHARD, and {self.written['mesh']} splits layers. Write "
                "dp_replicate_size and dp_shard_size instead of HYBRID_SHARD."
            )
        return {**found, **self.mesh}

    def refuse(self, strategy: str) -> None:
        """Raise if anything was said: this strategy takes no options."""
        if self.given:
            raise ValueError(
                f"{self.given} cannot change strategy {strategy}. Give the strategy object these arguments, or leave "
                "strategy out."
            )

    def check_size(self, num_processes: int) -> None:
        """Raise if the product of the mesh's sizes is not the number of processes."""
        if self.mesh is None or _product(self.mesh) == num_processes:
            return
        sizes = [size for size in _sizes(self.mesh) if size > 1]
        product, total = " x ".join(map(str, sizes)), _product(self.mesh)
        raise ValueError(
            f"{self.written['mesh']}: {f'{product} = ' if len(sizes) > 1 else ''}{total} processes are asked for, but "
            f"the number of processes is {num_processes}. Change a size, or start as many: paceline launch "
            f"--num_processes {total} ..."
        )


def _sizes(mesh: Mapping[str, Any]) -> list[int]:
    return [mesh[argument] for argument in SIZES.values()]


def _product(mesh: Mapping[str, Any]) -> int:
    return math.prod(_sizes(mesh))


def mesh_options(sizes: Mapping[str, int], written: str) -> dict[str, Any]:
    """The arguments of ModelParallelStrategy for the sizes of a mesh.

    Args:
        sizes: number of processes by dimension: ``dp_replicate``, ``dp_shard``, ``tp``, ``cp``, ``sp``.
        written: what the user wrote, for errors.

    Raises:
        NotImplementedError: split sequences.
    """
    if sizes["cp"] > 1 or sizes["sp"] > 1:
        raise NotImplementedError(
            f"{written} splits sequences, so that a model returns a part of each, while the loss is computed outside "
            "of it, on whole ones. Write Trainer(strategy=ModelParallelStrategy(context_parallel=...)), whose step has "
            "both inside, or leave cp_size and sp_size out."
        )
    return {argument: sizes[dim] for dim, argument in SIZES.items()}


def options_in(settings: Settings) -> Options:
    """What ``use_fsdp``, ``use_deepspeed`` and ``use_parallelism_config`` ask for, with the settings of each."""
    found: dict[str, Any] = {}
    if settings["use_fsdp"]:
        from .fsdp.settings import FSDPSettings

        found["fsdp"] = FSDPSettings().filled(settings).options()
    if settings["use_deepspeed"]:
        from .deepspeed.settings import DeepSpeedSettings

        found["deepspeed"] = DeepSpeedSettings().filled(settings).options()
    if settings["use_parallelism_config"]:
        sizes = {dim: settings[f"parallelism_config_{dim}_size"] for dim in (*SIZES, "cp", "sp")}
        found["mesh"] = mesh_options(sizes, "use_parallelism_config")
    switches = {"fsdp": "use_fsdp", "deepspeed": "use_deepspeed", "mesh": "use_parallelism_config"}
    return Options(**found, written=switches)
