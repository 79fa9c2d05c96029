"""Hide every device except the CPU from Paceline, as ``paceline launch --cpu`` does for the processes that it starts.

A variable such as ``CUDA_VISIBLE_DEVICES`` is not enough, because some kinds of devices have no such variable, and an
empty ``ZE_AFFINITY_MASK`` hides nothing.
"""

from __future__ import annotations

import os

#: Environment variable that hides the devices if it has any value.
HIDE = "PACELINE_HIDE_DEVICES"


def are_hidden() -> bool:
    """Return True if this process must use the CPU only."""
    return HIDE in os.environ
