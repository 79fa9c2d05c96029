"""The part of ModelParallelStrategy that splits the module into stages, if ``pipeline_parallel`` is greater than 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from ...big_model.module_blocks import bottom_up
from ...torch_private import unscale_with
from .. import sharded_tensors
from ..distributed import DistributedStrategy
from ..placement import move_optimizer_state
from ..precision.base import Precision, parameters
from .microbatches import ScheduleName
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .strategy import ModelParallelStrategy as Base
else:
    Base = DistributedStrategy

T = TypeVar("T")


class PipelineSteps(Base):
    """Places successive blocks on successive processes; must precede ModelParallelStrategy in a class's bases."""

    splits_batches: ClassVar[bool] = True
    restores_after_trials = False

    def __init__(
        self,
        precision: Precision | None = None,
        *,
        pipeline_schedule: ScheduleName | None = None,
        microbatches: int | None = None,
        virtual_stages: int | None = None,
        split_points: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(precision, **options)
        self.pipeline = Pipeline(self, pipeline_schedule or "1f1b", microbatches, virtual_stages, split_points)
        for name, given in (("wrap", "auto"), ("activation_checkpointing", None)):
            if options.get(name, given) != given:
                raise ValueError(
                    f"ModelParallelStrategy({name}=...) shards or recomputes blocks, which pipeline_parallel does not "
                    f"support. Leave {name} out. To recompute activations, use torch.utils.checkpoint in the blocks' "
                    "own forward."
                )
        if self._needs_sharding or self.asked["dp_shard"] not in ("auto", 1):
            raise ValueError(
                f"ModelParallelStrategy(data_parallel_shard={self.asked['dp_shard']!r}, "
                f"pipeline_parallel={self.asked['pp']}): a pipeline's weights cannot be sharded. Use "
                "data_parallel_replicate to replicate the pipeline, or add stages so that each stage needs less "
                "memory."
            )
        if self.asked["cp"] != 1:
            raise ValueError(
                f"ModelParallelStrategy(context_parallel={self.asked['cp']}, pipeline_parallel={self.asked['pp']}): a "
                "pipeline cannot run on split sequences. Use only one of these two arguments."
            )
        if self.loss_parallel:
            raise ValueError(
                "ModelParallelStrategy: loss_parallel=True does not work with pipeline_parallel, because the "
                "pipeline's schedule runs the backward pass itself and does not support split logits. Leave "
                "loss_parallel out."
            )
        self._fill_replicas = self.asked["dp_shard"] == "auto" and self.asked["dp_replicate"] == 1
        self.asked["dp_shard"] = 1

    # ---- placement ---------------------------------------------------------------------------------------------------

    def _mesh_shape(self) -> tuple[int, ...]:
        if self._fill_replicas:  # the remaining processes hold copies of the pipeline
            self.asked["dp_replicate"] = "auto"
        return super()._mesh_shape()

    def setup_environment(self) -> None:
        known = self.mesh is not None
        super().setup_environment()
        if not known:
            self.pipeline.meet(self.mesh)

    def _noting(self) -> AbstractContextManager[Any]:
        return nullcontext()  # each process holds the full module before the split

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Keep this process's stages and everything outside the blocks, with rank 0's values."""
        pipeline = self.pipeline
        pipeline.syncs = True
        if not pipeline.knows(module):
            self.precision.convert_module(module)
            self.same_model(module)
            self._give_values(module)
            self._split_layers(module)
            pipeline.split(module)
        return pipeline.to_device(module)

    def _split_layers(self, module: nn.Module) -> None:
        """Split layers for tensor parallelism before this process drops the weights of the other stages."""
        splitter = self._make_splitter(module)
        if splitter is None:
            return
        for name, _ in bottom_up(module):
            if name in splitter.styles:
                splitter.split(name)
            elif name:
                splitter.check(name)
        splitter.finish()

    def _give_values(self, module: nn.Module) -> None:
        """Broadcast rank 0's values one tensor at a time, after initializing layers on the meta device."""
        self._materialize(module, torch.device("cpu"))
        with torch.no_grad(), self._at("broadcasting rank 0's weights"):
            for tensor in (*module.parameters(), *module.buffers()):
                value = tensor.detach().to(self.device).contiguous()
                dist.broadcast(value, 0)
                tensor.copy_(value)

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        self.pipeline.check_training(module)
        self._agree_on_random_numbers()
        return module

    def setup_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        self.pipeline.setup_optimizers(optimizers)
        self.precision.setup_optimizers(optimizers)
        if self.precision.scaler is not None:
            unscale_with(self.precision.scaler, self._unscale_parts)
        return optimizers

    def _group_of_overflow(self) -> Any:
        return None if self.mesh is None else self.mesh["tp"].get_group()  # the stages agree later

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        logs = step if hasattr(step, "take") else None
        return self.pipeline.bind_step(self.precision.bind_forward(step), logs, training)

    def teardown(self) -> None:
        self.pipeline.rest()
        DistributedStrategy.teardown(self)

    # ---- communication -----------------------------------------------------------------------------------------------

    def compute_metric(self, metric: Any) -> Any:
        return self.pipeline.compute_metric(metric)

    def sync_gradients(self, enabled: bool) -> None:
        self.pipeline.syncs = enabled

    def complete_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.pipeline.held.reduce_gradients()

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        self.pipeline.backward(loss, how)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.precision.unscale_gradients(optimizer)
        self.pipeline.held.agree_on_overflow(self.precision.scaler, optimizer)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self.pipeline.held.clip_by_norm(parameters, max_norm, norm_type)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if self.precision.scaler is not None:
            if closure is not None:
                closure()
            self.unscale_gradients(optimizer)
            closure = None
        sharded_tensors.settle(parameters(optimizer))
        with implicit_replication():  # an optimizer's lists contain both plain and sharded parameters
            return DistributedStrategy.optimizer_step(self, optimizer, closure)

    # ---- state -------------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        state = _put_together(module.state_dict())
        return self.pipeline.held.model_state(state) if self.pipeline.knows(module) else state

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        if not self.pipeline.knows(module):  # the process that started the others has the full module
            return module.load_state_dict(state, strict=strict)
        own = module.state_dict(keep_vars=True)
        parts = {name: sharded_tensors.cut_if_fits(value, own.get(name)) for name, value in state.items()}
        self.waiting.restored(state)
        return self.pipeline.held.load_model_state(parts, strict)

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        whole = {index: _put_together(entry) for index, entry in state["state"].items()}
        return self.pipeline.held.optimizer_state({**state, "state": whole})

    def load_optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(module, optimizer, self.pipeline.held.own_part(optimizer, state))
        move_optimizer_state(optimizer, self.device)

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """Return None, because each stage only has the gradients of its own layers."""
        return None


def _put_together(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with its sharded tensors gathered; every process of a stage must call this."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) and not value.is_meta else value
        for key, value in state.items()
    }
