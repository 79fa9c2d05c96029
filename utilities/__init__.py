"""Small helpers that programs written for Lightning import from its ``utilities``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoint.hyperparameters import AttributeDict as AttributeDict
    from ..data.combined_loader import CombinedLoader as CombinedLoader
    from ..processes.seed import isolate_rng as isolate_rng
    from .enums import GradClipAlgorithmType as GradClipAlgorithmType
    from .gradients import grad_norm as grad_norm
    from .overriding import is_overridden as is_overridden
    from .parameter_tying import find_shared_parameters as find_shared_parameters
    from .parameter_tying import set_shared_parameters as set_shared_parameters
    from .rank_zero import rank_zero_debug as rank_zero_debug
    from .rank_zero import rank_zero_deprecation as rank_zero_deprecation
    from .rank_zero import rank_zero_info as rank_zero_info
    from .rank_zero import rank_zero_only as rank_zero_only
    from .rank_zero import rank_zero_warn as rank_zero_warn

_HOMES = {
    "AttributeDict": "..checkpoint.hyperparameters",
    "CombinedLoader": "..data.combined_loader",
    "GradClipAlgorithmType": ".enums",
    "extract_batch_size": "..data.batches",
    "find_shared_parameters": ".parameter_tying",
    "grad_norm": ".gradients",
    "is_overridden": ".overriding",
    "isolate_rng": "..processes.seed",
    "move_data_to_device": "..processes.device_transfer",
    "rank_zero_debug": ".rank_zero",
    "rank_zero_deprecation": ".rank_zero",
    "rank_zero_info": ".rank_zero",
    "rank_zero_only": ".rank_zero",
    "rank_zero_warn": ".rank_zero",
    "set_shared_parameters": ".parameter_tying",
}
_RENAMED = {"extract_batch_size": "batch_size_of", "move_data_to_device": "move"}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = _RENAMED.get(name, name)
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), own)
    return value
