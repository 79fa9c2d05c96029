"""A device that is not a CPU, written in Python: ``fake_device.install()`` adds the device type "fake" to torch.

Its tensors are real ones, of the dispatch key that torch reserves for devices of other packages (PrivateUse1): they
have their own storages, views, autograd and autocast. Their memory is the host's and the host's kernels compute, so
results equal the CPU's. As on a GPU, an operator refuses a mix with tensors of the host, and random numbers come from
the device's own generator. Torch knows at most one such device, with one index, and cannot forget it: tests install it
in a forked process.

What it cannot show: work that really runs beside the host (its streams and events never wait), memory that runs out,
and several devices in one process.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

NAME = "fake"
BACKEND = "fakeccl"
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_KINDS = {"cpu": 1, NAME: 12}  # DLPack's numbers for a CPU, and for devices it does not know
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
#: What the device was asked to do, for tests to read.
calls: list[str] = []
_libraries: list[Any] = []
_HALF = ("mm", "addmm", "bmm", "matmul", "linear", "baddbmm", "scaled_dot_product_attention")
_FULL = ("mse_loss", "nll_loss", "cross_entropy_loss", "log_softmax.int", "softmax.int", "layer_norm")


def _relabeled(tensor: Tensor, kind: str) -> Tensor:
    """The same memory as a tensor of the other kind."""
    capsule = torch._C._to_dlpack(tensor)  # type: ignore[attr-defined]
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)).value = _KINDS[kind]
    return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]


def host(value: Any) -> Any:
    """A tensor of the host with the memory of this device's; anything else as it is."""
    return _relabeled(value, "cpu") if isinstance(value, Tensor) and value.device.type == NAME else value


def _new(tensor: Tensor) -> Tensor:
    found = _relabeled(tensor, NAME)
    memory.add(found.untyped_storage())
    return found


class _Memory:
    now = peak = 0

    def add(self, storage: Any) -> None:
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, size)

    def remove(self, size: int) -> None:
        self.now -= size


memory = _Memory()


# ---- operators -------------------------------------------------------------------------------------------------------


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every operator of a device's tensors: the host's kernel on their memory."""
    own = _OWN.get(op)
    if own is not None:
        return own(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(leaf.device.type == "cpu" and leaf.dim() for leaf in leaves):
        raise RuntimeError(f"{op}: Expected all tensors to be on the same device, but found {NAME}:0 and cpu")
    returns = op._schema.returns
    if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
        return _view(op, *args, **kwargs)
    written = {a.name: a.kwarg_only for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    # Kernels may resize an output for a moment, which only memory of the host's own allocator can do.
    outputs = {name: kwargs[name] for name, is_output in written.items() if is_output and name in kwargs}
    rooms = {name: torch.empty(0, dtype=output.dtype) for name, output in outputs.items()}
    on_host = functools.partial(op, *pytree.tree_map(host, args), **_on_host(pytree.tree_map(host, kwargs) | rooms))
    found = random.draw(on_host) if torch.Tag.nondeterministic_seeded in op.tags else on_host()
    for name, output in outputs.items():
        host(_resize(output, rooms[name].shape)).copy_(rooms[name])
    if not returns:
        return None
    if returns[0].alias_info is not None:
        changed = [*outputs.values()] or list(args[: len(returns)])
        return changed[0] if len(returns) == 1 else tuple(changed)
    return pytree.tree_map(lambda value: _new(value) if isinstance(value, Tensor) else value, found)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs


def _view(op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A view of a device's tensor, which has the same storage."""
    shapes = op(host(tensor), *args, **kwargs)

    def of(seen: Tensor) -> Tensor:
        offset = tensor.storage_offset() + seen.storage_offset()
        return torch.ops.aten.as_strided.default.redispatch(_CPU_KEY, tensor, seen.shape, seen.stride(), offset)

    return of(shapes) if isinstance(shapes, Tensor) else [of(one) for one in shapes]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    calls.append(f"{source.device.type} to {target.device.type}{' without waiting' if non_blocking else ''}")
    host(target).copy_(host(source))
    return target


def _set(op: Any) -> Callable[..., Any]:
    return functools.partial(op.redispatch, _CPU_KEY)


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    if tensor.shape == torch.Size(size):
        return tensor
    new = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    return _OWN[torch.ops.aten.set_.source_Storage_storage_offset](
        tensor, new.untyped_storage(), 0, new.shape, new.stride()
    )


