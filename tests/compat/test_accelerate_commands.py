"""Parsers and classes behind Accelerate's commands, DeepSpeed files, helpers of test suites, and small helpers."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline.accelerator.plugins import GradientAccumulationPlugin
from paceline.accelerator.process_state import AcceleratorState, PartialState
from paceline.cli import test as self_check
from paceline.compat.accelerate import commands, deepspeed, details, testing
from paceline.compat.accelerate.accelerator import Accelerator


@pytest.fixture(autouse=True)
def no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- commands --------------------------------------------------------------------------------------------------------


def test_a_launch_is_parsed_and_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nopen(sys.argv[1], 'w').write(os.environ['PACELINE_MIXED_PRECISION'])\n")
    before, parser = dict(os.environ), commands.launch_command_parser()
    args = parser.parse_args(["--cpu", "--mixed-precision", "bf16", "--quiet", str(script), str(tmp_path / "said")])
    assert (args.training_script, args.training_script_args) == (str(script), [str(tmp_path / "said")])
    args.training_script_args = [str(tmp_path / "other")]
    commands.launch_command(args)
    assert (tmp_path / "other").read_text() == "bf16"
    assert dict(os.environ) == before
    assert commands.prepare_multi_gpu_env(args)["PACELINE_MIXED_PRECISION"] == "bf16"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit, match="3"):
        commands.launch_command(args)


def test_the_flags_of_a_launch_have_accelerates_types(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nopen(sys.argv[1], 'w').write(os.environ['PACELINE_GRADIENT_ACCUMULATION_STEPS'])\n"
    )
    top = argparse.ArgumentParser()
    commands.launch_command_parser(top.add_subparsers())
    given = [
        "--cpu",
        "--num_processes",
        "1",
        "--gradient_accumulation_steps",
        "3",
        "--monitor_interval",
        "2",
        "--quiet",
    ]
    rest = ["--quiet", str(script), str(tmp_path / "said")]
    for args in (
        commands.launch_command_parser().parse_args(given + rest),
        top.parse_args(["launch", *given, *rest]),
    ):
        found = args.cpu, args.multi_gpu, args.num_processes, args.gradient_accumulation_steps, args.monitor_interval
        assert repr(found) == "(True, False, 1, 3, 2.0)"
        args.gradient_accumulation_steps += 1
        commands.launch_command(args)
        assert (tmp_path / "said").read_text() == "4"


def test_commands_can_be_added_to_a_parser() -> None:
    top = commands.launch_command_parser().__class__("accelerate")
    places = top.add_subparsers()
    for add in (
        commands.launch_command_parser,
        commands.env_command_parser,
        commands.estimate_command_parser,
        commands.merge_command_parser,
        commands.test_command_parser,
        commands.config_command_parser,
    ):
        add(places)
    assert top.parse_args(["env"]).func is commands.env_command
    assert top.parse_args(["launch", "-m", "package", "--epochs", "3"]).training_script_args == ["--epochs", "3"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_self_check_lets_the_program_continue(replace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr("subprocess.call", lambda command: started.append(False) or 0)
    monkeypatch.setattr("os.execvp", lambda *command: started.append(True))
    args = commands.test_command_parser().parse_args(["--cpu", "--num_processes", "1"])
    if replace:
        self_check.run(args)
    else:
        commands.test_command(args)
    assert started[0] is replace


@pytest.mark.parametrize("command", ["to_fsdp2", "tpu"])
def test_commands_that_are_not_here_have_parsers_that_say_what_to_run(command: str) -> None:
    args = getattr(commands, f"{command}_command_parser")().parse_args([])
    with pytest.raises(NotImplementedError, match="paceline launch"):
        args.func(args)


def test_the_split_of_a_model_of_transformers_is_read() -> None:
    model: Any = nn.Linear(1, 1)
    assert details.get_model_tp_size(model) is None
    model.config = SimpleNamespace(distributed_config={"tp_size": 8})
    assert details.get_model_tp_size(model) == 8
    model.tp_size = 2
    assert details.get_model_tp_size(model) == 2
    model.config = SimpleNamespace(layer_types=["full_attention"])
    details._refuse_recurrent_layers_under_sequence_parallelism(model)
    model.config.layer_types.append("linear_attention")
    with pytest.raises(ValueError, match="linear_attention"):
        details._refuse_recurrent_layers_under_sequence_parallelism(model)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_configuration_is_written_and_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"config.{suffix}"
    config = commands.ClusterConfig(num_processes=2, mixed_precision="bf16", fsdp_config={"fsdp_version": 2})
    config.to_yaml_file(path)
    assert commands.ClusterConfig.from_yaml_file(path) == config
    old = {"fp16": True, "dynamo_backend": "NO", "distributed_type": "NO"}
    config = commands.ClusterConfig.process_config(old)
    assert (config["mixed_precision"], config["dynamo_config"], config["num_processes"]) == ("fp16", {}, 1)
    path.write_text(json.dumps({**config, "nodes": 3}))
    with pytest.raises(ValueError, match=r"keys that ClusterConfig does not support: \['nodes'\]"):
        commands.ClusterConfig.from_json_file(json_file=path)


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def test_a_deepspeed_file_defines_the_optimizer_and_the_schedule(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path, model = tmp_path / "ds.json", nn.Linear(1, 1)
    adam = {"type": "Adam", "params": {"lr": "auto", "betas": [0.5, 0.9], "weight_decay": "auto", "torch_adam": True}}
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    rest = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    path.write_text(json.dumps({"optimizer": adam, "scheduler": warmup, **rest}))
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config=str(path))
    assert plugin.options()["config"] == {"zero_optimization": {"stage": 2}}
    optimizer = deepspeed.DummyOptim(model.parameters(), lr=0.25, weight_decay=0.5)
    schedule = deepspeed.DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    plugin.fill((schedule, model, optimizer), 1, 2, False)
    found = deepspeed.created((schedule, model, optimizer), plugin)
    assert (type(found[2]), found[1]) == (torch.optim.AdamW, model)
    assert [found[2].defaults[name] for name in ("lr", "weight_decay", "betas")] == [0.25, 0.5, (0.5, 0.9)]
    assert (found[0].optimizer, found[0].total_num_steps, found[0].warmup_num_steps) == (found[2], 5, 2)
    with pytest.raises(ValueError, match="defines the optimizer, and the script creates one too"):
        deepspeed.created((torch.optim.SGD(model.parameters(), 0.1),), plugin)


def test_a_schedule_may_come_from_a_function() -> None:
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config={"optimizer": {"type": "sgd", "params": {"lr": 0.5}}})
    optimizer = deepspeed.DummyOptim(nn.Linear(1, 1).parameters())
    schedule = deepspeed.DummyScheduler(
        optimizer, lr_scheduler_callable=lambda own: torch.optim.lr_scheduler.StepLR(own, 3)
    )
    found = deepspeed.created((optimizer, schedule), plugin)
    assert (type(found[0]), found[1].optimizer, found[1].step_size) == (torch.optim.SGD, found[0], 3)
    with pytest.raises(ValueError, match="DummyOptim is a placeholder for the optimizer in a DeepSpeed configuration"):
        Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(
        ValueError, match="DummyScheduler is a placeholder for the scheduler in a DeepSpeed configuration"
    ):
        deepspeed.created((deepspeed.DummyScheduler(found[0]),), plugin)


def test_a_script_finds_the_optimizer_of_a_deepspeed_configuration_and_the_strategy_does_not() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "eps": "auto"}}
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "optimizer": optimizer})
    assert plugin.deepspeed_config["optimizer"] == optimizer
    assert "optimizer" not in plugin.options()["config"]


def test_preparing_fills_in_the_values_of_a_deepspeed_configuration() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    params = {"lr": "auto", "weight_decay": 0.25}
    config = {**dict.fromkeys(names, "auto"), "zero_optimization": {"stage": 2}, "optimizer": {"params": params}}
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config=config, is_train_batch_min=False)
    loaders = [DataLoader(range(8), size) for size in (2, 4)]  # type: ignore[arg-type]
    plugin.fill([*loaders, deepspeed.DummyOptim([], lr=0.5, weight_decay=1.0)], 3, 2, False)
    assert [plugin.deepspeed_config[name] for name in names] == [24, 4, 3, 1.0]
    assert plugin.deepspeed_config["optimizer"] == {"params": {"lr": 0.5, "weight_decay": 0.25}}
    assert config["train_batch_size"] == "auto"
    assert plugin.decided("gradient_clipping") == 1.0
    plain = deepspeed.DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5)
    plain.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    plain.fill([], 2, 2, True)
    assert [plain.deepspeed_config[name] for name in names] == [32, 8, 2, 0.5]
    assert plain.deepspeed_config["zero_optimization"]["stage"] == 3


def test_a_deepspeed_plugin_shows_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 0.5, "train_batch_size": "auto"}))
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config=str(path))
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.offload_param_device) == (3, 0.5, "cpu")
    assert (plugin.gradient_accumulation_steps, plugin.options()["stage"]) == ("auto", 3)
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.get_value("zero_optimization.stage") == plugin.hf_ds_config.get_value("zero_optimization.stage") == 3
    assert [plugin.is_auto(name) for name in ("train_batch_size", "gradient_clipping", "zero.stage")] == [True, 0, 0]
    differences: list[str] = []
    plugin.fill_match("train_batch_size", differences, train_batch_size=8)
    plugin.fill_match("gradient_clipping", differences, gradient_clipping=1.0)
    plugin.fill_match("gradient_clipping", differences, must_match=False, gradient_clipping=1.0)
    assert plugin.hf_ds_config.get_value("train_batch_size") == 8
    assert differences == ["gradient_clipping is 0.5 in the DeepSpeed configuration, but 1.0 is requested"]
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()
    plugin.set_mixed_precision("bf16")
    assert [plugin.get_value(f"{name}.enabled") for name in ("bf16", "fp16")] == [True, False]
    assert "bf16" not in plugin.options()["config"]
    with pytest.raises(ValueError, match=r"nowhere\.json' does not exist"):
        deepspeed.DeepSpeedPlugin(hf_ds_config="nowhere.json")


def test_a_deepspeed_plugin_of_fields_has_the_configuration_of_a_file() -> None:
    plugin = deepspeed.DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping) == ("auto", "auto")
    assert (plugin.offload_optimizer_device, plugin.zero3_init_flag, plugin.msamp_opt_level) == ("none", True, "O1")
    config = plugin.hf_ds_config
    assert (config.is_zero3(), config.is_offload(), config.config is plugin.deepspeed_config) == (True, True, True)
    assert config.config == {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
        **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "cpu", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
    }
    assert plugin.options() == {"stage": 3, "offload_parameters": True}
    assert [plugin.decided(name) for name in ("gradient_accumulation_steps", "gradient_clipping")] == [None, 1.0]
    plugin.fill([DataLoader(range(8), 2)], 4, 2, False)  # type: ignore[arg-type]
    assert [config.get_value(name) for name in ("train_batch_size", "gradient_accumulation_steps")] == [16, 4]
    assert (config.get_value("gradient_clipping"), plugin.clip_norm) == (1.0, 1.0)
    assert plugin.filled({}) is plugin


def test_a_deepspeed_plugin_of_fields_reads_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    plugin = deepspeed.DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.get_value("zero_optimization.stage")) == (1, 1)
    assert plugin.get_value("gradient_clipping") == plugin.decided("gradient_clipping") == 0.5
    assert plugin.options() == {"stage": 1}


def test_the_values_of_a_deepspeed_configuration_can_be_checked_at_once() -> None:
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, "train_batch_size": "auto"})
    plugin.deepspeed_config_process(train_batch_size=8)
    assert plugin.get_value("train_batch_size") == 8
    with pytest.raises(
        ValueError, match=r"zero_optimization.stage is 2 in the DeepSpeed configuration, but 3 is requested"
    ):
        plugin.deepspeed_config_process(**{"zero_optimization.stage": 3})
    plugin.deepspeed_config_process(must_match=False, **{"zero_optimization.stage": 3})
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(hidden_size=16)  # type: ignore[assignment]
    plugin.fill([model], 1, 1, False)
    assert plugin.get_value("zero_optimization.reduce_bucket_size") == 256
    plugin.set_moe_leaf_modules(model)
    plugin.set_deepspeed_weakref()


class OfATrainer(deepspeed.HfDeepSpeedConfig):
    """A configuration whose "auto" values a Trainer has filled in, as in transformers."""

    def __init__(self, config: dict[str, Any], **filled: Any) -> None:
        super().__init__(config)
        self.config.update(filled)


def test_a_trainer_that_fills_in_a_deepspeed_configuration_decides_on_clipping() -> None:
    names = ("gradient_accumulation_steps", "gradient_clipping")
    config = OfATrainer(dict.fromkeys(names, "auto"), gradient_accumulation_steps=1, gradient_clipping=0.25)
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config=config)
    assert [plugin.decided(name) for name in names] == [getattr(plugin, name) for name in names] == [1, 0.25]


@pytest.mark.parametrize(
    ("fields", "config", "norm"),
    [
        ({"gradient_clipping": 0.25}, {}, 0.25),
        ({"gradient_clipping": 0.25}, {"gradient_clipping": "auto"}, 0.25),
        ({"gradient_clipping": 0.25}, {"gradient_clipping": 0.25}, 0.25),
        ({}, {"gradient_clipping": 0.5}, 0.5),
        ({}, {"gradient_clipping": "auto"}, 1.0),
        ({"gradient_clipping": 0}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_deepspeed_plugins_field_clips_if_its_file_does_not_say(
    fields: dict[str, Any], config: dict[str, Any], norm: float | None
) -> None:
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, **config}, **fields)
    plugin.fill([], 1, 1, False)
    assert plugin.clip_norm == norm
    if not config:
        plugin.gradient_clipping = 0.125
        assert plugin.clip_norm == 0.125


def test_a_step_with_a_deepspeed_file_is_clipped_to_the_plugins_field() -> None:
    pytest.importorskip("deepspeed")

    def moved() -> float:
        given = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1}
        plugin = deepspeed.DeepSpeedPlugin(hf_ds_config=given, gradient_clipping=0.25)
        accelerator, weight = Accelerator(cpu=True, deepspeed_plugin=plugin), nn.Linear(1, 1, bias=False)
        model, optimizer = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), 1.0))
        before = weight.weight.detach().clone()
        accelerator.backward(model(torch.full((1, 1), 20.0)).sum())
        optimizer.step()
        return float((weight.weight.detach() - before).norm())

    assert ranks(1, moved, limit=200)[0] == pytest.approx(0.25, rel=1e-3)


def counted_by_the_loop(stage: int | None, steps: int) -> list[float]:
    """Weights after two updates by a loop that counts the micro-batches itself, as transformers.Trainer does."""
    plugins: dict[str, Any] = {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1)}
    if stage is not None:
        given = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": steps}
        plugins["deepspeed_plugin"] = deepspeed.DeepSpeedPlugin(
            hf_ds_config={**given, "zero_allow_untested_optimizer": True}
        )
    accelerator = Accelerator(cpu=True, **plugins)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = torch.randn(2 * steps, 2, 3)[:, accelerator.process_index :: accelerator.num_processes]
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.5, momentum=0.5))
    for number, batch in enumerate(batches, 1):
        last = number % steps == 0
        accelerator.gradient_state._set_sync_gradients(last)
        with accelerator.no_sync(model) if stage is None and not last else contextlib.nullcontext():
            accelerator.backward(model(batch).square().mean() / steps, scale_wrt_gas=False)
        if last:
            optimizer.step()
            model.zero_grad()
    return [float(value) for weight in accelerator.get_state_dict(model).values() for value in weight.flatten()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loop_that_counts_micro_batches_accumulates_under_deepspeed(stage: int) -> None:
    pytest.importorskip("deepspeed")
    plain = ranks(2, counted_by_the_loop, None, 3)[0]
    for world in (1, 2):
        assert ranks(world, counted_by_the_loop, stage, 3, limit=200)[0] == pytest.approx(plain, rel=1e-5)


def test_a_loop_that_does_not_count_needs_the_same_number_in_deepspeeds_configuration() -> None:
    pytest.importorskip("deepspeed")

    def step(steps: int) -> str:
        plugin = deepspeed.DeepSpeedPlugin(
            hf_ds_config={"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
        )
        accelerator, weight = (
            Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=steps),
            nn.Linear(1, 1),
        )
        model, _ = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), 1.0))
        try:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
        except ValueError as error:
            return str(error)
        return ""

    assert ranks(1, step, 2, limit=200) == [""]
    (said,) = ranks(1, step, 3, limit=200)
    assert "has gradient_accumulation_steps=2, but the Accelerator has 3. Set only one of the two" in said


@pytest.mark.parametrize(("steps", "gradient"), [(1, 3.0), (2, 3.0)])
def test_losses_that_are_divided_already_are_added_up(steps: int, gradient: float) -> None:
    accelerator, weight = Accelerator(cpu=True, gradient_accumulation_steps=steps), torch.ones(1, requires_grad=True)
    with accelerator.accumulate():
        accelerator.backward((3 * weight).sum(), scale_wrt_gas=False)
    assert weight.grad is not None
    assert weight.grad.item() == gradient


def test_a_deepspeed_configuration_may_be_json_text() -> None:
    text = json.dumps({"zero_optimization": {"stage": 3}})
    for given in (text, base64.urlsafe_b64encode(text.encode()).decode()):
        assert deepspeed.HfDeepSpeedConfig(given).is_zero3()


def test_a_deepspeed_configuration_is_read_by_dotted_names() -> None:
    config = deepspeed.HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": {"b": False}}
    )
    assert (config.is_zero3(), config.is_zero2(), config.is_offload()) == (True, False, True)
    assert (config.get_value("a.b"), config.get_value("c.d", 5), config.is_false("a.b")) == (False, 5, True)
    assert config.is_true("zero_optimization.stage")
    config.del_config_sub_tree("a.b")
    assert config.config["a"] == {}
    with pytest.raises(ValueError, match=r"has no 'x\.y'"):
        config.del_config_sub_tree("x.y", must_exist=True)


# ---- helpers of test suites ------------------------------------------------------------------------------------------


def test_conditions_skip_tests() -> None:
    @testing.require_cuda
    class NeedsGPU(unittest.TestCase): ...

    assert getattr(NeedsGPU, "__unittest_skip__", False) is not torch.cuda.is_available()
    old = testing.require_torch_min_version(version="99")(type("Old", (unittest.TestCase,), {}))
    assert old.__unittest_skip__
    assert not hasattr(testing.require_fsdp2(type("New", (unittest.TestCase,), {})), "__unittest_skip__")


def test_test_cases_reset_states_and_empty_their_folder() -> None:
    class Case(testing.AccelerateTestCase):
        def test_it(self) -> None:
            PartialState(cpu=True)

    assert Case("test_it").run().wasSuccessful()  # type: ignore[union-attr]
    assert PartialState._shared_state == {}

    class Folder(testing.TempDirTestCase):
        def test_it(self) -> None:
            assert list(self.tmpdir.iterdir()) == []
            (self.tmpdir / "left").write_text("")

    suite = unittest.TestSuite([Folder("test_it"), Folder("test_it")])
    assert suite.run(unittest.TestResult()).wasSuccessful()
    assert not Folder.tmpdir.exists()


def test_output_and_errors_are_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert testing.capture_call_output(print, "a", "b") == "a b\n"
    with testing.assert_exception(ValueError, "wrong"):
        raise ValueError("all wrong")
    for body in (lambda: None, lambda: int("x")):
        with pytest.raises(AssertionError), testing.assert_exception(ValueError, "other"):
            body()
    assert testing.run_command(["echo", 3], return_stdout=True) == "3\n"
    with pytest.raises(testing.SubprocessCallException, match="failed with status 1"):
        testing.run_command(["false"])
    assert testing.execute_subprocess_async(["sh", "-c", "echo a; echo b >&2"]).stdout == ["a"]
    assert testing.execute_subprocess_async(["echo", "c"], quiet=True, echo=False).stdout == ["c"]
    assert capsys.readouterr() == ("\nRunning:  sh -c echo a; echo b >&2\nstdout: a\n", "stderr: b\n")
    assert testing.get_launch_command(num_processes=2, cpu=True)[4:6] == ["--num_processes=2", "--cpu"]
    assert testing.are_the_same_tensors(torch.ones(2))


def test_the_small_problem_can_be_learned() -> None:
    data, model = testing.RegressionDataset(length=4, seed=1), testing.RegressionModel(2, 3)
    assert abs(data[0]["y"] - model(torch.tensor(data[0]["x"])).item()) < 1
    assert testing.RegressionDataset(length=4, seed=3)[0] == pytest.approx({"x": 2.040919, "y": 7.036573})
    training, validation = testing.mocked_dataloaders(None, 2)
    assert (len(training), len(validation), sorted(next(iter(training)))[-1]) == (4, 2, "labels")


# ---- small helpers ---------------------------------------------------------------------------------------------------


def test_parts_of_models_are_found() -> None:
    blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    model = nn.Sequential(nn.ReLU(), blocks)
    assert details.get_module_class_from_name(model, "Linear") is nn.Linear
    assert details.get_module_class_from_name(model, "Conv2d") is None
    assert details.get_parameters_from_modules(r"1\.0", model, "cpu") == set(blocks[0].parameters())
    assert details.get_parameters_from_modules([blocks], model, "cpu") == set(blocks.parameters())
    assert (details.has_repeated_blocks(model), details.is_repeated_blocks(model)) == (True, False)
    assert details.find_first_last_linear_layers(model) == ("1.0", "1.1")
    assert [details.filter_linear_layers(one, "x", ["y"]) for one in (blocks[0], nn.Linear(8, 16))] == [True, False]
    assert details.get_module_leaves({"": 3, "a": 2, "a.b": 1, "a.b.c": 1, "d": 1}) == ["a.b.c", "d"]
    assert details.check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not details.check_device_same(torch.device("cuda:1"), torch.device("cpu"))


def test_small_values_and_decorators() -> None:
    assert details.get_shape([torch.ones(2, 3), {"a": torch.ones(1)}]) == [[2, 3], {"a": [1]}]
    shape, dtype = details.gather_tensor_shape(torch.ones(2, 3))
    assert (shape.tolist(), details.TENSOR_INT_TO_DTYPE[dtype.item()]) == ([2, 3], torch.float32)
    assert details.get_cpu_distributed_information() == details.CPUInformation(0, 1, 0, 1)

    def wrong(tensor: Any) -> None:
        raise details.DistributedOperationException("shapes")

    with pytest.raises(details.DistributedOperationException, match="Error in wrong: shapes"):
        details.chained_operation(details.verify_operation(wrong))(torch.ones(1))
    holder: Any = type("Holder", (), {})()
    assert details.patch_optimizer_step(holder, int)("3") == 3
    assert holder._accelerate_step_called
    assert 0 < details.get_free_port() < 65536


@pytest.mark.parametrize("config", [None, {"zero_optimization": {"stage": 2, "offload_param": {"device": "auto"}}}])
def test_a_deepspeed_configuration_that_is_edited_too_late_is_an_error(config: dict[str, Any] | None) -> None:
    plugin = deepspeed.DeepSpeedPlugin(hf_ds_config=config)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    plugin.deepspeed_config["zero_optimization"].setdefault("offload_param", {})["device"] = "none"
    if config is not None:
        plugin.options()  # "auto" may be replaced
    plugin.deepspeed_config["zero_optimization"]["stage"] = 3
    with pytest.raises(ValueError, match=r"'zero_optimization'\]\['stage'\] was set to 3 after.*Pass the value"):
        plugin.options()
