"""Create an object from hyperparameters that a command line stored as class names with arguments."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from itertools import dropwhile, islice
from types import FrameType
from typing import Any, TypeVar

from .. import messages
from .hyperparameters import COMMAND_LINE_KEYS, parsed_hyperparameters

T = TypeVar("T")

#: Value of ``_instantiator`` in hyperparameters that a command line stored.
MARK = "paceline.cli.instantiate_module"
_LIGHTNINGS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def are_of_command_line(hyperparameters: Mapping[str, Any]) -> bool:
    """Return True if Paceline's or Lightning's command line stored the hyperparameters.

    Raises:
        ValueError: if the hyperparameters specify a different function to create the object. That function is not
            called.
    """
    maker = hyperparameters.get("_instantiator")
    if maker not in (None, MARK, *_LIGHTNINGS):
        raise ValueError(
            f"The checkpoint's hyperparameters specify {maker!r} as the function that creates the module. The "
            "function was not called, because a checkpoint must not be able to run code. A checkpoint from "
            f"TrainerCLI specifies {MARK!r} instead, so do not load this file unless you know who wrote it."
        )
    return maker is not None


def instantiate_module(cls: type[T], hyperparameters: Mapping[str, Any]) -> T:
    """Create an instance of a class, or of the subclass that the hyperparameters specify.

    Every class that the arguments mention must be allowed by the signature of ``cls`` and must already be imported.

    Args:
        cls: the class.
        hyperparameters: the arguments. Objects are described by class and arguments, as in a config file.

    Raises:
        ModuleNotFoundError: if jsonargparse is not installed.
        ValueError: if a class is not imported, or an argument does not match the signature.
    """
    if not messages.is_installed("jsonargparse"):
        raise ModuleNotFoundError(
            f"The hyperparameters of this {cls.__name__} come from a command line. "
            + messages.missing("Loading them", "jsonargparse[signatures]"),
            name="jsonargparse",
        )
    from jsonargparse import ArgumentError, ArgumentParser

    arguments = {name: value for name, value in hyperparameters.items() if name not in COMMAND_LINE_KEYS}
    parser = ArgumentParser(exit_on_error=False)
    path = hyperparameters.get("_class_path")
    if path is None:
        parser.add_class_arguments(cls, "made", fail_untyped=False, sub_configs=True)
        config, target = arguments, cls
    else:
        parser.add_subclass_arguments(cls, "made", fail_untyped=False)
        config, target = {"class_path": path, "dict_kwargs": arguments}, _imported(path)

    def make(class_type: type, *args: Any, **kwargs: Any) -> Any:
        with parsed_hyperparameters(class_type, hyperparameters):
            return class_type(*args, **kwargs)

    with importing_nothing(hyperparameters):
        try:
            parsed = parser.parse_object({"made": config})
        except ArgumentError as error:
            what = path or cls.__name__
            raise ValueError(f"The hyperparameters in the checkpoint do not match {what}: {error}") from error
        return parser.instantiate(parsed, instantiators=[(make, target, False)]).made


@contextmanager
def importing_nothing(hyperparameters: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that blocks imports of modules that a file's hyperparameters mention.

    Raises:
        ValueError: if the hyperparameters mention something that the program has not imported.
    """
    for name in _class_paths(hyperparameters):
        if _imported(name) is None:
            raise _not_imported(name)
    guard = _Guard()
    sys.meta_path.insert(0, guard)
    try:
        yield
    except (ValueError, ModuleNotFoundError, SystemExit) as error:
        if guard.refused:
            raise _not_imported(guard.refused[0]) from error
        raise
    finally:
        sys.meta_path.remove(guard)


def _not_imported(name: str) -> ValueError:
    return ValueError(
        f"The hyperparameters mention {name!r}, which has not been imported. Loading a file never imports code, so "
        f"import {name!r} before you load the file, or also name the class on the command line."
    )


class _Guard:
    """Rejects this thread's imports of modules that hyperparameters mention; jsonargparse's own imports still work."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        callers = islice(messages.call_stack(), 1, None)
        frame = next(dropwhile(_imports, callers), None)
        if frame is None or threading.get_ident() != self._thread:
            return
        importer, root = str(frame.f_globals.get("__name__")), name.partition(".")[0]
        written = root == "jsonargparse" or root in (*frame.f_code.co_names, *frame.f_code.co_consts)
        if importer.partition(".")[0] == "jsonargparse" and not written:
            self.refused.append(name)
            raise ModuleNotFoundError(f"{name!r} has not been imported", name=name)


def _imports(frame: FrameType) -> bool:
    """Return True if a frame belongs to Python's import system."""
    return str(frame.f_globals.get("__name__")).startswith(("importlib", "_frozen_importlib"))


def _imported(path: str) -> Any:
    """Return the class at a dotted path if it has been imported, else None."""
    names = path.split(".")
    for end in range(len(names) - 1, 0, -1):
        module = sys.modules.get(".".join(names[:end]))
        if module is not None:
            return reduce(lambda owner, name: getattr(owner, name, None), names[end:], module)
    return None


def _class_paths(value: Any) -> Iterator[str]:
    """Yield the import path of every class that a value mentions, at any depth."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key in ("class_path", "_class_path") and isinstance(entry, str):
                yield entry
            else:
                yield from _class_paths(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _class_paths(entry)
