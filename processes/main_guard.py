"""Check for a main guard, because fresh processes import the program and must not run all of its code again."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

#: Statements that may prevent a line from running again in a process that imports the file.
_CONDITIONS = (ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.While)


def require_main_guard(who: str) -> None:
    """Raise an error if new processes would start more processes when they import the program.

    In the first process, this finds only top-level statements without any condition around them. Missing guards around
    any other statements are found in the new process.

    Args:
        who: the setting that starts the processes, for the message, such as ``"strategy='ddp_spawn'"``.

    Raises:
        RuntimeError: there is no main guard; the message shows the lines to add.
    """
    found = _in_new_process() or _unguarded()
    if found is None:
        return
    file, number, statement = found
    line = f"line {number}" if number else "that program"
    raise RuntimeError(
        f"{who} starts fresh processes, and each of them runs {file} again from the top, so {line} would start "
        "more processes. Put code that only the first process should run under a main guard:\n\n"
        f'    if __name__ == "__main__":\n        {statement}\n'
    )


def _in_new_process() -> tuple[str, int, str] | None:
    """Return the running statement if this process is importing its parent's program; None otherwise."""
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return None
    main = sys.modules.get("__mp_main__")
    found = None if main is None else _top_level(main)
    return found or ("the program", 0, "...")


def _unguarded() -> tuple[str, int, str] | None:
    """Return the program's running statement if a process that imports the program would also run that statement."""
    main: Any = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", "")
    if name.rpartition(".")[2] == "__main__" or Path(getattr(main, "__file__", None) or "").stem == "ipython":
        return None  # multiprocessing does not import such programs
    return _top_level(main, only_without_condition=True)


def _top_level(main: Any, only_without_condition: bool = False) -> tuple[str, int, str] | None:
    """Return the file, line number and first line of the statement in ``main`` that is currently running."""
    file = getattr(main, "__file__", None)
    if file is None:
        return None
    line, path = 0, os.path.abspath(file)
    for frame, number in traceback.walk_stack(inspect.currentframe()):
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals is vars(main) and os.path.abspath(code.co_filename) == path:
            line = number
    if not line:
        return None
    try:
        source = Path(file).read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(source)) if _spans(node, line)]
    except (OSError, ValueError, SyntaxError):
        return None
    if only_without_condition and any(isinstance(node, _CONDITIONS) for node in nodes):
        return None
    start = min((node.lineno for node in nodes if isinstance(node, ast.Expr | ast.Assign)), default=line)
    return Path(file).name, start, source.splitlines()[start - 1].strip()


def _spans(node: Any, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0)
