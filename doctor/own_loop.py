"""``accelerator.doctor()``: the doctor for a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import messages
from ..strategies.base import Strategy
from .doctor import Doctor
from .step_clock import INDEX
from .subject import has_compiled

if TYPE_CHECKING:
    from ..accelerator.accelerator import Accelerator

#: Methods of the Accelerator and the part of a step that each belongs to.
_METHODS = {
    "backward": "backward",
    "clip_grad_norm_": "optimizer",
    "clip_grad_value_": "optimizer",
    "gather": "communication",
    "gather_for_metrics": "communication",
    "reduce": "communication",
    "pad_across_processes": "communication",
    "wait_for_everyone": "communication",
    "log": "logging",
    "save_state": "checkpoint",
    "save_model": "checkpoint",
    "save": "checkpoint",
}
_FETCH = "[_TrainingEpochLoop].train_dataloader_next"


@contextmanager
def doctor(accelerator: Accelerator, examiner: Doctor) -> Iterator[Doctor]:
    """Measure the loop inside this context; at its end all ranks make the report, which is printed and written.

    If an error ends the loop, the report covers the steps that rank 0 has finished.

    Args:
        accelerator: the loop's Accelerator. Objects prepared inside the context are measured too.
        examiner: the doctor that measures.
    """
    examiner.setup("fit", accelerator.local_process_index, accelerator.project_configuration.project_dir)
    wiring = Wiring(accelerator, examiner)
    try:
        wiring.wrap()
        examiner.begin(wiring)
        try:
            yield examiner
        except BaseException:
            wiring.unwrap()
            _judge_what_is_done(examiner)
            raise
        wiring.unwrap()  # the report below is not part of the loop
        examiner.end()
        examiner.describe()
    finally:
        wiring.unwrap()
        examiner.teardown("fit")


def _judge_what_is_done(examiner: Doctor) -> None:
    """Report after an error, without hiding the error if the report fails."""
    try:
        examiner.interrupted()
        examiner.describe()
    except Exception as error:
        messages.warn(f"The doctor cannot report on a loop that an error ended: {type(error).__name__}: {error}")


class Wiring:
    """Wraps prepared objects and provides the doctor with facts about the loop."""

    own_loop = True

    def __init__(self, accelerator: Accelerator, examiner: Doctor) -> None:
        self.accelerator, self.examiner = accelerator, examiner
        self.updates = 0
        self._wrapped: list[tuple[Any, str, bool, Any]] = []
        self._seen: set[int] = set()
        self._trained: Any = None

    # ---- facts for the doctor ---------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The processes and their device."""
        return self.accelerator._strategy

    @property
    def communication(self) -> dict[str, float]:
        """Seconds of communication so far, of the first trained model."""
        return next((told for one in self._replicas() if (told := one.communication_seconds())), None) or {}

    def measure_communication(self) -> None:
        """Let the models' strategies measure communication."""
        for strategy in self._replicas():
            strategy.measure_communication()

    def _replicas(self) -> list[Strategy]:
        return [one.strategy for one in self.accelerator._placements.values() if not one.frozen]

    @property
    def accumulate(self) -> int:
        """Micro-batches per update."""
        return self.accelerator.gradient_state.num_steps

    @property
    def is_compiled(self) -> bool:
        """Whether models are compiled."""
        return self.accelerator.settings["dynamo_backend"] != "no" or has_compiled(self.modules)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The prepared models."""
        return list(self.accelerator._models)

    @property
    def loader(self) -> Any:
        """The loader of the last training pass."""
        loaders = self.accelerator._dataloaders
        return self._trained or (loaders[0] if loaders else None)

    # ---- wrapping ---------------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Wrap everything that is prepared so far."""
        accelerator, clock = self.accelerator, self.examiner.clock
        for name, part in _METHODS.items():
            self._set(accelerator, name, clock.around(part, getattr(accelerator, name)))
        self._set(accelerator, "prepare", partial(self._prepare, accelerator.prepare))
        self._wrap_prepared()

    def _prepare(self, prepare: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        found = prepare(*objects, **options)
        self._wrap_prepared()
        self.measure_communication()
        return found

    def _wrap_prepared(self) -> None:
        accelerator, clock = self.accelerator, self.examiner.clock
        for module in self._new(accelerator._models):
            self._set(module, "forward", clock.around("forward", module.forward))
        for optimizer in self._new(accelerator._optimizers):
            first = optimizer is accelerator._optimizers[0]
            step = self._counting(optimizer.step) if first else optimizer.step
            self._set(optimizer, "step", clock.around("optimizer", step))
            self._set(optimizer, "zero_grad", clock.around("optimizer", optimizer.zero_grad))
        for loader in self._new(accelerator._dataloaders):
            self._set(loader, "_hand_out", partial(self._pass, loader, loader._hand_out))

    def _new(self, objects: Sequence[Any]) -> list[Any]:
        found = [one for one in objects if id(one) not in self._seen]
        self._seen |= {id(one) for one in found}
        return found

    def _counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        state = self.accelerator.gradient_state

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.updates += state.sync_gradients
            return step(*args, **kwargs)

        return counted

    def _pass(self, loader: Any, hand_out: Callable[..., Iterator[Any]], one: Any, iterator: Iterator[Any]) -> Any:
        """Measure a pass over a loader, as evaluation if every model is in eval mode."""
        if self.modules and not any(module.training for module in self.modules):
            return self._evaluation(hand_out(one, iterator))
        self._trained = loader
        return hand_out(one, self.examiner.iterate(_FETCH, iterator))

    def _evaluation(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; all time until the last one is processed counts as evaluation."""
        clock = self.examiner.clock
        before, clock.held = clock.enter(INDEX["evaluation"]), True
        try:
            yield from batches
        finally:
            clock.held = False
            clock.enter(before)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        self._wrapped.append((owner, name, name in own, own.get(name)))
        own[name] = value

    def unwrap(self) -> None:
        """Undo all wrapping."""
        while self._wrapped:
            owner, name, had, value = self._wrapped.pop()
            if had:
                vars(owner)[name] = value
            else:
                vars(owner).pop(name, None)
