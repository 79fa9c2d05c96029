"""Prepared models, which are the user's own modules with a forward method that runs through the strategy."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .. import messages
from ..data.worker_processes import explain_lost_worker
from ..strategies.base import Strategy
from ..strategies.precision.mixed import MixedPrecision
from ..torch_private import compiler_of, inside_compiled, is_initialized, pytree

if TYPE_CHECKING:
    from ..doctor.own_loop import OwnLoop

#: Returns an error that says what to do about a model's error, or None if there is nothing to add.
Explain = Callable[["PreparedModel", BaseException], "BaseException | None"]
Compiler = Callable[[nn.Module], "Callable[[Any], Any] | None"]
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class PreparedModel:
    """A prepared model and its strategy.

    Args:
        compiler: function that takes a module and returns the function that compiles the module's forward, or None if
            the module is not compiled.
        explain: function that explains errors in the forward pass.

    Attributes:
        strategy: this model's own strategy, which handles its states, gradients and steps.
        parameters: the module's parameters, keyed by name.
        frozen: whether the model was prepared for evaluation only.
        local_steps: number of updates in the current ``LocalSGD`` block.
        bound: whether the forward runs through the strategy and the strategy knows all of the model's optimizers.
    """

    _any_method: AnyMethod | None = None
    _routed: Routed | None = None
    _own: Callable[..., Any] | None = None
    _observers: Sequence[OwnLoop] = ()
    bound = False
    local_steps = 0

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        frozen: bool,
        output_dtype: str,
        compiler: Compiler,
        explain: Explain,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.frozen = frozen
        self._output_dtype, self._compiler, self._explain = output_dtype, compiler, explain
        self._know_parameters()
        self._before = {id(parameter): (weakref.ref(parameter), name) for name, parameter in self.parameters.items()}

    def set_up(self, place: bool) -> None:
        """Move the module to its device, and shard or wrap it."""
        if place and self.strategy.places(self.module):
            self.module = self.strategy.setup_module(self.module)
            self.strategy.settle_weights(self.module, required=False)
        self._know_parameters()
        self._wrap()

    def _know_parameters(self) -> None:
        self.parameters = dict(self.module.named_parameters())
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    def _wrap(self) -> None:
        self._wrapped = self.module if self.frozen else self.strategy.wrap_for_training(self.module)

    def current(self, parameter: Tensor) -> Tensor | None:
        """Return ``parameter`` if the module has it, or the parameter that setup replaced it with; otherwise None."""
        if id(parameter) in self._names:
            return parameter
        reference, name = self._before.get(id(parameter), (None, ""))
        return self.parameters[name] if reference is not None and reference() is parameter else None

    def adopt(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update an optimizer's references to the module's parameters; return True if there are any."""
        found = False
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                own = self.current(parameter)
                if own is not None:
                    found = True
                    group["params"][index] = own
        return found

    def bind(self, observers: Sequence[OwnLoop] = ()) -> None:
        """Route the module's forward through the wrapper, precision and compiler; ``observers`` time each call."""
        module, strategy = self.module, self.strategy
        if self._own is None:
            self._own = module.forward
            compile_with = self._compiler(module)
            self._compiled = self._own if compile_with is None else compile_with(self._own)
        step = self._compiled
        if self._any_method is not None:
            self._any_method.forward = step
            step = self._any_method
        if self._output_dtype == "fp32" and isinstance(strategy.precision, MixedPrecision):
            step = partial(_in_float32, step)
        evaluate = strategy.bind_step(step, self._wrapped)
        train = evaluate if self.frozen else strategy.bind_step(step, self._wrapped, training=True)
        if strategy.waiting.unfilled:
            train, evaluate = partial(self._once_filled, train), partial(self._once_filled, evaluate)
        self._steps = train, evaluate
        self.bound = True
        self.observe(observers)

    def observe(self, observers: Sequence[OwnLoop]) -> None:
        """Set the observers that time the forward passes."""
        self._observers = observers
        train, evaluate = self._steps
        needed = train is not self._own or evaluate is not self._own
        for observer in observers:
            train, evaluate, needed = observer.around("forward", train), observer.around("forward", evaluate), True
        if self._routed is not None:
            self._routed.train, self._routed.evaluate = train, evaluate
            if not needed:
                restore(self.module)
                self._routed = None
        elif needed:
            self._routed = self.module.forward = Routed(self.module, train, evaluate, partial(self._explain, self))

    def route_method(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the named method through the wrapper and precision, like the module's forward.

        For example, if ``training_step`` is routed and computes the loss, the gradients are averaged across processes.
        """
        method = getattr(self.module, name)
        if not is_prepared(self.module):
            return method
        if self._any_method is None:
            self._any_method = AnyMethod(self.module)
            self.bind(self._observers)
        return partial(self._any_method.call, method)

    def explain_with(self, explain: Explain) -> None:
        """Set the function that explains errors in the forward pass."""
        self._explain = explain
        if self._routed is not None:
            self._routed.explain = partial(explain, self)

    def __getstate__(self) -> dict[str, Any]:
        refuse_processes(self.strategy, f"A prepared {type(self.module).__name__}")
        names = ("module", "strategy", "frozen", "_output_dtype", "_compiler")
        return {name: vars(self)[name] for name in names} | {"gradients": self.strategy.window_gradients(self.module)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gradients = state["gradients"]
        vars(self).update({name: value for name, value in state.items() if name != "gradients"})
        if not is_initialized(self.module):
            raise TypeError(
                f"{type(self.module).__name__} stores the Accelerator or optimizer that it was prepared with. Each "
                "contains the other, so neither can be unpickled first. Pickle the Accelerator, which includes the "
                "module, or don't store the Accelerator and its optimizers in the module."
            )
        self.strategy.setup_environment()
        self._know_parameters()
        self._before = {}
        self._wrap()
        self._explain = explain_alone
        self.bind()
        self.strategy.load_window_gradients(self.module, gradients or {})

    def _once_filled(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step``, but first load any weights that were not yet loaded when the model was prepared."""
        if self.strategy.waiting.unfilled:
            self.strategy.settle_weights(self.module)
        return step(*args, **kwargs)


def explain_alone(model: PreparedModel, error: BaseException) -> BaseException | None:
    """Without the model's Accelerator, return an error that says what to do, or None if there is nothing to add."""
    return explain_lost_worker(error, "") or model.strategy.explain(error)


def refuse_processes(strategy: Strategy, what: str) -> None:
    """Raise a TypeError if an object cannot be copied because processes share it or it is sharded."""
    if strategy.world_size > 1 or strategy.communicates_forward:
        name, several = type(strategy).__name__, strategy.world_size > 1
        why = f"{strategy.world_size} processes share it" if several else "it shards models"
        raise TypeError(
            f"{what} cannot be copied or pickled under {name}, because {why}. Save everything with "
            "accelerator.save_state(folder), or get only the weights with accelerator.get_state_dict(model)."
        )


class Routed:
    """The forward of a prepared module. Copies of the module, which are not prepared, get the original forward."""

    def __init__(
        self,
        module: nn.Module,
        train: Callable[..., Any],
        evaluate: Callable[..., Any],
        explain: Callable[[BaseException], BaseException | None],
    ) -> None:
        self.module = module
        self.explain = explain
        self.train = train
        self.evaluate = evaluate
        self.plain = module.forward
        self.__wrapped__ = self.plain  # for inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if torch.is_grad_enabled():
                return self.train(*args, **kwargs)
            return self.evaluate(*args, **kwargs)
        except RuntimeError as error:
            better = self.explain(error)
            if better is None:
                raise
            raise better from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        if _is_class_forward(self.plain):
            return _plain_forward, (self.module,)
        return _itself, (self.plain,)


class AnyMethod:
    """The innermost forward of a prepared module, which can run another of the module's methods instead.

    Attributes:
        forward: the module's own forward, compiled if the Accelerator compiles models.
        method: the method that the next call runs; None means ``forward``.
    """

    forward: Callable[..., Any]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.method: Callable[..., Any] | None = None

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method as the module's forward."""
        if not is_prepared(self.module):  # called by another routed method
            return method(*args, **kwargs)
        self.method = method
        try:
            return self.module.forward(*args, **kwargs)
        finally:
            self.method = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method, self.method = self.method, None
        if method is None:
            return self.forward(*args, **kwargs)
        routed = vars(self.module)["forward"]
        restore(self.module)  # a method that calls the module already runs inside its wrappers
        try:
            return method(*args, **kwargs)
        finally:
            vars(self.module)["forward"] = routed


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _is_class_forward(forward: Any) -> bool:
    """Return True if a forward is defined by the module's class, not set on the module itself."""
    function = getattr(forward, "__func__", None)
    return function is not None and function is getattr(type(forward.__self__), "forward", None)


def is_prepared(module: Any) -> bool:
    """Return True if a module has been prepared."""
    return isinstance(vars(module).get("forward") if isinstance(module, nn.Module) else None, Routed)


def restore(module: nn.Module) -> None:
    """Restore a module's own forward."""
    if is_prepared(module):
        plain = vars(module).pop("forward").plain
        if not _is_class_forward(plain):
            module.forward = plain


def unwrapped(model: Any) -> Any:
    """Return the module without its torch.compile, DataParallel and DistributedDataParallel wrappers."""
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif compiler_of(model) is not None:
            model = inside_compiled(model)
        else:
            return model


def unwrap_model(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the module without its DataParallel and DistributedDataParallel wrappers.

    Args:
        model: the model.
        keep_fp32_wrapper: if False, restore the module's own forward, even if a program has stored that forward as
            ``_original_forward``.
        keep_torch_compile: if False, remove ``torch.compile``'s wrapper as well.
        recursive: whether to unwrap the module's children too.
    """
    found = unwrapped(model)
    if recursive and isinstance(found, nn.Module):
        for name, child in list(found.named_children()):
            setattr(found, name, unwrap_model(child, keep_fp32_wrapper, keep_torch_compile, True))
    if not keep_fp32_wrapper and isinstance(found, nn.Module):
        restore(found)
        own = vars(found).pop("_original_forward", None)
        if own is not None:
            found.forward = own
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    return model if keep_torch_compile and compiler_of(model) is not None and inside_compiled(model) is found else found


def migrated(model: nn.Module) -> nn.Module:
    """Return the module to prepare; warn about the script's own wrappers, which are no longer needed."""
    if isinstance(model, DataParallel):
        messages.warn_once(
            "accelerator.prepare got a model wrapped in nn.DataParallel and unwrapped it, because one process per "
            "device (DistributedDataParallel) is faster. Delete the DataParallel(...) line, and start the processes "
            "with `paceline launch`."
        )
    elif isinstance(model, DistributedDataParallel):
        messages.warn_once(
            "accelerator.prepare got a model wrapped in DistributedDataParallel and unwrapped it, because prepare "
            "itself wraps models. Pass options such as find_unused_parameters as "
            "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(...)]). Delete the "
            "DistributedDataParallel(...) line."
        )
    return unwrapped(model)


def _in_float32(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward function and convert its 16-bit outputs to float32 for the loss."""
    return to_float32(forward(*args, **kwargs))


def to_float32(data: Any) -> Any:
    """In nested lists, tuples, dicts and model outputs, convert 16-bit tensors to float32."""
    if isinstance(data, Tensor):
        return data.float() if data.dtype in _SIXTEEN_BITS else data
    if type(data) in (tuple, list):
        return type(data)(to_float32(value) for value in data)
    if isinstance(data, Mapping):
        if type(data) is dict:
            return {key: to_float32(value) for key, value in data.items()}
        for key, value in list(data.items()):  # a model's output class, changed in place to keep its type
            changed = to_float32(value)
            if changed is not value:
                data[key] = changed  # type: ignore[index]
        return data
    return pytree.tree_map_only(Tensor, to_float32, data)
