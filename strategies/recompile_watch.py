"""Measure what torch.compile costs: how long it takes, and why it recompiles functions."""

from __future__ import annotations

import logging
import re
from collections import Counter
from time import perf_counter
from typing import Any

from .. import messages
from ..torch_private import on_compiling, recompilations

#: Number of recompilations of a function after which a warning shows the reason.
MANY = 4
#: Compilations that take fewer seconds than this are not reported.
WORTH_SECONDS = 0.5
_FUNCTION = re.compile(r"Recompiling function (\S+)")
_SIZE = re.compile(r"tensor '([^']+)' (?:size|rank|stride) mismatch[^\n]*")
#: A guard from the latest compilation that no longer holds, with the line that reads the value.
_GUARD = re.compile(r"- \d+/\d+: ([^\n]*)")


class CompileWatch(logging.Handler):
    """Counts and times the compilations of torch.compile in this process.

    ``recompilations`` and ``reasons`` are keyed by torch's name for the function; ``seconds`` is the total time.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seconds = 0.0
        self.compilations = 0
        self.recompilations: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.last_reason = ""
        self._begun = 0.0

    def begin(self, *_: Any) -> None:
        """Called when a compilation begins."""
        self._begun = perf_counter()

    def end(self, *_: Any) -> None:
        """Called when a compilation ends. Reports the first slow compilation, which may look like a slow step."""
        took = perf_counter() - self._begun
        self.seconds += took
        self.compilations += 1
        if took >= WORTH_SECONDS:
            messages.info_once(
                f"torch.compile took {took:.1f} s to compile a graph. Steps without compilation will be faster.",
                key="compiling takes time",
            )

    def emit(self, record: logging.LogRecord) -> None:
        """Process a log record in which torch reports that it is recompiling a function, and why."""
        text = record.getMessage()
        found = _FUNCTION.search(text)
        if found is None:
            return
        name = found.group(1)
        self.recompilations[name] += 1
        reason = self.last_reason = self.reasons[name] = reason_in(text)
        if self.recompilations[name] >= MANY:
            messages.warn_once(
                f"torch.compile has compiled {name} {self.recompilations[name] + 1} times. Each compilation takes as "
                "long as the first one, and torch gives up compiling after a few more. The last reason was: "
                f"{reason}. {advice_for(reason)}",
                key=f"recompiles {name}",
            )


def reason_in(text: str) -> str:
    """Return the reason for a recompilation from torch's log: a changed size, or else the first failed condition."""
    size, guard = _SIZE.search(text), _GUARD.search(text)
    said = size.group(0) if size else guard.group(1) if guard else text.splitlines()[-1].strip(" -")
    return " ".join(said.replace("self.forward.__self__", "self").split())


def advice_for(reason: str) -> str:
    """Return advice on how to avoid recompilation for this reason."""
    if _SIZE.search(reason):
        return "Use fewer batch shapes (drop_last=True, padding, buckets), or dynamic=True to let shapes change."
    return (
        "Change and read this value outside the compiled code: in a hook such as on_train_batch_end, or by calling "
        "self.log."
    )


_watch = CompileWatch()


def watch_compiling() -> CompileWatch:
    """Start watching torch.compile. This costs nothing unless something is compiled."""
    on_compiling(_watch.begin, _watch.end)
    reasons = recompilations()
    if _watch not in reasons.handlers:
        if not reasons.isEnabledFor(logging.DEBUG) or reasons.level == logging.NOTSET:
            reasons.setLevel(logging.DEBUG)
            reasons.propagate = False  # show torch's log only if the user enabled it (TORCH_LOGS=recompiles)
        reasons.addHandler(_watch)
    return _watch
