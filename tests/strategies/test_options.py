"""What settings ask of a strategy, and what options refuse, whichever door they come through."""

from __future__ import annotations

import pytest

from paceline.settings import resolve
from paceline.strategies import FSDPStrategy, ModelParallelStrategy, choose_strategy
from paceline.strategies.choose import strategy_in
from paceline.strategies.options import Options, options_in


def test_settings_become_arguments_of_the_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_in(resolve()).given == ""
    assert strategy_in(resolve()) == "auto"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert options_in(resolve()).fsdp == {"wrap": "auto", "cpu_offload": True}
    assert type(strategy_in(resolve())) is FSDPStrategy
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert isinstance(strategy_in(resolve()), ModelParallelStrategy)


def test_settings_that_cannot_be_are_refused_in_the_users_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    with pytest.raises(
        ValueError, match=r"FSDPSettings\(sharding_strategy='NO_SHARD'\) .* Leave the plugin \(use_fsdp\) out"
    ):
        options_in(resolve())
    monkeypatch.delenv("FSDP_SHARDING_STRATEGY")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="use_deepspeed and use_fsdp contradict each other"):
        options_in(resolve())


@pytest.mark.parametrize("dim", ["cp", "sp"])
def test_the_trainer_does_not_split_sequences_because_of_a_setting(monkeypatch: pytest.MonkeyPatch, dim: str) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{dim.upper()}_SIZE", "2")
    with pytest.raises(ValueError, match=rf"parallelism_config_{dim}_size=2 splits .*context_parallel=2, context_par"):
        options_in(resolve())


def test_options_go_with_names_only() -> None:
    options = Options(fsdp={"sharding": "hybrid"}, written={"fsdp": "fsdp_plugin"})
    chosen = choose_strategy("auto", "cpu", 1, options=options)
    assert isinstance(chosen, FSDPStrategy)
    assert chosen.sharding == "hybrid"
    for strategy in ("single_device", FSDPStrategy()):
        with pytest.raises(
            ValueError, match=r"fsdp_plugin cannot be combined with strategy ('single_device'|FSDPStrategy)"
        ):
            choose_strategy(strategy, "cpu", 1, options=options)
