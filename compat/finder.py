"""Redirects imports of other packages to Paceline. All replacements share this code."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import messages
from . import type_names

_PACKAGE = __name__.partition(".")[0]
UNKNOWN: Any = object()


@dataclass
class Target:
    """The place where Paceline defines a name: a module, and the name in that module ("" for the module itself)."""

    module: str
    name: str

    def owner(self) -> ModuleType:
        """Import and return the module."""
        return importlib.import_module(f"{_PACKAGE}.{self.module}" if self.module else _PACKAGE)

    def value(self) -> Any:
        """Return the object that the name refers to."""
        return getattr(self.owner(), self.name) if self.name else self.owner()


def surface(package: str) -> dict[str, str]:
    """Return a dict of the public names of ``lightning`` or ``accelerate``: one space-separated string per module."""
    lines = Path(__file__).with_name(package).joinpath("surface.txt").read_text().splitlines()
    return {module: names.strip() for module, _, names in (line.partition(":") for line in lines)}


def _nothing_else(name: str) -> Any:
    return UNKNOWN


def _nothing() -> None: ...


@dataclass
class Package:
    """A package that Paceline replaces.

    Attributes:
        name: the name under which the package is imported.
        version: the version of the package that has these names. Programs see it as the installed version.
        modules: the names in each module, by the module's full name.
        everywhere: names that every module also has, because the package's modules import them from each other.
        constants: values by name, for names that Paceline itself does not use.
        aliases: maps names of other packages to the corresponding modules, such as ``pytorch_lightning`` to
            ``lightning.pytorch``.
        distributions: distribution names that ``importlib.metadata`` reports as installed.
        fallback: function that returns the value for a name that is in none of these tables, or UNKNOWN if the name has
            no value.
        on_import: function to call when the first module of the package is imported.
        homepage: the home page that the package's metadata contains.
        check_early: names of libraries that check only once, at import time, whether the package is installed.
    """

    name: str
    version: str
    modules: Mapping[str, Mapping[str, Target]]
    everywhere: Mapping[str, Target] = field(default_factory=dict)
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    distributions: Collection[str] = ()
    fallback: Callable[[str], Any] = _nothing_else
    on_import: Callable[[], None] = _nothing
    homepage: str = ""
    check_early: Collection[str] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        """All top-level packages that are replaced."""
        return (self.name, *self.aliases)

    def own_name(self, module: str) -> str:
        """Return a module's full name in this package; ``module`` may be an alias."""
        for alias, original in self.aliases.items():
            if module == alias or module.startswith(f"{alias}."):
                return original + module.removeprefix(alias)
        return module

    def is_package(self, module: str) -> bool:
        """Return True if a module has submodules."""
        return any(other.startswith(f"{module}.") for other in self.modules)


class Alias(ModuleType):
    """A module of a replaced package. Its names refer to Paceline's objects and are looked up on first use."""

    def __init__(self, name: str, package: Package) -> None:
        super().__init__(name, f"{name}, by Paceline.")
        vars(self)["_package"] = package
        vars(self)["_targets"] = package.modules[name]
        vars(self)["_replaced"] = {}
        vars(self).update(package.constants.get(name, {}))
        listed = {*self._targets, *package.constants.get(name, {})}
        vars(self)["__all__"] = sorted(one for one in listed if not one.startswith("_"))

    def __getattr__(self, name: str) -> Any:
        package: Package = vars(self)["_package"]
        inner = f"{self.__name__}.{name}"
        if name not in self._targets and inner in package.modules:
            return importlib.import_module(inner)
        if (target := self._target(name)) is not None:
            value = target.value()
            type_names.add(value)
        elif name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        elif (value := package.fallback(name)) is UNKNOWN:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}: Paceline replaces {package.name}, but has no "
                f"replacement for this name.{messages.did_you_mean(name, list(self._targets))}"
            )
        vars(self)[name] = value
        return value

    def _target(self, name: str) -> Target | None:
        """Return where Paceline defines a name of this module."""
        return self._targets.get(name) or self._package.everywhere.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a name both in this module and in Paceline's, so that a test can mock the object that has this name.

        Importing a submodule does not hide a function of the same name.
        """
        if isinstance(value, Alias):
            if name not in self._targets:
                super().__setattr__(name, value)
            return
        target = self._target(name)
        if target is not None and target.name and not name.startswith("__"):
            self._replaced.setdefault(name, target.value())
            setattr(target.owner(), target.name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete a name, and restore Paceline's value if it was replaced."""
        if name in self._replaced:
            target: Any = self._target(name)
            setattr(target.owner(), target.name, self._replaced.pop(name))
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._targets})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder in ``sys.meta_path`` for one package's modules and metadata."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._imported = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a module's spec, or None if the module does not belong to the package."""
        if name.partition(".")[0] not in self.package.roots:
            return None
        original = self.package.own_name(name)
        if original not in self.package.modules:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=self.package.is_package(original))
        spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Create the module, or return the existing one if the name is an alias."""
        if not self._imported:
            self._imported = True
            self.package.on_import()
        original = self.package.own_name(spec.name)
        if original != spec.name:
            module = importlib.import_module(original)
            spec.loader_state = module.__spec__
            return module
        return Alias(spec.name, self.package)

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's version; if the module was imported under an alias, restore its spec."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state
        vars(module).setdefault("__version__", self.package.version)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return the package's distribution that ``context`` names, or all distributions if ``context`` has no name."""
        name = getattr(context, "name", None)
        if name is None and _looks_in_folders(context):
            return []
        found = (one for one in self.package.distributions if name is None or _normal(one) == _normal(name))
        return [Metadata(one, self.package) for one in found]

    def invalidate_caches(self) -> None:
        """Do nothing, because this finder caches nothing."""


