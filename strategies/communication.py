"""Who talks to whom: the second third of a :class:`.base.Strategy`."""

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
    """Processes gave a collective tensors of different shapes or dtypes; ``found`` has those of each, by rank."""

    def __init__(self, text: str, found: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.found = found


class Communication:
    """The processes of a run: how they start, which one this is, what they exchange, and how they stop together.

    By default there is one process, so collectives return what they get. To run several, derive from
    ``DistributedStrategy``, which overrides everything here; what is left to override is ``data_rank``,
    ``num_data_ranks`` and ``data_group``, for a strategy in which several processes see the same data.
    """

    #: Returns a text that says what the run is doing now; the run sets it.
    progress: Callable[[], str] = str

    # ---- the processes ---------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Callable[..., Any] | None:
        """``launcher(function, *args)`` starts the other processes and returns rank 0's result; None: none to start."""
        return None

    def told_at_start(self) -> str:
        """How many processes run, and how; empty for a single process, and if the user already knows."""
        return ""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1

    @property
    def global_rank(self) -> int:
        """Index of this process among all, 0-based."""
        return 0

    @property
    def local_rank(self) -> int:
        """Index of this process among those on its machine, 0-based."""
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
        """Whether this process writes files and speaks to the user."""
        return self.global_rank == 0

    @property
    def data_rank(self) -> int:
        """Index of the share of the data that this process sees; processes with parts of one model see the same."""
        return self.global_rank

    @property
    def num_data_ranks(self) -> int:
        """Number of shares that the data are split into."""
        return self.world_size

    @property
    def data_group(self) -> Any:
        """A process group in which each share of the data is seen once; None: all processes."""
        return None

    @property
    def host_group(self) -> Any:
        """The process group that communicates over the host; None if there is none."""
        return None

    def beside(self) -> Self:
        """The same processes with a channel of their own, for a thread that communicates during the run.

        Every process must call this.
        """
        return self

    # ---- collectives -----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp = "mean", group: Any = None) -> Tensor:
        """Reduce a tensor over all processes; each gets the result, which has the tensor's shape."""
        return tensor

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stack the tensors of all processes in a new first dimension; a single process gets its data unchanged."""
        return data

    def gather_objects(self, obj: T, group: Any = None) -> list[T]:
        """Every process's object, by rank, on every process. Pickled over the host: for small objects."""
        return [obj]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Process ``src``'s object on every process."""
        return obj

    def broadcast_tensor(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Process ``src``'s tensor on every process, from device to device; all pass the same shape and dtype."""
        return tensor

    def scatter_objects(self, objects: Sequence[T] | None) -> T:
        """This process's entry of process 0's list, which has one for each process. Pickled over the host."""
        if objects is None:
            raise ValueError("scatter_objects needs a list with an entry for each process from process 0.")
        return objects[0]

    def barrier(self, name: str = "", timeout: timedelta | None = None) -> None:
        """Wait for every process; ``name`` appears in the error if one does not come."""

    def compute_metric(self, metric: Any) -> Any:
        """The value of a torchmetrics ``Metric`` over all processes; every process must call this."""
        return metric.compute()

    def before_evaluation(self, module: nn.Module) -> None:
        """Give all processes the same model before they evaluate it, if theirs may differ."""

    # ---- agreement -------------------------------------------------------------------------------------------------

    def agree(self, flag: bool, all: bool = False) -> bool:
        """Whether any of the processes (or ``all``) passes True. Runs over the host, without waiting for the device."""
        return flag

    def same(self, text: str, place: str = "same") -> bool:
        """Whether all processes pass the same text. ``place`` says where a process waits if another does not come."""
        return True

    def unlike(self, description: T, group: Any = None) -> list[T]:
        """What each process passed, by rank, if they differ; an empty list if not, which costs 16 bytes."""
        return []

    def begin_run(self, run: Any) -> None:
        """A run begins, in every process. Others can stop it through ``run``, a :class:`~.stop_agreement.Run`."""

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
        """An error ends the run: stop waiting for other processes, which may not have failed."""
