"""The Precision interface, and the precisions that compute in the dtype of the weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from ... import messages
from ...processes.device_transfer import convert
from ...torch_private import pytree, unscales_in_its_step

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")
TrueName = Literal["64-true", "16-true", "bf16-true"]
DTYPES: dict[TrueName, torch.dtype] = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}

#: The methods that take part in clipping; if a subclass overrides one, ``clip_gradients`` replaces the strategy's own
#: clipping.
CLIPPING = frozenset(("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "main_params"))
#: The methods around a backward pass; if a subclass overrides one, backward passes run through all three.
BACKWARD = frozenset(("pre_backward", "backward", "post_backward"))
#: The context of each step of a module.
STEP_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
_CALLED = (
    "autocast_context_manager",
    "connect",
    "convert_input",
    "forward_context",
    "module_init_context",
    "optimizer_step",
    "tensor_init_context",
    *STEP_CONTEXTS.values(),
)


def _is_users(cls: type, name: str) -> bool:
    """Return True if a class has or inherits a method that is defined outside this package."""
    owner = next((one for one in cls.__mro__ if name in vars(one)), None)
    return owner is not None and not owner.__module__.startswith(__package__ or "")


def _taking_model(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an ``optimizer_step`` with Lightning's arguments, so that callers can omit the module and the closure."""

    @functools.wraps(method)
    def step(precision: Precision, optimizer: Any, model: Any = None, closure: Any = None, **arguments: Any) -> Any:
        if not isinstance(model, nn.Module):
            model, closure = precision.model, closure or model
        skipped = getattr(precision, "skipped_steps", 0)  # an override may not return what super() returned
        stepped = method(precision, optimizer, model=model, closure=closure or _nothing, **arguments) is not False
        return stepped and getattr(precision, "skipped_steps", 0) == skipped

    vars(step)["needs_closure"] = True
    return step


def _nothing() -> None:
    """Stand in for the closure of a step in manual optimization."""


