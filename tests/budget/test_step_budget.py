"""What a step costs, counted in Python calls: counts do not wobble."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import QUIET
from torch import nn

import paceline
from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks import GarbageCollection, RunReport

PACKAGE = Path(paceline.__file__).resolve().parent
SHORT: dict[str, Any] = QUIET | {"max_epochs": 1}


class Tiny(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Logs(Tiny):
    names: tuple[str, ...] = ("a",)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in self.names:
            self.log(name, loss)
        return loss


class Silent(Callback):
    """Overrides nothing."""


class Ones:
    """An iterable over ready batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 4)] * self.count)


def own(frame: Any) -> str | None:
    """The file of the package a frame belongs to, or None."""
    return own_file(frame.f_code.co_filename)


@cache
def own_file(name: str) -> str | None:
    path = Path(name).resolve()
    if not path.is_relative_to(PACKAGE):
        return None
    inside = path.relative_to(PACKAGE)
    counted = ("trainer", "callbacks", "strategies", "loggers", "torch_private.py")
    return str(inside) if inside.parts[0] in counted else None


def calls_per_batch(module: TrainingModule, prefix: str = "", **arguments: Any) -> Counter[str]:
    """Python calls a batch by file and function: the difference of a long and a short run leaves out start and end."""

    def count(batches: int) -> Counter[str]:
        found: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                path = own(frame)
                if path is not None:
                    found[f"{path}:{frame.f_code.co_name}"] += 1
                elif "contextlib" in frame.f_code.co_filename:
                    found["contextlib"] += 1

        trainer = Trainer(**{**SHORT, **arguments})
        data = Ones(batches)
        sys.setprofile(note)
        try:
            trainer.fit(module, data)
        finally:
            sys.setprofile(None)
        return found

    count(5)
    short, long = count(20), count(120)
    per_batch = {k: (long[k] - short[k]) / 100 for k in long}
    return Counter({k: v for k, v in per_batch.items() if v > 0})  # type: ignore[arg-type]


def test_a_bare_step_makes_at_most_ten_own_calls_and_opens_no_context() -> None:
    calls = calls_per_batch(Tiny())
    assert 1 <= sum(calls.values()) <= 10, calls
    assert calls["contextlib"] == 0


def test_a_bare_step_runs_in_at_most_four_files_of_two_rooms() -> None:
    files = {name.split(":")[0] for name, calls in calls_per_batch(Tiny()).items() if calls >= 1}
    assert files == {"trainer/step.py", "strategies/base.py", "strategies/precision/base.py"}


def test_ten_callbacks_that_override_nothing_cost_nothing() -> None:
    assert calls_per_batch(Tiny()) == calls_per_batch(Tiny(), callbacks=[Silent() for _ in range(10)])


