"""What processes exchange, with real ones."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from paceline import messages
from paceline.accelerator import nested_tensors, operations
from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.loaders import DataLoaderConfiguration, prepare_data_loader
from paceline.accelerator.operations import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    gather,
    gather_for_metrics,
    gather_object,
    pad_across_processes,
    reduce,
    split_between_processes,
)
from paceline.strategies import DDPStrategy, Strategy

Pair = namedtuple("Pair", ["left", "right"])


def joined(world: int = 2) -> DDPStrategy:
    strategy = DDPStrategy()
    strategy.place([torch.device("cpu")] * world)
    strategy.setup_environment()
    return strategy


def test_gather_joins_along_the_first_dimension_in_any_structure() -> None:
    def talk() -> Any:
        strategy = joined()
        rank = strategy.global_rank
        data = {
            "a": torch.tensor([[rank, rank]]),
            "b": [torch.tensor(rank * 10.0), (torch.tensor([rank == 1]), None)],
            "c": Pair(torch.ones(2, 3).T * rank, torch.tensor([rank], dtype=torch.bfloat16)),
        }
        return gather(data, strategy)

    for found in ranks(2, talk):
        assert found["a"].tolist() == [[0, 0], [1, 1]]
        assert found["b"][0].tolist() == [0.0, 10.0]
        assert found["b"][1][0].tolist() == [False, True]
        assert found["b"][1][1] is None
        assert type(found["c"]).__name__ == "Pair"
        assert found["c"].left.tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]] * 3
        assert found["c"].right.tolist() == [0.0, 1.0]


def test_one_process_gathers_the_same_shapes() -> None:
    found = gather([torch.tensor(3.0), torch.ones(2, 2)], Strategy())
    assert [tuple(tensor.shape) for tensor in found] == [(1,), (2, 2)]


def test_u13_different_first_dimensions_are_gathered_and_other_differences_are_named_on_every_rank() -> None:
    def ragged() -> Any:
        strategy = joined()
        rank = strategy.global_rank
        none = torch.empty(0, 2) if rank == 0 else torch.ones(1, 2)
        return gather((torch.arange(2 + rank), none), strategy)

    for lengths, empty in ranks(2, ragged):
        assert lengths.tolist() == [0, 1, 0, 1, 2]
        assert empty.tolist() == [[1.0, 1.0]]

    def apart(operation: str) -> Any:
        strategy = joined()
        data = torch.zeros(2, 3 + strategy.global_rank)
        getattr(operations, operation)(data, strategy)

    for operation in ("gather", "reduce", "broadcast"):
        with pytest.raises(RanksError) as caught:
            ranks(2, apart, operation)
        for error in caught.value.errors:
            assert isinstance(error, DistributedOperationException)
            assert f"{operation} needs tensors" in str(error)
            assert "rank 0: (2, 3) torch.float32; rank 1: (2, 4) torch.float32" in str(error)


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"gather got a str \('cat'\) among its tensors"):
        gather({"x": torch.ones(1), "name": "cat"}, Strategy())


def test_h1_gather_for_metrics_returns_the_data_set_once_each_in_order() -> None:
    def evaluate() -> list[Any]:
        strategy = joined()
        wrong = []
        for count in range(1, 34):
            for size in (1, 2, 3, 5, 8):
                data = torch.arange(count) * 1.5
                loader = prepare_data_loader(DataLoader(TensorDataset(data, torch.arange(count)), size), strategy)
                predictions, references, objects = [], [], []
                for x, y in loader:
                    p, r = gather_for_metrics((x * 2, {"y": y}), strategy, loader)
                    predictions.append(p)
                    references.append(r["y"])
                    if size == 3:
                        objects += gather_for_metrics([f"{i}" for i in y.tolist()], strategy, loader)
                exact = torch.equal(torch.cat(predictions), data * 2)
                exact &= torch.equal(torch.cat(references), torch.arange(count))
                exact &= size != 3 or objects == [f"{i}" for i in range(count)]
                if not exact:
                    wrong.append((count, size, predictions, objects))
        return wrong

    assert ranks(2, evaluate) == [[], []]


@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("shape", [str, lambda i: {"text": str(i)}])
def test_samples_without_tensors_come_back_once_each(shape: Any, collate: Any) -> None:
    def evaluate() -> bool:
        strategy = joined()
        samples = [shape(i) for i in range(5)]
        found = []
        for size in (1, 2):
            loader = prepare_data_loader(DataLoader(samples, size, collate_fn=collate), strategy)  # type: ignore[arg-type]
            for batch in loader:
                rows = batch["text"] if isinstance(batch, dict) else batch
                rows = [row["text"] if isinstance(row, dict) else row for row in rows]
                found += gather_for_metrics(rows, strategy, loader)
        return found == [str(i) for i in range(5)] * 2

    assert ranks(2, evaluate) == [True, True]


class Split(IterableDataset[int]):
    """A stream whose workers share its samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        worker: Any = get_worker_info()
        yield from range(worker.id, self.count, worker.num_workers)


