from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clocks import Clock
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import ThroughputMonitor, throughput_monitor
from paceline.callbacks.throughput_monitor import PEAK_FLOPS, _first_dim, compute_dtype, peak_flops, peak_flops_of
from paceline.loggers import Logger
from paceline.utilities import Throughput, measure_flops

CLOCK = Clock(tick=1e-6)


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput_monitor, "perf_counter", CLOCK)


class Recorder(Logger):
    """Keeps what it is sent: (step, metrics)."""

    name = "recorder"
    version = 0

    def __init__(self) -> None:
        self.sent: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any("/" in key for key in metrics):
            self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        return None


class Timed(TinyModule):
    """Takes a known time for each training and each evaluation batch."""

    def __init__(self, seconds: float = 0.0, evaluation_seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.evaluation_seconds = evaluation_seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.sleep(self.seconds)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CLOCK.sleep(self.evaluation_seconds)

    test_step = validation_step


def trainer_with(monitor: ThroughputMonitor, **more: Any) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    settings = {"max_epochs": 1, "log_every_n_steps": 1, "logger": recorder, "accelerator": "cpu", **more}
    trainer = Trainer(
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    return trainer, recorder


def test_totals_and_rates_of_the_training_are_logged_at_the_log_cadence() -> None:
    trainer, recorder = trainer_with(ThroughputMonitor(), log_every_n_steps=4)
    trainer.fit(Timed(0.005), tiny_loader(10, batch_size=2))
    assert [step for step, _ in recorder.sent] == [4, 8]
    last = recorder.sent[-1][1]
    assert (last["train/batches"], last["train/samples"]) == (8, 16)
    assert last["train/time"] == pytest.approx(8 * 0.005, rel=0.01)
    assert last["train/device/samples_per_sec"] == pytest.approx(2 * last["train/device/batches_per_sec"])
    assert last["train/device/batches_per_sec"] == pytest.approx(8 / last["train/time"])
    assert not any("lengths" in key or "flops" in key or "mfu" in key for key in last)


def test_rates_are_those_of_the_window() -> None:
    class Slows(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seconds = 0.01 if batch_idx < 20 else 0.02
            return super().training_step(batch, batch_idx)

    trainer, recorder = trainer_with(ThroughputMonitor(window_size=3))
    trainer.fit(Slows(), tiny_loader(26))
    rates = [metrics["train/device/batches_per_sec"] for _, metrics in recorder.sent]
    assert rates[-1] == pytest.approx(50, rel=0.01)
    assert rates[19] == pytest.approx(100, rel=0.01)


def test_time_spent_in_a_validation_does_not_count_for_the_training() -> None:
    trainer, recorder = trainer_with(ThroughputMonitor(), val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(Timed(0.001, 0.2), tiny_loader(4), tiny_loader(1))
    training = [metrics for _, metrics in recorder.sent if "train/time" in metrics]
    assert training[-1]["train/time"] == pytest.approx(4 * 0.001, rel=0.01)
    validation = [metrics for _, metrics in recorder.sent if "validate/time" in metrics]
    assert len(validation) == 2
    assert [metrics["validate/time"] for metrics in validation] == pytest.approx([0.2, 0.2], rel=0.01)
    assert validation[0]["validate/samples"] == 2


def test_the_sanity_check_is_not_logged() -> None:
    trainer, recorder = trainer_with(ThroughputMonitor(), limit_val_batches=1, check_val_every_n_epoch=5)
    trainer.fit(Timed(), tiny_loader(2), tiny_loader(2))
    assert not any("validate/time" in metrics for _, metrics in recorder.sent)


def test_a_test_is_logged_at_its_end() -> None:
    trainer, recorder = trainer_with(ThroughputMonitor())
    trainer.test(Timed(), tiny_loader(3), verbose=False)
    ((_, metrics),) = [sent for sent in recorder.sent if "test/time" in sent[1]]
    assert (metrics["test/batches"], metrics["test/samples"]) == (3, 6)


def test_sizes_and_items_come_from_the_functions_given() -> None:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 5, length_fn=lambda batch: batch[0].numel())
    trainer, recorder = trainer_with(monitor)
    trainer.fit(Timed(0.001), tiny_loader(3, batch_size=2))
    last = recorder.sent[-1][1]
    assert (last["train/samples"], last["train/lengths"]) == (15, 3 * 2 * 4)
    assert last["train/device/items_per_sec"] == pytest.approx(8 * last["train/device/batches_per_sec"])


def test_operations_a_batch_give_their_rate_and_on_a_known_device_the_utilization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Timed(0.001)
    module.flops_per_batch = 1000
    trainer, recorder = trainer_with(ThroughputMonitor())
    trainer.fit(module, tiny_loader(2))
    last = recorder.sent[-1][1]
    assert last["train/device/flops_per_sec"] == pytest.approx(1000 * last["train/device/batches_per_sec"])
    assert "train/device/mfu" not in last

    monkeypatch.setattr(throughput_monitor, "peak_flops", lambda device, dtype: 1e6)
    trainer, recorder = trainer_with(ThroughputMonitor())
    trainer.fit(module, tiny_loader(2))
    last = recorder.sent[-1][1]
    assert last["train/device/mfu"] == pytest.approx(last["train/device/flops_per_sec"] / 1e6)


def test_while_accumulating_values_are_logged_once_an_update() -> None:
    trainer, recorder = trainer_with(ThroughputMonitor(), accumulate_grad_batches=2)
    trainer.fit(Timed(), tiny_loader(5))
    assert [(step, metrics["train/batches"]) for step, metrics in recorder.sent] == [(1, 2), (2, 4), (3, 5)]


def test_on_several_devices_the_rates_of_all_are_logged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, recorder = trainer_with(ThroughputMonitor())
    monkeypatch.setattr(type(trainer.strategy), "world_size", 4)
    monitor = ThroughputMonitor()
    count = monitor._count(trainer)
    CLOCK.sleep(0.001)
    count.add(2)
    monitor._log(trainer, "train", count)
    metrics = recorder.sent[-1][1]
    assert metrics["train/samples_per_sec"] == 4 * metrics["train/device/samples_per_sec"]


def test_the_time_of_a_pause_is_not_counted() -> None:
    count = throughput_monitor._Count(Throughput())
    count.pause()
    CLOCK.sleep(0.2)
    count.go_on()
    count.add(1)
    assert count.throughput.compute()["time"] < 0.001


def test_throughput_gives_rates_of_a_full_window_and_of_all_devices() -> None:
    throughput = Throughput(available_flops=100, world_size=2, window_size=3, separator="|")
    for second in (1, 2):
        throughput.update(time=second, batches=second, samples=3 * second, lengths=6 * second, flops=10)
    assert throughput.compute() == {"time": 2, "batches": 2, "samples": 6, "lengths": 12}
    assert throughput.compute(partial=True)["device|samples_per_sec"] == 3
    throughput.update(time=5, batches=3, samples=9, lengths=18, flops=10)
    rates = {"batches_per_sec": 0.5, "samples_per_sec": 1.5, "items_per_sec": 3, "flops_per_sec": 5}
    totals = {"time": 5, "batches": 3, "samples": 9, "lengths": 18, "device|mfu": 0.05}
    assert throughput.compute() == totals | {f"device|{k}": v for k, v in rates.items()} | {
        name: 2 * rate for name, rate in rates.items()
    }
    for wrong in ({"time": 4, "batches": 4, "samples": 9}, {"time": 6, "batches": 4, "samples": 3}):
        with pytest.raises(ValueError, match="Pass totals since the start"):
            throughput.update(**wrong)
    throughput.reset()
    throughput.update(time=0, batches=0, samples=0)
    for wrong in ({"world_size": 0}, {"window_size": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*at least"):
            Throughput(**wrong)


def test_the_operations_of_a_backward_pass_are_counted_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer, batch = torch.nn.Linear(4, 3), torch.ones(2, 4)
    forward = measure_flops(layer, lambda: layer(batch))
    assert forward == 2 * 2 * 4 * 3
    assert measure_flops(layer, lambda: layer(batch), torch.sum) == 2 * forward


@dataclass
class Sample:
    name: str
    image: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 4), 3),
        (torch.tensor(1.0), 1),
        ([torch.zeros(5), torch.zeros(2)], 5),
        ({"text": "word", "x": (torch.zeros(6, 1),)}, 6),
        (Sample("a", torch.zeros(7)), 7),
        (SimpleNamespace(x=torch.zeros(8, 2)), 8),
        (["a", 1], None),
        (None, None),
    ],
)
def test_the_size_of_a_batch_is_the_first_dimension_of_its_first_tensor(batch: Any, size: int | None) -> None:
    assert _first_dim(batch) == size


def test_a_batch_without_tensor_asks_for_a_function() -> None:
    class Words(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(1, 4)).sum()

    trainer, _ = trainer_with(ThroughputMonitor())
    with pytest.raises(ValueError, match=r"no tensor in a batch of type list.*Pass batch_size_fn"):
        trainer.fit(Words(), [["some", "words"]])


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5e12),
        ("NVIDIA H200", "tf32", 494.5e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA A10G", "float32", 35e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "tf32", 15.7e12),
        ("Tesla V100-PCIE-32GB", "float16", 112e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
        ("Some New Card", "bfloat16", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(name: str, dtype: str, peak: float | None) -> None:
    assert peak_flops_of(name, dtype) == peak


def test_every_entry_of_the_table_can_be_reached_by_its_own_name() -> None:
    for name, peaks in PEAK_FLOPS.items():
        assert peak_flops_of(f"NVIDIA {name}", "float16") == peaks["float16"] * 1e12, name


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "float32"), ("bf16-mixed", "bfloat16"), ("16-mixed", "float16"), ("64-true", "float64")],
)
def test_the_dtype_of_the_peak_is_that_of_the_precision(precision: str, dtype: str) -> None:
    assert compute_dtype(precision) == dtype


def test_float32_counts_as_tf32_where_that_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert compute_dtype("32-true") == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu"), "float32") is None


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    class Strict(Timed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_end(self) -> None:
            torch.cuda.set_sync_debug_mode("default")

    trainer, recorder = trainer_with(ThroughputMonitor(), accelerator="gpu")
    try:
        trainer.fit(Strict(), tiny_loader(6))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert recorder.sent[-1][1]["train/batches"] == 6


def test_without_a_logger_the_run_does_not_start() -> None:
    trainer, _ = trainer_with(ThroughputMonitor(), logger=False)
    with pytest.raises(RuntimeError, match=r"ThroughputMonitor has nowhere.*logger=False.*Pass a logger"):
        trainer.fit(Timed(), tiny_loader(1))
    trainer.predict(Timed(), tiny_loader(1))


@pytest.mark.parametrize("size", [1, 0, -5, 2.5, True, "100"])
def test_a_window_that_gives_no_average_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"window_size=.*at least 2"):
        ThroughputMonitor(window_size=size)


@pytest.mark.parametrize("arguments", [{"batch_size_fn": 32}, {"length_fn": "tokens"}])
def test_functions_must_be_functions(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"is not callable.*takes a batch"):
        ThroughputMonitor(**arguments)
