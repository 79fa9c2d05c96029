"""What a step logs for micro-batches becomes one value of the batch, on the rank that has it and on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import TrainingModule
from paceline.strategies import SingleDevice
from paceline.trainer import phases
from paceline.trainer.metrics import MetricStore
from paceline.trainer.microbatch_metrics import JoiningStep
from paceline.trainer.state import RunState


class Logger(TrainingModule):
    """Logs what its batches say: ``value`` per sample, under the options of the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("value", batch.float().mean(), **self.options)
        return batch.float().mean()


def attached(module: TrainingModule) -> MetricStore:
    state = RunState()
    state.stage = "train"
    store = MetricStore(state, SingleDevice(), None)
    module.__dict__["_metric_store"] = store
    store.enter(phases.TRAIN_BATCH)
    return store


def run(module: TrainingModule, *pieces: Tensor) -> tuple[Any, list[float], MetricStore]:
    """Run the step on pieces of a batch; return what is taken and the store after it is put."""
    store = attached(module)
    step = JoiningStep(module.training_step, "training_step", module, store)
    store.batch = torch.cat(pieces)
    for piece in pieces:
        step(piece, 0)
    logged, values = step.take()
    step.put(logged, torch.tensor([float(v) for v in values], dtype=torch.float64))
    return logged, [float(v) for v in values], store


FIRST, SECOND = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 4.0), ("sum", 12.0), ("min", 2.0), ("max", 10.0)])
def test_pieces_are_joined_by_the_reduction_and_their_samples(reduction: str, expected: float) -> None:
    _, values, store = run(Logger(reduce_fx=reduction), FIRST, SECOND)
    assert values == [expected]
    assert store.callback_metrics()["value"] == expected


def test_a_given_batch_size_weighs_and_is_summed() -> None:
    logged, values, store = run(Logger(batch_size=5, on_epoch=True), FIRST, SECOND)
    assert values == [6.0]
    assert logged[0].batch_size == 10
    store.end_epoch()
    (result,) = store.finish_epoch()
    assert float(result[2]) == 6.0


def test_epoch_means_weigh_the_whole_batch() -> None:
    module = Logger(on_step=False, on_epoch=True)
    _, _, store = run(module, FIRST, SECOND)
    step = JoiningStep(module.training_step, "training_step", module, store)
    store.batch = torch.tensor([6.0])
    store._sized = None
    step(store.batch, 1)
    logged, values = step.take()
    step.put(logged, torch.tensor(values, dtype=torch.float64))
    store.end_epoch()
    (result,) = store.finish_epoch()
    assert float(result[2]) == pytest.approx((16.0 + 6.0) / 5)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 4 / 3), ("max", 10 / 3)])
def test_a_value_of_float64_keeps_its_precision(reduction: str, expected: float) -> None:
    class Exact(Logger):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("value", batch.double().mean() / 3, reduce_fx=reduction)

    _, _, store = run(Exact(), FIRST, SECOND)
    assert store.callback_metrics()["value"].item() == pytest.approx(expected, rel=1e-15)


def test_items_that_a_step_returns_weigh_its_means() -> None:
    class Items(Logger):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "num_items": torch.tensor(len(batch) + 2)}

    _, values, _ = run(Items(), FIRST, SECOND)
    assert values == [pytest.approx((2.0 * 5 + 10.0 * 3) / 8)]


def test_a_piece_that_runs_again_counts_once() -> None:
    module = Logger()
    store = attached(module)
    step = JoiningStep(module.training_step, "training_step", module, store)
    for piece in (FIRST, FIRST, SECOND):
        step(piece, 0)
    assert step.take()[1] == [4.0]
    assert step.take() == ((), [])


def test_nothing_is_logged_until_the_batch_is_complete() -> None:
    module = Logger()
    store = attached(module)
    JoiningStep(module.training_step, "training_step", module, store)(FIRST, 0)
    assert store.callback_metrics() == {}
    module.log("other", 1.0)  # outside of the step: at once
    assert list(store.callback_metrics()) == ["other"]


def test_names_logged_for_some_pieces_only_are_joined_over_those() -> None:
    class Sometimes(Logger):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if len(batch) > 1:
                self.log("large", batch.mean())
            return super().training_step(batch, batch_idx)

    logged, values, _ = run(Sometimes(), FIRST, SECOND)
    assert dict(zip([entry.name for entry in logged], values, strict=True)) == {"large": 2.0, "value": 4.0}


def test_what_cannot_be_logged_is_refused_where_it_is_logged() -> None:
    class Wrong(Logger):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("value", batch)

    with pytest.raises(ValueError, match=r"got a tensor of shape \(3,\)"):
        run(Wrong(), FIRST, SECOND)
