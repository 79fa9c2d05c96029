"""Determine the Trainer's final arguments from code, environment variables, launch flags and the settings file."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from .. import messages
from ..callbacks.base import Callback, accumulation_of
from ..doctor.script_arguments import overruled
from ..settings import Given, Row, Settings, resolve
from ..settings.constructors import Constructor, P
from ..strategies.base import Strategy
from ..strategies.choose import strategy_in
from ..strategies.distributed import DistributedStrategy
from ..strategies.precision.base import Precision
from .arguments import MOVED

#: Values of the precision setting, and the Trainer's names for them.
_PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8-mixed"}
_SAME = {
    "no": ("no", "32", "32-true", "fp32"),
    "fp16": ("16", "16-mixed", "fp16"),
    "bf16": ("bf16", "bf16-mixed"),
    "fp8": ("fp8", "fp8-mixed", "transformer-engine", "transformer-engine-float16"),
}
#: Settings that have the same meaning as an argument of the Trainer.
_ARGUMENTS = {
    "mixed_precision": "precision",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "strategy": "strategy",
    "cpu": "accelerator",
    "dynamo_backend": "compile",
}
#: Arguments that settings can set; None and "auto" count as left out.
SETTLED = tuple(_ARGUMENTS.values())
#: Settings that select a strategy, and the words by which the names of matching strategies are recognized.
_SWITCHES = {
    "use_fsdp": ("fsdp", "hybrid_shard"),
    "use_deepspeed": ("deepspeed",),
    "use_parallelism_config": ("modelparallel", "model_parallel", "fsdp", "hybrid_shard"),
}


#: Prefix of Lightning's environment variables for arguments that code leaves out, such as PL_TRAINER_MAX_EPOCHS=3.
VARIABLE_PREFIX = "PL_TRAINER_"
_WRONG_PREFIX = "PACELINE_TRAINER_"


def settled(init: Constructor[P]) -> Constructor[P]:
    """Decorator for ``Trainer.__init__``, which then receives the final value of each argument.

    Each value comes from the first of these sources that has one: the code, the variable ``PL_TRAINER_<ARGUMENT>``, a
    setting, the default. In a script that ``paceline doctor`` runs, the doctor's plan overrides all of them. The
    object's ``settings_in_force`` says where each value comes from.
    """
    parameters = inspect.signature(init).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @functools.wraps(init)
    def settle(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        found = from_variables(tuple(defaults), kwargs)
        variables = {name: VARIABLE_PREFIX + name.upper() for name in found}
        given, self.settings_in_force = with_origins({**defaults, **kwargs, **found}, defaults, variables)
        init(self, *args, **overruled(given))  # type: ignore[arg-type]

    return settle


def from_variables(known: Collection[str], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that only environment variables set; warn about variables for unknown arguments."""
    left_open = {name for name in SETTLED if passed.get(name) is None or passed[name] == "auto"}
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith((VARIABLE_PREFIX, _WRONG_PREFIX)) or not text:
            continue
        name = variable.removeprefix(VARIABLE_PREFIX).removeprefix(_WRONG_PREFIX).lower()
        if name.startswith("_"):  # PL_TRAINER__MAX_EPOCHS is an argument of a TrainerCLI
            continue
        if name not in known or variable.startswith(_WRONG_PREFIX):
            meant = messages.did_you_mean(VARIABLE_PREFIX + name.upper(), [VARIABLE_PREFIX + n.upper() for n in known])
            why = "" if name in known else f": Trainer has no argument {name!r}"
            hint = f" Use {MOVED[name]}." if name in MOVED else meant
            messages.warn_once(f"The environment variable {variable} has no effect{why}.{hint}")
        elif name not in passed or name in left_open:
            found[name] = text
            with contextlib.suppress(Exception):  # the value is a word, not a number
                found[name] = ast.literal_eval(text)
    return found


def with_origins(
    given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, variables: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[Row]]:
    """Return the final arguments, and a table of their origins that also lists every setting in use.

    Args:
        given: the arguments by name; arguments left out are taken from launch flags, variables or the settings file.
        defaults: the Trainer's defaults. An argument with its default value counts as left out.
        variables: names of the variables ``PL_TRAINER_<ARGUMENT>`` that set a value, by argument.
    """
    variables, read = variables or {}, given
    given = {**read, **{name: (defaults or {})[name] for name in variables}}
    in_code = {name: Given(value, f"Trainer({_ARGUMENTS[name]}=)") for name, value in _said(given).items()}
    settings = resolve(in_code, door="Trainer", late_variables=_in_variables(read, variables))
    found = {name: one for name, one in _from_settings(settings) if one[1] not in variables.values()}
    for name, variable in variables.items():
        setting = next((setting for setting, argument in _ARGUMENTS.items() if argument == name), None)
        if setting is None or settings.origin(setting).where == variable:
            found[name] = (read[name], variable)
    if found:
        taken = ", ".join(f"{name}={_word(value)!r} ({where})" for name, (value, where) in found.items())
        messages.info_once(f"Trainer takes these arguments from the settings: {taken}.")
    ours = {"accumulate_grad_batches": 1, "compile": False}
    either = {name: default if given[name] is None else given[name] for name, default in ours.items()}
    filled = {**given, **either, **{name: value for name, (value, _) in found.items()}}
    places = {name: where for name, (_, where) in found.items()}
    rows = [_row(name, given[name], filled[name], default, places) for name, default in (defaults or {}).items()]
    more = [row for row in settings.table() if row.place not in ("code", "default")]
    return filled, rows + [row._replace(value=_shown(row.value)) for row in more]


