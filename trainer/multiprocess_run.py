"""Run an entry point in separately started processes, and bring the result back to this process.

Afterward, everything works as it does after a run in this process. The user's objects are updated in place: the
Trainer, the module, its parameters, the callbacks and the loggers get the values that they have on rank 0. Objects that
cannot be pickled (an open file, a live display) are not transferred.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import messages
from ..processes.process_group import leave
from ..processes.seed import host_random_states, random_states, set_random_states
from ..torch_private import COMPILED_CALL, FSDP_ATTRIBUTES, FSDP_MARK
from .arguments import Request
from .checkpoint_contents import child_run_data
from .hooks import overridden
from .module import TrainingModule
from .run import Run
from .start_run import attach_parts, bind_hooks, end_logging, find_module
from .state import RunState

if TYPE_CHECKING:
    from .trainer import Trainer

#: Attributes of a Trainer that belong to its process, or that :func:`_take_over` sets itself.
_OF_ITS_PROCESS = frozenset({"strategy", "loggers", "callbacks", "profiler", "brought_callbacks", "current_run"})
#: Attributes of a run that this process takes over unchanged.
_OF_A_RUN = ("predictions", "predict_batch_indices", "ckpt_path", "newest", "resumes", "saves", "shared_log_dir")
#: Attributes of a module that belong to torch, or that attach the module to its run.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_trainer", "_metric_store", COMPILED_CALL}


def run_in_processes(trainer: Trainer, launcher: Callable[..., Any], request: Request) -> Any:
    """Run a request in the processes that ``launcher`` starts; return rank 0's result."""
    with _fit_put_aside(trainer.current_run):
        report = launcher(_run_and_report, trainer, request, random_states())
    trainer.current_run = Run(trainer, request, trainer.current_run)
    return _take_over(trainer.current_run, request, report)


@contextmanager
def _fit_put_aside(run: Run) -> Iterator[None]:
    """Context manager that keeps the previous fit's optimizers and schedulers out of the new processes."""
    optimizers, configs, child_data = run.optimizers, run.lr_scheduler_configs, run.child_data
    run.optimizers, run.lr_scheduler_configs, run.child_data = [], [], None
    try:
        yield
    finally:
        run.optimizers, run.lr_scheduler_configs, run.child_data = optimizers, configs, child_data


# ---- in the processes that were started ------------------------------------------------------------------------------


def _run_and_report(trainer: Trainer, request: Request, random: dict[str, Any]) -> bytes | None:
    """Run a request in a started process, beginning with the RNG states in ``random``. Rank 0 returns a report."""
    set_random_states(random)
    sent = {name for name, _ in find_module(trainer.current_run, request)[0].named_modules()}
    run = trainer.current_run = Run(trainer, request, trainer.current_run)
    result = run.execute()
    strategy, module = run.strategy, run.module
    weights, child_data = strategy.model_state(module), child_run_data(run)
    states = [strategy.optimizer_state(run.model, optimizer) for optimizer in run.optimizers]
    report = None
    if strategy.is_global_zero:
        training = _training(run, states) if request.fn == "fit" else None
        parts = {"born": _born(module, sent), "weights": _pickled(weights, {}), "training": training}
        report = pickle.dumps(parts | {"rest": _rest(run, result, child_data)})
    leave()
    return report


def _born(module: nn.Module, sent: set[str]) -> dict[str, bytes]:
    """Return a dict, by name, of the pickled layers that the run added, without those that cannot be pickled."""
    added = {name: part for name, part in module.named_modules() if name not in sent}
    first = {name: part for name, part in added.items() if name.rpartition(".")[0] in sent}
    packed = {name: _try(part, {}, _WriterOfLayers) for name, part in first.items()}
    return {name: layer for name, layer in packed.items() if layer is not None}


def _training(run: Run, states: list[dict[str, Any]]) -> bytes | str:
    """Pickle the optimizers and schedulers; if they cannot be pickled, return a string that says why."""
    training = {"optimizers": run.optimizers, "schedulers": run.lr_scheduler_configs, "states": states}
    try:
        return _pickled(training, _anchors(run), _WriterOfTraining)
    except Exception as error:
        return str(error)


def _rest(run: Run, result: Any, child_data: Any) -> bytes:
    module, store, anchors = run.module, run.metrics, _anchors(run, with_optimizers=True)
    owners = {name: owner for name, owner in anchors.items() if name.startswith(("callback ", "logger ", "profiler"))}
    datamodule = run.datamodule
    report = {
        "result": result,
        "child_data": child_data,
        "random": host_random_states(),
        "state": {name: getattr(run.state, name) for name in RunState.__slots__},
        "trainer": _portable(vars(run.trainer), anchors, _OF_ITS_PROCESS),
        "run": _portable({name: getattr(run, name) for name in _OF_A_RUN}, anchors),
        "owners": {name: _portable(_state(owner), anchors) for name, owner in owners.items()},
        "layers": {name: _portable(vars(part), anchors, _OF_TORCH) for name, part in module.named_modules()},
        "buffers": _temporary_buffers(module),
        "trained": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "datamodule": None if datamodule is None else datamodule.state_dict(),
        "precision": run.strategy.precision.state_dict(),
        "source": run.source.counts(),
        "metrics": store.finished(),
    }
    return _pickled(report, anchors)


