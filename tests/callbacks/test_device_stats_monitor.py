from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import DeviceStatsMonitor
from paceline.callbacks.device_stats_monitor import cpu_stats, device_stats
from paceline.loggers import Logger

PREFIX = "DeviceStatsMonitor.on_train_batch_end/"
CPU_KEYS = {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent", "process_rss_bytes"}


class Recorder(Logger):
    """Keeps what it is sent: (step, metrics)."""

    name = "recorder"
    version = 0

    def __init__(self) -> None:
        self.sent: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(key.startswith(PREFIX) for key in metrics):
            self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        return None


@pytest.fixture
def psutil(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The four calls of psutil that are used, with known answers: it need not be installed for the tests."""
    module = ModuleType("psutil")
    module.cpu_percent = lambda: 12.5
    module.virtual_memory = lambda: SimpleNamespace(percent=50.0)
    module.swap_memory = lambda: SimpleNamespace(percent=0.0)
    module.Process = lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1000))
    monkeypatch.setitem(sys.modules, "psutil", module)
    return module


def fit(monitor: DeviceStatsMonitor, **more: Any) -> Recorder:
    recorder = Recorder()
    settings = {"max_epochs": 1, "log_every_n_steps": 2, "logger": recorder, "accelerator": "cpu", **more}
    trainer = Trainer(
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(TinyModule(), tiny_loader(5))
    return recorder


@pytest.mark.parametrize("asked", [None, True])
def test_cpu_statistics_are_logged_at_the_log_cadence(psutil: ModuleType, asked: bool | None) -> None:
    recorder = fit(DeviceStatsMonitor(cpu_stats=asked))
    assert [step for step, _ in recorder.sent] == [2, 4]
    values = {key.removeprefix(PREFIX): value for key, value in recorder.sent[0][1].items() if key.startswith(PREFIX)}
    assert values == {"cpu_percent": 12.5, "cpu_vm_percent": 50.0, "cpu_swap_percent": 0.0, "process_rss_bytes": 1000}


def test_real_psutil_answers() -> None:
    pytest.importorskip("psutil")
    stats = cpu_stats()
    assert set(stats) == CPU_KEYS
    assert stats["process_rss_bytes"] > 10**6
    assert 0 < stats["cpu_vm_percent"] <= 100


def test_only_the_keys_asked_for_are_logged(psutil: ModuleType) -> None:
    recorder = fit(DeviceStatsMonitor(filter_keys={"cpu_percent"}))
    assert all(set(metrics) == {PREFIX + "cpu_percent", "epoch"} for _, metrics in recorder.sent)
    assert len(recorder.sent) == 2


def test_a_key_that_does_not_exist_is_refused_with_the_known_ones(psutil: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"Unknown DeviceStatsMonitor.* key 'cpu_percnt'.*Did you mean 'cpu_percent'"):
        fit(DeviceStatsMonitor(filter_keys=["cpu_percnt"]))


def test_asking_for_cpu_statistics_without_psutil_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ModuleNotFoundError, match=r"cpu_stats=True.*psutil.*`pip install psutil`"):
        DeviceStatsMonitor(cpu_stats=True)


@pytest.mark.parametrize("asked", [None, False])
def test_a_device_without_statistics_is_warned_about(monkeypatch: pytest.MonkeyPatch, asked: bool | None) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.warns(UserWarning, match=r"nothing to report on device 'cpu'.*pip install psutil"):
        recorder = fit(DeviceStatsMonitor(cpu_stats=asked))
    assert recorder.sent == []


def test_without_a_logger_training_does_not_start(psutil: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"DeviceStatsMonitor has nowhere.*logger=False.*Pass a logger"):
        fit(DeviceStatsMonitor(), logger=False)


def test_one_string_of_keys_is_refused() -> None:
    with pytest.raises(TypeError, match=r"filter_keys='cpu_percent' is a string.*Pass \{'cpu_percent'\}"):
        DeviceStatsMonitor(filter_keys="cpu_percent")


def test_a_device_of_another_kind_has_no_statistics() -> None:
    assert device_stats(torch.device("cpu")) == {}
    assert device_stats(torch.device("meta")) == {}


@pytest.mark.gpu
def test_on_a_gpu_the_memory_counters_are_logged_without_waiting_for_it() -> None:
    recorder = fit(DeviceStatsMonitor(filter_keys={"allocated_bytes.all.peak"}), accelerator="gpu")
    assert recorder.sent[-1][1][PREFIX + "allocated_bytes.all.peak"] > 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert device_stats(torch.device("cuda", 0))["allocated_bytes.all.current"] > 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
