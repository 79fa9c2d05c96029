"""Plugins for windows, compiling, folders and DeepSpeed: what they hold, and what fills what they leave open."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.accelerator.enums import DynamoBackend
from paceline.accelerator.plugins import (
    DeepSpeedPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
    choose_accumulation,
    choose_dynamo,
)
from paceline.settings import resolve


def test_e4_a_backend_is_found_in_upper_and_lower_case_and_others_are_listed() -> None:
    assert DynamoBackend("INDUCTOR") is DynamoBackend("inductor") is DynamoBackend.INDUCTOR
    assert DynamoBackend("aot_ts_nvfuser").value == "AOT_TS_NVFUSER"
    with pytest.raises(ValueError, match=r"Unknown DynamoBackend 'nvfuser'.*'INDUCTOR', .*'ONNXRT', "):
        DynamoBackend("nvfuser")
    with pytest.raises(ValueError, match="Did you mean 'INDUCTOR'"):
        TorchDynamoPlugin(backend="inductr")


def test_e3_torch_compile_gets_exactly_what_the_plugin_says() -> None:
    given = TorchDynamoPlugin(backend=DynamoBackend("INDUCTOR"), mode="max-autotune", fullgraph=True, dynamic=False)
    assert given.to_kwargs() == {"backend": "inductor", "mode": "max-autotune", "fullgraph": True, "dynamic": False}
    compiler: Any = given.compiler()
    assert compiler.func is torch.compile
    assert compiler.keywords == given.to_kwargs()
    assert TorchDynamoPlugin(backend="no").compiler() is TorchDynamoPlugin().compiler() is None


def test_e3_a_compiled_forward_runs_through_the_backend() -> None:
    compiler = TorchDynamoPlugin(backend="eager", fullgraph=True).compiler()
    assert compiler is not None
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(compiler(layer.forward)(x), layer(x))

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(Exception, match="graph_break"):
        compiler(breaks)(x)


def test_e5_modes_are_passed_on_and_others_refused() -> None:
    for mode in ("reduce-overhead", "max-autotune"):
        assert TorchDynamoPlugin(backend="inductor", mode=mode).to_kwargs()["mode"] == mode
    assert "mode" not in TorchDynamoPlugin(backend="inductor", mode="default").to_kwargs()
    with pytest.raises(ValueError, match=r"Unknown TorchDynamoPlugin mode 'max-autotun'. Did you mean 'max-autotune'"):
        TorchDynamoPlugin(mode="max-autotun")
    with pytest.raises(ValueError, match="accepts only one of the two"):
        TorchDynamoPlugin(mode="max-autotune", options={"a": 1})


def test_a_backend_that_is_not_installed_is_refused_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"is not available in torch .*backends are 'EAGER', .*'INDUCTOR'"):
        TorchDynamoPlugin(backend="fx2trt").compiler()


def test_what_a_dynamo_plugin_leaves_open_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("PACELINE_DYNAMO_USE_FULLGRAPH", "true")
    settings = resolve()
    found = choose_dynamo(TorchDynamoPlugin(backend="eager", fullgraph=False), settings)
    assert found.to_kwargs() == {"backend": "eager", "mode": "reduce-overhead", "fullgraph": False}
    assert choose_dynamo(None, settings).compiler() is None
    assert choose_dynamo(None, resolve({"dynamo_backend": "aot_eager"})).backend is DynamoBackend.AOT_EAGER
    with pytest.raises(TypeError, match="Pass a TorchDynamoPlugin, or use dynamo_backend='inductor'"):
        choose_dynamo("inductor", settings)  # type: ignore[arg-type]


def test_repeated_blocks_are_compiled_one_by_one_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    block = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList(block))
    assert plugin.compile(model) is None
    assert [module._compiled_call_impl is not None for module in block] == [True] * 3
    assert model._compiled_call_impl is None
    x = torch.randn(2, 3)
    assert torch.equal(block[0](x), torch.tanh(block[0][0](x)))
    with caplog.at_level(logging.INFO):
        assert plugin.compile(nn.Linear(3, 3)) is not None
    assert "no list of blocks of the same class in Linear" in caplog.text


def test_a_project_logs_where_it_is_unless_told() -> None:
    assert ProjectConfiguration("a").logging_dir == "a"
    assert ProjectConfiguration(Path("a"), logging_dir="b").logging_dir == "b"  # type: ignore[arg-type]
    later = ProjectConfiguration()
    later.set_directories("c")
    assert (later.project_dir, later.logging_dir) == ("c", "c")


def test_a_window_is_as_long_as_the_plugin_the_settings_or_deepspeed_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_accumulation(None, resolve())["num_steps"] == 1
    assert choose_accumulation(None, resolve({"gradient_accumulation_steps": 4}))["num_steps"] == 4
    deepspeed = DeepSpeedPlugin(gradient_accumulation_steps=3)
    assert choose_accumulation(None, resolve(), deepspeed)["num_steps"] == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    given = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    assert choose_accumulation(given, resolve()) == {
        "num_steps": 2,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": True,
    }
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4\) contradicts .*num_steps=2"):
        choose_accumulation(given, resolve({"gradient_accumulation_steps": 4}))
    with pytest.raises(ValueError, match="accumulation_steps=3, but the Accelerator is configured with 2"):
        choose_accumulation(given, resolve(), deepspeed)
    with pytest.raises(ValueError, match=r"num_steps=0 is not a valid number of micro-batches"):
        GradientAccumulationPlugin(num_steps=0)


def test_e10_deepspeed_fields_are_those_of_the_strategy(tmp_path: Path) -> None:
    given = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="CPU")
    assert given.options() == {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "fp16": "auto"}))
    given = DeepSpeedPlugin(hf_ds_config=str(file), offload_optimizer_device="none")
    assert given.options() == {"config": {"zero_optimization": {"stage": 1}}}
    assert given.decided("gradient_clipping") == 0.5
    assert given.decided("gradient_accumulation_steps") is None
    with pytest.raises(ValueError, match=r"gradient_clipping=1.0\) contradicts the DeepSpeed config.*, which has 0.5"):
        DeepSpeedPlugin(hf_ds_config=str(file), gradient_clipping=1.0).decided("gradient_clipping")


def test_what_a_deepspeed_plugin_leaves_open_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    assert DeepSpeedPlugin().filled(resolve()).options() == {"stage": 3, "offload_parameters": True}
    assert DeepSpeedPlugin(zero_stage=2, offload_param_device="none").filled(resolve()).options() == {"stage": 2}


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ({"offload_optimizer_device": "nvme"}, ValueError, "offload_optimizer_device='nvme'.*Choose 'cpu' or 'none'"),
        ({"offload_param_nvme_path": "/x"}, NotImplementedError, "offload_param_nvme_path='/x'.* is not supported"),
        ({"transformer_moe_cls_names": "A"}, NotImplementedError, "transformer_moe_cls_names='A'"),
        ({"enable_msamp": True}, NotImplementedError, "enable_msamp=True"),
        ({"msamp_opt_level": "O1"}, NotImplementedError, "msamp_opt_level='O1'"),
    ],
)
def test_deepspeed_fields_without_a_counterpart_are_refused(given: dict[str, Any], kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match):
        DeepSpeedPlugin(**given).options()


@pytest.mark.parametrize(("name", "value"), [("is_train_batch_min", False), ("zero3_init_flag", True)])
def test_deepspeed_fields_without_effect_are_said(name: str, value: bool, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {name: value, "zero3_save_16bit_model": True}
    with caplog.at_level(logging.INFO):
        assert DeepSpeedPlugin(**given).options() == {}
    assert f"DeepSpeedPlugin({name}={value}) has no effect" in caplog.text
