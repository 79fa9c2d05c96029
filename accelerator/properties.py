"""What is in force in an Accelerator, to be read off it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .process_info import Processes

if TYPE_CHECKING:
    from torch import nn

    from ..settings import Settings
    from .accumulation import GradientState
    from .loaders import DataLoaderConfiguration
    from .plugins import ProjectConfiguration
    from .prepare import Prepared
    from .process_state import AcceleratorState
    from .trackers import Trackers


T = TypeVar("T")


class Shown(Generic[T]):
    """An attribute of a part that is read and set at the Accelerator too.

    Args:
        path: from the Accelerator to the attribute, such as ``"gradient_state.num_steps"``.
        doc: what it says.
    """

    def __init__(self, path: str, doc: str) -> None:
        part, _, self._name = path.rpartition(".")
        self._part = operator.attrgetter(part)
        self.__doc__ = doc

    @overload
    def __get__(self, accelerator: None, owner: type) -> Shown[T]: ...
    @overload
    def __get__(self, accelerator: Any, owner: type) -> T: ...
    def __get__(self, accelerator: Any, owner: type) -> Any:
        return self if accelerator is None else getattr(self._part(accelerator), self._name)

    def __set__(self, accelerator: Any, value: T) -> None:
        setattr(self._part(accelerator), self._name, value)


class Facts(Processes):
    """The properties of an Accelerator."""

    state: AcceleratorState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    settings: Settings
    trackers: Trackers
    prepared: Prepared
    _trigger = False

    device_placement: Shown[bool] = Shown(
        "prepared.device_placement", "Whether models and batches are moved to the device."
    )
    output_dtype: Shown[str] = Shown(
        "prepared.output_dtype", "``fp32`` or ``keep``: the dtype of what models return in 16 bits."
    )
    step_scheduler_with_optimizer: Shown[bool] = Shown(
        "prepared.step_scheduler_with_optimizer", "Whether schedulers move when their optimizers have stepped."
    )
    scheduler_steps: Shown[str] = Shown(
        "prepared.scheduler_steps", "``per_update`` or ``per_sample``: what a scheduler counts."
    )
    dataloader_config: Shown[DataLoaderConfiguration] = Shown("prepared.dataloader_config", "How loaders are split.")
    sync_gradients: Shown[bool] = Shown(
        "gradient_state.sync_gradients", "Whether optimizers step with this micro-batch, the window's last."
    )
    step: Shown[int] = Shown("gradient_state.step", "A number that the loop may count with; states keep it.")
    project_dir: Shown[str | None] = Shown("project_configuration.project_dir", "Folder of logs and checkpoints.")
    logging_dir: Shown[str | None] = Shown("project_configuration.logging_dir", "Folder of the trackers.")
    gradient_accumulation_steps: Shown[int] = Shown("gradient_state.num_steps", "Micro-batches in a window.")
    log_with: Shown[list[Any]] = Shown(
        "trackers.wanted", "The trackers that were asked for: names, classes and objects."
    )
    deepspeed_plugin: Shown[Any] = Shown(
        "state.deepspeed_plugin", "The DeepSpeed plugin in force; None if there is none."
    )
    parallelism_config: Shown[Any] = Shown(
        "state.parallelism_config", "The sizes of the parallelism that was asked for; None if none was."
    )
    torch_device_mesh: Shown[Any] = Shown(
        "state.device_mesh", "The mesh of all processes; None where there is one kind of parallelism."
    )
    save_iteration: Shown[int] = Shown(
        "project_configuration.iteration", "The number of the next folder that ``save_state()`` makes."
    )
    split_batches: Shown[bool] = Shown(
        "dataloader_config.split_batches", "Whether a loader's batch is that of all processes together."
    )
    dispatch_batches: Shown[bool | None] = Shown(
        "dataloader_config.dispatch_batches", "Whether one process reads for all."
    )
    even_batches: Shown[bool] = Shown("dataloader_config.even_batches", "Whether all processes have as many batches.")
    use_seedable_sampler: Shown[bool] = Shown(
        "dataloader_config.use_seedable_sampler",
        "Accepted; the order of samples is a function of seed and epoch in any case.",
    )
    non_blocking: Shown[bool] = Shown(
        "dataloader_config.non_blocking", "Accepted; copies to a GPU do not wait in any case."
    )
    use_stateful_dataloader: Shown[bool] = Shown(
        "dataloader_config.use_stateful_dataloader",
        "Whether iterable data sets are read by torchdata's StatefulDataLoader.",
    )

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"``, or the name of another precision."""
        name = self.strategy.precision.name
        return {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}.get(name, name)

    @property
    def scaler(self) -> Any:
        """fp16's ``GradScaler``; None where losses are not scaled."""
        return self.strategy.precision.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left out its last step because fp16's gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    # ---- how processes share the work ------------------------------------------------------------------------------

    @property
    def multi_device(self) -> bool:
        """Whether several GPUs hold a copy of the model each."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by ``fully_shard``."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are sharded or split by torch's composable means."""
        return self.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """This process among those that split layers."""
        return self._place_on("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process among those that hold successive layers."""
        return self._place_on("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This process among those that split sequences."""
        return self._place_on("cp")

    @property
    def data_parallel_rank(self) -> int:
        """This process among those that see different data."""
        return self.strategy.data_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process among those that share one copy of the model."""
        return self._place_on("dp_shard")

    def _place_on(self, axis: str) -> int:
        place_on = getattr(self.strategy, "place_on", None)
        return 0 if place_on is None else place_on(axis)

    @property
    def fp8_backend(self) -> None:
        """None: there is no 8-bit training."""
        return

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes a model that was gathered."""
        return self.is_main_process

    def set_trigger(self) -> None:
        """Raise a flag on this process that :meth:`check_trigger` tells all processes of."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has called :meth:`set_trigger` since the last time; every process must call."""
        raised = self.strategy.agree(self._trigger)
        self._trigger = False
        return raised

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model is spread over several devices by a device map."""
        found = getattr(model, "hf_device_map", None) or {}
        return len(set(found.values())) > 1

    def print_config(self) -> None:
        """Print every setting in force, and where it comes from."""
        if self.is_main_process:
            self.settings.print()

    # ---- folders and loaders ---------------------------------------------------------------------------------------
