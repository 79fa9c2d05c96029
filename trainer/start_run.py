"""Prepare a run before its loop begins: module, data, hooks, device, optimizers and checkpoint."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import messages
from ..callbacks.base import Callback
from ..callbacks.checkpoint_retention import Checkpoint
from ..checkpoint import manifest, objects
from ..checkpoint.atomic_write import remove_temporaries
from ..checkpoint.find import SearchFolders, highest_sequence, newest_checkpoint
from ..checkpoint.hyperparameters import plain_config
from ..checkpoint.logger_positions import say_where, take_over
from ..checkpoint.read import read
from ..checkpoint.sharded_folder import together
from ..checkpoint.storage import is_remote, location
from ..data.datamodule import DataModule
from ..doctor.script_options import Plan
from ..processes.cluster_environment import is_requeued
from ..strategies.compile_networks import compile_in_place, scope_of, uncompiled
from ..strategies.precision.base import parameters as parameters_of
from ..torch_private import is_initialized
from . import profiling
from .bind_steps import check_step, takes_iterator
from .checkpoint_contents import restore_model, restore_training
from .compiled_step_checks import check_module
from .data_source import DataSource
from .default_callbacks import check_state_keys, order, refuse_switched_off
from .hooks import HookTable, method_of, overridden, own_methods
from .joint_optimizer import check_together
from .metrics import MetricStore
from .module import TrainingModule
from .optimizers import SchedulerConfig, configure
from .phases import SETUP
from .state import Pending
from .step import clear_gradients

if TYPE_CHECKING:
    from .arguments import Request
    from .resume import Resumed
    from .run import Run
    from .trainer import Trainer

_DOING = {"fit": "Training", "validate": "Validating", "test": "Testing", "predict": "Predicting"}


def attach(run: Run, request: Request) -> Resumed | None:
    """Prepare a run, in the order shown in ``callbacks/base.py``; return the state to resume from, or None."""
    run.child_data = None
    module, reused = find_module(run, request)
    path = asked_path(run, request, reused)
    run.strategy.progress = run.state.where
    run.strategy.setup_environment()
    run.strategy.begin_run(run.state)
    messages.set_rank(run.strategy.global_rank)
    run.shared_log_dir = None
    told = run.strategy.told_at_start()
    if told and not request.again and not request.trial:
        messages.info_once(f"{_DOING[request.fn]} {told}.")
    connect(run, request, module)
    path = settle_folders(run, request, path)
    profiling.setup(run, request.fn)
    prepare_data(run)
    run.metrics.enter(SETUP)
    for hook in run.hooks.setup:
        hook(request.fn)
    run.strategy.barrier("setup")
    configure_model = overridden(module, "configure_model", TrainingModule)
    if configure_model is not None:
        with run.strategy.init_context():
            configure_model()
    module.trainer = run.trainer  # again, for modules that these hooks created
    bind_hooks(run)
    run.source.require("train" if request.fn == "fit" else request.fn)
    checkpoint = read_checkpoint(run, request, path)
    if request.fn == "fit":
        run.strategy.settle_batch_norm(module, run.trainer.sync_batchnorm)
        synchronize_layers(run)
    run.model = run.strategy.setup_module(module) if run.strategy.places(module) else module
    scope = scope_of(run.trainer.compile)
    if scope == "networks":
        compile_in_place(module, run.trainer.compile)
    elif scope is not None and request.fn == "fit":
        check_module(run)
    resumed = None
    if request.fn == "fit":
        resumed = start_fit(run, checkpoint, request.restore)
    else:
        if checkpoint is not None:
            restore_model(run, checkpoint, ("model",))
        run.strategy.settle_weights(module)
        run.optimizers, run.lr_scheduler_configs = connected(run, run.optimizers, run.lr_scheduler_configs)
    module.zero_grad()
    run.trainer.profiler.attach(run.trainer)
    return resumed


def synchronize_layers(run: Run) -> None:
    """If the Trainer has a LayerSync, let it change the module's layers; the end of the run reverts the change."""
    plugin, module = run.trainer.layer_sync, run.module
    if plugin is not None and run.strategy.num_data_ranks > 1:
        changed = plugin.apply(module)
        if changed is not module:
            raise TypeError(
                f"{type(plugin).__name__}.apply returned {messages.a(changed)} instead of the module. Change the "
                "layers in place, and return the module itself."
            )
        run.layer_sync = plugin


