"""The same numbers on every strategy: 20 steps of each against one process that sees the whole batch.

The yardstick is one process in float64. In float32 a parameter may be off by 1e-6 of its norm: some 8 roundings (the
sums over ranks are taken in another order). In bf16-mixed every product is rounded to 8 bits, in another order on other
ranks, so there the bound is ten times what one process in bf16-mixed is off by itself (``verify`` measures it).

``make test-all`` runs every strategy with every network, accumulation and precision, ``make test`` a tenth of that.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from parity.networks import ConvNet, Language, TiedLanguage, loader
from rotation import share

import paceline
from paceline import TrainingModule
from paceline.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
STRATEGIES: dict[str, tuple[Callable[[], Strategy], int]] = {
    "ddp x2": (DDPStrategy, 2),
    "fsdp x2": (FSDPStrategy, 2),
    "fsdp x4": (FSDPStrategy, 4),
    "hybrid 2x2": (lambda: FSDPStrategy(sharding="hybrid", data_parallel_replicate=2, data_parallel_shard=2), 4),
    "tensor parallel x2": (lambda: ModelParallelStrategy(data_parallel_shard=1, tensor_parallel=2), 2),
    "fsdp x2, tensor parallel x2": (lambda: ModelParallelStrategy(data_parallel_shard=2, tensor_parallel=2), 4),
    "pipeline x2": (lambda: ModelParallelStrategy(data_parallel_shard=1, pipeline_parallel=2), 2),
    "deepspeed 1 x2": (lambda: DeepSpeedStrategy(stage=1), 2),
    "deepspeed 2 x2": (lambda: DeepSpeedStrategy(stage=2), 2),
    "deepspeed 3 x2": (lambda: DeepSpeedStrategy(stage=3), 2),
}


WAYS = ((1, "32-true"), (3, "bf16-mixed"), (1, "bf16-mixed"), (3, "32-true"))


def cells() -> list[Any]:
    """Every strategy with every network it can take: tensor parallelism splits the linear layers of blocks."""
    found = []
    for strategy in STRATEGIES:
        marks = [NEEDS_DEEPSPEED] if strategy.startswith("deepspeed") else []
        networks = [Language, TiedLanguage] if "tensor" in strategy else [ConvNet, Language, TiedLanguage]
        found += [
            pytest.param(strategy, network, *way, marks=marks, id=f"{strategy}-{network.__name__}-{way[0]}-{way[1]}")
            for network, way in itertools.product(networks, WAYS)
        ]
    return found


@pytest.fixture(scope="module", autouse=True)
def deepspeed_here(deepspeed_imported: None) -> None:
    """For the ranks that this process forks."""


@pytest.mark.parametrize(("strategy", "module", "accumulate", "precision"), share(cells()))
def test_a_strategy_gives_the_numbers_of_one_process(
    strategy: str, module: type[TrainingModule], accumulate: int, precision: str
) -> None:
    make, devices = STRATEGIES[strategy]
    report = paceline.verify(
        module(),
        loader(module),
        [make()],
        devices=devices,
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        precision=precision,
    )
    assert report.ok, f"\n{report}"
    if precision == "32-true":
        assert report.verdicts[0].error <= 1e-6


def test_a_strategy_that_departs_is_named_with_step_and_parameter() -> None:
    class Wrong(DDPStrategy):
        """Forgets to reduce in its third step."""

        def optimizer_step(self, optimizer: Any, closure: Any = None) -> bool:
            self.steps = getattr(self, "steps", 0) + 1
            self.sync_gradients(self.steps != 3)
            return super().optimizer_step(optimizer, closure)

    report = paceline.verify(ConvNet(), loader(ConvNet), [Wrong(), "ddp", "dpd"], accelerator="cpu")
    assert not report.ok
    assert report["Wrong"].step == 4
    assert report["Wrong"].parameter.startswith("net.")
    assert report["ddp"].same
    assert "Unknown strategy 'dpd'" in report["dpd"].failure
    shown = str(report).splitlines()
    assert f"differs at step 4 in {report['Wrong'].parameter}" in shown[1]
    assert shown[2].endswith("same")
    assert "failed: ValueError" in shown[3]


def test_the_module_given_to_verify_stays_as_it_was() -> None:
    module = ConvNet()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    paceline.verify(module, loader(ConvNet), ["ddp"], steps=2, accelerator="cpu")
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())


def test_batches_that_cannot_be_split_are_refused() -> None:
    report = paceline.verify(ConvNet(), loader(ConvNet, batch_size=7), ["ddp"], steps=2, accelerator="cpu")
    assert "the size of one batch is 7. Choose a batch_size divisible by 2" in report["ddp"].failure
