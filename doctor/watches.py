"""Watches what the step clock cannot time: waits for the device, operators, garbage collection, compilation."""

from __future__ import annotations

import gc
import linecache
import warnings
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from .. import messages
from ..devices.kinds import CUDA_KIND
from ..torch_private import TorchDispatchMode, compiler_is_loaded, find_unique, off_compiling, on_compiling, read_number
from .step_clock import INDEX, Clock

#: Operators whose result the host must read before it continues, with the code that usually causes them.
_WAITS = {
    read_number: "reads a number from a tensor (.item(), float(), bool(), if, print)",
    torch.ops.aten.nonzero: "counts the nonzero elements (nonzero, where, a boolean index)",
    torch.ops.aten.masked_select: "counts the selected elements (masked_select)",
    find_unique: "counts the distinct values (unique)",
}


class Line(NamedTuple):
    """A line of user code where the host waits for the device."""

    file: str
    number: int
    text: str
    what: str
    times: int


def users_line() -> tuple[str, int] | None:
    """Return the innermost running line outside torch and the standard library; None if it belongs to Paceline."""
    for frame in messages.call_stack():
        owner, is_own = messages.owner_of(frame), frame.f_globals.get("__package__") == __package__
        if owner != "library" and not is_own:
            return (frame.f_code.co_filename, frame.f_lineno) if owner == "user" else None
    return None


class StepWatch(TorchDispatchMode):
    """Counts a step's operators, and records the user's lines where the host would wait for a GPU.

    Watching makes a step much slower, so only two warmup steps are watched. On a GPU, torch itself reports where the
    host waits, including waits that do not show up as operators.

    Attributes:
        operators: number of operators so far.
        lines: number of waits, keyed by (file, line number, reason for the wait).
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.steps = 0, 0
        self.lines: Counter[tuple[str, int, str]] = Counter()
        self._undo: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        what = _WAITS.get(func.overloadpacket)
        if what is not None and not CUDA_KIND.is_initialized():
            self._note(what)
        return func(*args, **(kwargs or {}))

    def _note(self, what: str) -> None:
        line = users_line()
        if line is not None:
            self.lines[(*line, what)] += 1

    def begin(self) -> None:
        """Start watching a step."""
        self.steps += 1
        if CUDA_KIND.is_initialized():
            self._listen()
        self.__enter__()
        self._undo.append(lambda: self.__exit__(None, None, None))

    def _listen(self) -> None:
        kept, waits = warnings.catch_warnings(), CUDA_KIND.reporting_waits()
        kept.__enter__()
        warnings.simplefilter("always")
        then = warnings.showwarning

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchroniz" in str(message):
                self._note("makes the host wait for the GPU")
            else:
                then(message, *args, **kwargs)

        warnings.showwarning = show
        waits.__enter__()
        self._undo += [lambda: kept.__exit__(None, None, None), lambda: waits.__exit__(None, None, None)]

    def end(self) -> None:
        """Stop watching the step, even after an error. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def found(self) -> list[Line]:
        """Return the lines, most frequent first, with their number of waits per step."""
        per_step = max(self.steps, 1)
        return [
            Line(file, number, linecache.getline(file, number).strip(), what, -(-times // per_step))
            for (file, number, what), times in self.lines.most_common()
        ]


class Collections:
    """Measures how long and how often Python's garbage collector runs.

    Attributes:
        seconds: total seconds.
        runs: number of runs.
    """

    def __init__(self) -> None:
        self.seconds, self.runs, self._begun = 0.0, 0, 0.0

    def begin(self) -> None:
        """Start measuring garbage collections."""
        self.seconds, self.runs = 0.0, 0
        if self._called not in gc.callbacks:
            gc.callbacks.append(self._called)

    def end(self) -> None:
        """Stop measuring garbage collections."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = perf_counter()
        else:
            self.seconds += perf_counter() - self._begun
            self.runs += 1


class Compilations:
    """Measures the time that torch.compile takes, and records the recompilations of this run."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._before = clock, INDEX["other"]
        self._watch: Any = None
        self._known: Counter[str] = Counter()

    def begin(self) -> None:
        """Start watching if torch's compiler has been imported; otherwise, nothing can be compiled yet."""
        if not compiler_is_loaded():
            return
        from ..strategies.recompile_watch import watch_compiling

        self._watch = watch_compiling()
        self._known = Counter(self._watch.recompilations)
        on_compiling(self._enter, self._leave)

    def _enter(self, *_: Any) -> None:
        self._before = self._clock.enter(INDEX["compile"])

    def _leave(self, *_: Any) -> None:
        self._clock.enter(self._before)

    def end(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            off_compiling(self._enter, self._leave)

    def found(self) -> list[tuple[str, int, str]]:
        """Return the recompiled functions, most frequent first: name, number of recompilations and last reason."""
        if self._watch is None:
            return []
        again = self._watch.recompilations - self._known
        return [(name, times, self._watch.reasons.get(name, "")) for name, times in again.most_common()]
