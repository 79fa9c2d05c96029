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
    """Processes passed tensors of different shapes or dtypes to a collective; ``found`` lists them by rank."""

    def __init__(self, text: str, found: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.found = found


class Communication:
    """The processes of a run: how they start, which one this is, what they exchange, and how they stop together.

    By default there is one process, so collectives return their input. To run several, derive from
    ``DistributedStrategy``, which overrides everything here. If several of its processes see the same data, override
    ``data_rank``, ``num_data_ranks`` and ``data_group`` as well.
    """

    #: Returns a description of what the run is doing now; set by the run.
    progress: Callable[[], str] = str

    # ---- the processes ---------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Callable[..., Any] | None:
        """Starts the other processes: ``launcher(function, *args)`` returns rank 0's result. None if there are none."""
        return None

    def told_at_start(self) -> str:
        """The startup message about processes; empty for a single process, or if it was printed before."""
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

    @property
    def data_group(self) -> Any:
        """A process group with one process for each share of the data; None means all processes."""
        return None

    @property
    def host_group(self) -> Any:
        """The process group that communicates over the host; None if there is none."""
        return None

    def beside(self) -> Self:
        """A copy with its own process group, for a thread that communicates during the run.

        Every process must call this.
        """
        return self

    # ---- collectives -----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp = "mean", group: Any = None) -> Tensor:
        """Reduce a tensor over all processes. Every process gets the result, in the tensor's shape."""
        return tensor

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stack the tensors of all processes in a new first dimension; a single process gets its data unchanged."""
        return data

    def gather_objects(self, obj: T, group: Any = None) -> list[T]:
        """Gather every process's object, by rank, on every process. Pickled, over the host: for small objects."""
        return [obj]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Send process ``src``'s object to every process; returns it."""
        return obj

    def broadcast_tensor(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Send process ``src``'s tensor to every process, device to device; all must pass the same shape and dtype."""
        return tensor

    def scatter_objects(self, objects: Sequence[T] | None) -> T:
        """This process's entry in process 0's list, which has one entry per process. Sent over the host as a pickle."""
        if objects is None:
            raise ValueError("scatter_objects: process 0 must pass a list with one entry per process.")
        return objects[0]

    def barrier(self, name: str = "", timeout: timedelta | None = None) -> None:
        """Wait for every process; ``name`` appears in the error if one does not arrive."""

    def compute_metric(self, metric: Any) -> Any:
        """The value of a torchmetrics ``Metric`` over all processes; every process must call this."""
        return metric.compute()

    def before_evaluation(self, module: nn.Module) -> None:
        """Make the model identical on all processes before an evaluation, if it may differ between them."""

    # ---- agreement -------------------------------------------------------------------------------------------------

    def agree(self, flag: bool, all: bool = False) -> bool:
        """Whether any process (with ``all``, every one) passes True. Runs over the host and does not wait for a GPU."""
        return flag

    def same(self, text: str, place: str = "same") -> bool:
        """Whether all processes pass the same text. ``place`` names the call in the error if a process is missing."""
        return True

    def unlike(self, description: T, group: Any = None) -> list[T]:
        """Each process's description, by rank, if they differ; otherwise an empty list, which costs only 16 bytes."""
        return []

    def begin_run(self, run: Any) -> None:
        """Called in every process when a run begins; others can stop it through ``run``, a ``stop_agreement.Run``."""

    def is_told_to_stop(self) -> bool:
        """Whether another process has asked this run to stop."""
        return False

    def decide_stop(self, boundary: int, signum: int, wants: bool) -> Stop:
        """The boundary at which all processes stop; see :meth:`.stop_agreement.StopVote.decide`."""
        return Stop(boundary, signum, (self.global_rank,))

    def reports(self) -> dict[int, str] | None:
        """What every process is doing now, by rank; None while another process collects the reports."""
        return {self.global_rank: f"{self.progress()}\n{stacks()}"}

    def abandon(self, error: BaseException) -> None:
        """Called when an error ends the run: stop waiting for other processes, which may not have failed."""
