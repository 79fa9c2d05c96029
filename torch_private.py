"""All of torch's private names that Paceline uses. No other file uses private names of torch.

All of these names exist in torch 2.11 to 2.15. A later version may remove any of them. :mod:`.torch_versions` lists
them, so that a message can show which are missing. If a name is missing, code that uses it raises AttributeError or
ImportError, unless the entry says otherwise. ``tests/test_torch_private.py`` uses every entry, so it is the first test
to fail after a torch upgrade.

Entries used in every step are aliases or getters written in C, which avoid a Python call.

Importing this file imports only what ``import torch`` imports. Functions import anything else that they need.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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

#: The iterator that a loader with persistent workers keeps for its next epoch; None if it has no such iterator.
running_iterator: Callable[[DataLoader[Any]], Any] = attrgetter("_iterator")


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make a loader create a new iterator for its next epoch.

    If torch removes ``_iterator``, nothing happens, and a loader with persistent workers keeps its old iterator.
    """
    loader._iterator = None


def makes_torchs_iterators(loader: DataLoader[Any]) -> bool:
    """Return True if a loader's class uses torch's own iterators."""
    return type(loader)._get_iterator is DataLoader._get_iterator


#: The sampler that a loader's iterator reads.
index_sampler: Callable[[Any], Any] = attrgetter("_index_sampler")

#: Whether a loader's iterator copies batches to pinned memory.
pins_memory: Callable[[Any], bool] = attrgetter("_pin_memory")


def dataset_iterator(iterator: Any) -> Any:
    """Return the dataset's iterator inside a loader's ``iterator``, for an iterable dataset read without workers.

    Otherwise, return ``iterator`` itself. If torch removes ``_dataset_fetcher``, this always returns ``iterator``, and
    the loader requests one more item than needed at the end of a dataset.
    """
    return getattr(getattr(iterator, "_dataset_fetcher", None), "dataset_iter", iterator)


def workers_of(iterator: Any) -> list[Any]:
    """Return the worker processes of a loader's iterator.

    If torch removes ``_workers``, the list is empty, and the error about a lost worker does not say which one it was.
    """
    return getattr(iterator, "_workers", [])


def shut_down_workers(iterator: Any, persistent: bool = False) -> None:
    """Shut down an iterator's worker processes, if it has any; keep persistent workers unless ``persistent`` is True.

    If torch removes ``_shutdown_workers``, nothing happens, and workers exit when their iterator is garbage-collected.
    """
    if persistent or not getattr(iterator, "_persistent_workers", False):
        getattr(iterator, "_shutdown_workers", bool)()


# ---- modules ---------------------------------------------------------------------------------------------------------

#: The dict in which a module looks up its own parameters by name.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")

#: Like :data:`own_parameters`, but for buffers.
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

#: Like :data:`own_parameters`, but for submodules. A submodule with several names appears several times.
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")

#: The names of a module's own buffers that are not in its ``state_dict``.
unsaved_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def is_initialized(module: nn.Module) -> bool:
    """Return True if ``nn.Module.__init__`` has run.

    If torch removes ``_modules``, this always returns False, so every module is rejected as uninitialized.
    """
    return "_modules" in vars(module)


def unscales_in_its_step(optimizer: Any) -> bool:
    """Return True if an optimizer removes the loss scale inside its step.

    If torch removes ``_step_supports_amp_scaling``, this always returns False, so such optimizers are accepted.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


#: The method behind ``.to()``, ``.cuda()`` and ``.half()``, which applies a function to all tensors. An attribute of
#: this name on an object replaces the method. If torch removes this method, converting dtypes raises AttributeError,
#: and moving a model that a device map has spread is no longer refused.
APPLY = "_apply"

#: The method that runs when an uncompiled module is called: hooks and ``forward``.
plain_call: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")

#: The attribute, set by ``module.compile()``, that a module calls instead of :data:`plain_call` if it is not None. If
#: torch removes this attribute, reading it raises AttributeError, and a value set there is never called.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module was compiled in place."""
    return getattr(module, COMPILED_CALL) is not None


