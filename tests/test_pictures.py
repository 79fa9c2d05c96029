"""The pictures in docs/pictures are what their code draws, can be read in both schemes, and show what the code does."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint
from paceline.callbacks.base import FIT_PSEUDO_CODE
from paceline.checkpoint import atomic_write, manifest, single_file, storage
from paceline.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from paceline.strategies.choose import SEVERAL

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURES = DOCS / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module")
def make() -> Iterator[ModuleType]:
    """The program that draws all pictures."""
    names = {path.stem for path in PICTURES.glob("*.py")}
    sys.path.insert(0, str(PICTURES))
    try:
        yield importlib.import_module("make")
    finally:
        sys.path.remove(str(PICTURES))
        for name in names:
            sys.modules.pop(name, None)


def words_of(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_pictures_are_what_their_code_draws(make: ModuleType) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    drawn = dict(make.drawn())
    assert set(kept) == set(drawn)
    changed = [name for name, svg in drawn.items() if kept[name] != svg]
    assert not changed, f"run: python docs/pictures/make.py ({changed})"


def test_the_picture_of_costs_has_the_command_and_day_of_its_tables(make: ModuleType) -> None:
    (source,) = [word for word in words_of(dict(make.drawn())["overhead-light.svg"]) if "benchmarks/" in word]
    assert re.fullmatch(r"python benchmarks/step_overhead.py, \d{4}-\d\d-\d\d", source)


def test_every_picture_is_on_a_page_in_both_schemes_with_words_for_those_who_do_not_see_it() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for path in PICTURES.glob("*.svg"):
        scheme = path.stem.rpartition("-")[2]
        assert re.search(rf"pictures/{path.name}\n:class: only-{scheme}\n:alt: \w.{{20,}}\n", pages), path.name


def test_texts_are_large_enough_within_the_picture_and_stand_out_from_what_is_behind_them(make: ModuleType) -> None:
    for name, svg in make.drawn():
        root = ElementTree.fromstring(svg)
        width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
        for one in root.iter(f"{SVG}text"):
            assert float(one.attrib["font-size"]) >= 10.5, f"{name}: {one.text}"
            assert 0 <= float(one.attrib["x"]) <= width, f"{name}: {one.text}"
            assert 8 <= float(one.attrib["y"]) <= height, f"{name}: {one.text}"
    for scheme in (make.LIGHT, make.DARK):
        for accent in ("ink", "muted", "blue", "teal", "amber", "red", "violet"):
            color, back = scheme.colors[accent], scheme.colors["back"]
            for behind in (back, scheme.colors["panel"], mixed(color, back, scheme.soft)):
                assert contrast(color, behind) >= 4.5, f"{scheme.name}: {accent} on {behind}"


def channels(color: str) -> list[int]:
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


def mixed(color: str, behind: str, part: float) -> str:
    both = zip(channels(color), channels(behind), strict=True)
    return "#" + "".join(f"{round(one * part + other * (1 - part)):02x}" for one, other in both)


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG; 4.5 is enough for small text."""

    def luminance(color: str) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (n / 255 for n in channels(color))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_picture_of_hooks_has_every_call_of_the_pseudo_code_in_its_order(make: ModuleType) -> None:
    shown = [word.removesuffix("()") for word in words_of(dict(make.drawn())["hooks-light.svg"])]
    for function in ast.parse(FIT_PSEUDO_CODE).body:
        assert isinstance(function, ast.FunctionDef)
        calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
        calls.sort(key=lambda call: call.lineno)
        names = [function.name, *(ast.unparse(call.func) for call in calls)]
        start = max(index for index, word in enumerate(shown) if word == function.name)
        own = [word for word in shown[start:] if word in names]
        assert own[: len(names)] == names


def test_the_picture_of_a_window_has_the_parts_of_an_update_in_their_order(make: ModuleType) -> None:
    drawn = importlib.import_module("accumulation_window").UPDATE
    called = {
        "clip": "configure_gradient_clipping",
        "optimizer.step()": "optimizer_step",
        "clear gradients": "optimizer_zero_grad",
        "advance schedulers": "lr_scheduler_step",
    }
    block = FIT_PSEUDO_CODE.partition("if window_complete:")[2].partition("on_train_batch_end")[0]
    expected = re.findall(r"^\s+(\w+)\(\)", block, re.M)
    assert [called.get(words, words) for words, _ in drawn if words != "unscale (fp16)"] == expected
    assert {words for words, hook in drawn if hook} == {name for name in expected if name.startswith("on_")}


