"""Callback that logs a run's speed and device utilization."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..devices.kinds import kind_of
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer


class _Mark(NamedTuple):
    """Totals at one point in time."""

    time: float
    batches: int
    samples: int
    lengths: int | None
    flops: float | None


class Throughput:
    """Computes rates over the last updates from totals that you pass.

    Args:
        available_flops: floating-point operations per second that one device can perform; needed for ``mfu``.
        world_size: number of devices; if it is above 1, rates for all devices together are also computed.
        window_size: number of updates to average over.
        separator: text between the parts of a name.

    Example:
        >>> throughput = Throughput(window_size=2)
        >>> throughput.update(time=1.0, batches=1, samples=32)
        >>> throughput.update(time=3.0, batches=2, samples=64)
        >>> throughput.compute()["device/samples_per_sec"]
        16.0
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        for name, value, least in (("world_size", world_size, 1), ("window_size", window_size, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Throughput: {name}={value!r} must be an integer of at least {least}.")
        self.available_flops = available_flops
        self.world_size = world_size
        self.window_size = window_size
        self.separator = separator
        self._marks: deque[_Mark] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
    ) -> None:
        """Record the totals so far.

        Args:
            time: seconds since the start.
            batches: number of batches on this device.
            samples: number of samples in these batches.
            lengths: number of items (tokens, pixels) in these batches.
            flops: floating-point operations of this device since the last update; not a total.

        Raises:
            ValueError: if a total has decreased, if there are fewer samples than batches, or if there are fewer items
                than samples.
        """
        if samples < batches or (lengths is not None and lengths < samples):
            items = "" if lengths is None else f", lengths={lengths}"
            raise ValueError(
                f"Throughput.update(batches={batches}, samples={samples}{items}) got impossible totals: a batch has at "
                "least one sample, and a sample has at least one item. Pass totals since the start."
            )
        last = self._marks[-1] if self._marks else None
        total = None if flops is None else flops + ((last and last.flops) or 0.0)
        mark = _Mark(time, batches, samples, lengths, total)
        if last is not None and any(
            b is not None and a < b for a, b in zip(mark[:4], last[:4], strict=True) if a is not None
        ):
            raise ValueError(
                f"Throughput.update(time={time}, batches={batches}, samples={samples}): totals must not "
                f"decrease (before: time={last.time}, batches={last.batches}, samples={last.samples}). "
                "Pass totals since the start, or call reset() first."
            )
        self._marks.append(mark)

    def compute(self, partial: bool = False) -> dict[str, float]:
        """Return the totals ``time``, ``batches``, ``samples`` and ``lengths``, and the rates once the window is full.

        The rates are ``device/batches_per_sec``, ``device/samples_per_sec``, ``device/items_per_sec``,
        ``device/flops_per_sec`` and ``device/mfu``. Rates for all devices together are named ``batches_per_sec`` and so
        on.

        Args:
            partial: return rates from the second update on instead of waiting for a full window.
        """
        first, last = self._marks[0], self._marks[-1]
        values: dict[str, float] = {"time": last.time, "batches": last.batches, "samples": last.samples}
        if last.lengths is not None:
            values["lengths"] = last.lengths
        seconds = last.time - first.time
        if seconds <= 0 or (len(self._marks) < self.window_size and not partial):
            return values
        counted = {"batches": (first.batches, last.batches), "samples": (first.samples, last.samples)}
        counted |= {"items": (first.lengths, last.lengths), "flops": (first.flops, last.flops)}  # type: ignore[dict-item]
        rates = {
            f"{name}_per_sec": (after - before) / seconds
            for name, (before, after) in counted.items()
            if before is not None and after is not None
        }
        values |= {f"device{self.separator}{name}": rate for name, rate in rates.items()}
        if self.world_size > 1:
            values |= {name: rate * self.world_size for name, rate in rates.items()}
        if self.available_flops and "flops_per_sec" in rates:
            values[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return values

    def reset(self) -> None:
        """Discard all updates."""
        self._marks.clear()


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Count the floating-point operations of a forward pass and, with ``loss_fn``, of the backward pass.

    Args:
        model: the model; on the meta device, nothing is computed and no memory is needed.
        forward_fn: runs the model and returns its output.
        loss_fn: computes the loss from the output. The loss's backward pass is counted too and leaves gradients behind.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()


class ThroughputMonitor(Callback):
    """Log samples, batches and items per second, and the model FLOP/s utilization (MFU) if it is known.

    The values are those of :class:`Throughput` over the last ``window_size`` batches. The rates are named
    ``train/device/batches_per_sec``, ``train/device/samples_per_sec``, ``train/device/items_per_sec``,
    ``train/device/flops_per_sec`` and ``train/device/mfu``; the totals are named ``train/time`` (seconds),
    ``train/batches``, ``train/samples`` and ``train/lengths``. With several devices, ``train/samples_per_sec`` and so
    on are also logged: this device's rates times the number of devices. Training values are logged whenever the trainer
    logs step values; ``validate/...`` and ``test/...`` are logged once, at the end of the stage.

    Times come from the host's clock, read in each batch's hook. They include data loading, hooks and logging, but not
    validation. The host never waits for a GPU. Because the host can get only a limited amount of work ahead of the GPU,
    a window of many batches shows the device's speed, but the first few batches of a run can look too fast.

    To get ``flops_per_sec``, set ``flops_per_batch`` on your module: the floating-point operations of one batch on one
    device, forward and backward, which :func:`measure_flops` can count. On the devices listed in ``PEAK_FLOPS``,
    ``mfu`` is logged too: the fraction of the device's dense peak in the run's dtype.

    Args:
        batch_size_fn: returns the number of samples in a batch; None uses the first dimension of the batch's first
            tensor.
        length_fn: returns the number of items (tokens, pixels) in a batch; None logs no items.
        window_size: number of batches to average over.
        separator: text between the parts of a name.

    Raises:
        RuntimeError: if the trainer has no logger when a run starts.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        super().__init__()
        for name, function in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if function is not None and not callable(function):
                raise TypeError(
                    f"ThroughputMonitor: {name}={function!r} is not callable. "
                    "Pass None, or a function that takes a batch and returns a number."
                )
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 2:
            raise ValueError(
                f"ThroughputMonitor: window_size={window_size!r} must be an integer of at least 2 (the number of "
                "batches to average over)."
            )
        self.batch_size_fn = batch_size_fn or _batch_size
        self.length_fn = length_fn
        self.window_size = window_size
        self.separator = separator
        self._train = self._eval = _Count(Throughput())
        self._peak: float | None = None
        self._has_flops = False

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage != "predict":
            self._require_logger(trainer)
        device = trainer.strategy.device
        self._peak = peak_flops(device, compute_dtype(trainer.strategy.precision.name))

    def _count(self, trainer: Trainer, with_flops: bool = False) -> _Count:
        # The window has one more mark than batches, because its first mark is the start.
        window = Throughput(self._peak, trainer.world_size, self.window_size + 1, self.separator)
        return _Count(window, self.length_fn is not None, with_flops)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._has_flops = getattr(pl_module, "flops_per_batch", None) is not None
        self._train = self._count(trainer, self._has_flops)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        flops: Any = pl_module.flops_per_batch if self._has_flops else None
        self._train.add(self.batch_size_fn(batch), self.length_fn(batch) if self.length_fn else None, flops)
        if trainer.logs_this_step and trainer.state.stepped:
            self._log(trainer, "train", self._train)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._train.pause()
        self._eval = self._count(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._eval.add(self.batch_size_fn(batch), self.length_fn(batch) if self.length_fn else None)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, "test" if trainer.testing else "validate", self._eval)
        self._train.go_on()

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _log(self, trainer: Trainer, stage: str, count: _Count) -> None:
        if count.batches:
            values = count.throughput.compute(partial=True)
            trainer.log_metrics({f"{stage}{self.separator}{name}": value for name, value in values.items()})


class _Count:
    """Counts batches for a :class:`Throughput`, with a clock that can be paused."""

    def __init__(self, throughput: Throughput, with_lengths: bool = False, with_flops: bool = False) -> None:
        self.throughput = throughput
        self._started = self._paused = perf_counter()
        self.batches = self._samples = self._lengths = 0
        throughput.update(
            time=0.0, batches=0, samples=0, lengths=0 if with_lengths else None, flops=0.0 if with_flops else None
        )

    def add(self, samples: int, lengths: int | None = None, flops: float | None = None) -> None:
        """Count a finished batch."""
        self.batches += 1
        self._samples += samples
        self._lengths += lengths or 0
        self.throughput.update(
            time=perf_counter() - self._started,
            batches=self.batches,
            samples=self._samples,
            lengths=None if lengths is None else self._lengths,
            flops=flops,
        )

    def pause(self) -> None:
        """Pause the clock."""
        self._paused = perf_counter()

    def go_on(self) -> None:
        """Resume the clock."""
        self._started += perf_counter() - self._paused


def _batch_size(batch: Any) -> int:
    size = _first_dim(batch)
    if size is None:
        raise ValueError(
            f"ThroughputMonitor found no tensor in a batch of type {type(batch).__name__}, so it cannot tell how many "
            "samples the batch has. Pass batch_size_fn, a function that takes a batch and returns its size."
        )
    return size


def _first_dim(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else 1
    if isinstance(value, str | bytes):
        return None
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, list | tuple):
        children = value
    elif is_dataclass(value):
        children = (getattr(value, field.name) for field in fields(value))
    elif hasattr(value, "__dict__"):
        children = vars(value).values()
    return next((size for size in map(_first_dim, children) if size is not None), None)


# Dense peaks in 10^12 FLOP/s from the manufacturers' data sheets (half of a figure given "with sparsity"). ``tf32`` is
# the peak of float32 matrix products when torch.set_float32_matmul_precision is "high" or "medium". Each key is a part
# of the device's name. The first match is used, so more specific names come first.
#   B200, GB200     NVIDIA Blackwell datasheet (HGX B200, GB200 NVL72)
#   H200, H100      NVIDIA H200 and H100 Tensor Core GPU datasheets (SXM, NVL, PCIe)
#   A100, A30, A40, A10, A10G   NVIDIA datasheets of these names
#   L40S, L40, L4   NVIDIA L40S, L40, L4 datasheets
#   V100, T4        NVIDIA V100 and T4 datasheets (float16 only)
#   RTX             NVIDIA Ada and Ampere GA102 GPU architecture whitepapers (float32 accumulation)
#   MI              AMD Instinct MI210, MI250X, MI300X, MI325X data sheets (an MI250X counts as two devices)
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "GB200": {"float16": 2500, "bfloat16": 2500, "tf32": 1250, "float32": 80, "float64": 40},
    "B200": {"float16": 2250, "bfloat16": 2250, "tf32": 1125, "float32": 75, "float64": 37},
    "H200 NVL": {"float16": 835.5, "bfloat16": 835.5, "tf32": 417.5, "float32": 60, "float64": 30},
    "H200": {"float16": 989.5, "bfloat16": 989.5, "tf32": 494.5, "float32": 67, "float64": 34},
    "H100 NVL": {"float16": 835.5, "bfloat16": 835.5, "tf32": 417.5, "float32": 60, "float64": 30},
    "H100 PCIe": {"float16": 756.5, "bfloat16": 756.5, "tf32": 378, "float32": 51, "float64": 26},
    "H100": {"float16": 989.5, "bfloat16": 989.5, "tf32": 494.5, "float32": 67, "float64": 34},
    "A100": {"float16": 312, "bfloat16": 312, "tf32": 156, "float32": 19.5, "float64": 9.7},
    "A30": {"float16": 165, "bfloat16": 165, "tf32": 82, "float32": 10.3, "float64": 5.2},
    "A40": {"float16": 149.7, "bfloat16": 149.7, "tf32": 74.8, "float32": 37.4},
    "A10G": {"float16": 70, "bfloat16": 70, "tf32": 35, "float32": 35},
    "A10": {"float16": 125, "bfloat16": 125, "tf32": 62.5, "float32": 31.2},
    "L40S": {"float16": 362.05, "bfloat16": 362.05, "tf32": 183, "float32": 91.6},
    "L40": {"float16": 181.05, "bfloat16": 181.05, "tf32": 90.5, "float32": 90.5},
    "L4": {"float16": 121, "bfloat16": 121, "tf32": 60, "float32": 30.3},
    "V100S": {"float16": 130, "float32": 16.4, "float64": 8.2},
    "V100-PCIE": {"float16": 112, "float32": 14, "float64": 7},
    "V100": {"float16": 125, "float32": 15.7, "float64": 7.8},
    "T4": {"float16": 65, "float32": 8.1},
    "RTX 4090": {"float16": 165.2, "bfloat16": 165.2, "tf32": 82.6, "float32": 82.6},
    "RTX 4080": {"float16": 97.5, "bfloat16": 97.5, "tf32": 48.7, "float32": 48.7},
    "RTX 3090": {"float16": 71, "bfloat16": 71, "tf32": 35.6, "float32": 35.6},
    "RTX A6000": {"float16": 154.8, "bfloat16": 154.8, "tf32": 77.4, "float32": 38.7},
    "MI325X": {"float16": 1307.4, "bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4, "float64": 81.7},
    "MI300X": {"float16": 1307.4, "bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4, "float64": 81.7},
    "MI250X": {"float16": 191.5, "bfloat16": 191.5, "float32": 47.9, "float64": 47.9},
    "MI210": {"float16": 181, "bfloat16": 181, "float32": 45.3, "float64": 45.3},
}

#: Words in a device's name that mark a slower variant of a card in the table.
_SLOWER_VARIANTS = {"D", "Laptop", "Max", "SUPER", "Ti"}


def peak_flops(device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Return the device's dense peak FLOP/s for a dtype or ``"tf32"``; None if the device is not in ``PEAK_FLOPS``."""
    dtype = str(dtype).removeprefix("torch.")
    return peak_flops_of(kind_of(device).name_of(device), dtype)


def peak_flops_of(device_name: str, dtype: str) -> float | None:
    """Like :func:`peak_flops`, for a device name as reported by torch."""
    words = device_name.replace("-", " ").split()
    if not _SLOWER_VARIANTS.isdisjoint(words):
        return None
    for name, peaks in PEAK_FLOPS.items():
        if f" {name.replace('-', ' ')} " in f" {' '.join(words)} ":
            peak = peaks.get(dtype, peaks["float32"] if dtype == "tf32" else None)
            return None if peak is None else peak * 1e12
    return None


def compute_dtype(precision: str) -> str:
    """Return the dtype in which a precision such as ``"bf16-mixed"`` computes matrix products."""
    kinds = {"bf16": "bfloat16", "fp8": "float8", "transformer": "float8", "16": "float16", "64": "float64"}
    frozen = precision.startswith("bnb.") and precision != "bnb.int8-training"
    dtype = "bfloat16" if frozen else kinds.get(precision.split("-")[0], "float32")
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return dtype
