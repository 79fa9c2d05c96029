"""Convert the accepted results of ``configure_optimizers()``, raise for all others, and wrap the optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from .. import messages
from ..callbacks.early_stopping import check_direction
from .joint_optimizer import check_together
from .manual_step_check import stepped as stepped_by_hand

if TYPE_CHECKING:
    from .module import TrainingModule
    from .run import Run

FORMS = (
    "an optimizer; a list of optimizers; a pair (optimizers, schedulers); a dict {'optimizer': ..., 'lr_scheduler': "
    "...}; a list of such dicts; or None for a module without an optimizer"
)


@dataclass
class SchedulerConfig:
    """A scheduler and when it advances.

    Attributes:
        scheduler: any object with a ``step()`` method.
        interval: ``"epoch"`` or ``"step"`` (an optimizer update).
        frequency: number of intervals between advances.
        monitor: the logged name that a plateau scheduler monitors.
        strict: whether to raise, rather than warn, if ``monitor`` was not logged.
        name: the name under which ``LearningRateMonitor`` logs the learning rate.
        reduce_on_plateau: whether to pass the monitored value to ``step``.
    """

    scheduler: Any
    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False


class ManagedOptimizer:
    """An optimizer as ``self.optimizers()`` returns it. ``step`` applies precision and strategy, and counts the step.

    Everything else (``param_groups``, ``state``, ``zero_grad``) comes from the original optimizer (``.optimizer``).

    Attributes:
        stepped_at: ``trainer.state.batches`` at this optimizer's last step, which used all gradients up to then.
        expected: under automatic optimization, whether the module's ``optimizer_step`` is running.
    """

    def __init__(self, optimizer: Optimizer, run: Run | None = None) -> None:
        self.optimizer = optimizer
        self._run: Run = run  # type: ignore[assignment] - None if no run created it
        self.stepped_at = -1
        self.expected = False

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Run one optimizer step; return False if fp16 found an overflow and left the weights unchanged.

        Args:
            closure: for optimizers that evaluate the loss themselves.
            **arguments: further arguments of the optimizer's ``step``.

        Raises:
            RuntimeError: automatic optimization already steps this optimizer.
        """
        if self._run is None:
            return self.optimizer.step(closure, **arguments)
        run, state = self._run, self._run.state
        by_hand = not run.module.automatic_optimization
        if not (by_hand or self.expected):
            raise stepped_by_hand(run.module)
        if by_hand and closure is not None:
            closure = self._then_show(closure)
        elif by_hand:
            self._show_gradients()
        with _passing(self.optimizer, arguments) if arguments else nullcontext():
            stepped = run.strategy.optimizer_step(self.optimizer, closure)
        self.stepped_at = state.batches
        if stepped and (by_hand or state.window):  # an empty window does not count as a step
            state.global_step += 1
            if not state.stepped:
                state.stepped = True
                state.updates += 1
        return stepped

    def _show_gradients(self) -> None:
        """Average gradients that no backward pass has averaged, unscale them, and call ``on_before_optimizer_step``."""
        strategy = self._run.strategy
        if strategy.left_gradients_by_hand():
            strategy.complete_gradients(self.optimizer)
        strategy.unscale_gradients(self.optimizer)
        for hook in self._run.hooks.on_before_optimizer_step:
            hook(self.optimizer)

    def _then_show(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._show_gradients()
            return loss

        return evaluate

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients of this optimizer's parameters by calling its ``zero_grad`` with these arguments."""
        for hook in () if self._run is None else self._run.hooks.on_before_zero_grad:
            hook(self.optimizer)
        self.optimizer.zero_grad(*args, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Context manager in which only this optimizer's parameters require gradients.

        Args:
            sync_grad: if False, backward passes inside the context do not synchronize gradients, which accumulate
                locally on each process.
        """
        strategy = self._run.strategy
        apart = not sync_grad and strategy.communicates_gradients
        with self._run.module.toggled_optimizer(self):
            if apart:
                strategy.sync_gradients(False)
            try:
                yield
            finally:
                if apart:
                    strategy.sync_gradients(True)

    @property
    def __class__(self) -> type:  # type: ignore[override] - it cannot be set
        """The class of the wrapped optimizer, so that ``isinstance`` and schedulers accept this object."""
        return type(self.optimizer) if "optimizer" in self.__dict__ else type(self)

    @property
    def state(self) -> Any:
        """The state of each parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with their settings."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of parameter groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in vars(self):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ManagedOptimizer:
        return ManagedOptimizer(copy.deepcopy(self.optimizer, memo), self._run)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


@contextmanager
def _passing(optimizer: Optimizer, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that adds arguments to the ``optimizer.step`` calls that the strategy and the precision make."""
    step = vars(optimizer).get("step")
    optimizer.step = partial(optimizer.step, **arguments)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.step
        if step is not None:
            optimizer.step = step


def configure(module: TrainingModule) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Call ``module.configure_optimizers`` and convert its result to lists of optimizers and schedulers."""
    given = module.configure_optimizers()
    owner = f"{type(module).__name__}.configure_optimizers()"
    optimizers, schedulers = _split(given, owner)
    if not optimizers:
        shown = given if given is None else repr(given)
        messages.warn_once(
            f"{owner} returned {shown}, so fit runs without an optimizer and the trainer does not change any weights. "
            "Return an optimizer if weights should change."
        )
    if module.automatic_optimization:
        check_together(module, optimizers, f"{owner} returned")
        if len(optimizers) > 1 and any(isinstance(one, Mapping) and "frequency" in one for one in given or ()):
            raise ValueError(
                f"{owner} returned the key 'frequency' with an optimizer, but automatic optimization steps all "
                "optimizers in each update. Leave out 'frequency', or set self.automatic_optimization = False in "
                "__init__ and step the optimizers in training_step."
            )
    configs = [_scheduler(s, owner, module.automatic_optimization) for s in schedulers]
    for config in configs:
        of = getattr(config.scheduler, "optimizer", None)
        if of is not None and not any(of is optimizer for optimizer in optimizers):
            raise ValueError(
                f"{owner} returned {messages.a(config.scheduler)} for an optimizer that it did not return, so the "
                "learning rate in use would never change. Create the scheduler for the returned optimizer."
            )
    return optimizers, configs


def _split(given: Any, owner: str) -> tuple[list[Optimizer], list[Any]]:
    if given is None:
        return [], []
    if isinstance(given, Mapping):
        return _from_dicts([given], owner)
    if isinstance(given, (list, tuple)) and given and all(isinstance(g, Mapping) for g in given):
        return _from_dicts(given, owner)
    if _is_list(given) and len(given) == 2 and _is_list(given[0]):
        return _optimizers(given[0], owner), list(given[1]) if _is_list(given[1]) else [given[1]]
    return _optimizers(given if isinstance(given, (list, tuple)) else [given], owner), []


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _optimizers(given: Sequence[Any], owner: str) -> list[Optimizer]:
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(f"{owner} returned {messages.a(one)} where an optimizer was expected. Return {FORMS}.")
    return list(given)


def _from_dicts(dicts: Sequence[Mapping[str, Any]], owner: str) -> tuple[list[Optimizer], list[Any]]:
    known = ("optimizer", "lr_scheduler", "monitor", "frequency")
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    for one in dicts:
        for key in one:
            if key not in known:
                raise ValueError(
                    f"{owner} returned a dict with the keys {list(one)}. {messages.unknown('key', key, known)}"
                )
        if "optimizer" not in one:
            raise ValueError(
                f"{owner} returned a dict with the keys {sorted(one)} but without 'optimizer'. Return {FORMS}."
            )
        optimizers.append(one["optimizer"])
        scheduler = one.get("lr_scheduler")
        if scheduler is not None:
            if "monitor" in one and not isinstance(scheduler, Mapping):
                scheduler = {"scheduler": scheduler, "monitor": one["monitor"]}
            schedulers.append(scheduler)
    return _optimizers(optimizers, owner), schedulers


def _check_scheduler(scheduler: Any, owner: str, automatic: bool) -> None:
    if isinstance(scheduler, Optimizer):
        raise TypeError(
            f"{owner} returned {messages.a(scheduler)} as a scheduler. To use several optimizers, return them in one "
            "list: [optimizer, other]."
        )
    if automatic and not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"{owner} returned {messages.a(scheduler)} as a scheduler, but it has no step(). Return a "
            "scheduler from torch.optim.lr_scheduler, or a dict {'scheduler': ..., 'interval': 'step'}."
        )


def _scheduler(given: Any, owner: str, automatic: bool) -> SchedulerConfig:
    settings = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    names = [f.name for f in fields(SchedulerConfig)]
    for key in settings:
        if key not in names:
            raise ValueError(
                f"{owner} returned a scheduler dict with the keys {list(settings)}. "
                f"{messages.unknown('key', key, names)}"
            )
    scheduler = settings.get("scheduler")
    _check_scheduler(scheduler, owner, automatic)
    unused = [key for key in settings if key not in ("scheduler", "name")]
    if unused and not automatic:
        messages.warn_once(
            f"{owner} sets {messages.names(unused, 'and')} for a scheduler, but manual optimization ignores these "
            "settings. Call step() on self.lr_schedulers() in a hook or step of your own.",
            category=messages.ValueWarning,
        )
    if isinstance(scheduler, (OneCycleLR, CyclicLR)) and "interval" not in settings and automatic:
        settings["interval"] = "step"
        messages.info_once(
            f"{type(scheduler).__name__} advances at every optimizer step, so interval='step' is used. Return "
            "{'scheduler': ..., 'interval': 'epoch'} to advance it once per epoch instead."
        )
    settings.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    config = SchedulerConfig(**settings)
    if config.interval not in ("epoch", "step"):
        raise ValueError(f"{owner}: {messages.unknown('scheduler interval', config.interval, ('epoch', 'step'))}")
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ValueError(
            f"{owner} returned a scheduler with frequency={config.frequency!r}. Use an integer of 1 or more."
        )
    if config.reduce_on_plateau and config.monitor is None and automatic:
        raise ValueError(
            f"{owner} returned a {type(scheduler).__name__} without 'monitor', so it has no value to react to. Return "
            "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}, where 'monitor' is the "
            "name of a metric that you log."
        )
    if config.reduce_on_plateau:
        check_direction(type(scheduler).__name__, config.monitor, getattr(scheduler, "mode", ""))
    return config
