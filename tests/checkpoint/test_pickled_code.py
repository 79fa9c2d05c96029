from __future__ import annotations

import enum
import functools
import io
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.pickled_code import CALLS, CREATES, REFERS, uses


class Stage(enum.Enum):
    FIT = 1


class Listed(list):
    pass


class LoadsMore:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr(torch.storage, "_load_from_bytes"), (pickle.dumps(Path("a")),)  # noqa: B009


class Opens:
    def __reduce__(self) -> tuple[Any, ...]:
        return torch.load, ("elsewhere.pt",)


class RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def saved(value: Any, **options: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_each_name_is_listed_with_what_loading_would_do_and_nothing_is_run(
    tmp_path: Path, zipped: bool, protocol: int
) -> None:
    mark, listed = tmp_path / "ran", Listed([Namespace(lr=0.1), 2])
    listed.note = {"stage": Stage.FIT}  # type: ignore[attr-defined]
    contents = {
        "state_dict": {"weight": torch.ones(2), "scale": torch.nn.Parameter(torch.ones(1))},
        "hyper_parameters": [listed, functools.partial(os.path.join, "a"), RunsCode(mark)],
        "kinds": {Path: RunsCode},
    }
    stream = saved(contents, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    here = __name__
    assert uses(stream) == {
        "argparse.Namespace": CREATES,
        "functools.partial": CALLS,
        f"{Path.__module__}.Path": REFERS,  # pathlib._local in Python 3.13
        "posix.mkdir": CALLS,
        "posixpath.join": REFERS,
        f"{here}.Listed": CREATES,
        f"{here}.RunsCode": REFERS,
        f"{here}.Stage": CALLS,
    }
    assert not mark.exists()
    assert uses(saved({"state_dict": {"weight": torch.ones(2)}}, _use_new_zipfile_serialization=zipped)) == {}


def test_objects_of_old_protocols_and_damaged_files_are_read_as_far_as_they_go() -> None:
    old = pickle.dumps({"a": Namespace(lr=0.1), "b": Stage.FIT}, 0)
    assert uses(io.BytesIO(old)) == {"argparse.Namespace": CREATES, f"{__name__}.Stage": CALLS}
    assert uses(io.BytesIO(old[: len(old) // 2])) == {"argparse.Namespace": REFERS}
    assert "torch.nn.modules.linear.Linear" in uses(saved(torch.nn.Linear(1, 1)))
    assert uses(io.BytesIO(b"no pickle")) == {}


def test_a_file_that_loads_another_one_is_not_plain() -> None:
    assert uses(saved({"a": LoadsMore(), "b": Opens()})) == {
        "torch.serialization.load": CALLS,
        "torch.storage._load_from_bytes": CALLS,
    }
    plain = {"dtype": torch.float16, "shape": torch.Size([2]), "device": torch.device("cpu"), "layout": torch.strided}
    assert (
        uses(saved({**plain, "parameter": torch.nn.Parameter(torch.ones(1)), "sparse": torch.eye(2).to_sparse()})) == {}
    )
