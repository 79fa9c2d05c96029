"""Check the arguments of ``Trainer(...)`` and of its entry points, individually and in combination."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal, TypeVar

import torch

from .. import messages, profilers
from ..callbacks.timer import to_timedelta
from ..checkpoint import storage
from ..checkpoint.restore import PARTS
from ..profilers.base import PassThroughProfiler, Profiler
from ..strategies.compile_networks import SCOPES, scope_of
from .states import TrainerFn

T = TypeVar("T")
ClipAlgorithm = Literal["norm", "value"]
ProfilerName = Literal["simple", "advanced", "pytorch", "doctor"]
#: Class names of the profilers that can be chosen by name.
PROFILERS = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
    "doctor": "Doctor",
}

#: Arguments of other versions of Lightning's Trainer, and their replacements.
MOVED = {
    "gpus": "accelerator='gpu', devices=...",
    "tpu_cores": "accelerator=",
    "num_processes": "accelerator='cpu', devices=...",
    "checkpoint_callback": "enable_checkpointing=",
    "weights_summary": "callbacks=[ModelSummary(max_depth=...)]",
    "progress_bar_refresh_rate": "callbacks=[RichProgressBar(refresh_rate=...)]",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]",
    "terminate_on_nan": "detect_anomaly=True",
    "resume_from_checkpoint": "Trainer.fit(ckpt_path=...)",
    "track_grad_norm": "a callback that reads gradients in on_before_optimizer_step",
    "multiple_trainloader_mode": "Trainer.fit(model, CombinedLoader(loaders, mode=...))",
    "model_registry": "the path of the checkpoint file in ckpt_path=",
}


# ---- single values ---------------------------------------------------------------------------------------------------


def check_limit(name: str, value: Any) -> int | float:
    """Check a batch limit and return it: a number of batches (int) or a fraction (float); None means all batches."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (Integral, float)):
        raise TypeError(f"Trainer: {name}={value!r} is {messages.a(value)}. Pass a number of batches or a fraction.")
    if not float(value) >= 0 or (isinstance(value, float) and value > 1):
        raise ValueError(
            f"Trainer: {name}={value!r} is out of range. Pass an int of 0 or more (batches) or a float from 0.0 to 1.0 "
            "(fraction of the batches)."
        )
    return value if isinstance(value, float) else int(value)


def check_count(
    name: str, value: Any, least: int = 0, none: bool = False, unlimited: bool = False, hint: str = ""
) -> Any:
    """Check that the value is an integer no smaller than ``least``, and return it.

    None is accepted only if ``none`` is set, and -1 (no limit) only if ``unlimited`` is set.
    """
    if value is None and none:
        return None
    allowed = (
        f"an integer of {least} or more" + (", -1 for no limit" if unlimited else "") + (", or None" if none else "")
    )
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"Trainer: {name}={value!r} is {messages.a(value)}. Pass {allowed}.{hint}")
    if value < least and not (unlimited and value == -1):
        raise ValueError(f"Trainer: {name}={value!r} is out of range. Pass {allowed}.{hint}")
    return int(value)


def check_accumulation(value: Any) -> int:
    """Check and return the number of micro-batches per optimizer step."""
    hint = " To change it during training, use GradientAccumulationScheduler." if isinstance(value, Mapping) else ""
    return check_count("accumulate_grad_batches", value, least=1, hint=hint)


def check_fast_dev_run(value: Any) -> int | bool:
    """Check and return the number of batches to run in each stage; True means one."""
    if not isinstance(value, (bool, Integral)):
        raise TypeError(f"Trainer: fast_dev_run={value!r} is {messages.a(value)}. Pass True, or a number of batches.")
    if value < 0:
        raise ValueError(f"Trainer: fast_dev_run={value!r} is out of range. Pass True, False, or a number of batches.")
    return bool(value) if value in (0, 1) else int(value)