def start_fit(run: Run, checkpoint: dict[str, Any] | None, parts: tuple[str, ...]) -> Resumed | None:
    """Set up weights and optimizers, call ``on_fit_start``, log hyperparameters and restore the checkpoint."""
    settle_max_epochs(run.trainer)
    run.resumes = checkpoint is not None and parts != ("model",)
    if checkpoint is not None:
        restore_model(run, checkpoint, parts)
    run.strategy.settle_weights(run.module)
    run.model = run.strategy.wrap_for_training(run.model)
    setup_optimizers(run)
    leave_no_window(run)
    if checkpoint is None and run.state.batches == 0:
        run.state.shuffle_seed = run.strategy.broadcast(torch.initial_seed() % 2**63)
    for hook in run.hooks.on_fit_start:
        hook()
    if run.strategy.is_global_zero:
        say_where("Logging to", run.trainer.loggers)
    log_hyperparameters(run)
    resumed = None if checkpoint is None else restore_training(run, checkpoint, parts)
    if resumed is not None:
        say_position(run, parts)
    return resumed


def settle_max_epochs(trainer: Trainer) -> None:
    """Choose ``max_epochs`` if it is None: 1000, or -1 (no limit) if something else limits the training."""
    if trainer.max_epochs is not None:
        return
    timed = any(callback.limits_training for callback in trainer.callbacks)
    if trainer.max_steps == -1 and not timed:
        messages.warn_once(
            "None of max_epochs, max_steps and max_time is set, so training stops after 1000 epochs. Set one of them, "
            "or max_epochs=-1 for no limit."
        )
    trainer.max_epochs = -1 if trainer.max_steps != -1 or timed else 1000


def say_position(run: Run, parts: tuple[str, ...]) -> None:
    """Report where a fit that loaded a checkpoint starts, and which parts it restored."""
    state, path = run.state, messages.path(run.ckpt_path)
    where = f"epoch {state.epoch + state.epoch_done}, step {state.global_step}"
    if "loops" in parts:
        messages.info(f"Continuing at {where} from {path}")
    else:
        messages.info(f"Starting at {where} with {messages.names(parts, last='and')} from {path}")


def leave_no_window(run: Run) -> None:
    """Drop an accumulation window that a failed fit left behind."""
    run.state.pending = Pending.NOTHING
    run.state.drop_window()
    for optimizer in run.optimizers:
        clear_gradients(optimizer)


def find_module(run: Run, request: Request) -> tuple[TrainingModule, bool]:
    """Return the module to run, and whether it was taken from the previous run because none was passed."""
    module = _unwrapped(uncompiled(request.module))
    entry = "The Tuner" if request.trial else f"Trainer.{request.fn}()"
    if module is None:
        if run.module is None or request.fn == "fit":
            raise TypeError(f"{entry} needs a module. Pass it as the first argument.")
        return run.module, True
    if not isinstance(module, TrainingModule):
        hint = ""
        if any(isinstance(given, TrainingModule) for given in request.loaders.values()):
            hint = " Pass the module first, then the loaders."
        if isinstance(module, type) and issubclass(module, TrainingModule):
            hint = f" Did you mean {module.__name__}()?"
        elif isinstance(module, nn.Module):
            hint = " Make it an attribute of a TrainingModule that defines training_step and configure_optimizers."
        got = f"the class {module.__name__}" if isinstance(module, type) else messages.a(module)
        raise TypeError(f"{entry} got {got} as its module, but needs a TrainingModule object.{hint}")
    if not is_initialized(module):
        raise TypeError(
            f"{type(module).__name__}.__init__ did not call super().__init__(), so the module is not initialized. "
            "Call super().__init__() first."
        )
    return module, False


