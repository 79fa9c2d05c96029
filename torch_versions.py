"""The versions of torch that Paceline was tested with, and the private names of torch that it uses.

This file uses none of those names, so it can be imported when a newer torch lacks some of them.
"""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import torch

#: The newest version of torch, major and minor, with which the tests were run.
NEWEST_TRIED = (2, 15)

#: All private names that ``torch_private.py`` uses, by the module or the object of torch that has them (``""`` is
#: torch itself). Each name is a pattern.
USED = {
    "utils.data.dataloader": "_iterator _get_iterator _index_sampler _pin_memory _dataset_fetcher _workers "
    "_persistent_workers _shutdown_workers",
    "nn.modules.module": "_parameters _buffers _modules _non_persistent_buffers_set _apply _call_impl "
    "_compiled_call_impl _metadata _load_from_state_dict _IncompatibleKeys",
    "nn.modules.batchnorm": "_BatchNorm _check_non_zero_input_channels",
    "nn.modules.conv": "_ConvNd",
    "nn.modules.dropout": "_DropoutNd",
    "Tensor": "_backward_hooks _post_accumulate_grad_hooks _version grad_dtype untyped_storage",
    "autograd.variable": "_execution_engine",
    "UntypedStorage": "_cdata",
    "": "_foreach_mul_ _foreach_norm",
    "ops.aten": "_amp_foreach_non_finite_check_and_unscale_ _local_scalar_dense _unique2 _grouped_mm",
    "_C": "_clear_DTensor_sharding_propagator_cache",
    "overrides": "_get_current_function_mode",
    "utils._pytree": "tree_flatten",
    "utils._python_dispatch": "TorchDispatchMode",
    "_subclasses.fake_tensor": "FakeTensorMode FakeTensor DataDependentOutputException",
    "testing._internal.distributed.fake_pg": "FakeStore",
    "distributed.distributed_c10d": "_get_default_store _get_backend _timeout",
    "distributed.device_mesh": "_flatten",
    "nn.parallel.distributed": (
        "_ddp_params_and_buffers_to_ignore _get_ddp_logging_data _set_ddp_runtime_logging_sample_rate "
        "_has_rebuilt_buckets reducer _rebuild_buckets _get_zeros_like_grad_buckets"
    ),
    "distributed.tensor._api": "_local_tensor _spec _op_dispatcher",
    "distributed.tensor._dispatch": "sharding_propagator",
    "distributed.tensor._collective_utils": "MeshTopoInfo",
    "distributed.tensor._utils": "compute_local_shape_and_global_offset",
    "distributed.tensor._redistribute": "logger clear_redistribute_planner_cache",
    "distributed._composable.contract": "__composable_api_state_key",
    "distributed.fsdp._fully_shard._fully_shard": "_get_fsdp_state _is_fsdp_managed_module _fsdp_use_orig_params",
    "distributed.fsdp._fully_shard._fsdp_state": "_state_ctx _root_post_backward_final_callback "
    "_register_pre_backward_hook _fsdp_param_groups|_fsdp_param_group",
    "distributed.fsdp._fully_shard._fsdp_param_group": "fsdp_params",
    "distributed.fsdp._fully_shard._fsdp_param": "_unsharded_param sharded_param sharded_state fsdp_placement",
    "distributed.fsdp.wrap": "_module_classes _lambda_fn",
    "_dynamo.eval_frame": "OptimizedModule dynamo_ctx _orig_mod _torchdynamo_orig_callable",
    "_dynamo.callback": "callback_handler start_callbacks register_start_callback register_end_callback "
    "remove_start_callback remove_end_callback",
    "_dynamo.config": "trace_autograd_ops allow_unspec_int_on_nn_module",
    "_dynamo.decorators": "mark_static_address",
    "_dynamo.exc": "FailOnRecompileLimitHit TorchDynamoException",
    "_logging._internal": "log_state enable_artifact",
    "optim.optimizer": "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
    "optim.adam": "_init_group _step_supports_amp_scaling",
    "optim.lr_scheduler": "_opt_called _wrapped_by_lr_sched _schedulers _last_lr",
    "amp.grad_scaler": "_scale _per_optimizer_states _unscale_grads_",
    "serialization": "_get_layout",
    "_utils": r"_rebuild_\w+",
    "_tensor": "_rebuild_from_type_v2",
    "distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "utils.tensorboard.writer": "_get_file_writer",
}


def missing_names() -> list[str]:
    """Return the names of :data:`USED` that the installed torch does not have. Reads files and imports nothing."""
    missing = ((owner, name) for owner, names in USED.items() for name in names.split() if lacks(owner, name))
    return [".".join(filter(None, ("torch", *found))) for found in missing]


def lacks(owner: str, name: str) -> bool:
    """Return True if torch lacks the private name ``name`` of ``owner``, which is a key of :data:`USED`.

    If ``owner`` is a module, this checks only whether the module's file mentions the name.
    """
    file = Path(torch.__path__[0], *owner.split(".")).with_suffix(".py")
    if file.is_file():
        return re.search(rf"\b({name})\b", file.read_text(encoding="utf-8")) is None
    try:
        return not hasattr(attrgetter(owner)(torch) if owner else torch, name)
    except AttributeError:
        return True


def untried() -> str | None:
    """Return a warning if torch is newer than :data:`NEWEST_TRIED`; it lists private names that torch no longer has."""
    major, minor, *_ = torch.__version__.split(".")
    if (int(major), int(minor)) <= NEWEST_TRIED:
        return None
    newest, missing = ".".join(map(str, NEWEST_TRIED)), missing_names()
    if missing:
        found = (
            f"This version does not have these private names, which Paceline uses: {', '.join(missing)}. Features that "
            f"need them may fail or do less. Install torch {newest}, or a newer Paceline."
        )
    else:
        found = (
            "This version has every private name that Paceline uses. If a run fails inside torch, install torch "
            f"{newest}."
        )
    return f"Paceline was tested up to torch {newest}, but torch {torch.__version__} is installed. {found}"
