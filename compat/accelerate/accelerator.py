"""The ``Accelerator`` class for programs written for ``accelerate``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any, SupportsIndex

from torch import Tensor, nn

from ... import messages
from ...accelerator import accelerator
from ...accelerator.prepare import Prepared
from ...accelerator.schedulers import AcceleratedScheduler
from ...accelerator.state_folders import Folders
from ...checkpoint.storage import Location
from ...settings import resolve
from .attributes import Attributes
from .deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler, created
from .engine_methods import EngineMethods
from .evaluation import note_items, once_per_sample
from .fsdp_plugin import FullyShardedDataParallelPlugin
from .gradient_state import newest_is
from .loader_classes import prepared
from .loaders import DataLoaderShard
from .models import NoSync
from .processes import tell_scale
from .wrappers import prepared_optimizer, prepared_scheduler


class _Folders(Folders):
    """The folders of saved states. Only states in automatically named folders count toward ``total_limit``."""

    def delete_old(self, newest: Location) -> None:
        """Delete states beyond ``total_limit`` if folders are named automatically."""
        if self.project.automatic_checkpoint_naming:
            super().delete_old(newest)
        messages.ignored(
            "ProjectConfiguration",
            "the script names and deletes states itself (automatic_checkpoint_naming is False)",
            total_limit=None if self.project.automatic_checkpoint_naming else self.project.total_limit,
        )


class ModelList(MutableSequence[nn.Module]):
    """The models that saved states contain.

    A model that is removed from this list is left out of saved states, but can still be trained.

    Args:
        prepared: the prepared objects of an Accelerator.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def __len__(self) -> int:
        return len(self._prepared.saved_models)

    def __getitem__(self, index: Any) -> Any:
        return self._prepared.saved_models[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        models: list[Any] = self._prepared.saved_models
        models[index] = value
        self.replace(models)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        models = self._prepared.saved_models
        del models[index]
        self.replace(models)

    def __repr__(self) -> str:
        return repr(self._prepared.saved_models)

    def insert(self, index: int, value: nn.Module) -> None:
        """Add a model at the end, whatever ``index`` is. A model that is already in the list stays where it is."""
        self.replace([*self, value])

    def replace(self, models: Iterable[nn.Module]) -> None:
        """Set the models that saved states contain."""
        wanted = list(models)
        for model in self._prepared.saved_models:
            if not any(model is one for one in wanted):
                self._prepared.leave_out(model)
        for model in wanted:
            self._prepared.unsaved.discard(id(model))
            self._prepared.model(model, place=False, evaluation=True)


class Accelerator(Attributes):
    """Paceline's Accelerator, with additional behavior that loops written for Accelerate rely on."""

    @functools.wraps(accelerator.Accelerator.__init__)
    def __init__(self, *args: Any, torch_tp_plugin: Any = None, **kwargs: Any) -> None:
        if torch_tp_plugin is not None:
            raise NotImplementedError(
                f"Accelerator(torch_tp_plugin={torch_tp_plugin!r}) is not supported. Use "
                "Accelerator(parallelism_config=ParallelismConfig(tp_size=...))."
            )
        given = kwargs.get("deepspeed_plugin") or kwargs.get("deepspeed_plugins")
        if not given and resolve()["use_deepspeed"]:
            kwargs["deepspeed_plugin"] = DeepSpeedPlugin()
        if kwargs.get("fsdp_plugin") is None and resolve()["use_fsdp"]:
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        super().__init__(*args, **kwargs)
        self._deepspeed, self._fsdp_plugin = self.state.deepspeed_plugin, self.state.fsdp_plugin
        self._deepspeed_steps: int | None = None  # micro-batches per update in the plugin's configuration
        if isinstance(self._deepspeed, DeepSpeedPlugin):
            self._deepspeed.set_mixed_precision(self.mixed_precision)
            self._deepspeed.deepspeed_config.setdefault("gradient_accumulation_steps", self.gradient_accumulation_steps)
        # Loops for Accelerate skip to the resume position themselves, except with stateful data loaders.
        self.states.contents.script_skips = not self.dataloader_config.use_stateful_dataloader
        self.states.folders = _Folders(self.strategy, self.project_configuration)
        self.prepared.loader_kind = prepared
        self.prepared.optimizer_kind = prepared_optimizer
        self.prepared.scheduler_kind = partial(prepared_scheduler, self.dataloader_config.split_batches)
        newest_is(self.gradient_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        newest_is(self.gradient_state, replace=False)

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Like ``paceline.Accelerator.prepare``, but also tells the user that schedules advance once per update."""
        if any(isinstance(one, (DummyOptim, DummyScheduler)) for one in objects) or self._deepspeed is not None:
            if isinstance(self._deepspeed, DeepSpeedPlugin):
                steps, split = self.gradient_accumulation_steps, self.dataloader_config.split_batches
                self._deepspeed_steps = self._deepspeed.fill(objects, steps, self.strategy.num_data_ranks, split)
                self.prepared.clip_norm = self._deepspeed.clip_norm
            objects = tuple(created(objects, self._deepspeed))
        self._apply_plugin()
        found = super().prepare(*objects, device_placement=device_placement)
        self._mark_models()
        self._tell_schedules()
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model."""
        self._apply_plugin()
        found = super().prepare_model(model, device_placement, evaluation_mode)
        self._mark_models()
        return found

    def _apply_plugin(self) -> None:
        if isinstance(self._fsdp_plugin, FullyShardedDataParallelPlugin):
            self._fsdp_plugin.apply_changes(self.strategy)

    def _mark_models(self) -> None:
        for model in self._models:
            vars(model)["_is_accelerate_prepared"] = True
        for placement in self.prepared.trained:
            module = placement.module
            if placement.strategy.communicates_gradients and not hasattr(type(module), "no_sync"):
                vars(module)["no_sync"] = NoSync(self, module)
        if self._deepspeed is not None:
            for placement in self.prepared.trained:
                EngineMethods(self.prepared, placement.module).attach(placement.module)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
        """Like ``paceline.Accelerator.save_state``, but uses process 0's folder if processes pass different folders."""
        return super().save_state(self._one_folder(output_dir), *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Like ``paceline.Accelerator.load_state``, but if processes pass different folders, process 0's is used."""
        super().load_state(self._one_folder(input_dir), *args, **kwargs)

    def _one_folder(self, folder: Any) -> Any:
        """Return process 0's folder; if the processes' folders differ, report this once."""
        found = self.strategy.gather_objects(folder)
        if len(set(map(str, found))) > 1:
            messages.info_once(
                f"The processes passed different folders for one state: {messages.names(found, last='and')}. All "
                "processes use the folder from process 0, because a state is a single folder.",
                key="different folders for a state",
            )
        return found[0]

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler."""
        found = super().prepare_scheduler(scheduler)
        self._tell_schedules()
        return found

    def _tell_schedules(self) -> None:
        world, config = self.strategy.num_data_ranks, self.dataloader_config
        multiplied = world > 1 and self.step_scheduler_with_optimizer and not config.split_batches
        if multiplied and self._deepspeed is None and self.prepared.schedulers and self.scheduler_steps != "per_sample":
            messages.info_once(
                f"Prepared schedules advance once per update. Accelerate advances schedules {world} times per update, "
                "once for each process. If the script multiplies the schedule's length by the number of processes, "
                "set PACELINE_SCHEDULER_STEPS=per_sample.",
                key="schedules advance once",
            )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the loader unchanged if sequences are not split; otherwise, raise an error."""
        if self.parallelism_config is None or not self.parallelism_config.sp_enabled:
            return dl
        raise NotImplementedError(
            f"transformers.Trainer does not work with ParallelismConfig(sp_size={self.parallelism_config.sp_size}), "
            "because accelerator.deepspeed_ulysses_dl_adapter would split sequences a second time. In the Trainer, "
            f"use cp_size={self.parallelism_config.sp_size} instead. In a custom loop, remove the call to "
            "deepspeed_ulysses_dl_adapter, because accelerator.prepare(model, optimizer, loader) already splits "
            "sequences."
        )

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors across processes, by default to their sum."""
        tell_scale("accelerator.reduce", scale)
        note_items(self.gradient_state, tensor)
        return super().reduce(tensor, reduction)

    def backward(self, loss: Tensor, num_items: Any = None, *, scale_wrt_gas: bool = True, **kwargs: Any) -> None:
        """Like ``paceline.Accelerator.backward``; with ``scale_wrt_gas=False``, a window's losses are not averaged."""
        if not scale_wrt_gas:
            loss = loss * self.gradient_accumulation_steps
        if self._deepspeed_steps is not None:
            self._accumulate_under_deepspeed(self._deepspeed_steps)
        super().backward(loss, num_items, **kwargs)

    def _accumulate_under_deepspeed(self, steps: int) -> None:
        """Keep gradients unsynchronized inside a window if the loop counts micro-batches, as transformers.Trainer does.

        Such a loop does not call ``no_sync`` under DeepSpeed.

        Raises:
            ValueError: the loop does not count micro-batches, and the DeepSpeed configuration and the Accelerator
                have different numbers of micro-batches.
        """
        if self.gradient_state.by_hand:
            for model in self.prepared.trained:
                if model.strategy.communicates_gradients:
                    model.strategy.sync_gradients(self.sync_gradients)
        elif steps != self.gradient_accumulation_steps:
            raise ValueError(
                f"The DeepSpeed configuration has gradient_accumulation_steps={steps}, but the Accelerator has "
                f"{self.gradient_accumulation_steps}. Set only one of the two, or set both to the same number."
            )

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Like ``paceline.Accelerator.clip_grad_norm_``, but reports once that it does not clip inside a window."""
        self._tell_clipping()
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Like ``paceline.Accelerator.clip_grad_value_``, but reports once that it does not clip inside a window."""
        self._tell_clipping()
        super().clip_grad_value_(parameters, clip_value)

    def _tell_clipping(self) -> None:
        if not self.sync_gradients and self._deepspeed is None:
            messages.info_once(
                "Gradients are clipped once, when their accumulation window is complete. Accelerate clips the "
                "accumulated gradients after each micro-batch. As a result, losses differ from Accelerate's. To clip "
                "only once with Accelerate too, write `if accelerator.sync_gradients:` before the call.",
                key="gradients are clipped once",
            )

    # ---- what states contain: lists that programs read and change --------------------------------------------------

    @property
    def _models(self) -> ModelList:
        """The prepared models that saved states contain."""
        return ModelList(self.prepared)

    @_models.setter
    def _models(self, models: Iterable[nn.Module]) -> None:
        ModelList(self.prepared).replace(models)

    @property
    def _optimizers(self) -> list[Any]:
        """The prepared optimizers that saved states contain. Optimizers that are removed from this list still step."""
        return self.prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: Iterable[Any]) -> None:
        self.prepared.optimizers[:] = optimizers

    @property
    def _schedulers(self) -> list[Any]:
        """The schedulers that saved states contain."""
        return self.prepared.schedulers

    @_schedulers.setter
    def _schedulers(self, schedulers: Iterable[Any]) -> None:
        self.prepared.schedulers[:] = schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        """The prepared loaders, whose positions saved states contain."""
        return self.prepared.loaders

    @_dataloaders.setter
    def _dataloaders(self, loaders: Iterable[Any]) -> None:
        self.prepared.loaders[:] = loaders

    @property
    def _custom_objects(self) -> list[Any]:
        """The objects that were passed to ``register_for_checkpointing``."""
        return self.states.contents.objects

    @_custom_objects.setter
    def _custom_objects(self, objects: Iterable[Any]) -> None:
        self.states.contents.objects[:] = objects

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log values to all trackers. Without trackers, or before ``init_trackers`` is called, nothing is logged."""
        if not self.trackers.idle:
            super().log(values, step, log_kwargs)
        elif self.trackers.wanted:
            messages.warn(
                f"accelerator.log({list(values)}) before init_trackers has no effect. Call "
                "accelerator.init_trackers('my_project') first."
            )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Like ``paceline.Accelerator.get_tracker``, but a missing tracker is always a ValueError."""
        if not self.trackers.idle:
            return super().get_tracker(name, unwrap)
        try:
            return super().get_tracker(name, unwrap)
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    def gather(self, tensor: Any) -> Any:
        """Concatenate all processes' tensors (in nested lists, tuples and dicts) along the first dimension."""
        note_items(self.gradient_state, tensor)
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like ``paceline.Accelerator.gather_for_metrics``, but also handles values repeated for each sample.

        Loops for Accelerate gather ``loss.repeat(batch_size)`` to compute a mean weighted by batch size. If a batch is
        not full or is split across processes, only one row per sample is kept.
        """
        loader = self.gradient_state.active_dataloader
        if isinstance(loader, DataLoaderShard):
            split = self.dataloader_config.split_batches
            input_data = once_per_sample(input_data, loader, self.gradient_state, self.strategy, split)
        return super().gather_for_metrics(input_data, use_gather_object)
