"""Each finding in a run with its fault planted, and silent where there is none.

The doctor reads a clock that goes on only where a fault is planted, so that a busy machine changes nothing. What needs
a GPU, a second memory node, a full memory or a slow network is examined from recorded facts.
"""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patients import CLOCK, SETTINGS, Healthy, Slow, Small, batches, diagnose, keys, only
from rank_processes import ranks
from torch.utils.data import DataLoader, TensorDataset

from paceline import Callback, Trainer
from paceline.callbacks import GarbageCollection, ModelCheckpoint, RichProgressBar
from paceline.doctor import data_findings, findings, process_findings, step_findings
from paceline.doctor.doctor import Doctor
from paceline.doctor.measurements import WARM_UP, Facts, usable_cores
from paceline.doctor.report import Report
from paceline.strategies import DDPStrategy

FOUR_CORES = "paceline.doctor.doctor.usable_cores"


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many cores on any machine."""
    monkeypatch.setattr(FOUR_CORES, lambda: 4)


def test_a_healthy_run_gives_no_finding_at_all() -> None:
    report = diagnose(Healthy(), [torch.randn(512, 128)] * 8, max_epochs=2)
    assert report.findings == [], report.text()
    assert "Nothing stands out" in report.verdict()


def test_a_run_that_is_too_short_says_how_many_batches_are_needed_and_nothing_else() -> None:
    report = diagnose(Small(), batches(WARM_UP))
    assert report.findings == []
    assert f"too short to diagnose, because the first {WARM_UP} batches are not measured" in report.verdict()
    assert f"{WARM_UP + 1} or more" in report.verdict()
    assert "A step takes" in diagnose(Small(), batches(WARM_UP + 1)).verdict(), "the number is true"


def test_a_run_that_is_too_short_is_no_good_news_on_the_page() -> None:
    page = diagnose(Small(), batches(WARM_UP)).html()
    assert '<div class="card "><h3>The run was too short.</h3>' in page
    assert 'class="card good"' not in page


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four_cores")
def test_data_that_no_number_of_workers_can_load_in_time() -> None:
    report = diagnose(Small(), DataLoader(Slow(60, 0.02), batch_size=4))
    finding = only(report, "data_bound")
    assert finding.share > 0.8
    assert "num_workers=4" in finding.change
    assert "too_few_workers" not in keys(report)
    assert report.findings[0] is finding


@pytest.mark.usefixtures("four_cores")
def test_a_slow_iterable_is_named_as_what_loads_in_the_training_process() -> None:
    class Feed:
        def __iter__(self) -> Any:
            for _ in range(15):
                CLOCK.sleep(0.02)
                yield torch.ones(4, 4)

    finding = only(diagnose(Small(), Feed()), "data_bound")
    assert "Feed" in finding.change
    assert "num_workers" in finding.change


@pytest.mark.usefixtures("four_cores")
def test_too_few_workers_says_how_many_are_enough() -> None:
    report = diagnose(Small(seconds=0.02), DataLoader(Slow(20, 0.03), batch_size=1))
    finding = only(report, "too_few_workers")
    assert "num_workers=2" in finding.change
    assert 0.4 < finding.share < 0.8
    assert "data_bound" not in keys(report)


@pytest.mark.usefixtures("four_cores")
def test_enough_workers_are_no_finding() -> None:
    report = diagnose(Small(seconds=0.05), DataLoader(Slow(20, 0.005), batch_size=1, num_workers=2))
    assert not keys(report) & {"data_bound", "too_few_workers", "too_many_workers"}, report.text()


def test_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FOUR_CORES, lambda: 1)
    data = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=1, num_workers=2)

    class First(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    finding = only(diagnose(First(0.01), data), "too_many_workers")
    assert "num_workers=2" in finding.what
    assert "num_workers=1" in finding.change


# ---- the step --------------------------------------------------------------------------------------------------------


class Reads(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.last = loss.item()  # the planted line
        return loss


def test_a_hidden_wait_for_the_device_names_the_users_line() -> None:
    finding = only(diagnose(Reads(), batches()), "host_syncs")
    assert "test_findings.py:" in finding.what
    assert "loss.item()  # the planted line" in finding.what
    number = int(finding.what.partition("test_findings.py:")[2].split()[0])
    assert "planted line" in Path(__file__).read_text().splitlines()[number - 1]
    assert finding.is_note, "on the CPU nobody waits"


def test_the_same_line_is_a_problem_on_a_gpu() -> None:
    report = diagnose(Reads(), batches())
    (finding,) = [f for f in findings.examine([replace(report.ranks[0], device="cuda")]) if f.key == "host_syncs"]
    assert not finding.is_note
    assert "the GPU" in finding.what


def test_logging_tensors_and_what_paceline_reads_itself_are_no_wait() -> None:
    class Adam(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), foreach=False)  # reads its step count

    report = diagnose(Adam(), batches(), log_every_n_steps=1, gradient_clip_val=1.0)
    assert "host_syncs" not in {finding.key for finding in report.findings}, report.text()


def tiny_steps(**changed: Any) -> Facts:
    """The facts of a run with a batch of two samples, whose operators took 5 us each."""
    (facts,) = diagnose(Small(), batches(8, rows=2)).ranks
    assert facts.operators is not None
    step = 5e-6 * facts.operators
    return replace(facts, step_seconds=[step] * 5, seconds={"forward": 2 * step, "backward": 3 * step}, **changed)


def test_a_batch_that_is_too_small_for_the_device() -> None:
    (finding,) = [found for found in findings.examine([tiny_steps()]) if found.key == "batch_too_small"]
    assert "on a batch of 2" in finding.what
    assert "take 5 us each" in finding.what
    assert "try 8" in finding.change
    assert "Trainer(compile='step')" in finding.change
    assert "compile=True" not in finding.change, "slower on small networks"


def test_a_large_batch_or_work_that_takes_its_time_is_no_small_batch() -> None:
    facts = tiny_steps()
    assert step_findings.batch_too_small([replace(facts, batch_size=4096)]) is None
    assert step_findings.batch_too_small([replace(facts, step_seconds=[4 * facts.quick_step] * 5)]) is None


def test_a_whole_step_is_compiled_on_one_device_only() -> None:
    finding = step_findings.batch_too_small([tiny_steps(strategy="DDPStrategy", world_size=2)])
    assert finding is not None
    assert "compile='step'" not in finding.change
    assert "Trainer(compile=True)" in finding.change
    assert "can become slower" in finding.change


COMPILE = {"backend": "eager", "dynamic": False}


@pytest.fixture
def fresh_compiler() -> None:
    """Nothing is compiled yet."""
    import torch._dynamo

    torch._dynamo.reset()


class Net(torch.nn.Module):
    """Of the user's own: torch compiles nothing of a layer of its own that is called alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)


