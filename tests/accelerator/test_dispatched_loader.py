"""One process reads, all get their rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.accelerator.dispatched_loader import cut, deal
from paceline.accelerator.loaders import DataLoaderConfiguration, PreparedLoader, prepare_data_loader
from paceline.accelerator.operations import gather_for_metrics
from paceline.strategies import DDPStrategy


def joined() -> DDPStrategy:
    strategy = DDPStrategy()
    strategy.place([torch.device("cpu")] * 2)
    strategy.setup_environment()
    return strategy


class Lengths(IterableDataset):
    """Rows of growing length, with a number drawn for each; writes down what it was asked for."""

    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at, self.read = count, fails_at, 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            self.read += 1
            if index == self.fails_at:
                raise OSError("the line is down")
            yield torch.tensor([index, random.random()])


def growing(rows: list[Tensor]) -> dict[str, Any]:
    """A batch whose second dimension depends on its rows."""
    wide = torch.nn.functional.pad(torch.stack(rows), (0, int(rows[0][0])))
    return {"x": wide, "names": [f"row {int(row[0])}" for row in rows]}


def test_u14_ranks_get_batches_of_different_shapes_and_only_one_rank_reads() -> None:
    def read(split: bool, count: int) -> Any:
        strategy = joined()
        data = Lengths(count)
        config = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
        loader = prepare_data_loader(DataLoader(data, 2, collate_fn=growing), strategy, config)
        found = []
        for batch in loader:
            joint = gather_for_metrics({"i": batch["x"][:, 0]}, strategy, loader)["i"].tolist()
            names = gather_for_metrics(batch["names"], strategy, loader)
            found.append((tuple(batch["x"].shape), joint, names, loader.end_of_dataloader, loader.share))
        return found, data.read

    def both(count: int) -> Any:
        return read(False, count), read(True, count)

    for count in (5, 7, 8):
        (first, second) = ranks(2, both, count)
        for (mine, reads), (others, none) in zip(first, second, strict=True):
            assert (reads, none) == (count, 0)
            numbers = [i for _, joint, _, _, _ in mine for i in joint]
            assert numbers == list(range(count))
            assert [n for _, _, names, _, _ in mine for n in names] == [f"row {i}" for i in range(count)]
            assert [end for *_, end, _ in mine] == [False] * (len(mine) - 1) + [True]
            assert [entry[1:4] for entry in mine] == [entry[1:4] for entry in others]
            shares = [mine[-1][4], others[-1][4]]
            assert sum(shares) == 2.0
        assert first[0][0][0][0] == (2, 2)
        assert second[0][0][0][0] == (2, 4)


class Closed(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("the line is down")


@pytest.mark.parametrize("data", [Lengths(9, fails_at=4), Closed()], ids=["in the middle", "at once"])
def test_a_failure_of_the_reader_is_an_error_on_all_ranks(data: Any) -> None:
    def read() -> None:
        strategy = joined()
        list(prepare_data_loader(DataLoader(data, 1), strategy, DataLoaderConfiguration(dispatch_batches=True)))

    with pytest.raises(RanksError) as caught:
        ranks(2, read)
    assert isinstance(caught.value.errors[0], OSError)
    assert "Rank 0, which reads the data for all ranks (dispatch_batches=True), failed: OSError" in str(
        caught.value.errors[1]
    )


class Items(Dataset):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random()])


def test_u6_a_dispatched_pass_goes_on_to_the_bit() -> None:
    def read(stream: bool) -> Any:
        strategy = joined()

        def make(seed: int) -> PreparedLoader:
            data = Lengths(13) if stream else Items()
            source = DataLoader(data, 2, shuffle=not stream)  # type: ignore[arg-type]
            return prepare_data_loader(source, strategy, DataLoaderConfiguration(dispatch_batches=True), seed=seed)

        random.seed(1)
        loader = make(1)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        whole = [*iterator, *loader]
        random.seed(2)
        fresh = make(2)
        fresh.load_state_dict(state)
        return len(whole), all(torch.equal(a, b) for a, b in zip(whole, [*fresh, *fresh], strict=True)), whole

    for stream in (False, True):
        (count, same, mine), (_, also_same, others) = ranks(2, read, stream)
        assert (count, same, also_same) == (7, True, True)
        assert not torch.equal(mine[0], others[0])


def test_dispatched_map_data_know_their_length_and_drop_last() -> None:
    def read() -> Any:
        strategy = joined()
        config = DataLoaderConfiguration(dispatch_batches=True)
        found = []
        for count, drop_last in ((13, False), (11, True)):
            loader = prepare_data_loader(DataLoader(range(count), 2, drop_last=drop_last), strategy, config)  # type: ignore
            found.append((len(loader), [batch.tolist() for batch in loader], loader.total_batch_size))
        return found

    (whole, dropped), (other, other_dropped) = ranks(2, read)
    assert whole == (4, [[0, 1], [4, 5], [8, 9], [12]], 4)
    assert other == (4, [[2, 3], [6, 7], [10, 11], [12]], 4)
    assert dropped == (2, [[0, 1], [4, 5]], 4)
    assert other_dropped == (2, [[2, 3], [6, 7]], 4)


def test_batches_are_cut_for_the_ranks_that_have_none() -> None:
    one, two = {"x": torch.arange(3)}, {"x": torch.arange(3, 5)}
    dealt = deal([one, two], 4)
    assert [part.batch["x"].tolist() for part in dealt] == [[0, 1], [2], [3], [4]]
    assert [part.share for part in dealt] == [1.6, 0.8, 0.8, 0.8]
    single = deal([torch.tensor([7])], 3)
    assert [(part.batch.tolist(), part.share) for part in single] == [([7], 3.0), ([7], 0.0), ([7], 0.0)]


def test_what_cannot_be_cut_is_repeated_but_refused_where_batches_are_split() -> None:
    batch = ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(1, 4)}])
    assert [rows for _, rows in cut(batch, 2)] == [1, 0]
    with pytest.raises(ValueError, match="tensors that differ in the size of the first dimension"):
        cut(batch, 2, must=True)
    names = cut({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, 2)
    assert [part["names"] for part, _ in names] == [["a", "b"], ["c", "d"]]