def _row(name: str, given: Any, filled: Any, default: Any, places: Mapping[str, str]) -> Row:
    """Return a Trainer argument as a row of the table, as plain data."""
    if name in places:
        return Row(name, _shown(filled), "settings", places[name])
    said = given is not default and (type(given) is not type(default) or given != default)
    return Row(name, _shown(filled), "code" if said else "default", f"Trainer({name}=)" if said else "")


def _shown(value: Any) -> Any:
    """Convert a value for the table; objects are replaced by their class names."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(_shown(item)) for item in value)
    return str(value) if isinstance(value, Path | timedelta) else type(value).__name__


def _word(value: Any) -> Any:
    return type(value).__name__ if isinstance(value, Strategy) else value


# ---- what the code says --------------------------------------------------------------------------------------------


def _in_variables(read: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Given]:
    """Return the arguments that environment variables set, as settings."""
    said = {name: value for name, value in _said(read).items() if _ARGUMENTS[name] in variables}
    return {name: Given(value, variables[_ARGUMENTS[name]]) for name, value in said.items()}


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mixed_precision": _precision(given),
        "gradient_accumulation_steps": _accumulation(given),
        "strategy": None if _is_auto(given["strategy"]) else given["strategy"],
        "cpu": _cpu(given),
        "dynamo_backend": _compile(given["compile"]),
    }


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _precision(given: Mapping[str, Any]) -> Any:
    value, strategy = given["precision"], given["strategy"]
    if value is None and given["plugins"]:
        return given["plugins"]
    if value is None and isinstance(strategy, Strategy) and type(strategy.precision) is not Precision:
        return strategy.precision
    return next((word for word, same in _SAME.items() if str(value) in same), value)


def _accumulation(given: Mapping[str, Any]) -> Any:
    callbacks = given["callbacks"] if isinstance(given["callbacks"], Sequence) else (given["callbacks"],)
    scheduled = accumulation_of((c for c in callbacks if isinstance(c, Callback)), 0) is not None
    return 1 if scheduled and given["accumulate_grad_batches"] is None else given["accumulate_grad_batches"]


def _cpu(given: Mapping[str, Any]) -> bool | None:
    if _is_auto(given["accelerator"]):
        strategy = given["strategy"]
        has_device = isinstance(strategy, Strategy) and not isinstance(strategy, DistributedStrategy)
        return strategy.device.type == "cpu" if has_device else None
    return given["accelerator"] == "cpu"


def _compile(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return value.get("backend", "inductor")
    return None if value is None else "inductor" if value else "no"


# ---- what the settings say -----------------------------------------------------------------------------------------


def _from_settings(settings: Settings) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the arguments whose values come from settings, and the source of each value."""
    meanings: dict[str, Callable[[Any], Any]] = {
        "mixed_precision": _PRECISIONS.get,
        "gradient_accumulation_steps": lambda steps: None if steps == 1 else steps,
        "strategy": lambda name: name,
        "cpu": lambda cpu: "cpu" if cpu else None,
        "dynamo_backend": lambda backend: _compiling(backend, settings),
    }
    for setting, meaning in meanings.items():
        place, where = settings.origin(setting)
        if place in ("code", "default"):
            continue
        value = meaning(settings[setting])
        if value is not None:
            yield _ARGUMENTS[setting], (value, where)
    yield from _sharding(settings)


def _sharding(settings: Settings) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the strategy for ``use_fsdp``, ``use_deepspeed`` or ``use_parallelism_config`` if no strategy is set."""
    switches = [name for name in _SWITCHES if settings[name]]
    if not switches:
        return
    chosen, (place, where) = settings["strategy"], settings.origin("strategy")
    if place == "default":
        yield "strategy", (strategy_in(settings), " and ".join(settings.origin(name).where for name in switches))
        return
    word = _word(chosen)
    for switch in switches:
        if not any(part in word.lower() for part in _SWITCHES[switch]):
            asked = settings.origin(switch).where
            messages.info_once(f"strategy={word!r} (from {where}) overrides {switch} (from {asked}).")


def _compiling(backend: str, settings: Settings) -> dict[str, Any] | None:
    """Return the arguments for torch.compile, or None to compile nothing."""
    if backend == "no":
        return None
    mode, dynamic = settings["dynamo_mode"], settings["dynamo_use_dynamic"]
    more: dict[str, Any] = {"mode": mode} if mode != "default" else {}
    if settings["dynamo_use_regional_compilation"]:
        more["regional"] = True
    if dynamic is not None:
        more["dynamic"] = dynamic
    return {"backend": backend, "fullgraph": settings["dynamo_use_fullgraph"], **more}