class Compiled(Small):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.layer = Net()


@pytest.mark.usefixtures("fresh_compiler")
def test_recompiling_names_the_argument_whose_shape_changes() -> None:
    data = [torch.ones(2 + i % 8, 4) for i in range(24)]
    finding = only(diagnose(Compiled(), data, compile=COMPILE), "recompiles")
    assert "size mismatch at index 0" in finding.why
    assert "tensor '" in finding.why
    assert "dynamic" in finding.change


@pytest.mark.usefixtures("fresh_compiler")
def test_three_shapes_are_three_graphs_and_no_finding_of_one() -> None:
    from paceline.strategies.recompile_watch import watch_compiling

    watch = watch_compiling()
    before = watch.compilations
    data = [torch.ones(2 + i % 3, 4) for i in range(24)]
    report = diagnose(Compiled(0.01), data, compile=COMPILE)
    made = watch.compilations - before
    assert made == 3
    assert "recompiles" not in keys(report), report.text()


@pytest.mark.usefixtures("fresh_compiler")
def test_batches_of_one_shape_are_no_finding() -> None:
    report = diagnose(Compiled(0.01), batches(16), compile=COMPILE)
    assert report.ranks[0].recompilations == []
    assert "recompiles" not in keys(report)
    assert report.ranks[0].run_parts["compile"] > 0


