"""Plugins of an Accelerator: accumulation, folders, compiling, FSDP and DeepSpeed.

A field that is None is set by the launcher's flag, the environment or the configuration file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import nn

from .. import messages
from ..settings import fill, if_set
from ..strategies.compile_networks import compile_repeated
from ..strategies.deepspeed.settings import DeepSpeedSettings
from ..strategies.fsdp.settings import FSDPSettings
from ..strategies.recompile_watch import watch_compiling
from .enums import BackendName, DynamoBackend
from .kwargs_handlers import KwargsHandler

if TYPE_CHECKING:
    from ..strategies.base import Strategy

T = TypeVar("T")

ModeName = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES: tuple[ModeName, ...] = get_args(ModeName)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches per update; None for the settings, else 1.
        adjust_scheduler: accepted; a prepared scheduler always advances once per update, so its length counts updates.
        sync_with_dataloader: whether the last batch of a loader completes a window.
        sync_each_batch: communicate gradients after every micro-batch: less memory under FSDP, more communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and (
            isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1
        ):
            raise ValueError(
                f"GradientAccumulationPlugin: num_steps={self.num_steps!r} is not a valid number of micro-batches. "
                "Pass 1 or more."
            )


@dataclass
class ProjectConfiguration:
    """Where logs and checkpoints are written.

    Args:
        project_dir: folder of the project.
        logging_dir: folder of the trackers; None for ``project_dir``.
        automatic_checkpoint_naming: ``save_state()`` without a folder writes ``checkpoints/checkpoint_0``, ``_1``, ...
        total_limit: number of these to keep; None for all.
        iteration: number of the next one.
        save_on_each_node: write on every machine, for machines that do not share disks.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and the logging folder if it is not set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def writes(self, strategy: Strategy) -> bool:
        """Whether this process writes files: rank 0, with ``save_on_each_node`` the first rank of every machine."""
        return strategy.is_global_zero or (self.save_on_each_node and strategy.local_rank == 0)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile`` for prepared models.

    Args:
        backend: a :class:`DynamoBackend` or its name; ``"no"`` to not compile.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        fullgraph: raise an error instead of compiling several graphs.
        dynamic: compile for shapes that change; None lets torch decide.
        options: options of the backend; cannot be combined with ``mode``.
        disable: compile nothing, for debugging.
        use_regional_compilation: compile repeated blocks separately, to spend less time compiling.
    """

    backend: DynamoBackend | BackendName | None = None
    mode: ModeName | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = DynamoBackend(self.backend)
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(messages.unknown("mode in TorchDynamoPlugin", self.mode, MODES))
        if self.options is not None and self.mode not in (None, "default"):
            raise ValueError(
                f"TorchDynamoPlugin(mode={self.mode!r}, options={self.options!r}): torch.compile takes only one of the "
                "two. A mode is a set of options: leave one out."
            )

    @property
    def compiles(self) -> bool:
        """Whether models are compiled."""
        return self.backend not in (None, DynamoBackend.NO)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; the backend in lower case, as torch expects it."""
        found = super().to_dict()
        return found if self.backend is None else {**found, "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of ``torch.compile`` that are set."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        if found.get("mode") == "default":
            del found["mode"]
        return found

    def compiler(self) -> Callable[..., Any] | None:
        """``torch.compile`` with these arguments; None to not compile."""
        if not self.compiles:
            return None
        arguments = self.to_kwargs()
        present = torch.compiler.list_backends(exclude_tags=())
        if arguments["backend"] not in present:
            known = [word for word in DynamoBackend.list() if word.lower() in present]
            raise ValueError(
                f"TorchDynamoPlugin(backend={str(self.backend)!r}): torch {torch.__version__} has no such backend "
                f"here. It has {messages.names(known, 'and')}; others come with separate packages that must be "
                "installed."
            )
        watch_compiling()
        return partial(torch.compile, **arguments)

    def compile(self, module: nn.Module) -> Callable[[Any], Any] | None:
        """Function that compiles the module's forward; None to not compile, or if its blocks were compiled in place."""
        compiler = self.compiler()
        if compiler is None or not self.use_regional_compilation:
            return compiler
        if compile_repeated(module, self.to_kwargs()):
            return None
        messages.info_once(
            f"use_regional_compilation found no list of blocks of the same class in {type(module).__name__}, so the "
            "whole module is compiled at once."
        )
        return compiler


_DYNAMO = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "fullgraph": "dynamo_use_fullgraph",
    "dynamic": "dynamo_use_dynamic",
    "use_regional_compilation": "dynamo_use_regional_compilation",
}


