"""Create a Strategy from names, options and settings, and raise errors about invalid strategies, devices and nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, NoReturn

import torch

from .. import messages
from ..devices.kinds import kind_of
from ..processes.cluster_environment import Cluster, find_cluster
from ..processes.devices import find_devices, find_kind
from ..processes.environments import ClusterEnvironment
from ..settings import Settings
from .base import SingleDevice, Strategy
from .deepspeed.settings import DeepSpeedName
from .distributed import DistributedStrategy, check_backend
from .options import Options, options_in
from .precision.base import CLIPPING, Precision
from .precision.choose import choose_precision

ENTRY_POINTS = "paceline.strategies"

#: The built-in names, for editors and type checkers; installed packages may add others.
StrategyName = Literal[
    "auto",
    "cpu",
    "single_device",
    "ddp",
    "ddp_spawn",
    "ddp_fork",
    "ddp_notebook",
    "ddp_find_unused_parameters_true",
    "ddp_find_unused_parameters_false",
    "ddp_spawn_find_unused_parameters_true",
    "ddp_spawn_find_unused_parameters_false",
    "ddp_fork_find_unused_parameters_true",
    "ddp_fork_find_unused_parameters_false",
    "ddp_notebook_find_unused_parameters_true",
    "ddp_notebook_find_unused_parameters_false",
    "fsdp",
    "fsdp_cpu_offload",
    "hybrid_shard",
    "model_parallel",
    DeepSpeedName,
]

#: Multi-process strategies: name -> (file, class, arguments). A file is imported when its name is used.
SEVERAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("ddp", "DDPStrategy", {}),
    "ddp_spawn": ("ddp", "DDPStrategy", {"start_method": "spawn"}),
    "ddp_fork": ("ddp", "DDPStrategy", {"start_method": "fork"}),
    "ddp_notebook": ("ddp", "DDPStrategy", {"start_method": "fork"}),
    "fsdp": ("fsdp.strategy", "FSDPStrategy", {}),
    "fsdp_cpu_offload": ("fsdp.strategy", "FSDPStrategy", {"cpu_offload": True}),
    "hybrid_shard": ("fsdp.strategy", "FSDPStrategy", {"sharding": "hybrid"}),
    "model_parallel": ("model_parallel.strategy", "ModelParallelStrategy", {"tensor_parallel": "auto"}),
    "deepspeed": ("deepspeed.strategy", "DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("deepspeed.strategy", "DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_2": ("deepspeed.strategy", "DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("deepspeed.strategy", "DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("deepspeed.strategy", "DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": (
        "deepspeed.strategy",
        "DeepSpeedStrategy",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
}
SEVERAL |= {
    f"{name}_find_unused_parameters_{word}": (file, kind, {**given, "find_unused_parameters": word == "true"})
    for name, (file, kind, given) in SEVERAL.items()
    if file == "ddp"
    for word in ("true", "false")
}


@dataclass
class Added:
    """A strategy registered by the program itself; see :mod:`.registry`."""

    strategy: Callable[..., Any]
    arguments: dict[str, Any]
    description: str = ""

    def load(self) -> Callable[..., Any]:
        """Return the function that creates the strategy."""
        return partial(self.strategy, **self.arguments) if self.arguments else self.strategy


#: The registered strategies, by name.
added: dict[str, Added] = {}


def registered() -> dict[str, Any]:
    """Return a dict, by name, of the strategies that the program or an installed package has registered.

    Packages register them in the entry point group ``paceline.strategies``.
    """
    found: dict[str, Any] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"Two installed packages provide a strategy named {point.name!r}: {other.value!r} and "
                f"{point.value!r}. Uninstall one of them, or pass the Strategy object."
            )
    return found | added


def choose_strategy(
    strategy: Any = "auto",
    accelerator: Any = "auto",
    devices: Any = "auto",
    num_nodes: int = 1,
    precision: Any = None,
    plugins: Any = None,
    options: Options | None = None,
    environment: ClusterEnvironment | None = None,
) -> Strategy:
    """Return the Strategy that a Trainer's or an Accelerator's arguments select.

    The strategy is placed on its devices, but not yet set up.

    Args:
        strategy: a name, or a Strategy with its own device and precision.
        accelerator: the kind of device.
        devices: how many devices to use on this machine, or which ones.
        num_nodes: number of machines.
        precision: a name or a Precision.
        plugins: a Precision, or a list that contains one.
        options: arguments for a strategy that is chosen by name; with ``"auto"``, they also determine which strategy
            is chosen.
        environment: the ClusterEnvironment that tells a process its rank; detected automatically if None.

    Raises:
        ValueError: a name is unknown, or two arguments contradict each other.
        RuntimeError: a launcher started several processes, but the strategy runs in a single process.
    """
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise ValueError(f"Trainer: num_nodes={num_nodes!r} is not a valid number of machines. Pass 1 or more.")
    options = options or Options()
    cluster = find_cluster() if environment is None else _told(environment, accelerator, devices, num_nodes)
    if isinstance(strategy, Strategy):
        options.refuse(type(strategy).__name__)
    if isinstance(strategy, DistributedStrategy):
        kind = find_kind(accelerator)
        _fitting(_with_precision(strategy, precision, plugins, kind))
        if environment is not None:
            strategy.cluster_environment = environment
        strategy.place(_places(devices, kind, cluster), _nodes(num_nodes, cluster, strategy))
        return strategy
    if isinstance(strategy, Strategy):
        _refuse_cluster(type(strategy).__name__, cluster)
        _agree(strategy, accelerator, devices, num_nodes)
        return _fitting(_with_precision(strategy, precision, plugins, strategy.device.type))
    if not isinstance(strategy, str):
        hint = f" Did you mean {strategy.__name__}()?" if isinstance(strategy, type) else ""
        raise TypeError(
            f"Trainer: strategy={strategy!r} is {messages.a(strategy)}.{hint} Pass a name such as 'auto', or a "
            "Strategy object."
        )
    if strategy.lower() in ("auto", *SingleDevice.names, *SEVERAL):
        strategy = strategy.lower()
    kind = find_kind("cpu" if strategy == "cpu" and accelerator == "auto" else accelerator)
    if strategy == "cpu" and kind != "cpu":
        raise ValueError(
            f"Trainer: strategy='cpu' and accelerator={accelerator!r} contradict each other. Leave one out."
        )
    backend = (options.process_group or {}).get("process_group_backend")
    check_backend(backend, kind, f"{options.written.get('process_group')}(backend='nccl')")
    chosen = choose_precision(precision, plugins, kind)
    found = _fitting(_by_name(_name_for(strategy, options), kind, devices, num_nodes, chosen, options, cluster))
    if environment is not None and isinstance(found, DistributedStrategy):
        found.cluster_environment = environment
        found.place(found.devices, num_nodes)
    return found


def _told(environment: ClusterEnvironment, accelerator: Any, devices: Any, num_nodes: int) -> Cluster | None:
    """Return the cluster that this process belongs to, as described by the ClusterEnvironment that the user passed."""
    number = environment.world_size() // num_nodes if devices == "auto" else devices
    return environment.cluster(len(find_devices(number, find_kind(accelerator))), num_nodes)


def strategy_in(settings: Settings) -> Strategy | str:
    """Return the strategy, without a device, for settings such as ``use_fsdp``; ``"auto"`` if none of them is set."""
    options, cluster = options_in(settings), find_cluster()
    if cluster is not None:
        options.check_size(cluster.world_size)
    name = _name_for("auto", options)
    return name if name == "auto" else named(name, **options.arguments(name, SEVERAL[name][1]))


def named(name: str, precision: Precision | None = None, **options: Any) -> DistributedStrategy:
    """Return the strategy with this name in :data:`SEVERAL`, without a device; ``options`` override its defaults."""
    file, kind, arguments = SEVERAL[name]
    return getattr(import_module(f".{file}", __package__), kind)(precision=precision, **{**arguments, **options})


def _name_for(name: str, options: Options) -> str:
    """Return the name of the strategy that satisfies both the given name and the options."""
    wanted = options.wanted
    if name == "auto":
        return wanted or "auto"
    if name not in SEVERAL:
        options.refuse(repr(name))
    elif wanted is not None and SEVERAL[name][:2] != SEVERAL[wanted][:2]:
        raise ValueError(f"strategy={name!r} contradicts {options.given}, which needs {wanted!r}. Leave one out.")
    return name


def _by_name(
    name: str, kind: str, devices: Any, num_nodes: int, precision: Precision, options: Options, cluster: Cluster | None
) -> Strategy:
    made = _make(name, precision, options)
    if made is SingleDevice and name != "auto":
        _refuse_cluster(repr(name), cluster)
    one_device = made is SingleDevice and name != "auto" and devices == "auto"
    found = find_devices(1, kind) if one_device else _places(devices, kind, cluster)
    options.check_size(cluster.world_size if cluster is not None else len(found) * num_nodes)
    several = len(found) * num_nodes > 1 or cluster is not None
    if made is SingleDevice and several:
        if name != "auto":
            raise ValueError(
                f"Trainer: strategy={name!r}, devices={devices!r} and num_nodes={num_nodes} contradict each other, "
                "because this strategy uses one device. Leave one of them out."
            )
        made = _make("ddp", precision, options)
    if isinstance(made, DistributedStrategy):
        made.place(found, _nodes(num_nodes, cluster, made, name))
        return made
    if len(found) > 1 or num_nodes > 1:
        strategy = getattr(made, "__name__", made)
        raise ValueError(
            f"Trainer(strategy={name!r}, devices={devices!r}, num_nodes={num_nodes}): {strategy} runs "
            "in a single process. Derive your class from paceline.strategies.DistributedStrategy, or leave devices and "
            "num_nodes out."
        )
    return _checked(made(found[0], precision), made)


def _make(strategy: str, precision: Precision, options: Options) -> Any:
    """Return a DistributedStrategy without a device, or a function that creates one from a device and a precision."""
    if strategy in ("auto", *SingleDevice.names):
        return SingleDevice
    if strategy in SEVERAL:
        return named(strategy, precision, **options.arguments(strategy, SEVERAL[strategy][1]))
    others = registered()
    if strategy in others:
        made = others[strategy].load()
        kind = made.func if isinstance(made, partial) else made
        if isinstance(kind, type) and issubclass(kind, DistributedStrategy):
            return made(precision=precision)
        return made
    if strategy == "dp":
        raise ValueError(
            "Trainer(strategy='dp') is not supported, because DataParallel copies the model in every step, which is "
            "slower than using one process per device. Use strategy='ddp'."
        )
    if "xla" in strategy or "tpu" in strategy:
        raise ValueError(
            f"Trainer(strategy={strategy!r}): a TPU is a device in Paceline, not a strategy. Choose "
            "accelerator='tpu', and strategy='auto', 'ddp' or 'fsdp'."
        )
    known = ("auto", *SingleDevice.names, *SEVERAL, *others)
    raise ValueError(messages.unknown("strategy", strategy, known, ", or pass a Strategy"))


# ---- devices and machines --------------------------------------------------------------------------------------------


def _places(devices: Any, kind: str, cluster: Cluster | None) -> list[torch.device]:
    """Return the devices for this machine's processes, one per process."""
    if cluster is None:
        return find_devices(devices, kind)
    started = cluster.local_world_size
    if kind_of(kind).one_per_process and devices == started:
        devices = "auto"
    if devices != "auto" or not kind_of(kind).is_numbered:
        found = find_devices(started if devices == "auto" else devices, kind)
        if len(found) != started and devices != -1:
            raise ValueError(
                f"Trainer(devices={devices!r}) needs one process per device on this machine ({len(found)} in total), "
                f"but {cluster.name} started {started}. Leave devices out, or start one process per device."
            )
        return found
    present = kind_of(kind).count()
    return find_devices(1 if present == 1 else started, kind)  # if 1, each process sees only its own device


