"""Lightning callbacks that are Paceline callbacks with different arguments."""

from __future__ import annotations

import os
from typing import Literal

from ...callbacks.loss_guard import LossGuard


class SpikeDetection(LossGuard):
    """:class:`LossGuard` with Lightning's arguments and defaults. A spike raises ``TrainingSpikeException``."""

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        super().__init__(mode, window, warmup, atol, rtol, exclude_batches_path, finite_only, action="raise")
