"""Data parallelism: every process holds the whole model, and gradients are averaged during backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, Unpack

from .. import messages
from ..big_model.quantized_layers import statistics_of
from ..devices.kinds import kind_of
from ..torch_private import (
    at_end_of_backward,
    bucket_order,
    communication_times,
    has_hooks,
    ignore_in_ddp,
    ignored_by_ddp,
    local_part,
    multiply_each_,
    settle_buckets,
    time_every_step,
)
from .distributed import DistributedStrategy, ProcessOptions, average_gradients, passes_on, same_tensors
from .late_parameters import LateParameters
from .precision.base import Precision

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")

#: Communication hooks that can be selected by name.
HookName = Literal["fp16", "bf16", "powersgd"]
HOOKS: tuple[HookName, ...] = get_args(HookName)
#: Wrappers that compress before another hook runs.
WrapperName = Literal["fp16", "bf16"]
WRAPPERS: tuple[WrapperName, ...] = get_args(WrapperName)


class DDPOptions(ProcessOptions, total=False):
    """Arguments that :class:`DDPStrategy` passes on to its base class and to DistributedDataParallel."""

    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    bucket_cap_mb: int | None
    bucket_cap_mb_list: list[int] | None
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None
    param_to_hook_all_reduce: nn.Parameter | None
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class DDPStrategy(DistributedStrategy):
    """``"ddp"``: DistributedDataParallel (Li et al., PyTorch Distributed, VLDB 2020).

    Gradients are reduced in buckets during the backward pass of the last micro-batch in an accumulation window; earlier
    micro-batches do not communicate.

    Args:
        precision: dtypes and loss scaling; the Trainer's if None.
        find_unused_parameters: whether to look in each step for parameters that the loss does not depend on. None means
            only with manual optimization, where a loss rarely depends on all networks.
        ddp_comm_hook: how to reduce a bucket: a function from torch.distributed.algorithms.ddp_comm_hooks, or
            ``"fp16"``, ``"bf16"`` (half the bytes) or ``"powersgd"`` (low rank).
        ddp_comm_state: the hook's state; for PowerSGD, it can also be a dict of arguments for ``PowerSGDState``.
        ddp_comm_wrapper: a function that wraps the hook, such as ``fp16_compress_wrapper``, or ``"fp16"`` or
            ``"bf16"``.
        model_averaging_period: with ``post_localSGD_hook``, the interval in steps at which parameters are averaged (Lin
            et al., Don't Use Large Mini-Batches, Use Local SGD, 2020).
        **options: arguments of ``DistributedStrategy``, such as ``timeout``, and of DistributedDataParallel:
            ``bucket_cap_mb``, ``gradient_as_bucket_view``, ``static_graph``, ``broadcast_buffers``, ...
    """

    names: ClassVar[tuple[str, ...]] = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")

    @passes_on(
        DistributedStrategy.__init__,
        DistributedDataParallel.__init__,
        decided=("module", "device_ids", "output_device", "process_group"),
    )
    def __init__(
        self,
        precision: Precision | None = None,
        *,
        find_unused_parameters: bool | None = None,
        ddp_comm_hook: HookName | Callable[..., Any] | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: WrapperName | Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        **options: Unpack[DDPOptions],
    ) -> None:
        given: dict[str, Any] = {**options}
        super().__init__(
            precision, **{name: given.pop(name) for name in ProcessOptions.__annotations__ if name in given}
        )
        self.find_unused_parameters = find_unused_parameters
        self.hook = (ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        self.model_averaging_period = model_averaging_period
        self.ddp_options = given
        self._wrapped: DistributedDataParallel | None = None
        self._reduced: list[nn.Parameter] = []
        self._kinds: dict[str, tuple[torch.dtype, torch.device, torch.Size]] = {}
        self._late = LateParameters()
        self._has_late_gradients = False
        self._manual = False
        self._synchronizes, self._local = True, False
        #: Whether the next backward pass records the graph (static_graph): torch must reduce gradients in that pass.
        self._records = False
        self._averager: Any = None
        #: Whether torch orders its buckets by the first backward pass, which changes how three or more values add up.
        self._reorders = self._settles = False
        self._order: list[int] | None = None
        if isinstance(ddp_comm_hook, str) and ddp_comm_hook not in HOOKS:
            raise ValueError(messages.unknown("ddp_comm_hook", ddp_comm_hook, HOOKS, ", or pass a function"))
        if isinstance(ddp_comm_wrapper, str) and ddp_comm_wrapper not in WRAPPERS:
            raise ValueError(messages.unknown("ddp_comm_wrapper", ddp_comm_wrapper, WRAPPERS, ", or pass a function"))
        if ddp_comm_hook is None and not (ddp_comm_state is None and ddp_comm_wrapper is None):
            raise ValueError(
                "DDPStrategy: ddp_comm_state and ddp_comm_wrapper have no effect without ddp_comm_hook. Pass "
                f"ddp_comm_hook too ({messages.names(HOOKS)}, or a function)."
            )

    # ---- placement ---------------------------------------------------------------------------------------------------

    def place(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        super().place(devices, num_nodes)
        argument = "ddp_comm_hook" if self.hook[0] == "bf16" else "ddp_comm_wrapper"
        if "bf16" in (self.hook[0], self.hook[2]) and kind_of(self.device).collective_backend() == "gloo":
            raise ValueError(
                f"DDPStrategy({argument}='bf16') needs NCCL, but this run is on {self.device.type!r}. Use 'fp16'."
            )

    def for_another_module(self) -> Self:
        other = super().for_another_module()
        other._late = LateParameters()
        return other

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        """Wrap the module in DistributedDataParallel, which broadcasts rank 0's weights to all ranks."""
        self._manual = not getattr(module, "automatic_optimization", True)
        if self._manual and self.ddp_options.get("static_graph"):
            raise ValueError(
                f"DDPStrategy(static_graph=True) does not work with manual optimization, which {type(module).__name__} "
                "uses, because torch records the graph in a backward pass that follows training_step, and would not "
                "average the gradients of backward passes in training_step. Leave static_graph out."
            )
        unused = self._manual if self.find_unused_parameters is None else self.find_unused_parameters
        names = ignored_by_ddp(module)
        every = dict(module.named_parameters())
        self._kept_local = {every[name] for name in names & every.keys()}
        named = {name: p for name, p in every.items() if p.requires_grad and p not in self._kept_local}
        self._reduced = list(named.values())
        self._kinds = {name: _kind(parameter) for name, parameter in named.items()}
        self._late.forget()
        frozen = (p for p in every.values() if not p.requires_grad and p not in self._kept_local)
        self._late.watch(frozen, self._got_late_gradient)
        if not self._reduced:
            return module
        self.same_model(module)
        self._records = bool(self.ddp_options.get("static_graph"))
        step = _Step(module)
        ignore_in_ddp(step, [f"module.{name}" for name in names])
        self._wrapped = DistributedDataParallel(
            step,
            device_ids=[self.device] if kind_of(self.device).is_numbered else None,
            find_unused_parameters=unused,
            **self.ddp_options,
        )
        self._reorders = self.talks and self.world_size > 2 and not (unused or self._records or self.hook[0])
        self._settles, self._order = self._reorders, None
        if self.talks and self.ddp_options.get("init_sync", True):
            same_tensors(statistics_of(module), self.data_group)  # DistributedDataParallel does not broadcast these
        if self.hook[0] is not None:
            self._wrapped.register_comm_hook(*state_and_hook(*self.hook))
        return self._wrapped

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        step = super().bind_step(step, wrapped, training)
        if not training or self._wrapped is None:
            return step
        if self._manual:
            self._wrapped.module.step = partial(self._by_hand, step)
            return self._call_by_hand
        self._wrapped.module.step = step
        return self._wrapped

    def _by_hand(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step of manual optimization, after which torch must not expect another backward pass."""
        wrapped: Any = self._wrapped
        wrapped.module.announced = False
        try:
            return step(*args)
        finally:
            wrapped.require_backward_grad_sync = False

    def _call_by_hand(self, *args: Any) -> Any:
        wrapped: Any = self._wrapped
        try:
            return wrapped(*args)
        finally:
            self.sync_gradients(self._synchronizes)
            wrapped.require_forward_param_sync = self._synchronizes

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        if self.model_averaging_period is not None:
            from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

            state = self.hook[1]
            self._averager = PeriodicModelAverager(
                period=self.model_averaging_period, warmup_steps=getattr(state, "start_localSGD_iter", 0)
            )
        return super().setup_optimizers(optimizers)

    def teardown(self) -> None:
        super().teardown()
        if self._wrapped is not None:
            self._release(self._wrapped)
        self._wrapped = self._averager = None
        self._reduced, self._kinds, self._kept_local = [], {}, set()
        self._late.forget()

    def _release(self, wrapped: Any) -> None:
        """Remove a wrapper's hooks from the parameters, so that its forward no longer communicates.

        After a forward pass without a backward pass, the old reducer still waits for gradients. Until Python frees that
        reducer, it would also reduce the next wrapper's gradients. Python frees it at different times on different
        ranks, so the ranks' collectives would not match.
        """
        self._communicate(False)
        wrapped.require_forward_param_sync = False
        wrapped.reducer = wrapped.logger = None

    # ---- communication -----------------------------------------------------------------------------------------------

    def before_evaluation(self, module: nn.Module) -> None:
        if self.ddp_options.get("broadcast_buffers", True):
            super().before_evaluation(module)

    def explain(self, error: BaseException) -> BaseException | None:
        text = str(error)
        if self._wrapped is not None and "Expected to have finished reduction in the prior iteration" in text:
            names = list(self._kinds)
            found = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", text)
            unused = [names[int(i)] for i in re.findall(r"\d+", found.group(1))] if found else []
            listed = f": {', '.join(unused[:10])}{' ...' if len(unused) > 10 else ''}" if unused else ""
            return RuntimeError(
                "The loss of the previous step did not depend on some parameters, so these parameters got no "
                f"gradients{listed}. If this is intended, use strategy='ddp_find_unused_parameters_true' (in your own "
                "loop, Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])), "
                "which searches the graph in each step. Otherwise, use these parameters in the loss, or freeze them "
                "(requires_grad_(False))." + self._tell_replaced(unused)
            )
        return super().explain(error)

    def sync_gradients(self, enabled: bool) -> None:
        self._synchronizes = enabled
        if self._wrapped is not None:
            self._communicate((enabled and not self._local) or self._records)

    def _communicate(self, enabled: bool) -> None:
        wrapped: Any = self._wrapped
        wrapped.require_backward_grad_sync = wrapped.module.communicates = enabled

    def sync_next_backward(self) -> None:
        wrapped = self._wrapped
        if wrapped is not None and not wrapped.module.announced:
            self._communicate(True)
            wrapped.reducer.prepare_for_backward([])
            wrapped.module.announced = wrapped.module.armed = True

    def left_gradients(self) -> bool:
        """Return True after a backward pass on a loss that did not come from a new forward pass of the wrapper.

        Such a loss may come from a model method other than forward, from a forward pass that an earlier backward pass
        has used, or from a forward pass that ran while communication was off. Torch then reduces nothing.
        """
        wrapped = self._wrapped
        if self._local or self.world_size == 1 or not self._synchronizes:
            return False
        if wrapped is None:
            return False
        step = wrapped.module
        if all(parameter.grad is None for parameter in self._reduced):
            return False  # the loss did not depend on these parameters
        announced, step.announced = step.announced, False
        return not announced

    def _tell_replaced(self, names: list[str]) -> str:
        """Return a sentence about the named parameters that are no longer in the module."""
        wrapped: Any = self._wrapped
        left = set(map(id, wrapped.module.module.parameters()))
        of = dict(zip(self._kinds, self._reduced, strict=True))
        gone = [name for name in names if id(of[name]) not in left]
        if not gone:
            return ""
        were = "was" if len(gone) == 1 else "were"
        return (
            f" {messages.names(gone, 'and')} {were} replaced after training began; tie or replace parameters in "
            "__init__ or configure_model instead, or copy values into them."
        )

    def left_gradients_by_hand(self) -> bool:
        wrapped = self._wrapped
        return (
            wrapped is not None
            and self.talks
            and self._synchronizes
            and not self._local
            and not wrapped.module.announced
        )

    def check_parameters(self, module: nn.Module) -> None:
        """Watch parameters that were added after wrapping.

        Raises:
            RuntimeError: the dtype, device or shape of a parameter has changed since the module was wrapped, so torch
                no longer notices the parameter's gradients.
        """
        if self.talks:
            for (name, before), parameter in zip(self._kinds.items(), self._reduced, strict=True):
                if (now := _kind(parameter)) != before:
                    old, new = next((a, b) for a, b in zip(before, now, strict=True) if a != b)
                    raise RuntimeError(
                        f"{type(module).__name__}.{name} was converted from {old} to {new} after "
                        "DistributedDataParallel had wrapped the model, so its gradients would no longer be averaged. "
                        "Convert the parameter before training: in __init__ or configure_model (in your own loop, "
                        "before prepare), or with precision='64-true' or 'bf16-true'."
                    )
        known = {*self._reduced, *self._kept_local}
        late = (p for p in module.parameters() if p not in known and p not in self._late)
        added = self._late.watch(late, self._got_late_gradient)
        if self.talks:
            same_tensors((one.data for one in added), self.data_group)

    @torch.no_grad()
    def check_replicas(self, module: nn.Module) -> None:
        """Warn about weights that only some ranks have changed; averaging gradients never makes them equal again.

        Waits for the device. Sums are compared with a tolerance, because devices of different models round differently.
        """
        if not self._reduced or not self.talks or self._local or callable(self.hook[0]):  # hooks may let ranks differ
            return
        values = [torch.view_as_real(p) if p.is_complex() else p for p in map(local_part, self._reduced)]
        dtypes = [torch.float64 if value.dtype == torch.float64 else torch.float32 for value in values]
        pairs = list(zip(values, dtypes, strict=True))
        sums = torch.stack([value.sum(dtype=dtype).double() for value, dtype in pairs])
        norms = torch.stack([torch.linalg.vector_norm(value, dtype=dtype).double() for value, dtype in pairs])
        extremes = torch.stack([sums, -sums, norms])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.data_group)
        highest, lowest, norms = extremes[0], -extremes[1], extremes[2]
        differs = (highest - lowest > 1e-4 * norms).tolist()
        odd = [name for name, differ in zip(self._kinds, differs, strict=True) if differ]
        if odd:
            messages.warn_once(
                f"{type(module).__name__}: {', '.join(odd[:5])}{' ...' if odd[5:] else ''} "
                f"{'differ' if odd[1:] else 'differs'} between the ranks, although ddp averages the gradients, so the "
                "ranks train different models. Usually, a hook has set random weights. Use the same seed on every "
                "rank, or copy rank 0's values (torch.distributed.broadcast).",
                key="differing replicas",
            )

    def _got_late_gradient(self, parameter: nn.Parameter) -> None:
        if self.world_size == 1 or self._local or not (self._synchronizes if self._wrapped is None else self._armed):
            return
        self._has_late_gradients = True
        at_end_of_backward(self._reduce_late_gradients)

    @property
    def _armed(self) -> bool:
        """Whether the next backward pass averages gradients, which only the first one after a forward pass does."""
        wrapped: Any = self._wrapped
        return wrapped.module.armed

    def _reduce_late_gradients(self) -> None:
        """Average the gradients that DistributedDataParallel does not track, after it has averaged the others."""
        if not self._has_late_gradients:
            return
        self._has_late_gradients = False
        self._disarm()
        messages.info_once(
            "Some of the model's parameters were unfrozen or added after training began. DistributedDataParallel does "
            "not track them, so their gradients are averaged after each backward pass, which takes longer than "
            "averaging them during the pass. To save that time, let them require gradients when training begins, and "
            "add them to the optimizer later."
        )
        average_gradients(self._late.trainable(), [None])

    def _disarm(self) -> None:
        if self._wrapped is not None:
            vars(self._wrapped.module)["armed"] = False

    def complete_gradients(self, optimizer: Optimizer) -> None:
        if not self._local:
            super().complete_gradients(optimizer)

    @contextmanager
    def keep_gradients_local(self) -> Iterator[None]:
        if self._records:
            raise ValueError(
                "With static_graph=True, the first backward pass must communicate to record the graph, so that pass "
                "cannot keep its gradients local. Train one step first, or leave static_graph out."
            )
        before, self._local = self._local, True
        self._stop_or_resume()
        try:
            yield
        finally:
            self._local = before
            self._stop_or_resume()

    def _stop_or_resume(self) -> None:
        """Turn communication of gradients and buffers off or on again, from the next forward pass."""
        self.sync_gradients(self._synchronizes)
        if self._wrapped is not None:
            self._wrapped.require_forward_param_sync = self._synchronizes and not self._local

    def joinable(self) -> DistributedDataParallel | None:
        return self._wrapped

    def scale_waiting(self, factor: float) -> None:
        waiting = [one.grad for one in (*self._reduced, *self._late.trainable()) if one.grad is not None]
        if waiting:
            multiply_each_(waiting, factor)

    def measure_communication(self) -> None:
        if self._wrapped is not None and not kind_of(self.device).overlaps_copies():
            # By default, torch times one step in a hundred. GPUs keep this default, because reading their timers waits.
            time_every_step(self._wrapped)

    def communication_seconds(self) -> dict[str, float] | None:
        if self._wrapped is None or self.world_size == 1:
            return None
        told = communication_times(self._wrapped)
        steps = float(told.get("iteration", 0))
        whole, hidden = (told.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap"))
        return {"all": whole * steps, "exposed": max(0.0, whole - hidden) * steps, "steps": steps}

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        wrapped = self._wrapped
        if self._manual and wrapped is not None and wrapped.require_backward_grad_sync:
            # Several backward passes may follow one forward pass: announce each one with its loss.
            wrapped.reducer.prepare_for_backward([loss] if wrapped.find_unused_parameters else [])
            wrapped.module.announced = wrapped.module.armed = True
        super().backward(loss, how)
        if self._records:
            self._records = False
            self.sync_gradients(self._synchronizes)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        stepped = super().optimizer_step(optimizer, closure)
        self._disarm()
        if self._settles:
            self._settle_buckets()
        if self._averager is not None and stepped:
            self._averager.average_parameters(optimizer.param_groups)
        return stepped

    def _settle_buckets(self) -> None:
        """Let torch order its buckets now, so that a checkpoint of the first step contains the order."""
        wrapped: Any = self._wrapped
        if all(one.grad is not None for one in self._reduced):  # otherwise, torch raises an error in the next forward
            settle_buckets(wrapped)
        self._settles = False

    # ---- state -------------------------------------------------------------------------------------------------------

    def reduction_order(self) -> list[int] | None:
        if self._order is None and self._wrapped is not None and self._reorders:
            numbers = {id(one): number for number, one in enumerate(self._reduced)}
            found = bucket_order(self._wrapped) or []
            self._order = [numbers[id(one)] for one in found if id(one) in numbers] or None
        return self._order

    def restore_reduction_order(self, order: list[int] | None) -> None:
        """Order the buckets as in the saved run, so that sums of three or more ranks' gradients round in the same way.

        Torch takes the order from the first backward pass, so this runs one that yields gradients of zero. If the user
        has hooks on the parameters, they must not see these gradients, and the order is left alone.
        """
        wrapped = self._wrapped
        known = order is not None and sorted(order) == list(range(len(self._reduced)))
        if not known or wrapped is None or not self._reorders or any(map(has_hooks, self._reduced)):
            return
        total = torch.zeros((), device=self.device)
        for number in reversed(order or []):  # the last gradient to be needed is computed first
            one = self._reduced[number]
            part = (torch.view_as_real(one) if one.is_complex() else one).reshape(-1)[:1]
            total = total + part.sum().float() * 0
        wrapped.reducer.prepare_for_backward([])
        total.backward()
        for one in self._reduced:
            one.grad = None
        settle_buckets(wrapped)
        self._order, self._settles = order, False

    def load_window_gradients(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        super().load_window_gradients(module, state)
        if self._wrapped is not None and not self._manual:
            # After a forward pass without communication, the next one does not broadcast rank 0's buffers.
            self._wrapped.require_forward_param_sync = False


class _Step(nn.Module):
    """The module that DistributedDataParallel wraps: its forward is the user's training step.

    Attributes:
        communicates: whether the backward pass of the next forward pass communicates gradients.
        announced: whether torch expects a backward pass and will reduce its gradients.
        armed: like ``announced``, but only until the gradients of late parameters are averaged or the optimizer steps.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.step: Callable[..., Any] = module.forward
        self.communicates, self.announced, self.armed = True, False, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["announced"] = self.__dict__["armed"] = self.communicates
        return self.step(*args, **kwargs)


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    """Return the properties that must not change in a parameter whose gradients torch reduces."""
    return parameter.dtype, parameter.device, parameter.shape


def state_and_hook(hook: Any, state: Any, wrapper: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the communication state and hook to register with torch; the user may have passed the hook by name."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        hook = powerSGD_hook.powerSGD_hook
        if state is None or isinstance(state, Mapping):
            state = powerSGD_hook.PowerSGDState(None, **(state or {}))
    elif isinstance(hook, str):
        hook = getattr(default_hooks, f"{hook}_compress_hook")
    if isinstance(wrapper, str):
        wrapper = getattr(default_hooks, f"{wrapper}_compress_wrapper")
    return state, wrapper(hook) if wrapper else hook
