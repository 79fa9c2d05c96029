"""Models with shapes and no values."""

from __future__ import annotations

import pytest
import torch
from big_models import MEMORY, Net, program
from torch import nn

from paceline import Trainer, init_empty_weights, init_on_device

MIXTRAL = (
    MEMORY
    + """
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig
from paceline import init_empty_weights, plan_device_map
nn.Linear(2, 2)
before = reset_peak()
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(MixtralConfig())
grown = status("VmHWM") - before
kinds = sorted({p.device.type for p in model.parameters()})
buffers = sorted({b.device.type for b in model.buffers()})
plan = plan_device_map(model, "auto", {"cpu": "20GiB"}, dtype="bfloat16", verbose=False)
print(json.dumps({
    "count": sum(p.numel() for p in model.parameters()), "kinds": kinds, "buffers": buffers, "grown": grown,
    "used": plan.used["cpu"], "blocks": [row.kind for row in plan.rows if "Layer" in row.kind][:1],
}))
"""
)


def test_i1_47_billion_parameters_take_no_memory() -> None:
    pytest.importorskip("transformers")
    found = program(MIXTRAL)
    assert found["count"] > 46e9
    assert found["kinds"] == ["meta"]
    assert found["buffers"] == ["cpu"]
    assert found["grown"] < 1e9
    assert found["used"] <= 20 * 2**30
    assert found["blocks"] == ["MixtralDecoderLayer"]


def test_i1_for_a_plain_module_of_40_gb_not_one_number_is_drawn() -> None:
    before = torch.get_rng_state()
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(100_000, 50_000), nn.Linear(50_000, 100_000))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_i2_buffers_are_real_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with init_empty_weights():
        model = nn.BatchNorm1d(4)
    assert model.weight.device.type == "meta"
    assert torch.equal(model.running_var, torch.ones(4))
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(4)
    assert model.running_var.is_meta
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "true")
    with init_empty_weights():
        assert nn.BatchNorm1d(4).running_var.is_meta
    assert not nn.BatchNorm1d(4).running_var.is_meta


def test_what_is_tied_stays_tied() -> None:
    with init_empty_weights():
        net = Net(1)
        shared = nn.Parameter(torch.zeros(3))
        first, second = nn.Module(), nn.Module()
        first.weight, second.weight = shared, shared  # type: ignore[assignment]
    assert net.head.weight is net.start.weight
    assert first.weight is second.weight
    assert first.weight.is_meta


def test_parameters_keep_what_they_are() -> None:
    with init_empty_weights():
        model = nn.Module()
        model.fixed = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
        lazy = nn.LazyLinear(3)
    assert not model.fixed.requires_grad
    assert model.fixed.dtype == torch.bfloat16
    assert lazy(torch.zeros(1, 2)).shape == (1, 3)


def test_afterwards_modules_are_made_as_ever() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    with init_on_device("cpu"):
        assert not nn.Linear(2, 2).weight.is_meta


def test_layers_whose_weights_will_be_loaded_draw_no_values() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, precision="64-true")
    before = torch.get_rng_state()
    with trainer.init_module(empty_init=True):
        made = nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert (made[0].weight.dtype, made[0].weight.is_meta) == (torch.float64, False)
    with trainer.strategy.tensor_init_context(empty_init=False), trainer.precision_plugin.module_init_context():
        assert nn.Linear(3, 2).weight.abs().sum() > 0
    assert not torch.equal(torch.get_rng_state(), before)
