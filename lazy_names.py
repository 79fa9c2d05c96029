"""Make a package import its public names on first use (PEP 562), so that importing the package is fast."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any


def lazy_names(namespace: dict[str, Any], files: Mapping[str, str], own: str = "", modules: str = "") -> None:
    """Define a package's ``__getattr__``, ``__dir__`` and ``__all__``.

    For type checkers, the package should also import each name as itself under ``TYPE_CHECKING``.

    Args:
        namespace: the package's ``globals()``.
        files: dict that maps each module, relative to the package, to the names that the module defines, separated by
            spaces.
        own: names in ``__all__`` that the package itself defines.
        modules: the package's modules that can be used without importing them first.
    """
    package = namespace["__name__"]
    file_of = {name: file for file, names in files.items() for name in names.split()}
    public = [*file_of, *own.split()]

    @cache
    def hint(name: str) -> str:  # libraries look for the same missing names again and again
        from .messages import did_you_mean

        return did_you_mean(name, public)

    def get(name: str) -> Any:
        if name in modules.split():
            return import_module(f".{name}", package)
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint(name)}")
        try:
            value = namespace[name] = getattr(import_module(f".{file_of[name]}", package), name)
        except AttributeError as error:  # an import statement would only say that the package has no such name
            raise not_imported(name, error) from error
        except ImportError as error:
            if (error.name or "").startswith("torch."):
                raise not_imported(name, error) from error
            raise
        return value

    def not_imported(name: str, error: Exception) -> ImportError:
        from .torch_versions import untried

        return ImportError(f"{package}.{name} cannot be imported: {error}. {untried() or ''}".rstrip())

    namespace |= {"__getattr__": get, "__dir__": lambda: sorted({*namespace, *public}), "__all__": public}
