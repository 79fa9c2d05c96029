"""Models that are quantized for a loop of the user's own: from memory, from files, and from files of quantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline import Accelerator, BnbQuantizationConfig, init_empty_weights, load_and_quantize_model
from paceline.accelerator.quantization import (
    get_keys_to_not_convert,
    get_quantized_model_device_map,
    has_4bit_bnb_layers,
    replace_with_bnb_layers,
)
from paceline.big_model.quantized_layers import quantized_layers
from paceline.compat.accelerate import probes
from paceline.compat.accelerate.big_model import set_module_tensor_to_device
from paceline.messages import PacelineWarning

CONFIGS = {
    "nf4": BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16"),
    "fp4-dq": BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, torch_dtype="fp32", keep_in_fp32_modules=["norm"]
    ),
    "int8": BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=["norm"]),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.block = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 16, bias=False)
        self.register_buffer("order", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.block(self.embed(x))
        return self.head(self.norm(inside.to(self.norm.weight.dtype)).to(self.head.weight.dtype)).float()


def model() -> Model:
    torch.manual_seed(5)
    return Model()


def empty() -> Model:
    with init_empty_weights():
        return Model()


def same(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_in_memory_and_in_files_are_quantized_alike_and_can_be_saved(kind: str, tmp_path: Path) -> None:
    import bitsandbytes as bnb

    config = CONFIGS[kind]
    save_file(model().state_dict(), tmp_path / "model.safetensors")
    here = load_and_quantize_model(model(), config)
    read = load_and_quantize_model(empty(), config, tmp_path)
    assert quantized_layers(here).keys() == quantized_layers(read).keys() == {"block.0", "block.2"}
    assert type(here.block[0]) is (bnb.nn.Linear8bitLt if kind == "int8" else bnb.nn.Linear4bit)
    assert {here.embed.weight.dtype, here.head.weight.dtype} == {config.torch_dtype}
    assert here.norm.weight.dtype == (torch.float32 if config.keep_in_fp32_modules else config.torch_dtype)
    assert (here.is_loaded_in_4bit, here.is_loaded_in_8bit) == (kind != "int8", kind == "int8")
    assert has_4bit_bnb_layers(here) == (kind != "int8")
    assert here.order.tolist() == [0, 1, 2]
    assert not any(parameter.requires_grad for parameter in here.block.parameters())
    same(here, read)
    x = torch.arange(16)
    assert torch.equal(here.eval()(x), read.eval()(x))
    assert (here(x) - model()(x)).abs().mean() < 0.2

    Accelerator(cpu=True).save_model(here, tmp_path / "saved")
    same(load_and_quantize_model(empty(), config, tmp_path / "saved", device_map={"": "cpu"}), here)
    weight = model().block[0].weight.detach()
    set_module_tensor_to_device(read, "block.0.weight", "cpu", torch.zeros_like(weight))
    set_module_tensor_to_device(read, "block.0.weight", "cpu", weight, dtype=config.torch_dtype)
    same(here, read)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_state_of_a_prepared_model_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    def train(net: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            accelerator.backward(net.train()(torch.arange(step, step + 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                net.eval()(torch.arange(16))

    def start(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        net = load_and_quantize_model(Model(), CONFIGS[kind]).float()
        trained = [p for p in net.parameters() if p.requires_grad]
        return accelerator.prepare(net, torch.optim.AdamW(trained, lr=0.01))

    accelerator = Accelerator(cpu=True)
    whole, optimizer = start(5)
    train(whole, optimizer, range(3))
    accelerator.save_state(str(tmp_path))
    train(whole, optimizer, range(3, 6))
    accelerator = Accelerator(cpu=True)
    resumed, optimizer = start(6)
    resumed(torch.arange(16))
    accelerator.load_state(str(tmp_path))
    train(resumed, optimizer, range(3, 6))
    same(whole, resumed)


def test_which_modules_are_left_out() -> None:
    assert get_keys_to_not_convert(model()) == ["head"]
    tied = model()
    tied.head.weight = tied.embed.weight
    assert get_keys_to_not_convert(tied) == ["embed", "head"]
    tied.base_model_prefix = "embed"  # type: ignore[assignment]
    assert get_keys_to_not_convert(tied) == ["embed", "head"]
    base = nn.Sequential(nn.Linear(64, 64))
    base.base_model_prefix = "model"  # type: ignore[assignment]
    assert get_keys_to_not_convert(base) == []
    own = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["block.0"])
    assert quantized_layers(load_and_quantize_model(model(), own)).keys() == {"block.2", "head"}
    assert quantized_layers(replace_with_bnb_layers(model(), own, ["block"])).keys() == {"head"}
    plan = get_quantized_model_device_map(model(), own, "auto", max_memory={"cpu": "1GB"})
    assert plan == {"": "cpu"}


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(match: str, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=match):
            BnbQuantizationConfig(**arguments)

    refuses("load_in_8bit=False and load_in_4bit=False. Set exactly one")
    refuses("Set exactly one", load_in_8bit=True, load_in_4bit=True)
    refuses("Unknown bnb_4bit_quant_type 'nf5'. Did you mean 'nf4'", load_in_4bit=True, bnb_4bit_quant_type="nf5")
    refuses("Unknown bnb_4bit_compute_dtype 'bf'", load_in_4bit=True, bnb_4bit_compute_dtype="bf")
    refuses("skip_modules='head'. Pass a list", load_in_4bit=True, skip_modules="head")
    with pytest.raises(RuntimeError, match="Model is on the meta device, so it has no weights to quantize"):
        load_and_quantize_model(empty(), CONFIGS["nf4"])
    weights = model().state_dict()
    del weights["norm.bias"], weights["block.0.weight"]
    save_file(weights | {"more": torch.ones(1)}, tmp_path / "model.safetensors")
    with (
        pytest.warns(PacelineWarning, match=r"contains 1 unused tensor that Model does not have: more"),
        pytest.raises(RuntimeError, match=r"Model has no values for 2 of its tensors: block.0.weight, norm.bias"),
    ):
        load_and_quantize_model(empty(), CONFIGS["nf4"], tmp_path)
    quantized = load_and_quantize_model(model(), CONFIGS["nf4"])
    away = {"embed": 0, "block": "cpu", "norm": 0, "head": 0}
    with pytest.raises(ValueError, match=r"offloads 2 quantized layers \(block.0, block.2\), which must stay on 0"):
        get_quantized_model_device_map(quantized, CONFIGS["nf4"], away)
    with pytest.warns(PacelineWarning, match="Sequential has no linear layer to quantize"):
        replace_with_bnb_layers(nn.Sequential(nn.GELU()), CONFIGS["nf4"])
    assert probes.ANSWERS["is_bnb_available"]("0.50")
    assert not probes.ANSWERS["is_bnb_available"]("99")
    assert probes.ANSWERS["is_4bit_bnb_available"]()
    monkeypatch.setattr("paceline.messages.is_installed", lambda package: package != "bitsandbytes")
    assert not probes.ANSWERS["is_bnb_available"]()
    with pytest.raises(ModuleNotFoundError, match="load_and_quantize_model needs the package 'bitsandbytes'"):
        load_and_quantize_model(model(), CONFIGS["nf4"])
