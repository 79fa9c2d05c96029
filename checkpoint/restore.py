"""Load weights and report mismatched states. Trainer and Accelerator both use this module to restore checkpoints."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from .. import messages

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: The parts of a checkpoint that a fit can restore; see ``Trainer.fit``.
Part = Literal["model", "optimizer", "schedulers", "loops", "rng", "callbacks"]
PARTS: tuple[Part, ...] = get_args(Part)
#: End of the names under which layers save more than tensors; see ``torch.nn.Module.get_extra_state``.
_EXTRA = "._extra_state"


def check_parts(restore: str | Iterable[str]) -> tuple[Part, ...]:
    """Return the requested parts in the order of :data:`PARTS`.

    Raises:
        ValueError: if a name is not one of :data:`PARTS`.
    """
    given = (restore,) if isinstance(restore, str) else tuple(restore)
    for name in given:
        if name not in PARTS:
            raise ValueError(messages.unknown("Trainer.fit(restore=...) part", name, PARTS))
    return tuple(name for name in PARTS if name in given)


def versions() -> dict[str, str]:
    """Return the versions of paceline, torch and python that a checkpoint records."""
    return {
        "paceline": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def call(owner: Any, hook: str, *args: Any) -> None:
    """Call a hook of an object if the object has that hook and the hook is not None."""
    method = getattr(owner, hook, None)
    if method is not None:
        method(*args)


def is_strict(module: Any) -> bool:
    """Return True if the names of the weights must match. ``strict_loading = None`` on the class counts as True."""
    return module.strict_loading is not False


def load_weights(
    module: nn.Module, state: Mapping[str, Any], strict: bool, load: Any, advice: str | None = None
) -> None:
    """Load weights through ``load(module, state, strict)`` and report everything that does not match the module.

    ``advice`` says what to do if the weights do not match; None means the advice for a ``TrainingModule``.

    Raises:
        RuntimeError: if names are missing or unexpected, or shapes differ; the message says what to do.
    """
    state = _that_layers_can_take(module, state)
    try:
        result = load(module, state, strict)
    except RuntimeError as error:
        found = _differences(module, state)
        if not found:
            raise
        raise RuntimeError(
            f"The checkpoint does not match {type(module).__name__}: {'; '.join(found)}. "
            f"{_advice(module, state) if advice is None else advice}"
        ) from error
    if result is not None and (result.missing_keys or result.unexpected_keys):
        messages.warn(
            f"The checkpoint was only partly loaded into {type(module).__name__} (strict_loading is off): "
            f"{'; '.join(_differences(module, state))}. Missing weights keep their current values."
        )


def _that_layers_can_take(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop the extra state of layers that TransformerEngine replaced in the saved run but not in the current module."""
    extra = {key for key in state if key.endswith(_EXTRA)}
    if not extra:
        return state
    plain = (nn.Linear, nn.LayerNorm)
    own = {f"{name}{_EXTRA}" for name, one in module.named_modules(remove_duplicate=False) if isinstance(one, plain)}
    left_out = (extra & own) - module.state_dict().keys()
    return {key: value for key, value in state.items() if key not in left_out}


def _advice(module: nn.Module, state: Mapping[str, Any]) -> str:
    return (
        f"{_prefix_hint(module, state)}Build the module with the arguments that it had when it was saved "
        f"({type(module).__name__}.load_from_checkpoint takes them from the file){_or_in_part(module, state)}."
    )


def _or_in_part(module: nn.Module, state: Mapping[str, Any]) -> str:
    """Return advice to load only matching weights; empty if shapes differ, because loading would fail anyway."""
    own = module.state_dict()
    shapes_fit = all(own[name].shape == value.shape for name, value in state.items() if name in own)
    return (
        ", or set strict_loading = False on the module to load only the weights whose names match" if shapes_fit else ""
    )


def _differences(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    own = module.state_dict()
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {tuple(state[key].shape)} in the file, {tuple(value.shape)} in the module"
        for key, value in own.items()
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor) and value.shape != state[key].shape
        if not key.endswith(_EXTRA)  # its size may change
    ]
    kinds = ((missing, "missing from the checkpoint"), (unexpected, "unexpected"), (shapes, "with a different shape"))
    return [f"{len(keys)} {what} ({_some(keys)})" for keys, what in kinds if keys]


def _some(keys: list[str], limit: int = 10) -> str:
    more = f", and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + more


def _prefix_hint(module: nn.Module, state: Mapping[str, Any]) -> str:
    own = set(module.state_dict())
    first = next(iter(state), "")
    parts = first.split(".")
    for n in range(1, len(parts)):
        prefix = ".".join(parts[:n]) + "."
        if all(key.startswith(prefix) for key in state) and {key.removeprefix(prefix) for key in state} == own:
            return f"The names would match without the prefix {prefix!r}, so remove the prefix in on_load_checkpoint. "
    return ""


def optimizer_problem(optimizer: Optimizer, state: dict[str, Any], saved_name: str) -> str:
    """Return why a saved state cannot belong to this optimizer; empty if it can."""
    saved, groups = state["param_groups"], optimizer.param_groups
    if len(saved) != len(groups):
        return f"the number of parameter groups was {len(saved)} but is now {len(groups)}"
    for index, (one, other) in enumerate(zip(saved, groups, strict=True)):
        if len(one["params"]) != len(other["params"]):
            before, now = len(one["params"]), len(other["params"])
            return f"the number of parameters in group {index} was {before} but is now {now}"
    lacking = [key for key in optimizer.defaults if key not in saved[0]]
    if lacking and saved_name != type(optimizer).__name__:
        return f"it was saved by {saved_name}, which has no {messages.names(lacking)}"
    return ""


def restore_precision(precision: Any, state: dict[str, Any] | None) -> None:
    """Restore the loss scale, or print a message if the current precision does not use one."""
    if state and state.keys() == precision.state_dict().keys():
        precision.load_state_dict(state)
    elif state:
        messages.info(f"The saved loss scale is not used, because precision {precision.name!r} does not scale losses.")
