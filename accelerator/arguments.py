"""Reads the arguments of ``Accelerator(...)`` together with settings from other sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import messages
from ..settings import Settings, if_set, resolve
from ..strategies.base import Strategy
from ..strategies.precision.base import Precision
from .kwargs_handlers import sort_handlers
from .loaders import DataLoaderConfiguration
from .plugins import DeepSpeedPlugin, ProjectConfiguration, TorchDynamoPlugin, choose_accumulation, choose_dynamo
from .process_state import stays_on_cpu
from .random_seeds import kinds
from .strategy_options import Choice, choose

#: Arguments that are also settings with the same name.
_SETTINGS = (
    "mixed_precision",
    "gradient_accumulation_steps",
    "cpu",
    "split_batches",
    "dynamo_backend",
    "log_with",
    "project_dir",
    "strategy",
    "scheduler_steps",
    "output_dtype",
)
_LOADERS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "data_seed", "non_blocking")


@dataclass
class Arguments:
    """The arguments of an Accelerator, with defaults from the settings.

    Attributes:
        shards: whether the strategy replaces parameters with shards.
        clip_norm: norm that optimizers clip gradients to at each step; None means no clipping.
    """

    settings: Settings
    choice: Choice
    strategy: Strategy
    shards: bool
    accumulation: dict[str, Any]
    clip_norm: float | None
    dynamo: TorchDynamoPlugin
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    log_with: Any
    rng_types: Sequence[str]

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins in use, by name."""
        choice = self.choice
        return {
            "deepspeed_plugin": choice.deepspeed_plugin,
            "fsdp_plugin": choice.fsdp_plugin,
            "dynamo_plugin": self.dynamo,
            "parallelism_config": choice.parallelism_config,
        }


def read_arguments(**arguments: Any) -> Arguments:
    """Read the arguments of ``Accelerator(...)``."""
    if arguments["megatron_lm_plugin"] is not None:
        raise NotImplementedError(
            "Accelerator(megatron_lm_plugin=...) is not supported, because Paceline splits models with torch itself. "
            "Use parallelism_config=ParallelismConfig(tp_size=...) or strategy='fsdp'."
        )
    precision = arguments["mixed_precision"]
    own = {name: arguments[name] for name in _SETTINGS}
    own["mixed_precision"] = None if isinstance(precision, Precision) else _word(precision)
    own["dynamo_backend"] = _word(_one_of_two(arguments, "dynamo_backend", "dynamo_plugin"))
    if arguments["dataloader_config"] is not None:
        _one_of_two(arguments, "split_batches", "dataloader_config")
    if own["cpu"] is None and stays_on_cpu():
        own["cpu"] = True
    project = _project(arguments)
    own["project_dir"] = project.project_dir
    settings = resolve(own)
    values = dict(settings) | {"mixed_precision": precision} if isinstance(precision, Precision) else settings
    deepspeed = _one_of_two(arguments, "deepspeed_plugin", "deepspeed_plugins")
    choice = Choice(
        sort_handlers(arguments["kwargs_handlers"]),
        arguments["fsdp_plugin"],
        deepspeed if deepspeed is not None else arguments["deepspeed_plugins"],
        arguments["parallelism_config"],
        values,
    ).filled()
    strategy = choose(choice)
    plugin = choice.deepspeed_plugin if isinstance(choice.deepspeed_plugin, DeepSpeedPlugin) else None
    if project.project_dir is None:
        project.set_directories(settings["project_dir"])
    return Arguments(
        settings=settings,
        choice=choice,
        strategy=strategy,
        shards=_shards(strategy),
        accumulation=choose_accumulation(arguments["gradient_accumulation_plugin"], settings, plugin),
        clip_norm=None if plugin is None else plugin.decided("gradient_clipping"),
        dynamo=choose_dynamo(arguments["dynamo_plugin"], settings),
        dataloader_config=_loaders(arguments["dataloader_config"], settings),
        project_configuration=project,
        log_with=settings["log_with"],
        rng_types=_random_kinds(arguments["rng_types"]),
    )


def _random_kinds(given: Sequence[Any] | None) -> list[str]:
    found = [str(getattr(kind, "value", kind)) for kind in given or ()]
    for kind in found:
        if kind not in kinds():
            raise ValueError(messages.unknown("Accelerator(rng_types=[...]) entry", kind, kinds()))
    return found


def _word(value: Any) -> str | None:
    """Return a string, or an enum member's value, in lowercase."""
    return None if value is None else str(getattr(value, "value", value)).lower()


def _one_of_two(arguments: Mapping[str, Any], name: str, other: str) -> Any:
    if arguments[name] is not None and arguments[other] is not None:
        raise ValueError(
            f"Accelerator: {name}={arguments[name]!r} and {other}={arguments[other]!r} are two ways to set the "
            "same option. Leave one out."
        )
    return arguments[name]


def _project(arguments: Mapping[str, Any]) -> ProjectConfiguration:
    config, folder = arguments["project_config"], arguments["project_dir"]
    if config is None:
        return ProjectConfiguration(project_dir=folder)
    if not isinstance(config, ProjectConfiguration):
        raise TypeError(
            f"Accelerator: project_config={config!r} is {messages.a(config)}. Pass a ProjectConfiguration, or only "
            "the folder as project_dir=..."
        )
    if folder is not None:
        if config.project_dir is not None and str(config.project_dir) != str(folder):
            raise ValueError(
                f"Accelerator: project_dir={str(folder)!r} contradicts project_config, whose project_dir is "
                f"{config.project_dir!r}. Leave one out."
            )
        config.set_directories(folder)
    return config


def _shards(strategy: Strategy) -> bool:
    if getattr(strategy, "splits_batches", False) and type(strategy).splits_batches:
        raise NotImplementedError(
            f"Accelerator does not support {type(strategy).__name__}, because a pipeline interleaves the forward and "
            "backward passes of many micro-batches, which your own loop cannot do. Use Trainer(strategy=...), or shard "
            "the model with strategy='fsdp'."
        )
    return bool(strategy.communicates_forward)


def _loaders(config: Any, settings: Settings) -> DataLoaderConfiguration:
    if config is not None and not isinstance(config, DataLoaderConfiguration):
        raise TypeError(
            f"Accelerator: dataloader_config={config!r} is {messages.a(config)}. Pass a DataLoaderConfiguration."
        )
    if config is not None:
        return config
    found = {name: if_set(settings, name) for name in (*_LOADERS, "use_stateful_dataloader")}
    return DataLoaderConfiguration(**{name: value for name, value in found.items() if value is not None})