def _nodes(num_nodes: int, cluster: Cluster | None, strategy: DistributedStrategy, name: str = "") -> int:
    if num_nodes == 1:
        return cluster.num_nodes if cluster else 1
    if cluster is None:
        if strategy.start_method not in ("auto", "popen"):
            _refuse_machines(num_nodes, strategy, name)
        return num_nodes
    if num_nodes != cluster.num_nodes:
        raise ValueError(
            f"Trainer(num_nodes={num_nodes}) contradicts {cluster.name}, which started processes on "
            f"{cluster.num_nodes} machines. Leave num_nodes out, or start processes on {num_nodes} machines."
        )
    return num_nodes


def _refuse_machines(num_nodes: int, strategy: DistributedStrategy, name: str) -> NoReturn:
    """Raise an error, because only a launcher can start processes on other machines."""
    kind, method = type(strategy).__name__, strategy.start_method
    said = f"strategy={name!r}" if name in SEVERAL else f"{kind}(start_method={method!r})"
    instead = (
        f"strategy={re.sub('_(spawn|fork|notebook)', '', name)!r}"
        if name in SEVERAL
        else f"{kind} without start_method"
    )
    raise ValueError(
        f"Trainer(num_nodes={num_nodes}) asks for {num_nodes} machines, but {said} starts all processes on this "
        f"machine. Run the same script on each machine with {instead}, or start the script on each machine with "
        "torchrun or `paceline launch`."
    )


