"""The part of a :class:`.base.Strategy` that communicates between processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor, nn

from ..processes.stop_agreement import Stop
from ..processes.thread_stacks import stacks

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
ReduceOp = Literal["mean", "sum", "min", "max"]


class UnlikeTensorsError(ValueError):
    """Raised if processes pass different shapes or dtypes to a collective; ``found`` lists what each rank passed."""

    def __init__(self, text: str, found: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.found = found


class Communication:
    """The processes of a run: how they start, their ranks, what they exchange, and how they stop together.

    By default there is one process, so collectives return their input. To run several processes, derive from
    ``DistributedStrategy``, which implements the collectives with torch.distributed. If some processes see the same
    data, also override ``data_rank``, ``num_data_ranks`` and ``data_group``.
    """

    #: Returns a description of what the run is doing now; set by the run.
    progress: Callable[[], str] = str

    # ---- the processes ---------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Callable[..., Any] | None:
        """The function that starts the other processes; None if there are none to start.

        ``launcher(function, *args)`` returns rank 0's result.
        """
        return None

    def told_at_start(self) -> str:
        """Return the startup message about the processes; empty for a single process, or if it was already printed."""
        return ""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes, 0-based."""
        return 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, 0-based."""
        return 0

    @property
    def node_rank(self) -> int:
        """Index of this machine, 0-based."""
        return 0

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.global_rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this process's share of the data; processes that split one model see the same share."""
        return self.global_rank

    @property
    def num_data_ranks(self) -> int:
        """Number of shares that the data is split into."""
        return self.world_size

    def place_on(self, axis: str) -> int:
        """Return this process's coordinate along a dimension of parallelism, 0-based.

        Args:
            axis: ``"pp"``, ``"dp_replicate"``, ``"dp_shard"``, ``"cp"`` or ``"tp"``. The coordinate is 0 along a
                dimension that this strategy does not use.
        """
        return self.global_rank if axis == "dp_replicate" else 0

    @property
    def data_group(self) -> Any:
        """A process group with one process for each share of the data; None means all processes."""
        return None

    @property
    def parts_group(self) -> Any:
        """Like :attr:`data_group`, but with one process for each part of each data share if sequences are split."""
        return self.data_group

    @property
    def host_group(self) -> Any:
        """The process group for CPU tensors and objects; None if there is none."""
        return None

    def beside(self) -> Self:
        """Return a copy of the strategy with its own process group, for a thread that communicates during the run.

        Every process must call this.
        """
        return self

    # ---- collectives -----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp = "mean", group: Any = None) -> Tensor:
        """Reduce a tensor across all processes. Every process gets the result, which has the same shape."""
        return tensor

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stack the tensors of all processes along a new first dimension.

        If there is only one process, its tensors are returned unchanged.
        """
        return data

    def gather_objects(self, obj: T, group: Any = None) -> list[T]:
        """Return the objects of all processes, in rank order, on every process.

        Use this for small objects only: they are pickled and sent through the CPU process group.
        """
        return [obj]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast an object from process ``src`` to all processes and return it."""
        return obj

    def broadcast_tensor(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Broadcast a tensor from process ``src`` to all processes, from device to device, and return it.

        All processes must pass tensors of the same shape and dtype.
        """
        return tensor

    def scatter_objects(self, objects: Sequence[T] | None) -> T:
        """Return this process's entry in process 0's list, which must have one entry per process.

        The entries are pickled and sent through the CPU process group.
        """
        if objects is None:
            raise ValueError("scatter_objects: process 0 must pass a list with one entry per process.")
        return objects[0]

    def barrier(self, name: str = "", timeout: timedelta | None = None) -> None:
        """Wait until all processes have called this method; if a process does not call it, the error shows ``name``."""

    def compute_metric(self, metric: Any) -> Any:
        """Return the value of a torchmetrics ``Metric`` across all processes; every process must call this."""
        return metric.compute()

    def before_evaluation(self, module: nn.Module) -> None:
        """Make the model identical on all processes before an evaluation, if it may differ between them."""

    # ---- agreement -------------------------------------------------------------------------------------------------

    def agree(self, flag: bool, all: bool = False) -> bool:
        """Return True if any process (or, with ``all``, every process) passes True.

        The processes use the CPU process group, so this method does not wait for a GPU.
        """
        return flag

    def same(self, text: str, place: str = "same") -> bool:
        """Return True if all ranks pass the same text. If a rank does not call this, the error shows ``place``."""
        return True

    def unlike(self, description: T, group: Any = None) -> list[T]:
        """Return the descriptions that all processes pass, in rank order, if they differ; otherwise, an empty list.

        If the descriptions are the same, only 16 bytes are exchanged.
        """
        return []

    def begin_run(self, run: Any) -> None:
        """Called in every process when a run begins.

        Other processes can stop this process through ``run``, a ``stop_agreement.RunProgress``.
        """

    def is_told_to_stop(self) -> bool:
        """Return True if another process has requested that this run stop."""
        return False

    def decide_stop(self, boundary: int, signum: int, wants: bool) -> Stop:
        """Return the step boundary at which all processes will stop; see :meth:`.stop_agreement.StopVote.decide`."""
        return Stop(boundary, signum, (self.global_rank,))

    def reports(self) -> dict[int, str] | None:
        """Return a report on what each process is doing, keyed by rank; None while another process collects reports."""
        return {self.global_rank: f"{self.progress()}\n{stacks()}"}

    def abandon(self, error: BaseException) -> None:
        """Called when an error ends the run. After this call, the process no longer waits for the others."""
