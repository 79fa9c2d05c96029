"""A program under Hydra: its ranks run it again, but in the folder that Hydra made for this process.

Nothing of Hydra is imported here; a program that uses it has done so.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

#: What stands behind the job's name: nothing in rank 0, for which the variable is set. Others log into their own files.
_SUFFIX = "${oc.env:PACELINE_HYDRA_RANK_${oc.env:RANK},_rank${oc.env:RANK}}"
_SET_FOR_RANK_ZERO = "PACELINE_HYDRA_RANK_0"


def is_sweep() -> bool:
    """Whether Hydra runs this as one of several jobs, each of which calls a function of the program."""
    config = _config()
    return config is not None and config.mode is not None and config.mode.name == "MULTIRUN"


def for_ranks(command: list[str], folder: str) -> tuple[list[str], str]:
    """The command for the ranks and the folder to run it in; as given where no Hydra program runs.

    The ranks get this process's output folder, write no configuration there, and append to its log on rank 0. Hydra
    leaves their errors to this process.
    """
    config = _config()
    if config is None:
        return command, folder
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    os.environ[_SET_FOR_RANK_ZERO] = ""
    typed = {*config.overrides.task, *config.overrides.hydra}
    behind = max((index + 1 for index, word in enumerate(command) if word in typed), default=len(command))
    ours = [
        f"hydra.run.dir={_quoted(config.runtime.output_dir)}",
        f"hydra.job.name={_quoted(config.job.name + _SUFFIX)}",
        "hydra.output_subdir=null",
    ]
    return [*command[:behind], *ours, *command[behind:]], config.runtime.cwd


def _config() -> Any:
    """Hydra's part of the configuration while it runs a job of this process; else None."""
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config, omegaconf = hydra.HydraConfig.get(), sys.modules["omegaconf"]
    return None if omegaconf.OmegaConf.is_missing(config.runtime, "output_dir") else config


def _quoted(text: str) -> str:
    """A value in Hydra's grammar."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)
    return f'"{escaped}"'
