"""Lightning's ``Fabric``, an adapter for :class:`~...accelerator.accelerator.Accelerator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ... import messages
from ...accelerator.accelerator import Accelerator
from ...accelerator.optimizers import AcceleratedOptimizer
from ...accelerator.process_state import forgotten
from ...checkpoint import single_file
from ...checkpoint.objects import is_trusted
from ...loggers.base import Logger
from ...processes.accelerators import AcceleratorRegistry
from ...processes.device_transfer import move
from ...processes.host_program import find_host, fork_obstacle, start_method_in
from ...processes.seed import seed_everything
from ...strategies.base import Strategy
from ...strategies.choose import choose_strategy
from ...strategies.precision.base import Precision
from ...torch_private import pytree
from ...trainer.plugins import sort_plugins
from .fabric_wrappers import FabricLoader, FabricModule, attach_to_fabric, is_wrapped, original, takes_fabric

_REDUCTIONS = {"avg": "mean", "mean": "mean", "sum": "sum", "min": "min", "max": "max"}


class Fabric:
    """Runs a custom loop on one or several devices, with Lightning's interface.

    Uses an :class:`Accelerator` without accumulation windows, so every ``optimizer.step()`` updates the weights.

    Args:
        accelerator: type of device.
        strategy: a strategy's name, or a Strategy.
        devices: number of devices on this machine, or a list of their indices.
        num_nodes: number of machines.
        precision: a precision's name, or a Precision; if None, ``paceline launch`` and the settings determine it.
        plugins: a Precision or a ClusterEnvironment, or a list of both.
        callbacks: objects with methods that :meth:`call` calls.
        loggers: loggers to which :meth:`log` sends values.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        given = sort_plugins(plugins)
        self._environment = given.environment
        self._strategy = choose_strategy(
            strategy, accelerator, devices, num_nodes, precision, given.precision, environment=given.environment
        )
        self._asked_precision = precision is not None or given.precision is not None
        self._callbacks = _listed(callbacks)
        self._loggers: list[Logger] = _listed(loggers)
        if type(self).run is not Fabric.run:
            vars(self)["run"] = partial(self._launch_and_run, self.run)

    # ---- the processes -----------------------------------------------------------------------------------------------

    @cached_property
    def accelerator_of_loop(self) -> Accelerator:
        """The Accelerator behind this Fabric, created on first use in the process that trains."""
        if self._strategy.launcher is not None:
            self._refuse_unlaunched()
        environment = self._environment
        if environment is not None:
            cluster = environment.cluster(len(self._strategy.device_ids), self._strategy.num_nodes)
            if cluster is not None:
                cluster.export()
        return Accelerator(
            cpu=True if self._strategy.device.type == "cpu" else None,
            mixed_precision=self._strategy.precision if self._asked_precision else None,
            gradient_accumulation_steps=1,
            strategy=self._strategy,
            output_dtype="fp32",
        )

    def _refuse_unlaunched(self) -> NoReturn:
        raise RuntimeError(
            f"Fabric(devices={len(self._strategy.device_ids)}) needs {self._strategy.world_size} processes, which have "
            "not been started yet. Call fabric.launch() before using the Fabric."
        )

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the strategy's processes. In a script, each process runs the entire script.

        Args:
            function: the program, called in each process as ``function(fabric, *args, **kwargs)``. Required in a
                notebook, in pytest and with ``strategy="ddp_spawn"``.
            *args: positional arguments for the function.
            **kwargs: keyword arguments for the function.

        Returns:
            The function's return value on rank 0.
        """
        if function is not None and not takes_fabric(function):
            raise TypeError(
                f"fabric.launch({getattr(function, '__name__', function)}): the function is called with the Fabric as "
                "its first argument, but the function takes no arguments. Define the function as def main(fabric): ..."
            )
        return self._launch(_with_fabric, function, args, kwargs)

    def _launch(self, begin: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        strategy, launcher = self._strategy, self._strategy.launcher
        if launcher is None:
            return begin(self, function, args, kwargs)
        if function is None:
            asked: Any = getattr(strategy, "start_method", "auto")
            host = find_host()
            if start_method_in(host, asked, fork_obstacle(strategy.device.type), strategy.num_nodes) != "popen":
                raise TypeError(
                    f"fabric.launch() needs a function, because {type(strategy).__name__}(start_method={asked!r}) in "
                    f"{host.name} cannot start {strategy.world_size} processes by rerunning the script. Put the code "
                    "into a function such as def main(fabric): ..., and call fabric.launch(main)."
                )
        with forgotten():
            return launcher(begin, self, function, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override this method with the program to run. Calling it starts the processes first."""

    def _launch_and_run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._launch(_run, run, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("accelerator_of_loop", "run")}

    @property
    def accelerator(self) -> Any:
        """The device type, which equals ``"cpu"``, ``"cuda"`` or ``"mps"`` in comparisons."""
        return AcceleratorRegistry[self._strategy.device.type]()

    @property
    def strategy(self) -> Strategy:
        """The strategy, which determines the device of tensors and how processes communicate."""
        return self._strategy

    @property
    def _precision(self) -> Precision:
        return self._strategy.precision

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._strategy.device

    @property
    def global_rank(self) -> int:
        """This process's rank among all processes, 0-based."""
        return self._strategy.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine, 0-based."""
        return self._strategy.local_rank

    @property
    def node_rank(self) -> int:
        """This machine's rank, 0-based."""
        return self._strategy.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._strategy.is_global_zero

    # ---- setup -------------------------------------------------------------------------------------------------------

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Set up a module with its optimizers.

        Args:
            module: the module.
            *optimizers: the optimizers of the module.
            scheduler: a scheduler, which is returned unchanged, and advances whenever its ``step`` is called.
            move_to_device: whether to move the module to the device.

        Returns:
            The module alone, or a tuple of the module, the optimizers, and the scheduler if one was passed.
        """
        self._refuse_wrapped("setup", module, *optimizers)
        placed = [move_to_device, *[None] * len(optimizers)]
        prepared, *found = self.accelerator_of_loop.prepared.prepare([module, *optimizers], placed)
        wrapped = self._wrapped(prepared, found)
        if not optimizers:
            return wrapped
        return (wrapped, *found) if scheduler is None else (wrapped, *found, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True) -> Any:
        """Set up a module. Create its optimizers afterward, and pass the optimizers to :meth:`setup_optimizers`."""
        self._refuse_wrapped("setup_module", module)
        return self._wrapped(self.accelerator_of_loop.prepare_model(module, move_to_device), [])

    def _wrapped(self, module: nn.Module, optimizers: list[AcceleratedOptimizer]) -> FabricModule:
        wrapped = FabricModule(self.accelerator_of_loop, module)
        attach_to_fabric(self, module, optimizers)
        self._watch(optimizers)
        self.call("on_after_setup", fabric=self, module=wrapped)
        return wrapped

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up optimizers whose modules have been set up. Return the optimizer, or a tuple if there are several."""
        self._refuse_wrapped("setup_optimizers", *optimizers)
        found = [self.accelerator_of_loop.prepare_optimizer(one) for one in optimizers]
        self._watch(found)
        return found[0] if len(found) == 1 else tuple(found)

    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Set up loaders, so that each process gets its shard of the data on its device.

        Args:
            *dataloaders: the loaders.
            use_distributed_sampler: if False, every process reads all of the data, or the samples that the loader's own
                sampler selects.
            move_to_device: whether to move batches to the device.

        Returns:
            The loader, or a list if several were passed.

        Raises:
            ValueError: no loader was passed.
        """
        if not dataloaders:
            raise ValueError("setup_dataloaders() got no loader to set up. Pass at least one loader.")
        self._refuse_wrapped("setup_dataloaders", *dataloaders)
        if use_distributed_sampler:
            found = [self.accelerator_of_loop.prepare_data_loader(one, move_to_device) for one in dataloaders]
        else:
            found = [FabricLoader(one, self.device if move_to_device else None) for one in dataloaders]
        return found[0] if len(found) == 1 else found

    def _refuse_wrapped(self, method: str, *objects: Any) -> None:
        for one in objects:
            if is_wrapped(one):
                raise ValueError(
                    f"fabric.{method} got {messages.a(one)} that has already been set up. Pass the original object, "
                    "and set up each object only once."
                )

    def _watch(self, optimizers: list[AcceleratedOptimizer]) -> None:
        """Call the callbacks' ``on_after_optimizer_step`` after each optimizer step."""
        for callback in self._callbacks:
            hook = getattr(callback, "on_after_optimizer_step", None)
            if callable(hook):
                for one in optimizers:
                    one.optimizer.register_step_post_hook(partial(_after_step, hook, self._strategy, one))

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Run the backward pass for a loss. Call this instead of ``loss.backward()``."""
        if args:
            kwargs["gradient"] = args[0]
        self.accelerator_of_loop.backward(tensor, **kwargs)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip an optimizer's gradients, either each value to ``clip_val`` or their total norm to ``max_norm``.

        Args:
            module: the module with the gradients.
            optimizer: the optimizer whose parameters' gradients are clipped.
            clip_val: the largest absolute value.
            max_norm: the largest norm.
            norm_type: order of the norm.
            error_if_nonfinite: whether to raise an error if the norm is not finite; with fp16, the step is skipped
                instead.

        Returns:
            The norm before clipping, shape (); None with ``clip_val``.
        """
        if (clip_val is None) is (max_norm is None):
            raise ValueError(
                f"fabric.clip_gradients(clip_val={clip_val!r}, max_norm={max_norm!r}) needs exactly one of the two "
                "arguments. Pass clip_val to limit each gradient value, or max_norm to limit the total norm."
            )
        accelerator = self.accelerator_of_loop
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if clip_val is not None:
            accelerator.clip_grad_value_(parameters, float(clip_val))
            return None
        norm = accelerator.clip_grad_norm_(parameters, float(max_norm or 0.0), float(norm_type))
        if error_if_nonfinite and accelerator.scaler is None and not math.isfinite(float(norm)):
            raise RuntimeError(
                f"fabric.clip_gradients: the gradient norm is {float(norm)}, so the gradients cannot be clipped. Find "
                "the first loss that is not finite, or pass error_if_nonfinite=False."
            )
        return norm

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Context manager that disables gradient synchronization. Use it for all micro-batches except the last one."""
        if not isinstance(original(module), nn.Module) or not is_wrapped(module):
            raise TypeError(
                f"fabric.no_backward_sync got {messages.a(module)}, not a module that fabric.setup returned. Set up "
                "the module first."
            )
        return self.accelerator_of_loop.no_sync(original(module)) if enabled else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager in which operations run in the chosen precision, as in a module's forward pass."""
        return self.accelerator_of_loop.autocast()

    def to_device(self, obj: Any) -> Any:
        """Move a module, a tensor or a collection of tensors to the device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else move(obj, self.device)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Context manager in which tensors are created on the device, in the precision's dtype."""
        return self._strategy.tensor_init_context()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context manager in which layers are created on the device, in the precision's dtype.

        With ``empty_init``, their weights are not initialized.
        """
        return self.accelerator_of_loop.init_module(empty_init)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Same as :meth:`init_module`."""
        return self.init_module()

    # ---- communication -----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has called this."""
        self._communicating.barrier(name or "")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast an object from process ``src`` to every process, and return the object."""
        return self._communicating.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack all processes' tensors along a new first dimension. With a single process, no dimension is added."""
        return self._communicating.all_gather(self._tensors(data), group, sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Reduce the tensors in a collection across all processes."""
        op: Any = _REDUCTIONS.get(str(reduce_op or "mean").lower(), reduce_op)
        strategy = self._communicating
        return pytree.tree_map_only(Tensor, lambda one: strategy.reduce(one, op, group), self._tensors(data))

    @property
    def _communicating(self) -> Strategy:
        return self.accelerator_of_loop.strategy

    def _tensors(self, data: Any) -> Any:
        """Convert numbers to tensors, and move all tensors to the device."""
        return move(pytree.tree_map_only((int, float), torch.tensor, data), self.device)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Context manager whose body runs first on rank 0 or, with ``local``, first on rank 0 of each machine."""
        accelerator = self.accelerator_of_loop
        return accelerator.local_main_process_first() if local else accelerator.main_process_first()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the first process of each machine."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201 - the user prints

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Any,
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write modules, optimizers and any other values to a file atomically. Every process must call this.

        Args:
            path: path of the file.
            state: the values to write, by name. For modules, optimizers and other objects with a ``state_dict``, their
                states are written.
            filter: maps names in ``state`` to functions ``f(key, value)`` that return True for the entries to keep.
        """
        filter = _checked_filter(state, filter or {})
        found = {}
        for name, value in state.items():
            kept = self._state_of(value)
            choose = filter.get(name)
            found[name] = kept if choose is None else {key: one for key, one in kept.items() if choose(key, one)}
        accelerator = self.accelerator_of_loop
        accelerator.save(found, path)
        accelerator.strategy.barrier("Fabric.save")

    def _state_of(self, value: Any) -> Any:
        value, accelerator = original(value), self.accelerator_of_loop
        if isinstance(value, nn.Module):
            return accelerator.get_state_dict(value)
        if isinstance(value, AcceleratedOptimizer) and value.placement is not None:
            placement = value.placement
            return placement.strategy.optimizer_state(placement.module, value.optimizer)
        return value.state_dict() if _has_state(value) else value

    def load(
        self, path: Any, state: dict[str, Any] | None = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file written by :meth:`save` into the objects in ``state``. Every process must call this.

        Args:
            path: path of the file.
            state: modules, optimizers and other values, keyed by the names under which they were saved. Values without
                ``load_state_dict`` are replaced in this dict. If None, the file is only read.
            strict: whether to require that the file contains everything in ``state``, with the same keys.
            weights_only: if False, also load objects that are not plain data, which can run arbitrary code from the
                file.

        Returns:
            The file's entries that are not in ``state``.
        """
        self.accelerator_of_loop.strategy.barrier("Fabric.load")
        found = single_file.load(path, trusted=is_trusted(weights_only))
        if state is None:
            return found
        missing = [name for name in state if name not in found]
        if missing and strict:
            raise KeyError(
                f"fabric.load({str(path)!r}): the file has no {messages.names(missing, last='and')}, only "
                f"{messages.names(list(found), last='and')}. Leave the missing entries out of state, or pass "
                "strict=False."
            )
        for name in [name for name in state if name in found]:
            self._load_into(state, name, found.pop(name), strict)
        return found

    def _load_into(self, state: dict[str, Any], name: str, saved: Any, strict: bool) -> None:
        value = original(state[name])
        if isinstance(value, (nn.Module, Optimizer)):
            self._load_state(value, saved, strict)
        elif _has_state(value):
            value.load_state_dict(saved)
        else:
            state[name] = saved

    def _load_state(self, value: nn.Module | Optimizer, saved: Any, strict: bool) -> None:
        placements = self.accelerator_of_loop.prepared.placements
        if isinstance(value, nn.Module):
            placement = placements.get(id(value))
            if placement is None:
                value.load_state_dict(saved, strict=strict)
            else:
                placement.strategy.load_model_state(value, saved, strict)
        elif isinstance(value, AcceleratedOptimizer) and value.placement is not None:
            value.placement.strategy.load_optimizer_state(value.placement.module, value.optimizer, saved)
        else:
            value.load_state_dict(saved)

    def load_raw(
        self, path: Any, obj: nn.Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Load a file that contains only the ``state_dict`` of a module or of an optimizer."""
        self._load_state(original(obj), single_file.load(path, trusted=is_trusted(weights_only)), strict)

    # ---- callbacks, loggers ------------------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method on every callback that defines it."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **kwargs)

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Logger:
        """The first logger."""
        return self._loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send a value to all loggers."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send values to all loggers. Tensors must have one element; reading their values waits for the device."""
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self._loggers if self.is_global_zero else ():
            logger.log_metrics(metrics=values, step=step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed Python's ``random``, NumPy and torch. Loader workers always get their own seeds."""
        return seed_everything(seed, workers is not False, verbose)


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _with_fabric(fabric: Fabric, function: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    """Join the process group and call the user's function."""
    _ = fabric.accelerator_of_loop
    return None if function is None else function(fabric, *args, **kwargs)


def _run(fabric: Fabric, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Join the process group and call a subclass's ``run``."""
    _ = fabric.accelerator_of_loop
    return type(fabric).run(fabric, *args, **kwargs)


def _after_step(hook: Callable[..., object], strategy: Strategy, optimizer: AcceleratedOptimizer, *_: Any) -> None:
    hook(strategy=strategy, optimizer=optimizer)


def _has_state(value: Any) -> bool:
    methods = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def _checked_filter(state: Mapping[str, Any], filter: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, choose in filter.items():
        if name not in state:
            raise ValueError(f"fabric.save(filter=...): {messages.unknown('entry', name, list(state))}")
        if not callable(choose):
            raise TypeError(
                f"fabric.save(filter={{{name!r}: {choose!r}}}) needs a function, not {messages.a(choose)}. Pass a "
                "function that takes a key and a value."
            )
    return filter
