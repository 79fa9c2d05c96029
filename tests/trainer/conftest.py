"""What the tests of the trainer share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def quiet() -> dict[str, Any]:
    """Trainer arguments that switch off everything optional."""
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
