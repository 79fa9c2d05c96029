"""Loaders, DataModule, hyperparameters and transfer in a real fit."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from paceline import Callback, CombinedLoader, DataModule, Trainer, TrainingModule
from paceline.data.batches import Batches
from paceline.data.sharding import shard_evaluation, shard_training


class Seen(TrainingModule):
    """Notes what its steps are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch)
        return self.weight.sum()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SeenValidating(Seen):
    """The same with validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append((batch, batch_idx, dataloader_idx))


@pytest.fixture
def trainer(quiet: dict[str, Any]) -> Callable[..., Trainer]:
    """A Trainer with everything optional switched off."""
    return lambda **options: Trainer(**{**quiet, "max_epochs": 1, "num_sanity_val_steps": 0, **options})


@pytest.fixture
def trained(trainer: Callable[..., Trainer]) -> Callable[..., list[Any]]:
    """The batches that a fit trains on, as lists of numbers."""

    def train(loaders: Any, **options: Any) -> list[Any]:
        module = Seen()
        trainer(**options).fit(module, loaders)
        return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in module.trained]

    return train


def numbers(count: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(count), **{"batch_size": 2, **options})  # type: ignore[arg-type]


def test_the_number_of_workers_does_not_change_what_is_trained_on(trained):
    orders = []
    for workers in (0, 2):
        torch.manual_seed(3)
        orders.append(trained(numbers(12, shuffle=True, num_workers=workers), max_epochs=2))
    assert orders[0] == orders[1]
    assert orders[0][:6] != orders[0][6:]
    assert sorted(chain.from_iterable(orders[0][:6])) == list(range(12))


def test_each_training_batch_comes_once_also_without_a_length(trained):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    assert trained(DataLoader(Stream(), batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert trained([torch.tensor([1]), torch.tensor([2])]) == [[1], [2]]
    assert trained((torch.tensor([i]) for i in range(3)), limit_train_batches=2) == [[0], [1]]


def test_training_from_several_loaders_goes_on_until_the_longest_ends(trained):
    batches = trained({"a": numbers(4), "b": [torch.tensor([7])]})
    assert [(batch["a"].tolist(), batch["b"].tolist()) for batch in batches] == [([0, 1], [7]), ([2, 3], [7])]
    batches = trained(CombinedLoader([numbers(4), numbers(2)], "max_size"))
    assert [[None if b is None else b.tolist() for b in batch] for batch in batches] == [
        [[0, 1], [0, 1]],
        [[2, 3], None],
    ]


def test_training_from_loaders_in_sequence_is_refused_and_its_batches_are_counted(trainer):
    one = trainer()
    with pytest.raises(ValueError, match="mode='sequential'"):
        one.fit(Seen(), CombinedLoader([numbers(6), numbers(4)], "sequential"))
    assert one.num_training_batches == 5


@pytest.mark.parametrize(
    "loaders",
    [
        [numbers(4), numbers(2)],
        {"a": numbers(4), "b": numbers(2)},
        CombinedLoader([numbers(4), numbers(2)], "sequential"),
    ],
)
def test_several_validation_loaders_run_one_after_the_other(loaders, trainer):
    module = SeenValidating()
    trainer().validate(module, loaders, verbose=False)
    seen = [(batch.tolist(), batch_idx, dataloader_idx) for batch, batch_idx, dataloader_idx in module.validated]
    assert seen == [([0, 1], 0, 0), ([2, 3], 1, 0), ([0, 1], 0, 1)]


def test_combined_validation_gives_combined_batches(trainer):
    module = SeenValidating()
    trainer().validate(module, CombinedLoader({"a": numbers(4), "b": numbers(2)}, "min_size"), verbose=False)
    ((batch, batch_idx, dataloader_idx),) = module.validated
    assert {key: value.tolist() for key, value in batch.items()} == {"a": [0, 1], "b": [0, 1]}
    assert (batch_idx, dataloader_idx) == (0, 0)


def test_overfitting_takes_the_same_first_batches_in_order_for_both_stages(trainer):
    module = SeenValidating()
    trainer(overfit_batches=2, max_epochs=2).fit(module, numbers(8, shuffle=True), numbers(8, shuffle=True))
    assert [batch.tolist() for batch in module.trained] == [[0, 1], [2, 3]] * 2
    assert [batch.tolist() for batch, _, _ in module.validated] == [[0, 1], [2, 3]] * 2


def test_an_empty_loader_is_an_error_that_says_which(trained, trainer):
    with pytest.raises(ValueError, match="train_dataloader is empty"):
        trained(DataLoader(TensorDataset(torch.zeros(0, 2))))
    with pytest.raises(ValueError, match="val_dataloader is empty"):
        trainer().validate(SeenValidating(), DataLoader(TensorDataset(torch.zeros(0, 2))), verbose=False)


@pytest.mark.parametrize("limit", [1, None])
def test_no_worker_is_left_after_a_fit(limit, trained):
    before = set(multiprocessing.active_children())
    trained(numbers(20, num_workers=2), limit_train_batches=limit)
    assert not set(multiprocessing.active_children()) - before


def test_no_worker_is_left_after_an_exception(trainer):
    class Fails(Seen):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    before = set(multiprocessing.active_children())
    with pytest.raises(RuntimeError, match="on purpose") as error:
        trainer().fit(Fails(), numbers(20, num_workers=2))
    assert error.value is not None
    assert not set(multiprocessing.active_children()) - before


class Digits(DataModule):
    """A data module that notes its hooks."""

    def __init__(self, size: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[Any] = []
        self.seen_trainer: Any = None

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(("setup", stage))
        self.seen_trainer = self.trainer

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(float(self.hparams.size))), batch_size=2)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * self.hparams.scale]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(("transfer", device.type))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict

    def teardown(self, stage: str) -> None:
        self.calls.append(("teardown", stage))

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(type(exception).__name__)


def test_a_data_module_gives_the_data_and_its_hooks_are_called_in_order(trainer):
    data = Digits()
    module, run = Seen(), trainer()
    run.fit(module, data)
    assert data.calls == ["prepare_data", ("setup", "fit"), *[("transfer", "cpu")] * 2, ("teardown", "fit")]
    assert [batch.tolist() for batch in module.trained] == [[1.0, 3.0], [5.0, 7.0]]
    assert data.seen_trainer is run


def test_a_data_module_hears_of_an_exception(trainer):
    class Fails(Seen):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    data = Digits()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer().fit(Fails(), datamodule=data)
    assert data.calls[-2:] == ["RuntimeError", ("teardown", "fit")]


def test_transfer_hooks_see_the_runs_input_dtype(trainer):
    data = Digits()
    module = Seen()
    trainer(precision="64-true").fit(module, datamodule=data)
    assert module.trained[0].dtype == torch.float64


def test_a_loader_carried_by_the_instance_counts(trainer):
    data = DataModule()
    data.train_dataloader = lambda: numbers(4)  # type: ignore[method-assign]
    module = Seen()
    trainer().fit(module, datamodule=data)
    assert len(module.trained) == 2


def test_data_sets_are_enough(trainer):
    data = DataModule.from_datasets(range(4), range(2), predict_dataset=range(6), batch_size=2)
    module, run = SeenValidating(), trainer()
    run.fit(module, datamodule=data)
    assert sorted(torch.cat(module.trained).tolist()) == [0, 1, 2, 3]
    assert [batch.tolist() for batch, _, _ in module.validated] == [[0, 1]]
    assert [batch.tolist() for batch in run.predict(module, datamodule=data)] == [[0, 1], [2, 3], [4, 5]]


class Saved(Seen):
    def __init__(self, lr: float = 0.1, sizes: tuple[int, ...] = (1, 2), conf: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_of_both_go_through_a_checkpoint(tmp_path, trainer):
    class Data(Digits):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

        def train_dataloader(self):
            return tiny_loader()

    module, data, run = Saved(0.3, conf={"a": {"b": 1}}), Data(size=6), trainer()
    run.fit(module, datamodule=data)
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = Saved.load_from_checkpoint(tmp_path / "run.ckpt", lr=0.7)
    assert again.hparams == {"lr": 0.7, "sizes": (1, 2), "conf": {"a": {"b": 1}}}
    assert torch.equal(again.weight, module.weight)
    assert again.weight != 0
    data_again = Data.load_from_checkpoint(tmp_path / "run.ckpt", scale=5.0)
    assert data_again.hparams == {"size": 6, "scale": 5.0}
    assert data_again.loaded["calls"] >= 2


def test_a_resumed_run_sees_the_orders_that_the_uninterrupted_run_sees(tmp_path, trainer):
    torch.manual_seed(1)
    whole = Seen()
    trainer(max_epochs=4).fit(whole, numbers(12, shuffle=True))
    torch.manual_seed(1)
    first, run = Seen(), trainer(max_epochs=2)
    run.fit(first, numbers(12, shuffle=True))
    run.save_checkpoint(tmp_path / "two.ckpt")
    torch.manual_seed(99)
    second = Seen()
    trainer(max_epochs=4).fit(second, numbers(12, shuffle=True), ckpt_path=tmp_path / "two.ckpt")
    orders = [batch.tolist() for batch in whole.trained]
    assert [batch.tolist() for batch in first.trained + second.trained] == orders


class SaveAfter(Callback):
    """Saves after so many batches of the run."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches == self.batches:
            trainer.save_checkpoint(self.path)


