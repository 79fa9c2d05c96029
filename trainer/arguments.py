"""What ``Trainer(...)`` and its methods accept: every check of a value, and of values that contradict each other."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from numbers import Integral
from typing import TYPE_CHECKING, Any, Concatenate, Literal

import torch
from typing_extensions import ParamSpec

from .. import messages
from ..callbacks.timer import to_timedelta
from ..checkpoint import storage
from ..strategies.compile_networks import SCOPES, scope_of

if TYPE_CHECKING:
    from .trainer import Request

P = ParamSpec("P")
ClipAlgorithm = Literal["norm", "value"]

#: Arguments of other versions of Lightning's Trainer, and where what they did is done here.
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
    "model_registry": "a path in ckpt_path=, where the file lies",
}
#: The variables of Lightning that give arguments which code leaves out: PL_TRAINER_MAX_EPOCHS=3.
VARIABLE_PREFIX = "PL_TRAINER_"
#: Arguments that settings stand for; None and "auto" count as left out.
SETTLED = ("accelerator", "strategy", "precision", "accumulate_grad_batches", "compile")
SWITCHES = (
    "inference_mode",
    "use_distributed_sampler",
    "detect_anomaly",
    "barebones",
    "sync_batchnorm",
    "enable_autolog_hparams",
)
SWITCHES_OR_NONE = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "benchmark")


@functools.cache
def defaults(init: Callable[..., None]) -> dict[str, Any]:
    """What the arguments of a constructor are when they are left out."""
    parameters = inspect.signature(init).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def with_variables(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Have a constructor take arguments that its caller leaves out from variables ``PL_TRAINER_<ARGUMENT>``.

    The object's ``_from_variables`` has the variable of each argument that came from one when the constructor runs.
    """
    known = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def filled(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        found = from_variables(known, kwargs)
        self._from_variables = {name: VARIABLE_PREFIX + name.upper() for name in found}
        init(self, *args, **{**kwargs, **found})  # type: ignore[arg-type]

    return filled


def from_variables(known: Collection[str], passed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that variables give and code does not; a variable of none of the ``known`` names is warned of."""
    left_open = {name for name in SETTLED if passed.get(name) is None or passed[name] == "auto"}
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or not text:
            continue
        name = variable.removeprefix(VARIABLE_PREFIX).lower()
        if name.startswith("_"):  # PL_TRAINER__MAX_EPOCHS is an argument of a TrainerCLI
            continue
        if name not in known:
            meant = f" Use {MOVED[name]}." if name in MOVED else messages.did_you_mean(name, known)
            messages.warn_once(
                f"The environment variable {variable} has no effect: Trainer has no argument {name!r}.{meant}"
            )
        elif name not in passed or name in left_open:
            found[name] = text
            with contextlib.suppress(Exception):  # it is a word, no number: taken as it is
                found[name] = ast.literal_eval(text)
    return found


# ---- single values ---------------------------------------------------------------------------------------------------


def check_limit(name: str, value: Any) -> int | float:
    """A number of batches (int) or a share of them (float from 0 to 1); None means all."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (Integral, float)):
        raise TypeError(f"Trainer({name}={value!r}) is {messages.a(value)}. Pass a number of batches or a fraction.")
    if not float(value) >= 0 or (isinstance(value, float) and value > 1):
        raise ValueError(
            f"Trainer({name}={value!r}) is out of range. Pass an int of 0 or more (batches) or a float from 0.0 to 1.0 "
            "(share of the batches)."
        )
    return value if isinstance(value, float) else int(value)


def check_count(
    name: str, value: Any, least: int = 0, none: bool = False, unlimited: bool = False, hint: str = ""
) -> Any:
    """A whole number of at least ``least``; also None or -1 (no limit) where those are allowed."""
    if value is None and none:
        return None
    allowed = (
        f"an integer of {least} or more" + (", -1 for no limit" if unlimited else "") + (", or None" if none else "")
    )
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"Trainer({name}={value!r}) is {messages.a(value)}. Pass {allowed}.{hint}")
    if value < least and not (unlimited and value == -1):
        raise ValueError(f"Trainer({name}={value!r}) is out of range. Pass {allowed}.{hint}")
    return int(value)


def check_accumulation(value: Any) -> int:
    """Micro-batches an update."""
    hint = " To change it during the training use GradientAccumulationScheduler." if isinstance(value, Mapping) else ""
    return check_count("accumulate_grad_batches", value, least=1, hint=hint)


def check_fast_dev_run(value: Any) -> int | bool:
    """A number of batches of each kind; True means one."""
    if not isinstance(value, (bool, Integral)):
        raise TypeError(f"Trainer(fast_dev_run={value!r}) is {messages.a(value)}. Pass True, or a number of batches.")
    if value < 0:
        raise ValueError(f"Trainer(fast_dev_run={value!r}) is out of range. Pass True, or a number of batches.")
    return value if isinstance(value, bool) else int(value)


def check_val_interval(value: Any, every_n_epochs: int | None) -> tuple[int | float, float | None]:
    """``val_check_interval`` as (batches or fraction, seconds or None)."""
    if value is None:
        value = 1.0
    if isinstance(value, (str, timedelta, Mapping)):
        seconds = to_timedelta(value, "Trainer(val_check_interval=)").total_seconds()
        if seconds == 0:
            raise ValueError(f"Trainer(val_check_interval={value!r}) is no time at all. Pass one longer than zero.")
        return 1.0, seconds
    if isinstance(value, bool) or not isinstance(value, (Integral, float)):
        raise TypeError(
            f"Trainer(val_check_interval={value!r}) is {messages.a(value)}. Pass a fraction of an epoch "
            "(float), a number of batches (int), or a duration."
        )
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"Trainer(val_check_interval={value}) is out of range. Pass a float in (0.0, 1.0], or an int.")
    if isinstance(value, Integral) and value < 1:
        raise ValueError(f"Trainer(val_check_interval={value}) is out of range. Pass 1 or more batches.")
    if every_n_epochs is None and isinstance(value, float):
        raise ValueError(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={value}): without an epoch to take a fraction "
            "of, pass val_check_interval as a number of batches (int) or a duration."
        )
    return value if isinstance(value, float) else int(value), None


