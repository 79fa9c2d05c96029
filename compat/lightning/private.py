"""Names that programs use although they are not part of Lightning's public interface."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import re
import signal
import socket
import sys
import threading
from typing import Any

import torch
from packaging.version import Version

from ...checkpoint.load_from_checkpoint import load_from_checkpoint
from ...strategies.compile_networks import uncompiled
from ...utilities.rank_zero import WarningCache
from ..finder import UNKNOWN, placeholder
from . import library_functions, logger_functions
from .results import ResultCollection, ResultMetric

_FLAG = re.compile(r"_(TORCH|TORCHMETRICS|PYTHON|OMEGACONF)_(GREATER_EQUAL|EQUAL|LESS_EQUAL)_(\d+(?:_\d+)*)")
_COMPARED = {"GREATER_EQUAL": operator.ge, "LESS_EQUAL": operator.le, "EQUAL": operator.eq}
_PACKAGES = {"_JSONARGPARSE_SIGNATURES": "jsonargparse", "_COMET": "comet_ml", "_TORCH_TRT": "torch_tensorrt"}
_AVAILABLE = re.compile(r"(_[A-Z0-9_]+)_AVAILABLE")


def find(name: str) -> Any:
    """Return the value of a private name, or UNKNOWN for a public name that does not exist."""
    if name in _VALUES:
        return _VALUES[name]
    if flag := _FLAG.fullmatch(name):
        package, comparison, wanted = flag.groups()
        return _compare(package.lower(), comparison, wanted.replace("_", "."))
    if available := _AVAILABLE.fullmatch(name):
        package = _PACKAGES.get(available[1], available[1].strip("_").lower())
        return importlib.util.find_spec(package) is not None
    if name.startswith("_"):
        return placeholder(name, "is private to Lightning, and Paceline does not have it")
    return UNKNOWN


def _compare(package: str, comparison: str, wanted: str) -> bool:
    if package == "python":
        have = Version(".".join(map(str, sys.version_info[:3])))
    else:
        try:
            have = Version(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            return False
    have = Version(have.base_version)
    if comparison == "EQUAL":
        parts = wanted.count(".") + 1
        return have.release[:parts] == Version(wanted).release
    return _COMPARED[comparison](have, Version(wanted))


def find_free_network_port() -> int:
    """Return a port that is currently free on this machine."""
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def _distributed_is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _destroy_dist_connection() -> None:
    if _distributed_is_initialized():
        torch.distributed.destroy_process_group()


class _SignalConnector:
    @staticmethod
    def _valid_signals() -> set[signal.Signals]:
        return signal.valid_signals()


class _ChildProcessObserver(threading.Thread):
    pass


_VALUES: dict[str, Any] = {
    "_DDP_FORK_ALIASES": ("ddp_fork", "ddp_notebook"),
    "ReduceOp": torch.distributed.ReduceOp,
    "_ChildProcessObserver": _ChildProcessObserver,
    "_IS_INTERACTIVE": hasattr(sys, "ps1"),
    "_IS_WINDOWS": sys.platform == "win32",
    "_KINETO_AVAILABLE": torch.profiler.kineto_available(),
    "_SignalConnector": _SignalConnector,
    "_MockOptimizer": library_functions.NoOptimizer,
    "_ResultCollection": ResultCollection,
    "_ResultMetric": ResultMetric,
    "_add_prefix": logger_functions.add_prefix,
    "_atomic_save": library_functions.atomic_save,
    "_convert_json_serializable": logger_functions.convert_json_serializable,
    "_convert_params": logger_functions.convert_params,
    "_defaults_from_env_vars": library_functions.defaults_from_env_vars,
    "_destroy_dist_connection": _destroy_dist_connection,
    "_distributed_is_initialized": _distributed_is_initialized,
    "_flatten_dict": logger_functions.flatten_dict,
    "_is_local_file_protocol": library_functions.is_local,
    "_lazy_load": library_functions.lazy_load,
    "_load": library_functions.load,
    "_load_from_checkpoint": load_from_checkpoint,
    "_materialize_meta_tensors": library_functions.materialize_meta_tensors,
    "_maybe_unwrap_optimized": uncompiled,
    "_register_classes": library_functions.register_classes,
    "_sanitize_callable_params": logger_functions.sanitize_callable_params,
    "_sanitize_params": logger_functions.sanitize_params,
    "_scan_checkpoints": logger_functions.scan_checkpoints,
    "warning_cache": WarningCache(),
    "find_free_network_port": find_free_network_port,
}
