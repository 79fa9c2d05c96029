"""Chooses an Accelerator's strategy and precision from its handlers, plugins and settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import GradScaler

from .. import messages
from ..processes.cluster_environment import find_cluster
from ..processes.devices import count, find_kind
from ..settings import if_set
from ..strategies.base import Strategy
from ..strategies.choose import choose_strategy
from ..strategies.options import Options
from ..strategies.precision import MixedPrecision, Precision
from ..strategies.precision.choose import choose_precision
from .enums import PrecisionType
from .kwargs_handlers import AORecipeKwargs, Handlers
from .parallelism_config import ParallelismConfig
from .plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin

_NAMES: dict[str, Literal["16-mixed", "bf16-mixed"]] = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class Choice:
    """The arguments of an Accelerator that determine its Strategy; ``settings`` replace values that are None.

    Attributes:
        deepspeed_plugin: a plugin, or a dict that contains one.
        settings: values of settings, keyed by name; ``mixed_precision``, ``cpu`` and ``strategy`` already include
            arguments set in code.
    """

    handlers: Handlers = field(default_factory=Handlers)
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None
    parallelism_config: ParallelismConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def filled(self) -> Choice:
        """Return a copy with unset fields filled in and with the plugins requested by settings such as ``use_fsdp``."""
        one, settings = self.deepspeed_plugin, self.settings
        if isinstance(one, Mapping):
            one = _only(one)
        return Choice(
            self.handlers,
            _checked("fsdp_plugin", self.fsdp_plugin, FullyShardedDataParallelPlugin, settings, "use_fsdp"),
            _checked("deepspeed_plugin", one, DeepSpeedPlugin, settings, "use_deepspeed"),
            _checked(
                "parallelism_config", self.parallelism_config, ParallelismConfig, settings, "use_parallelism_config"
            ),
            settings,
        )

    def options(self) -> Options:
        """Build the strategy's options from handlers and plugins."""
        sizes = self.parallelism_config
        given: dict[str, tuple[Any, str]] = {
            "fsdp": (self.fsdp_plugin, "fsdp_plugin"),
            "deepspeed": (self.deepspeed_plugin, "deepspeed_plugin"),
            "mesh": (sizes, "" if sizes is None else sizes.written),
            "ddp": (self.handlers.ddp, "DistributedDataParallelKwargs"),
            "process_group": (self.handlers.process_group, "InitProcessGroupKwargs"),
        }
        found = {name: one.options() for name, (one, _) in given.items() if one is not None}
        return Options(**found, written={name: text for name, (_, text) in given.items()})


def choose(choice: Choice) -> Strategy:
    """Choose the Strategy and place it on its device, without calling ``setup_environment``."""
    choice = choice.filled()
    asked = choice.settings.get("device")
    if asked is None:
        return _chosen(choice, bool(choice.settings.get("cpu")))
    device = torch.device(asked)
    strategy = _chosen(choice, device.type == "cpu")
    strategy.device, strategy.devices = device, [device]  # type: ignore[attr-defined]
    return strategy


def _chosen(choice: Choice, cpu: bool) -> Strategy:
    strategy, kind = choice.settings.get("strategy") or "auto", find_kind("cpu" if cpu else "auto")
    precision = precision_of(choice, kind)
    if isinstance(strategy, Strategy) and type(precision) is Precision:
        precision = None
    cluster = find_cluster()
    placed = getattr(strategy, "devices", [])
    if len(placed) == (1 if cluster is None else cluster.local_world_size):
        return choose_strategy(strategy, placed[0].type, _listed(placed), precision=precision, options=choice.options())
    alone = cluster is None
    if alone and kind != "cpu":
        _say_unused(count(kind))
    accelerator, devices = "cpu" if cpu else "auto", 1 if alone else "auto"
    return choose_strategy(strategy, accelerator, devices, precision=precision, options=choice.options())


def _listed(devices: Sequence[torch.device]) -> int | list[int]:
    """Return the ``devices`` argument of ``choose_strategy`` for a strategy that already has its devices."""
    indices = [device.index for device in devices if device.index is not None]
    return indices if len(indices) == len(devices) else len(devices)


