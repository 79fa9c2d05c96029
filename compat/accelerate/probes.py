"""``accelerate``'s ``is_..._available`` functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from ... import messages

#: Names in ``is_..._available`` that are package names.
_PACKAGES = (
    "aim amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib msamp numpy pandas peft "
    "pynvml pytest rich sagemaker schedulefree swanlab timm torchao torchdata torchvision tqdm trackio "
    "transformer_engine transformers triton wandb"
)
#: Names in ``is_..._available``, each with packages of which at least one must be installed.
_OTHER_PACKAGES = {
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "lomo": "lomo_optim",
    "mlflow": "mlflow mlflow_skinny",
    "tensorboard": "tensorboard tensorboardX",
    "torchdata_stateful_dataloader": "torchdata",
}
#: Names in ``is_..._available`` functions that always return False, because Paceline does not support the packages and
#: devices that they refer to.
_NEVER = "bitsandbytes_multi_backend fp8 megatron_lm pippy torch_xla transformer_engine_mxfp8 xccl"
#: Names in ``is_..._available`` that are device types.
_DEVICES = "cuda hpu mlu mps musa neuron npu sdaa xpu"


def _installed(packages: str) -> bool:
    return any(messages.is_installed(package) for package in packages.split())


def _no(*_: Any, **__: Any) -> bool:
    return False


def _torch() -> Any:
    """Import torch only when it is needed."""
    return import_module("torch")


def _sees(name: str, *_: Any, **__: Any) -> bool:
    """Return True if this process sees a device of the given type. Imports torch only when called."""
    return import_module("...devices.kinds", __package__).kind_of(name).is_available()


def _bf16(ignore_tpu: bool = False) -> bool:
    return not _sees("cuda") or import_module("...devices.kinds", __package__).CUDA_KIND.computes_in_bfloat16()


def is_peft_model(model: Any) -> bool:
    """Return True if a model comes from the peft package."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def _at_least(package: str, min_version: str | None = None) -> bool:
    """Return True if a package is installed in at least the given version."""
    if not messages.is_installed(package):
        return False
    return min_version is None or Version(version(package)) >= Version(min_version)


ANSWERS: dict[str, Callable[..., bool]] = {
    **{f"is_{name}_available": partial(_installed, name) for name in _PACKAGES.split()},
    **{f"is_{name}_available": partial(_installed, packages) for name, packages in _OTHER_PACKAGES.items()},
    **{f"is_{name}_available": _no for name in _NEVER.split()},
    "is_bf16_available": _bf16,
    "is_bnb_available": partial(_at_least, "bitsandbytes"),
    "is_numpy_available": partial(_at_least, "numpy"),
    **{f"is_{name}_available": partial(_sees, name) for name in _DEVICES.split()},
    "is_fp16_available": lambda: _sees("cuda") or _sees("mps"),
    "is_habana_gaudi1": _no,
    "is_peft_model": is_peft_model,
    "is_torch_xpu_tensor": _no,
    "is_rocm_available": lambda: _sees("cuda") and _torch().version.hip is not None,
    "is_torch_distributed_available": lambda: _torch().distributed.is_available(),
    "is_weights_only_available": lambda: True,
}
