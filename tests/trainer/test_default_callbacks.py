"""The callbacks of a Trainer that the user did not give, and the order of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import Callback, Trainer
from paceline.callbacks import Checkpoint, ModelCheckpoint
from paceline.trainer import default_callbacks


def test_installed_packages_add_callbacks_unless_the_user_gives_one_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "brings_callbacks-1.0.dist-info"
    info.mkdir()
    (tmp_path / "brings_callbacks.py").write_text(
        "from paceline import Callback\n\n\nclass Theirs(Callback):\n    pass\n\n\n"
        "class Second(Callback):\n    pass\n\n\ndef both():\n    return [Theirs(), Second()]\n"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-callbacks\nVersion: 1.0\n")
    points = info / "entry_points.txt"
    points.write_text("[paceline.callbacks]\nboth = brings_callbacks:both\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    off: Any = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = Trainer(accelerator="cpu", **off)
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["Theirs", "Second"]
    own = type(trainer.callbacks[1])()
    assert Trainer(accelerator="cpu", callbacks=own, **off).callbacks[0] is own
    assert Trainer(accelerator="cpu", barebones=True).callbacks == []
    points.write_text("[paceline.callbacks]\nboth = brings_callbacks:__name__.upper\n")
    monkeypatch.syspath_prepend(str(tmp_path / "."))
    default_callbacks._points.cache_clear()
    with pytest.raises(TypeError, match=r"entry point 'both' .*returned 'B', which is not a Callback"):
        Trainer(accelerator="cpu", **off)
    points.write_text("[paceline.callbacks]\nboth = brings_callbacks:__name__.__len__\n")
    default_callbacks._points.cache_clear()
    with pytest.raises(TypeError, match=r"entry point 'both' .*returned 16, which is not a Callback"):
        Trainer(accelerator="cpu", **off)


def test_every_callback_that_saves_checkpoints_runs_after_the_others() -> None:
    class Own(Checkpoint):
        """A user's own."""

    off: Any = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    own, other, built_in = Own(), Callback(), ModelCheckpoint()
    trainer = Trainer(accelerator="cpu", callbacks=[own, built_in, other], **off)
    assert trainer.callbacks == [other, own, built_in]
