"""Enums for arguments with a few allowed values."""

from __future__ import annotations

from enum import Enum


class GradClipAlgorithmType(str, Enum):
    """Values of ``Trainer(gradient_clip_algorithm=...)``; each member compares equal to its string."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Return True if ``val`` is one of the values."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Return the values as strings."""
        return [word.value for word in GradClipAlgorithmType]
