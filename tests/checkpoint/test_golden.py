"""Checkpoints that an earlier version wrote: they load in full, and a run goes on from them."""

from __future__ import annotations

import pytest
import torch
from golden_files import EPOCHS, GOLDEN, SAVED_STEP, Net, train
from rank_processes import ranks
from torch import Tensor

from paceline.checkpoint import manifest, verify
from paceline.checkpoint.read import read
from paceline.strategies import FSDPStrategy

PLACES = {"single.ckpt": lambda: "single_device", "sharded.ckpt": FSDPStrategy}
NAMES = list(PLACES)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_checkpoint_says_what_it_is_and_is_whole(name: str) -> None:
    found = manifest.read(GOLDEN / name)
    assert found is not None
    assert (found.format, found.epoch, found.global_step, found.weights_only) == (1, 1, SAVED_STEP, False)
    assert (found.kind, found.world_size) == {"single.ckpt": ("file", 1), "sharded.ckpt": ("folder", 2)}[name]
    assert verify.problem(GOLDEN / name) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_checkpoint_loads_in_full(name: str) -> None:
    found = read(GOLDEN / name)
    assert (found["epoch"], found["global_step"], found["hyper_parameters"]) == (1, SAVED_STEP, {"width": 4})
    assert found["state_dict"].keys() == Net().state_dict().keys()
    assert all(not tensor.is_meta for tensor in found["state_dict"].values())
    (optimizer,) = found["optimizer_states"]
    assert [state["exp_avg"].shape for state in optimizer["state"].values()] == [(4, 3), (4,), (1, 4), (1,)]
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0.025)
    module = Net.load_from_checkpoint(GOLDEN / name)
    assert torch.equal(module.layers[0].weight, found["state_dict"]["layers.0.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_a_golden_checkpoint(name: str) -> None:
    def goes_on() -> dict[str, Tensor]:
        module = train(GOLDEN / name, strategy=PLACES[name]())
        assert module.trainer.current_epoch == EPOCHS
        return module.trainer.strategy.model_state(module)

    found = goes_on() if name == "single.ckpt" else ranks(2, goes_on)[0]
    for key, value in train().state_dict().items():
        assert torch.allclose(found[key], value, atol=1e-5), key  # made on another machine, perhaps by another torch
