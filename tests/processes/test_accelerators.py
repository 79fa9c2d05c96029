"""Kinds of devices as objects that equal their names."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from paceline import Trainer
from paceline.processes import devices
from paceline.processes.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator, CUDAAccelerator


def test_a_kind_equals_its_name_and_can_be_passed_for_it() -> None:
    trainer = Trainer(accelerator=CPUAccelerator(), logger=False, enable_checkpointing=False)
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert trainer.accelerator == "cpu"
    assert AcceleratorRegistry.available_accelerators() == ["cpu", "cuda", "mps", "tpu", "xpu"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_the_same_kind(copied) -> None:
    found: Accelerator = copied(CUDAAccelerator())
    assert (type(found), str(found)) == (CUDAAccelerator, "cuda")


def test_what_devices_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPUAccelerator.is_available()
    assert CPUAccelerator.auto_device_count() == 1
    assert CPUAccelerator.parse_devices(3) == 3
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: 2)
    assert CUDAAccelerator.auto_device_count() == 2
    assert CUDAAccelerator.parse_devices("1,0") == [1, 0]
    assert CUDAAccelerator.get_parallel_devices(-1) == [torch.device("cuda", 0), torch.device("cuda", 1)]
