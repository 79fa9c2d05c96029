"""``accelerate``'s configuration objects that read the environment when they are created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...accelerator import parallelism_config, plugins
from ...accelerator.parallelism_config import TorchContextParallelConfig
from ...settings import if_set, resolve


@dataclass
class ParallelismConfig(parallelism_config.ParallelismConfig):
    """Paceline's ParallelismConfig, except that its unset sizes are taken from the settings when it is created."""

    def __post_init__(self) -> None:
        settings = resolve()
        for dim in parallelism_config.DIMS:
            name = f"{dim}_size"
            if getattr(self, name) is None:
                setattr(self, name, if_set(settings, f"parallelism_config_{name}") or 1)
        super().__post_init__()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig(settings["parallelism_config_cp_comm_strategy"])

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names and sizes of the active dimensions, outermost first."""
        names = tuple(self.active_mesh_dims)
        return names, tuple(self.size(name) for name in names)


@dataclass
class TorchDynamoPlugin(plugins.TorchDynamoPlugin):
    """Paceline's TorchDynamoPlugin, except that its unset fields are taken from the settings when it is created."""

    def __post_init__(self) -> None:
        filled = plugins.choose_dynamo(plugins.TorchDynamoPlugin(**vars(self)), resolve())
        vars(self).update(vars(filled))
        super().__post_init__()

    def to_kwargs(self) -> dict[str, Any]:
        """Return the ``torch.compile`` arguments that are set in this object or in the environment."""
        found = plugins.TorchDynamoPlugin(**vars(self)).to_kwargs()
        return found if self.compiles else {name: value for name, value in found.items() if name != "backend"}
