"""Plugins that write checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.checkpoint.checkpoint_io import AsyncCheckpointIO, CheckpointIO


class Keeps(CheckpointIO):
    """Keeps what it is to write; fails for the path ``"bad"``."""

    saved: dict[str, Any]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if path == "bad":
            raise OSError("disk full")
        self.saved = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return self.saved

    def remove_checkpoint(self, path: Any) -> None: ...


def test_a_direct_call_returns_once_the_checkpoint_is_written_and_raises_its_error() -> None:
    kept = Keeps()
    io = AsyncCheckpointIO(kept)
    io.save_checkpoint({"w": 1}, "good")
    assert kept.saved == {"w": 1} == io.load_checkpoint("good")
    with pytest.raises(OSError, match="disk full"):
        io.save_checkpoint({"w": 2}, "bad")
    io.teardown()
