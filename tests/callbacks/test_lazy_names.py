from __future__ import annotations

import sys

import pytest

import paceline.callbacks as room
from paceline.callbacks.base import Callback


@pytest.mark.parametrize("name", room.__all__)
def test_every_exported_name_is_a_class_of_that_name(name: str) -> None:
    value = getattr(room, name)
    assert value.__name__ == name
    assert name == "RichProgressBarTheme" or issubclass(value, Callback)


def test_every_callback_class_of_the_room_is_exported() -> None:
    from pathlib import Path

    import paceline

    folder = Path(room.__file__).parent
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            __import__(f"paceline.callbacks.{path.stem}")
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("paceline.callbacks."):
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Callback) and value.__module__ == name:
                    found.add(value.__name__)
    assert paceline.callbacks is room
    bases = {"DrawnProgressBar", "CheckpointKeeper"}
    assert {name for name in found if not name.startswith("_")} - set(room.__all__) == bases


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'paceline\.callbacks' has no attribute 'Nothing'"):
        _ = room.Nothing
    assert "RichProgressBar" in dir(room)
