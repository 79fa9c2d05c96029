"""The package DeepSpeed: whether it is here, for which device it was imported, and how much it says."""

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
    """Raise, with what to do, if DeepSpeed is not installed or too old; ``stage`` says what would replace it."""
    if importlib.util.find_spec("deepspeed") is None:
        instead = (
            "'fsdp', which is what its stage 3 does" if stage == 3 else "'ddp' (as stage 0) or 'fsdp' (as stage 3)"
        )
        raise ModuleNotFoundError(
            f"DeepSpeedStrategy needs the package deepspeed, which is not installed: pip install 'deepspeed>=0.19'. "
            f"Without it, write strategy={instead}.",
            name="deepspeed",
        )
    found = version("deepspeed")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise RuntimeError(
            f"DeepSpeedStrategy needs deepspeed 0.19 or newer, but {found} is installed: pip install 'deepspeed>=0.19'."
        )


def use_device(kind: str) -> None:
    """Import DeepSpeed for this kind of device.

    Raises:
        RuntimeError: it was imported for another one already.
    """
    os.environ["DS_ACCELERATOR"] = kind
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    chosen = import_module("deepspeed").get_accelerator().device_name()
    if chosen != kind:
        raise RuntimeError(
            f"DeepSpeed was imported for {chosen!r} before the Trainer, which runs on {kind!r}. Make the Trainer "
            f"first, or set DS_ACCELERATOR={kind} in the environment."
        )
    # Paceline counts steps that fp16 leaves out, and says what it makes of others.
    logging.getLogger("DeepSpeed").addFilter(_no_overflow)
    if kind == "cpu":
        # It would compile a shared-memory collective for inference at start: a minute, and an error without a compiler.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None


def _no_overflow(record: logging.LogRecord) -> bool:
    return "OVERFLOW!" not in str(record.msg)


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """Context in which DeepSpeed logs nothing below ``level``."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
