"""Helper functions that libraries import from Lightning's ``utilities``, implemented with Paceline's own functions."""

from __future__ import annotations

import inspect
import math
import os
import pickle
import statistics
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import FrameType, ModuleType
from typing import IO, Any, Literal, TypeVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from ... import messages
from ...checkpoint import lightning_format
from ...checkpoint.atomic_write import written_aside
from ...checkpoint.objects import is_trusted
from ...checkpoint.storage import is_remote, location
from ...data.batches import batch_size_of
from ...devices.kinds import CUDA_KIND
from ...memory.out_of_memory_retry import clear_device_cache
from ...processes.device_transfer import move
from ...processes.seed import mixed, seed_host
from ...utilities.rank_zero import rank_zero_only
from .exceptions import translated

F = TypeVar("F", bound=Callable[..., Any])


# lightning.pytorch.utilities.parsing


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` call in ``frame``, without ``self`` but including ``**kwargs``."""
    names, _, rest, values = inspect.getargvalues(frame)
    found = {name: values[name] for name in names[1:] if name in values}
    return found | (values.get(rest, {}) if rest else {})


def save_hyperparameters(
    obj: Any, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None
) -> None:
    """Call ``obj.save_hyperparameters``. By default, ``frame`` is the caller's frame."""
    if frame is None and (current := inspect.currentframe()) is not None:
        frame = current.f_back
    obj.save_hyperparameters(*args, ignore=ignore, frame=frame)


def is_picklable(obj: object) -> bool:
    """Return True if an object can be pickled."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Return True if the module, its hyperparameters or its DataModule has the given attribute."""
    return bool(_owners(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return an attribute from the DataModule, or else from the hyperparameters, or else from the module."""
    owner = _owner(model, attribute)
    return owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute wherever it exists: on the module, in its hyperparameters and on its DataModule."""
    _owner(model, attribute)
    for owner in _owners(model, attribute):
        if isinstance(owner, dict):
            owner[attribute] = value
        else:
            setattr(owner, attribute, value)


def _owner(model: Any, attribute: str) -> Any:
    owners = _owners(model, attribute)
    if not owners:
        raise AttributeError(
            f"{attribute!r} is not an attribute or hyperparameter of {type(model).__name__}, nor an attribute of its "
            "DataModule. Check the name."
        )
    return owners[-1]


def _owners(model: Any, attribute: str) -> list[Any]:
    trainer = getattr(model, "_trainer", None)
    hparams = getattr(model, "hparams", {})
    owners = [model] if hasattr(model, attribute) else []
    owners += [hparams] if attribute in hparams else []
    datamodule = getattr(trainer, "datamodule", None)
    return owners + ([datamodule] if datamodule is not None and hasattr(datamodule, attribute) else [])


# lightning.pytorch.utilities.argparse


def defaults_from_env_vars(function: F) -> F:
    """Return the constructor unchanged, because ``Trainer`` itself reads the ``PL_TRAINER_<ARGUMENT>`` variables."""
    return function


# lightning.pytorch.utilities.memory


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Copy nested dicts, lists and tuples with all tensors detached, and moved to the CPU if ``to_cpu``."""
    if isinstance(in_dict, Tensor):
        detached = in_dict.detach()
        return detached.cpu() if to_cpu else detached
    if isinstance(in_dict, Mapping):
        return type(in_dict)({name: recursive_detach(value, to_cpu) for name, value in in_dict.items()})  # type: ignore[call-arg]
    if isinstance(in_dict, tuple) and hasattr(in_dict, "_fields"):
        return type(in_dict)(*(recursive_detach(value, to_cpu) for value in in_dict))
    if isinstance(in_dict, (list, tuple)):
        return type(in_dict)(recursive_detach(value, to_cpu) for value in in_dict)
    return in_dict


def garbage_collection_cuda() -> None:
    """Collect garbage and free the device's cached memory."""
    clear_device_cache(garbage_collection=True)


# lightning.fabric.utilities.cloud_io and .load


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return the ``fsspec`` file system for a path or a URL."""
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]


def is_local(path: str | os.PathLike[str]) -> bool:
    """Return True for a local path, and False for a URL."""
    return not is_remote(path)


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Call ``torch.load`` on a path, URL or file. Loads only tensors and plain data unless ``weights_only=False``."""
    only_data = not is_trusted(weights_only)
    if hasattr(path_or_url, "read"):
        return _read(path_or_url, map_location, only_data)
    with get_filesystem(path_or_url).open(os.fspath(path_or_url), "rb") as file:
        return _read(file, map_location, only_data)


def _read(file: IO[bytes], map_location: Any, only_data: bool) -> Any:
    return torch.load(file, map_location=map_location, weights_only=only_data)


def atomic_save(checkpoint: dict[str, Any], filepath: str | os.PathLike[str]) -> None:
    """Write a file with ``torch.save``, atomically."""
    with written_aside(location(os.fspath(filepath))) as file:
        torch.save(checkpoint, file)


def lazy_load(filename: str | os.PathLike[str]) -> Any:
    """Load a file of tensors; the values stay on disk until they are used."""
    path = os.fspath(filename)
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"The file {path!r} cannot be loaded, because it does not exist. Pass the path of an existing file."
        )
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


# lightning.fabric.utilities.registry


def register_classes(registry: Any, method: str, module: ModuleType, parent: type) -> None:
    """Let each subclass of ``parent`` in a module register itself, by calling its class method ``method``."""
    of_parent = getattr(getattr(parent, method, None), "__func__", None)
    for _, kind in inspect.getmembers(module, inspect.isclass):
        register = getattr(kind, method, None) if issubclass(kind, parent) else None
        if callable(register) and getattr(register, "__func__", register) is not of_parent:
            register(registry)


# lightning.pytorch.core.optimizer


class NoOptimizer(Optimizer):
    """An optimizer without parameters, to create a scheduler without a model."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Leave out the group."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, if there is one."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because there are no gradients."""


# lightning.pytorch.utilities.migration

#: The version from which on the layout of checkpoints is the same, and the keys of a checkpoint's versions.
_SAME_LAYOUT = Version("2.0.0")
_VERSION, _LEGACY_VERSION = "pytorch-lightning_version", "legacy_pytorch-lightning_version"


def migrate_checkpoint(
    checkpoint: dict[str, Any], target_version: str | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a checkpoint in the current layout, and the changes; a file of Lightning 2 or Paceline needs none.

    Args:
        checkpoint: the contents of a file; its version is updated in place.
        target_version: accepted, but there is no change that it could leave out.

    Raises:
        ValueError: the file is older than Lightning 2.
    """
    saved = str(checkpoint.get(_VERSION, "0"))
    if Version(saved) < _SAME_LAYOUT:
        raise ValueError(
            f"The checkpoint was saved by version {saved} of Lightning, and Paceline reads the layout of 2.0 or newer. "
            "Convert the file with `python -m lightning.pytorch.utilities.upgrade_checkpoint FILE` where Lightning is "
            "installed."
        )
    if saved != lightning_format.LAYOUT_VERSION:
        checkpoint.setdefault(_LEGACY_VERSION, saved)
        checkpoint[_VERSION] = lightning_format.LAYOUT_VERSION
    return checkpoint, {}


# lightning.fabric.utilities.init


def materialize_meta_tensors(module: nn.Module, device: torch.device | str) -> None:
    """Replace tensors on the meta device with real ones on ``device``, and initialize the submodules that own them.

    Raises:
        TypeError: a submodule with tensors on the meta device has no ``reset_parameters``.
    """
    for name, inner in module.named_modules():
        own = [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        inner.to_empty(device=device, recurse=False)
        reset = getattr(inner, "reset_parameters", None)
        if not callable(reset):
            raise TypeError(
                f"{name or 'The module'} ({type(inner).__name__}) has tensors on the meta device, but no "
                "reset_parameters() to initialize them. Define that method, or build the module on a real device."
            )
        reset()


# lightning.fabric.accelerators.cuda


def is_cuda_available() -> bool:
    """Return True if torch can use an NVIDIA or AMD GPU."""
    return CUDA_KIND.is_available()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of ``num_devices`` GPUs on which a tensor can be created, or of all such GPUs for -1.

    Raises:
        ValueError: ``num_devices`` is larger than the number of GPUs.
        RuntimeError: too few GPUs are usable.
    """
    seen = CUDA_KIND.count()
    if num_devices > seen:
        raise ValueError(
            f"find_usable_cuda_devices({num_devices}): this process sees only {seen} GPU{'' if seen == 1 else 's'}. "
            "Request fewer GPUs."
        )
    usable = []
    for index in range(seen):
        if len(usable) == num_devices:
            break
        try:
            torch.tensor(0.0, device=f"cuda:{index}")
        except RuntimeError:
            continue
        usable.append(index)
    if num_devices > len(usable):
        raise RuntimeError(
            f"find_usable_cuda_devices({num_devices}): only {len(usable)} of {seen} GPUs can be used. Other processes "
            "may have exclusive use of the other GPUs. Request fewer GPUs, or wait."
        )
    return usable


# lightning.pytorch.callbacks


class Interval(str, Enum):
    """The point at which a ``Timer`` checks the elapsed time."""

    step = "step"
    epoch = "epoch"


def get_standard_metrics(trainer: Any) -> dict[str, int | str]:
    """Return the value that every progress bar shows: the logger's version (for a string, its last four characters)."""
    version = trainer.logger.version if trainer.loggers else None
    if version is None:
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


def convert_inf(x: float | None) -> float | None:
    """Return None for infinity and NaN; return any other number unchanged."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x


def multiplicative(epoch: int) -> float:
    """Return the factor by which ``BackboneFinetuning`` multiplies the backbone's learning rate in each epoch."""
    return 2.0


def do_nothing_closure() -> None:
    """Do nothing and return None."""


# lightning.pytorch.loggers


def merge_dicts(
    dicts: Sequence[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Callable[[Sequence[float]], float]] | None = None,
    default_func: Callable[[Sequence[float]], float] = statistics.fmean,
) -> dict[str, Any]:
    """Recursively merge dicts. The values of a key are combined by the function for that key, by default the mean."""
    functions = agg_key_funcs or {}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in dicts for key in one):
        values = [one[key] for one in dicts if key in one]
        function: Any = functions.get(key)
        if isinstance(values[0], dict):
            merged[key] = merge_dicts(values, function, default_func)
        else:
            merged[key] = (function or default_func)(values)
    return merged


# lightning.fabric.utilities


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a loader's worker (for ``DataLoader(worker_init_fn=...)``). Each worker of each process gets its own seed.

    A loader that a Trainer uses does not need this function, because Paceline seeds workers itself.
    """
    rank = rank_zero_only.rank if rank is None else rank
    seed_host(mixed(torch.initial_seed() - worker_id, worker_id, rank or 0))


def is_shared_filesystem(strategy: Any, path: str | os.PathLike[str] | None = None, timeout: int = 3) -> bool:
    """Return True if all processes see the same files below ``path``. Every process must call this.

    Args:
        strategy: the strategy of a Trainer or a Fabric.
        path: an existing file or folder; None means the working directory.
        timeout: maximum number of seconds to wait until the other processes see a file that process 0 has created.
    """
    if getattr(strategy, "world_size", 1) == 1 or (path is not None and not is_local(path)):
        return True
    folder = os.path.realpath(os.curdir if path is None else path)
    of_all = partial(strategy.agree, all=True)
    if not of_all(strategy.broadcast(folder) == folder):
        return False
    if not of_all(os.path.exists(folder)):
        raise FileNotFoundError(
            f"{folder!r} is not visible to every process. Create the folder, or pass a folder that all processes see."
        )
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    mark = os.path.join(folder, strategy.broadcast(f".paceline_shared_{uuid.uuid4().hex}"))
    if strategy.is_global_zero:
        with open(mark, "x"):
            pass
    strategy.barrier()
    end = time.monotonic() + timeout
    while not os.path.exists(mark) and time.monotonic() < end:
        time.sleep(0.05)
    seen = of_all(os.path.exists(mark))
    if strategy.is_global_zero:
        os.remove(mark)
    return seen


@translated
def extract_batch_size(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Raises:
        ValueError: the batch has no tensor.
    """
    size = batch_size_of(batch)
    if size is None:
        raise ValueError(
            f"The batch size of {messages.a(batch)} cannot be determined, because this batch contains no tensors. Pass "
            "self.log(..., batch_size=batch_size)."
        )
    return size


def convert_to_tensors(data: Any, device: torch.device | str) -> Any:
    """Convert the numbers and arrays in nested dicts, lists and tuples to tensors; move all tensors to ``device``."""
    if isinstance(data, Mapping):
        return {name: convert_to_tensors(value, device) for name, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(convert_to_tensors(value, device) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(convert_to_tensors(value, device) for value in data)
    for kind, dtype in ((bool, torch.uint8), (int, torch.int), (float, torch.float)):
        if isinstance(data, kind):
            return torch.tensor(data, dtype=dtype, device=device)
    return move(torch.from_numpy(data) if type(data).__module__ == "numpy" else data, device)


class LightningEnum(str, Enum):
    """Base class of string enums whose members compare equal to strings case-insensitively."""

    @classmethod
    def from_str(cls, value: str, source: Literal["key", "value", "any"] = "key") -> Self:
        """Return the member with this name (``source="key"``), this value (``"value"``), or either of them (``"any"``).

        Raises:
            ValueError: there is no such member.
        """
        for name, member in cls.__members__.items():
            if source in ("key", "any") and name.lower() == value.lower():
                return member
        for member in cls if source in ("value", "any") else ():
            if member == value:
                return member
        choices = [] if source == "value" else list(cls.__members__)
        choices += [] if source == "key" else [member.value for member in cls]
        raise ValueError(messages.unknown(cls.__name__, value, choices))

    @classmethod
    def try_from_str(cls, value: str, source: Literal["key", "value", "any"] = "key") -> Self | None:
        """Like :meth:`from_str`, but warns and returns None if there is no such member."""
        try:
            return cls.from_str(value, source)
        except ValueError as error:
            messages.warn(str(error))
            return None

    def __eq__(self, other: object) -> bool:
        other = other.value if isinstance(other, Enum) else other
        return self.value.lower() == str(other).lower()

    def __hash__(self) -> int:
        return hash(self.value.lower())


def convert_tensors_to_scalars(data: Any) -> Any:
    """Convert tensors of one element to numbers, in nested dicts, lists and tuples.

    Raises:
        ValueError: a tensor does not have exactly one element.
    """
    if isinstance(data, Tensor):
        if data.numel() != 1:
            raise ValueError(
                f"A tensor of shape {tuple(data.shape)} is not a scalar. Reduce the tensor to one element before "
                "logging it."
            )
        return data.item()
    if isinstance(data, Mapping):
        return {name: convert_tensors_to_scalars(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(convert_tensors_to_scalars(value) for value in data)
    return data


def disable_possible_user_warnings(module: str = "") -> None:
    """Silence all warnings from Paceline, or only the warnings from one module."""
    warnings.filterwarnings("ignore", module=module, category=messages.PacelineWarning)


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return True if a function has ``param``, ``*args`` (unless ``explicit``), or at least ``min_args`` parameters."""
    found = inspect.getfullargspec(inspect.unwrap(hook_fx))
    names = found.args[1:] if found.args[:1] == ["self"] else found.args
    takes_any = not explicit and found.varargs is not None
    return param in names or takes_any or (min_args is not None and len(names) >= min_args)
