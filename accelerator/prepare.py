"""The models, optimizers, schedulers and loaders that ``accelerator.prepare`` has prepared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .. import messages
from ..checkpoint.rank_files import on_cpu
from ..checkpoint.restore import restore_precision
from ..strategies.base import Strategy
from ..strategies.precision.base import parameters
from ..torch_private import compiler_of
from .errors import Errors
from .loaders import PreparedLoader, prepare_data_loader
from .models import PreparedModel, is_prepared, migrated, restore, unwrapped
from .optimizers import AcceleratedOptimizer
from .schedulers import AcceleratedScheduler

if TYPE_CHECKING:
    from ..doctor.own_loop import OwnLoop
    from .accumulation import GradientState
    from .loaders import DataLoaderConfiguration

_PREPARED = (PreparedLoader, AcceleratedOptimizer, AcceleratedScheduler)


def is_scheduler(value: Any) -> bool:
    """Return True if the value is a torch scheduler or has a scheduler's methods."""
    if isinstance(value, (type, nn.Module, Optimizer)):
        return False
    return isinstance(value, LRScheduler) or all(
        callable(getattr(value, name, None)) for name in ("step", "state_dict", "load_state_dict", "get_last_lr")
    )


@dataclass(eq=False)
class Prepared:
    """The models, optimizers, schedulers and loaders of one Accelerator.

    Attributes:
        strategy: the Accelerator's strategy; each model gets its own copy of the strategy.
        gradient_state: tells optimizers and schedulers when to step.
        shards: whether the strategy replaces parameters with shards.
        compiler: function that takes a module and returns the function that compiles the module's forward, or None if
            the module is not compiled.
        clip_norm: maximum gradient norm; each optimizer step clips larger gradients to it. None means no clipping.
        device_placement: whether models and batches are moved to the device.
        placements: models with their strategies, keyed by the module's ID, in order of preparation.
        optimizers: the optimizers that saved states contain.
        alive: every prepared optimizer that still exists, keyed by its ID, including those that saved states leave out.
        unsaved: IDs of the modules that saved states leave out.
        rng_types: RNG states that process 0 broadcasts to all processes when a pass over a loader begins.
        joins: whether processes may have different numbers of batches; see :meth:`join_uneven_inputs`.
        seed: shuffling seed, the same on all ranks; None until the first loader is prepared.
        loader_kind: class of the prepared loaders.
        optimizer_kind: class of the prepared optimizers.
        scheduler_kind: class of the prepared schedulers.
        errors: explains errors in the models and optimizers.
    """

    strategy: Strategy
    gradient_state: GradientState
    dataloader_config: DataLoaderConfiguration
    shards: bool
    compiler: Callable[[nn.Module], Callable[[Any], Any] | None]
    clip_norm: float | None
    device_placement: bool
    output_dtype: str
    step_scheduler_with_optimizer: bool
    scheduler_steps: str
    rng_types: Sequence[str]
    placements: dict[int, PreparedModel] = field(default_factory=dict)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    alive: weakref.WeakValueDictionary[int, AcceleratedOptimizer] = field(default_factory=weakref.WeakValueDictionary)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    seed: int | None = None
    loader_kind: Callable[..., PreparedLoader] = PreparedLoader
    optimizer_kind: Callable[..., AcceleratedOptimizer] = AcceleratedOptimizer
    scheduler_kind: Callable[..., AcceleratedScheduler] = AcceleratedScheduler
    unsaved: set[int] = field(default_factory=set)
    joins: bool = False

    def __post_init__(self) -> None:
        self._connect()

    def _connect(self) -> None:
        """Give prepared objects weak references to this object's methods; see :class:`.errors.Errors`."""
        self.errors = Errors(self)
        settle_buffers = weakref.WeakMethod(self._settle_buffers)

        def on_pass(loader: PreparedLoader) -> None:
            settle = settle_buffers()
            if settle is not None:
                settle(loader)

        self.gradient_state.on_pass = on_pass
        self.gradient_state.explain = partial(self.errors.explain, None)
        for placement in self.placements.values():
            placement.explain_with(self.errors.explain)
        for optimizer in self.live_optimizers:
            optimizer.explain = partial(self.errors.explain, optimizer.placement)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state, including models, gradients waiting for an optimizer step, and loader positions."""
        return vars(self) | {
            "errors": None,
            "alive": None,
            "placements": list(self.placements.values()),
            "positions": [loader.state_dict() for loader in self.loaders],
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        positions = vars(self).pop("positions")
        self.placements = {id(one.module): one for one in state["placements"]}
        self.alive = weakref.WeakValueDictionary({id(one): one for one in self.optimizers})
        self.strategy.setup_environment()
        for loader, position in zip(self.loaders, positions, strict=True):
            loader.gradient_state = self.gradient_state
            loader.load_state_dict(position)
        self._connect()

    # ---- prepared objects -----------------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The models in order of preparation."""
        return [one.module for one in self.placements.values()]

    @property
    def saved_models(self) -> list[nn.Module]:
        """The models that saved states contain."""
        return [module for module in self.models if id(module) not in self.unsaved]

    def leave_out(self, model: nn.Module) -> None:
        """Leave a model out of saved states; if no prepared optimizer trains the model, forget it."""
        placement = self.placements[id(model)]
        if any(placement in one.placements for one in self.live_optimizers):
            self.unsaved.add(id(model))
        else:
            del self.placements[id(model)]

    @property
    def live_optimizers(self) -> list[AcceleratedOptimizer]:
        """The prepared optimizers that still exist, in order of preparation."""
        return list(self.alive.values())

    @property
    def trained(self) -> list[PreparedModel]:
        """The models that were not prepared for evaluation only."""
        return [one for one in self.placements.values() if not one.frozen]

    def placement(self, model: Any, asked: str) -> PreparedModel:
        """Return the :class:`PreparedModel` of a model; ``asked`` is the calling method's name."""
        placement = self.placements.get(id(unwrapped(model)))
        if placement is None:
            raise ValueError(
                f"accelerator.{asked} got a {type(model).__name__} that was not prepared. Prepare it first with "
                "model = accelerator.prepare(model), and pass the model that this call returns."
            )
        return placement

    def clear(self) -> None:
        """Drop all objects, and restore the original forward of each model that was not prepared for evaluation only.

        Models prepared for evaluation stay usable, because some trainers free memory before training and evaluate
        later.
        """
        for placement in self.trained:
            restore(placement.module)
            placement.strategy.teardown()
        for kept in (self.placements, self.unsaved, self.optimizers, self.alive, self.schedulers, self.loaders):
            kept.clear()

    def _settle_buffers(self, loader: PreparedLoader) -> None:
        """When a pass begins, broadcast rank 0's buffers (those that checkpoints contain) for models in eval mode."""
        if self.joins and loader.ends_anywhere and self.gradient_state.num_steps > 1:
            raise NotImplementedError(
                f"join_uneven_inputs does not support gradient_accumulation_steps={self.gradient_state.num_steps} with "
                f"even_batches=False if the dataset ({type(loader.dataset).__name__}) has no length, because the "
                "processes cannot know where a window ends on another process. Give the dataset a __len__, or leave "
                "out even_batches=False: each sample then counts once, too."
            )
        for model in self.trained:
            model.strategy.check_parameters(model.module)
            if not model.module.training:
                model.strategy.before_evaluation(model.module)

    def observe(self, observers: Sequence[OwnLoop]) -> None:
        """Set the observers that time everything that is or will be prepared."""
        self.gradient_state.observers = observers
        for one in (*self.placements.values(), *self.live_optimizers):
            one.observe(observers)

    # ---- prepare ---------------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], placed: Sequence[bool | None]) -> list[Any]:
        """Prepare objects; see :meth:`.accelerator.Accelerator.prepare`."""
        found: list[Any] = list(objects)
        for index, value in enumerate(objects):
            if isinstance(value, GradScaler):
                raise ValueError(_SCALER)
            if isinstance(value, nn.Module) and not self._knows(value):
                found[index] = self._add_model(value, placed[index]).module
        for index, value in enumerate(objects):
            if isinstance(value, Optimizer) and not isinstance(value, _PREPARED):
                found[index] = self._add_optimizer(value)
        self._bind()
        with_model = any(isinstance(value, nn.Module) for value in objects)
        for index, value in enumerate(objects):
            if isinstance(value, DataLoader) and not isinstance(value, _PREPARED):
                found[index] = self.loader(value, placed[index], with_model)
            elif not isinstance(value, _PREPARED) and is_scheduler(value):
                found[index] = self.scheduler(value)
        return found

    def _bind(self) -> None:
        """Bind the models that are new or have new optimizers."""
        for model in [one for one in self.placements.values() if not one.bound]:
            own = [one.optimizer for one in self.live_optimizers if one.placement is model]
            if own and not model.frozen:
                model.strategy.setup_optimizers(own)
            model.bind(self.gradient_state.observers)
            self.gradient_state.models_changed()
        for observer in self.gradient_state.observers:
            observer.measure_communication()
        self.strategy.precision.setup_optimizers([one.optimizer for one in self.live_optimizers])

    def _knows(self, module: nn.Module) -> bool:
        return is_prepared(module) or id(module) in self.placements

    def model(self, model: nn.Module, place: bool | None, evaluation: bool) -> nn.Module:
        """Prepare one model; see :meth:`.accelerator.Accelerator.prepare_model`."""
        if self._knows(model):
            return model
        prepared = self._add_model(model, place, evaluation)
        self._bind()
        return prepared.module

    def _add_model(self, model: nn.Module, place: bool | None, evaluation: bool = False) -> PreparedModel:
        """Move a model to its device, and shard or wrap it. Its forward is bound once its optimizers are known."""
        compiler = compiler_of(model)
        model = migrated(model)
        if self.shards:
            self._refuse_shared(model)
        strategy = self.strategy.for_another_module()
        strategy.settle_batch_norm(model, False)
        compile_with = self.compiler if compiler is None else partial(_given, compiler)
        prepared = PreparedModel(model, strategy, evaluation, self.output_dtype, compile_with, self.errors.explain)
        prepared.set_up(self.device_placement if place is None else place)
        self.placements[id(model)] = prepared
        for optimizer in self.live_optimizers:
            if prepared.adopt(optimizer.optimizer):
                optimizer.belongs_to([*optimizer.placements, prepared])
                optimizer.explain = partial(self.errors.explain, optimizer.placement)
        return prepared

    def _refuse_shared(self, model: nn.Module) -> None:
        """Raise an error if a model shares parameters with a model whose parameters sharding has replaced."""
        for other in self.placements.values():
            shared = [name for name, parameter in model.named_parameters() if other.current(parameter) is not None]
            if shared:
                raise ValueError(
                    f"accelerator.prepare got {messages.a(model)} that shares {shared[0]} with the prepared "
                    f"{type(other.module).__name__}. {type(other.strategy).__name__} shards each model separately, so "
                    "the two models would train separate copies of that parameter. Put both models in one nn.Module "
                    "and prepare that module, or use strategy='ddp'."
                )

    def optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Prepare one optimizer, which then steps only at the end of an accumulation window."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        wrapper = self._add_optimizer(optimizer)
        self._bind()
        return wrapper

    def _add_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Wrap an optimizer so that it steps, through its model's strategy, only at the end of a window."""
        old, before = set(optimizer.state), optimizer.state_dict() if optimizer.state and self.shards else None
        owners = [model for model in self.placements.values() if model.adopt(optimizer)]
        placement = owners[0] if owners else None
        present = set(parameters(optimizer))
        if before is not None and placement is not None and old - present:  # state that belongs to replaced parameters
            optimizer.state.clear()
            placement.strategy.load_optimizer_state(placement.module, optimizer, before)
        if self.shards:
            _refuse_other_owners(optimizer, owners, self.strategy)
        if placement is None:
            self.strategy.setup_optimizers([optimizer])
        else:
            placement.bound = False
        wrapper = self.optimizer_kind(optimizer, self.strategy, self.gradient_state, owners, self.clip_norm)
        wrapper.explain = partial(self.errors.explain, placement)
        wrapper.observe(self.gradient_state.observers)
        self.optimizers.append(wrapper)
        self.alive[id(wrapper)] = wrapper
        self.gradient_state.trains = True
        return wrapper

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler, which advances with its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        inner = getattr(scheduler, "optimizer", None)
        owners = [one for one in self.live_optimizers if one is inner or one.optimizer is inner]
        if inner is not None and not owners:
            messages.warn_once(
                f"{type(scheduler).__name__} was prepared, but its optimizer was not, so the scheduler advances with "
                "all prepared optimizers. Pass its optimizer to prepare as well."
            )
        wrapper = self.scheduler_kind(
            scheduler,
            owners or self.live_optimizers,
            self.gradient_state,
            self.step_scheduler_with_optimizer,
            self._times,
        )
        self.schedulers.append(wrapper)
        return wrapper

    @property
    def _times(self) -> int:
        """Number of steps by which each ``scheduler.step()`` advances a schedule."""
        alone = not self.step_scheduler_with_optimizer or self.dataloader_config.split_batches
        return 1 if alone or self.scheduler_steps == "per_update" else self.strategy.num_data_ranks

    def loader(self, loader: DataLoader[Any], place: bool | None, with_model: bool = False) -> PreparedLoader:
        """Prepare one loader, which then yields this process's batches on the device.

        With ``sp_size``, a loader that is prepared together with a model yields this process's part of each sequence.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        if self.seed is None:  # the seed of set_seed, if it was called
            self.seed = self.strategy.broadcast(torch.initial_seed() % 2**63)
        for observer in self.gradient_state.observers:
            loader = observer.loader_to_prepare(loader)
        prepared = prepare_data_loader(
            loader,
            self.strategy,
            self.dataloader_config,
            self.loader_kind,
            gradient_state=self.gradient_state,
            seed=self.seed,
            device_placement=self.device_placement if place is None else place,
            rng_types=self.rng_types,
            cut=self.strategy.batch_cutter() if with_model else None,
        )
        self.loaders.append(prepared)
        return prepared

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Context manager inside which processes may have different numbers of batches, on any device.

        A process that runs out of batches keeps taking part in gradient synchronization until all processes are done.
        Then every process gets the model, its optimizers, their schedules and the loss scale from a process that
        trained longest. Processes that have run out of batches take part only in DistributedDataParallel's own
        communication, so the loop must not call ``gather`` or similar methods, or ``backward(num_items=...)``.

        Args:
            joinables: prepared models to train in this context, and optimizers that communicate, such as
                ZeroRedundancyOptimizer.
            even_batches: if False, prepared loaders yield every sample once, so some processes may get one batch
                fewer. If True, all processes get the same number of batches, and nothing is joined. If None, each
                loader keeps its setting.

        Raises:
            ValueError: a model is not prepared.
            NotImplementedError: a model is sharded across processes (FSDP, DeepSpeed, ...), or gradients accumulate
                over the batches of a stream without a length.
        """
        found = [self._joinable(one) for one in joinables]
        shadowed: list[Joinable] = [one for one in found if one is not None]
        before = [(loader, loader.even_batches) for loader in self.loaders]
        if even_batches is not None:
            for loader, _ in before:
                loader.even_batches = even_batches
        uneven = not all(loader.even_batches for loader, _ in before) or not before
        self.joins = bool(shadowed) and uneven and self.strategy.world_size > 1
        try:
            if self.joins:
                end = _End(shadowed[0])
                with Join([*shadowed, end], throw_on_early_termination=False):
                    yield
                models = [self.placements[id(one)] for one in joinables if id(one) in self.placements]
                self._follow_longest(models, end.is_last)
            else:
                yield
        finally:
            self.joins = False
            for loader, even in before:
                loader.even_batches = even

    def _follow_longest(self, models: Sequence[PreparedModel], longest: bool) -> None:
        """Give every process the optimizers, schedules and loss scale of a process that trained longest.

        Args:
            models: the joined models.
            longest: whether no other process trained longer than this one.
        """
        strategy = self.strategy
        ranks = strategy.gather_objects(longest)
        if all(ranks):
            return
        source = ranks.index(True)
        trained = [one for one in self.live_optimizers if any(model in one.placements for model in models)]
        optimizers = [one for one in trained if not isinstance(one.optimizer, Joinable)]  # they follow by themselves
        schedules = [one for one in self.schedulers if any(other in optimizers for other in one.optimizers)]
        for one in optimizers:
            state = strategy.broadcast(on_cpu(one.optimizer.state_dict()), source)
            one.strategy.load_optimizer_state(nn.Module(), one.optimizer, state)
        states = strategy.broadcast([one.state_dict() for one in schedules], source)
        for one, state in zip(schedules, states, strict=True):
            one.load_state_dict(state)
        restore_precision(strategy.precision, strategy.broadcast(strategy.precision.state_dict(), source))

    def _joinable(self, one: Any) -> Joinable | None:
        """Return the object to pass to torch's Join, or None if there is nothing to join."""
        placement = self.placements.get(id(one))
        if placement is not None:
            return placement.strategy.joinable()
        one = getattr(one, "optimizer", one)
        if isinstance(one, Joinable):
            return one
        raise ValueError(
            f"join_uneven_inputs got {messages.a(one)} that this accelerator has not prepared and that torch cannot "
            "join. Pass the models that accelerator.prepare returned."
        )


