"""The Accelerator's properties, most of which expose an attribute of one of its parts."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .enums import FP8BackendType
from .loaders import DataLoaderConfiguration
from .process_info import Processes

if TYPE_CHECKING:
    from torch import nn

    from ..settings import Settings
    from .accumulation import GradientState
    from .plugins import ProjectConfiguration
    from .prepare import Prepared
    from .process_state import AcceleratorState
    from .trackers import Trackers


T = TypeVar("T")


class Shown(Generic[T]):
    """Descriptor that exposes an attribute of one of the Accelerator's parts, for reading and setting.

    Args:
        path: path from the Accelerator to the attribute, such as ``"gradient_state.num_steps"``.
        doc: docstring of the attribute.
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


class AcceleratorProperties(Processes):
    """The properties of an Accelerator."""

    state: AcceleratorState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    settings: Settings
    trackers: Trackers
    prepared: Prepared
    _trigger = False

    device_placement = Shown[bool]("prepared.device_placement", "Whether models and batches are moved to the device.")
    output_dtype = Shown[str](
        "prepared.output_dtype", "``fp32`` converts 16-bit model outputs to float32; ``keep`` leaves them unchanged."
    )
    step_scheduler_with_optimizer = Shown[bool](
        "prepared.step_scheduler_with_optimizer", "Whether schedulers advance only when their optimizers have stepped."
    )
    scheduler_steps = Shown[str]("prepared.scheduler_steps", "How schedulers advance: ``per_update``, ``per_sample``.")
    dataloader_config = Shown[DataLoaderConfiguration]("prepared.dataloader_config", "Settings for preparing loaders.")
    sync_gradients = Shown[bool]("gradient_state.sync_gradients", "Whether this micro-batch completes the window.")
    step = Shown[int]("gradient_state.step", "A counter for the loop's own use, saved with the state.")
    project_dir = Shown[str | None]("project_configuration.project_dir", "Folder for logs and checkpoints.")
    logging_dir = Shown[str | None]("project_configuration.logging_dir", "Folder for trackers.")
    gradient_accumulation_steps = Shown[int]("gradient_state.num_steps", "Micro-batches in a window.")
    log_with = Shown[list[Any]]("trackers.wanted", "The requested trackers: names, classes and objects.")
    deepspeed_plugin = Shown[Any]("state.deepspeed_plugin", "The DeepSpeed plugin in use, or None.")
    parallelism_config = Shown[Any]("state.parallelism_config", "The requested parallelism sizes, or None.")
    torch_device_mesh = Shown[Any](
        "state.device_mesh", "The mesh of all processes; None if only one kind of parallelism is used."
    )
    is_fsdp2 = Shown[bool]("state.is_fsdp2", "Whether parameters are sharded by ``fully_shard``.")
    data_parallel_rank = Shown[int]("strategy.data_rank", "Data-parallel rank of this process.")
    save_iteration = Shown[int](
        "project_configuration.iteration", "Number of the next folder that ``save_state()`` writes."
    )
    split_batches = Shown[bool]("dataloader_config.split_batches", "Whether each batch is split across processes.")
    dispatch_batches = Shown[bool | None]("dataloader_config.dispatch_batches", "Whether process 0 reads all batches.")
    even_batches = Shown[bool](
        "dataloader_config.even_batches", "Whether all processes get the same number of batches."
    )
    use_seedable_sampler = Shown[bool](
        "dataloader_config.use_seedable_sampler",
        "Has no effect, because the order always depends only on the seed and the epoch.",
    )
    non_blocking = Shown[bool]("dataloader_config.non_blocking", "Has no effect, because copies to a GPU never block.")
    use_stateful_dataloader = Shown[bool](
        "dataloader_config.use_stateful_dataloader", "Whether torchdata's StatefulDataLoader reads iterable datasets."
    )

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, or the name of another precision."""
        name = self.strategy.precision.name
        words = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16", "fp8-mixed": "fp8"}
        return "fp8" if name.startswith("transformer-engine") else words.get(name, name)

    @property
    def scaler(self) -> Any:
        """The ``GradScaler`` for fp16; None if losses are not scaled."""
        return self.strategy.precision.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.live_optimizers)

    # ---- parallelism ------------------------------------------------------------------------------

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with a device other than the CPU."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Same as :attr:`is_fsdp2`."""
        return self.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank of this process in the group that splits layers."""
        return self.strategy.place_on("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank of this process in the group whose processes hold successive layers."""
        return self.strategy.place_on("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Rank of this process in the group that splits sequences."""
        return self.strategy.place_on("cp")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank of this process in the group that shards one copy of the model."""
        return self.strategy.place_on("dp_shard")

    @property
    def fp8_backend(self) -> FP8BackendType | None:
        """The package used for 8-bit products (``AO``: torchao, ``TE``: TransformerEngine); None without fp8."""
        if self.mixed_precision != "fp8":
            return None
        return FP8BackendType.AO if self.strategy.precision.name == "fp8-mixed" else FP8BackendType.TE

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes files when a full model is saved."""
        return self.is_main_process

    def set_trigger(self) -> None:
        """Set a flag on this process that :meth:`check_trigger` reports to all processes."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return True if any process called :meth:`set_trigger` since the last check. Every process must call this."""
        raised = self.strategy.agree(self._trigger)
        self._trigger = False
        return raised

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return True if a device map places the model, or a part of it, on several devices."""
        maps = (vars(part).get("hf_device_map") or {} for part in model.modules())
        return any(len(set(found.values())) > 1 for found in maps)

    def print_config(self) -> None:
        """Print every setting and where its value comes from."""
        if self.is_main_process:
            self.settings.print()
