"""The ``is_..._available`` functions of ``accelerate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ... import messages

#: Names for ``is_..._available``, and packages of which one has to be installed.
_PACKAGES = {
    "aim": "aim",
    "amdsmi": "amdsmi",
    "bnb": "bitsandbytes",
    "boto3": "boto3",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "dvclive": "dvclive",
    "import_timer": "import_timer",
    "lomo": "lomo_optim",
    "matplotlib": "matplotlib",
    "mlflow": "mlflow mlflow_skinny",
    "msamp": "msamp",
    "numpy": "numpy",
    "pandas": "pandas",
    "peft": "peft",
    "pynvml": "pynvml",
    "pytest": "pytest",
    "rich": "rich",
    "sagemaker": "sagemaker",
    "schedulefree": "schedulefree",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard tensorboardX",
    "timm": "timm",
    "torchao": "torchao",
    "torchdata": "torchdata",
    "torchdata_stateful_dataloader": "torchdata",
    "torchvision": "torchvision",
    "tqdm": "tqdm",
    "trackio": "trackio",
    "transformer_engine": "transformer_engine",
    "transformers": "transformers",
    "triton": "triton",
    "wandb": "wandb",
}
#: Names for ``is_..._available`` of things that Paceline does not support, installed or not.
_NEVER = (
    "bitsandbytes_multi_backend 4bit_bnb 8bit_bnb fp8 hpu megatron_lm mlu musa neuron npu pippy sdaa torch_xla "
    "transformer_engine_mxfp8 xccl xpu"
)


def _installed(packages: str) -> bool:
    return any(messages.is_installed(package) for package in packages.split())


def _no(*_: Any, **__: Any) -> bool:
    return False


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _rocm() -> bool:
    import torch

    return torch.cuda.is_available() and torch.version.hip is not None


def _mps(min_version: str = "1.12") -> bool:
    import torch

    return torch.backends.mps.is_available()


def _bf16(ignore_tpu: bool = False) -> bool:
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def _fp16() -> bool:
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()


def _distributed() -> bool:
    import torch

    return torch.distributed.is_available()


def _always() -> bool:
    return True


def is_peft_model(model: Any) -> bool:
    """Whether a model is one of the package peft."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


_ANSWERS: dict[str, Callable[..., bool]] = {
    **{f"is_{name}_available": partial(_installed, packages) for name, packages in _PACKAGES.items()},
    **{f"is_{name}_available": _no for name in _NEVER.split()},
    "is_bf16_available": _bf16,
    "is_cuda_available": _cuda,
    "is_fp16_available": _fp16,
    "is_habana_gaudi1": _no,
    "is_mps_available": _mps,
    "is_peft_model": is_peft_model,
    "is_rocm_available": _rocm,
    "is_torch_distributed_available": _distributed,
    "is_weights_only_available": _always,
}
NAMES = frozenset(_ANSWERS)


def find(name: str) -> Callable[..., bool]:
    """The function of that name."""
    return _ANSWERS[name]
