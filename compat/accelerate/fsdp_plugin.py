"""``accelerate``'s FSDP plugin, whose fields programs read in the form that torch takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ...accelerator import plugins
from ...settings import resolve
from ...strategies.fsdp.settings import SHARDING, as_word, is_true, offload_policy
from ...strategies.fsdp.strategy import FSDPStrategy

#: Attributes of FSDPStrategy that the plugin decides.
_OF_STRATEGY = (
    "wrap",
    "reshard_after_forward",
    "mixed_precision",
    "offload",
    "activation_checkpointing",
    "ignored_modules",
    "state_dict_type",
)


@dataclass
class FullyShardedDataParallelPlugin(plugins.FullyShardedDataParallelPlugin):
    """Paceline's FullyShardedDataParallelPlugin, except that its fields can be read in the form that torch takes.

    A field that is not set shows the value from the settings, or else the default. ``fsdp_version`` is always 2, the
    version that Paceline uses.
    """

    def __post_init__(self) -> None:
        self._take({one.name: getattr(self, one.name) for one in fields(self)})

    def _take(self, written: dict[str, Any]) -> None:
        """Set the fields as a program wrote them, and show them as torch takes them."""
        plain = plugins.FullyShardedDataParallelPlugin(**written)
        shown = {**written, **_shown(plain.filled(resolve()))}
        vars(self).update(shown, _written=written, _shown=shown)

    def plain(self) -> plugins.FullyShardedDataParallelPlugin:
        """Return a plugin with the fields as the program wrote them, at first or later."""
        now, own = {one.name: getattr(self, one.name) for one in fields(self)}, vars(self)
        written, shown = own["_written"], own["_shown"]
        return plugins.FullyShardedDataParallelPlugin(
            **{name: written[name] if value is shown[name] else value for name, value in now.items()}
        )

    def filled(self, settings: Mapping[str, Any] | None) -> FullyShardedDataParallelPlugin:
        """Return a copy whose unset fields are filled from ``settings``."""
        found = type(self)(**vars(self.plain().filled(settings)))
        vars(found)["_used"] = vars(found.plain())
        return found

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for FSDPStrategy."""
        return self.plain().arguments()

    def options(self) -> dict[str, Any]:
        """Return the arguments for FSDPStrategy, and report fields that have no effect (once)."""
        return self.plain().options()

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set ``mixed_precision_policy``; a policy that is already set is replaced only if ``override`` is True."""
        plain = self.plain()
        plain.set_mixed_precision(mixed_precision, buffer_autocast, override)
        self._take(vars(plain))

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set ``state_dict_type``."""
        plain = self.plain()
        plain.set_state_dict_type(state_dict_type)
        self._take(vars(plain))

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace a policy that is set by name (other than ``"no_wrap"``) with torch's policy for this model."""
        plain = self.plain()
        plain.set_auto_wrap_policy(model)
        self._take(vars(plain))

    def apply_changes(self, strategy: Any) -> None:
        """Make changes since the Accelerator was created take effect for the models that are prepared from now on."""
        used = vars(self).get("_used")  # the fields from which the strategy was created
        if used is None or not isinstance(strategy, FSDPStrategy):
            return
        now = vars(self.plain())
        if all(value is used[name] for name, value in now.items()):
            return
        if now["sharding_strategy"] is not used["sharding_strategy"]:
            raise ValueError(
                f"FullyShardedDataParallelPlugin: sharding_strategy={self.sharding_strategy!r} was set after the "
                "Accelerator was created, when the processes had already been divided into groups. Pass it to the "
                "plugin, and the plugin to Accelerator(fsdp_plugin=...)."
            )
        given: dict[str, Any] = {"sharding": strategy.sharding, **self.options()}
        fresh = FSDPStrategy(**given)
        for name in _OF_STRATEGY:
            setattr(strategy, name, getattr(fresh, name))
        vars(self)["_used"] = now


def _shown(filled: plugins.FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """Return the fields in the form that torch takes."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
    )
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    found, strategy, policy = filled.arguments(), filled.sharding_strategy, filled.auto_wrap_policy
    full = found.get("state_dict_type", "full") == "full"
    by_name = {"TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy, "SIZE_BASED_WRAP": size_based_auto_wrap_policy}
    weights, optimizer = filled.state_dict_config, filled.optim_state_dict_config
    if weights is None:
        weights = FullStateDictConfig(True, rank0_only=True) if full else ShardedStateDictConfig(True)
    if optimizer is None:
        optimizer = FullOptimStateDictConfig(True, rank0_only=True) if full else ShardedOptimStateDictConfig(True)
    return {
        "fsdp_version": 2,
        "sharding_strategy": None if strategy is None else ShardingStrategy[as_word("", strategy, SHARDING)],
        "reshard_after_forward": found.get("reshard_after_forward", True),
        "backward_prefetch": None,
        "mixed_precision_policy": found.get("mixed_precision"),
        "auto_wrap_policy": by_name.get(filled.wrapping() or "") if isinstance(policy, str) else policy,
        "cpu_offload": offload_policy(found.get("cpu_offload", False)),
        "ignored_modules": filled.ignored_modules,
        "state_dict_type": StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT,
        "state_dict_config": weights,
        "optim_state_dict_config": optimizer,
        "activation_checkpointing": bool(found.get("activation_checkpointing")),
        "activation_checkpointing_offload": False,
        "cpu_ram_efficient_loading": is_true(filled.cpu_ram_efficient_loading),
        "transformer_cls_names_to_wrap": filled.class_names() or None,
        "min_num_params": None if filled.min_num_params is None else int(filled.min_num_params),
    }
