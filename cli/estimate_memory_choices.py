"""What can be asked of ``paceline estimate-memory``."""

from __future__ import annotations

#: What can be asked for with --dtypes: the precision of a training, and the bits of a weight that is loaded.
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