def orders_of_a_resumed_run(trainer: Any, make: Callable[[int], Any], saved_after: int, path: Path) -> Any:
    """The batches of a run, and those of one that was saved on the way together with the one that resumed from it."""
    whole, resumed = Seen(), Seen()
    trainer(max_epochs=3, callbacks=SaveAfter(saved_after, path)).fit(whole, make(1))
    trainer(max_epochs=3).fit(resumed, make(2), ckpt_path=path)
    expected = [batch.tolist() for batch in whole.trained]
    return expected, expected[:saved_after] + [batch.tolist() for batch in resumed.trained]


@pytest.mark.parametrize("saved_after", [3, 6, 8])
def test_a_resumed_run_goes_on_with_the_generator_of_the_users(tmp_path, trainer, saved_after):
    def loader(seed: int) -> DataLoader[Any]:
        return numbers(12, shuffle=True, generator=torch.Generator().manual_seed(seed))

    expected, together = orders_of_a_resumed_run(trainer, loader, saved_after, tmp_path / "on_the_way.ckpt")
    assert together == expected


class Positioned:
    """A loader of four batches that knows its own position."""

    def __init__(self, seed: int) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = self.position % 4
        for index in range(start, 4):
            self.position = index + 1
            yield torch.tensor([index])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("saved_after", [3, 6])