def _unwrapped(module: Any) -> Any:
    """Return the module inside DataParallel or DistributedDataParallel, so that it is not wrapped twice."""
    if not isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module
    messages.warn_once(
        f"The module was passed wrapped in {type(module).__name__}. The wrapper was removed, because the strategy "
        "wraps the module itself. Pass the bare module and use Trainer(strategy='ddp', devices=...)."
    )
    return module.module


def connect(run: Run, request: Request, module: TrainingModule) -> None:
    """Connect the run, module, data and callbacks, and check them before any of their code runs."""
    loaders = attach_parts(run, request, module)
    check_state_keys(run.trainer.callbacks)
    check_steps(run, request.fn)
    bind_hooks(run)
    if request.fn == "fit" and run.trainer.reload_dataloaders_every_n_epochs and loaders["train"] is not None:
        messages.warn_once(
            f"Trainer(reload_dataloaders_every_n_epochs={run.trainer.reload_dataloaders_every_n_epochs}) has no "
            "effect on loaders that were passed to fit. Define train_dataloader() on the module or a DataModule "
            "instead."
        )


def attach_parts(run: Run, request: Request, module: TrainingModule) -> dict[str, Any]:
    """Attach the module, data and callbacks to the trainer; return the loaders, without the DataModule."""
    loaders = dict(request.loaders)
    datamodule = request.datamodule
    for stage, given in loaders.items():
        if isinstance(given, DataModule):
            if datamodule is not None:
                raise ValueError(f"Trainer.{request.fn}() got two DataModules. Pass only one, as datamodule=.")
            datamodule, loaders[stage] = given, None
    if datamodule is not None and any(given is not None for given in loaders.values()):
        raise ValueError(
            f"Trainer.{request.fn}() got loaders and a DataModule, so it is not clear which to use. Pass only one of "
            "them."
        )
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise TypeError(f"Trainer.{request.fn}(datamodule=...) got {messages.a(datamodule)}. Pass a DataModule object.")
    run.module = run.model = module
    run.datamodule = datamodule
    run.source = DataSource(run, loaders)
    send = None if run.trainer.barebones else run.send_metrics
    run.metrics = MetricStore(run.state, run.strategy, send)
    module.trainer = run.trainer
    if datamodule is not None:
        datamodule.trainer = run.trainer
    take_module_callbacks(run, module)
    return loaders


def hold(run: Run, module: TrainingModule) -> None:
    """Attach a module outside of a run, so that it can be saved."""
    run.module = run.model = module
    module.trainer = run.trainer
    bind_hooks(run)


def bind_hooks(run: Run) -> None:
    """Bind the hooks. Called again after ``setup`` and ``configure_model``, which may add hooks."""
    run.hooks = HookTable(run.trainer, run.module, run.trainer.callbacks, run.datamodule)
    for callback in run.trainer.callbacks:
        object.__setattr__(callback, "_logs_in", run.module)  # a callback that is a network would take it as a part


def end_logging(run: Run) -> None:
    """Make ``self.log`` do nothing after the run has ended, in the module and in callbacks."""
    if run.module is not None:
        run.module._end_run()
    for callback in run.trainer.callbacks:
        object.__setattr__(callback, "_logs_in", None)


