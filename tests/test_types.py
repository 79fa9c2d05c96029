"""What a type checker says of programs: right ones pass, a misspelled word is an error, results have their types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

from paceline import Trainer
from paceline.accelerator.enums import BackendName, MixedName, TrackerName
from paceline.accelerator.plugins import ModeName
from paceline.accelerator.trackers import BUILT_IN
from paceline.processes.accelerators import Accelerator as DeviceKind
from paceline.processes.devices import ACCELERATORS, AcceleratorName
from paceline.profilers import Profiler
from paceline.settings import SETTINGS
from paceline.strategies.choose import SEVERAL, SingleDevice, StrategyName
from paceline.strategies.precision.choose import ALIASES, PrecisionAlias

ROOT = Path(__file__).resolve().parent.parent

#: A line that ends in ``# wrong`` is one where the checker must report an error; everywhere else it must not.
PROGRAM = """
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import paceline
from paceline import Accelerator, Trainer, TrainingModule, Tuner
from paceline.callbacks import BasePredictionWriter, BatchSizeFinder, EarlyStopping, LearningRateFinder
from paceline.callbacks import LearningRateMonitor, LossGuard, ModelCheckpoint, Timer
from paceline.loggers import TensorBoardLogger
from paceline.strategies import DDPStrategy, FSDPStrategy, MixedPrecision, ModelParallelStrategy, TruePrecision
from paceline.trainer.optimizers import ManagedOptimizer

Trainer(precision="bf16-mixed", accelerator="gpu", strategy="fsdp", devices=2, gradient_clip_algorithm="value")
Trainer(precision="bf17")  # wrong
Trainer(precision=17)  # wrong
Trainer(precision=16, plugins=MixedPrecision("16-mixed", "cuda"))
Trainer(precision=TruePrecision("bf16-true"))
Trainer(accelerator="gpus")  # wrong
Trainer(strategy="of_an_installed_package")
Trainer(strategy=DDPStrategy(ddp_comm_hook="fp16", start_method="spawn"))
Trainer(strategy=2)  # wrong
Trainer(gradient_clip_algorithm="nrom")  # wrong
Trainer(deterministic="warn", profiler="doctor", compile="step")
Trainer(deterministic="wran")  # wrong
Trainer(profiler="simpel")  # wrong
Trainer(compile="stpe")  # wrong
Trainer(compile={"scope": "step", "mode": "max-autotune"}, signals={"SIGUSR2": "stop", 10: None})
Trainer(signals={"SIGUSR2": "halt"})  # wrong
Trainer(max_epoch=1)  # wrong

DDPStrategy(ddp_comm_hook="fp17")  # wrong
DDPStrategy(ddp_comm_hook="fp16", ddp_comm_wrapper="powersgd")  # wrong
FSDPStrategy(sharding="half")  # wrong
FSDPStrategy(timeout=30)  # wrong
FSDPStrategy(wrapp="root")  # wrong
DDPStrategy(bucket_cap_mb=1, start_method="popen", static_graph=True)
DDPStrategy(bucket_cap=1)  # wrong
ModelParallelStrategy(pipeline_parallel=2, pipeline_schedule="1f1b")
ModelParallelStrategy(pipeline_parallel=2, pipeline_schedule="2f2b")  # wrong
MixedPrecision("32-true")  # wrong
TruePrecision("16-mixed")  # wrong

BasePredictionWriter(write_interval="steps")  # wrong
BatchSizeFinder(mode="bisect")  # wrong
EarlyStopping("loss", mode="least")  # wrong
LearningRateFinder(mode="log")  # wrong
LearningRateMonitor(logging_interval="batch")  # wrong
LossGuard(action="ignore")  # wrong
ModelCheckpoint(mode="best")  # wrong
Timer(interval="batch").time_elapsed("train")  # wrong
Timer().time_elapsed("training")  # wrong


