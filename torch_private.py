"""Everything of torch that Paceline uses though it is not public. No other file does.

A name here can go with any version of torch, so each entry says in which versions it was seen and what happens without
it. ``tests/test_torch_private.py`` uses every one of them: after an upgrade of torch it fails first. What runs in every
step is an alias or a getter written in C, which costs no Python call.

Importing this file imports nothing beyond ``import torch``. The functions import what else they need.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, overrides
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer

# ---- data loading ----------------------------------------------------------------------------------------------------


def running_iterator(loader: DataLoader[Any]) -> Any:
    """The iterator that a loader with persistent workers keeps from pass to pass; None if it keeps none.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return loader._iterator


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Let a loader make a new iterator for its next pass.

    Torch 2.11 to 2.13. If it goes: nothing happens, and a loader with persistent workers keeps its old batches.
    """
    loader._iterator = None


def makes_torchs_iterators(loader: DataLoader[Any]) -> bool:
    """Whether the class of a loader leaves it to torch to make its iterators.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return type(loader)._get_iterator is DataLoader._get_iterator


def index_sampler(iterator: Any) -> Any:
    """The sampler that an iterator of a loader reads, which it got when it was made.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return iterator._index_sampler


def pins_memory(iterator: Any) -> bool:
    """Whether an iterator of a loader copies batches to pinned memory.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return iterator._pin_memory


def dataset_iterator(iterator: Any) -> Any:
    """The data set's own iterator, which an iterator without workers reads; ``iterator`` itself if there is none.

    Torch 2.11 to 2.13. If it goes: the iterator itself, and the end of a data set is asked for once more than needed.
    """
    return getattr(getattr(iterator, "_dataset_fetcher", None), "dataset_iter", iterator)


def workers_of(iterator: Any) -> list[Any]:
    """The worker processes of an iterator of a loader; none if it has none.

    Torch 2.11 to 2.13. If it goes: none, and the error about a lost worker does not say which one it was.
    """
    return getattr(iterator, "_workers", [])


def shut_down_workers(iterator: Any, persistent: bool = False) -> None:
    """End the worker processes of an iterator of a loader; nothing if it has none.

    Torch 2.11 to 2.13. If it goes: nothing happens, and workers end when their iterator is garbage.

    Args:
        iterator: of a loader, or any other.
        persistent: also those that are to serve the loader's next pass.
    """
    if persistent or not getattr(iterator, "_persistent_workers", False):
        getattr(iterator, "_shutdown_workers", bool)()


# ---- modules ---------------------------------------------------------------------------------------------------------

#: The parameters that a module holds itself, by name: the dict in which the module looks them up. Torch 2.11 to 2.13.
#: If it goes: AttributeError.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")

#: The same for buffers. Torch 2.11 to 2.13. If it goes: AttributeError.
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

#: The same for modules; one that has several names is there several times. Torch 2.11 to 2.13. If it goes:
#: AttributeError.
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its ``state_dict`` leaves out.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return module._non_persistent_buffers_set


def is_initialized(module: nn.Module) -> bool:
    """Whether ``nn.Module.__init__`` has run.

    Torch 2.11 to 2.13. If it goes: False, so every module is refused.
    """
    return "_modules" in vars(module)


#: The method behind ``.to()``, ``.cuda()`` and ``.half()``: applies a function to all tensors. An attribute of this
#: name on an object takes its place. Torch 2.11 to 2.13. If it goes: AttributeError where dtypes are converted, and a
#: model that a device map has spread can be moved.
APPLY = "_apply"

#: What a module does when it is called and is not compiled: hooks and ``forward``. Torch 2.11 to 2.13. If it goes:
#: AttributeError.
plain_call: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")

#: The attribute that a module calls instead, if it is not None: what ``module.compile()`` sets. Torch 2.11 to 2.13. If
#: it goes: AttributeError where it is read; what is put there is never called.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return getattr(module, COMPILED_CALL) is not None


def saved_versions(state: Any) -> Mapping[str, dict[str, Any]]:
    """The versions of the modules' layouts that a ``state_dict`` carries, by module.

    Torch 2.11 to 2.13. If it goes: none, and each module reads the state as the oldest version.
    """
    return getattr(state, "_metadata", {})


def load_own_tensors(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    version: dict[str, Any],
    missing: list[str],
    unexpected: list[str],
    problems: list[str],
) -> None:
    """Load what a module itself holds, without the modules in it.

    Torch 2.11 to 2.13. If it goes: AttributeError.

    Args:
        module: gets the values.
        state: of the whole model.
        prefix: the module's name in it, with a dot at the end; empty for the whole model.
        version: the module's entry in :func:`saved_versions`.
        missing: gets the names that are not in ``state``.
        unexpected: gets those that the module does not have.
        problems: gets what else is wrong, in words.
    """
    module._load_from_state_dict(state, prefix, version, True, missing, unexpected, problems)