def _checked(name: str, plugin: Any, kind: Any, settings: Mapping[str, Any], switch: str) -> Any:
    if plugin is None:
        return kind().filled(settings) if settings.get(switch) else None
    if not isinstance(plugin, kind):
        hint = f" Did you mean {plugin.__name__}()?" if isinstance(plugin, type) else ""
        raise TypeError(f"Accelerator: {name}={plugin!r} is {messages.a(plugin)}.{hint} Pass a {kind.__name__}.")
    return plugin.filled(settings)


def _only(plugins: Mapping[str, DeepSpeedPlugin]) -> DeepSpeedPlugin:
    if len(plugins) != 1:
        raise NotImplementedError(
            f"Accelerator(deepspeed_plugin=...) got {len(plugins)} plugins ({', '.join(map(str, plugins))}). Pass only "
            "one plugin, because all prepared models share one configuration."
        )
    return next(iter(plugins.values()))


def _say_unused(present: int) -> None:
    if present > 1:
        script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "train.py"
        messages.info_once(
            f"This process uses 1 of the {present} GPUs that it sees. To use all of them, run: "
            f"paceline launch --num_processes {present} {script} (or torchrun --nproc-per-node {present} {script}). To "
            "keep using one GPU, set CUDA_VISIBLE_DEVICES=0."
        )


# ---- precision -------------------------------------------------------------------------------------------------------


def precision_of(choice: Choice, kind: str) -> Precision:
    """Return the Precision that ``mixed_precision`` and the handlers request."""
    asked = if_set(choice.settings, "mixed_precision")
    if isinstance(asked, Precision):
        return asked
    word = None if asked is None else str(asked).lower()
    if isinstance(choice.deepspeed_plugin, DeepSpeedPlugin):
        true = _sixteen_bits(choice.deepspeed_plugin, word)
        if true is not None:
            return choose_precision(true, None, kind)
    scaler, autocast, float8 = choice.handlers.grad_scaler, choice.handlers.autocast, choice.handlers.float8
    _check_handlers(choice.handlers, word)
    if word in (None, "no"):
        return Precision()
    if word not in (*_NAMES, "fp8"):
        raise ValueError(messages.unknown("mixed_precision", asked, PrecisionType.list(), ", or pass a Precision"))
    if word == "fp8":
        return (float8 or AORecipeKwargs()).precision(kind)
    arguments: dict[str, Any] = {}
    if autocast is not None:
        arguments = {"autocast": autocast.enabled, "cache": autocast.cache_enabled}
    if word == "fp16" and scaler is not None:
        arguments["scaler"] = GradScaler(kind, **scaler.to_kwargs())
    return MixedPrecision(_NAMES[word], kind, **arguments)


def _check_handlers(handlers: Handlers, word: str | None) -> None:
    """Report handlers that have no effect with this ``mixed_precision``."""
    now = f"but mixed_precision is {word or 'no'!r}"
    if word != "fp16":
        messages.ignored("Accelerator", f"only 'fp16' scales losses, {now}", kwargs_handlers=handlers.grad_scaler)
    if word not in _NAMES:
        why = f"only {messages.names(_NAMES, 'and')} use autocast, {now}"
        messages.ignored("Accelerator", why, kwargs_handlers=handlers.autocast)
    if handlers.float8 is not None and word != "fp8":
        raise ValueError(
            f"{type(handlers.float8).__name__} has no effect with mixed_precision={word or 'no'!r}. Set "
            f"mixed_precision='fp8', or leave {type(handlers.float8).__name__} out."
        )


def _sixteen_bits(plugin: DeepSpeedPlugin, word: str | None) -> str | None:
    """Return DeepSpeed's own 16-bit mode, or None if none is enabled. Raise an error if ``word`` contradicts that."""
    config = plugin.read()
    found = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)
    if found is None:
        return None
    if word not in (None, found):
        raise ValueError(
            f"The DeepSpeed configuration has {found}.enabled=true, but mixed_precision is {word!r}. Leave out "
            f"mixed_precision, or remove {found!r} from the configuration."
        )
    return "bf16-true" if found == "bf16" else "16-true"
