"""The plan that ``paceline doctor`` passes in an environment variable to the script that it runs.

This module imports only the standard library, because every Trainer and Accelerator uses it to look for a plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: The environment variable that contains the plan as JSON.
VARIABLE = "PACELINE_DOCTOR"


@dataclass
class Plan:
    """The plan for a run of a user's script.

    Attributes:
        out: path of the report's JSON file.
        steps: number of batches to train on.
        change: changes to try: Trainer arguments, and ``num_workers``, ``pin_memory`` and ``batch_factor`` for the
            training loader.
    """

    out: str
    steps: int = 60
    change: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the environment variable that passes this plan to the script."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def found(cls) -> Plan | None:
        """Return this process's plan, or None if there is none."""
        text = os.environ.get(VARIABLE)
        return None if not text else cls(**json.loads(text))


def loader_change(change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to the training loader."""
    return {name: change[name] for name in ("num_workers", "pin_memory", "batch_factor") if name in change}
