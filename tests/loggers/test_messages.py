from __future__ import annotations

import os
from pathlib import Path

from paceline.loggers import messages


def test_a_path_is_shown_relative_to_the_working_directory_if_it_lies_below(tmp_path: Path) -> None:
    for path, shown in (
        (tmp_path / "logs" / "a", "logs/a"),
        (tmp_path, str(tmp_path)),
        (f"{tmp_path}s/a", f"{tmp_path}s/a"),
        ("logs/a", "logs/a"),
        ("s3://bucket/a", "s3://bucket/a"),
    ):
        assert messages.path(path) == shown
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert messages.path(tmp_path / "a") == str(tmp_path / "a")
    os.chdir(tmp_path)
