"""Values that ``paceline estimate-memory`` accepts, in a separate file so that ``--help`` does not import torch."""

from __future__ import annotations

#: Choices of --dtypes: the precision for training (None: no training), and the bits of a loaded weight.
DTYPES: dict[str, tuple[str | None, int]] = {
    "float32": ("32-true", 32),
    "bf16-mixed": ("bf16-mixed", 32),
    "fp16-mixed": ("16-mixed", 32),
    "bfloat16": ("bf16-true", 16),
    "float16": ("16-true", 16),
    "int8": (None, 8),
    "int4": (None, 4),
}
STRATEGIES = ("single_device", "ddp", "fsdp", "fsdp_cpu_offload")
LIBRARIES = ("transformers", "timm", "safetensors")
