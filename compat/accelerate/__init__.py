"""Stand in for the package ``accelerate``, so that programs and libraries written for it run on Paceline."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ... import messages
from . import names

NAME = "accelerate"
#: Libraries that look for accelerate once, while they are imported.
LOOKING = ("transformers", "diffusers", "peft", "trl", "sentence_transformers")


def install() -> None:
    """Let ``import accelerate`` find Paceline, from now on and in this process.

    Call it before anything imports ``accelerate``, and before libraries that look for it, such as transformers. An
    installed accelerate is left alone: nothing of it is imported. Calling it again does nothing.

    Raises:
        RuntimeError: the real package was imported already.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if NAME in sys.modules:
        raise RuntimeError(
            f"compat.install() puts Paceline in the place of accelerate, but the real one was imported already, from "
            f"{getattr(sys.modules[NAME], '__file__', None)}. Call it first: before `import accelerate`, and before "
            "libraries that import it (transformers, diffusers, peft, trl)."
        )
    early = [name for name in LOOKING if name in sys.modules]
    if early:
        messages.warn(
            f"compat.install() comes after the import of {messages.names(early, last='and')}, which may have found out "
            "by then that accelerate is not there. Call it before importing them."
        )
    sys.meta_path.insert(0, Finder())
    importlib.invalidate_caches()


def main() -> None:
    """``python -m paceline.compat.accelerate train.py ...``: run a script with Paceline as its accelerate."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit("usage: python -m paceline.compat.accelerate SCRIPT [ARGUMENTS ...]")
    install()
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


class Alias(ModuleType):
    """A module of ``accelerate`` whose names are Paceline's, each looked up when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = names.find(name)
        inner = f"{self.__name__}.{name}"
        if value is names.UNKNOWN and inner.removeprefix(f"{NAME}.") in names.MODULES:
            return importlib.import_module(inner)
        if value is names.UNKNOWN:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}: Paceline stands in for {NAME}, and has nothing "
                f"of that name.{messages.did_you_mean(name, names.ALL)}"
            )
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what importing a submodule sets, but where a function has the submodule's name: it goes first."""
        hidden = isinstance(value, Alias) and name in names.ALL
        super().__setattr__(name, names.find(name) if hidden else value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *names.ALL})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``accelerate``, and the version of that package; stands in ``sys.meta_path``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """How to import a module; None if it is none of ``accelerate``'s."""
        if name.partition(".")[0] != NAME:
            return None
        inner = name.removeprefix(NAME).removeprefix(".")
        if inner and inner not in names.MODULES:
            return None
        package = not inner or any(other.startswith(f"{inner}.") for other in names.MODULES)
        spec = importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=package)
        spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module."""
        return Alias(spec.name, f"{spec.name}, by Paceline.")

    def exec_module(self, module: ModuleType) -> None:
        """Fill in what is there before the first use."""
        vars(module)["__all__"] = [name for name in names.ALL if name not in names.UNSUPPORTED]
        if module.__name__ == NAME:
            vars(module)["__version__"] = names.VERSION

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """What ``importlib.metadata.version("accelerate")`` reads."""
        return [Metadata()] if getattr(context, "name", None) == NAME else []

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


class Metadata(importlib.metadata.Distribution):
    """The name and the version that programs are told."""

    def read_text(self, filename: str) -> str | None:
        """The text of METADATA; None for other files."""
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {names.VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Where a file of it would be."""
        return os.path.join(os.path.dirname(__file__), path)
