"""Create a module or data module from the hyperparameters in a checkpoint, and load its state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import messages
from ..processes import seed
from . import objects, restore
from .hparams_files import read_hparams
from .hyperparameters import COMMAND_LINE_KEYS, CONFIG, AttributeDict
from .instantiate import are_of_command_line, instantiate_module
from .read import read

#: The keys of hyperparameters in the files of Lightning versions before 1.0, oldest first.
_FORMER_KEYS = ("hparams", "module_arguments")


def load_from_checkpoint(
    cls: Any,
    path: Any,
    map_location: Any = None,
    hparams_file: Any = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Create an instance from the hyperparameters in a checkpoint, and load the checkpoint's state.

    This does not change any RNG state. A warning lists the pickled objects that a safe load leaves out. For the
    arguments, see ``TrainingModule.load_from_checkpoint``.

    Raises:
        ValueError: if the file is not a checkpoint, or loading it would run code.
        RuntimeError: if the weights do not match the module.
        TypeError: if ``__init__`` needs an argument that is in neither the file nor ``kwargs``, or if ``kwargs`` has an
            argument that ``__init__`` does not accept.
    """
    trusted = objects.is_trusted(weights_only)
    checkpoint = read(path, "cpu" if map_location is None else map_location, trusted=trusted)
    is_module = issubclass(cls, nn.Module)
    if is_module and str(checkpoint.get("pytorch-lightning_version")).startswith("0."):
        _rename_hyperparameters(cls, checkpoint)
    if hparams_file is not None:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = read_hparams(Path(hparams_file))
    saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if are_of_command_line(saved):
        make = partial(instantiate_module, cls, {**saved, **kwargs})
    else:
        make = partial(cls, **_arguments(cls, checkpoint, kwargs))
    if not trusted:
        _warn_of_objects(cls, checkpoint, {**saved, **kwargs})
    with seed.isolate_rng():
        made = make()
        if is_module:
            restore.call(made, "configure_model")
    if isinstance(made, nn.Module):
        _load_module(made, checkpoint, strict)
    elif type(made).__qualname__ in checkpoint:
        made.load_state_dict(checkpoint[type(made).__qualname__])  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _rename_hyperparameters(cls: Any, checkpoint: dict[str, Any]) -> None:
    """Move hyperparameters from the keys that Lightning used before version 1.0 to the current key."""
    former = [checkpoint[key] for key in _FORMER_KEYS if isinstance(checkpoint.get(key), Mapping)]
    if former and cls.CHECKPOINT_HYPER_PARAMS_KEY not in checkpoint:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = {name: one[name] for one in former for name in one}