class _End(Joinable, JoinHook):
    """Tells whether no other process trains longer than this one. Join it together with a model.

    Attributes:
        is_last: whether no other process had batches left when this one ran out of batches.
    """

    def __init__(self, model: Joinable) -> None:
        super().__init__()
        self._model = model
        self.is_last = True

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    def join_device(self) -> torch.device:
        return self._model.join_device

    @property
    def join_process_group(self) -> Any:
        return self._model.join_process_group

    def post_hook(self, is_last_joiner: bool) -> None:
        self.is_last = is_last_joiner


def _given(compiler: Callable[[Any], Any], module: nn.Module) -> Callable[[Any], Any]:
    return compiler


def _refuse_other_owners(optimizer: Optimizer, owners: Sequence[PreparedModel], strategy: Strategy) -> None:
    """Raise an error unless an optimizer has parameters of exactly one prepared model, as sharding requires."""
    if not owners:
        raise ValueError(
            f"{type(optimizer).__name__} has no parameters of a prepared model. {type(strategy).__name__} replaces "
            "parameters when it shards a model, so prepare the model first, or both in one call: "
            "accelerator.prepare(model, optimizer)."
        )
    if len(owners) > 1:
        names = messages.names([type(model.module).__name__ for model in owners], last="and")
        raise ValueError(
            f"{type(optimizer).__name__} has parameters of {len(owners)} prepared models ({names}), and "
            f"{type(strategy).__name__} steps each model separately. Create one optimizer per model, or put the models "
            "in a single module."
        )


_SCALER = (
    "accelerator.prepare got a GradScaler. Under mixed_precision='fp16', Paceline scales losses itself; otherwise, no "
    "scaler is needed. Delete the scaler and all calls to it (scaler.scale, scaler.step, scaler.update), and call "
    "accelerator.backward(loss) and optimizer.step(). Pass scaler settings as "
    "Accelerator(kwargs_handlers=[GradScalerKwargs(...)])."
)