def _refuse_cluster(strategy: str, cluster: Cluster | None) -> None:
    """Raise an error if a launcher started several processes, which would train alone and write the same files."""
    if cluster is not None and cluster.world_size > 1:
        raise RuntimeError(
            f"{cluster.name} started {cluster.world_size} processes (this is rank {cluster.rank}), but "
            f"Trainer(strategy={strategy}) runs in a single process. Use strategy='ddp' or 'auto', or start only one "
            f"process (if RANK={os.environ.get('RANK')} and WORLD_SIZE={os.environ.get('WORLD_SIZE')} are left over "
            "from an earlier launch, unset them)."
        )


def _agree(strategy: Strategy, accelerator: Any, devices: Any, num_nodes: int) -> None:
    """Raise an error if other arguments contradict the Strategy object that was passed."""
    name, device = type(strategy).__name__, strategy.device
    if accelerator != "auto" and find_kind(accelerator) != device.type:
        raise ValueError(
            f"Trainer(accelerator={accelerator!r}) contradicts strategy={name}(...), which is on {device}. Leave "
            "accelerator out."
        )
    if num_nodes not in (1, strategy.num_nodes):
        raise ValueError(
            f"Trainer(num_nodes={num_nodes}) contradicts strategy={name}(...), whose num_nodes is "
            f"{strategy.num_nodes}. Leave num_nodes out."
        )
    if devices == "auto":
        return
    found = find_devices(devices, device.type)
    here = strategy.world_size // strategy.num_nodes
    one_of_them = device in found or isinstance(devices, int) or (isinstance(devices, str) and "," not in devices)
    if len(found) != here or not one_of_them:
        raise ValueError(
            f"Trainer(devices={devices!r}) contradicts strategy={name}(...), which is on {device}. Leave devices out."
        )


