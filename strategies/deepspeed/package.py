"""The DeepSpeed package: check that it is installed, import it for a device, and filter its log."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version

OLDEST = (0, 19)


def require_deepspeed(stage: int) -> None:
    """Raise an error if DeepSpeed is missing or too old, and suggest a strategy that can replace this ZeRO stage."""
    if importlib.util.find_spec("deepspeed") is None:
        instead = (
            "'fsdp', which is equivalent to stage 3" if stage == 3 else "'ddp' (like stage 0) or 'fsdp' (like stage 3)"
        )
        raise ModuleNotFoundError(
            "DeepSpeedStrategy needs the package deepspeed, which is not installed. Run `pip install "
            f"'deepspeed>=0.19'`, or use strategy={instead}.",
            name="deepspeed",
        )
    found = version("deepspeed")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise RuntimeError(
            f"DeepSpeedStrategy needs deepspeed 0.19 or newer, but {found} is installed. Run `pip install "
            "'deepspeed>=0.19'`."
        )


def use_device(kind: str) -> None:
    """Import DeepSpeed for this kind of device.

    Raises:
        RuntimeError: DeepSpeed was already imported for another kind of device.
    """
    os.environ["DS_ACCELERATOR"] = kind
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    chosen = import_module("deepspeed").get_accelerator().device_name()
    if chosen != kind:
        raise RuntimeError(
            f"DeepSpeed was imported for {chosen!r} before the Trainer was created, but the Trainer runs on {kind!r}. "
            f"Create the Trainer first, or set DS_ACCELERATOR={kind} in the environment."
        )
    # Paceline counts the steps that fp16 skips, and reports other skipped steps itself.
    logging.getLogger("DeepSpeed").addFilter(_no_overflow)
    if kind == "cpu":
        # DeepSpeed would compile a collective for inference. That takes a minute and fails without a compiler.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None


def _no_overflow(record: logging.LogRecord) -> bool:
    return "OVERFLOW!" not in str(record.msg)


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """Context manager that hides DeepSpeed's log messages below ``level``."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
