"""Words for arguments."""

from __future__ import annotations

from paceline.utilities import GradClipAlgorithmType


def test_a_word_equals_its_string() -> None:
    assert GradClipAlgorithmType.NORM == "norm"
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert GradClipAlgorithmType.supported_type("norm")
    assert not GradClipAlgorithmType.supported_type("x")
