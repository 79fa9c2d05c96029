"""Packages that import a public name when it is first used (PEP 562), so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazy_names(namespace: dict[str, Any], files: Mapping[str, str], own: str = "", modules: str = "") -> None:
    """Define ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    For type checkers the package also imports each name, as itself, under ``TYPE_CHECKING``.

    Args:
        namespace: the package's ``globals()``.
        files: names, separated by spaces, by the module that defines them, relative to the package.
        own: names in ``__all__`` that the package defines itself.
        modules: modules of the package that can be used without importing them.
    """
    package = namespace["__name__"]
    file_of = {name: file for file, names in files.items() for name in names.split()}
    public = [*file_of, *own.split()]

    def get(name: str) -> Any:
        if name in modules.split():
            return import_module(f".{name}", package)
        if name not in file_of:
            from .messages import did_you_mean

            raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, public)}")
        value = namespace[name] = getattr(import_module(f".{file_of[name]}", package), name)
        return value

    namespace |= {"__getattr__": get, "__dir__": lambda: sorted({*namespace, *public}), "__all__": public}