#: What ``load_state_dict`` returns. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
IncompatibleKeys = nn.modules.module._IncompatibleKeys

#: The class of all batch norms. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
BatchNorm = nn.modules.batchnorm._BatchNorm

#: The class of all convolutions. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
Convolution = nn.modules.conv._ConvNd

#: The class of all dropouts. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
Dropout = nn.modules.dropout._DropoutNd


def as_sync_batch_norm(layer: nn.Module) -> dict[str, Any]:
    """Attributes that let a batch norm run as a ``SyncBatchNorm``, which needs a GPU, although its class is another.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    kind = nn.SyncBatchNorm
    check = "_check_non_zero_input_channels"
    return {"forward": partial(kind.forward, layer), check: partial(getattr(kind, check), layer), "process_group": None}


# ---- tensors and operators -------------------------------------------------------------------------------------------

#: Functions for nested lists, tuples and dicts of tensors. Torch 2.11 to 2.13. If it goes: this file cannot be
#: imported.
pytree = _pytree

#: A key that tensors with the same storage share, also where there is no memory. Torch 2.11 to 2.13. If it goes:
#: AttributeError.
storage_key: Callable[[Any], int] = attrgetter("_cdata")

#: The hooks that the backward of a tensor runs; None if there are none. Torch 2.11 to 2.13. If it goes: AttributeError.
backward_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")


def change_count(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None for one that was made in inference mode, where nobody counts.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    try:
        return tensor._version
    except RuntimeError:
        return None


#: Multiplies several tensors in place by a number or a scalar tensor. Torch 2.11 to 2.13. If it goes: this file cannot
#: be imported.
multiply_each_: Callable[[list[Tensor], float | Tensor], None] = torch._foreach_mul_  # type: ignore[reportPrivateImportUsage]

#: The norm of each of several tensors. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
norm_of_each: Callable[..., list[Tensor]] = torch._foreach_norm  # type: ignore[reportPrivateImportUsage]

#: Multiplies gradients in place by the inverse of the loss scale and notes whether one is not finite. Torch 2.11 to
#: 2.13. If it goes: this file cannot be imported.
unscale_each_: Callable[[list[Tensor], Tensor, Tensor], None] = (
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
)

#: The operator that brings a number from a tensor to the host. Torch 2.11 to 2.13. If it goes: this file cannot be
#: imported.
read_number = torch.ops.aten._local_scalar_dense

#: The operator of ``torch.unique``. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
find_unique = torch.ops.aten._unique2

#: The operator of products of groups of matrices. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
grouped_mm = torch.ops.aten._grouped_mm

#: A context that sees every operator; for subclasses. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

#: The innermost of the contexts that see calls of torch's functions. Torch 2.11 to 2.13. If it goes: this file cannot
#: be imported.
current_function_mode: Callable[[], Any] = overrides._get_current_function_mode

#: A context in which tensors have shapes and no values. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
FakeTensorMode = fake_tensor.FakeTensorMode

#: The class of tensors without values. Torch 2.11 to 2.13. If it goes: this file cannot be imported.
FakeTensor = fake_tensor.FakeTensor

#: A program asks for a value that such a tensor does not have. Torch 2.11 to 2.13. If it goes: this file cannot be
#: imported.
DataDependentOutputException = fake_tensor.DataDependentOutputException


# ---- process groups --------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group: keys and values that all ranks see.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """How long the collectives of a group may take on a kind of device.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return group._get_backend(device).options._timeout


def fake_store() -> Any:
    """The store of a process group that has one real rank and sends nothing, for ``init_process_group("fake")``.

    Torch 2.11 to 2.13. If it goes: ImportError.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def time_every_step(wrapped: Any) -> None:
    """Let a ``DistributedDataParallel`` time the communication of every step, not only of some.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    wrapped._set_ddp_runtime_logging_sample_rate(1)


def communication_times(wrapped: Any) -> Mapping[str, Any]:
    """What a ``DistributedDataParallel`` has timed: nanoseconds by name, and ``iteration``, the number of steps.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return wrapped._get_ddp_logging_data()


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh with one dimension of this name over all processes of ``mesh``; the root mesh knows it from then on.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return mesh._flatten(name)


# ---- DTensor and FSDP ------------------------------------------------------------------------------------------------


def is_in_parts(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; imports nothing.

    Torch 2.11 to 2.13. If it goes: False for all.
    """
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, outside of autograd; any other tensor as it is.

    Torch 2.11 to 2.13. If it goes: the DTensor itself.
    """
    return getattr(tensor, "_local_tensor", tensor)


def with_local_part(like: Any, part: Tensor) -> Any:
    """A DTensor laid out as another one, without gradient, of which this process has ``part``.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return type(like)(part, like._spec, requires_grad=False)


