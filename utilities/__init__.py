"""Small helpers that programs written for Lightning import from Lightning's ``utilities``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from ..callbacks.throughput_monitor import Throughput as Throughput
    from ..callbacks.throughput_monitor import measure_flops as measure_flops
    from ..checkpoint.hyperparameters import AttributeDict as AttributeDict
    from ..data.combined_loader import CombinedLoader as CombinedLoader
    from ..processes.seed import isolate_rng as isolate_rng
    from .data import extract_batch_size as extract_batch_size
    from .data import move_data_to_device as move_data_to_device
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

lazy_names(
    globals(),
    {
        ".callbacks.throughput_monitor": "Throughput measure_flops",
        ".checkpoint.hyperparameters": "AttributeDict",
        ".data.combined_loader": "CombinedLoader",
        ".processes.seed": "isolate_rng",
        "data": "extract_batch_size move_data_to_device",
        "enums": "GradClipAlgorithmType",
        "gradients": "grad_norm",
        "overriding": "is_overridden",
        "parameter_tying": "find_shared_parameters set_shared_parameters",
        "rank_zero": "rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn",
    },
)
