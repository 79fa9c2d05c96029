"""ZeRO: DeepSpeed's engine shards optimizer state, gradients and weights across processes."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from ... import messages
from ...torch_private import HAS_STEPPED
from .. import sharded_tensors
from ..distributed import DistributedStrategy, ProcessOptions, passes_on
from ..late_parameters import LateParameters
from ..precision.base import Precision
from ..precision.base import parameters as parameters_of
from . import settings as configuration
from . import zero_partitions
from .package import quiet, require_deepspeed, use_device
from .settings import DeepSpeedName

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")

#: Optimizers that combine several elements, or create their state before ZeRO partitions the parameters.
WHOLE_PARAMETERS = ("Adafactor", "Adagrad", "LBFGS", "Muon", "SparseAdam")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
#: Attributes that hold the state of DeepSpeed's loss scaler.
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedStrategy(DistributedStrategy):
    """``"deepspeed"``: ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations, 2020) through the DeepSpeed package.

    Stage 1 shards the optimizer's state across processes, stage 2 also shards the gradients, and stage 3 also shards
    the weights. Only one optimizer is supported. It updates flat float32 slices of the weights, so it must treat each
    element independently (as SGD, Adam and AdamW do). After backward, the gradients are in slices with the same layout,
    not in ``parameter.grad``. To read a gradient, use ``deepspeed.utils.safe_get_full_grad(parameter)``. A parameter
    that the loss does not depend on has a zero gradient, so momentum and weight decay still change it.

    ``"bf16-mixed"`` and ``"16-mixed"`` use autocast with float32 weights, as with any strategy. ``"bf16-true"`` and
    ``"16-true"`` are DeepSpeed's 16-bit modes: 16-bit weights and gradients, float32 weights in the sharded
    optimizer (and in its state in checkpoints), and DeepSpeed's own loss scale for fp16.

    Args:
        precision: dtypes; the Trainer's if None.
        stage: 1, 2 or 3.
        offload_optimizer: whether to keep the optimizer's state on the host, and to run the optimizer there.
        offload_parameters: whether to keep weights on the host while they are not in use (stage 3).
        config: a DeepSpeed configuration: a dict, or the path of a JSON file. Its values override these arguments, but
            must not contradict the Trainer's settings (batch size, accumulation, clipping, precision).
        **process: arguments of ``DistributedStrategy``, such as ``timeout``.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """

    names: ClassVar[tuple[str, ...]] = get_args(DeepSpeedName)
    holds_whole_module = False
    restores_after_trials = False
    steps_through_precision = False

    @passes_on(DistributedStrategy.__init__)
    def __init__(
        self,
        precision: Precision | None = None,
        *,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **process: Unpack[ProcessOptions],
    ) -> None:
        super().__init__(precision, **process)
        self.config = configuration.read_config(config)
        self.stage = configuration.zero_stage(self.config, stage, offload_parameters)
        require_deepspeed(self.stage)
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters
        self.communicates_forward = self.stage == 3
        self._root: _Root | None = None
        self._engine: Any = None
        self._groups: list[int] = []  # indices of the user's parameter groups that require gradients
        self._num_groups = 0
        self._late = LateParameters()
        self._pieces: dict[int, zero_partitions.Piece] = {}
        self._trained: list[nn.Parameter] = []
        self._counts: list[tuple[int | None, int | None]] = []  # of changes of each trained parameter
        self._overflow: Tensor | None = None
        self._earlier: list[Tensor] = []  # complete gradients of backward passes that were not followed by a step
        self._has_gradients = self._gradients_are_final = False

    # ---- placement ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the process group, which DeepSpeed uses too."""
        super().setup_environment()
        if self.precision.name not in PRECISIONS:
            raise ValueError(
                f"DeepSpeed does not support precision={self.precision.name!r}. Choose "
                f"{messages.names(PRECISIONS, last='or')}."
            )
        use_device(self.device.type)
        if self.precision.name == "16-true" and not import_module("deepspeed").get_accelerator().is_fp16_supported():
            raise ValueError(
                f"Trainer(precision='16-true') with DeepSpeed: {self.device} does not support fp16. Use 'bf16-true' "
                "or '16-mixed'."
            )
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        import_module("deepspeed").init_distributed(dist_init_required=False, auto_mpi_discovery=False)

    @property
    def _full_config(self) -> dict[str, Any]:
        return configuration.full_config(
            self.config, self.stage, self.precision.name, self.offload_optimizer, self.offload_parameters
        )

    def init_context(self) -> AbstractContextManager[Any]:
        """Context manager that, with stage 3, partitions each layer as soon as ``configure_model`` creates it."""
        if self.stage < 3 or not dist.is_initialized():
            return super().init_context()
        return import_module("deepspeed").zero.Init(config_dict_or_path=self._full_config)

    def place_on(self, axis: str) -> int:
        return self.global_rank if axis == "dp_shard" else 0

    def setup_module(self, module: nn.Module) -> nn.Module:
        if any(zero_partitions.is_split(parameter) for parameter in module.parameters()):
            return module  # already in place
        return super().setup_module(module)

    def for_another_module(self) -> Self:
        other = super().for_another_module()
        other._late = LateParameters()
        return other

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        """Return the module itself, because the engine, which needs the optimizer, is created later."""
        if not getattr(module, "automatic_optimization", True):
            raise NotImplementedError(
                f"{type(module).__name__} uses manual optimization, which DeepSpeed's engine does not support, "
                "because it only supports one backward pass and one optimizer. Use strategy='fsdp' or 'ddp', or "
                "automatic optimization."
            )
        trainer = getattr(module, "_trainer", None)
        accumulate = getattr(trainer, "accumulate_grad_batches", None)
        clip = getattr(trainer, "gradient_clip_val", None)
        configuration.refuse_contradictions(self.config, self.precision.name, accumulate, clip)
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(
                    f"{name} has the shape (), but DeepSpeed can only send parameters with a dimension to other "
                    "processes. Give the parameter the shape (1,), or use strategy='fsdp' or 'ddp'."
                )
        self.same_model(module)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        self._drop_engine()
        self._root = _Root(module)
        return module

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Give DeepSpeed a copy of the optimizer to partition; the user's optimizer keeps its parameters.

        Schedulers and callbacks change the user's optimizer, so each step copies its learning rates and other settings
        to DeepSpeed's optimizer.
        """
        if len(optimizers) > 1:
            raise NotImplementedError(
                f"DeepSpeed's engine only supports one optimizer, but there are {len(optimizers)}. Use one optimizer "
                "with several parameter groups, or strategy='fsdp' or 'ddp'."
            )
        if not optimizers:
            return optimizers
        optimizer = optimizers[0]
        if self._root is None:
            raise ValueError(
                f"{type(optimizer).__name__} has no parameters of a prepared model. DeepSpeed partitions an optimizer "
                "together with its model, so prepare the model first, or prepare both in one call: "
                "accelerator.prepare(model, optimizer)."
            )
        _refuse_optimizer(optimizer)
        self._drop_engine()
        self.precision.setup_optimizers(optimizers)
        groups = optimizer.param_groups
        self._groups = [i for i, group in enumerate(groups) if any(p.requires_grad for p in group["params"])]
        self._num_groups = len(groups)
        if not self._groups:
            raise ValueError(
                f"No parameter of {type(optimizer).__name__} requires gradients, so DeepSpeed has nothing to train. "
                "Unfreeze some parameters, or use strategy='ddp'."
            )
        self._start_engine(_double(optimizer, [groups[i] for i in self._groups]))
        optimizer.zero_grad = partial(self._zero_grad, optimizer)
        frozen = [p for p in self._root.inner.parameters() if not p.requires_grad]
        self._late.watch(frozen, self._refuse_late_gradient)
        self._pieces = zero_partitions.pieces(self._engine.optimizer)
        self._trained = zero_partitions.trained_parameters(self._engine.optimizer)
        self._counts = zero_partitions.change_counts(self._trained)
        return optimizers

    def _start_engine(self, optimizer: Optimizer | None) -> None:
        config = self._full_config
        parameters = self._root.parameters() if self._root else ()
        numel = sum(zero_partitions.whole_shape(parameter).numel() for parameter in parameters)
        # A bucket is allocated in full, so it should not be larger than all gradients together.
        config["zero_optimization"].setdefault("reduce_bucket_size", min(500_000_000, numel + 1024))
        where = SimpleNamespace(device_rank=self.device.index or 0)
        with quiet(logging.ERROR):  # DeepSpeed warns about every optimizer but Adam
            made = import_module("deepspeed").initialize(where, self._root, optimizer, config=config)
        self._engine = made[0]

    def _refuse_late_gradient(self, parameter: nn.Parameter) -> None:
        raise RuntimeError(
            f"{self._name_of(parameter)} was unfrozen after training began, but DeepSpeed's optimizer contains only "
            "parameters that were trainable at that time. Unfreeze the parameter before training, or use "
            "strategy='fsdp' or 'ddp'."
        )

    def teardown(self) -> None:
        super().teardown()
        self._late.forget()

    def _drop_engine(self) -> None:
        """Remove the previous run's hooks from the module."""
        if self._engine is not None:
            self._engine.destroy()
        self._late.forget()
        self._engine, self._overflow = None, None
        self._pieces, self._trained, self._counts, self._groups = {}, [], [], []
        self._has_gradients = self._gradients_are_final = False
        self._earlier = []

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        step = super().bind_step(step, wrapped, training)
        if training:
            self._same_batch_size(wrapped)
            return step if self._engine is None else self._root_of(wrapped).bind(step, self._engine)
        if self.stage < 3 or not any(zero_partitions.is_split(parameter) for parameter in wrapped.parameters()):
            return step
        root = self._root_of(wrapped)
        if self._engine is None:
            self._start_engine(None)
        return root.bind_evaluation(step)

    def _root_of(self, module: nn.Module) -> _Root:
        if self._root is None or self._root.inner is not module:
            self._drop_engine()
            self._root = _Root(module)
        return self._root

    def _same_batch_size(self, module: nn.Module) -> None:
        trainer = getattr(module, "_trainer", None)
        micro = getattr(getattr(trainer, "train_dataloader", None), "batch_size", None)
        accumulate = getattr(trainer, "accumulate_grad_batches", 1)
        configuration.refuse_other_batch_size(self.config, micro, self.num_data_ranks, accumulate)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "_engine": None,
            "_root": None,
            "_pieces": {},
            "_trained": [],
            "_counts": [],
            "_overflow": None,
            "_earlier": [],
        }

    # ---- communication -----------------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(enabled)

    def complete_gradients(self, optimizer: Optimizer) -> None:
        self._complete()

    def _complete(self) -> None:
        self._engine.set_gradient_accumulation_boundary(True)
        if self.stage == 1:
            self._engine.allreduce_gradients()
        else:  # other stages reduce in each backward
            self._engine.optimizer.finalize_gradient_accumulation_boundary()
        self._finalize()

    def _gradients(self) -> list[Tensor]:
        """Return this rank's gradients, completed if the last backward pass did not communicate."""
        if self._has_gradients and not self._gradients_are_final:
            self._complete()
        return zero_partitions.gradients(self._engine.optimizer)

    def _finalize(self) -> None:
        """Complete the gradients after the last backward pass before a step."""
        zero_partitions.complete_backward(self._engine.optimizer, self._earlier)
        self._earlier, self._gradients_are_final = [], True

    # ---- one step ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        loss = self.precision.scale_loss(loss)
        if not loss.requires_grad:
            loss.backward()  # raises torch's error for a loss without a graph; DeepSpeed would fail an assertion
        zero = self._engine.optimizer
        self._earlier += zero_partitions.begin_backward(zero, self._gradients_are_final)
        if how is None:
            self._engine.backward(loss, scale_wrt_gas=False)
        else:
            with self.precision.backward_context():
                how(self._engine.scale(loss))
        self._has_gradients, self._gradients_are_final = True, False
        if self._engine.is_gradient_accumulation_boundary():
            self._finalize()

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient on every rank; None before it is complete. Every rank must call this."""
        if not self._gradients_are_final or id(parameter) not in self._pieces:
            return None
        return import_module("deepspeed.utils").safe_get_full_grad(parameter) / self._loss_scale

    @property
    def _loss_scale(self) -> float:
        """The factor by which DeepSpeed's own fp16 mode scales the gradients."""
        return self._engine.optimizer.loss_scale

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        sharded_tensors.multiply(self._gradients(), factor)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.precision.scaler is None or self._overflow is not None:
            return
        precision: Any = self.precision  # this precision has a scaler
        grads, found = self._gradients(), torch.zeros((), device=self.device)
        sharded_tensors.multiply(grads, precision.inverse_scale())
        for grad in grads:
            found += (~torch.isfinite(grad).all()).to(self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self._overflow = found.clamp(max=1.0)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total norm of the engine's gradients; ``parameters`` is ignored."""
        grads = self._gradients()
        local = torch.nn.utils.get_total_norm(grads, norm_type).to(self.device)
        if norm_type == float("inf"):
            total = self.reduce(local, "max")
        else:
            total = self.reduce(local**norm_type, "sum") ** (1.0 / norm_type)
        total = total / self._loss_scale
        sharded_tensors.multiply(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def clip_by_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        largest = clip_value * self._loss_scale
        for grad in self._gradients():
            overflow = torch.isinf(grad)
            grad.clamp_(-largest, largest).masked_fill_(overflow, torch.nan)  # keep the overflow visible

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if closure is not None:
            closure()
        engine = self._engine
        self._gradients()
        self._pass_settings(optimizer)
        self.unscale_gradients(optimizer)
        self._keep_changes()
        engine.step()
        setattr(optimizer, HAS_STEPPED, True)  # schedulers check this
        stepped = engine.was_step_applied()
        self._clear_gradients()
        precision: Any = self.precision
        if self._overflow is not None:
            precision.settle(optimizer, self._overflow)
            self._overflow = None
        elif not stepped and self.precision.name != "16-true":
            messages.warn_once(
                "DeepSpeed skipped a step, because the gradient norm was not finite. global_step does not count that "
                "step. Find the loss that became NaN or infinite (Trainer(detect_anomaly=True)), or clip gradients."
            )
        return stepped

    def _clear_gradients(self) -> None:
        if self._engine is not None and self._has_gradients:
            zero_partitions.clear_gradients(self._engine.optimizer)
            self._has_gradients = self._gradients_are_final = False
            self._earlier = []

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Clear the gradients in DeepSpeed's buffers too, for example if the user discards them without a step."""
        type(optimizer).zero_grad(optimizer, set_to_none)
        self._clear_gradients()

    def _keep_changes(self) -> None:
        """Keep changes that the user's code has made to the weights since the last step.

        With offload, changes through ``.data`` are not noticed, because finding them would require copying all weights
        to the host.

        Raises:
            RuntimeError: a weight of stage 3 was changed while DeepSpeed held it elsewhere, or a weight was frozen.
        """
        zero = self._engine.optimizer
        frozen = next((one for one in self._trained if not one.requires_grad), None)
        if frozen is not None:
            raise RuntimeError(
                f"{self._name_of(frozen)} was frozen after training began, but DeepSpeed's optimizer would still "
                "change it. Freeze it before training, or use strategy='fsdp' or 'ddp'."
            )
        before, counts = self._counts, zero_partitions.change_counts(self._trained)
        if counts != before and zero_partitions.splits(zero):
            self._refuse_lost_changes(before, counts)
        if counts != before or not zero_partitions.offloads(zero):
            zero_partitions.keep_changes(zero)
        self._counts = counts

    def _refuse_lost_changes(self, before: list[tuple[int | None, int | None]], counts: list[Any]) -> None:
        for one, was, now in zip(self._trained, before, counts, strict=True):
            if now != was and now[1] == was[1] and self._pieces[id(one)].numel:
                raise RuntimeError(
                    f"{self._name_of(one)} was changed in place, but DeepSpeed's stage 3 keeps the parameter's values "
                    "elsewhere, so the change would be lost. Change the parameter outside training_step, within `with "
                    "deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, or use stage=2."
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        names = {id(one): name for name, one in self._root.inner.named_parameters()} if self._root else {}
        return names.get(id(parameter), "A parameter")

    @property
    def num_updates(self) -> int:
        """Number of updates since the optimizer was set up."""
        return 0 if self._engine is None else int(self._engine.global_steps)

    def _pass_settings(self, optimizer: Optimizer) -> None:
        """Copy the user's learning rates and other settings to DeepSpeed's optimizer."""
        inner = self._engine.optimizer.param_groups
        if len(optimizer.param_groups) != self._num_groups:
            raise RuntimeError(
                f"{type(optimizer).__name__} has {len(optimizer.param_groups)} parameter groups, but it had "
                f"{self._num_groups} when DeepSpeed partitioned them. Return all groups from configure_optimizers, or "
                "use strategy='fsdp' or 'ddp' to add groups later."
            )
        for index, theirs in zip(self._groups, inner, strict=True):
            ours = optimizer.param_groups[index]
            theirs.update((key, value) for key, value in ours.items() if key != "params")

    # ---- state -------------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        if not any(zero_partitions.is_split(parameter) for parameter in module.parameters()):
            return super().model_state(module)
        return zero_partitions.model_state(module, self.is_global_zero)

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        if not any(zero_partitions.is_split(parameter) for parameter in module.parameters()):
            result = super().load_model_state(module, state, strict)
        else:
            result = zero_partitions.load_model_state(module, state, strict)
        if self._engine is not None and self._pieces and self._root is not None and module is self._root.inner:
            self._engine.optimizer.refresh_fp32_params()  # otherwise the next step would restore the old weights
        return result

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with full tensors; the 16-bit modes add float32 weights and the loss scale."""
        state = optimizer.state_dict()
        if self._engine is None:
            return state
        double, parameters = self._engine.optimizer.optimizer, dict(enumerate(parameters_of(optimizer)))
        found = zero_partitions.optimizer_states(double, self._pieces, parameters, self.device, self.is_global_zero)
        state["state"] = found
        if self.precision.name in ("bf16-true", "16-true"):
            weights = zero_partitions.master_weights(self._pieces, parameters, self.device, self.is_global_zero)
            scaler = self._engine.optimizer.loss_scaler
            state["deepspeed"] = {
                "weights": weights,
                "loss_scale": {key: vars(scaler)[key] for key in SCALE if key in vars(scaler)},
            }
        return state

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        if self._engine is None:
            return
        self._pass_settings(optimizer)
        parameters = dict(enumerate(parameters_of(optimizer)))
        zero_partitions.load_optimizer_states(
            self._engine.optimizer.optimizer, self._pieces, parameters, state["state"]
        )
        own = state.get("deepspeed")
        if own is not None and self.precision.name in ("bf16-true", "16-true"):
            zero_partitions.load_master_weights(self._pieces, parameters, own["weights"])
            vars(self._engine.optimizer.loss_scaler).update(own["loss_scale"])

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """Return None, because the gradients are in DeepSpeed's own buffers."""
        return None


class _Root(nn.Module):
    """The module that DeepSpeed's engine wraps. Its forward runs a step of the user's module.

    Batches and results are not passed as forward's arguments and return value, because DeepSpeed supports only tensors,
    lists and dicts there.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._calls: list[Callable[[], Any]] = []

    def forward(self) -> Any:
        return self._calls.pop()()

    def bind(self, step: Callable[..., T], engine: Callable[[], Any]) -> Callable[..., T]:
        """Return a function that runs the training step as the engine's forward."""

        def through_engine(*args: Any, **kwargs: Any) -> T:
            self._calls.append(lambda: step(*args, **kwargs))
            return engine()

        return through_engine

    def bind_evaluation(self, step: Callable[..., T]) -> Callable[..., T]:
        """Return a function that runs an evaluation step as the engine's forward, without returning its result."""

        def through_root(*args: Any, **kwargs: Any) -> T:
            results: list[T] = []
            self._calls.append(lambda: results.append(step(*args, **kwargs)))
            enabled = torch.is_grad_enabled()
            # Weights gathered in inference mode could not be trained later.
            with torch.inference_mode(False), torch.set_grad_enabled(enabled):
                self()
            return results[0]

        return through_root


def _double(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class, with the same settings, but with its own groups for ZeRO's partitions."""
    double = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    for name in ("step", "zero_grad"):  # a scheduler or this strategy has wrapped them
        vars(double).pop(name, None)
    double.param_groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    double.state = defaultdict(dict)
    return double


def _refuse_optimizer(optimizer: Optimizer) -> None:
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]  # transformers has an Adafactor too
    for name in WHOLE_PARAMETERS:
        if name in kinds:
            raise ValueError(
                f"{name} needs full parameters, but DeepSpeed splits them into flat slices, so the results would be "
                "wrong. Use an optimizer that updates each element independently (SGD, AdamW, ...), or strategy='ddp'."
            )