class Precision:
    """The dtypes that a run computes in. This class implements ``"32-true"``: all tensors keep the user's dtypes.

    :meth:`bind_forward` is called once, when a run starts, and returns the step unchanged if it needs no context.

    A subclass may override any method. The Trainer calls its :meth:`convert_input` with each batch before the batch is
    moved, and runs each step in the matching context: :meth:`train_step_context`, :meth:`val_step_context` and so on,
    which return its :meth:`forward_context` by default. Backward passes run through :meth:`pre_backward`,
    :meth:`backward` and :meth:`post_backward`, and clipping through :meth:`clip_gradients`. These methods,
    :meth:`connect` and :meth:`optimizer_step` may have the arguments that they have in Lightning.
    """

    #: The methods that this subclass overrides and that are called only if overridden.
    overrides: ClassVar[frozenset[str]] = frozenset()

    #: Whether a subclass's ``optimizer_step`` has Lightning's arguments, with a closure that runs the whole step.
    needs_closure: ClassVar[bool] = False

    #: The module of the run, for a subclass's methods; None before the first run.
    model: Any = None
    #: The step that :meth:`bind_forward` binds next, such as ``"training_step"``; None without a Trainer.
    step_name: str | None = None
    _backward_hooks: tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]] = ((), ())

    #: The canonical name, as in ``Trainer(precision=...)``.
    name: str = "32-true"
    #: The dtype to convert floating-point inputs to when a batch is moved, or None.
    input_dtype: torch.dtype | None = None
    #: Whether the strategy shards the weights and gathers them before use; the strategy sets this before
    #: :meth:`convert_module`.
    shards: bool = False
    #: Whether :meth:`move_module` quantizes weights, which a strategy that shards cannot gather.
    quantizes: bool = False
    #: fp16's loss scaler, or None.
    scaler: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.overrides = frozenset(name for name in (*_CALLED, *CLIPPING, *BACKWARD) if _is_users(cls, name))
        own = vars(cls).get("optimizer_step")
        if own is not None and _is_users(cls, "optimizer_step") and "model" in inspect.signature(own).parameters:
            cls.optimizer_step = _taking_model(own)
        cls.needs_closure = hasattr(cls.optimizer_step, "needs_closure")

    @property
    def precision(self) -> str:
        """The name, as in ``Trainer(precision=...)``."""
        return self.name

    @precision.setter
    def precision(self, name: str) -> None:
        self.name = name

    def use_on(self, device: torch.device) -> None:
        """Set the device on which to compute. Called once by the strategy."""

    def setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Register the optimizers, or raise if this precision does not work with one of them."""

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> tuple[nn.Module, Any, Any]:
        """Return the module, the optimizers and the schedulers that a run uses.

        Only a subclass's override is called, once when a run starts. It may change the module in place, but must return
        that same object.
        """
        return model, optimizers, lr_schedulers

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        """Return the function that the loop calls in place of ``step``; it may run the step in autocast."""
        return self._in_context(step) if self.has_own_context else step

    def _in_context(self, step: Callable[..., T]) -> Callable[..., T]:
        context = getattr(self, self._context_name)

        @functools.wraps(step)
        def in_context(*args: Any, **kwargs: Any) -> T:
            with context():
                return step(*args, **kwargs)

        return in_context

    @property
    def has_own_context(self) -> bool:
        """Whether a subclass outside this package decides the context of the step that is being bound."""
        return not self.overrides.isdisjoint(("forward_context", "autocast_context_manager", self._context_name))

    @property
    def _context_name(self) -> str:
        return STEP_CONTEXTS.get(self.step_name or "", "forward_context")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes. :meth:`bind_forward` runs a step in it by default."""
        return nullcontext()

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Return the context of a ``training_step``: :meth:`forward_context`."""
        return self.forward_context()

    def val_step_context(self) -> AbstractContextManager[Any]:
        """Return the context of a ``validation_step``: :meth:`forward_context`."""
        return self.forward_context()

    def test_step_context(self) -> AbstractContextManager[Any]:
        """Return the context of a ``test_step``: :meth:`forward_context`."""
        return self.forward_context()

    def predict_step_context(self) -> AbstractContextManager[Any]:
        """Return the context of a ``predict_step``: :meth:`forward_context`."""
        return self.forward_context()

    def backward_context(self) -> AbstractContextManager[Any]:
        """Context manager for a backward pass inside a step (manual optimization), with the step's autocast off."""
        return nullcontext()

    def init_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context manager in which new layers are created on ``device``, in this precision's dtype."""
        return device

    def creation_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which strategies create layers: :meth:`init_context`, or a subclass's own context."""
        own = [getattr(self, name) for name in ("module_init_context", "tensor_init_context") if name in self.overrides]
        return self._created_in(device, own[0]) if own else self.init_context(device)

    @contextmanager
    def _created_in(self, device: torch.device, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        with device, context():
            yield

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Like :meth:`init_context`, but on torch's default device."""
        return self.init_context(torch.get_default_device())

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Like :meth:`module_init_context`, but for tensors."""
        return self.module_init_context()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module's weights to this precision's dtype."""
        return module

    def move_module(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Move a converted module to the compute device; all of its weights must have memory."""
        return module.to(device)

    def convert_input(self, data: Any) -> Any:
        """Convert the floating-point tensors in a batch to the input dtype of the forward pass."""
        return data if self.input_dtype is None else floats_in(data, self.input_dtype)

    def convert_output(self, data: Any) -> Any:
        """Convert the floating-point tensors that the forward pass returns to torch's default dtype."""
        return data if self.input_dtype is None else floats_in(data, torch.get_default_dtype())

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, shape (), to run backward on."""
        return loss

    def bind_backward(
        self,
        backward: Callable[..., None],
        model: nn.Module,
        optimizer: Any,
        hooks: tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]],
    ) -> Callable[..., None]:
        """Return a backward function that calls :meth:`pre_backward`, :meth:`backward` and :meth:`post_backward`.

        Args:
            backward: the strategy's ``backward``.
            model: the module.
            optimizer: the optimizer; None in manual optimization.
            hooks: the ``on_before_backward`` and ``on_after_backward`` hooks.
        """
        self._backward_hooks = hooks

        def run(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss = self.pre_backward(loss, model)
            backward(loss, how=lambda scaled: self.backward(scaled, model, optimizer, *args, **kwargs))
            self.post_backward(loss, model)

        return run

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the ``on_before_backward`` hooks, and return the loss, shape (), to run backward on."""
        for hook in self._backward_hooks[0]:
            hook(tensor)
        return tensor

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss, shape (), with the module's ``backward``.

        ``optimizer`` is None in manual optimization.
        """
        (model.backward or Tensor.backward)(tensor, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the ``on_after_backward`` hooks, and return the loss without its graph."""
        for hook in self._backward_hooks[1]:
            hook()
        return tensor.detach()

    def shared_scale(self, of_next_loss: bool = False) -> Tensor | None:
        """Return the loss scale, shape (), that several optimizers share; None if no scale is shared.

        This is the current scale or, with ``of_next_loss``, the next loss's scale.
        """
        return None

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once, before clipping."""

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **arguments: Any) -> bool:
        """Run one optimizer step. Returns False if the step was skipped because of an overflow.

        The method is called with ``(optimizer, closure)``; a closure is passed only if the optimizer or the module
        needs one. A subclass that also has a parameter ``model`` gets Lightning's arguments, and a closure that runs
        the whole step: forward, backward, hooks and clipping.

        Args:
            optimizer: the optimizer.
            model: the closure; a module is also accepted and ignored.
            closure: evaluates the loss, or None.
            **arguments: further arguments of ``optimizer.step``.
        """
        if not isinstance(model, nn.Module):
            closure = closure or model
        if closure is None:
            optimizer.step(**arguments)
        else:
            optimizer.step(closure=closure, **arguments)
        return True

    def main_params(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Return the parameters whose gradients :meth:`clip_gradients` clips: all parameters of the optimizer."""
        return iter(parameters(optimizer))

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip an optimizer's gradients; a ``clip_val`` of 0 does nothing.

        The Trainer calls this method only if a subclass overrides this method or one of the methods that it calls.
        """
        if clip_val <= 0:
            return
        if self.scaler is not None and unscales_in_its_step(optimizer):
            raise RuntimeError(
                f"precision={self.name!r} cannot clip gradients with {type(optimizer).__name__}(fused=True), which "
                "unscales the gradients only inside its step(). Leave fused out, or use 'bf16-mixed'."
            )
        by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
        (self.clip_grad_by_value if by_value else self.clip_grad_by_norm)(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each gradient element."""
        torch.nn.utils.clip_grad_value_(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the total norm of all gradients."""
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)

    def teardown(self) -> None:
        """Release resources. Called at the end of each run, even after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: the loss scale."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""


class TruePrecision(Precision):
    """``"64-true"``, ``"16-true"`` and ``"bf16-true"``: floating-point weights, inputs and new tensors share one dtype.

    Complex tensors become complex128 with ``"64-true"`` and do not change with the other two names. With 16 bits,
    weights are rounded and small updates are lost, so mixed precision is better for training.
    """

    def __init__(self, name: TrueName = "bf16-true") -> None:
        if name not in DTYPES:
            raise ValueError(f"TruePrecision does not support {name!r}. Choose one of {', '.join(map(repr, DTYPES))}.")
        self.name = name
        self.input_dtype = DTYPES[name]

    def forward_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.input_dtype or torch.get_default_dtype())

    def bind_forward(self, step: Callable[..., T]) -> Callable[..., T]:
        if self.has_own_context:
            return self._in_context(step)
        dtype = self.input_dtype or torch.get_default_dtype()

        @functools.wraps(step)
        def in_dtype(*args: Any, **kwargs: Any) -> T:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return step(*args, **kwargs)
            finally:
                torch.set_default_dtype(before)

        return in_dtype

    @contextmanager
    def _init(self, device: torch.device) -> Iterator[None]:
        with device, default_dtype(self.input_dtype or torch.get_default_dtype()):
            yield

    def init_context(self, device: torch.device) -> AbstractContextManager[Any]:
        return self._init(device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if self.input_dtype is None else convert(module, self.input_dtype)


class DoublePrecision(TruePrecision):
    """The precision ``"64-true"``."""

    def __init__(self) -> None:
        super().__init__("64-true")


class HalfPrecision(TruePrecision):
    """The precision ``"16-true"`` or ``"bf16-true"``.

    Args:
        precision: the name.
    """

    def __init__(self, precision: Literal["16-true", "bf16-true"] = "16-true") -> None:
        super().__init__(precision)


def precision_of(strategy: object, precision: Precision | None) -> Precision:
    """Return the precision passed to a strategy; full float32 if it is None.

    Raises:
        TypeError: it is neither None nor a Precision.
    """
    if precision is None or isinstance(precision, Precision):
        return precision or Precision()
    owner = type(strategy).__name__
    raise TypeError(
        f"{owner}: precision={precision!r} is {messages.a(precision)}, not a Precision. Pass a name to the Trainer "
        f"(Trainer(strategy={owner}(...), precision='bf16-mixed')), or a Precision object to the strategy."
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager that sets torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the current gradients of an optimizer's parameters."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def floats_in(data: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in nested data to a dtype."""
    return pytree.tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, data)
