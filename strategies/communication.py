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

    #: Says in words what the run is doing just now; set by whoever runs it.
    progress: Callable[[], str] = str

    # ---- the processes ---------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Callable[..., Any] | None:
        """``launcher(function, *args)`` starts the other processes and returns rank 0's result; None: none to start."""
        return None

    def told_at_start(self) -> str:
        """How many processes run what, in words; empty for one process, and if the user has been told already."""
        return ""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1

    @property
    def global_rank(self) -> int:
        """This process among all, 0-based."""
        return 0

    @property
    def local_rank(self) -> int:
        """This process among those of its node, 0-based."""
        return 0

    @property
    def node_rank(self) -> int:
        """This process's node, 0-based."""
        return 0

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.global_rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of the data this process sees, 0-based; processes that hold parts of one model see the same."""
        return self.global_rank

    @property
    def num_data_ranks(self) -> int:
        """Into how many shares the data are split."""
        return self.world_size

    @property
    def data_group(self) -> Any:
        """The process group in which each share of the data is seen once; None: all processes."""
        return None

    @property
    def host_group(self) -> Any:
        """The process group that communicates between hosts, for a library that needs one; None: there is none."""
        return None

    def beside(self) -> Self:
        """The same processes on a channel of their own, for a thread that communicates during the run.

        Every process must call.
        """
        return self

    # ---- collectives -----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp = "mean", group: Any = None) -> Tensor:
        """Reduce a tensor over all processes; the result has its shape and is on every process."""
        return tensor

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stack tensors of all processes along a new first dimension (none added when there is one process)."""
        return data

    def gather_objects(self, obj: T, group: Any = None) -> list[T]:
        """Every process's object, by rank, on every process."""
        return [obj]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return process ``src``'s object on every process."""
        return obj

    def broadcast_tensor(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Process ``src``'s tensor on every process, from device to device; all pass one of that shape and dtype."""
        return tensor

    def scatter_objects(self, objects: Sequence[T] | None) -> T:
        """This process's entry of the list that process 0 passes, in which each has one. Pickled over the host."""
        if objects is None:
            raise ValueError("scatter_objects needs a list with an entry for each process from process 0.")
        return objects[0]

    def barrier(self, name: str = "", timeout: timedelta | None = None) -> None:
        """Wait until every process is here; ``name`` appears in the error when one does not come."""

    def compute_metric(self, metric: Any) -> Any:
        """The value of a torchmetrics ``Metric`` over all processes; every process must call."""
        return metric.compute()

    def before_evaluation(self, module: nn.Module) -> None:
        """Give all processes the same model before they evaluate it, if theirs may differ."""

    # ---- agreement -------------------------------------------------------------------------------------------------

    def agree(self, flag: bool, all: bool = False) -> bool:
        """Whether any (or ``all``) of the processes says yes. Runs over the host, without waiting for the device."""
        return flag

    def same(self, text: str, place: str = "same") -> bool:
        """Whether all processes pass the same text. ``place`` says where a process waits if another does not come."""
        return True

    def unlike(self, description: T, group: Any = None) -> list[T]:
        """What every process passed, by rank, if they differ; nothing if they are the same, at the cost of 16 bytes."""
        return []

    def begin_run(self, run: Any) -> None:
        """A run begins, in every process. Others may stop it through ``run``, a :class:`~.stop_agreement.Run`."""

    def is_told_to_stop(self) -> bool:
        """Whether another process has asked this run to stop."""
        return False

    def decide_stop(self, boundary: int, signum: int, wants: bool) -> Stop:
        """At which boundary all processes stop; see :meth:`.stop_agreement.StopVote.decide`."""
        return Stop(boundary, signum, (self.global_rank,))

    def reports(self) -> dict[int, str] | None:
        """What every process is doing now, by rank; None while another process collects the reports."""
        return {self.global_rank: f"{self.progress()}\n{stacks()}"}

    def abandon(self, error: BaseException) -> None:
        """An error ends the run: no longer wait for other processes, which may not have it."""