# ---- around the step -------------------------------------------------------------------------------------------------


class Validates(Small):
    pause = 0.02

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CLOCK.sleep(self.pause)
        self.log("val", self.layer(batch).mean())


def test_too_much_validation() -> None:
    report = diagnose(Validates(0.005), batches(12), batches(10), max_epochs=2)
    finding = only(report, "evaluation_share")
    assert finding is report.findings[0]
    assert "limit_val_batches" in finding.change


def test_a_short_validation_is_no_finding() -> None:
    assert "evaluation_share" not in keys(diagnose(Validates(0.02), batches(16), batches(2)))


class Keeps(Small):
    pause = 0.03

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        CLOCK.sleep(self.pause)


class SlowStart(Callback):
    """What a short run consists of mostly: everything that happens before its first batch."""

    def on_train_start(self, *_: Any) -> None:
        CLOCK.sleep(1.0)


def test_validation_and_checkpoints_are_a_share_of_the_loop_however_long_the_start_took() -> None:
    often = ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1)

    class Both(Validates, Keeps):
        pause = 0.02

    around: dict[str, Any] = {"callbacks": [SlowStart(), often], "enable_checkpointing": True}
    report = diagnose(Both(0.005), batches(20), batches(15), **around)
    for key, part in (("evaluation_share", "evaluation"), ("checkpoint_share", "checkpoint")):
        assert f"{100 * report.ranks[0].share(part):.0f} %" in only(report, key).what, "as the table says"


def test_a_slow_start_makes_no_finding() -> None:
    report = diagnose(Validates(0.02), batches(16), batches(2), callbacks=[SlowStart()])
    assert not keys(report) & {"evaluation_share", "checkpoint_share", "logging_share"}, report.text()


def test_checkpoints_that_stop_the_training() -> None:
    often = ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1)
    report = diagnose(Keeps(0.005), batches(16), callbacks=[often], enable_checkpointing=True)
    assert "async_save=True" in only(report, "checkpoint_share").change


def test_one_checkpoint_at_the_end_is_no_finding() -> None:
    module = Keeps(0.05)
    module.pause = 0.0
    last = ModelCheckpoint("saved")
    assert "checkpoint_share" not in keys(diagnose(module, batches(20), callbacks=[last], enable_checkpointing=True))


