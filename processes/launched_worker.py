"""The first code to run in a process of ``paceline launch``: bind to cores, set up failure reports, run the script.

The script runs as if started with ``python script.py``: as ``__main__``, with its own arguments and path. This module
does not import torch, so the script starts as quickly as with plain ``python``.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
import zipfile
from pathlib import Path

from .cpu_affinity import bind
from .rank_failure import register_failure_hook

_ROOT = str(Path(__file__).absolute().parents[2])
# This path is on sys.path only while the package is imported, so that no file in that folder shadows a library.
_PROGRAM = """import sys
if sys.path[:1] == [""]: del sys.path[0]
sys.path.append({root!r})
from {package}.launched_worker import main
sys.path.pop()
main()"""


def command(target: str, arguments: list[str], module: bool = False) -> list[str]:
    """Return the command for a process that runs a script or a module through this module's :func:`main`."""
    program = _PROGRAM.format(root=_ROOT, package=__package__)
    return [sys.executable, "-c", program, "module" if module else "script", target, *arguments]


def main() -> None:
    """Run the script or module named on the command line, with its arguments."""
    bind()
    register_failure_hook()
    if sys.stdout is not None and isinstance(sys.stdout, io.TextIOWrapper):
        # Several processes share this stream, so each writes complete lines, even with PYTHONUNBUFFERED.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    kind, target, *arguments = sys.argv[1:]
    sys.argv = [target, *arguments]
    namespace = sys.modules["__main__"].__dict__
    for name in ("sys", "main"):
        namespace.pop(name, None)
    if kind == "module":
        _add_path(os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[reportAttributeAccessIssue]
    elif os.path.isdir(target) or zipfile.is_zipfile(target):
        _add_path(os.path.abspath(target), always=True)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[reportAttributeAccessIssue]
    else:
        _add_path(os.path.dirname(os.path.realpath(target)))
        _run_script(os.path.abspath(target), namespace)


def _add_path(folder: str, always: bool = False) -> None:
    if always or not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_script(file: str, namespace: dict[str, object]) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    namespace.update(__file__=file, __cached__=None, __spec__=None, __loader__=loader)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, namespace)