# ---- precision and other packages ------------------------------------------------------------------------------------


def _with_precision(strategy: Strategy, precision: Any, plugins: Any, kind: str) -> Strategy:
    if precision is None and not plugins:
        return strategy
    chosen, own = choose_precision(precision, plugins, kind), strategy.precision
    if type(own) is not Precision and chosen is not own and chosen.name != own.name:
        said = "precision" if precision is not None else "plugins"
        raise ValueError(
            f"Trainer({said}={precision or plugins!r}) contradicts strategy={type(strategy).__name__}(...), "
            f"whose precision is {own.name!r}. Leave {said} out."
        )
    if type(own) is Precision or isinstance(precision, Precision) or plugins:
        chosen.use_on(torch.device(kind))
        strategy.precision = chosen
    return strategy


def _fitting(strategy: Strategy) -> Strategy:
    """Return the strategy, or raise an error if the strategy cannot use its precision.

    A strategy cannot shard weights that the precision quantizes, and must call every method that the precision
    overrides.
    """
    precision = strategy.precision
    if precision.quantizes and not strategy.holds_whole_module:
        raise ValueError(
            f"precision={precision.name!r} quantizes weights, which {type(strategy).__name__} cannot shard. Use "
            "strategy='ddp', a single device, or another precision."
        )
    owner, overrides = type(precision).__name__, precision.overrides
    refused: set[str] = set(CLIPPING) if type(strategy).clip_by_norm is not Strategy.clip_by_norm else set()
    if not strategy.steps_through_precision:
        refused.add("optimizer_step")
    for name in sorted(refused & overrides):
        raise TypeError(
            f"{owner} overrides {name}, which {type(strategy).__name__} never calls, because each process holds only "
            "part of the gradients. Override the module's configure_gradient_clipping or optimizer_step instead."
        )
    return strategy


def _checked(made: Any, maker: Any) -> Strategy:
    if not isinstance(made, Strategy):
        raise TypeError(
            f"The entry point {getattr(maker, '__qualname__', maker)!r} of group {ENTRY_POINTS!r} returned "
            f"{messages.a(made)}. The entry point must refer to a subclass of paceline.strategies.Strategy."
        )
    return made
