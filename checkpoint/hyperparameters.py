"""Store the arguments with which a module or data module was created, for logs and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

from .. import messages

#: Hyperparameters that mark an object as created by a command line and, if its class was chosen there, name the class.
COMMAND_LINE_KEYS = ("_instantiator", "_class_path")
#: The type that a checkpoint stores for hyperparameters that were an OmegaConf config.
CONFIG = "omegaconf.DictConfig"
#: The class that a command line is instantiating, and its arguments as plain data.
_parsed: ContextVar[tuple[type, Mapping[str, Any]] | None] = ContextVar("parsed", default=None)


@contextmanager
def parsed_hyperparameters(cls: type, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that makes ``cls.save_hyperparameters`` store ``arguments``, not the arguments of ``__init__``.

    Args:
        cls: the class. Instances of other classes, such as submodules, still store their own arguments.
        arguments: plain data that describes the arguments of ``__init__``; the arguments themselves may be objects that
            a checkpoint cannot store.
    """
    token = _parsed.set((cls, arguments))
    try:
        yield
    finally:
        _parsed.reset(token)


class AttributeDict(dict[str, Any]):
    """A dict whose entries can also be read and set as attributes.

    Example:
        >>> hparams = AttributeDict(lr=0.1)
        >>> hparams.lr
        0.1
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = messages.did_you_mean(name, self)
            raise AttributeError(
                f"There is no hyperparameter {name!r}.{hint} Hyperparameters: {messages.names(self, 'and') or 'none'}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"There is no hyperparameter {name!r} to delete.")
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(key)) for key in self), default=0) + 1
        return "\n".join(f"{key + ':':<{width}} {value!r}" for key, value in self.items())


class HyperparametersMixin:
    """Adds ``save_hyperparameters()`` and ``hparams`` to a class."""

    _hparams: Any = None
    _hparams_initial: Any = None
    _hparams_name: str | None = None
    _log_hyperparams: bool = False

    @property
    def hparams(self) -> Any:
        """The values that :meth:`save_hyperparameters` stored. They may be changed; checkpoints store the current ones.

        This is an :class:`AttributeDict`, or a ``DictConfig`` with its interpolations if an OmegaConf config was saved.
        """
        if self._hparams is None:
            self._hparams = AttributeDict()
        return self._hparams

    @property
    def hparams_initial(self) -> Any:
        """A copy of the hyperparameters as they were when :meth:`save_hyperparameters` was called, for the loggers."""
        return _copied(AttributeDict() if self._hparams_initial is None else self._hparams_initial)

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Store the arguments of ``__init__`` in :attr:`hparams`. Call it inside ``__init__``.

        Without ``args``, all arguments are stored, including those of every subclass or base class whose ``__init__``
        is running (if both have an argument of the same name, the subclass's value is stored). If a subclass and its
        base class both call this method, the arguments of both calls are stored. Each argument is stored with its value
        at the time of the call.

        Args:
            *args: names of arguments to store, or objects whose entries are stored instead: mappings,
                ``argparse.Namespace`` objects, dataclass instances or OmegaConf configs.
            ignore: names to leave out, even if a base class has stored them. Leave out arguments that are modules,
                because their weights are already in the ``state_dict``.
            frame: frame from which to search for ``__init__``; the caller's frame by default.
            logger: whether to pass these values to the loggers when a run starts.
        """
        if frame is None and (current := inspect.currentframe()) is not None:
            frame = current.f_back
        arguments, open_ended = _init_arguments(self, frame)
        chosen = self._choose_hparams(args, arguments, frame)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        if not open_ended:
            _check_ignored(type(self).__name__, ignored, arguments or chosen)
        self._log_hyperparams = logger
        kept = {key: value for key, value in chosen.items() if key not in ignored}
        if len(args) == 1 and is_config(args[0]):
            self._hparams = _without(args[0], ignored)
        elif is_config(self._hparams):
            self._hparams = AttributeDict(plain_config(self._hparams) | kept)
        else:
            self.hparams.update(kept)
        self.remove_ignored_hparams(sorted(ignored))
        _advise_about_modules(type(self).__name__, kept)

    def remove_ignored_hparams(self, ignore_list: Sequence[str]) -> None:
        """Remove the named entries from the hyperparameters."""
        for name in ignore_list:
            if name in self.hparams:
                del self.hparams[name]
        self._hparams_initial = _copied(self.hparams)

    def _choose_hparams(
        self, args: Sequence[Any], arguments: dict[str, Any], frame: FrameType | None
    ) -> dict[str, Any]:
        owner = type(self).__name__
        by_name = all(isinstance(arg, str) for arg in args)
        cls, parsed = _parsed.get() or (None, {})
        parsed = dict(parsed) if type(self) is cls else {}
        if by_name and not arguments and not _init_frames(self, frame):
            raise RuntimeError(
                f"{owner}.save_hyperparameters() was called outside of __init__, so the arguments of __init__ are not "
                "known. Call it inside __init__, or pass the values to store: save_hyperparameters({'lr': 0.1})."
            )
        if not args:
            self._hparams_name = "kwargs"
            return parsed or arguments
        chosen = {key: value for key, value in parsed.items() if key in COMMAND_LINE_KEYS and by_name}
        for arg in args:
            if is_config(arg) and len(args) == 1:
                break  # the config is stored unchanged
            if not isinstance(arg, str):
                chosen.update(_entries(arg, owner))
            elif arg in arguments:
                chosen[arg] = parsed.get(arg, arguments[arg])
            else:
                raise ValueError(messages.unknown(f"{owner}.__init__ argument", arg, arguments))
        config = None if by_name or len(args) > 1 else args[0]
        names = [name for name, value in arguments.items() if config is not None and value is config]
        self._hparams_name = names[0] if names else "kwargs"
        return chosen