def test_a_resumed_run_goes_on_where_a_stateful_loader_is(tmp_path, trainer, saved_after):
    expected, together = orders_of_a_resumed_run(trainer, Positioned, saved_after, tmp_path / "on_the_way.ckpt")
    assert together == expected == [[0], [1], [2], [3]] * 3


class Strict:
    """Batches out of ``zip(strict=True)``, which raises when it is read past the length."""

    def __init__(self, count: int = 3) -> None:
        self.count, self.closed = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        try:
            for number, _ in zip(torch.arange(self.count), range(self.count + 1), strict=True):
                yield number
        finally:
            self.closed += 1


class StrictStream(Strict, IterableDataset[Any]):
    """The same as a data set; several workers deal its samples out among themselves."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        every, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for number, sample in enumerate(super().__iter__()):
            if number % every == first:
                yield sample


class StrictSampler(Strict):
    def __iter__(self) -> Iterator[Any]:
        return ([int(number)] for number in super().__iter__())


def stream(count: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(StrictStream(count), batch_size=None, **options)


ENDS: dict[str, Callable[[], Any]] = {
    "iterable": Strict,
    "stream": stream,
    "worker": lambda: stream(num_workers=1),
    "workers": lambda: stream(4, num_workers=2, persistent_workers=True),
    "sampler": lambda: DataLoader(range(3), batch_sampler=StrictSampler()),  # type: ignore[arg-type]
    "min_size": lambda: CombinedLoader([Strict(3), Strict(4)], "min_size"),
    "max_size": lambda: CombinedLoader([Strict(3), stream(4)], "max_size"),
    "max_size_cycle": lambda: CombinedLoader([Strict(3), Strict(4)], "max_size_cycle"),
    "sequential": lambda: CombinedLoader([Strict(3), Strict(4)], "sequential"),
}


@pytest.mark.parametrize("name", ENDS)
def test_no_stage_asks_a_loader_for_more_batches_than_its_length(name: str, trainer: Callable[..., Trainer]) -> None:
    class OfIterator(Seen):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(*next(dataloader_iter)[:2])

    class Evaluates(SeenValidating):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.validation_step(batch, batch_idx)

    loader = ENDS[name]()
    for module in (Seen(), OfIterator()) if name != "sequential" else ():
        trainer(max_epochs=2).fit(module, loader)
        assert len(module.trained) == 2 * len(loader)
    module = Evaluates()
    runs = trainer()
    for stage in (runs.validate, runs.test):
        stage(module, loader, verbose=False)
    assert len(module.validated) == 2 * len(loader)
    predicted: Any = runs.predict(Seen(), loader)
    assert len([batch for one in predicted for batch in one] if name == "sequential" else predicted) == len(loader)


def test_batch_hooks_of_a_step_that_fetches_get_the_batch_that_was_fetched_last(
    trainer: Callable[..., Trainer],
) -> None:
    told: list[tuple[str, Any, int]] = []

    class OfIterator(Seen):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            told.append(("step", batch.item(), batch_idx))
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            told.append(("start", None if batch is None else batch.item(), batch_idx))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            told.append(("end", batch.item(), batch_idx))

    trainer(max_epochs=1).fit(OfIterator(), DataLoader(range(2)))  # type: ignore[arg-type]
    first = [("start", None, 0), ("step", 0, 0), ("end", 0, 0)]
    assert told == [*first, ("start", 0, 0), ("step", 1, 1), ("end", 1, 1)]


def test_generators_and_workers_of_loaders_that_are_not_read_past_their_length_end(
    trainer: Callable[..., Trainer],
) -> None:
    for combined in (False, True):
        loader = Strict()
        trainer(max_epochs=2).fit(Seen(), CombinedLoader([loader]) if combined else loader)
        assert loader.closed == 2
    sampler = StrictSampler()
    trainer(max_epochs=2).fit(Seen(), DataLoader(range(3), batch_sampler=sampler))  # type: ignore[arg-type]
    assert sampler.closed == 2
    before = multiprocessing.active_children()
    trainer(max_epochs=2).fit(Seen(), stream(num_workers=2))
    assert multiprocessing.active_children() == before


class Indices(Sampler[Any]):
    """Says a length, yields so many items, and records how many it was asked for."""

    def __init__(self, length: int, items: list[Any]) -> None:
        self.length, self.items, self.asked = length, items, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for self.asked, item in enumerate(self.items, 1):  # noqa: B020
            yield item
        raise ValueError("past the end")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["sampler", "in_memory", "batches", "single", "stream"])
def test_what_raises_past_its_length_is_not_blamed(name: str, workers: int, trained: Any) -> None:
    data: Any = range(5)
    make: dict[str, Callable[[], DataLoader[Any]]] = {
        "sampler": lambda: DataLoader(data, 2, sampler=Indices(5, [*range(5)]), num_workers=workers),
        "in_memory": lambda: DataLoader(torch.arange(5), 2, sampler=Indices(5, [*range(5)]), num_workers=workers),  # type: ignore[arg-type]
        "batches": lambda: DataLoader(data, batch_sampler=Indices(3, [[0, 1], [2, 3], [4]]), num_workers=workers),
        "single": lambda: DataLoader(
            [torch.tensor([i]) for i in range(5)],  # type: ignore[arg-type]
            batch_size=None,
            sampler=Indices(5, [*range(5)]),
            num_workers=workers,
        ),
        "stream": lambda: DataLoader(StrictStream(4), batch_size=2, num_workers=workers),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*past the end|.*is shorter|.*length of")
        found = trained(make[name]())
    expected = [[i] for i in range(5)] if name == "single" else [[0, 1], [2, 3], [4]]
    assert found == ([[0, 1], [2, 3]] if name == "stream" else expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_of_the_users_is_not_asked_past_its_length(workers: int) -> None:
    for start in (0, 1):
        sampler = Indices(4, [*range(8)])
        loader: Any = DataLoader(range(8), 2, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        assert [batch.tolist() for batch in Batches(loader, skip=start)] == [[0, 1], [2, 3]][start:]
        assert sampler.asked == 4


def test_a_sampler_that_raises_past_its_length_is_shared_by_processes() -> None:
    for make in (
        lambda: DataLoader(range(5), 1, sampler=Indices(5, [*range(5)])),  # type: ignore[arg-type]
        lambda: DataLoader(range(5), batch_sampler=Indices(5, [[i] for i in range(5)])),  # type: ignore[arg-type]
    ):
        for split in (shard_training, shard_evaluation):
            for seed in (None, 1):
                found = []
                for rank in range(2):
                    part = split(make(), rank, 2)
                    part.batch_sampler.order_seed = seed
                    found += [int(batch) for batch in Batches(part)]
                assert sorted({*found}) == list(range(5))


class FailsAt(StrictStream):
    """Raises in a sample within its length."""

    def __iter__(self) -> Iterator[Any]:
        yield from islice(super().__iter__(), self.count - 1)
        raise ValueError("within")

    def __getitem__(self, index: int) -> Any:
        if index == self.count - 1:
            raise ValueError("within")
        return torch.tensor(index)


class FailsAtIndex(Dataset[Any]):
    __getitem__ = FailsAt.__getitem__
    count = 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_last_batch_within_the_length_is_raised(workers: int, ahead: bool) -> None:
    for loader in (
        DataLoader(FailsAt(4), batch_size=None, num_workers=workers),
        DataLoader(FailsAtIndex(), 1, sampler=Indices(4, [*range(4)]), num_workers=workers),
        DataLoader(FailsAtIndex(), 1, sampler=range(4), num_workers=workers),
    ):
        found = []
        with pytest.raises(ValueError, match="within"), closing(Batches(loader, lookahead=ahead)) as batches:
            found.extend(map(int, batches))
        assert found == [0, 1, 2]


class Listed(Indices):
    """Iterates over a list, whose end can be seen without running anyone's code."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class ListedStream(Listed, IterableDataset[Any]):
    """The same as a data set."""


