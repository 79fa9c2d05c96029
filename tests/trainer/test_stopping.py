"""Several ranks stop at one boundary, whoever is asked to. One pair of processes runs all the fits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks import HangDetector, ModelCheckpoint, Timer
from paceline.strategies import SingleDevice

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list")


class Acts(Callback):
    """Does something on some ranks, once, in a hook after training step 2."""

    def __init__(self, what: str | int, hook: str, on: tuple[int, ...] = (1,), step: int = 2) -> None:
        self.what, self.on, self.step, self.done = what, on, step, False
        setattr(self, hook, self.act)

    def act(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank in self.on and trainer.global_step >= self.step and not self.done:
            self.done = True
            if isinstance(self.what, int):
                os.kill(os.getpid(), self.what)
            else:
                trainer.should_stop = True


class Collectives(Callback):
    """Counts the calls from step 2 to the save."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.real = {name: getattr(dist, name) for name in COLLECTIVES}
        for name in COLLECTIVES:
            setattr(dist, name, self.counting(name, trainer))

    def counting(self, name: str, trainer: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if trainer.global_step >= 2 and not trainer.state.saving and trainer.state.stage == "train":
                self.found[name] += 1
            return self.real[name](*args, **kwargs)

        return call

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        vars(dist).update(self.real)


def run(*callbacks: Callback, fn: str = "fit", validate: bool = False, **arguments: Any) -> dict[str, Any]:
    keeper = [c for c in callbacks if isinstance(c, ModelCheckpoint)]
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(keeper),
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **{"max_epochs": 1000, **arguments},
    )
    module, data = TinyModule(), tiny_loader(40 if validate else 20000 if fn == "fit" else 200000)
    ended: Any = "at its end"
    try:
        if fn == "fit":
            trainer.fit(module, data, tiny_loader(2) if validate else None)
        else:
            getattr(trainer, fn)(module, data)
    except SystemExit as error:
        ended = error.code
    state = trainer.state
    return {
        "ended": ended,
        "step": trainer.global_step,
        "window": state.window,
        "evaluated": state.evaluated,
        "saved": [Path(path).name for path in sorted(p for k in keeper for p in (k.best_model_path,))],
        "threads": len(os.listdir("/proc/self/task")),
    }


def runs(folder: Path) -> dict[str, Any]:
    one, both = (1,), (0, 1)
    end, collectives = "on_train_batch_end", Collectives()
    clock = Timer({"milliseconds": 300} if os.environ["RANK"] == "1" else {"hours": 1}, verbose=False)
    found = {
        "signal": run(Acts(signal.SIGTERM, end), ModelCheckpoint(folder)),
        "signal in a window": run(Acts(signal.SIGTERM, end), accumulate_grad_batches=3),
        "signal in a validation": run(
            Acts(signal.SIGTERM, "on_validation_start"), validate=True, val_check_interval=10, max_epochs=2000
        ),
        "signal at the end": run(Acts(signal.SIGTERM, "on_train_end"), max_steps=5),
        "asked by one": run(Acts("stop", end), validate=True),
        "asked by all": run(Acts("stop", end, on=both, step=7)),
        "asked in a validation": run(Acts("stop", "on_validation_end"), validate=True),
        "asked at an epoch's end": run(Acts("stop", "on_train_epoch_end"), validate=True),
        "asked before the first": run(Acts("stop", "on_train_start", on=one, step=0)),
        "clocks": run(clock),
        "test": run(Acts(signal.SIGTERM, "on_test_batch_end", step=0), fn="test"),
        "counted": run(Acts(signal.SIGTERM, end), collectives, HangDetector(600), ModelCheckpoint(folder / "c")),
        "again": run(max_steps=3),
    }
    return {**found, "collectives": dict(collectives.found), "files": sorted(os.listdir(folder))}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(2, runs, tmp_path_factory.mktemp("saved"))


