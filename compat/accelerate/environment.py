"""``accelerate``'s functions for environment variables, versions, ports and configuration files."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ... import messages
from ...accelerator.enums import DistributedType
from ...accelerator.launchers import environment
from ...processes.devices import find_kind
from ...settings import files

#: The user's configuration file.
default_config_file = str(files.own_file())

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for a word that means yes and 0 for a word that means no; with ``to_bool``, return True or False."""
    word = value.lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(messages.unknown("truth value", value, (*_TRUE, *_FALSE)))
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return True if an environment variable has a true value."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the value of an environment variable, or ``default`` if it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first non-negative integer among the values of the environment variables, or else ``default``."""
    found = (int(os.environ.get(key, "-1")) for key in env_keys)
    return next((number for number in found if number >= 0), default)


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """Return ``KEY=value`` lines. Entries that cannot be written as a line are left out with a warning."""
    lines = []
    for key, value in current_env.items():
        if any(sign in key + value for sign in ";\n<> "):
            messages.warn(
                f"The variable {key}={value!r} contains ';', '<', '>', a space or a line break, so it cannot be "
                "written as a KEY=value line and is left out. Set the variable in another way."
            )
        else:
            lines.append(f"{key}={value}\n")
    return lines


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Context manager that sets environment variables; names are converted to uppercase."""
    with environment({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Context manager that empties the environment on entry and restores it on exit."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function so that ``ACCELERATE_`` and ``PACELINE_`` variables are restored after each call.

    If a class is passed, its test methods and those of its subclasses are decorated.
    """
    return _purging_class(func_or_cls) if isinstance(func_or_cls, type) else _purging(func_or_cls)


def _purging_class(decorated: type) -> type:
    def decorate_tests(kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if name.startswith("test"):
                bound = isinstance(value, (staticmethod, classmethod))
                setattr(kind, name, type(value)(_purging(value.__func__)) if bound else _purging(value))

    start = vars(decorated).get("__init_subclass__")

    def start_subclass(kind: type, **kwargs: Any) -> None:
        if start is None:
            super(decorated, kind).__init_subclass__(**kwargs)
        else:
            start.__get__(None, kind)(**kwargs)
        decorate_tests(kind)

    decorated.__init_subclass__ = classmethod(start_subclass)  # type: ignore[assignment]
    decorate_tests(decorated)
    return decorated


def _purging(function: Any) -> Any:
    def ours() -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "PACELINE_"))}

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = ours()
        try:
            return function(*args, **kwargs)
        finally:
            for name in ours().keys() - before:
                del os.environ[name]
            os.environ.update(before)

    return run


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the given libraries that have been imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the device type, and the name of the DistributedType for training on several devices of that type."""
    kind = find_kind("auto")
    several = "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"
    return kind, several if several in DistributedType.__members__ else "NO"


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare a version, or a library's version, with the required version, using an operator such as ``">="``."""
    if operation not in ("==", "!=", ">", ">=", "<", "<="):
        raise ValueError(messages.unknown("operation", operation, ("==", "!=", ">", ">=", "<", "<=")))
    try:
        found = Version(str(library_or_version))
    except InvalidVersion:
        found = Version(version(str(library_or_version)))
    return SpecifierSet(f"{operation}{requirement_version}").contains(found, prereleases=True)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version (without suffixes such as ``+cpu``) with ``version`` by an operator such as ``">="``."""
    return compare_versions(Version(Version(torch.__version__).base_version), operation, version)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return True if a program on this machine is listening on a port (29500 by default)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(("localhost", int(port or 29500))) == 0


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, because processes may hang on such a kernel."""
    release = platform.release().split("-")[0]
    if platform.system() == "Linux" and compare_versions(release, "<", "5.5.0"):
        messages.warn(f"Processes may hang on Linux {release}. Upgrade to Linux 5.5 or newer.")


def load_config_from_file(config_file: str | None = None) -> Any:
    """Return the settings in a file (by default, the file in use) as an object with attributes and ``to_dict()``."""
    path = config_file or files.find_file()
    if path is None:
        raise FileNotFoundError(
            f"No configuration file, such as {files.own_file()}, was found. Run `paceline config` to create one."
        )
    values = files.read_file(path).values
    return SimpleNamespace(**values, to_dict=lambda: dict(values))


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None, **more: Any
) -> Path | bool:
    """Write a configuration file (by default, the user's own). Return its path, or False if the file already exists."""
    messages.ignored("write_basic_config", "the file contains only mixed_precision", False, **more)
    path = files.own_file() if save_location is None else Path(save_location)
    if path.exists():
        messages.warn(f"{path} already exists and was left unchanged. To write a new file, delete the old one.")
        return False
    files.write_file(path, {"mixed_precision": mixed_precision})
    return path
