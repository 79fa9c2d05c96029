"""Whether a user's class has a method of its own."""

from __future__ import annotations

import pytest

from paceline import Callback, DataModule, TrainingModule
from paceline.utilities import is_overridden


class Own(TrainingModule):
    def training_step(self) -> None: ...


def test_a_method_of_the_class_or_the_instance_counts() -> None:
    module = Own()
    assert is_overridden("training_step", module)
    assert not is_overridden("validation_step", module)
    module.validation_step = lambda batch: None  # type: ignore[method-assign,assignment]
    assert is_overridden("validation_step", module)
    assert not is_overridden("on_fit_start", Callback())
    assert not is_overridden("setup", DataModule())
    assert not is_overridden("setup", None)


def test_a_stranger_needs_its_base_class() -> None:
    with pytest.raises(ValueError, match="Pass its base class as parent"):
        is_overridden("x", object())
    with pytest.raises(ValueError, match="Own has no method with this name"):
        is_overridden("nothing", Own(), Own)
