"""Door two: three changed lines turn a plain PyTorch loop into one that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor, nn

from ..doctor.doctor import Doctor
from ..doctor.own_loop import PlannedLoop, Wiring
from ..doctor.script_options import Plan
from ..memory.out_of_memory_retry import release_memory
from ..processes.cpu_memory import keep_freed_memory
from ..processes.timings import timed
from ..settings.constructors import check_names
from ..strategies.base import Strategy
from ..strategies.precision.base import Precision
from . import operations
from .accumulation import GradientState, Window
from .arguments import read_arguments
from .gradients import Gradients
from .kwargs_handlers import ProfileKwargs
from .loaders import skip_first_batches
from .model_weights import ModelWeights
from .models import refuse_processes, restore, unwrapped
from .optimizers import AcceleratedOptimizer
from .prepare import Prepared
from .process_state import AcceleratorState, PartialState
from .properties import Facts
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
    from .fsdp_plugin import FullyShardedDataParallelPlugin
    from .kwargs_handlers import KwargsHandler
    from .loaders import DataLoaderConfiguration
    from .operations import Reduction
    from .parallelism_config import ParallelismConfig
    from .plugins import DeepSpeedPlugin, GradientAccumulationPlugin, ProjectConfiguration, TorchDynamoPlugin

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")


class Accelerator(Facts):
    """Runs a training loop of your own on one device or many: create it, ``prepare``, ``backward``.

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

    An argument that is None was not set: the launch command, the environment and the config file may say it.

    Args:
        device_placement: ``prepare`` moves models, and loaders move batches, to the device.
        split_batches: the loader's batch is that of all processes together; see ``DataLoaderConfiguration``.
        mixed_precision: ``"no"`` (float32 throughout), ``"fp16"`` or ``"bf16"`` (weights stay float32), or a Precision.
        gradient_accumulation_steps: micro-batches in a window, for ``accumulate``.
        cpu: compute on the CPU, whatever else there is.
        dataloader_config: how loaders are split.
        deepspeed_plugin: DeepSpeed and its settings.
        deepspeed_plugins: the same, in a dict.
        megatron_lm_plugin: not supported.
        fsdp_plugin: FSDP2 and its settings.
        rng_types: accepted; the order of samples is the same on all ranks without exchanging random states.
        log_with: names, classes or objects of trackers, or a list of them; ``"all"``: what is installed.
        project_dir: folder of logs and checkpoints.
        project_config: a ``ProjectConfiguration``.
        gradient_accumulation_plugin: ``gradient_accumulation_steps`` and more.
        step_scheduler_with_optimizer: schedulers move when their optimizers have stepped; False: at each call.
        kwargs_handlers: settings of DistributedDataParallel, autocast, loss scaler, process group and profiler.
        dynamo_backend: compile models with this backend.
        dynamo_plugin: the same, and more.
        parallelism_config: sizes of tensor, sharded and replicated parallelism.
        strategy: a name that ``Trainer(strategy=...)`` takes, or a Strategy.
        scheduler_steps: ``"per_update"``: a call of ``scheduler.step()`` is one step of the schedule;
            ``"per_sample"``: as many as there are processes, for a schedule whose length counts one process's batches.
        output_dtype: ``"fp32"``: what a model returns in 16 bits becomes float32, so that a loss computed outside of
            autocast keeps its accuracy; ``"keep"``: it stays.
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
        """What a copy is made of; it stands where ``save_state`` and ``load_state`` would bring a new Accelerator.

        Raises:
            TypeError: several processes share it.
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

    @timed("prepare")
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; anything else comes back as it is.

        A model comes back as the same object, ready to train on this run's devices. Under FSDP and DeepSpeed a model
        and its optimizer belong in one call.

        Args:
            *objects: in any order.
            device_placement: for each object, whether it goes to the device.

        Returns:
            What stands for each object, in the order given; for a single object that alone.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ValueError(
                f"accelerator.prepare got {len(objects)} objects and device_placement for {len(device_placement)}. "
                "Give one bool for each object, or leave it out."
            )
        found = self.prepared.prepare(objects, device_placement or [None] * len(objects))
        return found[0] if len(found) == 1 else tuple(found)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which layers are made on the run's device and in its dtype.

        Under a strategy that shards, weights which ``load_checkpoint_in_model`` loads within into layers without memory
        are read by ``prepare``: each process reads the part that it holds.

        Args:
            empty_init: True makes layers without memory, under a strategy that shards.
        """
        return self.strategy.empty_init_context() if empty_init else self.strategy.init_context()

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model.

        Args:
            model: the model.
            device_placement: whether it goes to the device; None: as the Accelerator says.
            evaluation_mode: it is only evaluated: nothing is kept for its gradients.
        """
        return self.prepared.model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare one loader."""
        return self.prepared.loader(data_loader, device_placement)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        return self.prepared.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler."""
        return self.prepared.scheduler(scheduler)

    # ---- one step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, num_items: Any = None, **kwargs: Any) -> None:
        """Backward of a loss; takes the place of ``loss.backward()``.

        Args:
            loss: scalar, shape ().
            num_items: how many items (tokens, boxes) the loss is the mean over. The gradient of a window is then the
                mean over all its items on all ranks, whatever their split; without it micro-batches count alike.
            **kwargs: for ``loss.backward``.
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
        """``with accelerator.accumulate(model):`` around one micro-batch of a window.

        Inside, ``optimizer.step()``, ``scheduler.step()`` and ``optimizer.zero_grad()`` do something on the window's
        last micro-batch alone: the ``gradient_accumulation_steps``-th, or the last of the loader. Models that are
        trained in turn, such as those of a GAN, each have a window of their own.

        Args:
            *models: prepared models whose gradients gather; all of them if none is given.
        """
        return self.gradient_state.windows.get(tuple(map(id, models))) or self.windows.open(models)

    def no_sync(self, model: Any = None) -> AbstractContextManager[None]:
        """Within, backward passes keep their gradients to this process.

        Args:
            model: a prepared model; None: all.
        """
        return self.gradients.no_sync(model)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[None]:
        """Within, the next backward pass communicates, although its forward was run under ``no_sync``."""
        return self.gradients.trigger_sync(model)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients' total norm when the window is complete; call it after every backward.

        Args:
            parameters: of prepared models.
            max_norm: what the norm is brought down to.
            norm_type: of the norm; ``inf`` for the largest element.

        Returns:
            The norm before, shape (); on a micro-batch that only accumulates that of the window before (nan at first).
        """
        return self.gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to ``[-clip_value, clip_value]`` when the window is complete."""
        self.gradients.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take fp16's loss scale out of complete gradients, once; clipping does it by itself.

        Args:
            optimizer: a prepared optimizer or several; None: all.
        """
        self.gradients.unscale(optimizer)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Compute in the chosen precision inside, as a prepared model's forward does.

        Args:
            autocast_handler: ``AutocastKwargs``, to switch it off for one.
        """
        if autocast_handler is not None:
            return autocast_handler.context(self.strategy)
        return self.strategy.precision.forward_context()

    # ---- between processes -----------------------------------------------------------------------------------------

    def gather(self, tensor: T1) -> T1:
        """Tensors of all processes joined along their first dimension, in nested lists, tuples and dicts."""
        return operations.gather(tensor, self.strategy)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all processes computed for a batch, each sample of the data set once.

        Rows that only repeat samples of other processes are left out of tensors whose first dimension is that of the
        batch. Anything else comes back whole.

        Args:
            input_data: tensors, in nested lists, tuples and dicts; or any objects.
            use_gather_object: gather objects that are no tensors.
        """
        loader = self.gradient_state.active_dataloader
        return operations.gather_for_metrics(input_data, self.strategy, loader, use_gather_object)

    def reduce(self, tensor: T1, reduction: Reduction = "sum", scale: float = 1.0) -> T1:
        """Tensors of all processes added up, or reduced by ``"mean"``, ``"min"`` or ``"max"``, then times ``scale``.

        ``"none"`` leaves each process its own.
        """
        return operations.reduce(tensor, self.strategy, reduction, scale)

    def pad_across_processes(self, tensor: T1, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T1:
        """Tensors padded along a dimension to the longest of all processes."""
        return operations.pad_across_processes(tensor, self.strategy, dim, pad_index, pad_first)

    # ---- models ----------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model as it was given to ``prepare``, which a prepared model still is.

        Args:
            model: the model.
            keep_fp32_wrapper: False: give it its own forward back, so that it is a plain module again.
            keep_torch_compile: accepted; a prepared model is compiled inside.
        """
        found = unwrapped(model)
        if not keep_fp32_wrapper and isinstance(found, nn.Module):
            restore(found)
        return found

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared, and give memory back; set names of yours to what this returns: None."""
        self.prepared.clear()
        self.windows.clear()
        self.gradient_state.step = 0
        return release_memory(*objects)

    clear = free_memory

    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Not supported here: sequences are split by ``Trainer(strategy=ModelParallelStrategy(...))``."""
        if kwargs.get("buffers") or args:
            raise NotImplementedError(
                "accelerator.maybe_context_parallel: splitting sequences needs the whole step. Use Trainer(strategy="
                "ModelParallelStrategy(context_parallel=..., context_parallel_dims=...))."
            )
        return nullcontext()

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Not supported: LOMO steps inside of backward, so that no window, clipping or loss scale can apply."""
        raise NotImplementedError(
            "accelerator.lomo_backward: Paceline has no LOMO optimizers. Use accelerator.backward(loss) with any of "
            "torch.optim."
        )

    # ---- files and trackers ----------------------------------------------------------------------------------------

    @timed("save_state")
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save everything that this loop needs to resume to the bit; see :meth:`.save_state.States.save`."""
        return self.states.save(output_dir, safe_serialization, **kwargs)

    @timed("load_state")
    def load_state(self, input_dir: Any = None, load_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Resume from what :meth:`save_state` wrote; see :meth:`.save_state.States.load`."""
        self.states.load(input_dir, load_kwargs, **kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects with the state; they need ``state_dict`` and ``load_state_dict``."""
        self.states.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call ``hook(models, weights, output_dir)`` before a state is saved, on every rank.

        What it writes to ``output_dir`` appears beside the state together with it. A model whose entry rank 0 takes out
        of ``weights`` is not saved in the state.

        Returns:
            A handle with ``remove()``.
        """
        return self.states.on_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call ``hook(models, input_dir)`` before a state is loaded, on every rank.

        A model that it takes out of ``models`` gets no weights from the state.

        Returns:
            A handle with ``remove()``.
        """
        return self.states.on_load(hook)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """A model's whole ``state_dict``; every process must call; see :meth:`.model_weights.ModelWeights`."""
        return self.weights.state_dict(model, unwrap)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write a model's weights to a folder, in the ecosystem's layout; every process must call."""
        self.weights.save_model(model, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file, on the main process; see :meth:`.model_weights.ModelWeights.save`."""
        self.weights.save(obj, f, safe_serialization)

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers of ``log_with``; see :meth:`.trackers.Trackers.start`."""
        self.trackers.start(project_name, config, init_kwargs, self.project_configuration.logging_dir)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Send the values of one step to all trackers; see :meth:`.trackers.Trackers.log`."""
        self.trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; ``unwrap`` for the object behind it."""
        return self.trackers.get(name, unwrap)

    def end_training(self) -> None:
        """End the run in all trackers. The process group is left when the program ends."""
        self.trackers.finish()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Profiler]:
        """Context that gives torch's profiler; see :meth:`.kwargs_handlers.ProfileKwargs.record`."""
        return (profile_handler or self.handlers.profile or ProfileKwargs()).record(self.strategy)

    def doctor(self, dirpath: str | Path | None = None, write: bool = True) -> AbstractContextManager[Doctor]:
        """Context around a training loop, at whose end stands what is slow in it, why, and what to change.

        Args:
            dirpath: where ``doctor.html`` and ``doctor.json`` go; None: the ``project_dir``, or the working directory.
            write: write them; else the report is only said.
        """
        return Wiring(self, Doctor(dirpath, write=write)).examined()

    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Any:
        """Within, processes may have different numbers of batches."""
        return self.prepared.join_uneven_inputs(joinables, even_batches)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose first pass begins after so many batches."""
        return skip_first_batches(dataloader, num_batches)
