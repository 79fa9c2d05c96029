"""Support programs that use Hydra: all ranks run the same command, in the folder that Hydra created for this process.

This module does not import Hydra itself, because a program that uses Hydra has already imported it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

#: Suffix of the job's name, so that all ranks but rank 0 log to their own files. On rank 0, it is empty, because
#: :data:`_SET_FOR_RANK_ZERO` is set.
_SUFFIX = "${oc.env:PACELINE_HYDRA_RANK_${oc.env:RANK},_rank${oc.env:RANK}}"
_SET_FOR_RANK_ZERO = "PACELINE_HYDRA_RANK_0"


def is_sweep() -> bool:
    """Return True if this process runs a Hydra sweep: several jobs, each of which calls a function of the program."""
    config = _config()
    return config is not None and config.mode is not None and config.mode.name == "MULTIRUN"


def for_ranks(command: list[str], folder: str) -> tuple[list[str], str]:
    """Return the command for the ranks and the folder in which to run it; both are unchanged if Hydra is not in use.

    The ranks use this process's output folder but write no configuration there; rank 0 appends to this process's log.
    Hydra is told not to shorten the ranks' errors, because this process reports them in full.
    """
    config = _config()
    if config is None:
        return command, folder
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    os.environ[_SET_FOR_RANK_ZERO] = ""
    overrides = {*config.overrides.task, *config.overrides.hydra}
    position = max((index + 1 for index, word in enumerate(command) if word in overrides), default=len(command))
    added = [
        f"hydra.run.dir={_quoted(config.runtime.output_dir)}",
        f"hydra.job.name={_quoted(config.job.name + _SUFFIX)}",
        "hydra.output_subdir=null",
    ]
    return [*command[:position], *added, *command[position:]], config.runtime.cwd


def _config() -> Any:
    """Return Hydra's own configuration while Hydra runs a job in this process; None otherwise."""
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config, omegaconf = hydra.HydraConfig.get(), sys.modules["omegaconf"]
    return None if omegaconf.OmegaConf.is_missing(config.runtime, "output_dir") else config


def _quoted(text: str) -> str:
    """Quote a string as a value in Hydra's override grammar."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)
    return f'"{escaped}"'
