"""What may lie in a checkpoint: checked when it is written, with the place of what may not."""

from __future__ import annotations

import argparse
import datetime
import enum
import math
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint import single_file
from paceline.checkpoint.hyperparameters import AttributeDict
from paceline.checkpoint.plain_data import plain


class Color(enum.Enum):
    RED = 1


@dataclass
class Config:
    lr: float = 0.1


Point = namedtuple("Point", "x y")


def same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return bits and torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return a == b


tensors = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.floats(-100, 100), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**300), 2**300),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    st.binary(min_size=1),
    st.binary().map(bytearray),
    st.sampled_from([torch.float32, torch.int8, torch.device("cpu"), torch.Size([2, 3])]),
)
hashable = st.one_of(st.integers(), st.text(st.characters(codec="utf-8"), max_size=5), st.booleans())
trees = st.recursive(
    st.one_of(scalars, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(OrderedDict),
        st.sets(hashable, max_size=4),
    ),
    max_leaves=12,
)


@given(tree=trees)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_counts_as_plain_comes_back_from_the_file_as_it_was(tmp_path: Path, tree: Any):
    checkpoint = {"state_dict": {}, "tree": tree}
    assert plain(checkpoint, "checkpoint") is checkpoint
    single_file.write(checkpoint, tmp_path / "tree.ckpt")
    assert same(single_file.read(tmp_path / "tree.ckpt")["tree"], tree)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.longdouble(2.0), 2.0),
        (Path("a/b.txt"), "a/b.txt"),
        (AttributeDict(a=1, b=AttributeDict(c=np.int8(2))), {"a": 1, "b": {"c": 2}}),
        ({np.int64(1): (Path("x"), 2)}, {1: ("x", 2)}),
        (OrderedDict(a=np.float32(1)), OrderedDict(a=1.0)),
        (torch.__version__, str(torch.__version__)),
        (math.inf, math.inf),
        (b"", bytearray()),
    ],
)
def test_numpy_scalars_paths_and_dict_subclasses_become_plain(value: Any, expected: Any):
    assert same(plain(value, "here"), expected)


def test_nothing_is_copied_where_nothing_has_to_change():
    weights = torch.nn.Linear(2, 2).state_dict()
    kept = {"weights": weights, "counts": Counter("aab"), "list": [1, (2, "x")]}
    assert plain(kept, "here") is kept
    assert plain({"kept": kept, "path": Path("p")}, "here")["kept"] is kept


@pytest.mark.parametrize(
    ("value", "kind", "advice"),
    [
        (np.zeros(3), "numpy.ndarray", "torch.from_numpy(array)"),
        (Color.RED, "Color", "member.value"),
        (Config(), "Config", "dataclasses.asdict(value)"),
        (Point(1, 2), "Point", "value._asdict()"),
        (frozenset({1}), "builtins.frozenset", "set(value)"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "value.state_dict()"),
        (len, "builtin_function_or_method", "its name"),
        (argparse.Namespace(a=1), "argparse.Namespace", "vars(value)"),
        (datetime.timedelta(1), "datetime.timedelta", "str(value)"),
    ],
)
def test_what_would_name_code_is_refused_with_its_place_type_and_what_to_do(value: Any, kind: str, advice: str):
    with pytest.raises(TypeError) as caught:
        plain({"callbacks": {"Mine": [0, {"best": value}]}}, "checkpoint")
    message = str(caught.value)
    assert message.startswith("checkpoint['callbacks']['Mine'][1]['best'] is of type ")
    assert kind in message
    assert advice in message


def test_a_tensor_as_a_key_and_an_object_on_a_tensor_are_refused():
    with pytest.raises(TypeError, match=r"x has a tensor as a key"):
        plain({torch.tensor(1): 2}, "x")
    tensor = torch.zeros(1)
    tensor.note = Config()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"x\.note is of type .*Config"):
        plain(tensor, "x")


def test_a_type_the_user_declared_safe_is_kept(tmp_path: Path):
    with torch.serialization.safe_globals([datetime.timedelta]):
        single_file.write({"state_dict": {}, "length": datetime.timedelta(2)}, tmp_path / "a.ckpt")
        assert single_file.read(tmp_path / "a.ckpt")["length"] == datetime.timedelta(2)
