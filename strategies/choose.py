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

#: Strategies for several processes, by name: recognized, and refused with a clear error.
SEVERAL = (
    "ddp",
    "ddp_spawn",
    "ddp_fork",
    "ddp_notebook",
    "ddp_find_unused_parameters_true",
    "ddp_find_unused_parameters_false",
    "fsdp",
    "fsdp_cpu_offload",
    "hybrid_shard",
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "model_parallel",
)
ENTRY_POINTS = "paceline.strategies"


def registered() -> dict[str, Any]:
    """Strategies that installed packages offer through the entry point group ``paceline.strategies``, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


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
    if isinstance(strategy, Strategy):
        return _given(strategy, accelerator, precision, plugins)
    if not isinstance(strategy, str):
        raise TypeError(
            f"Trainer(strategy={strategy!r}) is a {type(strategy).__name__}. Pass a name such as 'auto', or a "
            "Strategy object."
        )
    kind = find_kind("cpu" if strategy == "cpu" and accelerator == "auto" else accelerator)
    if strategy == "cpu" and kind != "cpu":
        raise ValueError(
            f"Trainer(strategy='cpu', accelerator={accelerator!r}) contradict each other. Leave one of them out."
        )
    chosen = choose_precision(precision, plugins, kind)
    others = registered()
    if strategy in others:
        return _from_entry_point(others[strategy], find_devices(devices, kind), chosen)
    if strategy == "dp":
        raise ValueError(
            "Trainer(strategy='dp'): DataParallel copies the model every step and is slower than one process per "
            "device. "
            "Write strategy='ddp'."
        )
    known = ("auto", *SingleDevice.names, *SEVERAL, *others)
    if strategy not in known:
        raise ValueError(messages.unknown("strategy", strategy, known, ", or pass a Strategy"))
    found = find_devices(_one_if_auto(devices, strategy), kind)
    _refuse_several(strategy, devices, len(found), num_nodes)
    return SingleDevice(found[0], chosen)


def _one_if_auto(devices: Any, strategy: str) -> Any:
    """``devices="auto"`` with a strategy for one device means one."""
    return 1 if devices == "auto" and strategy not in SEVERAL else devices


def _refuse_several(strategy: str, devices: Any, count: int, num_nodes: int) -> None:
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ValueError(f"Trainer(num_nodes={num_nodes!r}) is not a number of machines. Pass 1 or more.")
    if strategy not in SEVERAL and count == 1 and num_nodes == 1:
        return
    asked = (
        f"strategy={strategy!r}"
        if strategy in SEVERAL
        else f"devices={devices!r}"
        if count > 1
        else f"num_nodes={num_nodes}"
    )
    raise NotImplementedError(
        f"Trainer({asked}) needs several processes, which this version of Paceline does not start yet. "
        "Use strategy='auto' with devices=1."
    )


def _given(strategy: Strategy, accelerator: Any, precision: Any, plugins: Any) -> Strategy:
    if accelerator != "auto" and find_kind(accelerator) != strategy.device.type:
        raise ValueError(
            f"Trainer(accelerator={accelerator!r}) contradicts the {type(strategy).__name__} it was given, which is on "
            f"{strategy.device}. Leave accelerator out."
        )
    if precision is not None or plugins:
        strategy.precision = choose_precision(precision, plugins, strategy.device.type)
    return strategy


def _from_entry_point(point: Any, found: list[Any], precision: Precision) -> Strategy:
    made = point.load()(found[0], precision)
    if not isinstance(made, Strategy):
        raise TypeError(
            f"The entry point {point.value!r} of group {ENTRY_POINTS!r} gave a {type(made).__name__} for strategy "
            f"{point.name!r}. It must name a subclass of paceline.strategies.Strategy."
        )
    return made
