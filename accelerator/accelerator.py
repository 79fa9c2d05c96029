"""``Accelerator``: with three changed lines, a plain PyTorch training loop runs on any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor, nn

from .. import messages
from ..doctor.doctor import Doctor
from ..doctor.own_loop import OwnLoop, PlannedLoop
from ..doctor.script_options import Plan
from ..memory.out_of_memory_retry import release_memory
from ..processes.cpu_memory import keep_freed_memory
from ..processes.timings import phase
from ..settings.constructors import check_names
from ..strategies.base import Strategy
from ..strategies.precision.base import Precision
from . import operations
from .accumulation import GradientState, Window
from .arguments import read_arguments
from .gradients import Gradients
from .kwargs_handlers import ProfileKwargs
from .loaders import refuse_slice_fn, skip_first_batches
from .model_weights import ModelWeights
from .models import refuse_processes, unwrap_model
from .observed_methods import time_methods
from .optimizers import AcceleratedOptimizer
from .parallelism_config import ParallelismConfig, check_buffers
from .prepare import Prepared
from .process_state import AcceleratorState, PartialState
from .properties import AcceleratorProperties
from .save_state import States
from .schedulers import AcceleratedScheduler
from .state_contents import Contents
from .state_folders import Folders
from .trackers import Tracker, Trackers
from .windows import Windows

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from torch.optim import Optimizer
    from torch.profiler import profile as Profiler
    from torch.utils.data import DataLoader

    from ..strategies.choose import StrategyName
    from .enums import BackendName, DynamoBackend, MixedName, PrecisionType, TrackerName
    from .kwargs_handlers import KwargsHandler
    from .loaders import DataLoaderConfiguration
    from .operations import Reduction
    from .plugins import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")

#: Methods that the doctor times, and the part of a step that each belongs to.
_TIMED = {
    "backward": "backward",
    "clip_grad_norm_": "optimizer",
    "clip_grad_value_": "optimizer",
    "gather": "communication",
    "gather_for_metrics": "communication",
    "reduce": "communication",
    "pad_across_processes": "communication",
    "wait_for_everyone": "communication",
    "log": "logging",
    "save_state": "checkpoint",
    "save_model": "checkpoint",
    "save": "checkpoint",
}


class Accelerator(AcceleratorProperties):
    """Runs your own training loop on any number of devices. Call ``prepare`` once, and ``backward`` for each batch.

    Example::

        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    An argument that is None takes its value from the launch command, the environment or the config file.

    Args:
        device_placement: whether models and batches are moved to the device automatically.
        split_batches: whether to split each batch across processes; see ``DataLoaderConfiguration``.
        mixed_precision: ``"no"`` (float32 throughout), ``"bf16"``, ``"fp16"`` or ``"fp8"`` (weights stay float32), or a
            Precision.
        gradient_accumulation_steps: number of micro-batches per accumulation window; see ``accumulate``.
        cpu: whether to use the CPU even if there are GPUs.
        dataloader_config: settings for preparing loaders.
        deepspeed_plugin: enables DeepSpeed and configures it.
        deepspeed_plugins: a dict with one DeepSpeed plugin; an alternative to ``deepspeed_plugin``.
        megatron_lm_plugin: not supported.
        fsdp_plugin: enables FSDP2 and configures it.
        rng_types: RNG states (``"torch"``, ``"cuda"``, ``"mps"``, ``"python"``, ``"numpy"``) that process 0 broadcasts
            to all processes when a pass over a loader begins. The sample order (``"generator"``) is always the same on
            all processes.
        log_with: a tracker's name, class or object, or a list of these; ``"all"`` means every installed tracker.
        project_dir: folder for logs and checkpoints.
        project_config: a ``ProjectConfiguration``.
        gradient_accumulation_plugin: a ``GradientAccumulationPlugin``.
        step_scheduler_with_optimizer: if True, schedulers advance only when their optimizers have stepped; if False,
            they advance on every call.
        kwargs_handlers: settings for DistributedDataParallel, autocast, the loss scaler, the process group and the
            profiler.
        dynamo_backend: ``torch.compile`` backend for the models.
        dynamo_plugin: the backend and other compilation settings.
        parallelism_config: number of processes for each kind of parallelism (tensor, sequence, sharding, replication).
        strategy: a Strategy, or a name that ``Trainer(strategy=...)`` accepts.
        scheduler_steps: how far each ``scheduler.step()`` advances a schedule. ``"per_update"``: one step;
            ``"per_sample"``: one step per data-parallel process, for a schedule whose length was computed for a single
            process. With ``split_batches=True`` (an epoch then has as many batches as on a single process) or
            ``step_scheduler_with_optimizer=False``, ``"per_sample"`` also advances only one step.
        output_dtype: ``"fp32"`` converts 16-bit model outputs to float32, so that a loss computed outside autocast
            keeps its accuracy; ``"keep"`` leaves outputs unchanged.
    """

    @check_names()
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: MixedName | PrecisionType | Precision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: TrackerName | str | Tracker | Sequence[TrackerName | str | Tracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: BackendName | DynamoBackend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: StrategyName | str | Strategy | None = None,
        scheduler_steps: Literal["per_update", "per_sample"] | None = None,
        output_dtype: Literal["fp32", "keep"] | None = None,
    ) -> None:
        arguments = read_arguments(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            split_batches=split_batches,
            dynamo_backend=dynamo_backend,
            log_with=log_with,
            project_dir=project_dir,
            strategy=strategy,
            scheduler_steps=scheduler_steps,
            output_dtype=output_dtype,
            dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            kwargs_handlers=kwargs_handlers,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
            rng_types=rng_types,
        )
        strategy = arguments.strategy
        self.settings = arguments.settings
        self.project_configuration = arguments.project_configuration
        self.trackers = Trackers(arguments.log_with, self.project_configuration.logging_dir)
        self.rng_types = rng_types
        self.handlers = arguments.choice.handlers
        self.strategy = strategy
        strategy.setup_environment()
        keep_freed_memory(strategy.device)
        self.state = AcceleratorState.of(PartialState.of(strategy), self.mixed_precision, **arguments.plugins)
        self.gradient_state = GradientState(**arguments.accumulation)
        self.prepared = Prepared(
            strategy,
            self.gradient_state,
            arguments.dataloader_config,
            shards=arguments.shards,
            compiler=arguments.dynamo.compile,
            clip_norm=arguments.clip_norm,
            device_placement=device_placement,
            output_dtype=arguments.settings["output_dtype"],
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_steps=arguments.settings["scheduler_steps"],
            rng_types=arguments.rng_types,
        )
        self.windows = Windows(strategy, self.gradient_state, self.prepared)
        self.gradients = Gradients(strategy, self.gradient_state, self.prepared)
        self.weights = ModelWeights(strategy, self.prepared, self.project_configuration)
        contents = Contents(
            strategy, self.prepared, self.windows, self.trackers, self.project_configuration, self.settings
        )
        self.states = States(contents, Folders(strategy, self.project_configuration))
        self.prepared.errors.explain_uncaught()
        plan = Plan.found()
        if plan is not None:
            PlannedLoop(self, plan).start()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling or copying; the copy continues training from the same point.

        Raises:
            TypeError: the run has several processes, or shards its models.
        """
        refuse_processes(self.strategy, "An Accelerator")
        own, methods = vars(self), type(self)
        return {
            "own": {n: own[n] for n in own if n != "state" and not callable(getattr(methods, n, None))},
            "plugins": self.state.plugins,
            "precision": self.state.mixed_precision,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["own"])
        keep_freed_memory(self.strategy.device)
        self.state = AcceleratorState.of(PartialState.of(self.strategy), state["precision"], **state["plugins"])

    # ---- prepare ---------------------------------------------------------------------------------------------------

    @overload
    def prepare(self, one: T1, /, *, device_placement: Sequence[bool] | None = None) -> T1: ...
    @overload
    def prepare(self, one: T1, two: T2, /, *, device_placement: Sequence[bool] | None = None) -> tuple[T1, T2]: ...
    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, /, *, device_placement: Sequence[bool] | None = None
    ) -> tuple[T1, T2, T3]: ...
    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, four: T4, /, *, device_placement: Sequence[bool] | None = None
    ) -> tuple[T1, T2, T3, T4]: ...
    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, four: T4, five: T5, /, *, device_placement: Sequence[bool] | None = None
    ) -> tuple[T1, T2, T3, T4, T5]: ...
    @overload
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any: ...

    @phase("prepare")
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders, in any order; anything else is returned unchanged.

        A model is returned as the same object, ready to train on this run's devices. Preparing objects in several calls
        has the same effect as in a single call. Under FSDP and DeepSpeed, prepare a model before its optimizer, or
        both in the same call.

        Args:
            *objects: the objects to prepare.
            device_placement: for each object, whether to move it to the device.

        Returns:
            A tuple of the prepared objects, in the order in which they were passed; a single object is returned by
            itself.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ValueError(
                "accelerator.prepare got different numbers of objects and device_placement values "
                f"({len(objects)} and {len(device_placement)}). Pass one bool per object, or leave out "
                "device_placement."
            )
        found = self.prepared.prepare(objects, device_placement or [None] * len(objects))
        return found[0] if len(found) == 1 else tuple(found)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context manager in which new layers are created on the run's device and in its dtype.

        Under a sharding strategy, ``load_checkpoint_in_model`` does not read weights inside this context. Instead, each
        process reads only its shard when the model is prepared.

        Args:
            empty_init: whether to leave weights uninitialized, because they will be loaded later. Under a sharding
                strategy, layers are then created without allocating memory.
        """
        return self.strategy.module_init_context(empty_init)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model, as :meth:`prepare` does.

        Args:
            model: the model.
            device_placement: whether to move the model to the device; None uses the Accelerator's setting.
            evaluation_mode: whether the model is used only for evaluation; if so, it is not wrapped for training.
        """
        return self.prepared.model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare one loader, as :meth:`prepare` does.

        Args:
            data_loader: the loader.
            device_placement: whether to move batches to the device; None uses the Accelerator's setting.
            slice_fn_for_dispatch: not supported for a loader that only process 0 reads; has no effect on other loaders.
        """
        found = self.prepared.loader(data_loader, device_placement)
        refuse_slice_fn("accelerator.prepare_data_loader", found, slice_fn_for_dispatch=slice_fn_for_dispatch)
        return found

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare one optimizer, whose state is always on the device of its parameters."""
        messages.ignored(
            "accelerator.prepare_optimizer",
            "an optimizer's state is always on the device of its parameters",
            unless=True,
            device_placement=device_placement,
        )
        return self.prepared.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler, as :meth:`prepare` does."""
        return self.prepared.scheduler(scheduler)

    # ---- one step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, num_items: Any = None, **kwargs: Any) -> None:
        """Run the backward pass of a loss; call this instead of ``loss.backward()``.

        Args:
            loss: scalar, shape ().
            num_items: number of items (tokens, boxes) that the loss averages over. If given, a window's gradient is
                the mean over all items on all ranks. If None, all micro-batches have the same weight.
            **kwargs: passed to ``loss.backward``.
        """
        gradients = self.gradients
        loss = self.gradient_state.window.weigh(loss, num_items)
        if not self.gradient_state.checked:
            gradients.choose()
        try:
            if gradients.run is None:
                loss.backward(**kwargs)
            elif kwargs:
                gradients.run(loss, lambda scaled: scaled.backward(**kwargs))
            else:
                gradients.run(loss)
        except RuntimeError as error:
            better = gradients.explain(error)
            if better is None:
                raise
            raise better from error
        for strategy in gradients.replicas:
            if strategy.left_gradients():
                self.gradient_state.window.local.add(id(strategy))

    def accumulate(self, *models: Any) -> Window:
        """Return the context manager for one micro-batch of an accumulation window.

        Inside the context, ``optimizer.step()``, ``scheduler.step()`` and ``optimizer.zero_grad()`` take effect only on
        the last micro-batch of a window. A window ends after ``gradient_accumulation_steps`` micro-batches or at the
        end of the loader. Models that are trained in turn, such as a GAN's, have separate windows.

        Args:
            *models: prepared models that accumulate gradients; by default, all prepared models.
        """
        return self.gradient_state.windows.get(tuple(map(id, models))) or self.windows.open(models)

    def no_sync(self, model: Any = None) -> AbstractContextManager[None]:
        """Context manager that turns off gradient synchronization for ``model``; None means all models."""
        return self.gradients.no_sync(model)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[None]:
        """Context manager that makes the next backward pass synchronize gradients, even after a ``no_sync`` forward."""
        return self.gradients.trigger_sync(model)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total gradient norm if the accumulation window is complete; call this after every backward pass.

        Args:
            parameters: parameters of prepared models.
            max_norm: maximum norm.
            norm_type: order of the norm; ``inf`` means the largest absolute value.

        Returns:
            The norm before clipping, shape (). While gradients accumulate, this is the previous window's norm, or
            nan if there is no previous window.
        """
        return self.gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip gradients elementwise to ``[-clip_value, clip_value]`` if the accumulation window is complete."""
        self.gradients.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 loss scale, once per accumulation window. Clipping does this automatically.

        Args:
            optimizer: one or more prepared optimizers; None means all.
        """
        self.gradients.unscale(optimizer)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Context manager inside which operations run in the chosen precision, as in a prepared model's forward pass.

        Args:
            autocast_handler: ``AutocastKwargs`` for this block, for example to turn off autocast.
        """
        if autocast_handler is not None:
            return autocast_handler.context(self.strategy)
        return self.strategy.precision.forward_context()

    # ---- communication -----------------------------------------------------------------------------------------

    def gather(self, tensor: T1) -> T1:
        """Concatenate tensors (also in nested lists, tuples and dicts) from all processes along the first dimension."""
        return operations.gather(tensor, self.strategy)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather a batch's results from all processes, without the results of repeated samples.

        Rows that repeat samples of other processes are removed from tensors that have one row per sample. Tensors of
        shape () are left out if they come from a process that has only repeated samples, which can happen if fewer
        samples than processes are left at the end of a pass over the loader. All other values are gathered in full. If
        ``maybe_context_parallel`` has split the batch, each process has the results of one part of each sequence, and
        the results of all parts are concatenated along the first dimension.

        Args:
            input_data: tensors, possibly in nested lists, tuples and dicts, or any objects.
            use_gather_object: whether to gather the data as Python objects.
        """
        loader = self.gradient_state.active_dataloader
        state = self.gradient_state
        in_parts = state.split_batch == state.batch or (loader is not None and loader.in_parts)
        return operations.gather_for_metrics(input_data, self.strategy, loader, use_gather_object, in_parts)

    def reduce(self, tensor: T1, reduction: Reduction = "sum", scale: float = 1.0) -> T1:
        """Reduce tensors across processes, then multiply them by ``scale``; ``"none"`` skips the reduction."""
        return operations.reduce(tensor, self.strategy, reduction, scale)

    def pad_across_processes(self, tensor: T1, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T1:
        """Pad tensors along a dimension to the largest size on any process."""
        return operations.pad_across_processes(tensor, self.strategy, dim, pad_index, pad_first)

    # ---- models ----------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the module without its DataParallel and DistributedDataParallel wrappers.

        Args:
            model: the model; a prepared one is returned unchanged.
            keep_fp32_wrapper: if False, restore the module's own forward.
            keep_torch_compile: if False, remove ``torch.compile``'s wrapper as well.
        """
        return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        """Drop all prepared objects and free memory. Returns one None per argument, to assign to your variables.

        Models that were prepared with ``evaluation_mode=True`` can still be used.
        """
        self.prepared.clear()
        self.windows.clear()
        self.gradient_state.step = 0
        return release_memory(*objects)

    clear = free_memory

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Context manager that splits sequences if ``ParallelismConfig(cp_size=...)`` is set; otherwise, does nothing.

        Inside the context, process r of n holds the r-th of n consecutive parts of each sequence. Attention
        (``scaled_dot_product_attention``) covers all parts. Run the forward pass, the loss and ``accelerator.backward``
        inside the context. Labels must already be shifted. If the parts differ in the number of tokens that the loss
        counts, pass that number to ``backward(num_items=...)``; without it, all parts have the same weight.

        Args:
            buffers: the tensors that contain sequences: tokens, positions and labels. They are modified in place.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that need not be restored to full sequences afterward.
        """
        tensors, dims, unrestored = list(buffers or ()), list(buffer_seq_dims or ()), no_restore_buffers or ()
        check_buffers(tensors, dims, unrestored)
        self.gradient_state.split_batch = self.gradient_state.batch
        return self.strategy.split_sequences(tensors, dims, unrestored)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Not supported: always raises NotImplementedError, because Paceline has no LOMO optimizers."""
        raise NotImplementedError(
            "accelerator.lomo_backward is not supported, because Paceline has no LOMO optimizers. Use "
            "accelerator.backward(loss) with any optimizer from torch.optim."
        )

    # ---- files and trackers ----------------------------------------------------------------------------------------

    @phase("save_state")
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save everything that the loop needs to resume bit for bit. Every process must call this.

        ``output_dir/state.ckpt`` contains models, optimizers, schedulers, the loss scale, the position in every
        prepared loader, gradients that are waiting for an optimizer step, the RNG states of every process, and
        registered objects. At any moment, either the old state or the complete new one exists.

        Args:
            output_dir: path or URL of a folder. With ``automatic_checkpoint_naming``, None means
                ``project_dir/checkpoints/checkpoint_<n>``.
            safe_serialization: has no effect, because reading a saved state never runs code.
            **kwargs: ``only_trainable=True`` (or ``exclude_frozen_parameters=True``) omits frozen parameters.

        Returns:
            Path or URL of the folder.

        Raises:
            RuntimeError: the processes call this method at different points in the program.
            TypeError: the state of a registered object is not plain data, or an argument is unknown.
            ValueError: no folder was passed.
            OSError: writing failed; raised on every process, and the old state is unchanged.
        """
        return self.states.save(output_dir, safe_serialization, **kwargs)

    @phase("load_state")
    def load_state(self, input_dir: Any = None, load_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Resume from a state that :meth:`save_state` wrote. Every process must call this, after ``prepare``.

        The next pass over a prepared loader begins at the saved position. If the number of processes has changed since
        saving, the pass begins after the same number of samples, and a message lists everything else that was derived
        instead of restored.

        Args:
            input_dir: the state's folder; None means the newest valid state of the project or of this run.
            load_kwargs: a dict that may contain ``weights_only=True``, which is always in effect, and ``map_location``,
                which has no effect.
            **kwargs: ``strict=True`` raises an error, before anything changes, if an object cannot be restored; by
                default, there is only a warning. The keys of ``load_kwargs`` are also accepted.

        Raises:
            FileNotFoundError: the state does not exist.
            ValueError: the state is damaged, or was saved with different optimizers.
            RuntimeError: the weights do not match the models, or ``strict`` is set and an object cannot be restored.
        """
        self.states.load(input_dir, load_kwargs, **kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects that have ``state_dict`` and ``load_state_dict`` methods in the saved state."""
        self.states.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call ``hook(models, weights, output_dir)`` on every rank before a state is saved.

        Files that the hook writes to ``output_dir`` appear together with the state. If the hook removes a model's entry
        from ``weights`` on rank 0, the state does not contain that model.

        Returns:
            A handle whose ``remove()`` removes the hook.
        """
        return self.states.on_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call ``hook(models, input_dir)`` on every rank before a state is loaded.

        If the hook removes a model from ``models``, no weights are loaded into that model.

        Returns:
            A handle whose ``remove()`` removes the hook.
        """
        return self.states.on_load(hook)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return a model's full state dict. Every process must call this.

        If the weights are sharded, rank 0 gets them on the CPU, and all other ranks get an empty dict.

        Args:
            model: the model, prepared or not, possibly compiled.
            unwrap: whether to omit the prefixes that wrappers such as ``torch.compile`` add to names.
        """
        return self.weights.state_dict(model, unwrap)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write a model's weights to a folder; large models are written as several files with an index.

        Every process must call this. Only weights are written: no ``config.json`` and no tokenizer. Each file is
        written atomically, and the index is written last. Afterward, files that an earlier call wrote in the same
        format are removed. Tied tensors are written once.

        Args:
            model: the prepared model.
            save_directory: path or URL of a folder, which is created if it does not exist.
            max_shard_size: maximum file size in bytes, or a string such as ``"5GB"``. A larger tensor is still written
                as one file.
            safe_serialization: if True, write ``model*.safetensors``; otherwise ``pytorch_model*.bin``.

        Raises:
            ValueError: ``max_shard_size`` is not valid.
            OSError: a file could not be written; raised on every process.
        """
        self.weights.save_model(model, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file on the main process. If ``f`` is a path, the file is written atomically.

        Args:
            obj: anything that ``torch.save`` accepts; with ``safe_serialization``, a dict of tensors.
            f: a path or an open binary file.
            safe_serialization: whether to use the safetensors format.

        Raises:
            TypeError: the safetensors format cannot store the object.
        """
        self.weights.save(obj, f, safe_serialization)

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers that ``log_with`` requests, and log the run's settings.

        Trackers of an earlier run are closed.

        Args:
            project_name: name of the folder in the logging directory, or of the project in the tracking service.
            config: the run's settings.
            init_kwargs: additional arguments, keyed by tracker name.
        """
        self.trackers.start(project_name, config, init_kwargs, self.project_configuration.logging_dir)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log the values of one step to all trackers.

        Args:
            values: numbers, single-element tensors, and other values that the trackers support. Paceline's trackers
                skip values that are None. All processes must call this if a value comes from a sharded tensor (a norm
                under FSDP).
            step: position on the x-axis.
            log_kwargs: additional arguments of a tracker's ``log``, keyed by tracker name.

        Raises:
            RuntimeError: ``init_trackers`` was not called.
        """
        self.trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or the object that the tracker wraps if ``unwrap`` is True."""
        return self.trackers.get(name, unwrap)

    def end_training(self) -> None:
        """Close all trackers. The process leaves the process group only when the program ends."""
        for observer in self.gradient_state.observers:
            observer.training_ends()
        self.trackers.finish()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Profiler]:
        """Context manager that yields a running torch profiler. If it has a schedule, call ``step()`` after each batch.

        With ``ProfileKwargs(output_trace_dir=...)``, every process writes ``profile_<rank>.json`` to that folder
        (repeated schedules also write ``profile_<rank>_1.json``, ...), and all processes wait until the traces are
        written.
        """
        return (profile_handler or self.handlers.profile or ProfileKwargs()).record(self.strategy)

    def doctor(self, dirpath: str | Path | None = None, write: bool = True) -> AbstractContextManager[Doctor]:
        """Context manager that reports what is slow in a training loop, why, and what to change.

        Args:
            dirpath: folder for ``doctor.html`` and ``doctor.json``; None means ``project_dir``, or else the working
                directory.
            write: whether to write these two files; if False, only print the report.
        """
        return OwnLoop(self, Doctor(dirpath, write=write)).examined()

    def observe(self, *observers: OwnLoop) -> None:
        """Set the observers that time this Accelerator's methods and everything that it prepares."""
        time_methods(self, _TIMED, observers)
        self.prepared.observe(observers)

    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Any:
        """Context manager inside which processes may have different numbers of batches."""
        return self.prepared.join_uneven_inputs(joinables, even_batches)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that skips the first ``num_batches`` batches of each pass.

        The returned loader shares its epoch count with ``dataloader``, so after one pass over the returned loader,
        ``dataloader`` continues with the next epoch. Batches that ``load_state`` has already skipped are not skipped
        again.

        Raises:
            ValueError: ``num_batches`` is negative.
        """
        return skip_first_batches(dataloader, num_batches)
