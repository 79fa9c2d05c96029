"""What ``paceline doctor`` asks of the script that it runs, passed in the script's environment.

Only the standard library is imported: every Trainer and Accelerator looks here once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: The environment variable that holds the plan, as JSON.
VARIABLE = "PACELINE_DOCTOR"


@dataclass
class Plan:
    """A run of a user's script.

    Attributes:
        out: the JSON file into which the report goes.
        steps: batches to train.
        change: what is tried: arguments of the Trainer, and of the training loader ``num_workers``, ``pin_memory`` and
            ``batch_factor``.
    """

    out: str
    steps: int = 60
    change: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The variable for the script's environment."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def found(cls) -> Plan | None:
        """The plan for this process, if it is examined."""
        text = os.environ.get(VARIABLE)
        return None if not text else cls(**json.loads(text))


def loader_change(change: Mapping[str, Any]) -> dict[str, Any]:
    """What of a change concerns the training loader."""
    return {name: change[name] for name in ("num_workers", "pin_memory", "batch_factor") if name in change}
