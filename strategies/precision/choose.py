"""Create a Precision from a name."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from ... import messages
from ...devices.kinds import kind_of
from .base import Precision, TruePrecision
from .bitsandbytes import BitsandbytesPrecision
from .float8 import Float8Precision
from .mixed import DTYPES, MixedPrecision
from .transformer_engine import TransformerEnginePrecision

PrecisionName = Literal[
    "32-true",
    "64-true",
    "16-true",
    "bf16-true",
    "16-mixed",
    "bf16-mixed",
    "fp8-mixed",
    "transformer-engine",
    "transformer-engine-float16",
    "bnb.nf4",
    "bnb.nf4-dq",
    "bnb.fp4",
    "bnb.fp4-dq",
    "bnb.int8",
    "bnb.int8-training",
]
PrecisionAlias = Literal["64", "32", "16", "bf16", "no", "fp32", "fp16", "fp8", 64, 32, 16]
NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)
ALIASES: dict[str, PrecisionName] = {
    "64": "64-true",
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "no": "32-true",
    "fp32": "32-true",
    "fp16": "16-mixed",
    "fp8": "fp8-mixed",
}


def choose_precision(precision: Any, plugins: Any, kind: str) -> Precision:
    """Return the Precision for ``Trainer(precision=..., plugins=...)`` on a kind of device.

    Raises:
        ValueError: the name is unknown, the arguments contradict each other, or the device does not support the
            precision's dtype.
    """
    plugin = _plugin(plugins)
    if isinstance(precision, Precision):
        precision, plugin = None, precision if plugin is None else _twice(precision, plugin)
    if plugin is not None:
        if precision is not None:
            raise ValueError(
                f"Trainer(precision={precision!r}) and plugins={type(plugin).__name__}(...) both set the precision. "
                "Leave one out."
            )
        return plugin
    if precision is None:
        return Precision()
    if isinstance(precision, type):
        raise TypeError(
            f"Trainer: precision={precision.__name__} is a class. Did you mean {precision.__name__}()? Pass a name or "
            "a Precision object."
        )
    name = ALIASES.get(str(precision), precision)
    if name not in NAMES:
        raise ValueError(messages.unknown("precision", precision, (*NAMES, *ALIASES), ", or pass a Precision"))
    _refuse_dtype(name, kind)
    return _named(name, kind)


def _named(name: Any, kind: str) -> Precision:
    if name == "32-true":
        return Precision()
    if name == "fp8-mixed":
        return Float8Precision(device=kind)
    if name.startswith("transformer-engine"):
        return TransformerEnginePrecision(torch.float16 if name.endswith("float16") else torch.bfloat16)
    if name.startswith("bnb."):
        return BitsandbytesPrecision(name.removeprefix("bnb."))
    return MixedPrecision(name, kind) if name in ("16-mixed", "bf16-mixed") else TruePrecision(name)


def _refuse_dtype(name: str, kind: str) -> None:
    """Raise an error if a kind of device cannot compute in the dtype of a precision."""
    if name == "64-true" and kind_of(kind).widest_float is not torch.float64:
        raise ValueError(
            f"Trainer(precision='64-true'): {kind!r} devices do not support float64. Use '32-true', or "
            "accelerator='cpu'."
        )
    supported = kind_of(kind).autocast_dtypes()
    if name in DTYPES and DTYPES[name] not in supported:
        others = [*(other for other, dtype in DTYPES.items() if dtype in supported), "32-true"]
        raise ValueError(
            f"Trainer(precision={name!r}): autocast on {kind!r} devices does not support {DTYPES[name]}. Use "
            f"{messages.names(others)}."
        )


def _plugin(plugins: Any) -> Precision | None:
    found = None
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]:
        if not isinstance(plugin, Precision):
            raise TypeError(
                f"Trainer(plugins=...) contains {messages.a(plugin)}, which is not a Precision. Pass a Precision. To "
                "replace other parts of the Trainer, use strategy= (a Strategy object), logger= and callbacks=."
            )
        found = plugin if found is None else _twice(found, plugin)
    return found


def _twice(first: Precision, second: Precision) -> Precision:
    raise ValueError(f"Two precisions were passed ({first.name!r} and {second.name!r}). Leave one out.")
