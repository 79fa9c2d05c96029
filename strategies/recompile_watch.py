"""What compiling costs: how long it took, and which argument makes torch compile again and again."""

from __future__ import annotations

import logging
import re
from collections import Counter
from time import perf_counter
from typing import Any

from .. import messages

#: Recompilations of one function from which on a warning gives their reason.
MANY = 4
#: Shorter compilations are not worth a line, in seconds.
WORTH_SECONDS = 0.5
_FUNCTION = re.compile(r"Recompiling function (\S+)")
_SIZE = re.compile(r"tensor '([^']+)' (?:size|rank|stride) mismatch[^\n]*")
#: What held when torch compiled last, with the line that reads it.
_GUARD = re.compile(r"- \d+/\d+: ([^\n]*)")


class CompileWatch(logging.Handler):
    """Counts what torch.compile does in this process.

    Attributes:
        seconds: spent compiling, all together.
        compilations: graphs made.
        recompilations: by function, as torch names it.
        reasons: why the last one of each was.
        last_reason: why the last one of all was.
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
        """A compilation begins."""
        self._begun = perf_counter()

    def end(self, *_: Any) -> None:
        """It is over. The first long one is reported, so that nobody takes it for a slow step."""
        took = perf_counter() - self._begun
        self.seconds += took
        self.compilations += 1
        if took >= WORTH_SECONDS:
            messages.info_once(
                f"torch.compile took {took:.1f} s for a graph. The time of that step says nothing about the others.",
                key="compiling takes time",
            )

    def emit(self, record: logging.LogRecord) -> None:
        """Torch compiles a function again, and says why."""
        text = record.getMessage()
        found = _FUNCTION.search(text)
        if found is None:
            return
        name = found.group(1)
        self.recompilations[name] += 1
        reason = self.last_reason = self.reasons[name] = reason_in(text)
        if self.recompilations[name] >= MANY:
            messages.warn_once(
                f"torch.compile has compiled {name} {self.recompilations[name] + 1} times. Each time costs as much as "
                f"the first, and torch gives up after a few more. The last reason: {reason}. {advice_for(reason)}",
                key=f"recompiles {name}",
            )


def reason_in(text: str) -> str:
    """Why torch compiles again, from its explanation: a size that changed, or else the first condition that failed."""
    size, guard = _SIZE.search(text), _GUARD.search(text)
    said = size.group(0) if size else guard.group(1) if guard else text.splitlines()[-1].strip(" -")
    return " ".join(said.replace("self.forward.__self__", "self").split())


def advice_for(reason: str) -> str:
    """What to do about a reason to compile again."""
    if _SIZE.search(reason):
        return (
            "Bring batches to few shapes (drop_last=True, padding, buckets), or compile for changing shapes "
            "(dynamic=True)."
        )
    return (
        "Change and read this outside the compiled code: collect values in a hook such as on_train_batch_end, or "
        "self.log them."
    )


_watch = CompileWatch()


def watch_compiling() -> CompileWatch:
    """Watch what torch.compile does from here on; costs nothing where nothing is compiled."""
    from ..torch_private import on_compiling, recompilations

    on_compiling(_watch.begin, _watch.end)
    reasons = recompilations()
    if _watch not in reasons.handlers:
        if not reasons.isEnabledFor(logging.DEBUG) or reasons.level == logging.NOTSET:
            reasons.setLevel(logging.DEBUG)
            reasons.propagate = False  # torch's own lines are for who asked for them (TORCH_LOGS=recompiles)
        reasons.addHandler(_watch)
    return _watch
