"""Strategies of other packages, and what a Strategy object may be given together with."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.strategies import (
    DDPStrategy,
    MixedPrecision,
    SingleDevice,
    Strategy,
    TruePrecision,
    choose,
    choose_strategy,
)

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
COUNT = itertools.count()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], package: str = "") -> str:
    """Put a package with strategies of those names where installed packages lie. Returns its name."""
    package = package or f"brings_strategies_{next(COUNT)}"
    place = folder / package
    info = place / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (place / f"{package}.py").write_text(
        "from paceline.strategies import SingleDevice\n\n\nclass Brought(SingleDevice):\n    names = ('brought',)\n"
    )
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {package}:Brought\n" for name in names)
    (info / "entry_points.txt").write_text(f"[paceline.strategies]\n{lines}")
    monkeypatch.syspath_prepend(str(place))
    return package


def test_a_package_may_bring_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ["theirs"])
    trainer = Trainer(**QUIET, strategy="theirs", accelerator="cpu", precision="bf16-true", max_epochs=1)
    assert type(trainer.strategy).__name__ == "Brought"
    assert trainer.precision == "bf16-true"
    module = TinyModule()
    trainer.fit(module, tiny_loader())
    assert module.dtype == torch.bfloat16


def test_our_own_names_stay_ours_and_are_found_without_a_look_at_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, ["cpu", "auto", "ddp"])

    def looks(**kwargs: Any) -> Any:
        raise AssertionError("looked at the installed packages")

    monkeypatch.setattr(choose, "entry_points", looks)
    for name in ("auto", "cpu", "single_device"):
        assert type(choose_strategy(name, "cpu")) is SingleDevice
    assert type(choose_strategy("ddp", "cpu")) is DDPStrategy


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [install(tmp_path, monkeypatch, ["mine"]) for _ in "ab"]
    with pytest.raises(ValueError, match="Two installed packages provide a strategy named 'mine'") as caught:
        Trainer(**QUIET, strategy="mine")
    assert all(f"{package}:Brought" in str(caught.value) for package in packages)
    assert "Uninstall one of them, or pass the Strategy object" in str(caught.value)


@pytest.mark.parametrize("arguments", [{"devices": 2}, {"num_nodes": 2}])
def test_a_packages_strategy_of_one_process_is_refused_several(
    arguments: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, ["mine"])
    with pytest.raises(
        ValueError, match=r"runs in a single process\. Derive your class from paceline\.strategies.DistributedStrategy"
    ):
        Trainer(**QUIET, strategy="mine", accelerator="cpu", **arguments)


@pytest.mark.parametrize(
    ("own", "given", "name"),
    [
        (None, {}, "32-true"),
        (None, {"precision": "64-true"}, "64-true"),
        (None, {"plugins": TruePrecision("bf16-true")}, "bf16-true"),
        (TruePrecision("bf16-true"), {}, "bf16-true"),
        (TruePrecision("bf16-true"), {"precision": "bf16-true"}, "bf16-true"),
        (MixedPrecision("bf16-mixed"), {"precision": "bf16"}, "bf16-mixed"),
    ],
)
def test_a_strategy_object_gets_a_precision_unless_it_has_one(own: Any, given: dict[str, Any], name: str) -> None:
    strategy = SingleDevice("cpu", own)
    trainer = Trainer(**QUIET, strategy=strategy, **given)
    assert trainer.strategy is strategy
    assert trainer.precision == name
    if own is not None:
        assert trainer.precision_plugin is own


def test_a_precision_object_takes_the_place_of_one_of_its_name() -> None:
    mine = MixedPrecision("bf16-mixed")
    trainer = Trainer(**QUIET, strategy=SingleDevice("cpu", MixedPrecision("bf16-mixed")), precision=mine)
    assert trainer.precision_plugin is mine
    assert mine.device == "cpu"


@pytest.mark.parametrize("devices", ["auto", 1, "1", -1, [0]])
def test_a_strategy_objects_devices_may_be_repeated(devices: Any) -> None:
    strategy = SingleDevice("cpu")
    assert Trainer(**QUIET, strategy=strategy, devices=devices, num_nodes=1, accelerator="cpu").strategy is strategy


def test_a_strategy_on_another_device_than_listed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    strategy = SingleDevice("cuda:2")
    assert choose_strategy(strategy, "gpu", [2]) is strategy
    with pytest.raises(ValueError, match=r"devices=\[1\]\) contradicts strategy=SingleDevice.*on cuda:2\. Leave dev"):
        choose_strategy(strategy, "gpu", [1])


def test_a_strategy_for_several_may_repeat_how_many() -> None:
    class Several(Strategy):
        @property
        def world_size(self) -> int:
            return 8

        @property
        def num_nodes(self) -> int:
            return 2

    strategy = Several("cpu")
    assert choose_strategy(strategy, "cpu", 4, 2) is strategy
    with pytest.raises(ValueError, match=r"devices=8\) contradicts strategy=Several"):
        choose_strategy(strategy, "cpu", 8, 2)
    with pytest.raises(ValueError, match=r"num_nodes=4\) contradicts strategy=Several\(...\), whose num_nodes is 2"):
        choose_strategy(strategy, "cpu", 4, 4)