def saved_versions(state: Any) -> Mapping[str, dict[str, Any]]:
    """Return the version of each module's layout in a ``state_dict``, by module name.

    If torch removes ``_metadata``, the mapping is empty, and each module reads its state as the oldest version.
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
    """Load a module's own tensors, without its submodules' tensors.

    Args:
        module: the module to load into.
        state: the full model's state.
        prefix: the module's name in ``state``, with a dot at the end; empty for the full model.
        version: the module's entry in :func:`saved_versions`.
        missing: receives the names that are not in ``state``.
        unexpected: receives the names that the module does not have.
        problems: receives descriptions of other problems.
    """
    module._load_from_state_dict(state, prefix, version, True, missing, unexpected, problems)


#: The type that ``load_state_dict`` returns.
IncompatibleKeys = nn.modules.module._IncompatibleKeys

#: The base class of all batch norm layers.
BatchNorm = nn.modules.batchnorm._BatchNorm

#: The base class of all convolution layers.
Convolution = nn.modules.conv._ConvNd

#: The base class of all dropout layers.
Dropout = nn.modules.dropout._DropoutNd


def as_sync_batch_norm(layer: nn.Module) -> dict[str, Any]:
    """Return attributes that make a batch norm of another class run as a ``SyncBatchNorm``, which needs a GPU.

    If torch removes ``_check_non_zero_input_channels``, this raises AttributeError.
    """
    kind: Any = nn.SyncBatchNorm
    check = "_check_non_zero_input_channels"
    return {"forward": partial(kind.forward, layer), check: partial(getattr(kind, check), layer), "process_group": None}


# ---- tensors and operators -------------------------------------------------------------------------------------------

#: Functions for nested lists, tuples and dicts of tensors.
pytree = _pytree

#: A key that is equal for tensors that share their storage, even if that storage has no memory.
storage_key: Callable[[Any], int] = attrgetter("_cdata")

#: The hooks that run in a tensor's backward pass; None if it has no hooks.
backward_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")


def has_hooks(parameter: Tensor) -> bool:
    """Return True if a hook runs when a parameter gets a gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def change_count(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for inference tensors, for which torch keeps no count."""
    try:
        return tensor._version
    except RuntimeError:
        return None


#: Multiplies several tensors in place by a number or a scalar tensor.
multiply_each_: Callable[[list[Tensor], float | Tensor], None] = torch._foreach_mul_  # type: ignore[reportPrivateImportUsage]

#: Computes the norm of each of several tensors.
norm_of_each: Callable[..., list[Tensor]] = torch._foreach_norm  # type: ignore[reportPrivateImportUsage]

#: Multiplies gradients in place by the inverse loss scale, and records whether any value is not finite.
unscale_each_: Callable[[list[Tensor], Tensor, Tensor], None] = (
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
)

#: The operator that reads a number from a tensor on the host.
read_number = torch.ops.aten._local_scalar_dense

#: The operator behind ``torch.unique``.
find_unique = torch.ops.aten._unique2

#: The operator for grouped matrix products.
grouped_mm = torch.ops.aten._grouped_mm

#: Base class of context managers that intercept every operator.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

#: Returns the innermost context manager that intercepts calls of torch functions.
current_function_mode: Callable[[], Any] = overrides._get_current_function_mode

#: Context manager in which tensors have shapes but no values.
FakeTensorMode = fake_tensor.FakeTensorMode

#: The class of fake tensors, which have no values.
FakeTensor = fake_tensor.FakeTensor

#: The error raised when a program reads a value from a fake tensor.
DataDependentOutputException = fake_tensor.DataDependentOutputException


# ---- process groups --------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the default process group's key-value store, which all ranks share."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout for a group's collectives on a type of device."""
    return group._get_backend(device).options._timeout


def fake_store() -> Any:
    """Return the store for ``init_process_group("fake")``, a group with one real rank that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of a module that ``DistributedDataParallel`` must ignore.

    If torch renames the attribute, the result is empty.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Make ``DistributedDataParallel`` ignore these parameters and buffers of a module."""
    vars(module)["_ddp_params_and_buffers_to_ignore"] = list(names)


def time_every_step(wrapped: Any) -> None:
    """Make ``DistributedDataParallel`` time the communication in every step, not just in some."""
    wrapped._set_ddp_runtime_logging_sample_rate(1)


#: Returns the times that a ``DistributedDataParallel`` measured, in nanoseconds by name, plus ``iteration``, the number
#: of steps.
communication_times: Callable[[Any], Mapping[str, Any]] = methodcaller("_get_ddp_logging_data")


def settle_buckets(wrapped: Any) -> None:
    """Let ``DistributedDataParallel`` order its buckets as the gradients of its first averaged backward pass came.

    Torch does this in the next forward pass. All ranks must call this.
    """
    wrapped._has_rebuilt_buckets |= wrapped.reducer._rebuild_buckets()


def bucket_order(wrapped: Any) -> list[Tensor] | None:
    """Return the parameters in the order of ``DistributedDataParallel``'s buckets; None if it is not settled yet.

    This briefly takes as much memory as the gradients.
    """
    if not wrapped._has_rebuilt_buckets:
        return None
    return [one for bucket in wrapped.reducer._get_zeros_like_grad_buckets() for one in bucket.parameters()]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with a single dimension, ``name``, across all processes of ``mesh``. The root mesh stores it."""
    return mesh._flatten(name)


# ---- DTensor and FSDP ------------------------------------------------------------------------------------------------


def is_in_parts(tensor: Any) -> bool:
    """Return True if a tensor is a DTensor, without importing anything.

    If torch removes ``_local_tensor``, this always returns False.
    """
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, detached from autograd, or any other tensor unchanged.

    If torch removes ``_local_tensor``, this returns the DTensor itself.
    """
    return getattr(tensor, "_local_tensor", tensor)


def with_local_part(like: Any, part: Tensor) -> Any:
    """Return a DTensor with the layout of ``like`` and the shard ``part``. It does not require gradients."""
    return type(like)(part, like._spec, requires_grad=False)


def local_shape_and_offset(like: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """Compute, from a DTensor's layout, the shape of this process's shard and the shard's offset in the full tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)


def forget_layouts() -> None:
    """Clear torch's caches of DTensors' layouts, because the caches keep meshes and their process groups alive.

    If torch removes the Python caches, this raises AttributeError. If it removes only the cache in C++, only the
    Python caches are cleared.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute

    owners = tensors.DTensor._op_dispatcher.sharding_propagator, _redistribute, _collective_utils.MeshTopoInfo
    parts = [getattr(owner, name) for owner in owners for name in dir(owner)]
    caches = [*(getattr(part, "cache_clear", None) for part in parts), _redistribute.clear_redistribute_planner_cache]
    for clear in (*caches, getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)):
        if callable(clear):
            clear()


#: The logger for torch's message that it redistributes a tensor in several steps. If torch renames this logger, the
#: message is no longer filtered out.
REDISTRIBUTES = "torch.distributed.tensor._redistribute"

#: Returns FSDP's state for a module that it shards.
fsdp_state: Callable[[Any], Any] = methodcaller("_get_fsdp_state")


def finish_backward(state: Any) -> None:
    """Finish a backward pass by reducing the gradients that are still waiting.

    ``state``: the :func:`fsdp_state` of the root module.
    """
    context = state._state_ctx
    if hasattr(context, "manual_backward_finalization_active"):  # torch 2.15 and newer
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def after_backward(root: nn.Module, then: Callable[[], None] | None) -> None:
    """Call ``then`` at the end of each backward pass through those modules in ``root`` that FSDP shards.

    By that time, FSDP has reduced its own gradients. If ``then`` is None, the previous function is removed.
    """
    from torch.distributed.fsdp import FSDPModule

    def both(finish: Callable[[], None], then: Callable[[], None]) -> None:
        finish()
        then()

    for state in (fsdp_state(part) for part in root.modules() if isinstance(part, FSDPModule)):
        vars(state).pop("_root_post_backward_final_callback", None)
        if then is not None:
            finish = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = partial(both, finish, then)


#: Returns the method of an :data:`fsdp_state` that registers a tensor as the start of a backward pass. It is needed for
#: tensors that torch does not find in the module's output.
expect_backward: Callable[[Any], Callable[[Tensor], Any]] = attrgetter("_register_pre_backward_hook")


def at_end_of_backward(then: Callable[[], None]) -> None:
    """Call ``then`` at the end of the current backward pass. This works only in a hook of that pass."""
    torch.autograd.Variable._execution_engine.queue_callback(then)  # type: ignore[attr-defined]


def fsdp_parameters(root: nn.Module) -> list[Any]:
    """Return FSDP's state for each sharded parameter. In some torch versions, a module has several parameter groups."""
    from torch.distributed.fsdp import FSDPModule

    states = [fsdp_state(part) for part in root.modules() if isinstance(part, FSDPModule)]
    groups = [
        group
        for state in states
        for group in (state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group])
    ]
    return [one for group in groups if group is not None for one in group.fsdp_params]


