from __future__ import annotations

from argparse import Namespace
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.loggers.values import flat, mapping, number, numbers, plain, words_in


class Color(Enum):
    RED = 1


@dataclass
class Options:
    lr: float = 0.1
    where: Path = Path("data")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, 1),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[3]]), 3),
        (torch.tensor([0.25], requires_grad=True), 0.25),
        (torch.nn.Parameter(torch.tensor(2.0)), 2.0),
        (np.float32(0.5), 0.5),
        (np.array([4]), 4),
        (np.int64(7), 7),
    ],
)
def test_a_single_number_of_any_library_becomes_a_python_number(value: Any, expected: float) -> None:
    result = number("loss", value)
    assert result == expected
    assert type(result) in (int, float)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("0.5", "'0.5' (of type str)"),
        (None, "None (of type NoneType)"),
        (torch.zeros(2, 3), "a Tensor of shape (2, 3)"),
        (torch.zeros(0), "a Tensor of shape (0,)"),
        (np.zeros(2), "a ndarray of shape (2,)"),
        ([1.0], "[1.0] (of type list)"),
        (1j, "1j (of type complex)"),
    ],
)
def test_what_is_not_one_number_is_refused_with_name_value_and_remedy(value: Any, part: str) -> None:
    with pytest.raises(TypeError, match=r"metric 'val/loss'") as error:
        number("val/loss", value)
    assert part in str(error.value)
    assert ".mean()" in str(error.value)


def test_nested_metrics_get_joined_names_and_the_prefix() -> None:
    assert numbers({"loss": {"train": 1.0, "val": 2.0}, "acc": 3.0}, "exp-") == {
        "exp-loss/train": 1.0,
        "exp-loss/val": 2.0,
        "exp-acc": 3.0,
    }


@pytest.mark.parametrize("params", [{"lr": 0.1}, Namespace(lr=0.1)])
def test_settings_come_as_dict_or_namespace(params: Any) -> None:
    assert mapping(params) == {"lr": 0.1}


def test_settings_come_as_dataclass_or_none() -> None:
    assert mapping(Options()) == {"lr": 0.1, "where": Path("data")}
    assert mapping(None) == {}


def test_settings_without_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"from \[1, 2\] \(of type list\), because every hyperparameter needs a name"):
        mapping([1, 2])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Color.RED, "RED"),
        (Path("a/b"), "a/b"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (torch.tensor(3), 3),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        ((1, (2, None)), [1, [2, None]]),
        (namedtuple("Pair", "a b")(1, 2), [1, 2]),
        ({"b", "a"}, ["a", "b"]),
        (range(3), [0, 1, 2]),
        ({1: Options()}, {"1": {"lr": 0.1, "where": "data"}}),
        (Namespace(x={"y": True}), {"x": {"y": True}}),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (len, "builtins.len"),
    ],
)
def test_every_setting_has_a_plain_form(value: Any, expected: Any) -> None:
    result = plain(value)
    assert result == expected
    assert type(result) is type(expected)


def test_flat_settings_hold_numbers_bools_and_text_only() -> None:
    settings = {"opt": {"lr": 0.1, "betas": (0.9, 0.99), "more": {}}, "name": None, "fast": True}
    assert flat(settings) == {
        "opt/lr": 0.1,
        "opt/betas": "[0.9, 0.99]",
        "opt/more": "{}",
        "name": "None",
        "fast": True,
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("val_loss", "val loss"),
        ("train/MSELoss-2.kl", "train mse loss mseloss 2 kl"),
        ("lossless_size", "lossless size"),
        ("val/mIoU", "val m io u miou"),
        ("top5", "top5 top"),
        ("valacc", "valacc acc"),
        ("train", "train"),
        ("", ""),
    ],
)
def test_the_words_of_a_name_are_found_at_separators_humps_digits_and_stages(name: str, words: str) -> None:
    assert words_in(name) == set(words.split())
