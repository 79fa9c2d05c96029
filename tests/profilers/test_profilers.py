"""Profilers in real runs: tables, cProfile's files and traces read back; and nothing where there is none."""

from __future__ import annotations

import copy
import json
import pstats
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import Clock
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks import ModelCheckpoint
from paceline.profilers.advanced import AdvancedProfiler
from paceline.profilers.base import PassThroughProfiler, Profiler
from paceline.profilers.pytorch import PyTorchProfiler, RegisterRecordFunction
from paceline.profilers.simple import SimpleProfiler

SETTINGS: dict[str, Any] = QUIET | {"max_epochs": 2}


class Hooked(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Notes(TinyModule):
    """Times a part of its own step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("my part"):
            return super().training_step(batch, batch_idx)


def fit(profiler: Any, module: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**SETTINGS, "profiler": profiler, **arguments})
    trainer.fit(module or Notes(), tiny_loader(4), tiny_loader(2))
    return trainer


def calls(profiler: SimpleProfiler) -> dict[str, int]:
    return {name: len(times) for name, times in profiler.recorded_durations.items()}


def test_the_simple_profiler_counts_every_action_of_a_run() -> None:
    profiler = SimpleProfiler()
    fit(profiler, callbacks=[Hooked(), ModelCheckpoint("saved")], enable_checkpointing=True)
    found = calls(profiler)
    expected = {
        "run_training_epoch": 2,
        "run_training_batch": 8,
        "my part": 8,
        "[Strategy]SingleDevice.training_step": 8,
        "[Strategy]SingleDevice.backward": 8,
        "[Strategy]SingleDevice.optimizer_step": 8,
        "[TrainingModule]Notes.configure_optimizers": 1,
        "[TrainingModule]Notes.optimizer_zero_grad": 8,
        "[Callback]Hooked.on_train_batch_end": 8,
        "run_validation": 2,
        "[Strategy]SingleDevice.validation_step": 6,
        "save_checkpoint": 2,
    }
    assert {name: found.get(name) for name in expected} == expected
    # The end of an epoch is asked for too; so is the end of a validation, and the sanity check's.
    assert found["[_TrainingEpochLoop].train_dataloader_next"] >= 8
    assert found["[_EvaluationLoop].val_next"] >= 6


def test_the_simple_table_is_sorted_and_its_shares_are_of_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fit("simple")
    text = caplog.text
    assert "FIT Profiler Report" in text
    assert re.search(r"Action +\|  Mean duration \(s\) +\|  Num calls +\|  Total time \(s\) +\|  Percentage %", text)
    rows = re.findall(r"^\|  (\S.*?) +\|  (\S+) +\|  (\d+) +\|  (\S+) +\|  (\S+) +\|$", text, re.MULTILINE)
    seconds = {name: float(total) for name, _, _, total, _ in rows}
    assert seconds["run_training_epoch"] >= seconds["run_training_batch"] >= seconds["my part"] > 0
    in_order = [float(total) for name, _, _, total, _ in rows if name != "Total"]
    assert in_order == sorted(in_order, reverse=True)
    assert all(0 < float(share) <= 100 for name, *_, share in rows if name != "Total")


def test_a_split_counts_what_lies_inside_of_an_action_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    profiler = SimpleProfiler()
    profiler.setup("fit")
    assert profiler.split() == {}
    with profiler.profile("outer"):
        clock.sleep(1.0)
        for _ in range(2):
            with profiler.profile("inner"):
                clock.sleep(2.0)
    clock.sleep(8.0)
    split = profiler.split()
    assert split == {"outer": 1.0, "inner": 4.0, "no action": 8.0}
    assert profiler.recorded_durations == {"outer": [5.0], "inner": [2.0, 2.0]}
    for number in range(20):
        with profiler.profile(f"further {number}"):
            pass
    assert len(profiler.split()) == 11
    assert "other actions" in profiler.split()


def test_a_file_is_named_after_stage_and_file_name(tmp_path: Path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path / "there", filename="times", extended=False)
    trainer = fit(profiler)
    trainer.validate(Notes(), tiny_loader(2), verbose=False)
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["fit-times.txt", "validate-times.txt"]
    text = (tmp_path / "there" / "validate-times.txt").read_text()
    assert "VALIDATE Profiler Report" in text
    assert "validation_step" in text
    assert "training_step" not in text
    assert "Percentage" not in text


def test_with_several_processes_each_writes_its_own_file(tmp_path: Path) -> None:
    def run() -> None:
        fit(SimpleProfiler(tmp_path, "times"), strategy="ddp", devices=2)

    ranks(2, run)
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["fit-times-0.txt", "fit-times-1.txt"]
    assert "[Strategy]DDPStrategy.backward" in (tmp_path / "fit-times-1.txt").read_text()


def test_the_advanced_profiler_names_the_users_functions_and_dumps_what_pstats_reads(tmp_path: Path) -> None:
    fit(AdvancedProfiler(tmp_path, "deep", line_count_restriction=50, dump_stats=True))
    text = (tmp_path / "fit-deep.txt").read_text()
    part = text.partition("Profile stats for: my part")[2].partition("Profile stats for:")[0]
    assert re.search(r"^ +8 .*tiny\.py:\d+\(training_step\)", part, re.MULTILINE)
    (file,) = tmp_path.glob("fit-deep-my_part.prof")
    names = {name for _, _, name in pstats.Stats(str(file)).stats}  # type: ignore[attr-defined]
    assert "training_step" in names


def test_the_pytorch_profiler_writes_a_trace_with_operators_actions_and_modules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    profiler = PyTorchProfiler(tmp_path, row_limit=10, schedule=schedule, profile_memory=True)
    fit(profiler, callbacks=[Hooked()])
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["fit-1.pt.trace.json", "fit.pt.trace.json"]
    trace = tmp_path / "fit.pt.trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("[pl][profile][Strategy]SingleDevice.backward") == 2
    assert names.count("[pl][profile]my part") == 2
    assert "aten::linear" in names
    assert any(name.startswith("[pl][module]") and name.endswith("Linear: layer") for name in names)
    assert "[memory]" in names
    text = caplog.text
    assert "FIT Profiler Report" in text
    assert "CPU Mem" in text
    assert str(trace) in text


def test_without_a_schedule_all_steps_are_recorded_and_module_hooks_are_gone_after(tmp_path: Path) -> None:
    module = Notes()
    profiler = PyTorchProfiler(tmp_path, "all", schedule=None, record_module_names=True)
    fit(profiler, module, limit_val_batches=0, max_epochs=1)
    names = [event.get("name") for event in json.loads((tmp_path / "fit-all.pt.trace.json").read_text())["traceEvents"]]
    assert names.count("[pl][profile]run_training_batch") == 4
    assert not module.layer._forward_hooks
    assert not module.layer._forward_pre_hooks


def recorded(profiler: PyTorchProfiler, action: str) -> int:
    return sum(event.name == f"[pl][profile]{action}" for event in profiler.function_events)


def test_training_and_validation_have_a_trace_each_and_the_sanity_check_has_none(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path)
    trainer = Trainer(**{**SETTINGS, "max_epochs": 1}, profiler=profiler)
    trainer.fit(Notes(), tiny_loader(6), tiny_loader(6))
    first, second = (
        [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]] for trace in profiler.traces
    )
    training, validation = "[pl][profile]run_training_batch", "[pl][profile][Strategy]SingleDevice.validation_step"
    assert (first.count(training), first.count(validation)) == (3, 0)
    assert (second.count(training), second.count(validation)) == (0, 3)
    assert recorded(profiler, "[Strategy]SingleDevice.validation_step") == 3


@pytest.mark.parametrize("arguments", [{"limit_train_batches": 3}, {"max_steps": 4}])
def test_a_run_that_is_shorter_than_the_default_schedule_is_recorded_completely(arguments: Any, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path)
    fit(profiler, max_epochs=1, **arguments)
    assert recorded(profiler, "run_training_batch") == min(arguments.values())
    assert recorded(profiler, "[Strategy]SingleDevice.validation_step") == 2
    trainer = Trainer(**SETTINGS, profiler=profiler)
    trainer.test(Notes(), tiny_loader(1), verbose=False)
    assert recorded(profiler, "[Strategy]SingleDevice.test_step") == 1


def test_an_own_schedule_is_kept_in_a_short_fit(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1))
    fit(profiler, max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    assert recorded(profiler, "run_training_batch") == 1


def test_outside_of_a_run_recording_begins_with_the_first_action(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "mine")
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    with profiler.profile("outer"), RegisterRecordFunction(layers):
        layers(torch.ones(1, 1))
        with profiler.profile("inner"):
            torch.zeros(3)
    profiler.describe()
    names = {event.name for event in profiler.function_events}
    assert {"[pl][profile]outer", "[pl][profile]inner", "aten::zeros"} <= names
    assert {"[pl][module]torch.nn.modules.linear.Linear: 0", "[pl][module]torch.nn.modules.activation.ReLU: 1"} <= names
    assert not layers[0]._forward_hooks
    assert "aten::zeros" in (tmp_path / "mine.txt").read_text()
    assert copy.deepcopy(profiler).dirpath == tmp_path


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("row_limit", r"PyTorchProfiler\(row_limit=\.\.\.\)"),
        ("sort_by", r"PyTorchProfiler\(sort_by_key=\.\.\.\)"),
        ("time_units", "Did you mean 'time_unit'"),
        ("self", "Found invalid table_kwargs key: self"),
    ],
)
def test_keys_that_the_table_does_not_have_are_named(key: str, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        PyTorchProfiler(table_kwargs={key: None})


def test_a_report_lies_in_the_folder_of_its_run_which_dirpath_names(tmp_path: Path) -> None:
    profiler = SimpleProfiler(filename="times")
    assert profiler.dirpath is None
    for name in ("one", "two"):
        trainer = fit(profiler, default_root_dir=tmp_path / name)
        assert profiler.dirpath == trainer.log_dir == str(tmp_path / name)
        assert (tmp_path / name / "fit-times.txt").exists()
    assert profiler.recorded_durations["setup_train_dataloader"]


def test_a_profiler_may_choose_the_training_loader_and_no_other() -> None:
    class Shorter(SimpleProfiler):
        def loader_to_prepare(self, loader: Any) -> Any:
            assert len(loader) == 4
            return tiny_loader(3)

    trainer = fit(Shorter())
    assert (trainer.global_step, trainer.num_val_batches) == (6, [2])


def test_an_action_that_runs_already_is_not_started_again() -> None:
    profiler = SimpleProfiler()
    profiler.start("x")
    with pytest.raises(ValueError, match=r"start\('x'\).*already running.*stop\('x'\)"):
        profiler.start("x")
    profiler.stop("x")
    profiler.start("x")


def test_arguments_that_torchs_profiler_does_not_have_are_named() -> None:
    with pytest.raises(TypeError, match=r"'profile_memroy'.*Did you mean 'profile_memory'"):
        PyTorchProfiler(profile_memroy=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_profiler_that_is_none_is_refused_with_its_type() -> None:
    with pytest.raises(TypeError, match=r"Trainer: profiler=3 is an int\. Pass 'simple', .* or a Profiler"):
        Trainer(profiler=3)  # type: ignore[arg-type]


def test_nvtx_ranges_without_a_gpu_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"emit_nvtx=True.*no CUDA device.*PyTorchProfiler\(\) also records"):
        PyTorchProfiler(emit_nvtx=True)


@pytest.mark.gpu
def test_nvtx_ranges_are_emitted_in_a_run() -> None:
    fit(PyTorchProfiler(emit_nvtx=True), accelerator="gpu", devices=1)


@pytest.mark.parametrize("profiler", [SimpleProfiler(), AdvancedProfiler(), PyTorchProfiler()])
def test_stopping_what_was_not_started_says_so(profiler: Profiler) -> None:
    with pytest.raises(ValueError, match=r"stop\('x'\).*start\('x'\)"):
        profiler.stop("x")


def test_one_s_own_profiler_sees_actions_nested_and_closed_after_an_error() -> None:
    class Mine(Profiler):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.seen: set[tuple[str, ...]] = set()

        def start(self, action_name: str) -> None:
            self.open.append(action_name)
            self.seen.add(tuple(self.open))

        def stop(self, action_name: str) -> None:
            assert self.open.pop() == action_name

    class Fails(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            raise KeyError("on purpose")

    profiler = Mine()
    with pytest.raises(KeyError, match="on purpose"):
        fit(profiler, Fails())
    assert profiler.open == []
    inside = ("run_training_epoch", "run_training_batch", "[Strategy]SingleDevice.training_step", "my part")
    assert inside in profiler.seen


def test_a_profiler_changes_no_number() -> None:
    weights = []
    for profiler in (None, "simple", "advanced", "pytorch"):
        torch.manual_seed(3)
        module = Notes()
        fit(profiler, module, accumulate_grad_batches=3, gradient_clip_val=0.5)
        weights.append(module.layer.weight.detach().clone())
    assert all(torch.equal(one, weights[0]) for one in weights)


def test_each_callable_of_a_run_is_bound_once_through_the_profiler() -> None:
    class Mine(SimpleProfiler):
        def around(self, action_name: str, function: Any) -> Any:
            bound.append(action_name)
            return super().around(action_name, function)

    class Clips(Notes):
        def configure_gradient_clipping(self, *arguments: Any) -> None:
            self.clip_gradients(*arguments)

    bound: list[str] = []
    profiler = Mine()
    fit(profiler, Clips(), callbacks=[Hooked()], gradient_clip_val=1.0, max_epochs=3)
    timed = {name for name in profiler.recorded_durations if "broadcast" not in name}
    once = {"run_training_epoch", "run_validation", "[Strategy]SingleDevice.backward", "[Logging].drain"}
    each_epoch = {
        "run_training_batch",
        "[TrainingModule]Clips.configure_gradient_clipping",
        "[TrainingModule]Clips.optimizer_zero_grad",
    }
    assert timed == {
        *once,
        *each_epoch,
        *(f"[Strategy]SingleDevice.{name}" for name in ("optimizer_step", "gather_objects", "barrier")),
        *(f"[Strategy]SingleDevice.{name}_step" for name in ("training", "validation")),
        *(f"[Logging].{name}" for name in ("finish_epoch", "send_epoch")),
        "[TrainingModule]Clips.configure_optimizers",
        "[_TrainingEpochLoop].train_dataloader_next",
        "[_EvaluationLoop].val_next",
        "[Callback]Hooked.on_train_batch_end",
        "setup_train_dataloader",
        "wait_for_checkpoint",
        "my part",
    }
    assert {name: bound.count(name) for name in once} == dict.fromkeys(once, 1)
    assert {name: bound.count(name) for name in each_epoch} == dict.fromkeys(each_epoch, 3)


def test_a_profiler_that_is_not_there_returns_what_it_is_to_time() -> None:
    nobody, batches = PassThroughProfiler(), iter([1, 2])
    assert nobody.around("sorting", sorted) is sorted
    assert nobody.iterate("fetching", batches) is batches


def test_nothing_is_wrapped_without_a_profiler_or_after_one() -> None:
    trainer = fit(None)
    assert isinstance(trainer.profiler, PassThroughProfiler)
    wrapped = {"backward", "optimizer_step", "reduce", "barrier"}
    assert not wrapped & set(vars(trainer.strategy))
    profiled = fit("simple")
    assert not wrapped & set(vars(profiled.strategy))
    assert "save" not in vars(profiled.saver)


def test_manual_optimization_and_lbfgs_are_timed_too() -> None:
    class Manual(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    class Quasi(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    for module in (Manual(), Quasi()):
        profiler = SimpleProfiler()
        fit(profiler, module)
        found = calls(profiler)
        assert found["[Strategy]SingleDevice.backward"] >= 8
        assert found["run_training_batch"] == 8
