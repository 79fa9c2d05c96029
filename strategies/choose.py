"""Names to Strategy objects. Every error about strategy, devices and nodes is raised here."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from ..loggers import messages
from .base import Strategy
from .devices import find_devices, find_kind
from .precision.base import Precision
from .precision.choose import choose_precision
from .single_device import SingleDevice

#: Strategies for several processes, by name: recognized, and refused with a clear error. Each may have an ending.
SEVERAL = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "fsdp", "hybrid_shard", "deepspeed", "model_parallel")
ENDINGS = ("_find_unused_parameters_true", "_find_unused_parameters_false", "_cpu_offload", "_stage_", "_offload")
ENTRY_POINTS = "paceline.strategies"


def registered() -> dict[str, Any]:
    """Strategies that installed packages offer through the entry point group ``paceline.strategies``, by name."""
    found: dict[str, Any] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"Two installed packages offer a strategy {point.name!r}: {other.value!r} and {point.value!r}. "
                "Uninstall one, or pass the Strategy object."
            )
    return found


def choose_strategy(
    strategy: Any = "auto",
    accelerator: Any = "auto",
    devices: Any = "auto",
    num_nodes: int = 1,
    precision: Any = None,
    plugins: Any = None,
) -> Strategy:
    """The Strategy for a Trainer's arguments.

    Args:
        strategy: a name, or a Strategy, whose own device and precision then count.
        accelerator: kind of device.
        devices: how many or which.
        num_nodes: machines.
        precision: a name or a Precision.
        plugins: a Precision, or a list with one.

    Raises:
        ValueError: an unknown name or a contradiction.
        NotImplementedError: more than one process.
    """
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise ValueError(f"Trainer(num_nodes={num_nodes!r}) is not a number of machines. Pass 1 or more.")
    if isinstance(strategy, Strategy):
        _agree(strategy, accelerator, devices, num_nodes)
        return _with_precision(strategy, precision, plugins)
    if not isinstance(strategy, str):
        hint = f" Did you mean {strategy.__name__}()?" if isinstance(strategy, type) else ""
        raise TypeError(
            f"Trainer(strategy={strategy!r}) is a {type(strategy).__name__}.{hint} Pass a name such as 'auto', or a "
            "Strategy object."
        )
    kind = find_kind("cpu" if strategy == "cpu" and accelerator == "auto" else accelerator)
    if strategy == "cpu" and kind != "cpu":
        raise ValueError(
            f"Trainer(strategy='cpu', accelerator={accelerator!r}) contradict each other. Leave one of them out."
        )
    chosen = choose_precision(precision, plugins, kind)
    point = _entry_point(strategy)
    found = find_devices(1 if devices == "auto" and not _for_several(strategy) else devices, kind)
    if strategy in SingleDevice.names and len(found) > 1:
        raise ValueError(
            f"Trainer(strategy={strategy!r}, devices={devices!r}) contradict each other: that strategy has one device. "
            "Leave one of them out."
        )
    if point is None or len(found) > 1 or num_nodes > 1:
        _refuse_several(strategy, devices, len(found), num_nodes)
    return SingleDevice(found[0], chosen) if point is None else _from_entry_point(point, found[0], chosen)


def _entry_point(strategy: str) -> Any:
    """What an installed package offers under a name; None for the names that are ours."""
    if strategy in ("auto", *SingleDevice.names):
        return None
    others = registered()
    if strategy in others:
        return others[strategy]
    if strategy == "dp":
        raise ValueError(
            "Trainer(strategy='dp'): DataParallel copies the model every step and is slower than one process per "
            "device. Write strategy='ddp'."
        )
    if "xla" in strategy or "tpu" in strategy:
        raise ValueError(
            f"Trainer(strategy={strategy!r}): Paceline runs on what torch itself drives, not on XLA devices. Choose "
            "'auto' for the best device of this machine."
        )
    if not _for_several(strategy):
        known = ("auto", *SingleDevice.names, *SEVERAL, *others)
        raise ValueError(messages.unknown("strategy", strategy, known, ", or pass a Strategy"))
    return None


def _for_several(strategy: str) -> bool:
    return strategy in SEVERAL or any(strategy.startswith(name + ending) for name in SEVERAL for ending in ENDINGS)


def _refuse_several(strategy: str, devices: Any, count: int, num_nodes: int) -> None:
    if not _for_several(strategy) and count == 1 and num_nodes == 1:
        return
    asked = (
        f"strategy={strategy!r}"
        if _for_several(strategy)
        else f"devices={devices!r}"
        if count > 1
        else f"num_nodes={num_nodes}"
    )
    raise NotImplementedError(
        f"Trainer({asked}) needs several processes, which this version of Paceline does not start yet. "
        "Use strategy='auto' with devices=1 and num_nodes=1."
    )


def _agree(strategy: Strategy, accelerator: Any, devices: Any, num_nodes: int) -> None:
    """What a Strategy object brings may be repeated in other arguments, but not contradicted."""
    name, device = type(strategy).__name__, strategy.device
    if accelerator != "auto" and find_kind(accelerator) != device.type:
        raise ValueError(
            f"Trainer(accelerator={accelerator!r}) contradicts the {name} it was given, which is on {device}. Leave "
            "accelerator out."
        )
    if num_nodes not in (1, strategy.num_nodes):
        raise ValueError(
            f"Trainer(num_nodes={num_nodes}) contradicts the {name} it was given, which has {strategy.num_nodes}. "
            "Leave num_nodes out."
        )
    if devices == "auto":
        return
    found = find_devices(devices, device.type)
    here = strategy.world_size // strategy.num_nodes
    one_of_them = device in found or (isinstance(devices, (int, str)) and not _lists(devices))
    if len(found) != here or not one_of_them:
        raise ValueError(
            f"Trainer(devices={devices!r}) contradicts the {name} it was given, which is on {device}. "
            "Leave devices out."
        )


def _lists(devices: int | str) -> bool:
    return isinstance(devices, str) and "," in devices


def _with_precision(strategy: Strategy, precision: Any, plugins: Any) -> Strategy:
    if precision is None and not plugins:
        return strategy
    chosen, own = choose_precision(precision, plugins, strategy.device.type), strategy.precision
    if type(own) is not Precision and chosen is not own and chosen.name != own.name:
        said = "precision" if precision is not None else "plugins"
        raise ValueError(
            f"Trainer({said}={precision or plugins!r}) contradicts the {type(strategy).__name__} it was given, whose "
            f"precision is {own.name!r}. Leave {said} out."
        )
    if type(own) is Precision or isinstance(precision, Precision) or plugins:
        chosen.use_on(strategy.device)
        strategy.precision = chosen
    return strategy


def _from_entry_point(point: Any, device: Any, precision: Precision) -> Strategy:
    made = point.load()(device, precision)
    if not isinstance(made, Strategy):
        raise TypeError(
            f"The entry point {point.value!r} of group {ENTRY_POINTS!r} gave a {type(made).__name__} for strategy "
            f"{point.name!r}. It must name a subclass of paceline.strategies.Strategy."
        )
    return made
