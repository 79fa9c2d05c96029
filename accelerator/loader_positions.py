"""Where a loader is: its pass under way, and the first one after a position was loaded.

A script may skip to that position by itself: it expects to (``Loaded.by_script``), or is told that it need not.
"""

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
    from .loaders import PreparedLoader


class Pass:
    """One pass over a loader.

    Attributes:
        epoch: its number, 0-based.
        done: batches of it that were handed out, those left out at its beginning included.
        batches: where they come from.
        length: how many batches it has; -1: ``batches`` knows with each one whether it is the last.
        random: the states of the host's random generators with which it began.
    """

    __slots__ = ("batches", "done", "epoch", "length", "random")

    def __init__(self, epoch: int, done: int, batches: Batches, length: int) -> None:
        self.epoch, self.done, self.batches, self.length = epoch, done, batches, length
        self.random = host_random_states()

    @property
    def at_last(self) -> bool:
        """Whether the batch handed out last is its last one."""
        return self.done == self.length or self.batches.exhausted


def _nothing() -> None:
    """Nothing is to be done."""


class Loaded:
    """A position that was loaded, until the next pass begins.

    Args:
        position: as :meth:`PreparedLoader.state_dict` gave it.

    Attributes:
        by_script: the script skips to the position by itself, so the next pass begins at its start.
        window_start: the batch after which the window of micro-batches under way began; None: there was none.
        arrive: called when the script has skipped to the position.
        leave: called when the next pass begins before the position; forgets the window under way.
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
        """The number of the pass that is to come: the one that was under way, if there is more of it."""
        return self.position["epoch"] + self.position["last"]


class FirstUse:
    """Whether the loop has run a backward or an optimizer step since this object was made.

    Args:
        state: of the Accelerator.

    Attributes:
        seen: it has.
    """

    def __init__(self, state: GradientState) -> None:
        self.seen = False
        state.first_use.append(self.used)

    def used(self) -> None:
        """The loop trains."""
        self.seen = True


class LeftOut(FirstUse):
    """Finds batches of a continued pass that a loop drops because it skips what ``load_state`` has skipped already.

    A batch was left out if nobody holds it any more when the loop trains for the first time. A loop that reads several
    batches ahead still holds them.

    Args:
        state: of the Accelerator.
        loaded: the position that was loaded.
        one: the pass that continues from it.
    """

    def __init__(self, state: GradientState, loaded: Loaded, one: Pass) -> None:
        super().__init__(state)
        self._expected, self._epoch, self._first = loaded.position["batches"], one.epoch, one.done
        self._taken: list[Callable[[], Any]] = []
        self._at_hand = 1  # the batch that the loop took last, while the pass is under way
        weakref.finalize(state, self.over, messages.info)  # or when the program ends, where no line is the user's

    def watch(self, batches: Generator[Any]) -> Generator[Any]:
        """Hand out the batches, and notice those that are dropped before the loop trains on one."""
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
        """The loop trains for the first time: what it does not hold by now was left out."""
        before = self._taken[: len(self._taken) - self._at_hand]
        dropped = sum(held() is None for held in before)
        if not dropped and len(before) == self._expected > 1:
            dropped = len(before)  # held by the data set, it seems: a loop that skips takes exactly as many
        self._tell(dropped, messages.warn, within_pass=self._at_hand > 0)

    def over(self, say: Callable[[str], None] = messages.warn) -> None:
        """Another pass begins or the program ends, and the loop has not trained: all that it took was left out."""
        self._tell(len(self._taken) - self._at_hand, say)

    def _tell(self, count: int, say: Callable[[str], None], within_pass: bool = False) -> None:
        said, self.seen = self.seen, True
        if count <= 0 or said:
            return
        whole = (
            f"The pass was only the rest of epoch {self._epoch}, because load_state has moved the loader to its "
            "position. To count or evaluate all batches, use a loader of its own. "
        )
        within = "load_state has moved the loader to its position already. "
        say(
            f"After accelerator.load_state the loop took {_batches(self._first, self._first + count)} of epoch "
            f"{self._epoch} from the loader and did not train on {'it' if count == 1 else 'them'}. "
            f"{within if within_pass else whole}A script that skips as well leaves batches out: delete what skips "
            "in it (such as `if step < resume_step: continue`), and count with enumerate(loader, "
            "start=loader.batches_done)."
        )


class Place:
    """Where a loader is: shared with those that ``skip_first_batches`` makes of it.

    Attributes:
        epoch: the number of the next pass.
        current: the pass under way, None between two.
        resume: the position from which the next pass continues; None: it begins at its start.
        left_out: looks for batches that the loop drops in the pass that continued from a position.
    """

    __slots__ = ("current", "epoch", "left_out", "resume")

    def __init__(self) -> None:
        self.epoch = 0
        self.current: Pass | None = None
        self.resume: Loaded | None = None
        self.left_out: LeftOut | None = None

    def __reduce__(self) -> Any:
        """A copy begins the pass under way anew."""
        return _place_at, ((self.epoch, self.resume) if self.current is None else (self.current.epoch, None))


def _place_at(epoch: int, resume: Loaded | None) -> Place:
    made = Place()
    made.epoch, made.resume = epoch, resume
    return made


def _batches(after: int, to: int) -> str:
    """``(3, 6)`` -> ``"batches 4 to 6"``."""
    return f"batch {to}" if to == after + 1 else f"batches {after + 1} to {to}"


def _reference(batch: Any) -> Callable[[], Any]:
    """What gives a batch's first tensor while somebody holds it; without tensors None, as if nobody did."""
    return next((weakref.ref(tensor) for tensor in leaves(batch)), _nothing)


