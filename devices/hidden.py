"""Hide every device except the CPU from Paceline: ``paceline launch --cpu`` does so for the processes it starts.

A kind's own variable is not enough, because some kinds have none and an empty ``ZE_AFFINITY_MASK`` hides nothing.
"""

from __future__ import annotations

import os

#: Environment variable that hides the devices if it has any value.
HIDE = "PACELINE_HIDE_DEVICES"


def are_hidden() -> bool:
    """Return True if this process must use the CPU only."""
    return HIDE in os.environ
