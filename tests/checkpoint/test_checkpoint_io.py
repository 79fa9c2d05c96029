"""Plugins that write checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def test_a_write_in_the_background_has_the_values_of_the_call_and_raises_its_error_later() -> None:
    kept = Keeps()
    io, weights = AsyncCheckpointIO(kept), torch.zeros(3)
    io.save_checkpoint({"w": weights}, "good")
    weights += 1
    io.teardown()
    assert torch.equal(kept.saved["w"], torch.zeros(3))
    io.save_checkpoint({"w": weights}, "bad")
    with pytest.raises(OSError, match="disk full"):
        io.teardown()
    io.teardown()