class Ends(Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        CLOCK.sleep(self.seconds)


def test_callbacks_that_take_much_of_a_step_are_named_with_their_hook_and_share() -> None:
    class Looks(Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            CLOCK.sleep(0.005)

    class Talks(Small):
        def on_train_batch_end(self, *_: Any) -> None:
            CLOCK.sleep(0.0025)

    report = diagnose(Talks(0.0125), batches(), callbacks=[Ends(0.03), Looks()])
    finding = only(report, "logging_share")
    assert finding.what == "Callbacks and logging take 75 % of each step, most of it Ends.on_train_batch_end."
    named = "Ends.on_train_batch_end (60 %), Looks.on_before_zero_grad (10 %), Talks.on_train_batch_end (5 %)"
    assert finding.why == f"The time is spent in these hooks: {named}."
    assert "progress bar" not in finding.change
    assert "profiler='simple'" in finding.change


def test_a_hook_is_charged_with_what_it_does_itself_and_not_with_a_checkpoint() -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            CLOCK.sleep(0.02)
            trainer.save_checkpoint("saved.ckpt")

    (facts,) = diagnose(Keeps(0.005), batches(8), callbacks=[Saves()]).ranks
    assert facts.hooks["Saves.on_train_batch_end"] == pytest.approx(5 * 0.02, rel=0.01), "the measured steps"
    assert facts.seconds["checkpoint"] == pytest.approx(5 * Keeps.pause, rel=0.01)


def test_no_hook_is_called_most_of_it_where_several_share_the_time() -> None:
    hooks = {"MyProgressBar.on_train_batch_end": 0.2, "Mine.on_train_batch_end": 0.15, "Its.on_train_batch_end": 0.15}
    facts = replace(FINE, seconds={"forward": 0.5, "callbacks": 0.5}, hooks=hooks)
    (finding,) = findings.examine([facts])
    assert finding.what == "Callbacks and logging take 50 % of each step."
    assert "MyProgressBar.on_train_batch_end (20 %), Mine.on_train_batch_end (15 %), Its" in finding.why
    assert "progress bar" not in finding.change


def test_the_progress_bar_is_named_where_it_takes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class MyProgressBar(RichProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            CLOCK.sleep(0.02)
            return super().get_metrics(trainer, pl_module)

    monkeypatch.setattr("paceline.callbacks.progress.perf_counter", CLOCK)
    bar = MyProgressBar(console_kwargs={"file": io.StringIO()})
    bar.plain_seconds = 0.0
    report = diagnose(Small(0.005), batches(), callbacks=[bar], enable_progress_bar=True)
    finding = only(report, "logging_share")
    assert "most of it MyProgressBar." in finding.what
    assert "raise refresh_rate of the progress bar" in finding.change


def test_a_short_callback_is_no_finding() -> None:
    assert "logging_share" not in keys(diagnose(Small(0.03), batches(), callbacks=[Ends(0.0)]))


def test_a_logger_that_is_slow() -> None:
    from paceline.loggers import CSVLogger

    class Waits(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            CLOCK.sleep(0.02)

    report = diagnose(Small(0.005), batches(), logger=Waits("logs"), log_every_n_steps=1)
    assert "loggers" in only(report, "logging_share").why


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_more_threads_than_cores() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 * (os.cpu_count() or 1) + 1)
    try:
        finding = only(diagnose(Small(0.01), batches(12)), "oversubscribed_threads")
    finally:
        torch.set_num_threads(before)
    assert "OMP_NUM_THREADS=" in finding.change


def test_a_thread_for_each_core_is_no_finding() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        assert "oversubscribed_threads" not in keys(diagnose(Small(0.01), batches(12)))
    finally:
        torch.set_num_threads(before)


def test_collections_in_every_step() -> None:
    class Collects(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            gc.collect()
            return super().training_step(batch, batch_idx)

    many = [[i] for i in range(300_000)]
    finding = only(diagnose(Collects(), batches(12)), "collection_pauses")
    assert "GarbageCollection()" in finding.change
    assert many


@pytest.mark.parametrize("callbacks", [[], [GarbageCollection(every_n_steps=2)]])
def test_many_objects_that_are_hardly_looked_at_are_no_finding(callbacks: list[Callback]) -> None:
    many = [[i] for i in range(300_000)]
    report = diagnose(Small(1.0), batches(24), callbacks=callbacks)
    assert "collection_pauses" not in keys(report), report.text()
    assert many


GPU = Facts(
    device="cuda",
    device_name="a GPU",
    steps=100,
    updates=100,
    seconds={"data": 0.01, "copy": 0.2, "forward": 0.4, "backward": 0.8, "optimizer": 0.1},
    step_seconds=[0.0151] * 100,
    batch_size=64,
    cores=16,
    threads=8,
    loader={"kind": "DataLoader", "num_workers": 4, "pin_memory": False},
    memory={"total": 80e9, "peak_allocated": 40e9, "peak_reserved": 42e9, "retries": 0.0},
    numa={"device_node": 1, "nodes": 2, "near": 8, "cores": 8},
)


def test_pageable_copies_from_recorded_facts() -> None:
    (finding,) = findings.examine([GPU])
    assert finding.key == "pageable_copies"
    assert "pin_memory=True" in finding.change
    assert findings.examine([replace(GPU, loader={**GPU.loader, "pin_memory": True})]) == []
    assert data_findings.pageable_copies([replace(GPU, device="cpu")]) is None


FINE = replace(GPU, loader={**GPU.loader, "pin_memory": True})


def test_full_memory_from_recorded_facts() -> None:
    full = replace(FINE, memory={**FINE.memory, "peak_allocated": 78e9, "peak_reserved": 79e9})
    (finding,) = findings.examine([FINE, replace(full, rank=1)])
    assert finding.key == "memory_nearly_full"
    assert "98 %" in finding.what
    assert "rank 1" in finding.what
    host = replace(FINE, memory={**FINE.memory, "host_total": 100e9, "host_available": 2e9})
    assert [f.key for f in findings.examine([host])] == ["memory_nearly_full"]


def test_fragmented_memory_from_recorded_facts() -> None:
    torn = {**FINE.memory, "peak_allocated": 40e9, "peak_reserved": 72e9}
    assert findings.examine([replace(FINE, memory=torn)]) == [], "torch never had to look for space"
    (finding,) = findings.examine([replace(FINE, memory={**torn, "retries": 12.0})])
    assert finding.key == "fragmentation"
    assert "expandable_segments" in finding.change


def test_far_memory_from_recorded_facts() -> None:
    far = replace(FINE, numa={"device_node": 1, "nodes": 2, "near": 8, "cores": 16})
    (finding,) = findings.examine([FINE, replace(far, rank=1)])
    assert finding.key == "numa_distance"
    assert "Rank 1" in finding.what


# ---- loops of one's own ----------------------------------------------------------------------------------------------

OWN_LOOP = Facts(
    own_loop=True,
    strategy="DDPStrategy",
    world_size=2,
    steps=100,
    updates=100,
    seconds={"forward": 0.05, "backward": 0.09},
    step_seconds=[0.0014] * 100,
    batch_size=4,
    cores=16,
)
LINE = {"file": "train.py", "number": 3, "text": "loss.item()", "what": "reads", "times": 1}
AGAIN = {"function": "forward", "times": 4, "reason": ""}


@pytest.mark.parametrize(
    ("key", "planted", "words"),
    [
        ("host_syncs", {"lines": [LINE]}, "read them every n steps, all at once"),
        ("batch_too_small", {"operators": 200}, "Accelerator(dynamo_backend='inductor')"),
        ("recompiles", {"recompilations": [AGAIN]}, "TorchDynamoPlugin(dynamic=True)"),
        ("evaluation_share", {"seconds": {"forward": 1.0, "evaluation": 1.0}}, "Evaluate less often"),
        ("checkpoint_share", {"seconds": {"forward": 1.0, "checkpoint": 1.0}, "often": {"checkpoint": 3}}, "Save less"),
        ("logging_share", {"seconds": {"forward": 1.0, "logging": 1.0}}, "accelerator.log every n steps"),
        ("model_too_small", {"communication": {"exposed": 8e-4}}, "paceline launch --num_processes 1"),
        ("communication_bound", {"communication": {"exposed": 4e-4}}, "Accelerator(gradient_accumulation_steps=4)"),
        ("collection_pauses", {"collection_seconds": 0.1, "collections": 10}, "gc.freeze()"),
    ],
)
def test_a_loop_of_one_s_own_is_told_of_what_exists_there(key: str, planted: dict[str, Any], words: str) -> None:
    facts = replace(OWN_LOOP, **planted)
    (finding,) = findings.examine([facts, replace(facts, rank=1)])
    assert finding.key == key
    assert words in finding.change
    for name in ("Trainer", "ModelCheckpoint", "self.log", "val_check", "GarbageCollection", "accumulate_grad_batches"):
        assert name not in finding.change + finding.gain


# ---- several processes -----------------------------------------------------------------------------------------------


def late(state: Any, bucket: Any) -> Any:
    """A way to reduce gradients that takes its time, as a slow network does."""
    buffer, done = bucket.buffer().div_(dist.get_world_size()), torch.futures.Future()
    work = dist.all_reduce(buffer, async_op=True)

    def finish() -> None:
        work.wait()
        time.sleep(NETWORK_SECONDS)
        done.set_result(buffer)

    threading.Thread(target=finish).start()
    return done


late.__annotations__.clear()  # torch accepts none, or its own
NETWORK_SECONDS = 0.03


def two(hook: Any = None, seconds: tuple[float, float] = (0.0, 0.0)) -> Report:
    """The report on two processes whose steps take so long."""

    def run() -> Any:
        doctor = Doctor(write=False)
        strategy = DDPStrategy(ddp_comm_hook=hook)
        module = Small(seconds[int(os.environ["RANK"])])
        Trainer(**{**SETTINGS, "profiler": doctor, "strategy": strategy, "devices": 2}).fit(module, batches(16))
        return None if doctor.report is None else doctor.report.as_dict()

    first, second = ranks(2, run)
    assert second is None
    return Report.from_dict(first)


def test_the_wait_for_gradients_is_measured_on_every_rank_by_the_clock_on_the_wall() -> None:
    report = two(late)
    assert [facts.rank for facts in report.ranks] == [0, 1]
    # Torch's own timers, which read no other clock. What passes before a rank begins to wait counts as hidden.
    assert all(facts.communication["exposed"] > 0.5 * NETWORK_SECONDS for facts in report.ranks)


def both(exposed: float, computing: float) -> list[Facts]:
    """Two ranks that wait and compute for so long in each step."""
    facts = replace(OWN_LOOP, own_loop=False, batch_size=512)
    facts.seconds = {"forward": computing * facts.steps, "backward": exposed * facts.steps}
    facts.communication = {"all": exposed, "exposed": exposed}
    return [facts, replace(facts, rank=1)]


def test_two_processes_for_a_model_that_is_too_small() -> None:
    (finding,) = findings.examine(both(exposed=0.02, computing=0.001))
    assert finding.key == "model_too_small"
    assert "2 processes are slower than a single one" in finding.what
    assert "Use Trainer(devices=1)" in finding.change
    assert "at least 10.5 times as fast" in finding.gain


def test_communication_that_backward_does_not_hide() -> None:
    (finding,) = findings.examine(both(exposed=0.02, computing=0.03))
    assert finding.key == "communication_bound"
    assert finding.share == pytest.approx(0.4)
    assert "accumulate_grad_batches=4" in finding.change
    assert findings.examine(both(exposed=0.005, computing=0.03)) == [], "that much is no finding"


def test_a_straggler_is_named_and_where_it_is_late() -> None:
    report = two(seconds=(0.002, 0.03))
    finding = only(report, "stragglers")
    assert finding.what.startswith(
        "Rank 1 takes 28 ms longer for a step than the other ranks, and rank 0 waits 93 % of"
    )
    assert finding.why == "Rank 1 spends 28 ms more per step on forward."
    assert not keys(report) & {"communication_bound", "model_too_small"}, report.text()


def test_a_straggler_that_is_late_in_a_hook_has_it_named() -> None:
    first, second = both(exposed=0.0, computing=0.03)
    second.seconds = {**second.seconds, "callbacks": 1.0}
    second.hooks = {"Mine.on_train_batch_end": 0.99}
    finding = process_findings.stragglers([first, second])
    assert finding is not None
    assert finding.why == "Rank 1 spends 10 ms more per step on callbacks and hooks: Mine.on_train_batch_end (25 %)."


def test_two_healthy_processes_are_no_finding() -> None:
    report = two(seconds=(0.05, 0.05))
    assert not keys(report) - {"oversubscribed_threads"}, report.text()
    assert [facts.rank for facts in report.ranks] == [0, 1]
    assert all(facts.communication for facts in report.ranks)
