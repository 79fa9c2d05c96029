"""What the doctor's clock says of steps whose parts are known, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patients import CLOCK, SETTINGS, Healthy, Slow, Small, batches, diagnose, keys
from rank_processes import ranks
from torch.utils.data import DataLoader

from paceline import Callback, Trainer
from paceline.callbacks import ModelCheckpoint
from paceline.doctor.device_clock import DeviceClock
from paceline.doctor.doctor import Doctor, part_of
from paceline.doctor.measurements import WARM_UP, Facts, from_rows, usable_cores
from paceline.doctor.report import Report
from paceline.doctor.script_options import Plan
from paceline.doctor.script_run import PlannedDoctor
from paceline.doctor.step_clock import INDEX, PARTS, Clock
from paceline.messages import PacelineWarning

PAUSE = 0.01


class Pause(torch.autograd.Function):
    """Sleeps in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        CLOCK.sleep(3 * PAUSE)
        return gradient


class Known(Small):
    """Each part of its step takes a known time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.sleep(2 * PAUSE)
        return Pause.apply(self.layer(batch).mean())

    def configure_optimizers(self) -> Any:
        class Sleeps(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                CLOCK.sleep(4 * PAUSE)
                return super().step(closure)

        return Sleeps(self.parameters(), lr=0.01)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CLOCK.sleep(PAUSE)


class Ends(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        CLOCK.sleep(5 * PAUSE)

    def on_save_checkpoint(self, *_: Any) -> None:
        CLOCK.sleep(6 * PAUSE)


def test_every_part_gets_its_time_and_all_of_them_are_the_whole() -> None:
    begun = CLOCK()
    saves = ModelCheckpoint("saved", every_n_train_steps=4, save_top_k=-1, save_on_train_epoch_end=False)
    report = diagnose(
        Known(), DataLoader(Slow(11, PAUSE)), batches(3), callbacks=[Ends(), saves], enable_checkpointing=True
    )
    whole = CLOCK() - begun
    (facts,) = report.ranks
    steps = 11 - WARM_UP
    assert facts.steps == facts.updates == steps
    planted = {"data": 1, "forward": 2, "backward": 3, "optimizer": 4, "callbacks": 5}
    for part, times in planted.items():
        assert facts.seconds[part] == pytest.approx(times * PAUSE * steps, rel=0.01), part
    assert facts.seconds["evaluation"] == pytest.approx(3 * PAUSE, rel=0.01)
    assert facts.seconds["checkpoint"] == pytest.approx(2 * 6 * PAUSE, rel=0.01)
    assert sum(planted.values()) * PAUSE * steps < facts.total < facts.run_seconds <= whole
    assert sum(facts.seconds.values()) == pytest.approx(facts.total)
    assert len(facts.step_seconds) == steps
    assert sum(facts.share(part) for part in PARTS) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("action", "part"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data"),
        ("[Strategy]DDPStrategy.batch_to_device", "copy"),
        ("[Strategy]DDPStrategy.training_step", "forward"),
        ("[Strategy]DDPStrategy.backward", "backward"),
        ("[Strategy]DDPStrategy.barrier", "communication"),
        ("[TrainingModule]Net.optimizer_step", "optimizer"),
        ("[Callback]Mine.on_fit_start", "callbacks"),
        ("[Logging].flush_step", "logging"),
        ("save_checkpoint", "checkpoint"),
        ("run_training_batch", None),
        ("[_EvaluationLoop].val_next", None),
    ],
)
def test_every_action_belongs_to_a_part(action: str, part: str | None) -> None:
    assert part_of(action) == part


def test_parts_interrupt_each_other_and_whole_parts_are_not_interrupted() -> None:
    clock = Clock()
    inner = clock.around("forward", lambda: CLOCK.sleep(PAUSE))

    def outer() -> None:
        CLOCK.sleep(PAUSE)
        inner()

    clock.around("optimizer", outer)()
    found = dict(zip(PARTS, clock.totals, strict=False))
    assert found["forward"] >= PAUSE
    assert found["optimizer"] >= PAUSE
    before = found["forward"]
    clock.around("evaluation", outer)()
    assert clock.totals[INDEX["forward"]] == before
    assert clock.totals[INDEX["evaluation"]] >= 2 * PAUSE
    with pytest.raises(ZeroDivisionError):
        clock.around("checkpoint", lambda: 1 / 0)()
    assert not clock.held
    assert clock.current == INDEX["other"]


def test_a_device_s_parts_are_read_from_events_that_nobody_waits_for() -> None:
    now = [0.0]

    class Event:
        """As torch.cuda.Event: the device comes to it when its time is up."""

        def record(self) -> None:
            self.at = now[0]

        def query(self) -> bool:
            return now[0] >= self.at + 100

        def elapsed_time(self, other: Any) -> float:
            return other.at - self.at

        def synchronize(self) -> None:
            raise AssertionError("nobody waits")

    device = DeviceClock(Event)
    for part, lasts in (("data", 5), ("forward", 20), ("other", 0)):
        device(INDEX[part])
        now[0] += lasts
    device.close()
    assert device.steps == 0, "the device has not come so far"
    now[0] += 200
    device.read()
    assert device.steps == 1
    assert device.seconds[INDEX["data"]] == pytest.approx(0.005)
    assert device.seconds[INDEX["forward"]] == pytest.approx(0.020)
    assert len(device._free) == 3, "events are used again"


class Fails(Small):
    """Does something in a step that ends the run."""

    def __init__(self, at: int, ends: Callable[[], None]) -> None:
        super().__init__(0.001)
        self.at, self.ends = at, ends

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            self.ends()
        return super().training_step(batch, batch_idx)


def fails() -> None:
    raise KeyError("on purpose")


def is_interrupted() -> None:
    raise KeyboardInterrupt


def gets_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_run_that_fails_leaves_nothing_behind_and_one_that_is_short_makes_no_report() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    hooks = list(gc.callbacks)
    for at in (1, WARM_UP, 12):
        doctor = Doctor(write=False)
        with pytest.raises(KeyError, match="on purpose"):
            Trainer(**SETTINGS, profiler=doctor).fit(Fails(at, fails), batches(20))
        assert _get_current_dispatch_mode() is None
        assert gc.callbacks == hooks
        assert (doctor.report is None) == (at <= WARM_UP)


@pytest.mark.parametrize(
    ("ends", "error"), [(fails, KeyError), (is_interrupted, KeyboardInterrupt), (gets_ctrl_c, KeyboardInterrupt)]
)
def test_a_run_that_is_ended_is_judged_by_the_steps_it_has_done(
    ends: Callable[[], None], error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    doctor = Doctor(tmp_path)
    with pytest.raises(error):
        Trainer(**SETTINGS, profiler=doctor).fit(Fails(60, ends), batches(100))
    assert doctor.report is not None
    assert doctor.report.ranks[0].steps == 60 - WARM_UP, "the step under way is left out"
    assert json.loads((tmp_path / "doctor.json").read_text())["verdict"] == doctor.report.verdict()
    assert (tmp_path / "doctor.html").exists()
    assert "Doctor: A step takes" in caplog.text


def test_a_validation_that_is_broken_off_counts_as_long_as_it_took() -> None:
    class Stuck(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            CLOCK.sleep(0.2)
            raise KeyboardInterrupt

    doctor = Doctor(write=False)
    with pytest.raises(KeyboardInterrupt):
        Trainer(**SETTINGS, profiler=doctor).fit(Stuck(0.001), batches(20), batches(2))
    assert doctor.report is not None
    assert doctor.report.ranks[0].seconds["evaluation"] >= 0.2
    assert "evaluation_share" in keys(doctor.report)


@pytest.mark.parametrize("method", ["facts", "describe"])
def test_an_error_of_the_doctor_s_own_does_not_hide_the_one_that_ended_the_run(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Doctor) -> Any:
        raise RuntimeError("the doctor's own")

    monkeypatch.setattr(Doctor, method, breaks)
    told = pytest.warns(PacelineWarning, match="the run also raised RuntimeError: the doctor's own")
    with told, pytest.raises(KeyError, match="on purpose"):
        Trainer(**SETTINGS, profiler="doctor").fit(Fails(30, fails), batches(100))


def test_of_several_processes_that_fail_the_first_is_judged_alone() -> None:
    def run() -> Any:
        doctor = Doctor(write=False)
        with contextlib.suppress(BaseException):
            Trainer(**SETTINGS, profiler=doctor, strategy="ddp", devices=2).fit(Fails(30, fails), batches(100))
        return None if doctor.report is None else doctor.report.as_dict()

    first, second = ranks(2, run)
    assert second is None
    report = Report.from_dict(first)
    assert [facts.steps for facts in report.ranks] == [30 - WARM_UP]
    assert "covers only rank 0 of 2" in report.verdict()
    assert not keys(report) & {"communication_bound", "model_too_small", "stragglers"}, "which take all of them"


def test_a_script_that_fails_is_no_report_for_the_command_that_runs_it(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "report.json"))
    with pytest.raises(KeyError, match="on purpose"):
        Trainer(**SETTINGS, profiler=PlannedDoctor(plan)).fit(Fails(30, fails), batches(100))
    assert not Path(plan.out).exists()


def test_epochs_accumulation_and_a_stop_inside_an_epoch_are_measured_alike() -> None:
    report = diagnose(Small(0.002), batches(8), max_epochs=3, accumulate_grad_batches=2, max_steps=10)
    (facts,) = report.ranks
    assert facts.steps == 20 - WARM_UP
    assert facts.updates == 9
    assert facts.accumulate == 2


def test_only_a_fit_is_examined() -> None:
    doctor = Doctor(write=False)
    trainer = Trainer(**SETTINGS, profiler=doctor)
    trainer.validate(Validates(), batches(3), verbose=False)
    assert doctor.report is None
    trainer.fit(Small(), batches(20))
    first = doctor.report
    trainer.fit(Small(), batches(12))
    assert first is not doctor.report is not None


class Validates(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("x", self.layer(batch).mean())


def test_a_report_is_written_beside_the_logs_and_read_back(tmp_path: Path) -> None:
    doctor = Doctor()
    Trainer(**{**SETTINGS, "default_root_dir": tmp_path / "run"}, profiler=doctor).fit(Small(), batches(20))
    data = json.loads((tmp_path / "run" / "doctor.json").read_text())
    assert data["version"] == 1
    assert data["verdict"] == doctor.report.verdict()  # type: ignore[union-attr]
    again = Report.from_dict(data)
    assert again.as_dict() == data
    assert "<!doctype html>" in (tmp_path / "run" / "doctor.html").read_text()


def test_the_name_doctor_means_it() -> None:
    assert isinstance(Trainer(**SETTINGS, profiler="doctor").profiler, Doctor)


def test_rows_before_the_warm_up_and_rows_without_a_step_do_not_count() -> None:
    rows = [tuple([float(i)] * len(PARTS) + [float(i)]) for i in range(8)]
    rows.append((*[9.0] * len(PARTS), 7.0))  # the end of an epoch: no step
    facts = Facts()
    from_rows(facts, rows, warm_up=3)
    assert facts.steps == 4
    assert len(facts.step_seconds) == 4
    from_rows(empty := Facts(), rows[:2], warm_up=3)
    assert empty.steps == 0


def test_of_a_long_run_the_newest_steps_are_kept_and_what_was_counted_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.doctor.step_clock.MOST_ROWS", 11)
    (facts,) = diagnose(Small(0.001), batches(43)).ranks
    assert facts.steps == 9, "between 11 rows, of which the last is the end of the run"
    assert facts.updates == facts.steps


def test_operators_need_not_be_looked_at() -> None:
    doctor = Doctor(write=False, operators=False)
    Trainer(**SETTINGS, profiler=doctor).fit(Small(), batches(12))
    assert doctor.report is not None
    assert doctor.report.ranks[0].operators is None


def test_there_is_at_least_one_core() -> None:
    assert usable_cores() >= 1


def test_a_healthy_report_is_good_news_on_the_page() -> None:
    report = diagnose(Healthy(), [torch.randn(512, 128)] * 12)
    assert 'class="card good"' in report.html()
