"""The streaming datasets and how a user reads them: the same 48 numbered samples in each package's format."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES, SHARDS, BATCH_SIZE = 48, 8, 3
#: Shard boundaries, for formats in which they can be chosen. All ranks and workers get the same number of samples.
ENDS = list(accumulate((5, 5, 7, 7, 7, 7, 5, 5)))


class Form(NamedTuple):
    """One way to read a package's data.

    Attributes:
        package: the package to test.
        what: the form's name in the table.
        write: writes the samples to a folder.
        loader: returns the loader, given the folder, the number of workers, the rank and the number of ranks.
    """

    package: str
    what: str
    write: Callable[[Path], None]
    loader: Callable[[Path, int, int, int], Any]


def _nothing(folder: Path) -> None:
    """Write nothing, because the samples are created in memory."""


# ---- torchdata -------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset[Any]):
    """A user-defined stream that saves its position; its workers take turns."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.position < SAMPLES:
            self.position += 1
            if (self.position - 1) % every == first:
                yield {"number": self.position - 1}
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Forgetful(IterableDataset[Any]):
    """A user-defined stream that saves nothing."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return ({"number": number} for number in range(first, SAMPLES, every))


def _plain(dataset: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH_SIZE, num_workers=workers)


def _stateful(dataset: Any, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, BATCH_SIZE, num_workers=workers)


# ---- Hugging Face datasets -------------------------------------------------------------------------------------------


def write_lines(folder: Path) -> None:
    """Write JSON lines, which ``load_dataset(..., streaming=True)`` can stream."""
    for shard, numbers in enumerate(map(range, [0, *ENDS], ENDS)):
        lines = [json.dumps({"number": number}) for number in numbers]
        (folder / f"{shard:02}.jsonl").write_text("\n".join(lines) + "\n")


def _streamed(folder: Path, shuffled: bool = False) -> Any:
    import datasets

    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    found = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    return found.shuffle(seed=7, buffer_size=10) if shuffled else found


def _by_node(folder: Path, rank: int, world: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(_streamed(folder), rank, world)


# ---- mosaicml-streaming ----------------------------------------------------------------------------------------------


def _streaming() -> ModuleType:
    """Import mosaicml-streaming without its image datasets, which are the only part that needs torchvision."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    import streaming

    return streaming


def write_mds(folder: Path) -> None:
    """Write shards with a few samples each."""
    with _streaming().MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=100) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number})


def _mosaic(folder: Path) -> Any:
    streaming = _streaming()
    streaming.base.util.clean_stale_shared_memory()  # left behind by a killed run
    return streaming.StreamingDataset(
        local=str(folder), shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=2, shuffle_seed=7
    )


# ---- litdata ---------------------------------------------------------------------------------------------------------


def _numbered(index: int) -> dict[str, int]:
    return {"number": index}


def write_lit(folder: Path) -> None:
    """Write chunks of six samples."""
    import litdata

    litdata.optimize(_numbered, list(range(SAMPLES)), str(folder), chunk_size=SAMPLES // SHARDS, num_workers=1)


def _lit(folder: Path) -> Any:
    import litdata

    return litdata.StreamingDataset(str(folder), shuffle=True, seed=7, drop_last=True)


def _lit_loader(folder: Path, workers: int) -> Any:
    import litdata

    return litdata.StreamingDataLoader(_lit(folder), batch_size=BATCH_SIZE, num_workers=workers)


# ---- webdataset ------------------------------------------------------------------------------------------------------


def write_tars(folder: Path) -> None:
    """Write tar files with a few samples each."""
    import webdataset

    for shard, numbers in enumerate(map(range, [0, *ENDS], ENDS)):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in numbers:
                writer.write({"__key__": f"{number:04}", "number.json": number})


def _first(sample: dict[str, Any]) -> dict[str, int]:
    return {"number": sample["number.json"]}


def _tars(folder: Path, by_node: bool) -> Any:
    import webdataset

    splitter = webdataset.split_by_node if by_node else None
    files = str(folder / f"{{0..{SHARDS - 1}}}.tar")
    return webdataset.WebDataset(files, shardshuffle=False, nodesplitter=splitter).decode().map(_first)


def _web_loader(folder: Path, workers: int) -> Any:
    import webdataset

    return webdataset.WebLoader(_tars(folder, by_node=True), batch_size=BATCH_SIZE, num_workers=workers)


FORMS = [
    Form(
        "torchdata",
        "`StatefulDataLoader` of your own stream with a `state_dict`",
        _nothing,
        lambda folder, workers, rank, world: _stateful(Numbers(), workers),
    ),
    Form(
        "torchdata",
        "`DataLoader` of the same stream",
        _nothing,
        lambda folder, workers, rank, world: _plain(Numbers(), workers),
    ),
    Form(
        "torchdata",
        "`DataLoader` of a stream without a `state_dict`",
        _nothing,
        lambda folder, workers, rank, world: _plain(Forgetful(), workers),
    ),
    Form(
        "datasets",
        "`DataLoader`",
        write_lines,
        lambda folder, workers, rank, world: _plain(_streamed(folder), workers),
    ),
    Form(
        "datasets",
        "`StatefulDataLoader`",
        write_lines,
        lambda folder, workers, rank, world: _stateful(_streamed(folder), workers),
    ),
    Form(
        "datasets",
        "`StatefulDataLoader`, after `shuffle(buffer_size=10)`",
        write_lines,
        lambda folder, workers, rank, world: _stateful(_streamed(folder, shuffled=True), workers),
    ),
    Form(
        "datasets",
        "`DataLoader`, after `shuffle(buffer_size=10)`",
        write_lines,
        lambda folder, workers, rank, world: _plain(_streamed(folder, shuffled=True), workers),
    ),
    Form(
        "datasets",
        "`StatefulDataLoader`, after `split_dataset_by_node`",
        write_lines,
        lambda folder, workers, rank, world: _stateful(_by_node(folder, rank, world), workers),
    ),
    Form(
        "mosaicml-streaming",
        "`StreamingDataLoader`",
        write_mds,
        lambda folder, workers, rank, world: _streaming().StreamingDataLoader(
            _mosaic(folder), batch_size=BATCH_SIZE, num_workers=workers
        ),
    ),
    Form(
        "mosaicml-streaming",
        "`DataLoader`",
        write_mds,
        lambda folder, workers, rank, world: _plain(_mosaic(folder), workers),
    ),
    Form(
        "litdata",
        "`StreamingDataLoader`",
        write_lit,
        lambda folder, workers, rank, world: _lit_loader(folder, workers),
    ),
    Form(
        "litdata",
        "`DataLoader`",
        write_lit,
        lambda folder, workers, rank, world: _plain(_lit(folder), workers),
    ),
    Form(
        "webdataset",
        "`DataLoader`, `nodesplitter=split_by_node`",
        write_tars,
        lambda folder, workers, rank, world: _plain(_tars(folder, by_node=True), workers),
    ),
    Form(
        "webdataset",
        "`DataLoader`, `nodesplitter=None`",
        write_tars,
        lambda folder, workers, rank, world: _plain(_tars(folder, by_node=False), workers),
    ),
    Form(
        "webdataset",
        "`WebLoader`, `nodesplitter=split_by_node`",
        write_tars,
        lambda folder, workers, rank, world: _web_loader(folder, workers),
    ),
]
