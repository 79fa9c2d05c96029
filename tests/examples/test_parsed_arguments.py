"""A program that builds handlers, plugins, trackers and folders from its command line: every branch of it."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks

from paceline.strategies import DDPStrategy

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "10_parsed_arguments.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("parsed_arguments", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return module


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"mixed_precision": "no", "gradient_accumulation_steps": 1}),
        ("--mixed_precision bf16", {"mixed_precision": "bf16"}),
        ("--mixed_precision no", {"mixed_precision": "no"}),
        ("--gradient_accumulation_steps 4", {"gradient_accumulation_steps": 4}),
        ("--logging_dir=", {"log_with": [], "project_dir": None}),
        ("--log_with all", {"log_with": ["csv", "tensorboard", "wandb"]}),
        ("--log_with wandb", {"log_with": ["wandb"]}),
        ("--log_with wandb --logging_dir=", {"log_with": ["wandb"], "project_dir": None}),
        ("--log_with csv", {"log_with": ["csv"]}),
    ],
)
def test_e12_what_the_command_line_says_is_in_force(program: Any, words: str, expected: dict[str, Any]) -> None:
    accelerator = program.accelerator_of(program.parse(words.split()))
    assert {name: getattr(accelerator, name) for name in expected} == expected
    assert accelerator.device.type == "cpu" or torch.cuda.is_available()


def test_e12_what_is_not_given_falls_through_to_the_environment(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("PACELINE_GRADIENT_ACCUMULATION_STEPS", "3")
    accelerator = program.accelerator_of(program.parse([]))
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)


def test_e12_f8_each_run_has_a_folder_with_prefix_and_time(program: Any) -> None:
    accelerator = program.accelerator_of(program.parse(["--log_prefix", "mine-", "--log_with", "wandb"]))
    parent, name = os.path.split(accelerator.project_dir)
    assert parent == "runs/parsed"
    assert name.startswith("mine-2")
    assert accelerator.logging_dir == os.environ["WANDB_DIR"] == accelerator.project_dir


def test_e12_f5_a_tracker_of_files_without_a_folder_is_refused(program: Any) -> None:
    with pytest.raises(ValueError, match="log_with='tensorboard' writes files"):
        program.accelerator_of(program.parse(["--log_with", "tensorboard", "--logging_dir="]))


@pytest.mark.parametrize("backend", ["eager", "AOT_EAGER"])
def test_e12_the_model_is_compiled_as_the_command_line_says(program: Any, backend: str) -> None:
    words = ["--dynamo_backend", backend, "--dynamo_fullgraph", "--dynamo_dynamic"]
    accelerator = program.accelerator_of(program.parse(words))
    plugin = accelerator.state.dynamo_plugin
    assert plugin.to_kwargs() == {"backend": backend.lower(), "fullgraph": True, "dynamic": True}
    torch._dynamo.utils.counters.clear()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    model(torch.ones(3, 2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_e12_unknown_backends_and_modes_are_refused(program: Any) -> None:
    with pytest.raises(ValueError, match="Did you mean 'INDUCTOR'"):
        program.accelerator_of(program.parse(["--dynamo_backend", "inductr"]))


def distributed(program: Any, folder: str, words: list[str]) -> Any:
    os.chdir(folder)
    args = program.parse(["--fast", "--logging_dir", f"{folder}/runs", *words])
    made: list[Any] = []
    real = program.accelerator_of
    program.accelerator_of = lambda args: made.append(real(args)) or made[0]
    mean = program.train(args)
    accelerator = made[0]
    strategy = accelerator.prepared.placements[id(accelerator.prepared.models[0])].strategy
    assert isinstance(strategy, DDPStrategy)
    wrapped = strategy.joinable()
    assert wrapped is not None
    minutes = accelerator.strategy.timeout.total_seconds() / 60
    return mean, minutes, wrapped.gradient_as_bucket_view, wrapped.static_graph


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (30, False, False)),
        (["--ddp_gradient_as_bucket_view", "--ddp_timeout", "2"], (2, True, False)),
        (["--ddp_static_graph", "--gradient_accumulation_steps", "3", "--mixed_precision", "bf16"], (30, False, True)),
    ],
    ids=["default", "bucket view", "static graph"],
)
def test_e12_two_processes_train_with_these_handlers(
    program: Any, tmp_path: Path, words: list[str], expected: Any
) -> None:
    (first, *found), (second, *also) = ranks(2, distributed, program, str(tmp_path), ["--log_with", "csv", *words])
    assert first == second < 1.5
    assert tuple(found) == tuple(also) == expected
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1


def test_e12_one_process_trains_and_tells_all_trackers(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_wandb: None
) -> None:
    words = ["--fast", "--log_with", "all", "--logging_dir", str(tmp_path), "--wandb_run_name", "mine"]
    assert program.train(program.parse(words)) < 1.5
    assert "epoch 0: loss" in capsys.readouterr().out
    for pattern in ("metrics.csv", "events.out.tfevents.*", "run-*.wandb"):
        assert len(list(tmp_path.rglob(pattern))) == 1, pattern
    assert sys.modules["wandb"].run is None