def local_shape_and_offset(like: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this process's part of a DTensor and where in the whole it begins, from its layout.

    Torch 2.11 to 2.13. If it goes: ImportError.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)


def forget_layouts() -> None:
    """Let torch forget how it has laid out the results of operators on DTensors, with the process groups in there.

    Torch 2.11 to 2.13. If it goes: AttributeError; without the cache written in C++, that one is left out.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    propagator = tensors.DTensor._op_dispatcher.sharding_propagator
    caches = [getattr(getattr(propagator, name), "cache_clear", None) for name in dir(propagator)]
    for clear in (*caches, getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)):
        if callable(clear):
            clear()


#: The logger to which torch says that it redistributes a tensor in several steps. Torch 2.11 to 2.13. If it goes: its
#: lines are not filtered.
REDISTRIBUTES = "torch.distributed.tensor._redistribute"

#: What FSDP keeps of a module that it shards. Torch 2.11 to 2.13. If it goes: AttributeError.
fsdp_state: Callable[[Any], Any] = methodcaller("_get_fsdp_state")

#: Ends a backward: reduces gradients that wait. Takes the root's :func:`fsdp_state`. Torch 2.11 to 2.13. If it goes:
#: AttributeError.
finish_backward: Callable[[Any], None] = methodcaller("_root_post_backward_final_callback")

#: Of a :func:`fsdp_state`: the function that takes a tensor from which a backward will begin, if it is none that torch
#: found in the module's output. Torch 2.11 to 2.13. If it goes: AttributeError.
expect_backward: Callable[[Any], Callable[[Tensor], Any]] = attrgetter("_register_pre_backward_hook")


def fsdp_parameters(root: nn.Module) -> list[Any]:
    """What FSDP keeps of each parameter that it has sharded.

    Torch 2.11 to 2.13; some have one group of parameters a module, others several. If it goes: AttributeError.
    """
    from torch.distributed.fsdp import FSDPModule

    states = [fsdp_state(part) for part in root.modules() if isinstance(part, FSDPModule)]
    groups = [
        group
        for state in states
        for group in (state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group])
    ]
    return [one for group in groups if group is not None for one in group.fsdp_params]


def whole_parameter(one: Any) -> nn.Parameter | None:
    """The whole parameter of an entry of :func:`fsdp_parameters`; None before it is first gathered.

    Torch 2.11 to 2.13. If it goes: None, and gradients that wait for their reduction are not saved.
    """
    return getattr(one, "_unsharded_param", None)


#: The attribute that marks a module in which FSDP has sharded something. Torch 2.11 to 2.13. If it goes: a run in other
#: processes brings layers back with traces of its sharding.
FSDP_MARK = "_is_fsdp_managed_module"

#: All attributes that ``fully_shard`` adds to a module. Torch 2.11 to 2.13. If it goes: as :data:`FSDP_MARK`.
FSDP_ATTRIBUTES = ("__composable_api_state_key", FSDP_MARK, "_fsdp_use_orig_params")


def classes_of_policy(policy: Any) -> tuple[type[nn.Module], ...] | None:
    """The classes that a ``ModuleWrapPolicy`` wraps; None for any other policy.

    Torch 2.11 to 2.13. If it goes: None, and the policy is called as if it were a function.
    """
    found = getattr(policy, "_module_classes", None)
    return None if found is None else tuple(found)


def function_of_policy(policy: Any) -> Callable[[nn.Module], Any] | None:
    """The function with which a ``CustomPolicy`` decides; None for any other policy.

    Torch 2.11 to 2.13. If it goes: None, and the policy is called as if it were a function.
    """
    return getattr(policy, "_lambda_fn", None)


# ---- compiling -------------------------------------------------------------------------------------------------------


def compiler_is_loaded() -> bool:
    """Whether anything may have been compiled in this process; imports nothing.

    Torch 2.11 to 2.13. If it goes: False.
    """
    return "torch._dynamo" in sys.modules


def compiler_of(model: Any) -> Callable[[Any], Any] | None:
    """What compiles a function as ``torch.compile(module)`` was told to; None if ``model`` is no such module.

    Torch 2.11 to 2.13. If it goes: None for all if the module has moved, AttributeError otherwise.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return model.dynamo_ctx if dynamo is not None and isinstance(model, dynamo.OptimizedModule) else None


def inside_compiled(model: Any) -> nn.Module:
    """The module that ``torch.compile(module)`` was given.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return model._orig_mod


def on_compiling(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Have ``begin`` called before each compilation and ``end`` after it, once however often this is asked for.

    Torch 2.11 to 2.13. If it goes: ImportError.
    """
    from torch._dynamo.callback import callback_handler

    if begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)


