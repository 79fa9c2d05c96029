"""Write down the public names of a package that Paceline replaces, module by module, as its source declares them.

PYTHONPATH=.. python tests/compat/write_surface.py SITE_PACKAGES/accelerate > compat/accelerate/surface.txt

The package is only read, not imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: Folders with scripts, forms and other packages, below the package's own.
_LEFT_OUT = ("commands/menu", "data", "test_utils/scripts")
_FOLDERS = tuple(f"{folder}/" for folder in _LEFT_OUT)
#: Names that modules use themselves.
_PLUMBING = ("T", "default_pg_timeout", "log", "logger", "parser", "warning_cache")


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """The package's modules and their files."""
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package).with_suffix("")
        inside = inside.parent if inside.name == "__init__" else inside
        if any(part.startswith("_") for part in inside.parts) or f"{inside}/".startswith(_FOLDERS):
            continue
        yield ".".join((package.name, *inside.parts)), file


def public_names(file: Path, package: str) -> list[str]:
    """The names in ``__all__``; else those that a module defines, and in a package those of its own that it imports."""
    found: set[str] = set()
    for one in ast.parse(file.read_text()).body:
        if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(one.name)
        elif isinstance(one, ast.ImportFrom) and file.name == "__init__.py":
            if one.level or (one.module or "").partition(".")[0] == package:
                found.update(alias.asname or alias.name for alias in one.names)
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names == ["__all__"] and isinstance(one.value, (ast.List, ast.Tuple)):
                found = set(ast.literal_eval(one.value))
                break
            found.update(names)
    return sorted(name for name in found if not name.startswith("_") and name not in _PLUMBING)


if __name__ == "__main__":
    package = Path(sys.argv[1])
    for module, file in modules(package):
        print(f"{module}: {' '.join(public_names(file, package.name))}".rstrip())
