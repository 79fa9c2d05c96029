"""``TrainingModule``: the user's model, its steps, and its access to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self, Unpack

from .. import messages
from ..callbacks.base import overridden
from ..checkpoint.class_methods import making
from ..checkpoint.hyperparameters import HyperparametersMixin
from ..processes.device_transfer import full_value, move
from ..strategies.one_cycle_schedules import MAY_END, advance
from ..strategies.precision.base import BACKWARD, CLIPPING
from ..strategies.precision.base import parameters as parameters_of
from ..torch_private import COMPILED_CALL, is_in_parts, own_modules
from .metric_reductions import Group, RecordOptions
from .module_hooks import ModuleHooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..loggers.base import Logger
    from ..strategies.communication import ReduceOp
    from .arguments import ClipAlgorithm
    from .metrics import MetricStore
    from .optimizers import ManagedOptimizer
    from .trainer import Trainer


class LogOptions(TypedDict, total=False):
    """The arguments of ``self.log`` that ``self.log_dict`` applies to all of its entries."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: ReduceOp | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool | None
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool


#: The arguments of ``self.log_dict`` after the dict, in the order in which they can be given by position.
_LOG_DICT_OPTIONS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group"),
    *("add_dataloader_idx", "batch_size", "rank_zero_only"),
)