_aten = torch.ops.aten
_OWN: dict[Any, Callable[..., Any]] = {
    _aten._copy_from.default: _copy_from,
    _aten._copy_from_and_resize.default: _copy_from,
    _aten.record_stream.default: lambda tensor, stream: calls.append("record_stream"),
    _aten.resize_.default: _resize,
    **{op: _set(op) for op in (_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset)},
    **{op: _set(op) for op in (_aten.set_.source_Tensor, _aten.as_strided.default)},
}


# ---- autocast --------------------------------------------------------------------------------------------------------


def _autocast(op: Any, wanted: Callable[[], torch.dtype]) -> Callable[..., Any]:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

    def in_dtype(*args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            eligible = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == NAME
            return value.to(wanted()) if eligible and value.dtype != torch.float64 else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return in_dtype


# ---- the module torch.fake -------------------------------------------------------------------------------------------


class _Random:
    """The device's generator."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(0).get_state()

    def draw(self, function: Callable[[], Any]) -> Any:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        try:
            return function()
        finally:
            self.state = torch.default_generator.get_state()
            torch.default_generator.set_state(before)


random = _Random()


class Event(torch.Event):
    """An event: nothing of this device is ever late."""

    def __new__(cls, enable_timing: bool = False) -> Event:
        return super().__new__(cls, NAME, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        calls.append("event")
        super().record(stream or torch.accelerator.current_stream())

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        calls.append("wait for event")


class Module:
    """What torch asks of the module of such a device."""

    Event = Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return "Fake 1"

    def synchronize(self, device: Any = None) -> None:
        calls.append("wait for device")

    def manual_seed_all(self, seed: int) -> None:
        random.state = torch.Generator().manual_seed(seed).get_state()

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return random.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        random.state = state.clone()

    def memory_allocated(self, device: Any = None) -> int:
        return memory.now

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.peak = memory.now

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": memory.now, "allocated_bytes.all.peak": memory.peak}

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**30 - memory.now, 2**30

    def empty_cache(self) -> None:
        calls.append("empty_cache")


# ---- a process group -------------------------------------------------------------------------------------------------


class Group(dist.ProcessGroup):
    """Gloo on the memory of the device's tensors; tensors of the host are taken too."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def _set_default_backend(self, backend_type: Any) -> None: ...

    def size(self) -> int:
        return self.gloo.size()

    def rank(self) -> int:
        return self.gloo.rank()


def _collective(name: str) -> Callable[..., Any]:
    def call(self: Group, *args: Any) -> Any:
        calls.append(name)
        return getattr(self.gloo, name)(*pytree.tree_map(host, args))

    return call


for _name in ("allreduce", "broadcast", "allgather", "barrier", "reduce", "scatter", "gather"):
    setattr(Group, _name, _collective(_name))


def install() -> None:
    """Make torch know the device in this process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    torch.autograd.set_multithreading_enabled(False)  # a fork of a process that ran backward has no device threads
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for names, dtype in ((_HALF, lambda: torch.get_autocast_dtype(NAME)), (_FULL, lambda: torch.float32)):
        for name in names:
            op = functools.reduce(getattr, f"{name}{'' if '.' in name else '.default'}".split("."), _aten)
            aten.impl(name, _autocast(op, dtype), "AutocastPrivateUse1")
    pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    def pin(tensor: Tensor, device: Any = None) -> Tensor:
        copied = tensor.clone()
        pinned.add(copied.untyped_storage())
        return copied

    def empty(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **_: Any
    ) -> Tensor:
        strides = [math.prod(max(length, 1) for length in size[index + 1 :]) for index in range(len(size))]
        made = _aten.empty_strided.default(size, strides, dtype=dtype, layout=layout, device=device)
        if pin_memory:
            pinned.add(made.untyped_storage())
        return made

    aten.impl("_pin_memory", pin, "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that its own kernel is replaced
        aten.impl("empty.memory_format", empty, "CPU", allow_override=True)
    aten.impl("is_pinned", lambda tensor, device=None: tensor.untyped_storage() in pinned, "CPU")
    _libraries.extend((every, aten))
    dist.Backend.register_backend(BACKEND, Group, devices=[NAME])
