"""Methods of DeepSpeed's engine on prepared models: the cheap part without DeepSpeed, the rest with it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn

from paceline.accelerator.process_state import AcceleratorState
from paceline.compat.accelerate import deepspeed
from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.engine_methods import EngineMethods


@pytest.fixture(autouse=True)
def no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(stage: int | None) -> tuple[Accelerator, Any, Any]:
    plugins: dict[str, Any] = {}
    if stage is not None:
        given = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        plugins["deepspeed_plugin"] = deepspeed.DeepSpeedPlugin(hf_ds_config=given)
    accelerator = Accelerator(cpu=True, **plugins)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.5, momentum=0.9))
    if stage is None:
        EngineMethods(accelerator.prepared, model).attach(model)
    return accelerator, model, optimizer


def losses(accelerator: Accelerator, model: Any, optimizer: Any, seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        loss = model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def saved_and_loaded(stage: int | None, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of two updates after a checkpoint: without interruption, and after loading it."""
    parts = prepared(stage)
    if stage is not None:
        assert parts[0].deepspeed_plugin.deepspeed_config["gradient_accumulation_steps"] == 1  # the file has none
    losses(*parts, range(3))
    assert parts[1].save_checkpoint(folder, client_state={"epoch": 2})
    rest = losses(*parts, range(3, 5))
    where, own = parts[1].load_checkpoint(folder)
    assert (Path(where).parent, own) == (folder, {"epoch": 2})
    assert Path(where).name == (folder / "latest").read_text()
    return rest, losses(*parts, range(3, 5))


def test_a_checkpoint_of_a_prepared_model_restores_weights_and_optimizer(tmp_path: Path) -> None:
    rest, again = saved_and_loaded(None, tmp_path)
    assert rest == again


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_under_deepspeed_restores_weights_and_optimizer(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    for rest, again in ranks(2, saved_and_loaded, stage, tmp_path, limit=200):
        assert rest == pytest.approx(again, rel=1e-5)


def test_frozen_parameters_are_left_out_of_a_checkpoint(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(None)
    assert accelerator.prepared.models == [model]
    model[0].requires_grad_(False)
    model.save_16bit_model(tmp_path, "some.bin", exclude_frozen_parameters=True)
    assert sorted(torch.load(tmp_path / "some.bin")) == ["2.bias", "2.weight"]
    model.save_checkpoint(tmp_path, "last", exclude_frozen_parameters=True)
    assert model.load_checkpoint(tmp_path, load_module_strict=False) == (str(tmp_path / "last"), {})


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(None)
    assert accelerator.prepared.models == [model]
    assert model.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(FileNotFoundError, match=r"that DeepSpeed itself has written.*zero_to_fp32"):
        model.load_checkpoint(tmp_path, "global_step3")


def test_a_model_with_the_methods_is_copied_and_pickled(tmp_path: Path) -> None:
    _, model, _ = prepared(None)
    method = model.save_checkpoint
    assert copy.deepcopy(method).__self__ is method.__self__
    with pytest.raises(RuntimeError, match="Prepare the model again"):
        pickle.loads(pickle.dumps(method))(tmp_path)
