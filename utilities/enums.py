"""Words for arguments that are chosen among a few."""

from __future__ import annotations

from enum import Enum


class GradClipAlgorithmType(str, Enum):
    """Values of ``Trainer(gradient_clip_algorithm=)``; each equals its string."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Whether ``val`` is one of them."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """The strings."""
        return [word.value for word in GradClipAlgorithmType]