@pytest.mark.parametrize(("processes", "count"), [(3, 3), (2, 13)])
def test_gather_for_metrics_returns_each_sample_of_a_stream_once_if_its_workers_end_at_different_times(
    processes: int, count: int
) -> None:
    def gathered() -> list[int]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Split(count), 2, num_workers=2))
        found: list[int] = []
        for batch in loader:
            found += accelerator.gather_for_metrics(batch).tolist()
        return sorted(found)

    assert ranks(processes, gathered) == [list(range(count))] * processes


def test_gather_for_metrics_over_loaders_of_different_lengths_is_an_error_at_once() -> None:
    def read() -> tuple[list[str], list[int]]:
        strategy = joined()
        config = DataLoaderConfiguration(even_batches=False)
        loader = prepare_data_loader(DataLoader(torch.arange(9), batch_size=4), strategy, config)
        said, rows = [], []
        for x in loader:
            with pytest.raises(RuntimeError, match="has 2 and 1 batches on the processes") as info:
                gather_for_metrics(x, strategy, loader)
            said.append(str(info.value))
            rows.append(x)
        return said, sorted(gather_for_metrics(torch.cat(rows), strategy).tolist())

    (first, every), (second, same) = ranks(2, read)
    assert (len(first), len(second)) == (2, 1)
    assert "Set even_batches=True" in first[0]
    assert every == same == list(range(9))