@pytest.mark.parametrize("name", ["sampler", "batches", "stream", "own"])
def test_more_batches_than_the_length_are_an_error_where_the_end_can_be_seen(name: str, trained: Any) -> None:
    loaders: dict[str, Callable[[], Any]] = {
        "sampler": lambda: DataLoader(range(8), 2, sampler=Listed(4, [*range(8)])),  # type: ignore[arg-type]
        "batches": lambda: DataLoader(range(8), batch_sampler=Listed(2, [[0], [1], [2]])),  # type: ignore[arg-type]
        "stream": lambda: DataLoader(ListedStream(4, [*range(8)]), batch_size=2),  # type: ignore[arg-type]
        "own": lambda: Listed(2, [torch.tensor([i]) for i in range(3)]),
    }
    with pytest.raises(RuntimeError, match="has length 2, but yielded at least 3"):
        trained(loaders[name]())


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_processes_share_are_not_read_past_their_length(workers: int) -> None:
    for count in (4, 5):
        for split in (shard_training, shard_evaluation):
            parts = [split(stream(count, num_workers=workers), rank, 2) for rank in range(2)]
            found = [int(batch) for part in parts for batch in Batches(part)]
            assert sorted({*found}) == list(range(count))


class Asked(DataModule):
    """Counts how often its loaders are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def train_dataloader(self) -> Any:
        self.asked.append("train")
        return numbers(4)

    def val_dataloader(self) -> Any:
        self.asked.append("val")
        return numbers(4)


@pytest.mark.parametrize(
    ("options", "validates"),
    [
        ({"check_val_every_n_epoch": 3, "max_epochs": 2}, False),
        ({"check_val_every_n_epoch": 2, "max_epochs": 2}, True),
        ({"check_val_every_n_epoch": 5, "max_epochs": -1, "max_steps": 22}, True),
        ({"check_val_every_n_epoch": None, "val_check_interval": 2}, True),
        ({"limit_val_batches": 0}, False),
        ({"limit_train_batches": 0}, False),
    ],
)
def test_validation_loaders_are_asked_for_early_and_only_where_an_epoch_validates(
    options: dict[str, Any], validates: bool, trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    class Starts(Callback):
        seen: tuple[str, ...] = ()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen = tuple(data.asked)

    for steps in (0, 2):
        data, module, starts = Asked(), SeenValidating(), Starts()
        trainer(num_sanity_val_steps=steps, callbacks=[starts], **options).fit(module, datamodule=data)
        assert data.asked.count("val") == validates
        assert bool(module.validated) == validates
        assert not validates or "val" in starts.seen


def test_a_resumed_fit_asks_for_validation_loaders_where_its_remaining_epochs_validate(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    every_second: dict[str, Any] = {"check_val_every_n_epoch": 2}
    for ended, epochs, expected in ((2, 3, False), (2, 4, True), (1, 2, True)):
        first = trainer(max_epochs=ended, **every_second)
        first.fit(SeenValidating(), datamodule=Asked())
        first.save_checkpoint(tmp_path / "x.ckpt")
        data = Asked()
        trainer(max_epochs=epochs, **every_second).fit(SeenValidating(), datamodule=data, ckpt_path=tmp_path / "x.ckpt")
        assert ("val" in data.asked) == expected


@pytest.mark.parametrize("entry", ["fit", "validate", "predict"])
@pytest.mark.parametrize("combined", [False, True])
def test_no_worker_process_is_left_when_a_run_has_ended(trainer: Callable[..., Trainer], entry: str, combined: bool):
    """Persistent ones too: the garbage collector would wait five seconds for each."""
    loaders = [DataLoader(torch.ones(4, 1), num_workers=2, persistent_workers=True) for _ in range(1 + combined)]
    given = CombinedLoader(loaders, "min_size") if combined else loaders[0]
    before = set(multiprocessing.active_children())
    module = SeenValidating()
    for _ in range(2):  # a second run starts new ones
        getattr(trainer(max_epochs=2), entry)(module, given)
        assert set(multiprocessing.active_children()) <= before
    seen = {"fit": 16, "validate": 8, "predict": 0}[entry]
    assert len(module.trained) + len(module.validated) == seen
