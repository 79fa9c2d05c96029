"""Replace the package ``accelerate``, so that programs and libraries written for it run on Paceline."""

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
#: Libraries that check only once, when they are imported, whether accelerate is installed.
LOOKING = ("transformers", "diffusers", "peft", "trl", "sentence_transformers")


def install() -> None:
    """Make ``import accelerate`` import Paceline, from now on in this process.

    Call it before anything imports ``accelerate``, and before libraries that check for it, such as transformers. An
    installed accelerate is neither changed nor imported. Calling it again does nothing.

    Raises:
        RuntimeError: the real package has already been imported.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if NAME in sys.modules:
        raise RuntimeError(
            f"compat.install() replaces accelerate with Paceline, but the real one has already been imported, from "
            f"{getattr(sys.modules[NAME], '__file__', None)}. Call it first: before `import accelerate`, and before "
            "libraries that import it (transformers, diffusers, peft, trl)."
        )
    early = [name for name in LOOKING if name in sys.modules]
    if early:
        messages.warn(
            f"compat.install() comes after the import of {messages.names(early, last='and')}, which may already have "
            "decided that accelerate is not installed. Call it before importing them."
        )
    sys.meta_path.insert(0, Finder())
    importlib.invalidate_caches()


def main() -> None:
    """Run a script with Paceline as accelerate: ``python -m paceline.compat.accelerate train.py ...``."""
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
                f"module {self.__name__!r} has no attribute {name!r}: Paceline replaces {NAME}, and has nothing of "
                f"that name.{messages.did_you_mean(name, names.ALL)}"
            )
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; importing a submodule does not hide a function of the same name."""
        hidden = isinstance(value, Alias) and name in names.ALL
        super().__setattr__(name, names.find(name) if hidden else value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *names.ALL})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder, in ``sys.meta_path``, for the modules of ``accelerate`` and the version of the package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module; None if it does not belong to ``accelerate``."""
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
        """Create the module."""
        return Alias(spec.name, f"{spec.name}, by Paceline.")

    def exec_module(self, module: ModuleType) -> None:
        """Set the attributes that must exist before the first use of a name."""
        vars(module)["__all__"] = [name for name in names.ALL if name not in names.UNSUPPORTED]
        if module.__name__ == NAME:
            vars(module)["__version__"] = names.VERSION

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The distribution that ``importlib.metadata.version("accelerate")`` reads."""
        return [Metadata()] if getattr(context, "name", None) == NAME else []

    def invalidate_caches(self) -> None:
        """Do nothing: this finder caches nothing."""


class Metadata(importlib.metadata.Distribution):
    """Package metadata with accelerate's name and version."""

    def read_text(self, filename: str) -> str | None:
        """The text of METADATA; None for other files."""
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {names.VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """The path of a file of the package."""
        return os.path.join(os.path.dirname(__file__), path)