def test_u5_what_was_reduced_before_comes_back_whole_with_one_warning_and_numbers_once() -> None:
    def evaluate() -> Any:
        import warnings

        strategy = joined()
        loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(9.0)), 4), strategy)
        means, counts, histograms, rows = [], [], [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for (x,) in loader:
                means.append(gather_for_metrics(x.mean(), strategy, loader))
                counts.append(gather_for_metrics({"n": torch.tensor(len(x))}, strategy, loader)["n"].sum().item())
                histograms.append(gather_for_metrics(torch.histc(x, 5, 0, 9), strategy, loader))
                rows.append(gather_for_metrics(x, strategy, loader))
        said = [str(entry.message) for entry in caught if issubclass(entry.category, messages.PacelineWarning)]
        return torch.cat(means).tolist(), counts, [len(h) for h in histograms], torch.cat(rows).tolist(), said

    first, second = ranks(2, evaluate)
    for means, counts, histograms, rows, _ in (first, second):
        assert means == [1.5, 5.5, 8.0]
        assert counts == [8, 1]
        assert histograms == [10, 10]
        assert rows == list(range(9))
    (said,) = first[4]
    assert "got a tensor of shape (5,) for a batch of 1 sample," in said
    assert second[4] == []


def test_h3_metrics_of_torchmetrics_work_on_what_is_gathered() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def evaluate() -> Any:
        strategy = joined()
        labels = torch.arange(13) % 3
        scores = torch.randn(13, 3, generator=torch.Generator().manual_seed(2))
        loader = prepare_data_loader(DataLoader(TensorDataset(scores, labels), 2), strategy)
        metric = torchmetrics.classification.MulticlassAccuracy(3, average="micro", sync_on_compute=False)
        for x, y in loader:
            metric.update(*gather_for_metrics((x.argmax(-1), y), strategy, loader))
        return float(metric.compute()), float((scores.argmax(-1) == labels).float().mean())

    for found, expected in ranks(2, evaluate):
        assert found == expected


def test_errors_of_gather_for_metrics_are_not_swallowed() -> None:
    class Broken(Strategy):
        world_size = 2  # type: ignore[assignment]

        def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
            raise RuntimeError("no line")

    with pytest.raises(RuntimeError, match="no line"):
        gather_for_metrics(torch.ones(2), Broken(), None)


def test_objects_lists_and_tensors_travel() -> None:
    def talk() -> Any:
        strategy = joined()
        rank = strategy.global_rank
        given = [rank, "mine"]
        returned = broadcast_object_list(given, strategy, 1)
        return {
            "objects": gather_object([f"a{rank}", f"b{rank}"], strategy),
            "single": gather_object({"rank": rank}, strategy),
            "sum": reduce({"x": torch.tensor([1.0 + rank])}, strategy, "sum", scale=0.5),
            "mean": reduce([torch.tensor(rank * 2)], strategy),
            "none": reduce(torch.tensor(rank), strategy, "none"),
            "broadcast": broadcast((torch.tensor([rank + 5]), None), strategy, 1),
            "list": (given is returned, given),
            "padded": pad_across_processes([torch.ones(2, 1 + rank), torch.tensor(rank)], strategy, 1, -1),
            "first": pad_across_processes(torch.full((1 + rank,), 7), strategy, pad_first=True),
        }

    for rank, found in enumerate(ranks(2, talk)):
        assert found["objects"] == ["a0", "b0", "a1", "b1"]
        assert found["single"] == [{"rank": 0}, {"rank": 1}]
        assert found["sum"]["x"].tolist() == [1.5]
        assert found["mean"][0].item() == 1.0
        assert found["none"].item() == rank
        assert found["broadcast"][0].tolist() == [6]
        assert found["list"] == (True, [1, "mine"])
        assert found["padded"][0].tolist() == [[1.0, 1.0 if rank else -1.0]] * 2
        assert found["padded"][1].item() == rank
        assert found["first"].tolist() == [7 if rank else 0, 7]


def test_tensors_of_different_dimensions_cannot_be_padded_which_every_process_is_told() -> None:
    def said(data: Any, strategy: Any, dim: int) -> str:
        with pytest.raises(DistributedOperationException) as caught:
            pad_across_processes(data, strategy, dim)
        return str(caught.value)

    def talk() -> list[str]:
        strategy = joined()
        flat, deep = torch.ones(2), torch.ones(2, 3)
        own = deep if strategy.global_rank else flat
        return [said(own, strategy, 0), said({"a": flat, "b": own}, strategy, 1), said([flat, own], strategy, -1)]

    for found in ranks(2, talk):
        assert "got a tensor with 1, 2 dimensions (in rank order). Padding can extend" in found[0]
        for text in found[1:]:
            assert "got tensor 1 with 1, 2 dimensions (in rank order)" in text


def test_an_unknown_reduction_gets_a_hint() -> None:
    with pytest.raises(ValueError, match="Unknown reduction 'avg'"):
        reduce(torch.ones(1), Strategy(), "avg")


class Rank(Strategy):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._at = (rank, world)

    @property
    def world_size(self) -> int:
        return self._at[1]

    @property
    def global_rank(self) -> int:
        return self._at[0]


class Table:
    """What of datasets.Dataset is asked for."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def select(self, indices: list[int]) -> Table:
        return Table([self.rows[i] for i in indices])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_inputs_are_split_in_order_and_padded_to_one_size(count: int, world: int) -> None:
    inputs = {
        "list": list(range(count)),
        "tuple": tuple(range(count)),
        "tensor": torch.arange(count),
        "nested": {"table": Table(list(range(count)))},
    }
    kinds: dict[str, Any] = {
        "list": list,
        "tuple": list,
        "tensor": Tensor.tolist,
        "nested": lambda part: part["table"].rows,
    }
    for name, numbers in kinds.items():
        parts = [numbers(split_between_processes(inputs, Rank(r, world))[name]) for r in range(world)]
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        padded = [numbers(split_between_processes(inputs, Rank(r, world), True)[name]) for r in range(world)]
        assert {len(part) for part in padded} == {-(-count // world)}
        assert all(
            own[: len(part)] == list(part) and set(own[len(part) :]) <= {count - 1}
            for own, part in zip(padded, parts, strict=True)
        )


def test_what_cannot_be_split_is_an_error() -> None:
    with pytest.raises(TypeError, match="got a str, which cannot be split"):
        split_between_processes("a prompt", Rank(0, 2))
    with pytest.raises(ValueError, match=r"different lengths: \{'a': 1, 'b': 2\}"):
        split_between_processes({"a": [1], "b": [1, 2]}, Rank(0, 2))


# ---- without other processes -----------------------------------------------------------------------------------------


def test_structures_keep_their_types() -> None:
    counts: defaultdict[str, Any] = defaultdict(list, x=torch.ones(2))
    data = {"pair": Pair(torch.ones(1), [torch.zeros(1)]), "ordered": OrderedDict(a=torch.ones(1)), "counts": counts}
    found = nested_tensors.recursively_apply(lambda tensor, by: tensor * by, data, by=3)
    assert isinstance(found["pair"], Pair)
    assert type(found["ordered"]) is OrderedDict
    assert type(found["counts"]) is defaultdict
    assert found["counts"]["missing"] == []
    assert found["counts"]["x"].tolist() == [3.0, 3.0]
    assert data["ordered"]["a"].item() == 1.0
    with pytest.raises(TypeError, match="got a str"):
        nested_tensors.recursively_apply(Tensor.float, ["no"], error_on_other_type=True)


def test_model_outputs_of_transformers_keep_their_type() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 3, dtype=torch.bfloat16))
    found = nested_tensors.convert_to_fp32(output)
    assert type(found) is type(output)
    assert found.logits.dtype == torch.float32
    assert output.logits.dtype == torch.bfloat16


def test_slicing_joining_sizes_and_padding() -> None:
    data = {"x": torch.arange(6).reshape(3, 2), "y": (torch.arange(3), "name")}
    part = nested_tensors.slice_tensors(data, slice(1, 3))
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["y"][1] == "name"
    joint = nested_tensors.concatenate([{"x": data["x"], "y": [data["y"][0]]}, {"x": part["x"], "y": [part["y"][0]]}])
    assert joint["y"][0].tolist() == [0, 1, 2, 1, 2]
    assert nested_tensors.find_batch_size(data) == nested_tensors.ignorant_find_batch_size(data) == 3
    assert nested_tensors.ignorant_find_batch_size(["no"]) is None
    with pytest.raises(ValueError, match="no tensor in a list"):
        nested_tensors.find_batch_size(["no"])
    assert nested_tensors.find_device(data) == torch.device("cpu")
    assert nested_tensors.listify(part)["y"] == ([1, 2], "name")
    assert nested_tensors.pad_input_tensors(data, 3, 2)["y"][0].tolist() == [0, 1, 2, 2]
    empty = nested_tensors.initialize_tensors(nested_tensors.get_data_structure(data))
    assert empty["x"].shape == (3, 2)
    assert empty["x"].dtype == torch.int64


def test_send_to_device_leaves_what_is_to_stay() -> None:
    data = {"x": torch.ones(1), "keep": torch.ones(1), "deep": [{"keep": torch.ones(1), "y": torch.ones(1)}], "n": 3}
    found = nested_tensors.send_to_device(data, "meta", non_blocking=True, skip_keys="keep")
    assert found["x"].device.type == found["deep"][0]["y"].device.type == "meta"
    assert found["keep"].device.type == found["deep"][0]["keep"].device.type == "cpu"
    assert found["n"] == 3
    assert nested_tensors.send_to_device(data, "meta")["keep"].device.type == "meta"


@pytest.mark.gpu
def test_pinned_memory_may_change_once_it_has_been_sent() -> None:
    pinned = torch.ones(2**26).pin_memory()
    found = nested_tensors.send_to_device([pinned], "cuda")[0]
    pinned.zero_()
    assert bool((found == 1).all())


def test_outputs_become_float32() -> None:
    def forward(x: Tensor) -> Any:
        return {"logits": x, "ids": torch.tensor([1])}

    found = nested_tensors.convert_outputs_to_fp32(forward)
    assert found(torch.ones(1, dtype=torch.float16))["logits"].dtype == torch.float32
    assert found(torch.ones(1))["ids"].dtype == torch.int64
    assert found.__name__ == "forward"


def test_tensors_in_a_structure_are_freed_without_collecting_garbage() -> None:
    tensor = torch.ones(2)
    held = weakref.ref(tensor)
    gc.disable()
    try:
        assert [tensor] == nested_tensors.leaves({"x": [tensor]})
        nested_tensors.send_to_device({"x": [tensor]}, "cpu")
        nested_tensors.listify([tensor])
        del tensor
        assert held() is None
    finally:
        gc.enable()


def test_a_sum_of_masks_counts_the_processes() -> None:
    def total() -> Any:
        strategy = joined()
        found = reduce(torch.tensor([True, False, strategy.global_rank == 1]), strategy, "sum")
        return found.dtype, found.tolist()

    assert ranks(2, total) == [(torch.int64, [2, 0, 1])] * 2
    alone = reduce(torch.tensor([True, False]), Strategy(), "sum")
    assert (alone.dtype, alone.tolist()) == (torch.int64, [1, 0])


def test_reduce_refuses_numbers_which_it_would_not_reduce() -> None:
    with pytest.raises(TypeError, match=r"reduce.*float"):
        reduce({"loss": 3.0}, Strategy(), "sum")