def take_module_callbacks(run: Run, module: TrainingModule) -> None:
    """Add the callbacks from ``configure_callbacks``; each replaces the Trainer's callbacks of the same type.

    A second run with the same module keeps them, because a ``ModelCheckpoint`` among them remembers its best file. When
    another module runs, they are removed, and the callbacks that they replaced are put back.
    """
    if run.trainer.brought_callbacks is not None:
        owner, before, added = run.trainer.brought_callbacks
        if owner is module:
            return
        kept = [c for c in run.trainer.callbacks if not any(c is one for one in added)]
        absent = [c for c in before if not any(c is one for one in run.trainer.callbacks)]
        run.trainer.callbacks = order([*kept, *absent])
    theirs = method_of(module, "configure_callbacks", TrainingModule)()
    theirs = [theirs] if isinstance(theirs, Callback) else list(theirs or [])
    for callback in theirs:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"{type(module).__name__}.configure_callbacks() returned {callback!r}, which is not a Callback. "
                "Return a list of Callback objects."
            )
    refuse_switched_off(theirs, run.trainer)
    types = {type(callback) for callback in theirs}
    replaced = [c for c in run.trainer.callbacks if type(c) in types]
    run.trainer.brought_callbacks = (module, replaced, theirs) if theirs else None
    run.trainer.callbacks = order([c for c in run.trainer.callbacks if type(c) not in types] + theirs)


def check_steps(run: Run, fn: str) -> None:
    """Raise if the module lacks a method that this entry point needs, or if its settings contradict each other."""
    module = run.module
    owner = type(module).__name__
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(fn)
    if needed is not None and overridden(module, needed, TrainingModule) is None:
        raise NotImplementedError(
            f"{owner} has no {needed}, so Trainer.{fn}() has nothing to run. Define {needed}(self, batch, batch_idx)."
            f"{misspelled(module, needed)}"
        )
    if fn == "fit" and overridden(module, "configure_optimizers", TrainingModule) is None:
        raise NotImplementedError(
            f"{owner} has no configure_optimizers, so fit cannot change its weights. Define it, for example: "
            f"return torch.optim.AdamW(self.parameters(), lr=1e-3).{misspelled(module, 'configure_optimizers')}"
        )
    if fn == "predict" and overridden(module, "predict_step", TrainingModule) is None and not has_forward(module):
        raise NotImplementedError(
            f"{owner} has neither predict_step nor forward, so Trainer.predict() has nothing to run. Define "
            "predict_step(self, batch, batch_idx)."
        )
    for step in {"fit": ("training_step", "validation_step"), "predict": ("predict_step",)}.get(fn, (needed or "",)):
        if overridden(module, step, TrainingModule) is not None:
            check_step(module, step)
    if fn == "fit" and not module.automatic_optimization:
        for name, neutral in (("accumulate_grad_batches", 1), ("gradient_clip_val", None)):
            value = getattr(run.trainer, name)
            if value != neutral:
                raise ValueError(
                    f"Trainer({name}={value!r}) has no effect under manual optimization, which {owner} uses. Leave "
                    f"out {name}, and clip or accumulate gradients in training_step (call self.clip_gradients, or step "
                    "every n batches)."
                )
    if fn == "fit" and takes_iterator(module.training_step) and run.trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={run.trainer.accumulate_grad_batches}) does not work with "
            "training_step(dataloader_iter), because the trainer does not see how many batches the step fetches. Use "
            "training_step(batch, batch_idx), or accumulate inside the step."
        )


def has_forward(module: TrainingModule) -> bool:
    """Return True if the module defines ``forward``."""
    return overridden(module, "forward", nn.Module) is not None


def misspelled(module: TrainingModule, name: str) -> str:
    """Return a hint about a method of the module that may be a misspelling of ``name``."""
    close = difflib.get_close_matches(name, own_methods(module, TrainingModule), n=1, cutoff=0.75)
    return f" Did you mean {close[0]}? Rename it to {name}." if close else ""


def prepare_data(run: Run) -> None:
    """Call each ``prepare_data`` hook on one process per node or, if the hook's owner requests it, on rank 0 only."""
    for per_node, hook in run.hooks.prepare_data:
        if (run.strategy.local_rank if per_node else run.strategy.global_rank) == 0:
            hook()
    run.strategy.barrier("prepare_data")


