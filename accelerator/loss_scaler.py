"""Loss scaling that a script still does by itself."""

from __future__ import annotations

import sys


def refuse_scaler(accelerating: bool) -> None:
    """Raise if it is torch's GradScaler that reads a prepared optimizer's gradients.

    Args:
        accelerating: gradients are accumulated or scaled, so that a second scaler would spoil them.

    Raises:
        RuntimeError: it is.
    """
    if accelerating and sys._getframe(2).f_code.co_filename.endswith("grad_scaler.py"):
        raise RuntimeError(
            "A GradScaler of the script's own works on a prepared optimizer. accelerator.backward and optimizer.step() "
            "scale and unscale by themselves under mixed_precision='fp16': delete the scaler and its lines "
            "(scaler.scale(loss).backward() becomes accelerator.backward(loss), scaler.step(optimizer) "
            "optimizer.step(); scaler.unscale_ and scaler.update go)."
        )
