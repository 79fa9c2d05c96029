"""Batches of images and lists of dicts: one process and two have the same numbers, and each image is judged once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rank_processes import ranks

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "08_detection_batches.py"


@pytest.fixture(autouse=True)
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("paceline.processes.devices.count", lambda kind: int(kind == "cpu"))


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("paceline_example_detection", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_b5_nested_targets_train_to_the_same_numbers_on_one_and_two_processes(program: Any, tmp_path: Path) -> None:
    history, images = program.train(8, 3, 168, str(tmp_path / "one"))
    (first, seen), (second, also) = ranks(2, program.train, 4, 3, 168, str(tmp_path / "two"))
    assert first == second == pytest.approx(history, rel=1e-4)
    assert history[-1] < 0.7 * history[0]
    assert seen == also
    assert program.share_found(images) == program.share_found(seen) > 0.02
    for one, other in zip(images, seen, strict=True):
        assert one["seen"]["labels"] == other["seen"]["labels"]
        for box, same in zip(one["seen"]["boxes"], other["seen"]["boxes"], strict=True):
            assert box == pytest.approx(same, abs=1e-3)


def test_b5_every_image_is_judged_once_and_in_order_where_one_process_only_repeats(
    program: Any, tmp_path: Path
) -> None:
    there = [{name: value.tolist() for name, value in target.items()} for _, target in program.shapes(49, seed=2)]
    for _, images in ranks(2, program.train, 4, 1, 8, str(tmp_path)):
        assert [image["true"] for image in images] == there


@pytest.mark.gpu
def test_b5_tensors_arrive_on_the_device_however_deep_they_lie(program: Any) -> None:
    accelerator = program.Accelerator()
    loader = program.DataLoader(program.shapes(6, seed=0), batch_size=3, collate_fn=program.collate)
    for images, targets in accelerator.prepare(loader):
        assert images.device == accelerator.device
        assert accelerator.device.type == "cuda"
        assert [value.device for target in targets for value in target.values()] == [accelerator.device] * 6


def test_b5_overlap_is_intersection_over_union(program: Any) -> None:
    assert program.overlap([0.5, 0.5, 0.2, 0.2], [0.5, 0.5, 0.2, 0.2]) == pytest.approx(1.0)
    assert program.overlap([0.25, 0.5, 0.5, 1.0], [0.5, 0.5, 0.5, 1.0]) == pytest.approx(1 / 3)
    assert program.overlap([0.1, 0.1, 0.1, 0.1], [0.9, 0.9, 0.1, 0.1]) == 0.0


def test_a5_the_example_names_no_hardware() -> None:
    words = (".to(", "cuda", "DistributedSampler", "GradScaler", "autocast", "init_process_group")
    text = EXAMPLE.read_text()
    assert not [word for word in words if word in text]


def test_b5_a_batch_keeps_the_counts_of_its_images(program: Any) -> None:
    images, targets = program.collate(program.shapes(20, seed=0))
    counts = [len(target["labels"]) for target in targets]
    assert images.shape == (20, 1, 32, 32)
    assert (min(counts), max(counts)) == (1, 4)
    assert all(target["boxes"].shape == (count, 4) for target, count in zip(targets, counts, strict=True))
    assert all(bool(((target["boxes"] > 0) & (target["boxes"] < 1)).all()) for target in targets)
