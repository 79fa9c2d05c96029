"""``accelerate``'s helpers that programs rarely call themselves."""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor, nn

from ... import messages
from ...accelerator.nested_tensors import leaves, recursively_apply
from ...accelerator.operations import DistributedOperationException
from ...accelerator.process_state import PartialState
from ...devices.kinds import CUDA_KIND
from ...processes.device_transfer import move

# ---- modules ---------------------------------------------------------------------------------------------------------


def get_module_class_from_name(module: nn.Module, name: str) -> type | None:
    """Return the class named ``name`` of a module or one of its submodules, or None if there is no such class."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Move modules to ``device`` and return their parameters. A string is a regular expression for module names."""
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [one for name, one in model.named_modules() if pattern.fullmatch(name)]
    found: set[nn.Parameter] = set()
    for one in modules or ():
        one.to(device)
        found.update(one.parameters())
    return found


def is_repeated_blocks(module: Any) -> bool:
    """Return True if ``module`` is a ModuleList whose modules all have the same class."""
    return isinstance(module, nn.ModuleList) and len({type(one) for one in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return True if a module or one of its submodules is a list of blocks of the same class."""
    return any(map(is_repeated_blocks, module.modules()))


def get_model_tp_size(model: Any) -> int | None:
    """Return the number of processes across which transformers has split a model's layers; None if not split."""
    size = getattr(model, "tp_size", None)
    if size is not None:
        return size
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return config.get("tp_size") if isinstance(config, Mapping) else getattr(config, "tp_size", None)


def _refuse_recurrent_layers_under_sequence_parallelism(model: Any) -> None:
    """Raise a ValueError if a transformers model has layers that need the whole sequence."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    recurrent = {str(kind) for kind in getattr(text, "layer_types", None) or () if "linear" in str(kind)}
    if recurrent:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers ({', '.join(sorted(recurrent))}), which need the state "
            "from sequence parts on other processes. Use another model, or do not split sequences."
        )


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that are not a dotted prefix of another name."""
    inner = {name.rpartition(".")[0] for name in module_sizes if name}
    every = {".".join(name.split(".")[:end]) for name in inner for end in range(1, name.count(".") + 2)} | {""}
    return [name for name in module_sizes if name not in every]


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layers."""
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Iterable[str]) -> bool:
    """Return True for a linear layer that is not in ``layers_to_filter`` and whose sizes are multiples of 16."""
    if not isinstance(module, nn.Linear) or fqn in layers_to_filter:
        return False
    return not module.in_features % 16 and not module.out_features % 16


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return True if two devices are the same. A device without an index means the first device of its type."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def move_to_device(state: Any, device: Any) -> Any:
    """Move the tensors in nested lists, tuples and dicts to a device."""
    return move(state, device)


def patch_optimizer_step(accelerated_optimizer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records that the optimizer stepped, then calls ``method``."""

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        vars(accelerated_optimizer)["_accelerate_step_called"] = True
        return method(*args, **kwargs)

    return step


# ---- operations ------------------------------------------------------------------------------------------------------

TENSOR_TYPE_TO_INT = {
    dtype: number
    for number, dtype in enumerate(
        (
            *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16),
            *(torch.int32, torch.int64, torch.bool),
        ),
        start=1,
    )
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def get_shape(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the shape and dtype number (see ``TENSOR_TYPE_TO_INT``) of a tensor that only one process has."""
    found = PartialState().strategy.gather_objects(
        None if tensor is None else (list(tensor.shape), TENSOR_TYPE_TO_INT[tensor.dtype])
    )
    shape, dtype = next(one for one in found if one is not None)
    return torch.tensor(shape), torch.tensor(dtype)


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that first compares the tensors' shapes on all processes, if ``PartialState().debug`` is set."""

    @functools.wraps(function)
    def verified(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.use_distributed:
            shapes = [list(one.shape) for one in leaves(tensor)]
            found = state.strategy.unlike(shapes)
            if found:
                listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
                raise DistributedOperationException(
                    f"{function.__name__} needs tensors of the same shape on every rank, but got {listed}. Make the "
                    "shapes equal, for example with pad_across_processes."
                )
        return function(tensor, *args, **kwargs)

    return verified


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the function's name to a DistributedOperationException."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"Error in {function.__name__}: {error}") from error

    return named


# ---- states ----------------------------------------------------------------------------------------------------------

SharedDict = dict


class ThreadLocalSharedDict(threading.local):
    """Descriptor for a dict that all instances of a class share, with a separate dict per thread."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, obj: Any, objtype: Any = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, obj: Any, value: dict[str, Any]) -> None:
        self._storage = value


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


# ---- values ----------------------------------------------------------------------------------------------------------


ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]
#: Arguments for 8-bit training.
Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
#: torch's version, without a suffix such as ``+cpu``.
torch_version = Version(Version(torch.__version__).base_version)


class ConversionStatus(Enum):
    """Result of converting one key of an FSDP1 configuration."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


@dataclass
class CPUInformation:
    """The ranks and world sizes of a process that runs on CPUs."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's ranks."""
    state = PartialState()
    nodes = state.strategy.num_nodes
    return CPUInformation(
        state.process_index, state.num_processes, state.local_process_index, state.num_processes // nodes
    )


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and the number of the GPUs."""
    count = CUDA_KIND.count()
    return [CUDA_KIND.name_of(index) for index in range(count)], count


def check_cuda_p2p_ib_support() -> bool:
    """Return True, because NCCL itself chooses how GPUs communicate."""
    return True


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Do nothing, because `paceline launch --enable_cpu_affinity` binds processes to cores."""
    messages.info_once("set_numa_affinity has no effect. Use `paceline launch --enable_cpu_affinity`.")


override_numa_affinity = set_numa_affinity


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the environment variable that makes only one process read the weights."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Set the environment variable that makes every process read the weights."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def test_launch() -> None:
    """Join the process group, to check that joining works."""
    PartialState()


def get_free_port() -> int:
    """Return a free port on this machine."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for functions that need DeepSpeed."""
    return _required(func, "deepspeed")


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for functions that need torchao."""
    return _required(func, "torchao")


def _required(function: Callable[..., Any], package: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def required(*args: Any, **kwargs: Any) -> Any:
        if not messages.is_installed(package):
            raise ImportError(messages.missing(function.__name__, package))
        return function(*args, **kwargs)

    return required
