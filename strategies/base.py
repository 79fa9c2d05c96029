"""The one interface between the loop and the machine: where tensors live and who talks to whom.

``Trainer`` and ``Accelerator`` drive the same object. The defaults here are those of a single process; a strategy for
several overrides what differs. Precision is composed in, never subclassed: ``strategy.precision`` decides dtypes and
loss scaling, the strategy decides placement and communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from .. import messages
from ..big_model.deferred_weights import Waiting
from ..big_model.device_map import spread_in
from ..big_model.sharded_loading import all_or_none
from ..processes.stop_agreement import Stop
from ..processes.thread_stacks import stacks
from ..torch_private import multiply_each_
from .foreach_optimizers import prefer_foreach
from .precision.base import Precision, gradients

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import Joinable
    from torch.optim import Optimizer
    from typing_extensions import Self

T = TypeVar("T")
ReduceOp = Literal["mean", "sum", "min", "max"]


class UnlikeTensorsError(ValueError):
    """Processes gave a collective tensors of different shapes or dtypes; ``found`` has those of each, by rank."""

    def __init__(self, text: str, found: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.found = found


class Strategy:
    """One process, one device. Subclasses spread the work over more.

    The order of a run: ``setup_environment`` -> ``setup_module`` -> ``setup_optimizers`` -> steps -> ``teardown``.

    Args:
        device: where the module and the batches live.
        precision: dtypes and loss scaling; full float32 if None.
    """

    #: The names a user can write for this strategy.
    names: ClassVar[tuple[str, ...]] = ()
    #: Whether a forward pass communicates, so that every rank must make as many of them, in evaluation too.
    communicates_forward: bool = False
    #: Whether gradients are communicated, so that accumulating micro-batches should say when.
    communicates_gradients: ClassVar[bool] = False

    #: What the run is doing just now, in words; set by whoever runs it.
    progress: Callable[[], str] = str
    #: Whether a step runs on micro-batches, pieces of a batch, one after the other.
    splits_batches: ClassVar[bool] = False
    #: What of the module that was set up last still waits for values; each that is set up gets one of its own.
    waiting: Waiting = Waiting()

    def __init__(self, device: torch.device | str = "cpu", precision: Precision | None = None) -> None:
        self.device = torch.device(device)
        self.precision = precision or Precision()
        self.precision.use_on(self.device)

    # ---- processes ----------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Callable[..., Any] | None:
        """``launcher(function, *args)`` starts the other processes and returns rank 0's result; None: none to start."""
        return None

    def setup_environment(self) -> None:
        """Make the device current and join the process group. Called once a run, in every process."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def told_at_start(self) -> str:
        """How many processes run what, in words; empty for one, and where the person was told already."""
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
    def device_ids(self) -> list[int]:
        """Indices of the devices of this node's processes, one each; on the CPU 0, 1, ..."""
        return [self.device.index or 0]

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
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.global_rank == 0

    # ---- module and optimizers -------------------------------------------------------------------------------------

    def for_another_module(self) -> Self:
        """The same processes, device and precision, for one more module; after ``setup_environment``, on every rank.

        Only for a strategy that holds no module itself.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which layers are made on this strategy's device and in the precision's dtype."""
        return self.precision.init_context(self.device)

    def empty_init_context(self) -> AbstractContextManager[Any]:
        """Context in which layers are made without memory, to get it when they are set up."""
        raise NotImplementedError(
            f"Trainer.init_module(empty_init=True): {type(self).__name__} holds the whole module in each process and "
            "does not leave weights uninitialized. Leave it out, or use FSDPStrategy."
        )

    def places(self, module: nn.Module) -> bool:
        """Whether :meth:`setup_module` is to bring a module to its place; False: a device map has done so.

        Raises:
            RuntimeError: a device map has spread it, and this strategy has more to do than leave it there.
        """
        spread = spread_in(module)
        if spread is None:
            return True
        name, single = type(spread).__name__, self.world_size == 1 and not self.communicates_forward
        if not single or (spread is not module and self.device.type != "cpu"):
            raise RuntimeError(
                f"{name} was spread by a device map (dispatch_model or load_checkpoint_and_dispatch), which is for one "
                f"process that runs it as it is, not for {type(self).__name__} on {self.world_size} processes and "
                f"{self.device}. To train it in parts, build it under init_empty_weights and fill it with "
                "load_checkpoint_in_model under strategy='fsdp'."
            )
        self.precision.convert_module(module)  # which such a model refuses
        messages.info_once(
            f"{name} stays where its device map has put it. Weights that training changes stay in memory, beyond "
            "max_memory; to train what does not fit, use strategy='fsdp'."
        )
        return False

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Convert the module's dtype, bring it to the device, and shard it if the strategy shards.

        Layers without memory get it, and their initial values.
        """
        module = self.precision.convert_module(module)
        self._materialize(module, self.device)
        return module.to(self.device)

    def _materialize(self, module: nn.Module, device: torch.device) -> None:
        self.waiting = Waiting(module)
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            from ..big_model.materialize import materialize

            self.waiting.unfilled = materialize(module, device, self.waiting.noted)
            self.waiting.take_memory(module, device)

    def settle_weights(self, module: nn.Module, required: bool = True) -> None:
        """Read weights that were noted (see :mod:`.big_model.noted`), unless a checkpoint has brought them.

        Called once the module is set up and a checkpoint's weights are in; every process must call.

        Args:
            module: the module that was set up.
            required: everything must have values by now.

        Raises:
            RuntimeError: something has none.
        """
        if self.waiting.notes:
            all_or_none(partial(self.waiting.read, module), self.gather_objects)
        if required and self.waiting.unfilled:
            self.waiting.check(module, self.gather_objects)

    def settle_batch_norm(self, module: nn.Module, synchronize: bool) -> None:
        """Let batch norms see the batches of all processes, if ``synchronize``. Called before :meth:`setup_module`."""

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        """Wrap a module that is set up, for a strategy whose training step goes through a wrapper."""
        return module

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        """Return the callable that the loop runs in place of a module's bound step, chosen once when the run starts.

        Args:
            step: ``module.training_step``, ``validation_step``, ...
            wrapped: what :meth:`wrap_for_training` returned, in a fit; a wrapper that must see the forward pass routes
                it here.
            training: whether it is the training step.
        """
        return self.precision.bind_forward(step)

    def before_evaluation(self, module: nn.Module) -> None:
        """Make what each process is about to evaluate one model, where they may differ."""

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Take the user's optimizers, return those to use. State that exists already is moved to the device."""
        self.precision.setup_optimizers(optimizers)
        for optimizer in optimizers:
            move_optimizer_state(optimizer, self.device)
        prefer_foreach(optimizers)
        return optimizers

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """Return what brings a batch to the device and the precision's input dtype; None if there is nothing to do."""
        from .batch_transfer import mover

        return mover(self.device, self.precision.input_dtype)

    # ---- one step --------------------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        """Say whether the next backward communicates gradients. Off for all micro-batches of a window but the last."""

    def sync_next_backward(self) -> None:
        """Let the next backward communicate gradients, although its forward was run while they were not."""
        self.sync_gradients(True)

    def requires_grad_changed(self) -> None:
        """Parameters were frozen or thawed while a step runs."""

    def complete_gradients(self, optimizer: Optimizer) -> None:
        """Communicate gradients that were accumulated without, when no backward follows that would do it."""

    def left_gradients(self) -> bool:
        """Whether the backward just run left gradients with this process that it should have communicated.

        Asked once after each backward.
        """
        return False

    def find_latecomers(self, module: nn.Module) -> None:
        """Look for parameters that came, or are trained, since the module was wrapped. Asked when a pass begins."""

    def keep_gradients_local(self) -> AbstractContextManager[Any]:
        """Context in which gradients stay with their process, whatever :meth:`sync_gradients` says."""
        self._needs_whole_model("keep_gradients_local")
        return nullcontext()

    def joinable(self) -> Joinable | None:
        """What :class:`torch.distributed.algorithms.Join` needs for ranks that have fewer batches than others.

        None: backward communicates nothing.
        """
        self._needs_whole_model("joinable")
        return None

    def _needs_whole_model(self, what: str) -> None:
        if self.communicates_gradients:
            raise NotImplementedError(
                f"{type(self).__name__} has no {what}: its processes hold parts of one model and meet in every step, "
                "so none can go on alone. Use strategy 'ddp', where each holds the whole model."
            )

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        """Backward of a scalar loss, shape (), scaled for fp16 if the precision does that; ``how`` runs it instead."""
        loss = self.precision.scale_loss(loss)
        if how is None:
            loss.backward()
        else:
            with self.precision.backward_context():
                how(loss)

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiply every gradient of ``optimizer`` by ``factor``, a number or a scalar tensor, in place."""
        grads = gradients(optimizer)
        if grads:
            multiply_each_(grads, factor)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take fp16's loss scale out of the gradients; a second call before the step does nothing."""
        self.precision.unscale_gradients(optimizer)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients' total norm over all shards; return the norm before, a scalar tensor."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_by_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """One step; returns False when fp16 found an overflow and left the weights as they were."""
        return self.precision.optimizer_step(optimizer, closure)

    def measure_communication(self) -> None:
        """Let what communicates gradients measure how long that takes, in the run that begins."""

    def communication_seconds(self) -> dict[str, float] | None:
        """Seconds gradients were on their way so far.

        Returns:
            ``all``, what of that backward did not hide (``exposed``), and in how many ``steps``; None: not measured.
        """
        return None

    # ---- communication ---------------------------------------------------------------------------------------------

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

    def unlike(self, description: T, group: Any = None) -> list[T]:
        """What every process passed, by rank, if they differ; nothing if they are the same, at the cost of 16 bytes."""
        return []

    def barrier(self, name: str = "", timeout: timedelta | None = None) -> None:
        """Wait until every process is here; ``name`` appears in the error when one does not come."""

    def compute_metric(self, metric: Any) -> Any:
        """The value of a torchmetrics ``Metric`` over all processes; every process must call."""
        return metric.compute()

    def agree(self, flag: bool, all: bool = False) -> bool:
        """Whether any (or ``all``) of the processes says yes. Runs over the host, without waiting for the device."""
        return flag

    def same(self, text: str, place: str = "same") -> bool:
        """Whether all processes pass the same text. A process that waits here says that it waits at ``place``."""
        return True

    def begin_run(self, run: Any) -> None:
        """A run begins, in every process; ``run`` is its :class:`~.stopping.Run`, by which others may stop it."""

    def is_told_to_stop(self) -> bool:
        """Whether another process has asked this run to stop."""
        return False

    def decide_stop(self, boundary: int, signum: int, wants: bool) -> Stop:
        """At which boundary all processes stop; see :meth:`.stopping.StopVote.decide`."""
        return Stop(boundary, signum, (self.global_rank,))

    def reports(self) -> dict[int, str] | None:
        """What every process does just now, by rank; None in a process that asks while another one does."""
        return {self.global_rank: f"{self.progress()}\n{stacks()}"}

    @property
    def host_group(self) -> Any:
        """The process group over which the hosts talk, for a library that wants one; None: there is none."""
        return None

    def beside(self) -> Strategy:
        """The same processes with a line of their own, for a thread that talks while the run does; all must call."""
        return self

    def abandon(self, error: BaseException) -> None:
        """An error ends the run: no longer wait for other processes, who may not have it."""

    def explain(self, error: BaseException) -> BaseException | None:
        """A better error for one that comes of how the strategy works; None if it has none."""
        return None

    # ---- state -----------------------------------------------------------------------------------------------------

    @contextmanager
    def states_in_parts(self) -> Iterator[bool]:
        """Within, the states below may have tensors in parts (DTensor), which each process writes; says whether."""
        yield False

    def room_for(self, empty: Tensor) -> Tensor:
        """Memory for what this process needs of a checkpoint's tensor, which is given on the meta device."""
        return torch.empty_like(empty, device="cpu")

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The unwrapped module's ``state_dict``, whole. Every process must call; only rank 0 may get it."""
        return module.state_dict()

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a whole ``state_dict`` into the unwrapped module."""
        self.waiting.restored(state)
        return module.load_state_dict(state, strict=strict)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, whole."""
        return optimizer.state_dict()

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole optimizer state and move it to where its parameters are."""
        optimizer.load_state_dict(state)
        move_optimizer_state(optimizer, self.device)

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """This process's gradients that wait for an optimizer step, on the CPU, by parameter; None: there is no way."""
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return {name: grad.detach().cpu() for name, grad in grads.items()}

    def load_window_gradients(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Take back :meth:`window_gradients`. Every process must call."""
        for name, parameter in module.named_parameters():
            if name in state:
                parameter.grad = state[name].to(parameter.device)

    def teardown(self) -> None:
        """Release what the strategy holds. Called once a run, also after an exception."""


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Bring optimizer state to ``device``; a ``step`` counter that lives on the CPU on purpose stays there."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device and key != "step":
                state[key] = value.to(device)