class Metadata(importlib.metadata.Distribution):
    """Package metadata with the replaced package's name and version."""

    def __init__(self, distribution: str, package: Package) -> None:
        self._distribution, self._package = distribution, package

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA or top_level.txt, or None for other files."""
        if filename == "top_level.txt":
            return self._distribution.replace("-", "_") + "\n"
        if filename != "METADATA":
            return None
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {self._distribution}",
            f"Version: {self._package.version}",
            f"Summary: {self._package.name}, by Paceline",
            *([f"Home-page: {self._package.homepage}"] if self._package.homepage else []),
        ]
        return "\n".join(lines) + "\n"

    def locate_file(self, path: Any) -> Any:
        """Return the path of a file in the package."""
        return os.path.join(os.path.dirname(__file__), path)


class _Placeholder(type):
    """Metaclass of placeholders for names that Paceline does not have."""

    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(cls.why)


def placeholder(name: str, why: str) -> type:
    """Create a class that works in ``isinstance`` and as a base class, but raises NotImplementedError if called.

    Args:
        name: the class's name in the replaced package.
        why: the part of the error message that follows the name, without the final period.
    """
    return _Placeholder(name, (), {"why": f"{name} {why}."})


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _name(distribution: importlib.metadata.Distribution) -> str:
    """Return a distribution's normalized name, reading its metadata only if its folder's name is not enough."""
    return _normal(getattr(distribution, "_normalized_name", None) or distribution.metadata["Name"] or "")


def _looks_in_folders(context: Any) -> bool:
    """Return True if ``importlib.metadata`` searches folders that the caller passed, instead of ``sys.path``."""
    return context is not None and "path" in vars(context)


def _hide_installed(package: Package) -> None:
    """Make ``importlib.metadata.distributions`` omit the distributions that the package replaces."""
    finder: Any = importlib.metadata.MetadataPathFinder
    find, replaced = finder.find_distributions, {_normal(name) for name in package.distributions}

    def find_others(context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        found = find() if context is None else find(context)
        name = getattr(context, "name", None)
        if _looks_in_folders(context) or (name is not None and _normal(name) not in replaced):
            return found
        return (one for one in found if _name(one) not in replaced)

    finder.find_distributions = staticmethod(find_others)


def install(package: Package) -> bool:
    """Redirect imports of a package to Paceline. Return False if they were already redirected.

    Raises:
        RuntimeError: the real package has already been imported.
    """
    if any(isinstance(finder, Finder) and finder.package is package for finder in sys.meta_path):
        return False
    for root in package.roots:
        if root in sys.modules:
            raise RuntimeError(
                f"compat.install({package.name!r}) replaces {root} with Paceline, but the real {root} has already been "
                f"imported, from {getattr(sys.modules[root], '__file__', None)}. Call compat.install before `import "
                f"{root}`, and before importing libraries that use {root}."
            )
    early = [name for name in package.check_early if name in sys.modules]
    if early:
        messages.warn(
            f"compat.install({package.name!r}) was called after importing {messages.names(early, last='and')}, which "
            f"may already have decided that {package.name} is not installed. Call compat.install before that import."
        )
    sys.meta_path.insert(0, Finder(package))
    _hide_installed(package)
    importlib.invalidate_caches()
    return True