def resumed(loader: PreparedLoader, loaded: Loaded) -> Generator[Any]:
    """Begin the first pass after a position was loaded."""
    if loaded.by_script:
        return _led_by_script(loader, loaded)
    position, skip = loaded.position, loader._skip
    done, next_epoch = position["batches"], loader._place.epoch
    if skip not in (0, done, loaded.window_start or 0):
        _tell_other_number(loaded, skip)
        return loader._hand_out(*loader._begin(position["epoch"]))
    if skip:
        messages.info_once(
            f"skip_first_batches(loader, {skip}) after accelerator.load_state has no effect: the loader is at batch "
            f"{done} of epoch {position['epoch']} already, and continues there. Delete the call."
        )
    if position["last"] and not skip and next_epoch != position["epoch"]:
        loader._finish(position)
        one, batches = loader._begin(next_epoch)
    else:
        one, batches = loader._continue(position)
    state, found = loader.gradient_state, loader._hand_out(one, batches)
    if not done or not state.trains:
        return found
    loader._place.left_out = LeftOut(state, loaded, one)
    return loader._place.left_out.watch(found)


def _tell_other_number(loaded: Loaded, skip: int) -> None:
    """Say what ``skip_first_batches`` leaves out or repeats with another number than that of the loaded position."""
    done = loaded.position["batches"]
    if skip > done:
        what = f"the pass leaves out {_batches(done, skip)}"
    else:
        what = f"the pass repeats {_batches(skip, done)}"
        loaded.leave()
    messages.warn(
        f"skip_first_batches(loader, {skip}) after accelerator.load_state, which had moved the loader to batch {done} "
        f"of epoch {loaded.position['epoch']}: {what}. Delete the call to continue after batch {done}."
    )


def _led_by_script(loader: PreparedLoader, loaded: Loaded) -> Generator[Any]:
    """The pass of a script that skips by itself."""
    position, skip = loaded.position, loader._skip
    if skip == position["batches"]:
        loaded.arrive()
        return loader._hand_out(*loader._continue(position))
    if position["last"] and loader._place.epoch != position["epoch"]:
        loader._finish(position)
        return _unless_dropped(loader, loaded, *loader._begin(position["epoch"] + 1))
    if skip > position["batches"]:
        return loader._hand_out(*loader._begin(position["epoch"]))
    return _up_to(loader, loaded, *loader._begin_again(position))


def _up_to(loader: PreparedLoader, loaded: Loaded, one: Pass, iterator: Any) -> Generator[Any]:
    """A pass from its start; where the loop has trained on nothing before the loaded position, it continues there."""
    use, done, begun = FirstUse(loader.gradient_state), loaded.position["batches"], one.done
    batches = loader._hand_out(one, iterator)
    try:
        for batch in batches:
            yield batch
            if use.seen:
                if one.done == begun + 1 and not begun:
                    messages.info_once(
                        f"The state was saved after batch {done} of epoch {one.epoch}, and the loop begins that epoch "
                        "again, so it trains on these batches twice. accelerator.skip_first_batches(loader, "
                        f"{done}) continues after them."
                    )
                break
            if one.done == done:
                batches.close()
                loaded.arrive()
                batches = loader._hand_out(*loader._continue(loaded.position))
                break
        yield from batches
    finally:
        batches.close()


def _unless_dropped(loader: PreparedLoader, loaded: Loaded, one: Pass, iterator: Any) -> Generator[Any]:
    """The pass after one that had ended; a loop that drops all of it has skipped the one that had ended."""
    use, batches = FirstUse(loader.gradient_state), loader._hand_out(one, iterator)
    try:
        for batch in batches:
            yield batch
            if use.seen:
                break
        else:
            loader._finish(loaded.position)
        yield from batches
    finally:
        batches.close()
