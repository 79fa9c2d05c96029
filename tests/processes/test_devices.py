"""Which devices a run gets, on machines that have some and on those that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.processes.devices import find_devices, find_kind


def machine(monkeypatch: pytest.MonkeyPatch, cuda: int = 0, mps: bool = False, visible: str | None = None) -> None:
    """A machine with so many devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("cuda", "mps", "kinds"),
    [
        (2, False, {"auto": "cuda", "gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}),
        (1, True, {"auto": "cuda", "gpu": "cuda", "mps": "mps", "cpu": "cpu"}),
        (0, True, {"auto": "mps", "gpu": "mps", "mps": "mps", "cpu": "cpu"}),
        (0, False, {"auto": "cpu", "cpu": "cpu"}),
    ],
)
def test_kinds_of_devices_are_taken_in_order(
    cuda: int, mps: bool, kinds: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, cuda, mps)
    assert {accelerator: find_kind(accelerator) for accelerator in kinds} == kinds


@pytest.mark.parametrize(
    ("accelerator", "what"),
    [("gpu", "GPU"), ("cuda", "CUDA device"), ("mps", "MPS device")],
)
def test_a_kind_that_is_not_there_says_what_is_and_what_to_do(
    accelerator: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, visible="")
    with pytest.raises(RuntimeError) as caught:
        find_kind(accelerator)
    text = str(caught.value)
    visible = "" if accelerator == "mps" else " (CUDA_VISIBLE_DEVICES=)"
    assert f"accelerator={accelerator!r}): this process sees no {what}{visible}, and torch" in text
    assert f"torch {torch.__version__} is built" in text
    assert "Use accelerator='auto' or 'cpu'" in text


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        ("auto", [0, 1, 2, 3]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        (1, [0]),
        ("3", [0, 1, 2]),
        ([2], [2]),
        ((3, 1), [3, 1]),
        ("0,2", [0, 2]),
        ("1,", [1]),
    ],
)
def test_cuda_devices_are_counted_or_listed(devices: Any, indices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cuda=4)
    assert find_devices(devices, "cuda") == [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize("devices", [5, [4], [-1], [0, 0], "0,7"])
def test_cuda_devices_that_are_not_there_are_refused_with_the_numbers(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, cuda=4, visible="4,5,6,7")
    with pytest.raises(ValueError, match=r"this process sees 4 \(CUDA_VISIBLE_DEVICES=4,5,6,7\)\. Set devices=4 or"):
        find_devices(devices, "cuda")


@pytest.mark.parametrize(("devices", "count"), [("auto", 1), (-1, 1), (1, 1), ([0], 1), (4, 4), ("2", 2)])
def test_the_cpu_is_one_device_however_many_processes_use_it(devices: Any, count: int) -> None:
    assert find_devices(devices, "cpu") == [torch.device("cpu")] * count


def test_mps_is_one_device_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, mps=True)
    assert find_devices("auto", "mps") == find_devices(1, "mps") == [torch.device("mps")]
    with pytest.raises(ValueError, match=r"MPS devices \[0, 1\], but this process sees 1"):
        find_devices(2, "mps")
