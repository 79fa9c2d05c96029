"""Write down the parameters of the public functions, classes and methods of a package, as its source declares them.

PYTHONPATH=.. python tests/compat/write_parameters.py SITE_PACKAGES/accelerate > tests/compat/accelerate_parameters.txt

The package is only read, not imported. Parameters that begin with an underscore are left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from write_surface import modules, public_names


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names that a function's arguments can be passed by."""
    listed = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
    return [name for name in listed if not name.startswith("_") and name not in ("self", "cls")]


def of_class(node: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    """A class's own constructor or fields, and its own public methods."""
    functions = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        fields = [
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        yield node.name, [name for name in fields if not name.startswith("_")]
    for one in functions:
        if one.name == "__init__":
            yield node.name, parameters(one)
        elif not one.name.startswith("_") and not any(
            ast.unparse(mark).endswith(("property", "setter")) for mark in one.decorator_list
        ):
            yield f"{node.name}.{one.name}", parameters(one)


def of_module(file: Path, package: str) -> Iterator[tuple[str, list[str]]]:
    """All that a module defines itself and that is public."""
    public = public_names(file, package)
    for one in ast.parse(file.read_text()).body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name in public:
            yield one.name, parameters(one)
        elif isinstance(one, ast.ClassDef) and one.name in public:
            yield from of_class(one)


if __name__ == "__main__":
    package = Path(sys.argv[1])
    for module, file in modules(package):
        for name, listed in of_module(file, package.name):
            print(f"{module}:{name}: {' '.join(listed)}".rstrip())
