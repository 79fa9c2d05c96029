"""Words of settings: equal to plain strings, and found in any case."""

from __future__ import annotations

import pytest

from paceline.accelerator.enums import DistributedType, PrecisionType


def test_a_word_is_its_string_and_an_enumeration_knows_its_words() -> None:
    assert DistributedType("fsdp") is DistributedType.FSDP
    assert f"{DistributedType.FSDP}" == DistributedType.FSDP == "FSDP"
    assert "FSDP" in DistributedType
    assert DistributedType.FSDP in DistributedType
    assert "fp4" not in PrecisionType
    assert None not in PrecisionType
    with pytest.raises(ValueError, match=r"Unknown PrecisionType 'fp61'\. Did you mean 'fp16'\? Choose 'no', 'fp8'"):
        PrecisionType("fp61")
