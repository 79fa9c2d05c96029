"""The position of a prepared loader: its current pass, a loaded position, and the batches that a resumed loop drops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from .. import messages
from ..data.batches import Batches
from ..processes.seed import host_random_states
from .nested_tensors import leaves

if TYPE_CHECKING:
    from .accumulation import GradientState


class Pass:
    """One pass over a loader.

    Attributes:
        epoch: index of the pass, 0-based.
        done: number of batches yielded, including skipped ones.
        batches: source of the batches.
        length: number of batches; -1 if it only becomes known when ``batches`` is exhausted.
        random: states of the CPU's random generators at the start of the pass.
        at_end: whether the most recent batch is the last one.
        before_last: function that returns the batch before the last one, or None once the loop no longer references it.
        read_ahead: number of batches that were read but have had no backward pass.
        last_is_unknown: whether the last batch's loss cannot be told apart from the losses of earlier batches.
    """

    __slots__ = (
        *("at_end", "batches", "before_last", "done", "epoch", "last_is_unknown", "length", "random", "read_ahead"),
    )

    def __init__(self, epoch: int, done: int, batches: Batches, length: int) -> None:
        self.epoch, self.done, self.batches, self.length = epoch, done, batches, length
        self.random = host_random_states()
        self.at_end, self.before_last = False, _nothing
        self.read_ahead = 0
        self.last_is_unknown = False

    def ends_with(self, batch_before: Any) -> None:
        """Record that the next batch is the last one, and which batch was yielded before it."""
        self.at_end, self.before_last = True, _reference(batch_before)

    def is_loss_of_latest(self, first: bool) -> bool:
        """Return whether a loss belongs to the batch that was read most recently.

        A loop that reads several batches before running their backward passes computes the losses in the order of the
        batches. A loop that skips batches no longer references them, which is checked only for the last batch.

        Args:
            first: whether this is the micro-batch's first backward pass.
        """
        found = self.read_ahead + (not first) <= 1 or (self.at_end and self.before_last() is None)
        self.last_is_unknown = self.at_end and not found
        return found

    @property
    def at_last(self) -> bool:
        """Whether the most recent batch is the last one of the pass."""
        return self.done == self.length or self.batches.exhausted


def _nothing() -> Any:
    """Do nothing."""


class LoadedPosition:
    """A loaded position, kept until the next pass begins.

    Args:
        position: a state from :meth:`PreparedLoader.state_dict`.

    Attributes:
        by_script: whether the script itself skips to the position; if so, the next pass starts from the beginning.
        window_start: number of the batch after which the saved accumulation window began; None if no window was saved.
        arrive: function to call when the script has skipped to the position.
        leave: function that discards the saved window; called if the next pass starts before the position.
    """

    __slots__ = ("arrive", "by_script", "leave", "position", "window_start")

    def __init__(self, position: Mapping[str, Any]) -> None:
        self.position = position
        self.by_script = False
        self.window_start: int | None = None
        self.arrive: Callable[[], Any] = _nothing
        self.leave: Callable[[], Any] = _nothing

    @property
    def next_epoch(self) -> int:
        """Index of the next pass: the saved pass or, if the saved pass has no batches left, the pass after it."""
        return self.position["epoch"] + self.position["last"]

    def skipped_to(self, skip: int) -> None:
        """Warn that ``skip_first_batches`` and ``load_state`` disagree, so batches are lost or repeated."""
        done = self.position["batches"]
        if skip > done:
            what = f"the pass skips {_batches(done, skip)}"
        else:
            what = f"the pass repeats {_batches(skip, done)}"
            self.leave()
        messages.warn(
            f"skip_first_batches(loader, {skip}) was called after accelerator.load_state, which had moved the loader "
            f"to batch {done} of epoch {self.position['epoch']}, so {what}. To continue after batch {done}, delete the "
            "call to skip_first_batches."
        )


class FirstUse:
    """Detects the first backward pass or optimizer step after this object is created.

    Attributes:
        seen: whether the backward pass or step has happened.
    """

    def __init__(self, state: GradientState) -> None:
        self.seen = False
        state.first_use.append(self.used)

    def used(self) -> None:
        """Record that the loop has trained."""
        self.seen = True


class LeftOut(FirstUse):
    """Detects batches that are lost because the loop skips batches although ``load_state`` has already skipped them.

    A batch counts as dropped if nothing references it when the loop first trains. A loop that reads several batches
    ahead still references them.

    Args:
        loaded: the loaded position.
        one: the pass that starts at the loaded position.
    """

    def __init__(self, state: GradientState, loaded: LoadedPosition, one: Pass) -> None:
        super().__init__(state)
        self._expected, self._epoch, self._first = loaded.position["batches"], one.epoch, one.done
        self._taken: list[Callable[[], Any]] = []
        self._at_hand = 1  # the batch that the loop took last, until the pass ends
        weakref.finalize(state, self.over, messages.info)  # when the program ends, no user code is on the stack

    def watch(self, batches: Generator[Any]) -> Generator[Any]:
        """Yield the batches, and remember them until the loop trains."""
        try:
            for batch in batches:
                self._taken.append(_reference(batch))
                yield batch
                if self.seen:
                    break
            else:
                self._at_hand = 0
            yield from batches
        finally:
            batches.close()

    def used(self) -> None:
        """Report the batches that the loop no longer references when it first trains."""
        before = self._taken[: len(self._taken) - self._at_hand]
        dropped = sum(held() is None for held in before)
        if not dropped and len(before) == self._expected > 1:
            dropped = len(before)  # exactly as many as a skipping loop takes; the dataset may still reference them
        self._tell(dropped, messages.warn, within_pass=self._at_hand > 0)

    def over(self, say: Callable[[str], None] = messages.warn) -> None:
        """Report all batches of the pass; called if the pass or the program ends before the loop has trained."""
        self._tell(len(self._taken) - self._at_hand, say)

    def _tell(self, count: int, say: Callable[[str], None], within_pass: bool = False) -> None:
        said, self.seen = self.seen, True
        if count <= 0 or said:
            return
        whole = (
            f"The pass covered only the rest of epoch {self._epoch}, because load_state had moved the loader to its "
            "saved position. To count the batches of an epoch, or to evaluate all of them, use a separate loader. "
        )
        within = "load_state had already moved the loader to its saved position. "
        say(
            f"After accelerator.load_state, the loop took {_batches(self._first, self._first + count)} of epoch "
            f"{self._epoch} from the loader but did not train on {'it' if count == 1 else 'them'}. "
            f"{within if within_pass else whole}A script that also skips batches never trains on those batches. "
            "Delete the code that skips batches (such as `if step < resume_step: continue`), and count with "
            "enumerate(loader, start=loader.batches_done)."
        )


class Place:
    """The position of a loader, shared with the loaders that ``skip_first_batches`` creates from that loader.

    Attributes:
        epoch: index of the next pass.
        current: the current pass, or None.
        resume: position where the next pass resumes; None means the beginning.
        left_out: detects batches that the loop drops in a resumed pass.
    """

    __slots__ = ("current", "epoch", "left_out", "resume")

    def __init__(self) -> None:
        self.epoch = 0
        self.current: Pass | None = None
        self.resume: LoadedPosition | None = None
        self.left_out: LeftOut | None = None

    def __reduce__(self) -> Any:
        """Pickle this position so that a copy restarts the current pass."""
        return _place_at, ((self.epoch, self.resume) if self.current is None else (self.current.epoch, None))


def _place_at(epoch: int, resume: LoadedPosition | None) -> Place:
    made = Place()
    made.epoch, made.resume = epoch, resume
    return made


def _batches(after: int, to: int) -> str:
    """Describe a range of batches: ``(3, 6)`` gives ``"batches 4 to 6"``."""
    return f"batch {to}" if to == after + 1 else f"batches {after + 1} to {to}"


def _reference(batch: Any) -> Callable[[], Any]:
    """Return a function that returns a batch's first tensor, or None once nothing else references the tensor."""
    return next((weakref.ref(tensor) for tensor in leaves(batch)), _nothing)