def keep_requires_grad(sharded: Iterable[Any]) -> None:
    """Apply ``requires_grad_`` calls on gathered parameters to their shards. Otherwise, the next gathering undoes them.

    ``sharded``: entries of :func:`fsdp_parameters`.
    """
    for one in sharded:
        shard: Tensor = one.sharded_param
        gathered: Tensor = getattr(one, "_unsharded_param", shard)  # missing before the parameter is first gathered
        if gathered.requires_grad is not shard.requires_grad and one.sharded_state.name == "UNSHARDED":
            shard.requires_grad_(gathered.requires_grad)


def gathered_parameter(one: Any) -> tuple[Tensor | None, bool]:
    """Return the parameter that an entry of :func:`fsdp_parameters` gathers, and whether it is gathered at the moment.

    The parameter is None before it is first gathered, and always if torch removes the attribute.
    """
    return getattr(one, "_unsharded_param", None), one.sharded_state.name == "UNSHARDED"


#: How an entry of :func:`fsdp_parameters` is sharded, a ``Shard``.
placement_of: Callable[[Any], Any] = attrgetter("fsdp_placement")


def storage_id(tensor: Tensor) -> int:
    """Return a number that changes when ``tensor.data`` is set, even for a DTensor, which has no memory of its own."""
    return tensor.untyped_storage()._cdata