def check_val_interval(value: Any, every_n_epochs: int | None) -> tuple[int | float, float | None]:
    """Check ``val_check_interval``; return the interval in batches or epochs, and in seconds if it is a duration."""
    if value is None:
        return 1.0, None
    if isinstance(value, (str, timedelta, Mapping)):
        seconds = to_timedelta(value, "Trainer(val_check_interval=)").total_seconds()
        if seconds == 0:
            raise ValueError(f"Trainer: val_check_interval={value!r} is zero. Pass a positive duration.")
        return 1.0, seconds
    if isinstance(value, bool) or not isinstance(value, (Integral, float)):
        raise TypeError(
            f"Trainer: val_check_interval={value!r} is {messages.a(value)}. Pass a fraction of an epoch "
            "(float), a number of batches (int), or a duration."
        )
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(
            f"Trainer: val_check_interval={value} is out of range. Pass a float in (0.0, 1.0] (fraction of an epoch), "
            "or an int (number of batches)."
        )
    if isinstance(value, Integral) and value < 1:
        raise ValueError(f"Trainer: val_check_interval={value} is out of range. Pass a number of at least 1.")
    if every_n_epochs is None and isinstance(value, float):
        raise ValueError(
            f"Trainer: val_check_interval={value} is a fraction of an epoch, but check_val_every_n_epoch=None counts "
            "batches across epochs. Pass val_check_interval as a number of batches (int) or a duration."
        )
    return value if isinstance(value, float) else int(value), None


def check_clipping(value: Any, algorithm: str | None) -> None:
    """Check that ``gradient_clip_val`` is positive or None, and that the algorithm is "norm", "value" or None."""
    wrong = isinstance(value, bool) or not isinstance(value, (Integral, float)) or not float(value) > 0
    if value is not None and wrong:
        raise ValueError(f"Trainer: gradient_clip_val={value!r} must be a positive number, or None for no clipping.")
    if algorithm not in (None, "norm", "value"):
        raise ValueError(messages.unknown("gradient_clip_algorithm", algorithm, ("norm", "value")))
    if value is None and algorithm is not None:
        raise ValueError(
            f"Trainer: gradient_clip_algorithm={algorithm!r} has no effect without gradient_clip_val. Pass "
            "gradient_clip_val too."
        )


def check_profiler(value: Any) -> Profiler:
    """Return the profiler, created from its name if needed; None gives a profiler that does nothing."""
    if value is None:
        return PassThroughProfiler()
    if isinstance(value, Profiler):
        return value
    if not isinstance(value, str):
        hint = f" Did you mean {value.__name__}()?" if isinstance(value, type) else ""
        raise TypeError(
            f"Trainer: profiler={value!r} is {messages.a(value)}. Pass {messages.names(PROFILERS)}, or a "
            f"Profiler.{hint}"
        )
    if value.lower() not in PROFILERS:
        raise ValueError(messages.unknown("profiler", value, PROFILERS, ", or pass a Profiler"))
    return getattr(profilers, PROFILERS[value.lower()])()


def check_folder(name: str, value: Any) -> str:
    """Check a folder and return it as an absolute path or a URL; None means the working directory."""
    if value is None:
        return os.getcwd()
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"Trainer: {name}={value!r} is {messages.a(value)}. Pass the path of a folder.")
    path = os.fspath(value)
    if not path:
        raise ValueError(
            f"Trainer: {name}={path!r} is empty. Pass the path of a folder, or None for the working directory."
        )
    if os.path.isfile(path):
        raise ValueError(f"Trainer: {name}={path!r} is a file. Pass the path of a folder.")
    return storage.absolute(value)


def check_compile(value: Any) -> Any:
    """Check ``compile``: a bool, one of :data:`SCOPES`, or a dict of arguments for ``torch.compile``."""
    if not isinstance(value, (bool, str, Mapping)):
        raise TypeError(
            f"Trainer: compile={value!r} is {messages.a(value)}. Pass True, 'step', 'graphs', or a dict of "
            "arguments for torch.compile such as {'mode': 'max-autotune'}."
        )
    scope = scope_of(value)
    if scope is not None and scope not in SCOPES:
        dicts = ", or True, or a dict of arguments for torch.compile such as {'scope': 'step', 'mode': 'max-autotune'}"
        raise ValueError(messages.unknown("Trainer(compile=...) value", scope, SCOPES, dicts))
    if not isinstance(value, Mapping):
        return value
    known = [p for p in inspect.signature(torch.compile).parameters if p != "model"]
    for name in value:
        if name not in (*known, "scope"):
            raise ValueError(f"Trainer(compile={{...}}): {messages.unknown('torch.compile argument', name, known)}")
    _check_whole(value, scope)
    return value