def _init_frames(owner: Any, frame: FrameType | None) -> list[FrameType]:
    """Return the frames in which ``__init__`` of ``owner`` or of a base class is running, innermost first."""
    frames = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is owner:
            frames.append(frame)
        frame = frame.f_back
    return frames


def _init_arguments(owner: Any, frame: FrameType | None) -> tuple[dict[str, Any], bool]:
    """Return the arguments of all running ``__init__`` calls, and whether any of these calls takes ``**kwargs``."""
    arguments: dict[str, Any] = {}
    open_ended = False
    for init in _init_frames(owner, frame):
        values = init.f_locals
        names, rest = _argument_names(init.f_code)
        arguments.update({name: values[name] for name in names if name in values})
        if rest is not None:
            open_ended = True
            arguments.update(values.get(rest, {}))
    return arguments, open_ended


def _argument_names(code: CodeType) -> tuple[tuple[str, ...], str | None]:
    """Return a function's argument names except ``self`` and ``*args``, and the name of its ``**kwargs``, if any."""
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[1:count]
    has_args = bool(code.co_flags & inspect.CO_VARARGS)
    has_kwargs = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return names, code.co_varnames[count + has_args] if has_kwargs else None


def _entries(config: Any, owner: str) -> dict[str, Any]:
    """Return the entries of a configuration object as a dict."""
    config = plain_config(config)
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    if isinstance(config, Namespace):
        return vars(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    raise TypeError(
        f"{owner}.save_hyperparameters({config!r}): {messages.a(config)} has no named entries. Pass argument names, a "
        "dict, an argparse.Namespace, a dataclass instance or an OmegaConf config."
    )


def is_config(value: Any) -> bool:
    """Return True if a value is an OmegaConf config with named entries. Does not import OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_dict(value)


def plain_config(config: Any, resolve: bool = True) -> Any:
    """Convert an OmegaConf config to nested dicts and lists; return any other value unchanged.

    With ``resolve``, interpolations are replaced with their values.
    """
    if not is_config(config):
        return config
    return _attribute_dicts(sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=resolve))


def _without(config: Any, ignored: set[str]) -> Any:
    """Return a copy of an OmegaConf config without the ignored entries."""
    return sys.modules["omegaconf"].OmegaConf.masked_copy(config, [key for key in config if key not in ignored])


def _attribute_dicts(value: Any) -> Any:
    if isinstance(value, dict):
        return AttributeDict({str(key): _attribute_dicts(entry) for key, entry in value.items()})
    return [_attribute_dicts(entry) for entry in value] if isinstance(value, list) else value


def _copied(hparams: Any) -> Any:
    if is_config(hparams):
        return copy.deepcopy(hparams)
    return AttributeDict({key: _copy_of(value) for key, value in hparams.items()})


def _copy_of(value: Any) -> Any:
    """Return a deep copy of a value, or the value itself if it cannot be copied or is a module (to save memory)."""
    if _is_module(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _advise_about_modules(owner: str, hparams: Mapping[str, Any]) -> None:
    modules = [key for key, value in hparams.items() if _is_module(value)]
    if modules:
        messages.warn_once(
            f"Some hyperparameters of {owner} are modules: {messages.names(modules, 'and')}. Their weights are "
            "already in the state_dict, and a hyperparameter file cannot store modules. Exclude them with "
            f"self.save_hyperparameters(ignore={modules!r})."
        )


def _check_ignored(owner: str, ignored: set[str], arguments: Iterable[str]) -> None:
    """Warn if an ignored name does not exist but resembles the name of an argument."""
    known = list(arguments)
    for name in sorted(ignored.difference(known)):
        hint = messages.did_you_mean(name, known)
        if hint:
            messages.warn_once(
                f"{owner}.save_hyperparameters(ignore=...): there is no argument {name!r} to ignore.{hint}"
            )
