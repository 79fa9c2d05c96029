"""Evaluation loops that a program sets on the Trainer, in order to print results in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ... import messages
from ...trainer.trainer import Trainer
from . import views
from .texts import print_results, with_tensors

#: Methods of Lightning's evaluation loop that have no equivalent in Paceline.
_UNCALLED = ("run", "setup_data", "reset", "on_run_start", "on_run_end", "teardown")


class OwnEvaluationLoop:
    """Base class of a program's own ``trainer.test_loop`` or ``trainer.validate_loop``.

    Subclasses may override ``_print_results``. Everything else can only be read, as on the Trainer's own loops.
    """

    _views: ClassVar[dict[str, Callable[[Trainer], views.View]]] = {
        "test": views.TestLoop,
        "validate": views.ValidationLoop,
    }

    def __init__(
        self, trainer: Trainer, trainer_fn: Any, stage: Any, verbose: bool = True, inference_mode: bool = True
    ) -> None:
        found = [name for name in _UNCALLED if hasattr(type(self), name)]
        if found:
            raise TypeError(
                f"{type(self).__name__} defines {messages.names(found, last='and')}, which Paceline never calls. "
                "Override _print_results instead, use hooks of the module or of a Callback, or write the loop with an "
                "Accelerator."
            )
        self.trainer, self.verbose = trainer, verbose
        self._stage = stage
        self.inference_mode = inference_mode

    _print_results = staticmethod(print_results)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "trainer" not in vars(self):
            raise AttributeError(name)
        kind = "test" if str(getattr(self._stage, "value", self._stage)).startswith("test") else "validate"
        return getattr(self._views[kind](self.trainer), name)


def install() -> None:
    """Let programs set ``trainer.test_loop`` and ``trainer.validate_loop``."""
    kind: Any = Trainer
    for fn, view in OwnEvaluationLoop._views.items():
        setattr(kind, f"{fn}_loop", property(_reading(fn, view), _setting(fn)))
    evaluate = kind._evaluate

    def print_in_own_way(trainer: Any, request: Any) -> Any:
        own = vars(trainer).get(f"_own_{request.fn}_loop")
        if own is not None:
            own.verbose = request.show_results is not None
            if own.verbose:
                request.show_results = with_tensors(own._print_results)
        return evaluate(trainer, request)

    kind._evaluate = print_in_own_way


def _reading(fn: str, view: Callable[[Trainer], views.View]) -> Callable[[Any], Any]:
    return lambda trainer: vars(trainer).get(f"_own_{fn}_loop") or view(trainer)


def _setting(fn: str) -> Callable[[Any, Any], None]:
    def place(trainer: Any, loop: Any) -> None:
        if not isinstance(loop, OwnEvaluationLoop):
            raise AttributeError(
                f"trainer.{fn}_loop can be set only to an instance of a subclass of Lightning's _EvaluationLoop, not "
                f"to {messages.a(loop)}. To change how results are printed, override _print_results in such a subclass."
            )
        vars(trainer)[f"_own_{fn}_loop"] = loop

    return place
