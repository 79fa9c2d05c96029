"""Fully sharded data parallel: each process holds a shard of every parameter, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as dtensor_empty
from typing_extensions import Unpack

from ... import messages
from ...big_model.deferred_weights import Waiting, noting
from ...big_model.materialize import Materializer
from ...big_model.module_blocks import bottom_up
from ...big_model.sharded_loading import HOLDER
from ...processes.device_transfer import move_in_place
from ...torch_private import (
    after_backward,
    backward_hooks,
    expect_backward,
    finish_backward,
    fsdp_parameters,
    fsdp_state,
    keep_requires_grad,
    unscale_each_,
    unscale_with,
    waiting_gradient,
)
from .. import sharded_tensors
from ..distributed import DistributedStrategy, ProcessOptions, average_gradients, passes_on
from ..precision.base import Precision, gradients
from ..precision.base import parameters as parameters_of
from ..precision.mixed import MixedPrecision
from ..precision.transformer_engine import TransformerEnginePrecision
from . import accumulated_gradients
from .changed_parameters import ChangedParameters
from .settings import offload_policy
from .wrapping import (
    Policy,
    check_ignored,
    check_shapes,
    checkpoint_activations,
    choose_blocks,
    find_ignored,
    parameter_ids,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Self

T = TypeVar("T")

SHARDING = ("full", "grad_op", "hybrid")
STATE_KINDS = ("full", "sharded")
_NO_SUCH_OP = ("Sharding propagation failed", "does not have a sharding strategy registered")


class FSDPStrategy(DistributedStrategy):
    """``"fsdp"``: torch's ``fully_shard`` (Zhao et al., PyTorch FSDP, VLDB 2023; ZeRO-3, Rajbhandari et al., 2020).

    Each step gathers the weights of the module's repeated blocks one block at a time. Parameters outside the blocks
    (the root's group) stay unsharded for the whole step, so ``training_step`` can use them directly.

    Mixed precision: weights are gathered in float32 and the step runs under autocast, so the results match a
    single-device run. ``mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)``
    gathers in 16 bits instead, which halves both the communication and the memory for gathered weights. The entire step
    then runs in that dtype, including normalization, softmax and loss, and autocast is off.

    Gradients are not reduced until the last micro-batch of an accumulation window, so each process holds full,
    unsharded gradients until then.

    All ranks start from rank 0's weights. Layers that ``configure_model`` creates on the meta device
    (``trainer.init_module(empty_init=True)``) are allocated, initialized and sharded one at a time. They get the same
    values as on one process with the same seed, provided that each layer initializes itself when it is created. When
    ``load_checkpoint_in_model`` loads weights into such layers, each process reads its own shards after sharding.

    Each process holds full, unsharded buffers. The buffers are not reduced, and checkpoints contain those of rank 0.

    The parameters of ``ignored_modules`` are not sharded either: each process holds all of them, on its device, with
    full gradients and optimizer state. If they are trained, their gradients are averaged across all processes at the
    end of the backward pass that reduces the other gradients, so the results are the same as without
    ``ignored_modules``. The ignored modules keep their dtype, so with ``mixed_precision``, their inputs must be
    converted to that dtype.

    Args:
        precision: dtypes and loss scaling; the Trainer's if None.
        wrap: the modules to gather separately: ``"auto"`` (the repeated blocks), one or more classes or class names, an
            int (modules with at least this many parameters), ``f(name, module) -> bool``, or None (only the root).
        sharding: ``"full"``, ``"grad_op"`` (keeps weights gathered from forward to backward, as in ZeRO-2) or
            ``"hybrid"`` (shards within a machine and replicates across machines).
        reshard_after_forward: the argument of ``fully_shard`` for the blocks; if None, it follows from ``sharding``.
        mixed_precision: a ``MixedPrecisionPolicy`` to use instead of autocast.
        cpu_offload: True or a ``CPUOffloadPolicy`` keeps shards, gradients and optimizer state in host memory.
        activation_checkpointing: the modules to recompute during backward: True (the wrapped blocks), one or more
            classes or class names, or ``f(name, module) -> bool``.
        data_parallel_replicate: number of copies of the model (hybrid sharding).
        data_parallel_shard: number of processes across which each copy is sharded.
        device_mesh: your own mesh, 1-D or 2-D (replicate, shard).
        ignored_modules: the modules whose parameters are not sharded: a list of modules, or a regular expression that
            matches their full names (``"encoder|.*[.]router"``).
        find_unused_parameters: whether processes may use different parameters in a step; unused parameters get zero
            gradients. All processes must still run the same blocks.
        state_dict_type: ``"full"`` gathers each checkpoint on rank 0 and writes one file; with ``"sharded"``, each
            process writes its own shards to a folder. Both can be loaded with any strategy and any number of processes.
        **process: arguments of ``DistributedStrategy``, such as ``timeout``.
    """

    names: ClassVar[tuple[str, ...]] = ("fsdp", "fsdp_cpu_offload", "hybrid_shard")
    communicates_forward = True
    holds_whole_module = False

    @passes_on(DistributedStrategy.__init__)
    def __init__(
        self,
        precision: Precision | None = None,
        *,
        wrap: Policy = "auto",
        sharding: Literal["full", "grad_op", "hybrid"] = "full",
        reshard_after_forward: bool | int | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        cpu_offload: bool | CPUOffloadPolicy = False,
        activation_checkpointing: Policy = None,
        data_parallel_replicate: int | None = None,
        data_parallel_shard: int | None = None,
        device_mesh: DeviceMesh | None = None,
        ignored_modules: Iterable[nn.Module] | str | None = None,
        find_unused_parameters: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        **process: Unpack[ProcessOptions],
    ) -> None:
        super().__init__(precision, **process)
        if sharding not in SHARDING:
            raise ValueError(messages.unknown("FSDPStrategy sharding", sharding, SHARDING))
        if state_dict_type not in STATE_KINDS:
            raise ValueError(messages.unknown("FSDPStrategy state_dict_type", state_dict_type, STATE_KINDS))
        if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
            raise TypeError(
                f"FSDPStrategy: mixed_precision={mixed_precision!r} is {messages.a(mixed_precision)}. Pass a "
                "torch.distributed.fsdp.MixedPrecisionPolicy, or use Trainer(precision='bf16-mixed')."
            )
        if find_unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"FSDPStrategy(find_unused_parameters=True) needs torch 2.13, but this is torch {torch.__version__}. "
                "Upgrade torch, or let every process use every parameter: add 0.0 * parameter.sum() to the loss."
            )
        self.wrap = wrap
        self.sharding = sharding
        self.reshard_after_forward = sharding != "grad_op" if reshard_after_forward is None else reshard_after_forward
        self.mixed_precision = mixed_precision
        self.offload: OffloadPolicy = offload_policy(cpu_offload)
        self.activation_checkpointing = activation_checkpointing
        self.sizes = (data_parallel_replicate, data_parallel_shard)
        self.device_mesh = device_mesh
        self.ignored_modules = check_ignored(ignored_modules)
        self.find_unused_parameters = find_unused_parameters
        self.state_dict_type = state_dict_type
        self._holder: Any = None
        self._ignored: list[nn.Module] = []
        self._synced = True
        self._manual = self._inside = self._in_parts = False

    # ---- placement: the processes as a mesh --------------------------------------------------------------------------

    def place(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        super().place(devices, num_nodes)
        self._mesh_shape()

    def _mesh_shape(self) -> tuple[int, ...]:
        """Return the sizes of the mesh's dimensions: (shard,), or (replicate, shard).

        Raises:
            ValueError: the product of the sizes is not the number of processes.
        """
        mesh, world = self.device_mesh, self.world_size
        if mesh is not None:
            if mesh.ndim > 2 or mesh.size() != world:
                raise ValueError(
                    f"FSDPStrategy: device_mesh has shape {tuple(mesh.shape)}, which needs {mesh.size()} processes, "
                    f"but this run has {world}. Pass a mesh of all processes, 1-D or 2-D (replicate, shard)."
                )
            return tuple(mesh.shape)
        replicate, shard = self.sizes
        if self.sharding != "hybrid" and replicate is None and shard is None:
            return (world,)
        if replicate is None:
            shard = shard or world // self.num_nodes
            replicate = max(world // shard, 1)
        elif shard is None:
            shard = max(world // replicate, 1)
        if replicate < 1 or shard < 1 or replicate * shard != world:
            raise ValueError(
                f"FSDPStrategy(data_parallel_replicate={replicate}, data_parallel_shard={shard}) needs "
                f"{replicate} x {shard} = {replicate * shard} processes, but this run has {world} (devices x "
                "num_nodes). Change one of the sizes, or leave one out."
            )
        return (replicate, shard)

    def place_on(self, axis: str) -> int:
        replicate, shard = divmod(self.global_rank, self._mesh_shape()[-1])
        return {"dp_replicate": replicate, "dp_shard": shard}.get(axis, 0)

    def sharding_mesh(self) -> DeviceMesh:
        """Return the mesh of the processes across which parameters are sharded, creating it on the first call."""
        if self.device_mesh is None:
            shape = self._mesh_shape()
            self.device_mesh = init_device_mesh(
                self.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
            )
        return self.device_mesh

    def for_another_module(self) -> Self:
        self.sharding_mesh()  # all modules share the mesh, so create it first
        return super().for_another_module()

    # ---- placement: the module in shards -----------------------------------------------------------------------------

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """Context manager in which layers are created.

        If weights are loaded into layers on the meta device, the weights are read only after sharding.
        """
        with super().init_context(), self._noting():
            yield

    @contextmanager
    def empty_init_context(self) -> Iterator[None]:
        with self.precision.creation_context(torch.device("meta")), self._noting():
            yield

    def _noting(self) -> AbstractContextManager[Any]:
        return noting()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module in place, with rank 0's weights; layers on the meta device initialize themselves.

        Weights whose loading was deferred are allocated here but read later, by :meth:`settle_weights`.
        """
        self._manual = not getattr(module, "automatic_optimization", True)
        self._synced = True
        self.waiting = Waiting()
        self._holder = vars(module).get(HOLDER)
        settings = (
            self.sharding_mesh(),
            self.wrap,
            self.reshard_after_forward,
            self.mixed_precision,
            self.offload,
            self.activation_checkpointing,
            self.ignored_modules,
        )
        self._ignored = find_ignored(module, self.ignored_modules)
        self.precision.shards = True
        if self._holder is None:
            self._holder = _Holder(self.precision.convert_module(module), settings)
            self._shard(module)
            self._holder.sharded = _owned_parameters(module)
            self._holder.gathered = gathered = fsdp_parameters(self._holder)
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            owner = type(module).__name__
            self._holder.changes = ChangedParameters(
                gathered, [f"{owner}.{names.get(id(one.sharded_param), 'parameter')}" for one in gathered]
            )
            vars(module)[HOLDER] = self._holder
        elif self._holder.settings != settings:
            raise RuntimeError(
                f"This {type(module).__name__} was sharded by an FSDPStrategy with different arguments. Use the same "
                "arguments as before, or build a new module and load its weights from a checkpoint."
            )
        elif self._holder.broken:
            raise RuntimeError(
                f"An error ended the previous run of this {type(module).__name__} in the middle of a step, and torch "
                f"{torch.__version__} cannot reset the module. Build a new module and load its weights from a "
                "checkpoint, or upgrade torch to 2.13."
            )
        elif any(parameter.is_meta for parameter in module.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} is already sharded, but some of its layers were recreated without memory. "
                "configure_model is called in every run, so make it return immediately if the layers exist."
            )
        self._holder.set_requires_gradient_sync(True)
        if hasattr(self._holder, "set_reduce_scatter_unused_params"):
            self._holder.set_reduce_scatter_unused_params(self.find_unused_parameters)
        self._holder.reshard()
        after_backward(self._holder, self._average_ignored if self._ignored else None)
        return module

    def _shard(self, module: nn.Module) -> None:
        check_shapes(module, parameter_ids(self._ignored))
        self.same_model(module)
        waiting = self._same_notes(module)
        blocks = self._blocks(module)
        checkpoint_activations(module, self.activation_checkpointing, blocks)
        materializer = Materializer(module, self.device, waiting.noted)
        chosen = {id(block) for block in blocks.values()}
        for name, part in bottom_up(module):
            materializer.fill(name, part)
            self._prepare(name, part)
            if id(part) in chosen:
                self._shard_group(part, self.reshard_after_forward)
        self._shard_group(self._holder, self._reshard_root)
        waiting.unfilled = materializer.unfilled
        waiting.take_memory(module, torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.device)
        for parameter in self._ignored_parameters():  # cpu_offload does not apply to these
            move_in_place(parameter, self.device)
        self.waiting = waiting

    def _same_notes(self, module: nn.Module) -> Waiting:
        """Return the module's deferred weights; raise an error if they differ between ranks."""
        waiting = Waiting(module)
        if self.unlike(str(waiting)):
            raise RuntimeError(
                f"The ranks have loaded different weights into {type(module).__name__}, or only some ranks have loaded "
                "weights. Call load_checkpoint_in_model on every rank; each rank reads only its own shards."
            )
        return waiting

    def _blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return a dict, by name, of the modules whose weights are gathered separately."""
        return choose_blocks(module, self.wrap, parameter_ids(self._ignored))

    def _prepare(self, name: str, part: nn.Module) -> None:
        """Called for each submodule, children first, after it is initialized and before it is sharded."""

    @property
    def _reshard_root(self) -> bool | None:
        """The root's ``reshard_after_forward``; True with manual optimization.

        None keeps the root unsharded until the backward pass, which needs the root first.
        """
        if self._manual:
            return True
        return False if self.reshard_after_forward is False else None

    def _shard_group(self, part: nn.Module, reshard: bool | int | None) -> None:
        whole = self._ignored_parameters()
        self._give_rank_zeros_values(part, whole if part is not self._holder else ())
        fully_shard(
            part,
            mesh=self.sharding_mesh(),
            reshard_after_forward=reshard,
            mp_policy=self.mixed_precision or MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=self.offload,
            ignored_params=whole or None,
        )

    def _ignored_parameters(self) -> set[nn.Parameter]:
        """Return the module's current parameters that are not sharded."""
        return {parameter for module in self._ignored for parameter in module.parameters()}

    def _give_rank_zeros_values(self, part: nn.Module, later: Collection[Tensor] = ()) -> None:
        """Move each unsharded tensor that has values to the device, and broadcast its values from rank 0.

        Parameters in ``later`` are left out.
        """
        tensors = (*(parameter for parameter in part.parameters() if parameter not in later), *part.buffers())
        tensors = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and not tensor.is_meta]
        for tensor in tensors:
            if tensor.device != self.device:
                move_in_place(tensor, self.device)
        if self.talks:
            with self._at("broadcasting rank 0's weights"):
                _broadcast(tensors)

    # ---- placement: steps and optimizers -----------------------------------------------------------------------------

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        """Run the step as the sharded root's forward, so that the root's parameters are unsharded during the step."""
        replaced = isinstance(self.precision, MixedPrecision) and self.mixed_precision is not None
        if not replaced or isinstance(self.precision, TransformerEnginePrecision):
            step = super().bind_step(step, wrapped, training)
        if self._holder is None:
            return step
        if not training:
            return partial(self._evaluate, self._holder, step)
        return partial(self._by_hand, self._holder, step) if self._manual else partial(self._holder, step)

    @staticmethod
    def _evaluate(holder: Any, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run an evaluation step, then free the weights that it gathered.

        The step runs outside inference mode, because weights gathered in inference mode cannot be trained later.
        """
        with torch.inference_mode(False), torch.no_grad():
            result = holder(step, *args, **kwargs)
        holder.reshard()
        return result

    def _by_hand(self, holder: Any, step: Callable[..., T], *args: Any) -> T:
        """Run a step of a module with manual optimization."""
        self._inside = True
        try:
            return holder(step, *args)
        finally:
            self._inside = False

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Raise an error if an optimizer holds parameters that are not in the sharded module, or is LBFGS."""
        own = {id(parameter) for parameter in self._holder.parameters()}
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS does not work with FSDPStrategy, because LBFGS needs all parameters and gradients in one "
                    "vector, but each process holds only shards. Use another optimizer, or strategy='ddp'."
                )
            given = parameters_of(optimizer)
            foreign = [p for p in given if id(p) not in own]
            if foreign:
                raise ValueError(
                    f"The sharded module does not contain {len(foreign)} of the {len(given)} parameters of {kind} "
                    f"(the first one has shape {tuple(foreign[0].shape)}). FSDP replaces parameters when it shards "
                    "them, so an optimizer created earlier (in __init__) would train unused tensors. Create the "
                    "optimizer in configure_optimizers, from self.parameters(). In your own loop, create the "
                    "optimizer from the parameters of a single prepared model."
                )
        self.precision.setup_optimizers(optimizers)
        if self.precision.scaler is not None and self._has_plain_parameters:
            unscale_with(self.precision.scaler, self._unscale_parts)
        return optimizers

    @property
    def _has_plain_parameters(self) -> bool:
        """Whether an optimizer may hold both sharded and plain parameters, which torch cannot combine."""
        return bool(self._ignored)

    def _unscale_parts(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale sharded gradients as torch's scaler does; an overflow on one rank counts on all ranks."""
        parameters = parameters_of(optimizer)
        sharded_tensors.settle(parameters)
        devices: dict[torch.device, list[Tensor]] = {}
        for grad in sharded_tensors.local_parts(p.grad for p in parameters if p.grad is not None):
            devices.setdefault(grad.device, []).append(grad)
        found = found_inf.clone()
        for device, grads in devices.items():
            here = found.to(device)
            unscale_each_(grads, here, inv_scale.to(device))
            found = found.maximum(here.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group_of_overflow())
        return {found.device: found}

    def _group_of_overflow(self) -> Any:
        """Return the group of processes that must agree on overflows; None means all processes."""
        return None

    def explain(self, error: BaseException) -> BaseException | None:
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            return RuntimeError(
                "An operation got both a sharded parameter and a plain tensor. The parameters of a module that "
                "FSDPStrategy wraps are unsharded only while that module's forward runs. Either use a parameter such "
                "as self.block.weight only in the forward of self.block, or exclude the module from wrap=.... "
                "Outside a step, use trainer.predict or trainer.strategy.model_state(module)."
            )
        if isinstance(error, (RuntimeError, NotImplementedError)) and any(sign in str(error) for sign in _NO_SUCH_OP):
            return RuntimeError(
                f"torch cannot run an operation on a sharded tensor: {str(error).splitlines()[0]} With FSDPStrategy, "
                "parameters, gradients and optimizer state are sharded outside a step. If the optimizer runs this "
                "operation, use another optimizer (SGD, AdamW and most others work). In your own hook, use this "
                "process's shard, parameter.to_local(). Or use strategy='ddp'."
            )
        return super().explain(error)

    def teardown(self) -> None:
        failed = self._abandoned
        super().teardown()
        holder, self._holder = self._holder, None
        if holder is not None:
            if failed and hasattr(holder, "reset_iter_state"):
                holder.reset_iter_state()
            holder.broken = failed and not hasattr(holder, "reset_iter_state")
            holder.reshard()

    # ---- communication -----------------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        if enabled is not self._synced:
            self._holder.set_requires_gradient_sync(enabled)
            self._synced = enabled

    def check_parameters(self, module: nn.Module) -> None:
        """Raise an error if trainable parameters were added after the module was sharded.

        Raises:
            RuntimeError: parameters were added, which FSDP would neither shard nor average the gradients of.
        """
        if self._holder is None:  # nothing is sharded
            return
        self._holder.changes.find_lost()
        known = self._holder.sharded
        whole = self._ignored_parameters()
        names = {parameter: name for name, parameter in module.named_parameters() if parameter not in whole}
        late = (getattr(owner, name) for owner, name in _owned_parameters(module, True) - known)
        added = [names[parameter] for parameter in late if parameter in names]
        if added and self.world_size > 1:
            raise RuntimeError(
                f"{min(added)} was added to {type(module).__name__} after FSDP had sharded it, so its gradients would "
                "differ between processes. Add it in __init__ or configure_model (frozen, if it should train only "
                "later), or use strategy='ddp'."
            )

    def left_gradients_by_hand(self) -> bool:
        sharded = () if self._holder is None else self._holder.gathered
        return self._synced and any(waiting_gradient(one) is not None for one in sharded)

    def complete_gradients(self, optimizer: Optimizer) -> None:
        self.sync_gradients(True)
        finish_backward(fsdp_state(self._holder))

    def _average_ignored(self) -> None:
        """Average the gradients of ignored parameters, if FSDP has reduced the gradients of the other parameters."""
        if self._synced and self.world_size > 1:
            whole = dict.fromkeys(parameter for module in self._ignored for parameter in module.parameters())
            groups = self.sharding_mesh().get_all_groups()
            average_gradients([p for p in whole if p.requires_grad], groups)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        if backward_hooks(loss) is None:  # torch did not find the loss in the step's output
            expect_backward(fsdp_state(self._holder))(loss)
        if self._inside:
            self._holder.keep_changes()  # the backward pass frees gathered parameters
        super().backward(loss, how)
        if self._inside:
            self._holder.unshard()  # the step continues

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if self._has_plain_parameters:
            from torch.distributed.tensor.experimental import implicit_replication  # importing it takes 0.1 s

            sharded_tensors.settle(parameters_of(optimizer))
            with implicit_replication():
                stepped = super().optimizer_step(optimizer, closure)
        else:
            stepped = super().optimizer_step(optimizer, closure)
        self.requires_grad_changed()
        return stepped

    def requires_grad_changed(self) -> None:
        """Gather the root's changed parameters again if a step with manual optimization is still running."""
        if self._inside:
            self._holder.changes.keep()  # values only: at this point, the shards define what is frozen
            self._holder.reshard()
            self._holder.unshard()

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        grads = gradients(optimizer)
        if grads:
            sharded_tensors.multiply(grads, factor)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        grads = [p.grad for p in parameters if p.grad is not None]
        return sharded_tensors.clip_by_norm(grads, max_norm, norm_type)

    def clip_by_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        for part in sharded_tensors.local_parts(p.grad for p in parameters if p.grad is not None):
            part.clamp_(-clip_value, clip_value)

    # ---- state -------------------------------------------------------------------------------------------------------

    @contextmanager
    def states_in_parts(self) -> Iterator[bool]:
        self._in_parts = self.state_dict_type == "sharded"
        try:
            yield self._in_parts
        finally:
            self._in_parts = False

    def room_for(self, empty: Tensor) -> Tensor:
        mesh = self.sharding_mesh()
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return dtensor_empty(*empty.shape, dtype=empty.dtype, device_mesh=mesh, placements=placements)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's full ``state_dict``; its tensors are on the CPU on rank 0, and on ``meta`` elsewhere."""
        self._reshard(module)
        return self._whole(module.state_dict(keep_vars=True))

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._abandoned and self.world_size > 1:
            raise RuntimeError(
                "The state cannot be saved after an error, because it is sharded, and processes that did not fail "
                "might not take part in saving it. Save regularly (ModelCheckpoint(every_n_train_steps=...)) to lose "
                "less work."
            )
        if self._in_parts:
            return sharded_tensors.detached(state)
        return sharded_tensors.whole(state, keep=self.is_global_zero)

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        self._reshard(module)
        own = module.state_dict(keep_vars=True)
        parts = {name: sharded_tensors.cut_if_fits(value, own.get(name)) for name, value in state.items()}
        result = module.load_state_dict(parts, strict=strict)
        self.waiting.restored(state)
        return result

    def _reshard(self, module: nn.Module) -> None:
        """Free the root's unsharded parameters, which a forward pass without backward leaves behind."""
        if self._holder is not None and self._holder.module is module:
            self._holder.reshard()

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        return self._whole(optimizer.state_dict())

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        saved = [index for group in state["param_groups"] for index in group["params"]]
        of = dict(zip(saved, parameters_of(optimizer), strict=False))
        parts = {
            index: {key: sharded_tensors.cut_like_parameter(value, of.get(index)) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """Return unsharded gradients that were accumulated without communication, and shards of reduced gradients."""
        self._reshard(module)
        return accumulated_gradients.gather(self._holder, module)

    def load_window_gradients(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        accumulated_gradients.put_back(self._holder, module, state, self.device)


def _owned_parameters(module: nn.Module, trainable: bool = False) -> set[tuple[nn.Module, str]]:
    """Return the owner and the name of each (trainable) parameter; sharding changes neither of them."""
    owned = ((owner, name, one) for owner in module.modules() for name, one in owner.named_parameters(recurse=False))
    return {(owner, name) for owner, name, parameter in owned if parameter.requires_grad or not trainable}


class _Holder(nn.Module):
    """The root module to shard. Its forward runs a step of the user's module, whose class does not change.

    ``fully_shard`` replaces the methods that do nothing in this class.
    """

    def __init__(self, module: nn.Module, settings: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.settings = settings
        self.sharded: set[tuple[nn.Module, str]] = set()
        self.gathered: Collection[Any] = ()
        self.changes = ChangedParameters((), ())

    def set_requires_gradient_sync(self, enabled: bool) -> None: ...

    def reshard(self) -> None: ...

    def unshard(self) -> None: ...

    def keep_changes(self) -> None:
        """Keep changes that a step has made to the values and ``requires_grad`` of gathered parameters."""
        keep_requires_grad(self.gathered)
        self.changes.keep()

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watches = self.changes.steps_left > 0
        if watches:
            self.changes.find_lost()
        output = step(*args, **kwargs)
        self.keep_changes()
        if watches:
            self.changes.find_lost_in_step()
        return output


def _broadcast(tensors: list[Tensor]) -> None:
    """Broadcast rank 0's values to all ranks as bytes, because some backends do not support every dtype."""
    waiting = []
    for tensor in tensors:
        if tensor.numel():
            data = tensor.data if tensor.data.is_contiguous() else tensor.data.contiguous()
            waiting.append((tensor, data, dist.broadcast(data.view(-1).view(torch.uint8), 0, async_op=True)))
    for tensor, data, work in waiting:
        work.wait()  # type: ignore[union-attr]
        if data.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(data)