def alike(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What both ranks report, which has to be the same."""
    first, second = ({k: v for k, v in ours[name].items() if k != "threads"} for ours in found)
    assert first == second
    return first


def test_a_signal_to_one_rank_stops_all_at_one_step_with_one_save(found: list[dict[str, Any]]) -> None:
    result = alike(found, "signal")
    assert result["ended"] == 143
    assert result["step"] > 2
    assert result["saved"] == [f"epoch=0-step={result['step']}.ckpt"]
    assert [name for name in found[0]["files"] if name.endswith(".ckpt")] == result["saved"]


def test_a_window_is_finished(found: list[dict[str, Any]]) -> None:
    result = alike(found, "signal in a window")
    assert (result["ended"], result["window"]) == (143, 0)


def test_a_signal_in_a_validation_or_at_the_end_is_everybodys(found: list[dict[str, Any]]) -> None:
    assert alike(found, "signal in a validation")["ended"] == 143
    assert alike(found, "signal at the end") | {"step": 5, "ended": 143} == alike(found, "signal at the end")


@pytest.mark.parametrize("when", ["by one", "by all", "in a validation", "at an epoch's end", "before the first"])
def test_should_stop_on_one_rank_ends_the_training_of_all(when: str, found: list[dict[str, Any]]) -> None:
    assert alike(found, f"asked {when}")["ended"] == "at its end"


def test_should_stop_on_all_ranks_stops_at_that_very_step(found: list[dict[str, Any]]) -> None:
    assert alike(found, "asked by all")["step"] == 7


def test_the_clock_that_runs_out_first_stops_all(found: list[dict[str, Any]]) -> None:
    assert alike(found, "clocks")["ended"] == "at its end"


def test_a_test_stops_at_one_batch(found: list[dict[str, Any]]) -> None:
    result = alike(found, "test")
    assert result["ended"] == 143
    assert 1 < result["evaluated"] < 100000


def test_no_collective_is_added_to_the_steps_nor_to_the_agreement(found: list[dict[str, Any]]) -> None:
    assert alike(found, "counted")["ended"] == 143
    assert [ours["collectives"] for ours in found] == [{}, {}]


def test_fits_of_one_process_group_share_their_threads(found: list[dict[str, Any]]) -> None:
    for ours in found:
        assert ours["again"]["threads"] <= ours["signal in a window"]["threads"] + 2


SCRIPT = """
import os, signal, sys
from tiny import TinyModule, tiny_loader
from paceline import Trainer
from paceline.callbacks import ModelCheckpoint

class Net(TinyModule):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.global_step == 3:
            os.kill(os.getppid() if sys.argv[1] == "launcher" else os.getpid(), signal.Signals[sys.argv[2]])

Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=ModelCheckpoint("saved", save_last=True),
).fit(Net(), tiny_loader(20000))
"""


class Replies(SingleDevice):
    """Notes by how much the boundary in each reply is ahead of the last boundary that the run has passed."""

    def begin_run(self, run: Any) -> None:
        self.run, self.ahead = run, []

    def decide_stop(self, boundary: int, signum: int, wants: bool) -> Any:
        self.ahead.append(boundary - self.run.boundaries)
        return super().decide_stop(boundary, signum, wants)


@pytest.mark.parametrize("kind", ["fit", "test"])
def test_a_rank_that_requests_a_stop_replies_before_it_passes_the_boundary(kind: str) -> None:
    """Otherwise its listening thread could reply first, with the next boundary: all ranks would stop a batch later."""
    strategy: Any = Replies()
    acts = (
        Acts("stop", "on_train_batch_end", (0,))
        if kind == "fit"
        else Acts(signal.SIGTERM, "on_test_batch_end", (0,), 0)
    )
    trainer = Trainer(**QUIET | {"strategy": strategy, "max_epochs": 1, "callbacks": [acts]})
    if kind == "fit":
        trainer.fit(TinyModule(), tiny_loader(8))
    else:
        with pytest.raises(SystemExit, match="143"):
            trainer.test(TinyModule(), tiny_loader(8))
    assert strategy.ahead == [1]


@pytest.mark.parametrize(("told", "name"), [("rank", "SIGTERM"), ("launcher", "SIGUSR1")])
def test_the_launcher_ends_with_the_signals_status(told: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> called\n')
    (tmp_path / "scontrol").chmod(0o755)
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ |= {"PYTHONPATH": path, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "71"}
    command = [sys.executable, "train.py", told, name]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    step = torch.load(tmp_path / "saved" / "last.ckpt", weights_only=True)["global_step"]
    assert f"{name} ends the fit after step {step}" in done.stderr
    assert os.listdir(tmp_path / "saved") == ["last.ckpt"], "one file, because time may be short"
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 71\n" if name == "SIGUSR1" else "")


WITH_WORKERS = """
import sys
from tiny import TinyModule, tiny_loader
from torch.utils.data import DataLoader
from paceline import Callback, Trainer
from paceline.callbacks import ModelCheckpoint


class Says(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 0:
            print("now", flush=True)


if __name__ == "__main__":
    devices = int(sys.argv[2])
    loader = DataLoader(tiny_loader(4000).dataset, 2, num_workers=2, persistent_workers=True)
    keep = ModelCheckpoint(sys.argv[1], "{step}")
    trainer = Trainer(
        max_epochs=2, callbacks=[keep, Says()], logger=False, enable_progress_bar=False, accelerator="cpu",
        devices=devices, strategy="ddp" if devices > 1 else "auto",
    )
    trainer.fit(TinyModule(), loader, ckpt_path="auto")
"""


@pytest.mark.parametrize(
    ("devices", "to_group", "number"),
    [(1, True, signal.SIGTERM), (1, True, signal.SIGINT), (2, False, signal.SIGTERM), (2, True, signal.SIGTERM)],
)
def test_a_signal_to_all_processes_of_a_group_does_not_end_the_loaders_workers_before_the_save(
    devices: int, to_group: bool, number: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITH_WORKERS)
    paths = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "files"), str(devices)]
    with subprocess.Popen(
        command, stdout=-1, stderr=-1, env=os.environ | paths, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("now\n", ""):
            pass
        (os.killpg if to_group else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == (143 if number == signal.SIGTERM else -number), said
    assert "DataLoader worker" not in said
    assert len(list((tmp_path / "files").glob("step=*.ckpt"))) == 1, said
    assert said.count("the run stops after this step") == (number == signal.SIGINT)
