"""From what an Accelerator was given (handlers, plugins, settings) to the one Strategy that it runs on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.amp.grad_scaler import GradScaler

from .. import messages
from ..processes.cluster_environment import Cluster, find_cluster
from ..processes.devices import count, find_kind
from ..strategies.base import Strategy
from ..strategies.choose import SEVERAL, choose_strategy, named
from ..strategies.precision import MixedPrecision, Precision
from ..strategies.precision.choose import choose_precision
from .enums import PrecisionType
from .fsdp_plugin import FullyShardedDataParallelPlugin
from .kwargs_handlers import NO_EIGHT_BITS, Handlers
from .parallelism_config import ParallelismConfig
from .plugins import DeepSpeedPlugin, given

_NAMES: dict[str, Literal["16-mixed", "bf16-mixed"]] = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class Choice:
    """What an Accelerator was given, as far as it decides the Strategy; what is None is decided by ``settings``.

    Attributes:
        handlers: from ``sort_handlers``.
        fsdp_plugin: of the Accelerator.
        deepspeed_plugin: one, or a dict with one.
        parallelism_config: of the Accelerator.
        settings: values by name; those of ``mixed_precision``, ``cpu`` and ``strategy`` include what code said.
    """

    handlers: Handlers = field(default_factory=Handlers)
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None
    parallelism_config: ParallelismConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def filled(self) -> Choice:
        """The same with plugins that the settings ask for (``use_fsdp``, ...), and their open fields decided.

        Raises:
            TypeError: a plugin is none of its class.
            ValueError: two plugins that exclude each other.
        """
        settings = self.settings
        one = self.deepspeed_plugin
        if isinstance(one, Mapping):
            one = _only(one)
        fsdp = _checked("fsdp_plugin", self.fsdp_plugin, FullyShardedDataParallelPlugin, settings, "use_fsdp")
        deepspeed = _checked("deepspeed_plugin", one, DeepSpeedPlugin, settings, "use_deepspeed")
        sizes = _checked(
            "parallelism_config", self.parallelism_config, ParallelismConfig, settings, "use_parallelism_config"
        )
        if deepspeed is not None and (fsdp is not None or sizes is not None):
            other = "fsdp_plugin" if fsdp is not None else "parallelism_config"
            raise ValueError(
                f"Accelerator(deepspeed_plugin=..., {other}=...) contradict each other: DeepSpeed spreads the model "
                "itself. Leave one out (use_deepspeed, use_fsdp and use_parallelism_config of the settings count too)."
            )
        return Choice(self.handlers, fsdp, deepspeed, sizes, settings)


def choose(choice: Choice) -> Strategy:
    """The Strategy, placed on its device but not set up yet (``setup_environment``).

    Raises:
        ValueError: an unknown word, or things that contradict each other.
        NotImplementedError: something that Paceline does not have.
    """
    choice, cluster = choice.filled(), find_cluster()
    kind = find_kind("cpu" if choice.settings.get("cpu") else "auto")
    _check_backend(choice.handlers, kind)
    strategy = choice.settings.get("strategy")
    precision = precision_of(choice, kind)
    if isinstance(strategy, Strategy):
        _refuse_options(type(strategy).__name__, _asked(choice))
        precision = None if type(precision) is Precision else precision
    else:
        strategy = by_name(strategy, choice, cluster, precision)
        precision = precision if isinstance(strategy, str) else None
    accelerator = kind if choice.settings.get("cpu") or not isinstance(strategy, Strategy) else "auto"
    if cluster is None and kind == "cuda":
        _say_unused(count("cuda"))
    return choose_strategy(strategy, accelerator, "auto" if cluster is not None else 1, precision=precision)


def by_name(
    name: str | None, choice: Choice, cluster: Cluster | None, precision: Precision | None = None, alone: bool = True
) -> Strategy | str:
    """A strategy for several processes with all that was given for it; ``"auto"`` for one process.

    Args:
        name: of the strategy; None: by what was given.
        choice: what was given, filled.
        cluster: where a launcher put this process.
        precision: of the strategy.
        alone: without a cluster there is one process; False: the strategy may start others.
    """
    fsdp, deepspeed, sizes = choice.fsdp_plugin, choice.deepspeed_plugin, choice.parallelism_config
    if sizes is not None:
        if alone or cluster is not None:
            sizes.check(cluster.world_size if cluster is not None else 1)
        if sizes.total_size == 1:
            sizes = None
    splits = sizes is not None and sizes.non_data_parallel_size > 1
    shards = fsdp is not None or (sizes is not None and sizes.dp_shard_enabled)
    wanted = "deepspeed" if deepspeed is not None else "model_parallel" if splits else "fsdp" if shards else None
    name = None if name == "auto" else name
    if name is not None and name not in SEVERAL:
        _refuse_options(repr(name), _asked(choice))
        return name
    if name is not None and wanted is not None and SEVERAL[name][:2] != SEVERAL[wanted][:2]:
        raise ValueError(
            f"strategy={name!r} contradicts {' and '.join(_asked(choice))}, which asks for {wanted!r}. Leave one out."
        )
    chosen = name or wanted or ("ddp" if cluster is not None else None)
    if chosen is None:
        return "auto"
    options = choice.handlers.process_group.options() if choice.handlers.process_group is not None else {}
    return named(chosen, precision, **options, **_own_options(chosen, choice))


def _own_options(name: str, choice: Choice) -> dict[str, Any]:
    """What the plugins and handlers say for a strategy of this name; says once which have no effect on it."""
    kind, fsdp, sizes = SEVERAL[name][1], choice.fsdp_plugin, choice.parallelism_config
    if choice.handlers.ddp is not None and kind != "DDPStrategy":
        messages.info_once(
            f"DistributedDataParallelKwargs has no effect with strategy {name!r}, which does not use "
            "DistributedDataParallel."
        )
    if kind == "DDPStrategy":
        return choice.handlers.ddp.options() if choice.handlers.ddp is not None else {}
    if isinstance(choice.deepspeed_plugin, DeepSpeedPlugin):
        return choice.deepspeed_plugin.options()
    options = fsdp.options() if fsdp is not None else {}
    if kind == "ModelParallelStrategy" and sizes is not None:
        if options.pop("sharding", None) == "hybrid":
            raise ValueError(
                "FullyShardedDataParallelPlugin(sharding_strategy='HYBRID_SHARD') with a ParallelismConfig that splits "
                "layers or sequences: write dp_replicate_size and dp_shard_size instead."
            )
        return {**options, **sizes.options()}
    if kind == "FSDPStrategy" and sizes is not None:
        replicate, shard = sizes.size("dp_replicate"), sizes.size("dp_shard")
        return {**options, "data_parallel_replicate": replicate, "data_parallel_shard": shard}
    return options


def _asked(choice: Choice) -> list[str]:
    """The arguments that say how processes share the work."""
    given_by = {
        "fsdp_plugin": choice.fsdp_plugin,
        "deepspeed_plugin": choice.deepspeed_plugin,
        "parallelism_config": choice.parallelism_config,
        "DistributedDataParallelKwargs": choice.handlers.ddp,
        "InitProcessGroupKwargs": choice.handlers.process_group,
    }
    return [name for name, value in given_by.items() if value is not None]


def _refuse_options(strategy: str, asked: list[str]) -> None:
    if asked:
        raise ValueError(
            f"{' and '.join(asked)} cannot change strategy {strategy}. Give the strategy object these arguments, or "
            "leave strategy out."
        )


def _checked(name: str, plugin: Any, kind: Any, settings: Mapping[str, Any], switch: str) -> Any:
    if plugin is None:
        return kind().filled(settings) if settings.get(switch) else None
    if not isinstance(plugin, kind):
        hint = f" Did you mean {plugin.__name__}()?" if isinstance(plugin, type) else ""
        raise TypeError(f"Accelerator({name}={plugin!r}) is {messages.a(plugin)}.{hint} Pass a {kind.__name__}.")
    return plugin.filled(settings)


def _only(plugins: Mapping[str, DeepSpeedPlugin]) -> DeepSpeedPlugin:
    if len(plugins) != 1:
        raise NotImplementedError(
            f"Accelerator(deepspeed_plugin=...) got {len(plugins)} plugins ({', '.join(map(str, plugins))}). Pass one: "
            "all prepared models share its configuration."
        )
    return next(iter(plugins.values()))


def _check_backend(handlers: Handlers, kind: str) -> None:
    group = handlers.process_group
    if group is not None and group.backend == "nccl" and kind != "cuda":
        raise ValueError(
            f"InitProcessGroupKwargs(backend='nccl'): NCCL joins CUDA devices, but this run is on {kind!r}. Leave "
            "backend out: gloo is taken on the CPU, and NCCL on GPUs."
        )


def _say_unused(present: int) -> None:
    if present > 1:
        script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "train.py"
        messages.info_once(
            f"This process uses 1 of the {present} GPUs that it sees. To use all of them: "
            f"paceline launch --num_processes {present} {script} (or torchrun --nproc-per-node {present} {script}); to "
            "leave it at one, set CUDA_VISIBLE_DEVICES=0."
        )


# ---- precision -------------------------------------------------------------------------------------------------------


def precision_of(choice: Choice, kind: str) -> Precision:
    """The Precision for ``mixed_precision`` with what the handlers say; says once which have no effect.

    Args:
        choice: what the Accelerator was given, filled.
        kind: of device.

    Raises:
        NotImplementedError: fp8.
        ValueError: an unknown word, or one that the DeepSpeed configuration contradicts.
    """
    asked = given(choice.settings, "mixed_precision")
    if isinstance(asked, Precision):
        return asked
    word = None if asked is None else str(asked).lower()
    if word == "fp8":
        raise NotImplementedError(f"Accelerator(mixed_precision='fp8'): {NO_EIGHT_BITS}")
    if isinstance(choice.deepspeed_plugin, DeepSpeedPlugin):
        true = _sixteen_bits(choice.deepspeed_plugin, word)
        if true is not None:
            return choose_precision(true, None, kind)
    scaler, autocast = choice.handlers.grad_scaler, choice.handlers.autocast
    if scaler is not None and word != "fp16":
        messages.info_once(
            f"GradScalerKwargs has no effect with mixed_precision={word or 'no'!r}: only 'fp16' scales losses."
        )
    if word in (None, "no"):
        return Precision()
    if word not in _NAMES:
        known = [name for name in PrecisionType.list() if name != "fp8"]
        raise ValueError(messages.unknown("mixed_precision", asked, known, ", or pass a Precision"))
    arguments: dict[str, Any] = {}
    if autocast is not None:
        arguments = {"autocast": autocast.enabled, "cache": autocast.cache_enabled}
    if word == "fp16" and scaler is not None:
        arguments["scaler"] = GradScaler(kind, **scaler.to_kwargs())
    return MixedPrecision(_NAMES[word], kind, **arguments)


def _sixteen_bits(plugin: DeepSpeedPlugin, word: str | None) -> str | None:
    """DeepSpeed's own 16-bit mode, if its configuration asks for one; ``word`` may only repeat it."""
    config = plugin.deepspeed_config
    found = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)
    if found is None:
        return None
    if word not in (None, found):
        raise ValueError(
            f"The DeepSpeed configuration says {found}.enabled=true, but mixed_precision is {word!r}. Leave "
            f"mixed_precision out, or {found!r} out of the configuration."
        )
    return "bf16-true" if found == "bf16" else "16-true"
