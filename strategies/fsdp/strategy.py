"""Fully sharded data parallel: every process holds a part of each parameter, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as dtensor_empty

from ... import messages
from ...big_model.deferred_weights import Waiting, noting
from ...big_model.materialize import Materializer
from ...big_model.module_blocks import bottom_up
from ...big_model.sharded_loading import HOLDER
from ...processes.host_program import StartMethod
from ...torch_private import backward_hooks, expect_backward, finish_backward, fsdp_state
from .. import sharded_tensors
from ..distributed import DistributedStrategy
from ..precision.base import Precision, gradients
from ..precision.mixed import MixedPrecision
from . import accumulated_gradients
from .wrapping import Policy, check_shapes, checkpoint_activations, choose_blocks

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Self

T = TypeVar("T")

SHARDING = ("full", "grad_op", "hybrid")
STATE_KINDS = ("full", "sharded")
_NO_SUCH_OP = ("Sharding propagation failed", "does not have a sharding strategy registered")


class FSDPStrategy(DistributedStrategy):
    """``"fsdp"``: torch's ``fully_shard`` (Zhao et al., PyTorch FSDP, VLDB 2023; ZeRO-3, Rajbhandari et al., 2020).

    The module's repeated blocks are gathered one after the other while the step runs; what is outside of them (the
    root's group) is whole during the whole step, so that ``training_step`` may use it directly.

    Mixed precision: weights are gathered in float32 and the step runs in autocast, as on one device, so the numbers are
    those of one device. ``mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32)`` gathers 16 bits instead: half the bytes and half the memory for what is gathered; then
    everything computes in that dtype, normalization, softmax and loss too, and there is no autocast.

    Accumulating micro-batches communicate no gradients; what they accumulate is a whole gradient on each process.

    Rank 0's initial weights count. Layers that ``configure_model`` makes on the meta device
    (``trainer.init_module(empty_init=True)``) get memory and values one after the other, each only until it is sharded:
    the values that one process draws with the same seed, as far as each layer fills itself when it is made. What
    ``load_checkpoint_in_model`` loads into layers without memory each process reads its own part of, after the split.

    Buffers are whole on each process and not reduced; rank 0's are saved.

    Args:
        precision: dtypes and loss scaling; the Trainer's if None.
        wrap: which modules are gathered on their own. ``"auto"``: the repeated block; a class, a class name or several;
            an int: modules with at least so many parameters; ``f(name, module) -> bool``; None: only the root.
        sharding: ``"full"``; ``"grad_op"`` keeps gathered weights from forward to backward (ZeRO-2); ``"hybrid"``
            shards within a node and replicates over nodes.
        reshard_after_forward: what ``fully_shard`` takes for the blocks; None follows ``sharding``.
        mixed_precision: a ``MixedPrecisionPolicy`` in the place of autocast.
        cpu_offload: keep shards, gradients and optimizer state in the host's memory; or a ``CPUOffloadPolicy``.
        activation_checkpointing: modules whose forward is repeated in backward: True (the wrapped blocks), a class, a
            name, several, or ``f(name, module) -> bool``.
        data_parallel_replicate: number of copies of the model (hybrid sharding).
        data_parallel_shard: number of processes that share one copy.
        device_mesh: a mesh of your own, 1-D or 2-D (replicate, shard).
        find_unused_parameters: processes may use different parameters in a step: one that a process did not use gets a
            gradient of zero there. Without it all must use the same. Which blocks run must not differ in any case.
        state_dict_type: ``"full"``: checkpoints are one file, gathered on rank 0; ``"sharded"``: a folder to which each
            process writes its part. Both load under every strategy and number of processes.
        process_group_backend, init_method, timeout, start_method, numa: as for ``DistributedStrategy``.
    """

    names: ClassVar[tuple[str, ...]] = ("fsdp", "fsdp_cpu_offload", "hybrid_shard")
    communicates_forward = True

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
        find_unused_parameters: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: StartMethod = "auto",
        numa: bool = False,
    ) -> None:
        super().__init__(
            precision,
            process_group_backend=process_group_backend,
            init_method=init_method,
            timeout=timeout,
            start_method=start_method,
            numa=numa,
        )
        if sharding not in SHARDING:
            raise ValueError(messages.unknown("sharding for FSDPStrategy", sharding, SHARDING))
        if state_dict_type not in STATE_KINDS:
            raise ValueError(messages.unknown("state_dict_type for FSDPStrategy", state_dict_type, STATE_KINDS))
        if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
            raise TypeError(
                f"FSDPStrategy(mixed_precision={mixed_precision!r}) is {messages.a(mixed_precision)}. Pass a "
                "torch.distributed.fsdp.MixedPrecisionPolicy, or write Trainer(precision='bf16-mixed')."
            )
        if find_unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"FSDPStrategy(find_unused_parameters=True) needs torch 2.13; this is {torch.__version__}. Upgrade "
                "torch, or let every process use every parameter: add 0.0 * parameter.sum() to the loss."
            )
        self.wrap = wrap
        self.sharding = sharding
        self.reshard_after_forward = sharding != "grad_op" if reshard_after_forward is None else reshard_after_forward
        self.mixed_precision = mixed_precision
        self.offload: OffloadPolicy = _offload_policy(cpu_offload)
        self.activation_checkpointing = activation_checkpointing
        self.sizes = (data_parallel_replicate, data_parallel_shard)
        self.device_mesh = device_mesh
        self.find_unused_parameters = find_unused_parameters
        self.state_dict_type = state_dict_type
        self._holder: Any = None
        self._synced = True
        self._manual = self._inside = self._in_parts = False

    # ---- placement: the processes as a mesh --------------------------------------------------------------------------

    def place(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        super().place(devices, num_nodes)
        self._mesh_shape()

    def _mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh: (shard,), or (replicate, shard).

        Raises:
            ValueError: their product is not the number of processes.
        """
        if self.device_mesh is not None:
            return self._shape_of(self.device_mesh)
        world = self.world_size
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
                f"{replicate} x {shard} = {replicate * shard} processes, but there are {world}. Make the product of "
                "the two the number of processes (devices x num_nodes), or give only one of them."
            )
        return (replicate, shard)

    def _shape_of(self, mesh: DeviceMesh) -> tuple[int, ...]:
        if mesh.ndim > 2 or mesh.size() != self.world_size:
            raise ValueError(
                f"FSDPStrategy(device_mesh=...) has the shape {tuple(mesh.shape)} = {mesh.size()} processes, but there "
                f"are {self.world_size}. Pass a mesh over all of them, 1-D or 2-D (replicate, shard)."
            )
        return tuple(mesh.shape)

    def _mesh(self) -> DeviceMesh:
        if self.device_mesh is None:
            shape = self._mesh_shape()
            self.device_mesh = init_device_mesh(
                self.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
            )
        return self.device_mesh

    def for_another_module(self) -> Self:
        self._mesh()  # one for all of them
        return super().for_another_module()

    # ---- placement: the module in shards -----------------------------------------------------------------------------

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """Weights that are loaded within, where there is no memory yet, are read after the module is sharded."""
        with super().init_context(), self._noting():
            yield

    @contextmanager
    def empty_init_context(self) -> Iterator[None]:
        with self.precision.init_context(torch.device("meta")), self._noting():
            yield

    def _noting(self) -> AbstractContextManager[Any]:
        return noting()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module in place. Rank 0's weights count; layers on the meta device get their values here.

        What is noted gets memory only; :meth:`settle_weights` reads it.
        """
        self._manual = not getattr(module, "automatic_optimization", True)
        self._synced = True
        self.waiting = Waiting()
        self._holder = vars(module).get(HOLDER)
        settings = (
            self._mesh(),
            self.wrap,
            self.reshard_after_forward,
            self.mixed_precision,
            self.offload,
            self.activation_checkpointing,
        )
        if self._holder is None:
            self._holder = _Holder(self.precision.convert_module(module), settings)
            self._shard(module)
            vars(module)[HOLDER] = self._holder
        elif self._holder.settings != settings:
            raise RuntimeError(
                f"This {type(module).__name__} is sharded already, by an FSDPStrategy with other arguments. Use that "
                "one again, or build a new module and load the weights from a checkpoint."
            )
        elif self._holder.broken:
            raise RuntimeError(
                f"The run before left this {type(module).__name__} in the middle of a step, by an error, and torch "
                f"{torch.__version__} cannot reset it. Build a new module and load the weights from a checkpoint, or "
                "upgrade torch to 2.13."
            )
        elif any(parameter.is_meta for parameter in module.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} is sharded already, and some of its layers were made again without memory. "
                "configure_model is called in every run: let it return at once where the layers are there."
            )
        self._holder.set_requires_gradient_sync(True)
        if hasattr(self._holder, "set_reduce_scatter_unused_params"):
            self._holder.set_reduce_scatter_unused_params(self.find_unused_parameters)
        self._holder.reshard()
        return module

    def _shard(self, module: nn.Module) -> None:
        check_shapes(module)
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
        self.waiting = waiting

    def _same_notes(self, module: nn.Module) -> Waiting:
        """What waits for values from files; raises if it is not the same on every rank."""
        waiting = Waiting(module)
        if self.unlike(str(waiting)):
            raise RuntimeError(
                f"The ranks have loaded different weights into {type(module).__name__}, or only some have loaded any. "
                "Call load_checkpoint_in_model on every rank: each reads its own part of the files."
            )
        return waiting

    def _blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """The modules that are groups of their own."""
        return choose_blocks(module, self.wrap)

    def _prepare(self, name: str, part: nn.Module) -> None:
        """Change a part of the module that has its initial values, children first, before it is sharded."""

    @property
    def _reshard_root(self) -> bool | None:
        """None: the root stays whole until backward, which needs it first. By hand, a step comes in between."""
        if self._manual:
            return True
        return False if self.reshard_after_forward is False else None

    def _shard_group(self, part: nn.Module, reshard: bool | int | None) -> None:
        self._give_rank_zeros_values(part)
        fully_shard(
            part,
            mesh=self._mesh(),
            reshard_after_forward=reshard,
            mp_policy=self.mixed_precision or MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=self.offload,
        )

    def _give_rank_zeros_values(self, part: nn.Module) -> None:
        """What has values and is not sharded yet goes to the device and gets rank 0's."""
        tensors = (*part.parameters(), *part.buffers())
        tensors = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and not tensor.is_meta]
        for tensor in tensors:
            if tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)
        if self.talks:
            with self._at("giving every rank rank 0's weights"):
                _broadcast(tensors)

    # ---- placement: steps and optimizers -----------------------------------------------------------------------------

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        """Run the step as the forward of the sharded root: its parameters are whole in there."""
        if self.mixed_precision is None or not isinstance(self.precision, MixedPrecision):
            step = super().bind_step(step, wrapped, training)
        if self._holder is None:
            return step
        if not training:
            return partial(self._evaluate, self._holder, step)
        return partial(self._by_hand, self._holder, step) if self._manual else partial(self._holder, step)

    @staticmethod
    def _evaluate(holder: Any, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Gathered weights outlive the step, so they must not be made in inference mode; here they are freed again."""
        with torch.inference_mode(False), torch.no_grad():
            result = holder(step, *args, **kwargs)
        holder.reshard()
        return result

    def _by_hand(self, holder: Any, step: Callable[..., T], *args: Any) -> T:
        """A step that calls backward and steps itself."""
        self._inside = True
        try:
            return holder(step, *args)
        finally:
            self._inside = False

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Check that the optimizers hold the sharded parameters.

        Raises:
            ValueError: they hold others, or one of them is LBFGS.
        """
        own = {id(parameter) for parameter in self._holder.parameters()}
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS under FSDPStrategy: it joins all parameters and gradients in one vector, which no process "
                    "holds here. Use another optimizer, or strategy='ddp'."
                )
            given = [p for group in optimizer.param_groups for p in group["params"]]
            foreign = [p for p in given if id(p) not in own]
            if foreign:
                raise ValueError(
                    f"{len(foreign)} of the {len(given)} parameters of {kind} are not those of the sharded module "
                    f"(the first has the shape {tuple(foreign[0].shape)}): FSDP replaces parameters when it shards "
                    "them, so an optimizer made before (in __init__) would train tensors that nobody uses. Build it "
                    "in configure_optimizers, from self.parameters(); in a loop of your own give it parameters of "
                    "one prepared model only."
                )
        self.precision.setup_optimizers(optimizers)
        return optimizers

    def explain(self, error: BaseException) -> BaseException | None:
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            return RuntimeError(
                "A parameter that lies in parts met a plain tensor. The parameters of a module that FSDPStrategy wraps "
                "are whole only while that module's forward runs: do not use them from outside of it (such as "
                "self.block.weight), leave the module out of wrap=..., and outside of a step use trainer.predict or "
                "trainer.strategy.model_state(module)."
            )
        if isinstance(error, (RuntimeError, NotImplementedError)) and any(sign in str(error) for sign in _NO_SUCH_OP):
            return RuntimeError(
                f"torch cannot run an operation on a tensor that lies in parts: {str(error).splitlines()[0]} Under "
                "FSDPStrategy parameters, gradients and optimizer state are such tensors outside of a step. If it is "
                "the optimizer, use another one (SGD, AdamW and most others work); in a hook of your own, take the "
                "part of this process, parameter.to_local(). Or use strategy='ddp'."
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

    def complete_gradients(self, optimizer: Optimizer) -> None:
        self.sync_gradients(True)
        finish_backward(fsdp_state(self._holder))

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        if backward_hooks(loss) is None:  # it did not leave the step in a form in which torch found it
            expect_backward(fsdp_state(self._holder))(loss)
        super().backward(loss, how)
        if self._inside:
            self._holder.unshard()  # the step goes on

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        stepped = super().optimizer_step(optimizer, closure)
        self._gather_again()
        return stepped

    def requires_grad_changed(self) -> None:
        self._gather_again()

    def _gather_again(self) -> None:
        """A step by hand goes on, with parameters of the root that have changed."""
        if self._inside:
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
        mesh = self._mesh()
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return dtensor_empty(*empty.shape, dtype=empty.dtype, device_mesh=mesh, placements=placements)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's ``state_dict``, whole and on the CPU on rank 0; on the others without memory (``meta``)."""
        self._reshard(module)
        return self._whole(module.state_dict(keep_vars=True))

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._abandoned and self.world_size > 1:
            raise RuntimeError(
                "After an error a state cannot be saved: it lies in parts on all processes, and the others may not "
                "come. Save regularly (ModelCheckpoint(every_n_train_steps=...)) to lose little."
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
        """After a forward without backward the root's parameters are still whole."""
        if self._holder is not None and self._holder.module is module:
            self._holder.reshard()

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        return self._whole(optimizer.state_dict())

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = [index for group in state["param_groups"] for index in group["params"]]
        of = dict(zip(saved, parameters, strict=False))
        parts = {
            index: {key: sharded_tensors.cut_like_parameter(value, of.get(index)) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """Whole gradients that were accumulated without communication, and parts of those that were reduced."""
        self._reshard(module)
        return accumulated_gradients.gather(self._holder, module)

    def load_window_gradients(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        accumulated_gradients.put_back(self._holder, module, state, self.device)


class _Holder(nn.Module):
    """The root that is sharded: its forward is a step of the user's module, whose class stays as it is.

    Until it is sharded, and if it never is, there is nothing to gather.
    """

    def __init__(self, module: nn.Module, settings: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.settings = settings

    def set_requires_gradient_sync(self, enabled: bool) -> None: ...

    def reshard(self) -> None: ...

    def unshard(self) -> None: ...

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)


def _offload_policy(asked: bool | CPUOffloadPolicy) -> OffloadPolicy:
    if isinstance(asked, OffloadPolicy):
        return asked
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if asked else OffloadPolicy()


def _broadcast(tensors: list[Tensor]) -> None:
    """Rank 0's values to all, as bytes: some backends do not know every dtype."""
    waiting = []
    for tensor in tensors:
        if tensor.numel():
            data = tensor.data if tensor.data.is_contiguous() else tensor.data.contiguous()
            waiting.append((tensor, data, dist.broadcast(data.view(-1).view(torch.uint8), 0, async_op=True)))
    for tensor, data, work in waiting:
        work.wait()  # type: ignore[union-attr]
        if data.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(data)