def test_the_picture_of_a_checkpoint_has_the_parts_of_a_write_in_their_order(
    make: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(words: str, call: Any, *args: Any, **given: Any) -> Any:
        done.append(words)
        return call(*args, **given)

    for owner, name, words in (
        (single_file, "_save", "stream the tensors, with checksums"),
        (manifest, "append", "append the manifest"),
        (os, "fsync", "fsync file"),
        (atomic_write, "_rename_new", "rename"),
        (atomic_write, "sync_folder", "fsync folder"),
        (storage, "remove", "delete what it replaces"),
    ):
        monkeypatch.setattr(owner, name, partial(noting, words, getattr(owner, name)))
    checkpoint = ModelCheckpoint(tmp_path, async_save=True)
    trainer = Trainer(**{**QUIET, "max_epochs": 2}, callbacks=[checkpoint])
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    shown = [" ".join(words) for words, _ in importlib.import_module("checkpoint_way").WRITING]
    second = done[done.index("fsync folder") + 2 :]  # the folder's own fsync follows
    assert [words for words in second if words != "fsync file"] == [words for words in shown if words != "fsync file"]
    assert second.index("fsync file") == shown.index("fsync file")


def test_the_resumed_run_of_the_picture_has_the_losses_of_the_other_to_the_last_bit() -> None:
    data = json.loads((PICTURES / "resume.json").read_text(encoding="utf-8"))
    whole, covered = data["whole"]["losses"], 0
    for part in data["parts"]:
        start, losses = part["first_step"] - 1, part["losses"]
        assert start == covered // data["saved_every"] * data["saved_every"], "the step after the last save"
        assert losses == whole[start : start + len(losses)]
        covered = start + len(losses)
    assert covered == len(whole)
    assert data["weights_are_equal"]


# ---- what each strategy keeps --------------------------------------------------------------------------------------


class Four(TrainingModule):
    """Four equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Held(Callback):
    """Counts the elements of weights and gradients that this rank holds before a step."""

    def __init__(self) -> None:
        self.elements: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.parameters())
        self.elements = [elements(parameters), elements([one.grad for one in parameters if one.grad is not None])]


def elements(tensors: list[Any]) -> int:
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(one.numel() for one in local if not one.is_meta)


def kept(strategy: Any) -> list[int]:
    """Elements of weights, gradients and optimizer state on this rank."""
    torch.manual_seed(0)
    held = Held()
    trainer = Trainer(**{**QUIET, "max_epochs": 2}, strategy=strategy(), callbacks=[held], enable_checkpointing=False)
    samples: Any = torch.randn(16, 8)
    trainer.fit(Four(), torch.utils.data.DataLoader(samples, batch_size=4))
    state = [value for one in trainer.optimizers[0].state.values() for value in one.values() if torch.is_tensor(value)]
    return [*held.elements, elements(state)]


def tensor_parallel() -> ModelParallelStrategy:
    return ModelParallelStrategy(tensor_parallel=4, plan={"net.*": ColwiseParallel(output_layouts=Replicate())})


MEASURED = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hybrid_shard": partial(FSDPStrategy, sharding="hybrid", data_parallel_replicate=2),
    "tensor_parallel=4": tensor_parallel,
    "pipeline_parallel=4": partial(ModelParallelStrategy, pipeline_parallel=4, microbatches=4),
}


@pytest.mark.parametrize("written", MEASURED)
def test_a_rank_keeps_what_the_picture_of_strategies_shows(written: str, make: ModuleType) -> None:
    drawn = importlib.import_module("strategy_placement")
    (placement,) = [one for one in drawn.PLACEMENTS if one.written == written]
    whole = elements(list(Four().parameters()))
    found = ranks(4, kept, MEASURED[written])
    for rank, counts in enumerate(found):
        cells = [len(drawn.held(getattr(placement, kind), rank)) for kind, _ in drawn.KINDS]
        assert counts == [whole * count // (drawn.LAYERS * drawn.SLICES) for count in cells], f"rank {rank}"


def test_the_picture_of_strategies_has_the_stages_of_deepspeed_and_of_offloading(make: ModuleType) -> None:
    drawn = {one.written: one for one in importlib.import_module("strategy_placement").PLACEMENTS}
    for name, one in drawn.items():
        if "stage" in name:
            stage = SEVERAL[name][2]["stage"]
            shares = (one.optimizer, one.gradients, one.weights)
            assert shares == tuple("slice" if stage > index else "all" for index in range(3))
    offloaded = FSDPStrategy(**SEVERAL["fsdp_cpu_offload"][2])
    assert isinstance(offloaded.offload, CPUOffloadPolicy)
    assert drawn["fsdp_cpu_offload"].on_host == {"weights", "gradients", "optimizer"}
    assert all(name in SEVERAL or "parallel=" in name or name == "single_device" for name in drawn)