class Net(TrainingModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        managed, own = self.optimizers(), self.optimizers(use_pl_optimizer=False)
        reveal_type(managed, expected_text="ManagedOptimizer | list[ManagedOptimizer]")
        reveal_type(own, expected_text="Optimizer | list[Optimizer]")
        self.log("loss", 0.0, reduce_fx="max")
        self.log("loss", 0.0, reduce_fx=torch.mean)
        self.log("loss", 0.0, reduce_fx="median")  # wrong
        self.log_dict({"a": 0.0}, prog_bar=True, reduce_fx="sum")
        self.log_dict({"a": 0.0}, progbar=True)  # wrong
        self.log_dict({"a": 0.0}, reduce_fx="median")  # wrong
        self.clip_gradients(managed, 1.0, "norm")
        self.clip_gradients(managed, 1.0, gradient_clip_algorithm="norms")  # wrong


def results(trainer: Trainer, net: Net, loader: DataLoader[Any], keep: bool) -> None:
    reveal_type(trainer.predict(net, loader), expected_text="list[Any]")
    reveal_type(trainer.predict(net, loader, gather=True), expected_text="list[Any]")
    reveal_type(trainer.predict(net, loader, return_predictions=False), expected_text="None")
    reveal_type(trainer.predict(net, loader, return_predictions=keep), expected_text="list[Any] | None")
    trainer.predict(net, loader, return_predictions=False, gather=True)  # wrong
    trainer.fit(net, loader, ckpt_path="last", restore=["model", "rng"])
    trainer.fit(net, loader, restore=["modle"])  # wrong
    reveal_type(Tuner(trainer).lr_find(net), expected_text="LRFinder")
    reveal_type(Tuner(trainer).lr_find(net).suggestion(), expected_text="float | None")
    Tuner(trainer).lr_find(net, mode="log")  # wrong
    Tuner(trainer).scale_batch_size(net, mode="bisect")  # wrong


Accelerator(mixed_precision="bf16", strategy="ddp", output_dtype="fp32", dynamo_backend="inductor", log_with="wandb")
Accelerator(mixed_precision="bf16-mixed")  # wrong
Accelerator(log_with=["tensorboard", TensorBoardLogger("runs")], project_dir="runs")
Accelerator(log_with=3)  # wrong
Accelerator(mixed_precision=MixedPrecision("bf16-mixed"), dynamo_backend=paceline.DynamoBackend.EAGER)
Accelerator(mixed_precision="bf17")  # wrong
Accelerator(output_dtype="fp64")  # wrong
Accelerator(scheduler_steps="per_epoch")  # wrong
Accelerator(dynamo_backend="inductr")  # wrong
Accelerator(dataloader_config=paceline.ProjectConfiguration())  # wrong
Accelerator(fsdp_plugin="fsdp")  # wrong
paceline.TorchDynamoPlugin(backend="inductor", mode="max")  # wrong
paceline.DeepSpeedPlugin(offload_optimizer_device="disk")  # wrong
paceline.ParallelismConfig(cp_backend="deepspeed")  # wrong
paceline.ProfileKwargs(activities=["gpu"])  # wrong
paceline.notebook_launcher(print, mixed_precision="fp61")  # wrong


def loop(accelerator: Accelerator, net: torch.nn.Linear, optimizer: Optimizer, loader: DataLoader[int]) -> None:
    prepared = accelerator.prepare(net, optimizer, loader)
    reveal_type(prepared, expected_text="tuple[Linear, Optimizer, DataLoader[int]]")
    reveal_type(accelerator.gather({"a": torch.ones(1)}), expected_text="dict[str, Tensor]")
    reveal_type(accelerator.reduce(torch.ones(1), "mean"), expected_text="Tensor")
    accelerator.reduce(torch.ones(1), reduction="median")  # wrong
    paceline.plan_device_map(net, "even")  # wrong
    paceline.load_checkpoint_and_dispatch(net, "weights", "balanced")
    paceline.load_checkpoint_and_dispatch(net, "weights", "even")  # wrong
    paceline.load_checkpoint_and_dispatch(net, "weights", {"": "cpu"})
    paceline.CombinedLoader([loader], "longest")  # wrong
"""


def test_a_type_checker_accepts_right_programs_and_points_at_wrong_words(tmp_path: Path) -> None:
    (tmp_path / "paceline").symlink_to(ROOT)
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"include": ["program.py"], "typeCheckingMode": "standard", "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", "."]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    found = [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    said = {one["range"]["start"]["line"] + 1: one["message"] for one in found}
    wrong = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert {line: message for line, message in said.items() if line not in wrong} == {}
    assert {n: PROGRAM.splitlines()[n - 1] for n in wrong - set(said)} == {}


def test_the_words_in_signatures_are_those_that_the_code_knows() -> None:
    def accepted(setting: str) -> set[str]:
        return set(SETTINGS[setting].accepts.split(", "))

    assert set(get_args(StrategyName)) == {"auto", *SingleDevice.names, *SEVERAL}
    assert {str(word) for word in get_args(PrecisionAlias)} == set(ALIASES)
    assert set(get_args(MixedName)) == accepted("mixed_precision")
    assert set(get_args(BackendName)) == accepted("dynamo_backend")
    assert set(get_args(ModeName)) == accepted("dynamo_mode")
    assert set(get_args(TrackerName)) == {"all", *(kind.name for kind in BUILT_IN)}
    given = get_type_hints(Trainer.__init__)
    assert set(get_args(AcceleratorName)) == set(ACCELERATORS)
    assert set(get_args(given["accelerator"])) == {AcceleratorName, DeviceKind}
    assert set(get_args(given["profiler"])) >= {Profiler, type(None)}