def choose_dynamo(plugin: TorchDynamoPlugin | None, settings: Mapping[str, Any] | None) -> TorchDynamoPlugin:
    """The given plugin, with unset fields from the settings."""
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise TypeError(
            f"Accelerator: dynamo_plugin={plugin!r} is {messages.a(plugin)}. Pass a TorchDynamoPlugin, or use "
            "dynamo_backend='inductor'."
        )
    found = fill(plugin or TorchDynamoPlugin(), settings, _DYNAMO)
    return found if found.backend is not None else replace(found, backend=DynamoBackend.NO)


# ---- strategies ------------------------------------------------------------------------------------------------------


class FullyShardedDataParallelPlugin(FSDPSettings):
    """Shard weights, gradients and optimizer state over processes with torch's ``fully_shard`` (FSDP2).

    Fields of FSDP 1 are translated, and one note lists the fields that mean nothing in FSDP2. Fields that are None come
    from the settings (``fsdp_...``).

    Args:
        fsdp_version: 1 is accepted and treated as 2.
        sharding_strategy: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"`` (keep weights between forward and backward),
            ``"HYBRID_SHARD"`` (shard within a machine) or ``"HYBRID_SHARD_ZERO2"``.
        reshard_after_forward: False keeps weights between forward and backward; or a ``sharding_strategy``.
        mixed_precision_policy: a ``MixedPrecisionPolicy`` instead of autocast. FSDP 1's ``MixedPrecision``, a dict of
            its arguments, and ``"bf16"`` or ``"fp16"`` for everything also work.
        auto_wrap_policy: ``"transformer_based_wrap"``, ``"size_based_wrap"``, ``"no_wrap"`` or a policy of
            torch.distributed.fsdp.wrap; None wraps the repeated block.
        transformer_cls_names_to_wrap: class names of the blocks, as a list or separated by commas.
        min_num_params: smallest number of parameters in a block, for ``"size_based_wrap"``.
        cpu_offload: keep shards and optimizer state in CPU memory.
        state_dict_type: ``"FULL_STATE_DICT"`` (checkpoints are one file) or ``"SHARDED_STATE_DICT"`` (each process
            writes its shards).
        activation_checkpointing: recompute the forward pass of each block during backward.
        ignored_modules, param_init_fn, activation_checkpointing_offload: not supported.
        backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, sync_module_states,
            cpu_ram_efficient_loading, state_dict_config, optim_state_dict_config: accepted and ignored.
    """


class DeepSpeedPlugin(DeepSpeedSettings):
    """DeepSpeed's ZeRO.

    Args:
        hf_ds_config: a DeepSpeed configuration as a dict or the path of a JSON file; overrides the other fields.
        gradient_accumulation_steps: micro-batches per update.
        gradient_clipping: largest gradient norm.
        zero_stage: what is sharded: 1 for the optimizer state, 2 for gradients too, 3 for weights too; None means 2.
        offload_optimizer_device: ``"none"`` or ``"cpu"``.
        offload_param_device: ``"none"`` or ``"cpu"``, with stage 3.
        is_train_batch_min, zero3_init_flag, zero3_save_16bit_model: accepted and ignored. A model is sharded when it is
            prepared, and saving always gathers the full weights.
        offload_optimizer_nvme_path, offload_param_nvme_path, transformer_moe_cls_names, enable_msamp, msamp_opt_level:
            not supported.
    """


def choose_accumulation(
    plugin: GradientAccumulationPlugin | None,
    settings: Mapping[str, Any] | None,
    deepspeed: DeepSpeedPlugin | None = None,
) -> dict[str, Any]:
    """The arguments of ``GradientState``: from the plugin, else the settings, else DeepSpeed's configuration."""
    if plugin is not None and not isinstance(plugin, GradientAccumulationPlugin):
        raise TypeError(
            f"Accelerator: gradient_accumulation_plugin={plugin!r} is {messages.a(plugin)}. Pass a "
            "GradientAccumulationPlugin, or use gradient_accumulation_steps=4."
        )
    found = (plugin or GradientAccumulationPlugin()).to_dict()
    origin = getattr(settings, "origin", None)
    in_code = origin is None or origin("gradient_accumulation_steps").place == "code"
    asked = if_set(settings, "gradient_accumulation_steps")
    if None not in (found["num_steps"], asked) and in_code and asked not in (1, found["num_steps"]):
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={asked}) contradicts GradientAccumulationPlugin(num_steps="
            f"{found['num_steps']}). Leave one out."
        )
    steps = found["num_steps"] if found["num_steps"] is not None else asked
    theirs = deepspeed.decided("gradient_accumulation_steps") if deepspeed is not None else None
    if None not in (steps, theirs) and steps != theirs:
        raise ValueError(
            f"DeepSpeed has gradient_accumulation_steps={theirs}, but the Accelerator has {steps}. Leave one out."
        )
    return {**found, "num_steps": steps or theirs or 1}