def check_clipping(value: Any, algorithm: str | None) -> None:
    """``gradient_clip_val`` is a positive number or None, the algorithm "norm" or "value"."""
    wrong = isinstance(value, bool) or not isinstance(value, (Integral, float)) or not float(value) > 0
    if value is not None and wrong:
        raise ValueError(
            f"Trainer(gradient_clip_val={value!r}) is not a positive number. Pass one, or None to leave gradients."
        )
    if algorithm not in (None, "norm", "value"):
        raise ValueError(messages.unknown("gradient_clip_algorithm", algorithm, ("norm", "value")))
    if value is None and algorithm is not None:
        raise ValueError(
            f"Trainer(gradient_clip_algorithm={algorithm!r}) without gradient_clip_val clips nothing. Pass "
            "gradient_clip_val too."
        )


def check_folder(name: str, value: Any) -> str:
    """A folder, absolute, or an address; the working directory for None."""
    if value is None:
        return os.getcwd()
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"Trainer({name}={value!r}) is {messages.a(value)}. Pass the path of a folder.")
    path = os.fspath(value)
    if not path:
        raise ValueError(
            f"Trainer({name}={path!r}) names no folder. Pass the path of a folder, or None for the working directory."
        )
    if os.path.isfile(path):
        raise ValueError(
            f"Trainer({name}={path!r}) is a file, so nothing can be put into it. Pass the path of a folder."
        )
    return storage.absolute(value)


def check_compile(value: Any) -> None:
    """A switch, what to compile, or a dict of arguments that ``torch.compile`` has."""
    if not isinstance(value, (bool, str, Mapping)):
        raise TypeError(
            f"Trainer(compile={value!r}) is {messages.a(value)}. Pass True, 'step', 'graphs', or a dict of "
            "arguments for torch.compile such as {'mode': 'max-autotune'}."
        )
    scope = scope_of(value)
    if scope is not None and scope not in SCOPES:
        dicts = ", or True, or a dict of arguments for torch.compile such as {'scope': 'step', 'mode': 'max-autotune'}"
        raise ValueError(messages.unknown("value for Trainer(compile=):", scope, SCOPES, dicts))
    if not isinstance(value, Mapping):
        return
    known = [p for p in inspect.signature(torch.compile).parameters if p != "model"]
    for name in value:
        if name not in (*known, "scope"):
            raise ValueError(messages.unknown("argument of torch.compile in Trainer(compile=):", name, known))
    _check_whole(value, scope)