def asked_path(run: Run, request: Request, reused: bool) -> Any:
    """Return the checkpoint to load, as passed or set on the trainer.

    If the module is ``reused`` from the previous run, an evaluation loads that run's best checkpoint by default. In a
    job that SLURM requeued, a fit uses ``"auto"``. A fit that ``paceline doctor`` examines loads no checkpoint, because
    a resumed fit may have nothing left to train.

    ``"best"`` is resolved here, before the callbacks change. ``"last"`` and ``"auto"`` are resolved later, when it is
    known where this run's callbacks save.
    """
    if request.trial or (request.fn == "fit" and Plan.found() is not None):
        return None
    told = None if request.again else run.trainer.asked_ckpt_path
    asked = request.ckpt_path if told is None else told
    if asked is None and request.fn == "fit" and is_requeued():
        asked = "auto"
    if asked in ("last", "auto"):
        return asked
    if asked not in (None, "best"):
        return location(asked)
    if asked is None and (not reused or request.fn == "fit"):
        return None
    best = next((c.best_model_path for c in run.trainer.checkpoint_callbacks if c.best_model_path), None)
    if best is None and asked == "best":
        raise ValueError(
            f"Trainer.{request.fn}(ckpt_path='best') found no best checkpoint, because none has been saved yet. Train "
            "with a ModelCheckpoint (enable_checkpointing=True) first, or pass the path of a file."
        )
    return None if best is None else location(best)


def settle_folders(run: Run, request: Request, path: Any) -> Any:
    """Choose the loggers' folders before they are first used; a resumed fit continues in the saved run's folders.

    Return the path of the checkpoint to resume from, or None.
    """
    if request.fn == "fit" and path is not None and run.trainer.loggers:
        path = found_on_rank_0(run, request, path)
        if path is not None and "loops" in request.restore and not request.again:
            take_over(run, path)
    if run.strategy.world_size > 1:
        run.shared_log_dir = run.strategy.broadcast(run.trainer.log_dir)
    return path


def found_on_rank_0(run: Run, request: Request, path: Any) -> Any:
    """Return the checkpoint that ``path`` refers to on rank 0, because other ranks may see different files."""

    def find() -> Any:
        if path not in ("last", "auto") or not run.strategy.is_global_zero:
            return path
        newest = newest_checkpoint(path, request.fn, search_folders(run))
        if newest is not None and request.fn == "fit":
            if run.folder_locks.take([str(newest.parent)], alone=True):
                remove_temporaries(newest.parent)
            run.newest = newest
        return newest

    return run.strategy.broadcast(together(run.strategy, "found", find))


def search_folders(run: Run) -> SearchFolders:
    """Return the folders that may contain checkpoints of this run or of earlier runs."""
    root, loggers = run.trainer.default_root_dir, run.trainer.loggers
    savers = [(c.dirpath, c.filename) for c in run.trainer.callbacks if isinstance(c, Checkpoint)]
    return SearchFolders.of(savers, loggers[0].run_dirs() if loggers and not is_remote(root) else [root])


def read_checkpoint(run: Run, request: Request, path: Any) -> dict[str, Any] | None:
    """Read the checkpoint to load; return None if there is none."""
    path = run.ckpt_path = found_on_rank_0(run, request, path)
    if request.fn == "fit" and run.strategy.is_global_zero:
        run.saves = max(run.saves, highest_sequence(search_folders(run)))
    if path is None:
        return None
    if request.fn != "fit":
        best = request.module is None and request.ckpt_path is None and run.trainer.asked_ckpt_path is None
        uses = "without a module uses the best checkpoint of the last fit:" if best else "uses the checkpoint"
        messages.info(f"{request.fn}() {uses} {messages.path(path)}")
    if manifest.is_folder(path):
        checkpoint = read(path, strategy=run.strategy, trusted=objects.is_trusted(request.weights_only))
    else:
        given = {} if request.weights_only is None else {"weights_only": request.weights_only}
        checkpoint = run.trainer.checkpoint_io.load_checkpoint(str(path), **given)
    apart = [] if objects.is_trusted(request.weights_only) else objects.names(objects.types(checkpoint))
    if apart:
        messages.info(
            f"{messages.path(path)} also contains objects ({messages.names(apart, last='and')}), which were not "
            "loaded, because loading them can run code that the file specifies. To load them, call "
            f"{request.fn}(weights_only=False)."
        )
    if request.fn == "fit":
        facts = checkpoint.get("paceline", {}).get("manifest", {})
        run.saves = max(run.saves, facts.get("sequence", 0))
    return checkpoint


