"""Makes the annotations of Paceline's methods readable at run time, for ``typing.get_type_hints``.

Paceline's modules import many types only for type checkers, in ``if TYPE_CHECKING:``. Programs that run on a
replacement may read annotations, which fails if the name of a type is unknown. Therefore, the names of such types are
added to the modules of the classes and functions that a program imports.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
#: The indented lines after ``if TYPE_CHECKING:``.
_BLOCK = re.compile(r"^if TYPE_CHECKING:\n((?:[ ]{4}.*\n|\n)+)", re.MULTILINE)
_done: set[str] = set()


def add(value: Any) -> None:
    """Add the names that the annotations of a class, of its base classes, or of a function need."""
    owners = value.__mro__ if isinstance(value, type) else (value,) if inspect.isfunction(value) else ()
    for owner in owners:
        name = owner.__module__
        if name.startswith(f"{_PACKAGE}.") and name not in _done:
            _done.add(name)
            _complete(sys.modules[name])


def _complete(module: ModuleType) -> None:
    if hasattr(module, "__getattr__"):  # a package that imports its names when they are first used
        return
    for block in _BLOCK.findall(inspect.getsource(module)):
        for statement in ast.parse(inspect.cleandoc(f"\n{block}")).body:
            if isinstance(statement, ast.ImportFrom):
                _import(module, statement)
            elif not isinstance(statement, ast.Import) or all(one.name in sys.modules for one in statement.names):
                exec(compile(ast.Module([statement], []), module.__name__, "exec"), vars(module))


def _import(module: ModuleType, statement: ast.ImportFrom) -> None:
    """Import names from Paceline or from packages that are already imported; types of other packages become Any."""
    path = importlib.util.resolve_name("." * statement.level + (statement.module or ""), module.__package__)
    known = path.startswith(f"{_PACKAGE}.") or path in sys.modules
    source = importlib.import_module(path) if known else None  # None has no attributes with these names
    for one in statement.names:
        vars(module).setdefault(one.asname or one.name, getattr(source, one.name, Any))