def _check_whole(value: Mapping[str, Any], scope: str | None) -> None:
    """Arguments for ``torch.compile`` that a step compiled as a whole does not go with."""
    if scope in ("step", "graphs") and value.get("fullgraph") is False:
        raise ValueError(
            f"Trainer(compile={value!r}): a step compiled as a whole is one graph. Leave fullgraph out, or the scope."
        )
    if scope == "step" and value.get("mode") == "reduce-overhead":
        raise ValueError(
            f"Trainer(compile={value!r}): what mode='reduce-overhead' makes are CUDA graphs. Use compile='graphs'."
        )
    graphs = {"mode": ("reduce-overhead", "max-autotune"), "backend": ("inductor",), "options": (None,)}
    for name, allowed in graphs.items() if scope == "graphs" else ():
        if value.get(name, allowed[0]) not in allowed:
            fix = f"Pass {' or '.join(map(repr, allowed))}, or leave it out" if allowed[0] else "Leave it out"
            raise ValueError(f"Trainer(compile={value!r}): {name}={value[name]!r} makes no CUDA graph. {fix}.")


def check_switches(given: Mapping[str, Any]) -> None:
    """What is on or off is a bool, or None where the default depends on something else."""
    for name in (*SWITCHES, *SWITCHES_OR_NONE):
        value = given[name]
        if isinstance(value, bool) or (value is None and name in SWITCHES_OR_NONE):
            continue
        hint = (
            " Pass the callback itself in callbacks=[...]." if name.startswith("enable_") and value is not None else ""
        )
        raise TypeError(f"Trainer({name}={value!r}) is {messages.a(value)}. Pass True or False.{hint}")
    deterministic = given["deterministic"]
    if not (deterministic is None or isinstance(deterministic, bool) or deterministic == "warn"):
        raise ValueError(messages.unknown("value for deterministic:", deterministic, ("warn",), ", or True or False"))


# ---- values together -------------------------------------------------------------------------------------------------


def check_flags(given: Mapping[str, Any]) -> None:
    """Options that exclude each other."""
    check_switches(given)
    check_compile(given["compile"])
    if given["deterministic"] and given["benchmark"]:
        raise ValueError(
            f"Trainer(deterministic={given['deterministic']!r}, benchmark=True) contradict each other: benchmarking "
            "picks kernels by their speed in this run. Leave one out."
        )
    if given["overfit_batches"]:
        both = ("fast_dev_run", "limit_train_batches", "limit_val_batches")
        for name in both:
            if given[name]:
                raise ValueError(
                    f"Trainer(overfit_batches={given['overfit_batches']!r}, {name}={given[name]!r}) contradict each "
                    "other: both say how many batches there are. Leave one out."
                )
    for unit in () if given["fast_dev_run"] else ("epochs", "steps"):
        least, most = given[f"min_{unit}"], given[f"max_{unit}"]
        if least is not None and most not in (None, -1) and least > most:
            raise ValueError(
                f"Trainer(min_{unit}={least}, max_{unit}={most}) contradict each other. Raise max_{unit} or lower "
                f"min_{unit}."
            )
    if given["barebones"]:
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
        more = ("fast_dev_run", "detect_anomaly", "log_every_n_steps")
        check_barebones({name: given[name] for name in (*off, *more)})


def check_barebones(given: Mapping[str, Any]) -> None:
    """``barebones=True`` and what it switches off may not be asked for together."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"Trainer(barebones=True, {name}={value!r}) contradict each other: barebones switches that off to "
                f"measure the bare loop. Leave {name} out, or barebones."
            )


# ---- entry points ----------------------------------------------------------------------------------------------------


def check_request(running: str | None, request: Request, ckpt_path: Any) -> None:
    """What can be said about a call of an entry point before anything is done.

    Args:
        running: the entry point that is running, None if none is.
        request: what the call asks for.
        ckpt_path: the checkpoint that the trainer was told to load.
    """
    name, path = f"Trainer.{request.fn}", request.ckpt_path or ckpt_path
    if running is not None:
        raise RuntimeError(
            f"{name}() was called while {running} is running, but a Trainer makes one run at a time. Call it after "
            f"{running}, or use another Trainer."
        )
    if request.weights_only is False and path is not None:
        raise ValueError(
            f"{name}(weights_only=False) asks to run code that the file {str(path)!r} may hold; Paceline loads data "
            "alone. Leave it out, and declare types of your own with torch.serialization.add_safe_globals."
        )
    if request.ckpt_path is not None and not isinstance(request.ckpt_path, (str, os.PathLike, storage.Remote)):
        raise TypeError(
            f"{name}(ckpt_path={request.ckpt_path!r}) is {messages.a(request.ckpt_path)}. Pass the path of a "
            "checkpoint, 'best', 'last' or 'auto'."
        )
