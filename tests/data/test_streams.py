"""What the loaders of a run do with the iterable data sets of other packages, here with small copies of their parts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from paceline import messages
from paceline.data.loaders import load_loader_state, loader_state
from paceline.data.sharding import shard_training


class Stream(IterableDataset[Any]):
    """Twelve numbers and a saved position."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.position, 12):
            self.position = number + 1
            yield number
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Counted(Stream):
    """Its state is for the loader of its own package, which passes the number of samples."""

    def state_dict(self, num_samples: int, from_beginning: bool = False) -> dict[str, Any]:  # type: ignore[override]
        return {"position": num_samples}


class Global(Stream):
    """Its state counts the samples of all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "sample_in_epoch": self.position, "num_canonical_nodes": 1}


class Named(Stream):
    """Its methods call the object something else."""

    def state_dict(s) -> dict[str, Any]:  # noqa: N805
        return {"position": s.position}


def split_by_node(source: Any) -> Any:
    return source


def resumes(stream: Stream, **how: bool) -> bool:
    source = DataLoader(stream, 2)
    next(iter(source))
    return load_loader_state(DataLoader(type(stream)(), 2), loader_state(source), mid_epoch=True, **how)


def test_a_state_that_needs_counts_is_not_asked_for_and_the_reader_is_told() -> None:
    with pytest.warns(messages.PacelineWarning, match="Counted .* only with its own package's loader.*DataLoader"):
        assert loader_state(DataLoader(Counted(), 2)) is None
    messages.forget()
    shard = shard_training(DataLoader(Counted(), 2), 0, 2)
    with pytest.warns(messages.PacelineWarning, match="^A Counted of"):
        loader_state(shard)
    assert resumes(Stream())
    assert resumes(Named())


def test_a_position_that_leaves_out_a_shuffle_buffer_is_not_used() -> None:
    class BufferShuffledExamplesIterable:
        ex_iterable = None

    shuffled = SimpleNamespace(ex_iterable=None, ex_iterables=[BufferShuffledExamplesIterable()])
    assert loader_state(DataLoader(Stream(_ex_iterable=SimpleNamespace(ex_iterable=shuffled)), 2)) is None
    assert loader_state(DataLoader(Stream(_ex_iterable=SimpleNamespace(ex_iterable=None)), 2)) is not None


def test_a_position_that_counts_all_ranks_is_used_by_another_number_of_ranks() -> None:
    assert resumes(Global(), same_ranks=False)
    assert not resumes(Stream(), same_ranks=False)
    assert not resumes(Global(), restarts=True)


@pytest.mark.parametrize(
    ("attributes", "workers", "why"),
    [
        ({"_distributed": SimpleNamespace(rank=0, world_size=1)}, 0, "Stream itself decides"),
        ({"pipeline": [len, split_by_node]}, 0, "Stream itself decides"),
        ({}, 2, "2 workers take turns reading Stream"),
    ],
    ids=["datasets", "webdataset", "workers"],
)
def test_a_position_that_fits_another_number_of_ranks_only_roughly_is_told(
    attributes: dict[str, Any], workers: int, why: str, recwarn: pytest.WarningsRecorder
) -> None:
    for alike in (DataLoader(Stream(), 2, num_workers=1), [[1]], Stream(pipeline=[DataLoader(Stream(), 2)])):
        load_loader_state(alike, None, mid_epoch=True, same_ranks=False)
    assert not recwarn
    loader = DataLoader(Stream(**attributes), 2, num_workers=workers)
    with pytest.warns(messages.PacelineWarning, match=why):
        load_loader_state(loader, None, mid_epoch=True, same_ranks=False)


def test_so_is_one_in_a_web_loader_which_is_no_data_loader() -> None:
    loader = Stream(pipeline=[DataLoader(Stream(pipeline=[split_by_node]), 2)])
    with pytest.warns(messages.PacelineWarning, match="Stream itself decides"):
        load_loader_state(loader, None, mid_epoch=True, same_ranks=False)


def test_shards_that_webdataset_splits_are_not_split_again() -> None:
    loader = DataLoader(Stream(pipeline=[len, split_by_node]), 2)
    assert shard_training(loader, 0, 2) is loader
    assert shard_training(DataLoader(Stream(pipeline=[len]), 2), 0, 2) is not loader


@pytest.mark.parametrize(
    "attributes",
    [{"distributed_env": SimpleNamespace(world_size=1)}, {"_unique_rank_world": SimpleNamespace(num_ranks=1)}],
    ids=["litdata", "mosaic"],
)
def test_data_that_were_made_before_the_processes_are_an_error(attributes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Stream was created before this run's processes started.*train_dataloader"):
        shard_training(DataLoader(Stream(**attributes), 2), 0, 2)


def test_data_that_were_split_among_one_process_are_split() -> None:
    loader = DataLoader(Stream(_distributed=SimpleNamespace(rank=0, world_size=1)), 2)
    assert [batch.tolist() for batch in shard_training(loader, 1, 2)] == [[2, 3], [6, 7], [10, 11]]
