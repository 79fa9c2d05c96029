"""Accelerator plugins for accumulation, project folders, compilation, FSDP and DeepSpeed.

A field that is None takes its value from a launcher flag, the environment or the configuration file.
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
from ..strategies.fsdp.settings import MIN_NUM_PARAMS, FSDPSettings, offload_policy
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
    """Settings for gradient accumulation.

    Args:
        num_steps: micro-batches per update; if None, taken from the settings, or else 1.
        adjust_scheduler: has no effect, because a prepared scheduler always advances once per update. Count the
            scheduler's length in updates.
        sync_with_dataloader: whether the last batch of a loader completes a window.
        sync_each_batch: whether to synchronize gradients after every micro-batch, which saves memory under FSDP but
            needs more communication.
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
        messages.ignored(
            type(self).__name__,
            "a prepared scheduler always advances once per update",
            unless=True,
            adjust_scheduler=self.adjust_scheduler,
        )


@dataclass
class ProjectConfiguration:
    """Settings for where logs and checkpoints are written.

    Args:
        project_dir: the project folder.
        logging_dir: the folder for trackers; None means ``project_dir``.
        automatic_checkpoint_naming: if True, ``save_state()`` without a folder writes ``checkpoints/checkpoint_0``,
            ``_1``, ...
        total_limit: maximum number of checkpoints to keep; None keeps all.
        iteration: number of the next checkpoint.
        save_on_each_node: whether to write on every node, for nodes that do not share a disk.
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
        """Set the project folder, and use it as the logging folder if no logging folder is set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def writes(self, strategy: Strategy) -> bool:
        """Return True if this process writes files: rank 0, or local rank 0 of each node with ``save_on_each_node``."""
        return strategy.is_global_zero or (self.save_on_each_node and strategy.local_rank == 0)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile`` for prepared models.

    Args:
        backend: a :class:`DynamoBackend` or its name; ``"no"`` turns compilation off.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        fullgraph: whether to raise an error if a model cannot be compiled as a single graph.
        dynamic: whether to compile for dynamic shapes; None lets torch decide.
        options: backend options; cannot be combined with ``mode``.
        disable: whether to turn off compilation, for debugging.
        use_regional_compilation: whether to compile repeated blocks separately, which shortens compilation.
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
            raise ValueError(messages.unknown("TorchDynamoPlugin mode", self.mode, MODES))
        if self.options is not None and self.mode not in (None, "default"):
            raise ValueError(
                f"TorchDynamoPlugin got mode={self.mode!r} and options={self.options!r}, but torch.compile accepts "
                "only one of the two, because a mode is a set of options. Leave one out."
            )

    @property
    def compiles(self) -> bool:
        """Whether models are compiled."""
        return self.backend not in (None, DynamoBackend.NO)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of all fields, with the backend in lowercase, as torch expects it."""
        found = super().to_dict()
        return found if self.backend is None else {**found, "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the ``torch.compile`` arguments that are set."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        if found.get("mode") == "default":
            del found["mode"]
        return found

    def compiler(self) -> Callable[..., Any] | None:
        """Return ``torch.compile`` with the plugin's arguments, or None if compilation is off."""
        if not self.compiles:
            return None
        arguments = self.to_kwargs()
        present = torch.compiler.list_backends(exclude_tags=())
        if arguments["backend"] not in present:
            known = [word for word in DynamoBackend.list() if word.lower() in present]
            raise ValueError(
                f"TorchDynamoPlugin: backend={str(self.backend)!r} is not available in torch {torch.__version__} on "
                f"this machine. The available backends are {messages.names(known, 'and')}. Install the package that "
                "provides the backend, or choose another one."
            )
        watch_compiling()
        return partial(torch.compile, **arguments)

    def compile(self, module: nn.Module) -> Callable[[Any], Any] | None:
        """Return a function that compiles the module's forward.

        Returns None if compilation is off, or if the module's blocks have been compiled in place.
        """
        compiler = self.compiler()
        if compiler is None or not self.use_regional_compilation:
            return compiler
        if compile_repeated(module, self.to_kwargs()):
            return None
        messages.info_once(
            f"use_regional_compilation found no list of blocks of the same class in {type(module).__name__}, so the "
            "entire module is compiled as one unit."
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
    """Return the plugin that was passed, with its unset fields filled in from the settings."""
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise TypeError(
            f"Accelerator: dynamo_plugin={plugin!r} is {messages.a(plugin)}. Pass a TorchDynamoPlugin, or use "
            "dynamo_backend='inductor'."
        )
    found = fill(plugin or TorchDynamoPlugin(), settings, _DYNAMO)
    if plugin is not None and not found.compiles:
        given = {name: value for name, value in plugin.to_dict().items() if name not in ("backend", "disable")}
        messages.ignored("TorchDynamoPlugin", "no backend is set, so nothing is compiled", **given)
    return found if found.backend is not None else replace(found, backend=DynamoBackend.NO)


# ---- strategies ------------------------------------------------------------------------------------------------------


class FullyShardedDataParallelPlugin(FSDPSettings):
    """Shards weights, gradients and optimizer state across processes with torch's ``fully_shard`` (FSDP2).

    FSDP1 fields are translated, and a single message lists the fields that have no meaning in FSDP2. Fields that are
    None are filled in from the settings (``fsdp_...``).

    Args:
        fsdp_version: 1 is accepted and treated as 2.
        sharding_strategy: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"`` (keep full weights between forward and backward),
            ``"HYBRID_SHARD"`` (shard within a node) or ``"HYBRID_SHARD_ZERO2"``.
        reshard_after_forward: if False, keep full weights between forward and backward; also accepts the values of
            ``sharding_strategy``.
        mixed_precision_policy: a ``MixedPrecisionPolicy`` to use instead of autocast. FSDP1's ``MixedPrecision``, a
            dict of its arguments, and ``"bf16"`` or ``"fp16"`` (the same dtype for everything) also work.
        auto_wrap_policy: ``"transformer_based_wrap"``, ``"size_based_wrap"``, ``"no_wrap"`` or a policy from
            torch.distributed.fsdp.wrap; None wraps each repeated block.
        transformer_cls_names_to_wrap: class names of the blocks, as a list or a comma-separated string.
        min_num_params: minimum number of parameters in a block, for ``"size_based_wrap"``.
        cpu_offload: whether to keep shards and optimizer state in CPU memory.
        state_dict_type: ``"FULL_STATE_DICT"`` (a checkpoint is one file) or ``"SHARDED_STATE_DICT"`` (each process
            writes its own shards).
        activation_checkpointing: whether to recompute each block's forward pass during backward.
        ignored_modules: modules whose parameters are not sharded: a list, or a regular expression that matches their
            full names. Gradients of their trainable parameters are averaged across processes, like all other gradients.
        param_init_fn, activation_checkpointing_offload: not supported.
        backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params: have no effect.
        sync_module_states, cpu_ram_efficient_loading, state_dict_config, optim_state_dict_config: have no effect.
    """

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set ``mixed_precision_policy``; a policy that is already set is replaced only if ``override`` is True.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"`` or a dtype.
            buffer_autocast: has no effect, because FSDP2 does not convert buffers.
            override: whether to replace an existing policy.

        Raises:
            ValueError: the dtype is unknown.
        """
        messages.ignored(
            "set_mixed_precision", "FSDP2 does not convert buffers", False, buffer_autocast=buffer_autocast
        )
        if override or self.mixed_precision_policy is None:
            replace(self, mixed_precision_policy=mixed_precision).options()
            self.mixed_precision_policy = mixed_precision

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace a policy that is set by name (other than ``"no_wrap"``) with torch's policy for this model.

        Args:
            model: its ``_no_split_modules``, if any, are the class names of the blocks if
                ``transformer_cls_names_to_wrap`` is not set.

        Raises:
            ValueError: no module of the model has the class of a block.
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        word = None if isinstance(self.auto_wrap_policy, partial) else self.wrapping()
        if word == "SIZE_BASED_WRAP":
            least = int(self.min_num_params or MIN_NUM_PARAMS)
            self.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=least)
        elif word == "TRANSFORMER_BASED_WRAP":
            wanted = self.class_names() or list(getattr(model, "_no_split_modules", None) or ())
            classes = {type(module).__name__: type(module) for module in model.modules()}
            for name in wanted:
                if name not in classes:
                    raise ValueError(
                        f"{type(self).__name__}: {messages.unknown('class of modules', name, classes)}. These are the "
                        f"classes in {type(model).__name__}; set transformer_cls_names_to_wrap."
                    )
            blocks = {classes[name] for name in wanted}
            self.auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)

    def set_cpu_offload(self) -> None:
        """Replace ``cpu_offload`` with the policy for it that ``fully_shard`` takes."""
        self.cpu_offload = offload_policy(self.arguments().get("cpu_offload", False))

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set ``state_dict_type`` for Accelerators that are created later; existing ones keep their checkpoint format.

        Raises:
            ValueError: the type is unknown.
        """
        if state_dict_type is not None:
            replace(self, state_dict_type=state_dict_type).options()
            self.state_dict_type = state_dict_type


class DeepSpeedPlugin(DeepSpeedSettings):
    """Settings for DeepSpeed ZeRO.

    Args:
        hf_ds_config: a DeepSpeed configuration as a dict or the path of a JSON file; overrides the other fields.
        gradient_accumulation_steps: micro-batches per update.
        gradient_clipping: maximum gradient norm.
        zero_stage: 1 shards the optimizer state, 2 also shards gradients, and 3 also shards weights; None means 2.
        offload_optimizer_device: ``"none"`` or ``"cpu"``.
        offload_param_device: ``"none"`` or ``"cpu"``; for stage 3.
        is_train_batch_min, zero3_init_flag, zero3_save_16bit_model: have no effect. A model is sharded when it is
            prepared, and saving always gathers the full weights.
        offload_optimizer_nvme_path, offload_param_nvme_path, transformer_moe_cls_names, enable_msamp, msamp_opt_level:
            not supported.
    """


def choose_accumulation(
    plugin: GradientAccumulationPlugin | None,
    settings: Mapping[str, Any] | None,
    deepspeed: DeepSpeedPlugin | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``GradientState``, read from the plugin, the settings and DeepSpeed's configuration."""
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
    if deepspeed is not None:
        steps = deepspeed.micro_batches(steps)
    return {**found, "num_steps": steps or 1}
