"""What is looked at beside the clock: lines that wait for the device, operators, garbage collection, compiling."""

from __future__ import annotations

import gc
import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch

from .. import messages
from ..torch_private import TorchDispatchMode, compiler_is_loaded, find_unique, off_compiling, on_compiling, read_number
from .step_clock import INDEX, Clock

#: Operators whose result the host must see before it goes on, and how they are usually written.
_WAITS = {
    read_number: "reads a number out of a tensor (.item(), float(), bool(), if, print)",
    torch.ops.aten.nonzero: "asks how many elements are not zero (nonzero, where, a boolean index)",
    torch.ops.aten.masked_select: "asks how many elements are selected (masked_select)",
    find_unique: "asks how many values there are (unique)",
}


class Line(NamedTuple):
    """A line of the user's at which the host waits for the device."""

    file: str
    number: int
    text: str
    what: str
    times: int


def users_line() -> tuple[str, int] | None:
    """The line that is being run, outside of torch and the standard library; None if that is one of Paceline's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner, is_own = messages.owner_of(frame), frame.f_globals.get("__package__") == __package__
        if owner != "library" and not is_own:
            return (frame.f_code.co_filename, frame.f_lineno) if owner == "user" else None
        frame = frame.f_back
    return None


class StepWatch(TorchDispatchMode):
    """Sees every operator of a step: counts them, and notes the user's lines at which a host would wait for a GPU.

    It slows a step down a lot, so it looks at two steps that do not count. On a GPU torch itself says where the host
    waits (``torch.cuda.set_sync_debug_mode``), also in what no operator shows.

    Attributes:
        operators: how many there were, of one step.
        lines: what was found, as (file, line, what) with how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.steps = 0, 0
        self.lines: Counter[tuple[str, int, str]] = Counter()
        self._undo: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        what = _WAITS.get(func.overloadpacket)
        if what is not None and not torch.cuda.is_initialized():
            self._note(what)
        return func(*args, **(kwargs or {}))

    def _note(self, what: str) -> None:
        line = users_line()
        if line is not None:
            self.lines[(*line, what)] += 1

    def begin(self) -> None:
        """A step begins."""
        self.steps += 1
        if torch.cuda.is_initialized():
            self._listen()
        self.__enter__()
        self._undo.append(lambda: self.__exit__(None, None, None))

    def _listen(self) -> None:
        before, kept = torch.cuda.get_sync_debug_mode(), warnings.catch_warnings()
        kept.__enter__()
        warnings.simplefilter("always")
        then = warnings.showwarning

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchroniz" in str(message):
                self._note("makes the host wait for the GPU")
            else:
                then(message, *args, **kwargs)

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        self._undo += [lambda: kept.__exit__(None, None, None), lambda: torch.cuda.set_sync_debug_mode(before)]

    def end(self) -> None:
        """The step is over, also after an error; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def found(self) -> list[Line]:
        """The lines, the most frequent first; how often is for one step."""
        per_step = max(self.steps, 1)
        return [
            Line(file, number, linecache.getline(file, number).strip(), what, -(-times // per_step))
            for (file, number, what), times in self.lines.most_common()
        ]


class Collections:
    """How long Python's garbage collector ran.

    Attributes:
        seconds: all together.
        runs: how often.
    """

    def __init__(self) -> None:
        self.seconds, self.runs, self._begun = 0.0, 0, 0.0

    def begin(self) -> None:
        """Count from here on."""
        self.seconds, self.runs = 0.0, 0
        if self._called not in gc.callbacks:
            gc.callbacks.append(self._called)

    def end(self) -> None:
        """Count no more."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = perf_counter()
        else:
            self.seconds += perf_counter() - self._begun
            self.runs += 1


class Compilations:
    """Lets what torch.compile does count as such on a clock; knows the recompilations of this run.

    Args:
        clock: of the run.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._before = clock, INDEX["other"]
        self._watch: Any = None
        self._known: Counter[str] = Counter()

    def begin(self) -> None:
        """Watch, where something is compiled at all: else torch's compiler is not even imported."""
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
        """Watch no more."""
        if self._watch is not None:
            off_compiling(self._enter, self._leave)

    def found(self) -> list[tuple[str, int, str]]:
        """Functions that were compiled again: name, how often, the last reason; the most frequent first."""
        if self._watch is None:
            return []
        again = self._watch.recompilations - self._known
        return [(name, times, self._watch.reasons.get(name, "")) for name, times in again.most_common()]
