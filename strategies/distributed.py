"""Several processes with one device each: how they start, join a process group and communicate."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import messages
from ..big_model.quantized_layers import quantized_layers
from ..devices.kinds import kind_of
from ..processes import launch
from ..processes.cluster_environment import Cluster, find_cluster
from ..processes.device_transfer import in_dtype
from ..processes.environments import ClusterEnvironment, of_cluster
from ..processes.hang_watch import Watch
from ..processes.host_program import START_METHODS, StartMethod, find_host, fork_obstacle, start_method_in
from ..processes.process_group import host_room, is_shared, join, leave_alone
from ..processes.stop_agreement import Stop
from ..processes.timings import phase
from ..torch_private import ignored_by_ddp, pytree
from . import sync_batch_norm
from .base import Strategy
from .communication import ReduceOp, UnlikeTensorsError
from .differentiable_collectives import all_gather
from .precision.base import Precision, parameters, precision_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class ProcessOptions(TypedDict, total=False):
    """Arguments of :class:`DistributedStrategy` that its subclasses pass on."""

    process_group_backend: str | None
    init_method: str | None
    timeout: timedelta
    start_method: StartMethod
    numa: bool


def passes_on(*bases: Callable[..., None], decided: Sequence[str] = ()) -> Callable[[F], F]:
    """Decorator for a constructor with ``**options``: lists the options in its signature and rejects any others.

    Args:
        bases: the constructors that take the options.
        decided: arguments of these constructors that the strategy sets itself.
    """

    def decorate(init: F) -> F:
        owner, signature = init.__qualname__.partition(".")[0], inspect.signature(init)
        found = dict(signature.parameters)
        for base in bases:
            types = get_type_hints(base)
            for name, taken in inspect.signature(base).parameters.items():
                if name not in decided:
                    annotation = types.get(name, taken.annotation)
                    found.setdefault(name, taken.replace(kind=taken.KEYWORD_ONLY, annotation=annotation))
        shown = [parameter for parameter in found.values() if parameter.kind is not parameter.VAR_KEYWORD]
        names = [parameter.name for parameter in shown if parameter.name != "self"]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name in decided:
                    raise TypeError(f"{owner}({name}=...): the strategy sets this argument itself, so leave it out.")
                if name not in names:
                    raise TypeError(messages.unknown(f"{owner} argument", name, names))
            init(self, *args, **options)

        vars(checked)["__signature__"] = signature.replace(parameters=shown)
        typed = {one.name: one.annotation for one in shown if one.annotation is not one.empty}
        checked.__annotations__ = {**typed, **init.__annotations__}
        return checked  # type: ignore[return-value]

    return decorate


class DistributedStrategy(Strategy):
    """Runs one process per device, joined in a torch.distributed process group. Subclasses distribute the model.

    The group exists until the process ends, so a ``test`` after a ``fit`` reuses it. Barriers, agreements and Python
    objects use a separate gloo group, so they never wait for a GPU, and a barrier never pairs up with a different
    collective on another rank.

    Args:
        precision: dtypes and loss scaling; the Trainer's if None.
        process_group_backend: the process group's backend; if None, gloo for CPU tensors and NCCL for CUDA tensors.
        init_method: the rendezvous URL, as for ``init_process_group``; the launcher's address if None.
        timeout: how long a collective waits for the other processes.
        start_method: how the ranks start if there is no launcher: ``"popen"`` runs the command again; ``"spawn"``,
            ``"fork"`` and ``"forkserver"`` call the function in new processes. ``"auto"`` chooses ``"popen"`` in a
            script; elsewhere (pytest, notebooks), it chooses ``"fork"``, or ``"spawn"`` if this process cannot be
            forked and a new process can import the code.
        numa: bind each process to the cores of its GPU's NUMA node.
    """

    communicates_gradients: ClassVar[bool] = True

    def __init__(
        self,
        precision: Precision | None = None,
        *,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: StartMethod = "auto",
        numa: bool = False,
    ) -> None:
        self.precision = precision_of(self, precision)
        if start_method not in START_METHODS:
            raise ValueError(messages.unknown(f"{type(self).__name__} start_method", start_method, START_METHODS))
        self.process_group_backend = process_group_backend
        self.init_method = init_method
        self.timeout = timeout
        self.start_method: StartMethod = start_method
        self.numa = numa
        self.devices: list[torch.device] = []
        #: Parameters that every process trains for itself.
        self._kept_local: set[nn.Parameter] = set()
        self._nodes = 1
        self._cluster: Cluster | None = None
        self._environment: ClusterEnvironment | None = None
        self._host: Any = None
        self._beside: DistributedStrategy | None = None
        self._watch: Watch | None = None
        self._abandoned = False
        self._synchronized: list[Any] = []

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        """The object that reads this process's rank from its launcher."""
        return self._environment or of_cluster(self._cluster)

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._environment = environment

    def _find_cluster(self) -> Cluster | None:
        if self._environment is None:
            return find_cluster()
        return self._environment.cluster(len(self.devices), self._nodes)

    # ---- placement ---------------------------------------------------------------------------------------------------

    def place(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Set the device of each process on this machine, and the number of machines. Call this first."""
        self.devices, self._nodes = list(devices), num_nodes
        self._stand(self._find_cluster())
        written = f"{type(self).__name__}(process_group_backend='nccl')"
        check_backend(self.process_group_backend, self.device.type, written)

    def _stand(self, cluster: Cluster | None) -> None:
        """Use the rank and device that the launcher assigned to this process; without a launcher, those of rank 0."""
        self._cluster = cluster
        local = cluster.local_rank if cluster else 0
        self.device = self.devices[local if local < len(self.devices) else 0]
        self.precision.use_on(self.device)
        if cluster is not None:
            messages.set_rank(cluster.rank)
        if os.environ.get(launch.LAUNCHED):
            launch.register_failure_hook()

    def for_another_module(self) -> Self:
        other = super().for_another_module()
        other._synchronized = []
        return other

    def settle_batch_norm(self, module: nn.Module, synchronize: bool) -> None:
        layers = sync_batch_norm.trained(module)
        if self.num_data_ranks == 1 or not layers:
            return
        if synchronize:
            self._synchronized += sync_batch_norm.synchronize(module, self.device)
            return
        messages.info_once(
            f"{type(module).__name__} has batch norm layers ({len(layers)} in total) that see only their own "
            "process's batch, so the results differ from those of a single process that sees all "
            f"{self.num_data_ranks} batches. Trainer(sync_batchnorm=True) makes the results match, at the cost of two "
            "small reductions per layer."
        )

    def same_model(self, module: nn.Module) -> None:
        """Raise on every rank if the ranks built different models; the error shows the first difference."""
        owner, named = type(module).__name__, list(module.named_parameters())
        if not self.holds_whole_module and quantized_layers(module):
            raise RuntimeError(
                f"{owner} has quantized bitsandbytes layers, which {type(self).__name__} cannot shard. Use "
                "a model without quantized layers, or strategy='ddp', where each process holds the whole model."
            )
        shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named]
        values = [(name, p.detach().to(in_dtype(p.dtype, torch.float64))) for name, p in named if not p.is_meta]
        sums = {name: str(value.sum().item()) for name, value in values}
        found = self.gather_objects((shapes, sums))
        for rank, (theirs, _) in enumerate(found):
            if theirs != shapes:
                pairs = zip(shapes, theirs, strict=False)
                counts = (f"{len(shapes)} parameters", f"{len(theirs)} parameters")
                here, there = next(((a, b) for a, b in pairs if a != b), counts)
                raise RuntimeError(
                    f"{owner} differs between the ranks: rank {self.global_rank} has {here}, rank {rank} has {there}. "
                    "Build the same model on every rank. No layer may depend on the rank or on the rank's share of "
                    "the data."
                )
        odd = [name for name in sums if any(other.get(name) != sums[name] for _, other in found)]
        if odd:
            messages.info_once(
                f"The ranks built {owner} with different weights ({', '.join(odd[:5])}{' ...' if odd[5:] else ''}), "
                "so all ranks start from rank 0's weights. Call seed_everything before you build the model to get "
                "the same weights every time."
            )

    @property
    def device_ids(self) -> list[int]:
        return [idx if device.index is None else device.index for idx, device in enumerate(self.devices)]

    # ---- communication: the processes --------------------------------------------------------------------------------

    @property
    def launcher(self) -> Callable[..., Any] | None:
        if is_shared() or self._find_cluster() is not None or len(self.devices) * self._nodes == 1:
            return None
        return self._launch

    def _launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Start the processes. Depending on the start method, each reruns the command or calls ``function``."""
        leave_alone()  # the group of an earlier run in one process
        kind, count, environment = self.device.type, len(self.devices), self._environment
        if environment is not None and environment.local_rank() != 0:
            raise RuntimeError(
                f"{type(environment).__name__}.creates_processes_externally is False, so one process must start the "
                f"others, but this process is not the first: its local_rank() is {environment.local_rank()}. If a "
                "launcher starts all processes, make creates_processes_externally return True."
            )
        method = start_method_in(find_host(), self.start_method, fork_obstacle(kind), self._nodes)
        if method == "popen":
            launch.rerun(count, self._nodes, devices_kind=kind, numa=self.numa)
        return launch.start(function, args, count, method, kind, self.numa)

    @phase("joining the group")
    def setup_environment(self) -> None:
        self._stand(self._find_cluster())
        super().setup_environment()
        join(self._cluster, self.backend, self.timeout, self.device, self.init_method)
        if dist.get_world_size() != self.world_size:
            raise RuntimeError(
                f"A process group with world size {dist.get_world_size()} already exists, but this run has world size "
                f"{self.world_size} (devices={len(self.devices)}, num_nodes={self._nodes}). Let Paceline call "
                "init_process_group, or set devices and num_nodes to match that group."
            )
        self._host, self._watch = host_room(self.timeout)
        self._watch.progress = lambda: self.progress()
        self._abandoned = False

    def told_at_start(self) -> str:
        if self.world_size == 1 or (launch.LAUNCHED in os.environ and launch.JOINED not in os.environ):
            return ""  # `paceline launch` has already printed this message
        name = (*self.names, type(self).__name__)[0]
        machines = f" of {self.num_nodes} machines" if self.num_nodes > 1 else ""
        backend = self.backend.rpartition(":")[2]
        text = f"on {self.world_size} processes{machines} ({name}, {backend}, {self.device.type})"
        if launch.LAUNCHED in os.environ:  # the strategy ran the command again
            text += "; each process runs the script, so code above this call runs in all processes"
        return text

    @property
    def backend(self) -> str:
        """The process group's backend."""
        if self.process_group_backend is not None:
            return self.process_group_backend
        backend = kind_of(self.device).collective_backend()
        return backend if backend == "gloo" else f"cpu:gloo,{self.device.type}:{backend}"

    @property
    def world_size(self) -> int:
        return self._cluster.world_size if self._cluster else len(self.devices) * self._nodes

    @property
    def global_rank(self) -> int:
        return self._cluster.rank if self._cluster else 0

    @property
    def local_rank(self) -> int:
        return self._cluster.local_rank if self._cluster else 0

    @property
    def node_rank(self) -> int:
        return self._cluster.node_rank if self._cluster else 0

    @property
    def num_nodes(self) -> int:
        return self._cluster.num_nodes if self._cluster else self._nodes

    @property
    def talks(self) -> bool:
        """Whether this process communicates: other processes have joined, and no error has ended the run."""
        return self._host is not None and self.world_size > 1 and not self._abandoned

    @property
    def host_group(self) -> Any:
        return self._host

    def beside(self) -> DistributedStrategy:
        if self._beside is None:
            self._beside = copy.copy(self)
            self._beside._host = dist.new_group(backend="gloo", timeout=self.timeout)
            self._beside._watch = None  # the watch only reports where the main thread waits
        return self._beside

    def _at(self, place: str) -> AbstractContextManager[None]:
        """Context manager for waiting at ``place``; if waiting fails, the error shows where the other ranks are."""
        return nullcontext() if self._watch is None else self._watch.waiting(place)

    def explain(self, error: BaseException) -> BaseException | None:
        return self._watch.explain(error) if self._watch is not None else None

    def abandon(self, error: BaseException) -> None:
        launch.note_failure(error)
        self._abandoned = True

    def teardown(self) -> None:
        self._abandoned = False
        sync_batch_norm.release(self._synchronized)
        self._synchronized = []
        if self._environment is not None:
            self._environment.teardown()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_host": None, "_watch": None, "_beside": None, "progress": str}

    # ---- communication: collectives ----------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp = "mean", group: Any = None) -> Tensor:
        if op not in _OPS:
            raise ValueError(messages.unknown("reduce operation", op, _OPS))
        if not self.talks:
            return tensor
        reduced = tensor.detach().clone()
        if op == "mean" and not reduced.is_floating_point() and not reduced.is_complex():
            reduced = reduced.to(torch.get_default_dtype())
        with self._at(f"reduce({op})"):
            dist.all_reduce(reduced, _OPS[op], group=group)
        return reduced / dist.get_world_size(group) if op == "mean" else reduced

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        if not self.talks:
            if self._abandoned:
                raise RuntimeError(
                    "all_gather was called after an error. Ranks that did not fail may never make this call, so this "
                    "rank could wait for them forever. Do not call all_gather in code that handles errors."
                )
            return data
        with self._at("all_gather"):
            self._same_shapes(data, group)
            return pytree.tree_map_only(
                Tensor, lambda tensor: all_gather(tensor if sync_grads else tensor.detach(), group), data
            )

    def _same_shapes(self, data: Any, group: Any) -> None:
        """Raise on every rank if the ranks' tensors differ, because the collective would mix them up or hang."""
        mine = [(tuple(t.shape), str(t.dtype)) for t in pytree.tree_leaves(data) if isinstance(t, Tensor)]
        found = self.unlike(mine, group)
        if found:
            listed = "; ".join(f"rank {rank}: {shapes}" for rank, shapes in enumerate(found))
            raise UnlikeTensorsError(
                f"all_gather needs tensors of the same shapes and dtypes on every rank, but got {listed}. Pad them to "
                "the same shape, or gather a single number from each rank.",
                found,
            )

    def gather_objects(self, obj: T, group: Any = None) -> list[T]:
        if not self.talks:
            return [obj]
        found: list[Any] = [None] * dist.get_world_size(group)
        with self._at("gather_objects"):
            dist.all_gather_object(found, obj, group=group or self._host)
        return found

    def scatter_objects(self, objects: Sequence[T] | None) -> T:
        if not self.talks:
            return super().scatter_objects(objects)
        box: list[Any] = [None]
        with self._at("scatter_objects"):
            given: Any = list(objects) if objects is not None and self.global_rank == 0 else None
            dist.scatter_object_list(box, given, src=0, group=self._host)
        return box[0]

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not self.talks:
            return obj
        box = [obj]
        with self._at("broadcast"):
            dist.broadcast_object_list(box, src, group=self._host, device=torch.device("cpu"))
        return box[0]

    def broadcast_tensor(self, tensor: Tensor, src: int = 0) -> Tensor:
        if not self.talks:
            return tensor
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._at("broadcast_tensor"):
            dist.broadcast(sent, src)
        return sent

    def barrier(self, name: str = "", timeout: timedelta | None = None) -> None:
        if not self.talks:
            return
        with self._at(f"barrier {name!r}"):
            same = self._same(name, timeout or self.timeout)
        if not same:
            names = self.gather_objects(name)
            listed = ", ".join(f"rank {rank} at {name!r}" for rank, name in enumerate(names))
            raise RuntimeError(
                f"The ranks are waiting at different barriers: {listed}. Every rank must make the same calls. Look "
                "for a call that is inside `if trainer.is_global_zero` or `if accelerator.is_main_process`."
            )

    def before_evaluation(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers, such as batch norm statistics, because checkpoints contain only rank 0's."""
        if self.talks:
            ignored = ignored_by_ddp(module)
            same_tensors((b for name, b in module.named_buffers() if name not in ignored), self.data_group)

    def complete_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters(optimizer):
            if parameter.grad is not None and parameter not in self._kept_local:
                parameter.grad = self.reduce(parameter.grad, "mean")

    # ---- communication: agreement ------------------------------------------------------------------------------------

    def agree(self, flag: bool, all: bool = False) -> bool:
        if not self.talks:
            return flag
        said = torch.tensor([flag], dtype=torch.int32)
        with self._at("agree"):
            dist.all_reduce(said, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self._host)
        return bool(said.item())

    def same(self, text: str, place: str = "same") -> bool:
        with self._at(place):
            return not self.talks or self._same(text, self.timeout)

    def _same(self, text: str, timeout: timedelta) -> bool:
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        both = torch.tensor([digest, -digest])
        work: Any = dist.all_reduce(both, dist.ReduceOp.MAX, group=self._host, async_op=True)
        work.wait(timeout)
        return bool(both[0] == -both[1])

    def unlike(self, description: T, group: Any = None) -> list[T]:
        if not self.talks or (group is None and self._same(repr(description), self.timeout)):
            return []
        found = self.gather_objects(description, group)
        return found if any(other != found[0] for other in found) else []

    def begin_run(self, run: Any) -> None:
        if self._watch is not None:
            self._watch.begin(run)

    def is_told_to_stop(self) -> bool:
        return self._watch is not None and self._watch.vote is not None and self._watch.vote.told

    def decide_stop(self, boundary: int, signum: int, wants: bool) -> Stop:
        vote = self._watch.vote if self._watch is not None and self.talks else None
        return vote.decide(boundary, signum, wants) if vote else super().decide_stop(boundary, signum, wants)

    def reports(self) -> dict[int, str] | None:
        return self._watch.reports() if self._watch is not None and self.world_size > 1 else super().reports()


def check_backend(backend: str | None, kind: str, written: str) -> None:
    """Raise if the backend is NCCL but the devices are not CUDA; ``written`` is the user's setting, for the error."""
    if backend == "nccl" and kind != "cuda":
        raise ValueError(
            f"{written}: NCCL only works with CUDA devices, but this run is on {kind!r}. Leave the backend out; the "
            "default is gloo on the CPU and NCCL on GPUs."
        )


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], groups: Sequence[Any]) -> None:
    """Average the gradients of unsharded parameters across the processes, in one reduction per dtype and device.

    A missing gradient counts as zero, and stays missing if no process has one.

    Args:
        parameters: the parameters, which must be the same on every process.
        groups: process groups to average across, one after another; a mesh has one group per dimension. An entry that
            is None means all processes.
    """
    count = math.prod(map(dist.get_world_size, groups))
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in kinds.values():
        grads = [p.new_zeros(p.shape) if p.grad is None else p.grad.to_dense() for p in members]
        present = members[0].new_tensor([p.grad is not None for p in members])
        together = torch.cat([*(grad.reshape(-1) for grad in grads), present]) / count
        for group in groups:
            dist.all_reduce(together, group=group)
        *averages, present = together.split([*(p.numel() for p in members), len(members)])
        for p, average, share in zip(members, averages, present, strict=True):
            if p.grad is not None or share:  # only a process that lacks a gradient waits for the device
                p.grad = average.view_as(p)


@torch.no_grad()
def same_tensors(tensors: Iterable[Tensor], group: Any) -> None:
    """Copy tensors from the first process of a group to the others, in one operation per dtype."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if type(tensor) is Tensor and tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    if dist.get_world_size(group) > 1:
        for alike in kinds.values():
            together = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(together, group=group, group_src=0)
            for tensor, values in zip(alike, together.split([one.numel() for one in alike]), strict=True):
                tensor.copy_(values.view_as(tensor))
