"""SwanLab offline, with one file of records for each time a run was opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import SwanLabLogger
from paceline.loggers.values import flat

TRACKER = "swanlab"
CONTINUES = True
SURVIVES_A_KILL = False
CHECKPOINTS = ["s3.ckpt", "s6.ckpt"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(folder / "private"))


def make(folder: Path, **options: Any) -> SwanLabLogger:
    return SwanLabLogger("digits", folder / "swanlog", mode="offline", **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return {"mode": "offline", "log_dir": folder / "swanlog"}


def _records(folder: Path, logger: Any) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for path in sorted((folder / "swanlog").glob(f"*/run-{logger.version}.swanlab")):
        if path.stat().st_size:
            reader = DataStoreReader()
            reader.open(path)
            yield from map(Record.FromString, reader)


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    """Return the values of all files. When SwanLab uploads them, it keeps the first value of each step."""
    found: dict[str, dict[int, float]] = {}
    for record in _records(folder, logger):
        if record.WhichOneof("record_type") == "scalar":
            one = record.scalar
            found.setdefault(one.key, {}).setdefault(one.step, one.value.number)
    return {name: list(values.items()) for name, values in found.items()}


def params(folder: Path, logger: Any) -> dict[str, Any]:
    import yaml

    (path,) = (folder / "swanlog").glob(f"*{logger.version}/files/config.yaml")
    return flat({name: one["value"] for name, one in yaml.safe_load(path.read_text()).items()})


def checkpoints(folder: Path, logger: Any) -> list[str]:
    saved = [record.save for record in _records(folder, logger) if record.HasField("save")]
    return [one.name for one in saved if Path(one.source_path).suffix == ".ckpt" and Path(one.source_path).exists()]


def runs(folder: Path) -> list[str]:
    return sorted({path.stem.removeprefix("run-") for path in (folder / "swanlog").rglob("*.swanlab")})
