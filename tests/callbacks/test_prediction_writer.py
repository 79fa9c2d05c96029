from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from paceline import Trainer
from paceline.callbacks import BasePredictionWriter


class Writer(BasePredictionWriter):
    def __init__(self, write_interval: Any = "batch") -> None:
        super().__init__(write_interval)
        self.batches: list[tuple[Any, ...]] = []
        self.epochs: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.batches.append((prediction, batch_indices, batch[0], batch_idx, loader))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


class Several(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]) + dataloader_idx


def predict(writer: BasePredictionWriter, loaders: Any, **more: Any) -> Any:
    trainer = Trainer(callbacks=[writer], logger=False, enable_progress_bar=False, accelerator="cpu")
    return trainer.predict(Several(), loaders, **more)


def test_each_batch_is_written_with_the_places_of_its_samples() -> None:
    writer = Writer("batch")
    predictions = predict(writer, tiny_loader(3, batch_size=2))
    assert [(indices, idx, loader) for _, indices, _, idx, loader in writer.batches] == [
        ([0, 1], 0, 0),
        ([2, 3], 1, 0),
        ([4, 5], 2, 0),
    ]
    assert all(torch.equal(written[0], kept) for written, kept in zip(writer.batches, predictions, strict=True))
    assert writer.epochs == []


def test_the_epoch_is_written_as_predict_returns_it() -> None:
    writer = Writer("epoch")
    predictions = predict(writer, tiny_loader(3))
    ((written, indices),) = writer.epochs
    assert all(torch.equal(a, b) for a, b in zip(written, predictions, strict=True))
    assert indices == [[[0, 1], [2, 3], [4, 5]]]
    assert writer.batches == []


def test_several_loaders_make_a_list_for_each() -> None:
    writer = Writer("batch_and_epoch")
    predictions = predict(writer, [tiny_loader(2), tiny_loader(1)])
    ((written, indices),) = writer.epochs
    assert [len(of_loader) for of_loader in written] == [2, 1]
    assert all(torch.equal(a, b) for w, p in zip(written, predictions, strict=True) for a, b in zip(w, p, strict=True))
    assert indices == [[[0, 1], [2, 3]], [[0, 1]]]
    assert [(idx, loader) for *_, idx, loader in writer.batches] == [(0, 0), (1, 0), (0, 1)]


def test_the_epoch_is_written_also_when_predict_returns_nothing() -> None:
    writer = Writer("epoch")
    assert predict(writer, tiny_loader(3), return_predictions=False) is None
    assert len(writer.epochs[0][0]) == 3


def test_writing_by_batch_keeps_no_prediction() -> None:
    writer = Writer("batch")
    assert predict(writer, tiny_loader(3), return_predictions=False) is None
    assert writer.epochs == []
    assert all(kept == [] for kept in writer._predictions)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_hooks_of_a_subclass_are_called_at_every_interval(interval: Any) -> None:
    class Mine(Writer):
        called: tuple[str, ...] = ()

        def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
            self.called += ("start",)
            super().on_predict_start(trainer, pl_module)

        def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.called += ("epoch_end",)
            super().on_predict_epoch_end(trainer, pl_module)

    writer = Mine(interval)
    assert writer.interval == interval
    assert (writer.interval.on_batch, writer.interval.on_epoch) == ("batch" in interval, "epoch" in interval)
    predict(writer, tiny_loader(2))
    assert writer.called == ("start", "epoch_end")
    assert (len(writer.batches), len(writer.epochs)) == (2 * ("batch" in interval), int("epoch" in interval))


def test_a_writing_method_may_be_carried_by_the_instance() -> None:
    writer = BasePredictionWriter("batch")
    seen: list[int] = []
    writer.write_on_batch_end = lambda *args: seen.append(args[5])  # type: ignore[method-assign]
    predict(writer, tiny_loader(2))
    assert seen == [0, 1]


def test_a_loader_without_batch_sampler_has_no_places() -> None:
    writer = Writer("batch")
    batches = list(tiny_loader(2))
    predict(writer, DataLoader(batches, batch_size=None))
    assert [indices for _, indices, *_ in writer.batches] == [None, None]


def test_files_written_by_batch_hold_every_prediction(tmp_path: Path) -> None:
    class Files(BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
        ) -> None:
            torch.save({"indices": indices, "prediction": prediction}, tmp_path / f"{loader}_{batch_idx}.pt")

    predictions = predict(Files(), tiny_loader(3))
    for batch_idx, expected in enumerate(predictions):
        found = torch.load(tmp_path / f"0_{batch_idx}.pt", weights_only=True)
        assert found["indices"] == [2 * batch_idx, 2 * batch_idx + 1]
        assert torch.equal(found["prediction"], expected)


@pytest.mark.parametrize(
    ("interval", "missing"),
    [("batch", "write_on_batch_end"), ("epoch", "write_on_epoch_end"), ("batch_and_epoch", "write_on_batch_end")],
)
def test_a_writer_without_the_method_its_interval_calls_is_refused_before_anything_runs(
    interval: Any, missing: str
) -> None:
    class Nothing(BasePredictionWriter):
        pass

    with pytest.raises(
        NotImplementedError, match=rf"{interval}.*calls {missing}, but does not define.*Define Nothing\."
    ):
        predict(Nothing(interval), tiny_loader(1))


@pytest.mark.parametrize("interval", ["batches", "step", None])
def test_an_unknown_interval_is_refused_with_the_known_ones(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"Unknown write_interval.*'batch', 'epoch' or 'batch_and_epoch'"):
        Writer(interval)


def test_the_interval_equals_its_string_and_says_what_it_means() -> None:
    interval = BasePredictionWriter("batch_and_epoch").interval
    assert interval == "batch_and_epoch"
    assert (interval.on_batch, interval.on_epoch) == (True, True)
    assert not BasePredictionWriter("epoch").interval.on_batch
    assert not BasePredictionWriter("batch").interval.on_epoch


def test_a_batch_sampler_over_a_range_tells_the_places() -> None:
    writer = Writer("batch")
    sampler = BatchSampler(range(4), 3, drop_last=False)
    predict(writer, DataLoader(TensorDataset(torch.ones(4, 4)), batch_sampler=sampler))
    assert [indices for _, indices, *_ in writer.batches] == [[0, 1, 2], [3]]
