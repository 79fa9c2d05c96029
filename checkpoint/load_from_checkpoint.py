"""``load_from_checkpoint``: make a module or data module from the hyperparameters in a file, and load its state."""

from __future__ import annotations

import ast
import csv
import inspect
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from .. import messages
from ..processes import seed
from . import restore
from .hyperparameters import AttributeDict
from .read import read

T = TypeVar("T")


def load_from_checkpoint(
    cls: type[T],
    path: Any,
    map_location: Any = None,
    hparams_file: Any = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> T:
    """Make an instance from a checkpoint: its hyperparameters become ``__init__`` arguments, then its state is loaded.

    The random states do not change. For the arguments, see ``TrainingModule.load_from_checkpoint``.

    Raises:
        ValueError: the file is not a checkpoint, or names code; or ``weights_only`` is False.
        RuntimeError: the weights do not fit.
        TypeError: ``__init__`` needs an argument that neither the file nor ``kwargs`` has, or has no such argument.
    """
    if weights_only not in (None, True):
        raise ValueError(
            f"{cls.__name__}.load_from_checkpoint(weights_only={weights_only!r}): checkpoints are data, and code that "
            "a file names is never run. Omit weights_only, and allow types you trust with "
            "torch.serialization.add_safe_globals([...])."
        )
    checkpoint = read(path, "cpu" if map_location is None else map_location)
    is_module = issubclass(cls, nn.Module)
    prefix = "" if is_module else "datamodule_"
    if hparams_file is not None:
        checkpoint[f"{prefix}hyper_parameters"] = _read_hparams(Path(hparams_file))
    arguments = _arguments(cls, checkpoint, prefix, kwargs)
    with seed.isolate_rng():
        made = cls(**arguments)
        if is_module:
            restore.call(made, "configure_model")
    if isinstance(made, nn.Module):
        _load_module(made, checkpoint, strict)
    elif cls.__qualname__ in checkpoint:
        made.load_state_dict(checkpoint[cls.__qualname__])  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _load_module(module: Any, checkpoint: dict[str, Any], strict: bool | None) -> None:
    restore.call(module, "on_load_checkpoint", checkpoint)
    state = checkpoint["state_dict"]
    wanted = restore.is_strict(module) if strict is None else strict
    restore.load_weights(module, state, wanted, lambda module, *args: module.load_state_dict(*args))
    device = next((value.device for value in state.values() if isinstance(value, Tensor)), None)
    if device is not None:
        module.to(device)


def _arguments(cls: type, checkpoint: dict[str, Any], prefix: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ``cls`` takes: the saved ones, overridden by the given ones."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    saved = AttributeDict(checkpoint.get(f"{prefix}hyper_parameters", {}))
    for key in ("_instantiator", "_class_path"):
        saved.pop(key, None)
    name = checkpoint.get(f"{prefix}hparams_name")
    if name in named:
        arguments: dict[str, Any] = {name: _attribute_dicts(saved | given)}
        known = [*named, *saved]
    else:
        arguments, known = saved, list(named)
    unknown = [key for key in given if key not in known]
    if unknown and not takes_any:
        raise TypeError(
            f"load_from_checkpoint: {messages.unknown(f'argument of {cls.__name__}.__init__', unknown[0], known)}"
        )
    arguments = {key: value for key, value in {**arguments, **given}.items() if takes_any or key in named}
    _must_be_complete(cls, named, arguments, list(saved))
    return arguments


def _attribute_dicts(value: Any) -> Any:
    """The entries of a configuration object, which can be read as attributes too, at every depth."""
    if isinstance(value, dict):
        return AttributeDict({key: _attribute_dicts(entry) for key, entry in value.items()})
    return value


def _must_be_complete(cls: type, named: Any, arguments: dict[str, Any], saved: list[str]) -> None:
    lacking = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    if lacking:
        held = f"({', '.join(saved)})" if saved else "(it has none)"
        again = ", ".join(f"{name}=..." for name in lacking)
        kept = "call self.save_hyperparameters() in __init__ before the next checkpoint is written"
        if saved:
            kept = "make it plain data, such as a name or numbers to build it from, which a checkpoint can hold"
        raise TypeError(
            f"{cls.__name__}.__init__ needs {messages.names(lacking, last='and')}, which is not among the "
            f"checkpoint's hyperparameters {held}. Pass it: {cls.__name__}.load_from_checkpoint(path, {again}); or "
            f"{kept}."
        )


def _read_hparams(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind == ".csv":
        with path.open(newline="") as lines:
            return {row[0]: _literal(row[1]) for row in list(csv.reader(lines))[1:] if row}
    if kind in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"hparams_file={str(path)!r} is YAML, and pyyaml is not installed. Run: pip install pyyaml"
            ) from error
        return yaml.safe_load(path.read_text()) or {}
    raise ValueError(f"hparams_file={str(path)!r} has an unknown file type. Pass a .yaml, .yml or .csv file.")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
