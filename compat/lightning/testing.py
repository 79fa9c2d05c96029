"""Helpers for test suites written for Lightning, which skip tests and complete mock callbacks."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
from packaging.version import Version

from ...callbacks.base import OTHER_METHODS, Callback
from ...devices.kinds import CUDA_KIND, kind_of
from ...loggers.base import Logger

#: Arguments that require a package.
_PACKAGES = {
    "deepspeed": "deepspeed",
    "omegaconf": "omegaconf",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "psutil": "psutil",
    "rich": "rich",
    "sklearn": "sklearn",
    "tensorrt": "torch_tensorrt",
}

#: Callback attributes that Lightning does not have.
_ATTRIBUTES = ("limits_training", "monitors_metrics", "runs_first", "runs_in_trials", "runs_last", "skips_together")


def is_logger(value: Any) -> bool:
    """Return True if a Trainer can log to an object, which is the case for a Logger or a mock.

    If ``value`` is a mock, it receives the attributes that only Paceline's loggers have.
    """
    mock = sys.modules.get("unittest.mock")
    if isinstance(value, Logger) or mock is None or not isinstance(value, mock.NonCallableMock):
        return isinstance(value, Logger)
    value.log_record = lambda values, step=None, **options: value.log_metrics(values, step=step)
    value.run_dirs = value.state_dict = dict
    value.records_dir = None
    value.recognizes = lambda state: False
    value.log_dir = value.root_dir = None
    return True


def complete_mocks(callbacks: list[Any]) -> None:
    """Give every ``Mock(spec=Callback)`` the attributes that Paceline's callbacks have but Lightning's do not."""
    mock = sys.modules.get("unittest.mock")
    if mock is None:
        return
    real = Callback()
    for one in callbacks:
        if not isinstance(one, mock.NonCallableMock) or "runs_first" in vars(one):
            continue
        for name in (*_ATTRIBUTES, *(method for method in OTHER_METHODS if not method.endswith("state_dict"))):
            setattr(one, name, getattr(real, name))
        for calls in (one.method_calls, one.mock_calls):
            calls[:] = [call for call in calls if call[0] not in OTHER_METHODS]
        one.state_key = f"{type(one).__qualname__}{id(one)}"
        one.state_dict.return_value = {}


def runif_reasons(
    *,
    min_cuda_gpus: int = 0,
    min_torch: str | None = None,
    max_torch: str | None = None,
    min_python: str | None = None,
    bf16_cuda: bool = False,
    tpu: bool = False,
    mps: bool | None = None,
    skip_windows: bool = False,
    linux_only: bool = False,
    standalone: bool = False,
    dynamo: bool = False,
    **packages: bool,
) -> tuple[list[str], dict[str, bool]]:
    """Return the reasons why a test cannot run on this machine, and the pytest marks to add to it.

    Args:
        min_cuda_gpus: require at least this many GPUs.
        min_torch: require this torch version or a later one.
        max_torch: require a torch version before this one.
        min_python: require this Python version or a later one.
        bf16_cuda: require a GPU that supports bfloat16.
        tpu: require a TPU, which is never available.
        mps: require an Apple GPU if True, and a machine without one if False.
        skip_windows: skip the test on Windows.
        linux_only: require Linux.
        standalone: require ``PL_RUN_STANDALONE_TESTS=1`` in the environment.
        dynamo: require ``torch.compile``.
        **packages: require each package whose value is True.
    """
    reasons: list[str] = []
    marks: dict[str, bool] = {}
    torch_version, python = (
        Version(Version(torch.__version__).base_version),
        Version(sys.version.split()[0].rstrip("+")),
    )
    has_mps = kind_of("mps").is_available()
    wanted: list[tuple[Any, str]] = [
        (CUDA_KIND.count() < min_cuda_gpus, f"GPUs>={min_cuda_gpus}"),
        (min_torch and torch_version < Version(min_torch), f"torch>={min_torch}"),
        (max_torch and torch_version >= Version(max_torch), f"torch<{max_torch}"),
        (min_python and python < Version(min_python), f"python>={min_python}"),
        (bf16_cuda and not CUDA_KIND.computes_in_bfloat16(), "CUDA device bf16"),
        (tpu, "TPU"),
        (mps is True and not has_mps, "MPS"),
        (mps is False and has_mps, "not MPS"),
        (skip_windows and sys.platform == "win32", "unimplemented on Windows"),
        (linux_only and sys.platform != "linux", "only implemented on Linux"),
        (standalone and os.environ.get("PL_RUN_STANDALONE_TESTS") != "1", "Standalone execution"),
        (dynamo and sys.platform == "win32", "Dynamo"),
    ]
    wanted += [
        (asked and importlib.util.find_spec(_PACKAGES.get(name, name)) is None, name)
        for name, asked in packages.items()
    ]
    reasons += [text for missing, text in wanted if missing]
    for name, asked in (("min_cuda_gpus", min_cuda_gpus), ("tpu", tpu), ("standalone", standalone)):
        if asked:
            marks[name] = True
    return reasons, marks