def _state(owner: Any) -> dict[str, Any]:
    state = owner.__getstate__() if hasattr(owner, "__getstate__") else vars(owner)  # Python 3.10's objects have none
    return state if isinstance(state, dict) else {}


def _temporary_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that ``state_dict`` leaves out."""
    saved = module.state_dict(keep_vars=True)
    found = {name: buffer for name, buffer in module.named_buffers() if name not in saved and type(buffer) is Tensor}
    return {name: buffer.detach().clone() for name, buffer in found.items()}


# ---- in this process ------------------------------------------------------------------------------------------------


def _take_over(run: Run, request: Request, report: bytes) -> Any:
    """Update the Trainer and its objects to their state after the run; return the run's result."""
    found = pickle.loads(report)
    module, _ = find_module(run, request)
    attach_parts(run, request, module)
    _add_layers(run, module, found["born"])
    lacks = _load_weights(module, _loaded(found["weights"], {}))
    if request.fn == "fit":
        lacks = _take_training(run, lacks or found["training"])
    rest = _loaded(found["rest"], _anchors(run, with_optimizers=True))
    _take_rest(run, rest)
    if request.fn == "fit" or run.child_data is None:
        run.child_data = rest["child_data"]._replace(lacks=lacks)
    bind_hooks(run)
    end_logging(run)
    set_random_states(rest["random"])
    return rest["result"]


def _add_layers(run: Run, module: TrainingModule, born: dict[str, bytes]) -> None:
    """Add the layers that ``configure_model`` or ``setup`` created during the run."""
    configure_model = overridden(module, "configure_model", TrainingModule)
    if configure_model is not None:
        with run.strategy.precision.creation_context(torch.device("cpu")):
            configure_model()
    known = {name for name, _ in module.named_modules()}
    for name, packed in born.items():
        if name not in known:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, _loaded(packed, {}))


def _load_weights(module: TrainingModule, weights: dict[str, Any]) -> str:
    """Load the weights, which are unsharded under every strategy; return a description of any mismatch."""
    result = module.load_state_dict(weights, strict=False)
    odd = sorted({*result.missing_keys, *result.unexpected_keys})
    if not odd:
        return ""
    which = f"{messages.names(odd[:10], 'and')}{' ...' if odd[10:] else ''}"
    messages.warn(
        f"The processes that ran {type(module).__name__} changed its layers in a way that could not be transferred to "
        f"this process: {which}. All other weights were transferred. Create layers in __init__ or configure_model, "
        "from classes that are defined at the top level of a file."
    )
    return f"the layers differ: {which}"


def _take_training(run: Run, packed: bytes | str) -> str:
    """Restore the optimizers and schedulers that a run in other processes used.

    Return an empty string, or the reason why they cannot be restored.
    """
    run.optimizers, run.lr_scheduler_configs = [], []
    if isinstance(packed, str):
        return packed
    training = _loaded(packed, _anchors(run))
    for optimizer, state in zip(training["optimizers"], training["states"], strict=True):
        optimizer.load_state_dict(state)
    run.optimizers, run.lr_scheduler_configs = training["optimizers"], training["schedulers"]
    return ""


def _take_rest(run: Run, rest: dict[str, Any]) -> None:
    module, anchors = run.module, _anchors(run)
    for name, value in rest["state"].items():
        setattr(run.state, name, value)
    vars(run.trainer).update(rest["trainer"])
    vars(run).update(rest["run"])
    for name, state in rest["owners"].items():
        if name in anchors:
            vars(anchors[name]).update(state)
    layers = dict(module.named_modules())
    for name, layer in layers.items():
        vars(layer).update(rest["layers"].get(name, {}))
    for name, buffer in rest["buffers"].items():
        owner, _, attribute = name.rpartition(".")
        if owner in layers:
            layers[owner].register_buffer(attribute, buffer, persistent=False)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(rest["trained"].get(name, parameter.requires_grad))
    if run.datamodule is not None and rest["datamodule"]:
        run.datamodule.load_state_dict(rest["datamodule"])
    if rest["precision"]:
        run.strategy.precision.load_state_dict(rest["precision"])
    run.source.take_over(rest["source"])
    run.metrics.take_over(rest["metrics"])


# ---- pickling --------------------------------------------------------------------------------------------------------