def setup_optimizers(run: Run) -> None:
    """Create optimizers and schedulers."""
    module = run.module
    optimizers, configs = profiling.by_module(run, "configure_optimizers", configure)(module)
    own = {id(parameter) for parameter in module.parameters()}
    if optimizers and not any(id(p) in own for optimizer in optimizers for p in parameters_of(optimizer)):
        messages.warn_once(
            f"{type(module).__name__}.configure_optimizers() returned optimizers for parameters that do not belong to "
            "the module, so its weights will not change. Build them from self.parameters(), or assign the trained "
            "network to an attribute."
        )
    optimizers, run.lr_scheduler_configs = connected(run, optimizers, configs)
    run.optimizers = run.strategy.setup_optimizers(optimizers)


def connected(
    run: Run, optimizers: list[Optimizer], configs: list[SchedulerConfig]
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Pass the optimizers and schedulers through the user's ``Precision.connect``, if there is one, and return them."""
    precision = run.strategy.precision
    if "connect" not in precision.overrides:
        return optimizers, configs
    owner, given = f"{type(precision).__name__}.connect", run.model
    returned: Any = precision.connect(given, list(optimizers), list(configs))
    if not (
        isinstance(returned, (list, tuple))
        and len(returned) == 3
        and _all_are(Optimizer, returned[1])
        and _all_are(SchedulerConfig, returned[2])
    ):
        raise TypeError(
            f"{owner} returned {_types(returned)}, but a run needs the module, a list of its optimizers and a list of "
            "its schedulers. Return (model, optimizers, lr_schedulers)."
        )
    model, optimizers, configs = returned
    if model is not given:
        raise TypeError(
            f"{owner} returned a different module than the one it received ({type(given).__name__}). Change the module "
            "in place, or override convert_module."
        )
    if run.module.automatic_optimization:
        check_together(run.module, optimizers, f"{owner} returned")
    return list(optimizers), list(configs)


def _all_are(kind: type, values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)


def _types(value: Any) -> str:
    """Return the types of a value's parts, such as ``(Net, [SGD], None)``."""
    if isinstance(value, (list, tuple)):
        parts = ", ".join(map(_types, value))
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    return "None" if value is None else type(value).__name__


def log_hyperparameters(run: Run) -> None:
    """Send the hyperparameters of the module and the DataModule, and the model's graph, to the loggers."""
    if not run.trainer.loggers or not run.trainer.enable_autolog_hparams or not run.strategy.is_global_zero:
        return
    params: dict[str, Any] = {}
    for owner in (run.datamodule, run.module):
        if owner is None or not getattr(owner, "_log_hyperparams", False):
            continue
        for key, value in plain_config(owner.hparams_initial).items():
            if key == "_class_path":  # the class that a command line created; both owners have one
                continue
            if key in params and params[key] is not value and str(params[key]) != str(value):
                raise RuntimeError(
                    f"The module and the DataModule both saved a hyperparameter {key!r}, with the values {value!r} "
                    f"and {params[key]!r}. Rename one of them, or exclude it with "
                    f"save_hyperparameters(ignore=[{key!r}])."
                )
            params[key] = value
    for logger in run.trainer.loggers:
        if params:
            logger.log_hyperparams(params)
        logger.log_graph(run.module)