def off_compiling(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Undo :func:`on_compiling`; nothing if that was done.

    Torch 2.11 to 2.13. If it goes: ImportError.
    """
    from torch._dynamo.callback import callback_handler

    if begin in callback_handler.start_callbacks:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def recompilations() -> logging.Logger:
    """The logger to which torch, from now on, explains why it compiles a function again.

    ``torch._logging.set_logs`` would do it too, and undo what the user has asked of torch's logs.

    Torch 2.11 to 2.13. If it goes: ImportError.
    """
    from torch._dynamo import guards  # noqa: F401 (it sets the level of its logger when it is imported)
    from torch._logging._internal import log_state

    log_state.enable_artifact("recompiles")
    return logging.getLogger("torch._dynamo.guards.__recompiles")


def tracing_whole_steps() -> AbstractContextManager[Any]:
    """Within, torch compiles backward as part of a function, and takes integers on modules for data.

    Torch 2.11 to 2.13. If it goes: AttributeError, or ImportError.
    """
    import torch._dynamo.config as dynamo

    return dynamo.patch(trace_autograd_ops=True, allow_unspec_int_on_nn_module=True)  # type: ignore[attr-defined]


def compiler_errors() -> tuple[type[Exception], type[Exception]]:
    """What torch raises where it cannot compile a function, and where it has compiled one too often.

    Torch 2.11 to 2.13. If it goes: ImportError.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def keep_address(tensor: Tensor) -> None:
    """Promise torch's compiler that a tensor stays where it is in memory, so that CUDA graphs need no copy of it.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    torch._dynamo.mark_static_address(tensor)


def let_trace_groups(methods: dict[str, Any]) -> None:
    """Let torch's compiler trace how an optimizer collects its gradients, as any other code.

    Torch has a way of its own for that, which needs gradients before the graph runs.

    Torch 2.11 to 2.13. If it goes: nothing happens, and torch's own way is taken.

    Args:
        methods: of the optimizer's class, by name; changed.
    """
    if "_init_group" in methods:
        collect = methods["_init_group"]
        methods["_init_group"] = getattr(collect, "_torchdynamo_orig_callable", collect)


# ---- optimizers, schedulers, loss scaling ----------------------------------------------------------------------------

#: The attribute of an optimizer that tells schedulers that it has stepped. Torch 2.11 to 2.13. If it goes: a scheduler
#: warns that it was stepped first.
HAS_STEPPED = "_opt_called"


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks that run before and after an optimizer's steps.

    Torch 2.11 to 2.13. If it goes: AttributeError.
    """
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def takes_step_hooks(optimizer: Optimizer) -> bool:
    """Whether ``Optimizer.__init__`` has run, without which hooks cannot be registered.

    Torch 2.11 to 2.13. If it goes: False for all, and a step that the user makes by mistake is not noticed.
    """
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def is_of_scheduler(step: Any) -> bool:
    """Whether a scheduler has put this ``step`` on its optimizer, to count the calls.

    Torch 2.11 to 2.13. If it goes: False, and an optimizer with a scheduler counts as one whose step was replaced.
    """
    return getattr(step, "_wrapped_by_lr_sched", False)


#: The attribute with the schedulers inside a ``SequentialLR`` or a ``ChainedScheduler``. Torch 2.11 to 2.13. If it
#: goes: those inside are not seen.
INNER_SCHEDULERS = "_schedulers"

#: The attribute with the learning rates that a scheduler has set last. Torch 2.11 to 2.13. If it goes: parameters that
#: are added to an optimizer have no rate in there.
LAST_RATES = "_last_lr"

#: The loss scale, shape (), of a ``GradScaler``; None before the first loss. Torch 2.11 to 2.13. If it goes:
#: AttributeError.
scale_of: Callable[[Any], Tensor] = attrgetter("_scale")

#: What a ``GradScaler`` knows of each optimizer since its last update, by the optimizer's id. Torch 2.11 to 2.13. If it
#: goes: AttributeError.
scaler_states: Callable[[Any], dict[int, dict[str, Any]]] = attrgetter("_per_optimizer_states")


def unscale_with(scaler: Any, unscale: Callable[..., dict[torch.device, Tensor]]) -> None:
    """Let a ``GradScaler`` unscale the gradients of an optimizer with this function.

    Torch 2.11 to 2.13. If it goes: the function is not called, and torch unscales each part by itself.
    """
    scaler._unscale_grads_ = unscale


# ---- files -----------------------------------------------------------------------------------------------------------

#: Module and name of what an index of a distributed checkpoint names outside of its own module. Torch 2.11 to 2.13. If
#: one goes: indexes name something else, which is refused.
NAMES_IN_INDEX = {
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}

#: The file writer of a TensorBoard ``SummaryWriter``, a new one if it was closed. Torch 2.11 to 2.13. If it goes:
#: AttributeError.
event_writer: Callable[[Any], Any] = methodcaller("_get_file_writer")
