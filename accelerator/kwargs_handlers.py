"""``Accelerator(kwargs_handlers=[...])``: arguments for objects that the Accelerator creates."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from .. import messages
from ..strategies.base import Strategy
from ..strategies.precision import Float8Precision, MixedPrecision, TransformerEnginePrecision
from .enums import DDPCommunicationHookType

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


@dataclass
class KwargsHandler:
    """Arguments for an object that the Accelerator creates."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of all fields."""
        return {one.name: copy.copy(getattr(self, one.name)) for one in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments for ``torch.autocast``, which wraps forward passes under ``mixed_precision="fp16"`` and ``"bf16"``.

    Args:
        enabled: if False, compute in the dtype of the weights.
        cache_enabled: whether to convert each weight once per forward pass instead of at each use; None uses torch's
            default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def context(self, strategy: Strategy) -> AbstractContextManager[Any]:
        """Return a context manager for computing in the strategy's precision, with this handler's arguments."""
        precision = strategy.precision
        if not isinstance(precision, MixedPrecision):
            return precision.forward_context()
        kind = strategy.device.type
        return torch.autocast(kind, precision.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for ``torch.nn.parallel.DistributedDataParallel``.

    Args:
        dim: has no effect, because each process has one device.
        broadcast_buffers: whether to broadcast rank 0's buffers before each forward pass.
        bucket_cap_mb: size of the gradient buckets in MiB.
        find_unused_parameters: whether to look in each step for parameters that the loss does not depend on.
        check_reduction: has no effect.
        gradient_as_bucket_view: whether to make gradients views of the buckets, to save memory.
        static_graph: whether the loss depends on the same parameters in every step.
        comm_hook: how to compress gradient buckets for communication: to 16 bits, or to a low-rank approximation.
        comm_wrapper: ``"fp16"`` or ``"bf16"``, the dtype that buckets are converted to before the hook runs.
        comm_state_option: arguments of ``PowerSGDState`` (``matrix_approximation_rank``, ...), for PowerSGD.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | Literal["no", "fp16", "bf16", "power_sgd"] = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | Literal["no", "fp16", "bf16"] = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)
        for name, default, why in (
            ("dim", 0, "each process has one device"),
            ("check_reduction", False, "torch always checks that gradients are reduced"),
        ):
            messages.ignored(type(self).__name__, why, default, **{name: getattr(self, name)})
        named = DDPCommunicationHookType
        if self.comm_hook is named.BATCHED_POWER_SGD:
            raise NotImplementedError(
                "DistributedDataParallelKwargs(comm_hook='batched_power_sgd'): torch's batched PowerSGD raises an "
                "AssertionError in the first step in which it compresses gradients. Use comm_hook='power_sgd'."
            )
        if self.comm_wrapper not in (named.NO, named.FP16, named.BF16):
            raise ValueError(
                f"DistributedDataParallelKwargs: comm_wrapper={self.comm_wrapper.value!r} is not supported. Choose "
                "'no', 'fp16' or 'bf16'."
            )
        if self.comm_hook is named.NO and (self.comm_wrapper is not named.NO or self.comm_state_option):
            raise ValueError(
                f"DistributedDataParallelKwargs: comm_wrapper={self.comm_wrapper.value!r} and "
                f"comm_state_option={self.comm_state_option} have no effect without comm_hook. Choose a hook "
                f"({messages.names(named.list()[1:-1])}), or leave out comm_wrapper and comm_state_option."
            )
        if self.comm_state_option and self.comm_hook is not named.POWER_SGD:
            raise ValueError(
                f"DistributedDataParallelKwargs: comm_state_option={self.comm_state_option} is for PowerSGD, but "
                f"comm_hook is {self.comm_hook.value!r}. Leave out comm_state_option, or use comm_hook='power_sgd'."
            )

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return only the arguments of DistributedDataParallel or, with ``ignore_keys=()``, every field."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register ``comm_hook`` on a DistributedDataParallel model that the script created itself.

        Models from ``accelerator.prepare`` already have the hook.

        Raises:
            TypeError: the model is not a DistributedDataParallel model.
        """
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"DistributedDataParallelKwargs.register_comm_hook got {messages.a(model)}, which does not average "
                "gradients. Pass a DistributedDataParallel model; accelerator.prepare(model) registers the hook of "
                "Accelerator(kwargs_handlers=[...]) itself."
            )
        from ..strategies.ddp import state_and_hook

        found = self.options()
        names = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")
        model.register_comm_hook(*state_and_hook(*(found.get(name) for name in names)))

    def options(self) -> dict[str, Any]:
        """Return the arguments for DDPStrategy."""
        hook, wrapper = str(self.comm_hook), str(self.comm_wrapper)
        found = self.to_kwargs()
        if hook != "no":
            found |= {"ddp_comm_hook": "powersgd" if hook == "power_sgd" else hook}
            found |= {"ddp_comm_state": dict(self.comm_state_option)} if self.comm_state_option else {}
            found |= {"ddp_comm_wrapper": wrapper} if wrapper != "no" else {}
        return found


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments for the ``GradScaler`` that ``mixed_precision="fp16"`` uses.

    Args:
        init_scale: initial loss scale.
        growth_factor: factor by which the scale is multiplied after ``growth_interval`` steps without overflow.
        backoff_factor: factor by which the scale is multiplied after an overflow.
        growth_interval: number of consecutive steps without overflow after which the scale grows.
        enabled: if False, losses are not scaled.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments for ``torch.distributed.init_process_group``.

    Args:
        backend: name of the backend; None means Gloo on the CPU and NCCL with CUDA.
        init_method: rendezvous URL; None uses the launcher's URL.
        timeout: how long a collective operation waits for other processes; None means 30 minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            seconds = self.timeout if isinstance(self.timeout, (int, float)) else 600
            raise TypeError(
                f"InitProcessGroupKwargs: timeout={self.timeout!r} is {messages.a(self.timeout)}. Pass a "
                f"datetime.timedelta, such as timedelta(seconds={seconds})."
            )

    def options(self) -> dict[str, Any]:
        """Return the arguments for a distributed strategy."""
        found = {"process_group_backend": self.backend, "init_method": self.init_method, "timeout": self.timeout}
        return {name: value for name, value in found.items() if value is not None}


Activity = Literal["cpu", "cuda", "xpu", "mtia", "hpu"]
_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_PASSED_ON = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments for ``torch.profiler.profile``.

    Args:
        activities: ``"cpu"``, ``"cuda"``, ...; None means all activities that this torch build supports.
        schedule_option: arguments of ``torch.profiler.schedule``, in steps: ``wait``, ``warmup``, ``active``,
            ``repeat``, ``skip_first``.
        on_trace_ready: function to call with the profiler after the ``active`` steps.
        record_shapes: whether to record input shapes.
        profile_memory: whether to record memory allocations.
        with_stack: whether to record the source file and line.
        with_flops: whether to estimate FLOPs.
        with_modules: whether to record module names.
        output_trace_dir: folder for one Chrome trace per process.
    """

    activities: Sequence[Activity] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def build(self) -> torch.profiler.profile:
        """Create the profiler."""
        unknown = [name for name in self.activities or () if str(name).lower() not in _ACTIVITIES]
        if unknown:
            raise ValueError(messages.unknown("ProfileKwargs activity", unknown[0], _ACTIVITIES))
        found = [getattr(torch.profiler.ProfilerActivity, str(name).upper()) for name in self.activities or ()]
        return torch.profiler.profile(
            activities=found or None,
            schedule=self._schedule(),
            **{name: getattr(self, name) for name in _PASSED_ON},
        )

    @contextmanager
    def record(self, strategy: Strategy) -> Iterator[torch.profiler.profile]:
        """Context manager that yields the running profiler. If it has a schedule, call ``step()`` after each batch.

        With ``output_trace_dir``, every process writes ``profile_<rank>.json`` to that folder (repeated schedules also
        write ``profile_<rank>_1.json``, ...), and all processes wait until the traces are written.
        """
        profiler = self.build()
        if self.output_trace_dir is not None:
            _write_traces(profiler, Path(self.output_trace_dir), strategy.global_rank)
        with profiler:
            yield profiler
        if self.output_trace_dir is not None:
            strategy.barrier("accelerator.profile: traces written")

    def _schedule(self) -> Callable[..., Any] | None:
        if self.schedule_option is None:
            return None
        known = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
        for name in self.schedule_option:
            if name not in known:
                raise ValueError(messages.unknown("ProfileKwargs(schedule_option=...) key", name, known))
        if "active" not in self.schedule_option:
            raise ValueError(
                f"ProfileKwargs: schedule_option={self.schedule_option} does not set the number of steps to record. "
                "Add the key 'active'."
            )
        return torch.profiler.schedule(**{"wait": 0, "warmup": 0, **self.schedule_option})


def _write_traces(profiler: torch.profiler.profile, folder: Path, rank: int) -> None:
    """Make the profiler write each trace before it calls the user's ``on_trace_ready``."""
    folder.mkdir(parents=True, exist_ok=True)
    then, written = profiler.on_trace_ready, 0

    def write(ready: torch.profiler.profile) -> None:
        nonlocal written
        ready.export_chrome_trace(str(folder / f"profile_{rank}{f'_{written}' if written else ''}.json"))
        written += 1
        if then is not None:
            then(ready)

    profiler.on_trace_ready = write


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Arguments for ``mixed_precision="fp8"``: 8-bit matrix products through torchao.

    Args:
        config: a ``torchao.float8.Float8LinearConfig``; None means one scale per tensor.
        module_filter_func: function that takes a linear layer and its name, and returns True to convert the layer; None
            converts every layer whose sizes are multiples of 16, except the model's first and last linear layers.
        pad_inner_dim: whether to pad tensors whose sizes do not allow 8-bit products; only without ``config``.
        enable_fsdp_float8_all_gather: whether FSDP gathers the converted weights in 8 bits; only without ``config``.
    """

    config: Float8LinearConfig | None = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def precision(self, kind: str) -> Float8Precision:
        """Return the precision for a kind of device."""
        found = Float8Precision(config=self.config, filter=self.module_filter_func, device=kind)
        details = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
        given = {name: getattr(self, name) for name in details if getattr(self, name) is not None}
        if given and self.config is not None:
            raise ValueError(
                f"AORecipeKwargs got config together with {messages.names(given, 'and')}. Set these options in config "
                "instead."
            )
        found.config = replace(found.config, **given)
        return found


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Arguments for ``mixed_precision="fp8"``: 8-bit matrix products through TransformerEngine's ``DelayedScaling``.

    Weights keep their dtype, and other operations compute in bfloat16.

    Args:
        use_autocast_during_eval: whether forward passes without gradients also use 8-bit products.
        margin: margin of the scales, as a power of 2.
        interval: number of steps between updates of the scales; must be 1 in TransformerEngine 1.12 and newer.
        fp8_format: ``"HYBRID"`` (E5M2 for gradients, E4M3 for everything else) or ``"E4M3"`` (for everything).
        amax_history_len: number of steps whose largest values determine a scale.
        amax_compute_algo: which value in this history of largest values determines the scale: ``"most_recent"`` or
            ``"max"``.
        override_linear_precision: which products of a linear layer (forward, gradients of inputs, gradients of weights)
            are not computed in 8 bits; not available in TransformerEngine 1.12 and newer.
        use_mxfp8_block_scaling: not supported.

    Raises:
        NotImplementedError: ``use_mxfp8_block_scaling`` is set.
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def __post_init__(self) -> None:
        if self.use_mxfp8_block_scaling:
            raise NotImplementedError(
                "TERecipeKwargs(use_mxfp8_block_scaling=True) is not supported, because Paceline uses one scale per "
                "tensor (DelayedScaling). Leave out use_mxfp8_block_scaling."
            )

    def precision(self, kind: str) -> TransformerEnginePrecision:
        """Return the precision for a kind of device."""
        recipe = self.to_dict()
        del recipe["use_autocast_during_eval"], recipe["use_mxfp8_block_scaling"]
        for name in ("interval", "override_linear_precision"):  # newer versions of the package do not have them
            if recipe[name] == getattr(TERecipeKwargs, name):
                del recipe[name]
        found = TransformerEnginePrecision(None, recipe)
        found.evaluates_in_8_bits = self.use_autocast_during_eval
        return found


class _Refused(KwargsHandler):
    """A handler that can be created with any arguments, but that the Accelerator rejects."""

    def __init__(self, **arguments: Any) -> None:
        vars(self).update(arguments)


class MSAMPRecipeKwargs(_Refused):
    """Arguments for 8-bit training with MS-AMP. Not supported."""


class FP8RecipeKwargs(_Refused):
    """Arguments for 8-bit training with the package that ``backend`` names. Not supported."""


@dataclass(frozen=True)
class Handlers:
    """An Accelerator's handlers by kind; a field is None if no handler of that kind was passed."""

    autocast: AutocastKwargs | None = None
    ddp: DistributedDataParallelKwargs | None = None
    float8: AORecipeKwargs | TERecipeKwargs | None = None
    grad_scaler: GradScalerKwargs | None = None
    process_group: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None


_KINDS: dict[type[KwargsHandler], str] = {
    AutocastKwargs: "autocast",
    DistributedDataParallelKwargs: "ddp",
    GradScalerKwargs: "grad_scaler",
    InitProcessGroupKwargs: "process_group",
    ProfileKwargs: "profile",
    AORecipeKwargs: "float8",
    TERecipeKwargs: "float8",
}


_ACCEPTED = messages.names(kind.__name__ for kind in _KINDS).replace("'", "")


def sort_handlers(kwargs_handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Sort the handlers of ``Accelerator(kwargs_handlers=[...])`` by kind."""
    found: dict[str, Any] = {}
    if kwargs_handlers is not None and not isinstance(kwargs_handlers, (list, tuple)):
        raise TypeError(
            f"Accelerator: kwargs_handlers={kwargs_handlers!r} is {messages.a(kwargs_handlers)}. Pass a list of "
            f"handlers: {_ACCEPTED}."
        )
    for handler in kwargs_handlers or ():
        if isinstance(handler, _Refused):
            raise NotImplementedError(
                f"Accelerator(kwargs_handlers=[{type(handler).__name__}(...)]) is not supported. Pass "
                "AORecipeKwargs() to multiply in 8 bits with torchao, or TERecipeKwargs() for TransformerEngine."
            )
        name = next((name for kind, name in _KINDS.items() if isinstance(handler, kind)), None)
        if name is None:
            raise TypeError(_no_handler(handler))
        if name in found:
            kind = type(handler).__name__ if type(found[name]) is type(handler) else "8-bit recipes"
            raise ValueError(
                f"Accelerator(kwargs_handlers=[...]) has two {kind}: {found[name]} and {handler}. Pass only one."
            )
        found[name] = handler
    return Handlers(**found)


def _no_handler(given: Any) -> str:
    places = {
        "TorchDynamoPlugin": "dynamo_plugin",
        "GradientAccumulationPlugin": "gradient_accumulation_plugin",
        "FullyShardedDataParallelPlugin": "fsdp_plugin",
        "DeepSpeedPlugin": "deepspeed_plugin",
        "ParallelismConfig": "parallelism_config",
        "ProjectConfiguration": "project_config",
        "DataLoaderConfiguration": "dataloader_config",
    }
    name = type(given).__name__
    if isinstance(given, type):
        hint = f" Did you mean {given.__name__}()?"
    else:
        hint = f" Pass it as Accelerator({places[name]}=...)." if name in places else ""
    return f"Accelerator(kwargs_handlers=[...]) got {given!r:.200}, which is not a handler.{hint} Pass {_ACCEPTED}."