def _warn_of_objects(cls: Any, checkpoint: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Warn about the objects in a checkpoint that a safe load leaves out, except hyperparameters in ``known``."""
    parameters = inspect.signature(cls).parameters
    kept_whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in parameters or are_of_command_line(known)
    takes_any = kept_whole or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hparams = {
        name: kind
        for name, kind in objects.types_within(checkpoint, cls.CHECKPOINT_HYPER_PARAMS_KEY).items()
        if name not in known and (takes_any or name in parameters)
    }
    others = {
        place: kind
        for place, kind in objects.types(checkpoint).items()
        if "/" not in place and (issubclass(cls, nn.Module) or place == cls.__qualname__)
    }
    if not (hparams or others):
        return
    name = cls.__name__
    text = (
        f"{name}.load_from_checkpoint() loads the checkpoint without its "
        f"{messages.names(objects.names({**hparams, **others}), last='and')}, because unpickling objects can run code "
        "that the file specifies. "
    )
    if hparams:
        listed, again = messages.names(hparams, last="and"), ", ".join(f"{one}=..." for one in hparams)
        text += f"{name} is created without {listed}, so it may differ from the saved object. "
        text += f"Pass {again} to load_from_checkpoint. "
    messages.warn(f"{text}If you trust the file, use {name}.load_from_checkpoint(path, weights_only=False).")


def _load_module(module: Any, checkpoint: dict[str, Any], strict: bool | None) -> None:
    restore.call(module, "on_load_checkpoint", checkpoint)
    state = checkpoint["state_dict"]
    wanted = restore.is_strict(module) if strict is None else strict
    own = module._strict_loading
    if own is not None and wanted is not own:
        name = type(module).__name__
        raise ValueError(
            f"{name}.load_from_checkpoint(strict={strict}) contradicts strict_loading={own}, which {name} sets. Leave "
            "strict out, or pass the same value to both."
        )
    restore.load_weights(module, state, wanted, _load_state_dict)
    device = next((value.device for value in state.values() if isinstance(value, Tensor)), None)
    if device is not None:
        module.to(device)


def _load_state_dict(module: Any, state: Mapping[str, Any], strict: bool) -> Any:
    return module.load_state_dict(state, strict=strict)


def _arguments(cls: Any, checkpoint: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``cls``: the saved arguments, overridden by ``given``."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    saved = AttributeDict(checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    for key in COMMAND_LINE_KEYS:
        saved.pop(key, None)
    name = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    was_config = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_TYPE) == CONFIG
    if name in named:
        values = AttributeDict(saved | given)
        arguments: dict[str, Any] = {name: _config(cls, values) if was_config else _attribute_dicts(values)}
        known = [*named, *saved]
    else:
        arguments = dict(_config(cls, saved)) if was_config else saved
        known = list(named)
    unknown = [key for key in given if key not in known]
    if unknown and not takes_any:
        raise TypeError(
            f"load_from_checkpoint: {messages.unknown(f'{cls.__name__}.__init__ argument', unknown[0], known)}"
        )
    arguments = {key: value for key, value in {**arguments, **given}.items() if takes_any or key in named}
    apart = objects.names(objects.types_within(checkpoint, cls.CHECKPOINT_HYPER_PARAMS_KEY))
    _must_be_complete(cls, named, arguments, list(saved), apart)
    return arguments


def _config(cls: type, values: Mapping[str, Any]) -> Any:
    """Convert hyperparameters back to the OmegaConf config that they came from."""
    if not messages.is_installed("omegaconf"):
        needs = messages.missing("Loading them", "omegaconf")
        raise ModuleNotFoundError(f"The hyperparameters of this {cls.__name__} are an OmegaConf config. {needs}")
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(values))


def _attribute_dicts(value: Any) -> Any:
    """Make the entries of dicts readable as attributes, at any depth."""
    if isinstance(value, dict):
        return AttributeDict({key: _attribute_dicts(entry) for key, entry in value.items()})
    return value


def _must_be_complete(cls: type, named: Any, arguments: dict[str, Any], saved: list[str], apart: list[str]) -> None:
    lacking = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    if lacking and apart:
        raise TypeError(
            f"{cls.__name__}.__init__ needs {messages.names(lacking, last='and')}. The checkpoint stores "
            f"{', '.join(apart)} as pickled objects. A safe load does not unpickle them, because unpickling can run "
            f"code that the file specifies. If you trust the file, use {cls.__name__}.load_from_checkpoint(path, "
            "weights_only=False)."
        )
    if lacking:
        held = (
            f"of its arguments, the checkpoint stores only {', '.join(saved)}" if saved else "the checkpoint has none"
        )
        again = ", ".join(f"{name}=..." for name in lacking)
        kept = "call self.save_hyperparameters() in __init__ before the next checkpoint is written"
        if saved:
            kept = "use an argument that a checkpoint can store as plain data instead, such as a name or numbers"
        raise TypeError(
            f"{cls.__name__}.__init__ needs {messages.names(lacking, last='and')}, but {held}. "
            f"Call {cls.__name__}.load_from_checkpoint(path, {again}), or {kept}."
        )