def _anchors(run: Run, with_optimizers: bool = False) -> dict[str, Any]:
    """Return the objects that exist in both processes, under the names by which a report refers to them."""
    module = run.module
    found = {"trainer": run.trainer, "run": run, "state": run.state, "strategy": run.strategy}
    found |= {"profiler": run.trainer.profiler, "datamodule": run.datamodule}
    found |= _numbered("callback", run.trainer.callbacks) | _numbered("logger", run.trainer.loggers)
    if with_optimizers:
        found |= _numbered("optimizer", run.optimizers)
        found |= _numbered("scheduler", [config.scheduler for config in run.lr_scheduler_configs])
    found |= {f"layer {name}": part for name, part in module.named_modules()}
    found |= {f"parameter {name}": parameter for name, parameter in module.named_parameters()}
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return {name: value for name, value in found.items() if value is not None}


def _numbered(what: str, objects: list[Any]) -> dict[str, Any]:
    """Name objects by class and number within the class, because list positions change if the run adds objects."""
    seen: Counter[str] = Counter()
    found = {}
    for one in objects:
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        found[f"{what} {kind} {seen[kind]}"] = one
        seen[kind] += 1
    return found


def _portable(
    attributes: dict[str, Any], anchors: dict[str, Any], left_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the attributes that can be transferred to another process."""
    found = {n: value for n, value in attributes.items() if n not in left_out and not n.startswith(FSDP_ATTRIBUTES)}
    if _try(found, anchors) is not None:
        return found
    return {name: value for name, value in found.items() if _try(value, anchors) is not None}


def _try(value: Any, anchors: dict[str, Any], writer: type[_Writer] | None = None) -> bytes | None:
    try:
        return _pickled(value, anchors, writer or _Writer)
    except Exception:  # an open file, a live display, a lock: tied to its process
        return None


class _Writer(pickle.Pickler):
    """Pickles tensors as detached CPU tensors, and objects that exist in both processes as their names."""

    def __init__(self, stream: io.BytesIO, anchors: dict[str, Any]) -> None:
        super().__init__(stream)
        self._names = {id(value): name for name, value in anchors.items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and not (obj.is_leaf and obj.device.type in ("cpu", "meta")):
            there = obj.detach().cpu()
            return (nn.Parameter(there, obj.requires_grad) if isinstance(obj, nn.Parameter) else there).__reduce_ex__(2)
        if isinstance(obj, MethodType):
            owner = obj.__self__ if isinstance(obj.__self__, type) else type(obj.__self__)
            if not hasattr(owner, obj.__func__.__name__):  # a strategy may add such methods to layers that it shards
                raise pickle.PicklingError(f"{owner.__qualname__} does not define {obj.__func__.__qualname__}")
        return NotImplemented


class _WriterOfLayers(_Writer):
    """Pickles layers as they were before sharding, with uninitialized memory for the weights."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and (FSDP_MARK in vars(obj) or "forward" in vars(obj)):
            own = vars(obj) | {name: value for name, value in vars(nn.Module()).items() if "hook" in name}
            own = {name: v for name, v in own.items() if not name.startswith(FSDP_ATTRIBUTES) and name != "forward"}
            return object.__new__, (type(obj).__mro__[2 if isinstance(obj, FSDPModule) else 0],), own
        if isinstance(obj, DTensor):
            room = torch.empty(obj.shape, dtype=obj.dtype)
            return (nn.Parameter(room, obj.requires_grad) if isinstance(obj, nn.Parameter) else room).__reduce_ex__(2)
        return super().reducer_override(obj)


class _WriterOfTraining(_Writer):
    """Pickles optimizers without their states, which may be sharded, and schedulers even if they use a lambda."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Optimizer):
            return object.__new__, (type(obj),), {**obj.__getstate__(), "state": {}}
        if isinstance(obj, FunctionType) and not _can_be_imported(obj):
            return _left_behind, (obj.__qualname__,)
        return super().reducer_override(obj)


def _can_be_imported(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _left_behind(name: str) -> Callable[..., Any]:
    """Return a stand-in for a function that could not be transferred; it raises when called."""

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} stayed in the training processes, because lambdas and functions defined inside other functions "
            "cannot be pickled. To call it in this process, define it at the top level of a file."
        )

    return missing


def _pickled(value: Any, anchors: dict[str, Any], writer: type[_Writer] = _Writer) -> bytes:
    stream = io.BytesIO()
    writer(stream, anchors).dump(value)
    return stream.getvalue()


class _RunReader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, anchors: dict[str, Any]) -> None:
        super().__init__(stream)
        self._anchors = anchors

    def persistent_load(self, pid: str) -> Any:
        return self._anchors.get(pid)


def _loaded(packed: bytes, anchors: dict[str, Any]) -> Any:
    return _RunReader(io.BytesIO(packed), anchors).load()
