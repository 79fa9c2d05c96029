"""String enums for the values of settings and handlers. Members are looked up case-insensitively."""

from __future__ import annotations

import builtins
from enum import Enum, EnumMeta
from typing import Any, Literal

from .. import messages

#: Values of ``mixed_precision``, ``dynamo_backend`` and ``log_with``.
MixedName = Literal["no", "fp16", "bf16", "fp8"]
BackendName = Literal[
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "tvm",
    "hpu_backend",
    "neuron",
]
TrackerName = Literal[
    "all",
    "csv",
    "tensorboard",
    "wandb",
    "mlflow",
    "comet_ml",
    "trackio",
    "clearml",
    "dvclive",
    "swanlab",
    "aim",
]


class EnumWithContains(EnumMeta):
    """Metaclass that makes ``value in SomeEnum`` work with plain values."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class Word(str, Enum, metaclass=EnumWithContains):
    """A string enum whose members equal plain strings and are looked up case-insensitively."""

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        wanted = str(value).upper()
        for word in cls:
            if wanted in (word.name, word.value.upper()):
                return word
        known = cls.list()
        hint = messages.did_you_mean(wanted if known[0].isupper() else wanted.lower(), known)
        raise ValueError(f"Unknown {cls.__name__} {value!r}.{hint} Choose {messages.names(known)}.")

    @classmethod
    def list(cls) -> builtins.list[str]:
        """Return all values."""
        return [word.value for word in cls]


class DistributedType(Word):
    """Kinds of distributed training."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    # Several processes on other kinds of device; XLA means TPUs.
    MULTI_NPU, MULTI_MLU, MULTI_SDAA, MULTI_MUSA = "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"
    MULTI_XPU, MULTI_HPU, MULTI_NEURON, XLA = "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA"
    # Not supported, but programs compare against this value.
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(Word):
    """Values of ``mixed_precision``."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Word):
    """Sources of random numbers."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"
    # Not supported, but programs compare against these values.
    MLU, SDAA, MUSA, NPU, XLA = "mlu", "sdaa", "musa", "npu", "xla"
    XPU, HPU, NEURON = "xpu", "hpu", "neuron"


class LoggerType(Word):
    """Names of trackers."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    AIM, TRACKIO, COMETML, MLFLOW = "aim", "trackio", "comet_ml", "mlflow"
    CLEARML, DVCLIVE, SWANLAB = "clearml", "dvclive", "swanlab"


class ComputeEnvironment(Word):
    """The environment in which a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(Word):
    """Backends of ``torch.compile``; torch and the installed packages determine which ones are available."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(Word):
    """How DistributedDataParallel reduces a bucket of gradients."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class CustomDtype(Word):
    """Number formats that are not torch dtypes."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class FP8BackendType(Word):
    """Packages for 8-bit training."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class SageMakerDistributedType(Word):
    """Kinds of distributed training on SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"