def _check_whole(value: Mapping[str, Any], scope: str | None) -> None:
    """Raise for ``torch.compile`` arguments that do not work when the whole step is compiled."""
    if scope in ("step", "graphs") and value.get("fullgraph") is False:
        raise ValueError(
            f"Trainer(compile={value!r}): the whole step must compile to one graph, so fullgraph cannot be False. "
            "Leave out fullgraph, or set 'scope' to 'networks'."
        )
    if scope == "step" and value.get("mode") == "reduce-overhead":
        raise ValueError(
            f"Trainer(compile={value!r}): mode='reduce-overhead' uses CUDA graphs, which the scope 'step' does not "
            "support. To run the whole step as a CUDA graph, use compile='graphs'."
        )
    graphs = {"mode": ("reduce-overhead", "max-autotune"), "backend": ("inductor",), "options": (None,)}
    for name, allowed in graphs.items() if scope == "graphs" else ():
        if value.get(name, allowed[0]) not in allowed:
            fix = f"Pass {' or '.join(map(repr, allowed))}, or leave out {name}" if allowed[0] else f"Leave out {name}"
            raise ValueError(
                f"Trainer(compile={value!r}): {name}={value[name]!r} does not create CUDA graphs, which the scope "
                f"'graphs' needs. {fix}."
            )


def check_switch(name: str, value: T, none: bool = False) -> T:
    """Check that the value is a bool and return it.

    If ``none`` is set, None is allowed too, for arguments whose default depends on other arguments.
    """
    if isinstance(value, bool) or (value is None and none):
        return value
    hint = " Pass the callback itself in callbacks=[...]." if name.startswith("enable_") and value is not None else ""
    raise TypeError(f"Trainer: {name}={value!r} is {messages.a(value)}. Pass True or False.{hint}")


# ---- combinations of values ------------------------------------------------------------------------------------------


def check_deterministic(deterministic: T, benchmark: bool | None) -> T:
    """Check that ``deterministic`` is a bool, "warn" or None, and is not combined with ``benchmark=True``."""
    if not (deterministic is None or isinstance(deterministic, bool) or deterministic == "warn"):
        raise ValueError(
            messages.unknown("Trainer(deterministic=...) value", deterministic, ("warn",), ", True or False")
        )
    if deterministic and benchmark:
        raise ValueError(
            f"Trainer: deterministic={deterministic!r} and benchmark=True contradict each other: benchmarking picks "
            "the kernels that are fastest in this run, which may differ in the next run. Leave out one of them."
        )
    return deterministic


def check_overfitting(overfit_batches: Any, **others: Any) -> None:
    """Raise if both ``overfit_batches`` and one of ``others`` set the number of batches."""
    for name, value in others.items() if overfit_batches else ():
        if value:
            raise ValueError(
                f"Trainer: overfit_batches={overfit_batches!r} and {name}={value!r} contradict each other, because "
                "both set the number of batches. Leave out one of them."
            )


def check_range(unit: str, least: int | None, most: int | None) -> None:
    """Raise if the minimum number of epochs or steps exceeds the maximum."""
    if least is not None and most not in (None, -1) and least > most:
        raise ValueError(
            f"Trainer: min_{unit}={least} and max_{unit}={most} contradict each other. Raise max_{unit} or lower "
            f"min_{unit}."
        )


def check_barebones(**given: Any) -> None:
    """Raise if ``barebones=True`` is combined with a feature that it switches off."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"Trainer: barebones=True and {name}={value!r} contradict each other, because barebones switches "
                f"{name} off to measure the bare loop. Leave out one of them."
            )


# ---- entry points ----------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """The arguments of one call to an entry point.

    Attributes:
        again: whether the run restarts from one of its own checkpoints; if so, its loggers continue their logs.
        trial: whether the request comes from a :class:`~..tuner.tuner.Tuner` and therefore loads no checkpoint.
        show_results: function that prints the results of an evaluation; called with the results and the entry point's
            name.
    """

    fn: Literal["fit", "validate", "test", "predict"] | TrainerFn
    module: Any
    datamodule: Any = None
    loaders: dict[str, Any] = field(default_factory=dict)
    ckpt_path: Any = None
    keep_predictions: bool = False
    gather: bool = False
    weights_only: bool | None = None
    restore: tuple[str, ...] = PARTS
    again: bool = False
    trial: bool = False
    show_results: Callable[[list[dict[str, float]], str], Any] | None = None


def check_request(running: str | None, request: Request) -> None:
    """Check a call to an entry point. ``running`` is the entry point that is already running, or None."""
    name = f"Trainer.{request.fn}"
    if running is not None:
        raise RuntimeError(
            f"{name}() was called while {running} is running, but a Trainer can execute only one run at a time. Call "
            f"it after {running} has ended, or use another Trainer."
        )
    if request.ckpt_path is not None and not isinstance(request.ckpt_path, (str, os.PathLike, storage.Remote)):
        raise TypeError(
            f"{name}: ckpt_path={request.ckpt_path!r} is {messages.a(request.ckpt_path)}. Pass the path of a "
            "checkpoint, 'best', 'last' or 'auto'."
        )
