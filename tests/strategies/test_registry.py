"""Names of strategies, and a program's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline import Trainer
from paceline.accelerator.accelerator import Accelerator
from paceline.strategies import DDPStrategy, SingleDevice
from paceline.strategies.fsdp.strategy import FSDPStrategy
from paceline.strategies.registry import StrategyRegistry


@pytest.fixture
def own() -> Iterator[type[SingleDevice]]:
    @StrategyRegistry.register("own", word="first")
    class Own(SingleDevice):
        def __init__(self, *args: Any, word: str) -> None:
            super().__init__(*args)
            self.word = word

    yield Own
    StrategyRegistry.remove("own")


def test_a_registered_strategy_is_chosen_by_its_name(own: type[SingleDevice]) -> None:
    strategy = Trainer(strategy="own", accelerator="cpu", logger=False).strategy
    assert isinstance(strategy, own)
    assert strategy.word == "first"
    assert isinstance(Accelerator(cpu=True, strategy="own").strategy, own)
    assert StrategyRegistry["own"]["init_params"] == {"word": "first"}
    with pytest.raises(ValueError, match=r"a strategy with this name already exists.*override=True"):
        StrategyRegistry.register("own", own)
    StrategyRegistry.register("own", DDPStrategy, override=True, find_unused_parameters=True)
    found = Trainer(strategy="own", accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(found, DDPStrategy)
    assert found.find_unused_parameters
    assert found.world_size == 2


def test_every_name_says_what_it_stands_for() -> None:
    names = StrategyRegistry.available_strategies()
    assert {"ddp", "fsdp", "cpu", "single_device", "deepspeed_stage_3"} <= set(names)
    assert "own" not in StrategyRegistry
    assert {name for name in names if StrategyRegistry[name]["strategy"] is FSDPStrategy} == set(FSDPStrategy.names)
    with pytest.raises(ValueError, match=r"Choose another name\.$"):
        StrategyRegistry.register("ddp", SingleDevice)