def waiting_gradient(one: Any) -> Tensor | None:
    """Return the unsharded gradient that waits to be reduced, for an entry of :func:`fsdp_parameters`.

    If torch removes the attributes that hold the gradient, this returns None, and gradients that are still waiting to
    be reduced are not saved.
    """
    accumulated = getattr(one, "unsharded_accumulated_grad", None)
    if accumulated is not None:
        return accumulated
    return getattr(getattr(one, "_unsharded_param", None), "grad", None)


def set_waiting_gradient(one: Any, gradient: Tensor) -> None:
    """Make a gradient wait to be reduced. The parameter must already be gathered."""
    parameter = one._unsharded_param
    kept = parameter.grad_dtype or gradient.dtype
    if gradient.dtype != kept and hasattr(one, "to_accumulated_grad_if_needed"):  # before torch 2.15
        one.unsharded_accumulated_grad = gradient
    else:
        parameter.grad = gradient.to(kept)


#: The attribute that marks a module in which FSDP has sharded parameters. If torch removes this attribute, a run in
#: other processes returns layers that still carry FSDP's attributes.
FSDP_MARK = "_is_fsdp_managed_module"

#: All attributes that ``fully_shard`` adds to a module. If torch removes them, see :data:`FSDP_MARK`.
FSDP_ATTRIBUTES = ("__composable_api_state_key", FSDP_MARK, "_fsdp_use_orig_params")


def classes_of_policy(policy: Any) -> tuple[type[nn.Module], ...] | None:
    """Return the classes that a ``ModuleWrapPolicy`` wraps; None for any other policy.

    If torch removes ``_module_classes``, this returns None, and the policy is called like a function.
    """
    found = getattr(policy, "_module_classes", None)
    return None if found is None else tuple(found)


def function_of_policy(policy: Any) -> Callable[[nn.Module], Any] | None:
    """Return the function of a ``CustomPolicy``; None for any other policy.

    If torch removes ``_lambda_fn``, this returns None, and the policy is called like a function.
    """
    return getattr(policy, "_lambda_fn", None)


# ---- compiling -------------------------------------------------------------------------------------------------------


def compiler_is_loaded() -> bool:
    """Return True if this process may have compiled anything. Imports nothing.

    If torch removes ``torch._dynamo``, this returns False.
    """
    return "torch._dynamo" in sys.modules


def compiler_of(model: Any) -> Callable[[Any], Any] | None:
    """Return the function that compiles with the options of a module from ``torch.compile``; None for other objects.

    If torch removes ``OptimizedModule`` or its ``dynamo_ctx``, this raises AttributeError. If torch moves the class to
    another module, this returns None for every object.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return model.dynamo_ctx if dynamo is not None and isinstance(model, dynamo.OptimizedModule) else None


#: The module that was passed to ``torch.compile(module)``.
inside_compiled: Callable[[Any], nn.Module] = attrgetter("_orig_mod")


def on_compiling(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Call ``begin`` before each compilation and ``end`` after it. Calling this again has no effect."""
    from torch._dynamo.callback import callback_handler

    if begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)