class TrainingModule(HyperparametersMixin, ModuleHooks, nn.Module):
    """A ``torch.nn.Module`` that defines its own training step. Subclass it and pass it to ``Trainer.fit``.

    Define ``training_step`` and ``configure_optimizers``, and any other steps and hooks that you need. A method counts
    as defined if the class defines it or the instance has it (``module.training_step = f`` works); None means "not
    defined".

    Example:
        >>> class Regression(TrainingModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         loss = torch.nn.functional.mse_loss(self.layer(x), y)
        ...         self.log("train_loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    """

    #: Checkpoint keys: the hyperparameters, the name of the argument that takes them all, and their type.
    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "hparams_type"

    #: False lets ``training_step`` step the optimizers itself.
    automatic_optimization: bool = True
    #: Example arguments of ``forward``, for summaries and exports.
    example_input_array: Any = None

    _defines_defaults: ClassVar[bool] = True
    _trainer: Trainer | None = None
    _metric_store: MetricStore | None = None
    _strict_loading: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        if any(map(is_in_parts, self.parameters())):
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled, because the strategy has sharded its weights. "
                "Save it with trainer.save_checkpoint(path) and load it with load_from_checkpoint(path)."
            )
        return {k: v for k, v in self.__dict__.items() if k not in ("_trainer", "_metric_store", COMPILED_CALL)}

    # ---- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch: ``training_step(batch, batch_idx)``.

        ``training_step(batch)`` and ``training_step(dataloader_iter)`` work too.

        Returns:
            The loss as a scalar tensor of shape (), a dict with the loss under ``"loss"``, or None to skip the batch.
            To weight micro-batches of different sizes exactly, also return ``"num_items"`` in the dict: the number of
            items that the loss is averaged over.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no training_step. Define training_step(self, batch, batch_idx)."
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch: ``validation_step(batch, batch_idx)``, plus ``dataloader_idx`` with several loaders."""
        raise NotImplementedError(
            f"{type(self).__name__} has no validation_step. Define validation_step(self, batch, batch_idx)."
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch in ``Trainer.test``, like ``validation_step``."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step. Define test_step(self, batch, batch_idx).")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the predictions for a batch; by default, ``self(batch)``."""
        return self(batch)

    # ---- logging ---------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: ReduceOp | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number under a name, for the loggers, the progress bar and callbacks that monitor it.

        By default, training steps log the step's value, and evaluation steps log the epoch's mean, weighted by batch
        size.

        Args:
            name: the key. If both ``on_step`` and ``on_epoch`` are set, the keys are ``name_step`` and ``name_epoch``.
            value: a number, a tensor with one element, or a torchmetrics ``Metric`` (computed and reset by the
                trainer). Tensors stay on their device, and nothing waits for the device unless ``sync_dist=True``.
            prog_bar: show the value in the progress bar.
            logger: send the value to the loggers (the default).
            on_step: log the step's value. If None, True in training steps and False elsewhere.
            on_epoch: log the reduction over the epoch. If None, False in training steps and True elsewhere.
            reduce_fx: the reduction: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
            enable_graph: keep the autograd graph of the last value.
            sync_dist: reduce across all processes. If None, only epoch values are reduced, and they equal those of a
                one-process run. If True, step values are reduced too, by ``reduce_fx``, all together at the end of the
                batch. If False, nothing is reduced.
            sync_dist_group: the process group to reduce across.
            add_dataloader_idx: with several loaders, add ``/dataloader_idx_N`` to the name.
            batch_size: weight of this value in an epoch mean; read from the batch if None.
            metric_attribute: accepted for compatibility; has no effect.
            rank_zero_only: set to True if only rank 0 makes this call; such a value cannot be monitored.

        Raises:
            ValueError: the value is not a single number, the flags contradict each other, or the arguments differ from
                those of the first call.
            RuntimeError: values cannot be logged in this hook.
        """
        store = self._metric_store
        if store is None:
            self._log_in_vain(name)
            return
        options = (
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            sync_dist,
            sync_dist_group,
            add_dataloader_idx,
            metric_attribute,
            rank_zero_only,
        )
        record = store.records.get(name)
        if record is None or record.resumed or record.options != options:
            record = store.define(name, value, RecordOptions(*options))
        if isinstance(value, Tensor) and type(value) is not Tensor:
            value = full_value(value)
        record.update(value, batch_size)

    def log_dict(
        self, dictionary: Mapping[str, Any], *options: Any, batch_size: int | None = None, **kwargs: Unpack[LogOptions]
    ) -> None:
        """Log every entry of a dict, or every metric of a torchmetrics ``MetricCollection``, as ``log`` does.

        Options given by position are in the order of ``log``, without ``metric_attribute``.
        """
        if options:
            named: Any = _by_name(options, kwargs if batch_size is None else {**kwargs, "batch_size": batch_size})
            TrainingModule.log_dict(self, dictionary, **named)
            return
        collection: Any = dictionary if hasattr(dictionary, "compute_groups") else None
        if collection is None and not isinstance(dictionary, Mapping):
            raise TypeError(
                f"self.log_dict got {messages.a(dictionary)}. Pass a dict of names and values, or use "
                "self.log(name, value)."
            )
        table = None if self._metric_store is None else self._metric_store.records
        if collection is None:
            key: Any = tuple(dictionary)
        else:
            key = (id(collection), *map(id, own_modules(collection).values()))
        group = None if table is None else table.groups.get(key)
        if group is not None and group.arguments == kwargs:
            group.update(dictionary, batch_size)
            return
        items: Any = dictionary.items() if collection is None else collection.items(keep_base=False, copy_state=False)  # type: ignore[call-arg]
        for name, value in items:
            self.log(name, value, batch_size=batch_size, **kwargs)
        own = overridden(self, "log", TrainingModule) is not None
        if table is not None and not own and all(name in table for name, _ in items):  # not in micro-batches
            records = [table[name] for name, _ in items]
            if collection is None or not any(record.together for record in records):
                table.group(key, Group(records, kwargs, collection))

    def _log_in_vain(self, name: str) -> None:
        trainer = self._trainer
        barebones = trainer is not None and trainer.barebones
        why = "Trainer(barebones=True) keeps no metrics" if barebones else "no Trainer runs this module"
        messages.warn_once(f"self.log({name!r}) has no effect, because {why}.", key=f"log in vain: {why}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if self._trainer is None:
            print(*args, **kwargs)  # noqa: T201 - printing is what the caller asked for
        else:
            self._trainer.print(*args, **kwargs)

    @property
    def logger(self) -> Logger | None:
        """The first logger of the trainer, or None."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Logger]:
        """The loggers of the trainer."""
        return self._trainer.loggers if self._trainer is not None else []

    # ---- optimization ----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning rate schedulers.

        Returns:
            An optimizer; a list; a pair (optimizers, schedulers); a dict ``{"optimizer", "lr_scheduler"}`` or a list of
            such dicts, where ``"lr_scheduler"`` is a scheduler or a dict with ``scheduler, interval ("epoch" or
            "step"), frequency, monitor, strict, name``; or None. If there are several optimizers, each trains its own
            parameters, and automatic optimization steps all of them in each update.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no configure_optimizers, so fit cannot change its weights. Define it, for "
            "example: return torch.optim.AdamW(self.parameters(), lr=1e-3)."
        )

    @overload
    def optimizers(self, use_pl_optimizer: Literal[True] = True) -> ManagedOptimizer | list[ManagedOptimizer]: ...
    @overload
    def optimizers(self, use_pl_optimizer: Literal[False]) -> Optimizer | list[Optimizer]: ...
    @overload
    def optimizers(
        self, use_pl_optimizer: bool
    ) -> ManagedOptimizer | Optimizer | list[ManagedOptimizer] | list[Optimizer]: ...

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list if there are several.

        Args:
            use_pl_optimizer: if True, return the trainer's wrapped optimizers, which handle precision and step
                counting; if False, the ones you created.
        """
        trainer = self.trainer
        found = trainer.current_run.managed if use_pl_optimizer else trainer.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list if there are several, or None if there are none."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return (found[0] if len(found) == 1 else found) if found else None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scalar loss, which is scaled under fp16.

        Override this method to pass ``retain_graph``, for example.
        """
        loss.backward(*args, **kwargs)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization; unlike ``loss.backward()``, this applies the precision and strategy.

        If processes have different numbers of samples in an epoch's last batch, the loss of that batch is weighted
        accordingly.
        """
        trainer = self.trainer
        if self.automatic_optimization:
            raise RuntimeError(
                f"{type(self).__name__} called self.manual_backward, but the trainer runs backward itself. Set "
                "self.automatic_optimization = False in __init__ to call it yourself, or return the loss instead."
            )
        run, hooks, precision = trainer.current_run, trainer.current_run.hooks, trainer.strategy.precision
        if run.state.share != 1.0:
            loss = loss * run.state.share
        if not precision.overrides.isdisjoint(BACKWARD):
            around = (hooks.on_before_backward, hooks.on_after_backward)
            precision.bind_backward(trainer.strategy.backward, self, None, around)(loss, *args, **kwargs)
            return
        for hook in hooks.on_before_backward:
            hook(loss)
        backward = self.backward or partial(TrainingModule.backward, self)
        trainer.strategy.backward(loss, how=lambda scaled: backward(scaled, *args, **kwargs))
        for hook in hooks.on_after_backward:
            hook()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: ManagedOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Run one optimizer step in automatic optimization.

        An override can skip steps, but must run the closure. If there are several optimizers, ``optimizer`` represents
        all of them and lists them in ``optimizer.optimizers``, here and in the other methods and hooks of a step.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients. Called right after the optimizer step that used them."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance a scheduler; ``metric`` is the monitored value of a plateau scheduler, else None.

        A finished ``OneCycleLR`` (even inside another scheduler) keeps its last learning rate, with a warning.
        """
        if metric is not None:
            scheduler.step(metric)
        elif isinstance(scheduler, MAY_END):
            advance(scheduler)
        else:
            scheduler.step()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
    ) -> None:
        """Clip the gradients before a step, with the Trainer's settings. Override this method to use your own rule."""
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters across all shards; under fp16, unscale them first.

        Args:
            optimizer: the optimizer that steps the parameters.
            gradient_clip_val: the maximum norm or value; if None, nothing is clipped.
            gradient_clip_algorithm: ``"norm"`` (default) or ``"value"``.
        """
        if gradient_clip_val is None:
            return
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise ValueError(messages.unknown("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value")))
        raw = getattr(optimizer, "optimizer", optimizer)
        self.trainer.current_run.unscale_gradients(raw)
        strategy = self.trainer.strategy
        if strategy.precision.overrides.isdisjoint(CLIPPING):
            strategy.clip(parameters_of(raw), gradient_clip_val, gradient_clip_algorithm)
        else:
            strategy.precision.clip_gradients(raw, gradient_clip_val, gradient_clip_algorithm or "norm")

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients (for manual optimization with several optimizers)."""
        raw = getattr(optimizer, "optimizer", optimizer)
        mine = set(parameters_of(raw))
        others = {p for one in self.trainer.optimizers for p in parameters_of(one)} - mine
        before = self.__dict__.setdefault("_requires_grad", {})
        for parameter in others:
            before.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad_(False)
        for parameter in mine:
            if parameter in before:
                parameter.requires_grad_(before[parameter])
        self.trainer.strategy.requires_grad_changed()

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo :meth:`toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_requires_grad", {}).items():
            parameter.requires_grad_(required)
        self.trainer.strategy.requires_grad_changed()

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Context manager form of :meth:`toggle_optimizer`."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> Self:
        """Set ``requires_grad=False`` on all parameters and switch to eval mode."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Set ``requires_grad=True`` on all parameters and switch to train mode."""
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return self.train()

    # ---- the trainer -----------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module. Raises RuntimeError if there is none."""
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer. Use self.trainer only in a hook or step that a "
                "Trainer runs."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        store = None if trainer is None or trainer.barebones else trainer.current_run.metrics
        self._attach(dict.fromkeys(self._family(), (trainer, store)))

    def _family(self) -> dict[TrainingModule, tuple[Trainer | None, MetricStore | None]]:
        """Return this module and the TrainingModules in it, with the trainer and metric store of each."""
        return {m: (m._trainer, m._metric_store) for m in self.modules() if isinstance(m, TrainingModule)}

    @staticmethod
    def _attach(family: Mapping[TrainingModule, tuple[Trainer | None, MetricStore | None]]) -> None:
        for module, (trainer, store) in family.items():
            module.__dict__["_trainer"], module.__dict__["_metric_store"] = trainer, store

    def _end_run(self) -> None:
        """Make ``self.log`` do nothing after the run has ended."""
        self._attach({module: (trainer, None) for module, (trainer, _) in self._family().items()})

    @property
    def current_epoch(self) -> int:
        """The trainer's epoch; 0 without a trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """The trainer's number of optimizer steps; 0 without a trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all processes; 0 without a trainer."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node; 0 without a trainer."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def device(self) -> torch.device:
        """The device of the parameters; if there are none, the trainer's device, or the CPU without a trainer."""
        for tensor in self.parameters():
            if not tensor.is_meta or self._trainer is None:  # in a pipeline, another rank may hold the weights
                return tensor.device
        return self._trainer.strategy.device if self._trainer is not None else torch.device("cpu")

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of ModelParallelStrategy, with dimensions pp, dp_replicate, dp_shard, cp and tp.

        None before a run and with other strategies.
        """
        return getattr(self._trainer.strategy, "mesh", None) if self._trainer is not None else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the floating-point parameters; torch's default if there are none."""
        for tensor in self.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors from all processes along a new first dimension; with one process, return them unchanged."""
        return self.trainer.strategy.all_gather(data, group, sync_grads)

    @property
    def strict_loading(self) -> bool:
        """Whether the names in a checkpoint must match the module's; setting this property to None means True."""
        return self._strict_loading is not False

    @strict_loading.setter
    def strict_loading(self, strict: bool | None) -> None:
        self._strict_loading = None if strict is None else bool(strict)

    # ---- files -----------------------------------------------------------------------------------------------------

    @making
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a module from a checkpoint's hyperparameters and load its weights.

        Args:
            checkpoint_path: a Paceline checkpoint, or a Lightning ``.ckpt``.
            map_location: where to put the tensors; CPU by default.
            hparams_file: a ``.yaml`` or ``.csv`` file with constructor arguments, used instead of those in the
                checkpoint.
            strict: whether all keys must match; the module's ``strict_loading`` if None.
            weights_only: if False, also load hyperparameters that are objects; loading them can run code that the file
                specifies.
            **kwargs: constructor arguments; they override the saved ones.
        """
        from ..checkpoint.load_from_checkpoint import load_from_checkpoint

        return load_from_checkpoint(cls, checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    @torch.no_grad()
    def to_onnx(self, file_path: str | Path | IO[bytes], input_sample: Any = None, **kwargs: Any) -> Any:
        """Export ``forward`` to ONNX.

        Args:
            file_path: the file to write.
            input_sample: example arguments of ``forward``; ``example_input_array`` if None.
            **kwargs: passed to ``torch.onnx.export``.
        """
        for package in ("onnx", "onnxscript"):
            if not messages.is_installed(package):
                raise ModuleNotFoundError(messages.missing(f"{type(self).__name__}.to_onnx", package))
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise ValueError(
                f"{type(self).__name__}.to_onnx needs an example input. Pass input_sample=, or set "
                "self.example_input_array."
            )
        arguments = move(sample if isinstance(sample, tuple) else (sample,), self.device)
        family, modes = self._family(), [(module, module.training) for module in self.modules()]
        self.trainer = None  # the exporter visits all attributes
        try:
            self.eval()
            return torch.onnx.export(self, arguments, file_path, **kwargs)  # type: ignore[arg-type]
        finally:
            self._attach(family)
            for module, training in modes:
                module.training = training


def _by_name(options: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of ``self.log_dict`` by name, including those given by position."""
    most = len(_LOG_DICT_OPTIONS)
    if len(options) > most:
        raise TypeError(
            f"self.log_dict got {len(options) + 1} positional arguments, but takes at most {most + 1}: the dict, "
            f"{messages.names(_LOG_DICT_OPTIONS, last='and')}. Pass options by name."
        )
    named = dict(zip(_LOG_DICT_OPTIONS, options, strict=False))
    for name in named:
        if name in kwargs:
            raise TypeError(f"self.log_dict got {name!r} twice, by position and by name. Pass it once, by name.")
    return named | dict(kwargs)
