"""Readers of what the loggers write: the same files that people and TensorBoard, pandas or ``wandb sync`` read."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def read_csv() -> Callable[[str], list[dict[str, str]]]:
    """The rows of ``metrics.csv`` below a run's folder, without the empty cells."""

    def read(log_dir: str) -> list[dict[str, str]]:
        with open(Path(log_dir) / "metrics.csv", newline="", encoding="utf-8") as file:
            return [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]

    return read


@pytest.fixture(scope="session")
def read_events() -> Callable[[str], Any]:
    """An ``EventAccumulator`` that has read everything below a run's folder."""

    def read(log_dir: str) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(log_dir, size_guidance={"scalars": 0, "tensors": 0}).Reload()

    return read


@pytest.fixture(scope="session")
def read_wandb() -> Callable[[str | Path], list[Any]]:
    """The records of a ``.wandb`` file, which is a LevelDB log of protobuf messages."""

    def read(path: str | Path) -> list[Any]:
        from wandb.proto import wandb_internal_pb2

        messages: Any = wandb_internal_pb2
        return [messages.Record.FromString(data) for data in _leveldb_records(Path(path).read_bytes())]

    return read


@pytest.fixture(scope="session")
def wandb_history(read_wandb: Callable[[str | Path], list[Any]]) -> Callable[[str | Path], list[dict[str, Any]]]:
    """The rows that were logged into a ``.wandb`` file."""

    def read(path: str | Path) -> list[dict[str, Any]]:
        rows = [record.history.item for record in read_wandb(path) if record.WhichOneof("record_type") == "history"]
        return [{(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in row} for row in rows]

    return read


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for wandb, with all that it keeps for itself below it too; ends a run that is still going."""
    import wandb

    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "private"))
    for name, value in (("SILENT", "true"), ("CONSOLE", "off"), ("ERROR_REPORTING", "false"), ("DISABLE_GIT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_MODE", "WANDB_DIR", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    if wandb.run is not None:
        wandb.finish()


def _leveldb_records(data: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    whole, first, last = 1, 2, 4
    at, parts = header, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # this one is being written just now
        piece = data[at + 7 : at + 7 + length]
        at += 7 + length
        parts = piece if kind in (whole, first) else parts + piece
        if kind in (whole, last):
            yield parts