def off_compiling(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Undo :func:`on_compiling`, if it is in effect."""
    from torch._dynamo.callback import callback_handler

    if begin in callback_handler.start_callbacks:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


def recompilations() -> logging.Logger:
    """Make torch log why it recompiles a function, and return the logger that it uses.

    ``torch._logging.set_logs`` would work as well, but would overwrite the user's settings for torch's logs.
    """
    from torch._dynamo import guards  # noqa: F401 (importing it sets its logger's level)
    from torch._logging._internal import log_state

    log_state.enable_artifact("recompiles")
    return logging.getLogger("torch._dynamo.guards.__recompiles")


def tracing_whole_steps() -> AbstractContextManager[Any]:
    """Context manager in which torch compiles backward inside a function and treats modules' integers as inputs."""
    import torch._dynamo.config as dynamo

    return dynamo.patch(trace_autograd_ops=True, allow_unspec_int_on_nn_module=True)  # type: ignore[attr-defined]


def compiler_errors() -> tuple[type[Exception], type[Exception]]:
    """Return two exception types: for functions that torch cannot compile, and for functions recompiled too often."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def keep_address(tensor: Tensor) -> None:
    """Tell torch's compiler that a tensor keeps its memory address, so that CUDA graphs do not have to copy it."""
    torch._dynamo.mark_static_address(tensor)


def let_trace_groups(methods: dict[str, Any]) -> None:
    """Make torch.compile trace the code that reads an optimizer's gradients like any other code.

    By default, torch handles this code in a special way, which requires gradients to exist before the graph runs. If
    torch removes ``_torchdynamo_orig_callable``, this function does nothing.

    Args:
        methods: the methods of the optimizer's class by name; changed in place.
    """
    if "_init_group" in methods:
        collect = methods["_init_group"]
        methods["_init_group"] = getattr(collect, "_torchdynamo_orig_callable", collect)


# ---- optimizers, schedulers, loss scaling ----------------------------------------------------------------------------

#: The optimizer attribute that tells schedulers that the optimizer has stepped. If torch removes this attribute, a
#: scheduler warns that it was stepped before the optimizer.
HAS_STEPPED = "_opt_called"


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the hooks that run before and after an optimizer's steps."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def takes_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if ``Optimizer.__init__`` has run, which is required to register hooks.

    If torch removes ``_optimizer_step_pre_hooks``, this always returns False, and a step that the user takes by
    mistake is not detected.
    """
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def is_of_scheduler(step: Any) -> bool:
    """Return True if an optimizer's ``step`` is a scheduler's wrapper that counts the calls.

    If torch removes ``_wrapped_by_lr_sched``, this returns False, and the step of any optimizer with a scheduler looks
    as if the user had replaced it.
    """
    return getattr(step, "_wrapped_by_lr_sched", False)


#: The attribute with the schedulers inside a ``SequentialLR`` or a ``ChainedScheduler``. If torch removes this
#: attribute, the inner schedulers are not found.
INNER_SCHEDULERS = "_schedulers"

#: The attribute with the learning rates that a scheduler set most recently. If torch removes this attribute, the
#: scheduler has no rate for parameters that are added to an optimizer later.
LAST_RATES = "_last_lr"

#: A ``GradScaler``'s loss scale, shape (); None before the first loss.
scale_of: Callable[[Any], Tensor] = attrgetter("_scale")

#: A ``GradScaler``'s state for each optimizer since the last update, by the optimizer's id.
scaler_states: Callable[[Any], dict[int, dict[str, Any]]] = attrgetter("_per_optimizer_states")


def unscale_with(scaler: Any, unscale: Callable[..., dict[torch.device, Tensor]]) -> None:
    """Make a ``GradScaler`` unscale an optimizer's gradients with the function ``unscale``.

    If torch removes ``_unscale_grads_``, the function is not called, and torch unscales each shard separately.
    """
    scaler._unscale_grads_ = unscale


# ---- files -----------------------------------------------------------------------------------------------------------

#: Modules and names that a distributed checkpoint's index uses from outside its own module. If torch renames one of
#: them, indexes contain the new name, and loading them is refused.
NAMES_IN_INDEX = {
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}

#: Prefixes of the full names of functions and classes that rebuild tensors from a pickled file. If torch moves them,
#: ``paceline checkpoint convert`` and the error about a file with objects list them among the file's code.
REBUILD_TENSORS = ("torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout")

#: Returns the file writer of a TensorBoard ``SummaryWriter``; creates a new one if the previous one was closed.
event_writer: Callable[[Any], Any] = methodcaller("_get_file_writer")