def test_an_overridden_hook_adds_one_call() -> None:
    class Hooked(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            called.append(1)

    called: list[int] = []
    bare = calls_per_batch(Tiny())
    assert sum(calls_per_batch(Tiny(), callbacks=[Hooked()]).values()) == sum(bare.values())
    assert len(called) == 145


def test_a_run_report_adds_five_calls_and_nothing_else(tmp_path: Path) -> None:
    """Two hooks, the list of what those at a batch's start return, and two for the outputs of those at its end."""
    bare, reported = calls_per_batch(Tiny()), calls_per_batch(Tiny(), callbacks=[RunReport(tmp_path)])
    added = {name: calls for name, calls in (reported - bare).items() if calls >= 1}
    assert sum(added.values()) <= 5, added
    assert {name.partition(":")[0] for name in added} <= {
        "callbacks/run_report.py",
        "trainer/loop.py",
        "trainer/step.py",
    }


def calls_per_evaluation_batch(module: TrainingModule) -> float:
    def count(batches: int) -> int:
        found = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event == "call" and own(frame) is not None

        trainer = Trainer(**SHORT)
        data = Ones(batches)
        sys.setprofile(note)
        try:
            trainer.validate(module, data, verbose=False)
        finally:
            sys.setprofile(None)
        return found

    count(5)
    return (count(120) - count(20)) / 100


def test_collecting_garbage_together_adds_a_hook_and_the_list_of_what_hooks_return() -> None:
    bare, collected = (
        calls_per_batch(Tiny()),
        calls_per_batch(Tiny(), callbacks=[GarbageCollection(every_n_steps=1000)]),
    )
    added = {name: calls for name, calls in (collected - bare).items() if calls >= 1}
    assert sum(added.values()) <= 2, added
    assert {name.partition(":")[0] for name in added} <= {"callbacks/garbage_collection.py", "trainer/loop.py"}


@pytest.mark.parametrize("count", [1, 3])
def test_a_logged_scalar_adds_at_most_three_calls(count: int) -> None:
    module = Logs()
    module.names = ("a", "b", "c")[:count]
    added = sum(calls_per_batch(module).values()) - sum(calls_per_batch(Tiny()).values())
    assert 1 <= added <= 3 * count


def test_accumulating_adds_no_call() -> None:
    assert sum(calls_per_batch(Tiny(), accumulate_grad_batches=4).values()) <= sum(calls_per_batch(Tiny()).values())


def test_the_default_callbacks_keep_the_budget() -> None:
    calls = calls_per_batch(Tiny(), enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True)
    assert sum(calls.values()) <= 13, calls


def test_an_evaluation_batch_makes_at_most_four_own_calls_and_a_logged_value_eight() -> None:
    class Evaluates(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.layer(batch)

    class Logging(Evaluates):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.layer(batch).sum())

    for module, most in ((Evaluates(), 4), (Logging(), 8)):
        assert calls_per_evaluation_batch(module) <= most


def test_a_collection_of_metrics_costs_as_many_calls_as_one_metric() -> None:
    from torchmetrics import MeanMetric, MetricCollection

    class Logging(Tiny):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.metrics = MetricCollection({str(number): MeanMetric() for number in range(count)})

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict(self.metrics)

    one, ten = calls_per_evaluation_batch(Logging(1)), calls_per_evaluation_batch(Logging(10))
    assert one == ten <= 6


def test_a_dict_of_values_costs_a_call_for_each_and_two_more() -> None:
    class Logging(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict(dict.fromkeys("abcde", self.layer(batch).sum()), batch_size=2)

    assert calls_per_evaluation_batch(Logging()) <= 4 + 5 + 2


def test_from_fit_to_training_step_are_at_most_six_frames_over_four_files() -> None:
    class Looks(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            frame: Any = sys._getframe()
            while (
                frame is not None
                and frame.f_code.co_name != "test_from_fit_to_training_step_are_at_most_six_frames_over_four_files"
            ):
                frames.append(frame)
                frame = frame.f_back
            return super().training_step(batch, batch_idx)

    frames: list[Any] = []
    Trainer(**SHORT).fit(Looks(), [torch.ones(2, 4)])
    files = {own(frame) for frame in frames} - {None}
    assert len(frames) <= 6
    assert files == {"trainer/trainer.py", "trainer/run.py", "trainer/loop.py", "trainer/step.py"}


@pytest.mark.gpu
def test_a_step_with_logging_and_a_bar_never_waits_for_the_gpu() -> None:
    class Strict(Logs):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx < 90 else "default")

    module = Strict()
    try:
        arguments = {
            **SHORT,
            "accelerator": "gpu",
            "enable_progress_bar": True,
            "logger": True,
            "log_every_n_steps": 5,
        }
        Trainer(**arguments).fit(module, [torch.ones(2, 4)] * 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_doctor_adds_at_most_twelve_calls_a_step_and_opens_no_context() -> None:
    from paceline.doctor.doctor import Doctor

    bare, measured = calls_per_batch(Tiny()), calls_per_batch(Tiny(), profiler=Doctor(write=False))
    assert sum(measured.values()) - sum(bare.values()) <= 12, measured - bare
    assert measured["contextlib"] == 0


def test_a_profiler_that_is_not_there_adds_no_call() -> None:
    calls = calls_per_batch(Tiny())
    assert not [name for name in calls if "profilers" in name or "doctor" in name]
