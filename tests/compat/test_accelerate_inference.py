"""A model spread over processes for inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn

from paceline import PartialState
from paceline.compat.accelerate.inference import prepare_pippy


@pytest.fixture(autouse=True)
def no_state() -> None:
    PartialState._reset_state()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))


def refused(points: list[str]) -> str:
    with pytest.raises(ValueError, match="split_points") as raised:
        prepare_pippy(network(), points, example_args=(torch.randn(2, 4),))
    return str(raised.value)


def infer() -> Any:
    state, model = PartialState(cpu=True), network()
    pipeline = prepare_pippy(model, example_args=(torch.randn(3, 4),), num_chunks=2)
    found = [pipeline(torch.arange(4.0 * rows).view(rows, 4)) for rows in (3, 5)]
    both = prepare_pippy(network(), ["2"], example_args=(torch.randn(2, 4),), gather_output=True)
    own = (torch.ones(2, 4),) if state.is_main_process else ()
    return pipeline is model, pipeline.hf_split_points, found, both(*own)


def test_the_last_process_has_the_outputs_of_a_model_in_parts() -> None:
    model = network()
    expected = [model(torch.arange(4.0 * rows).view(rows, 4)) for rows in (3, 5)]
    first, last = ranks(2, infer)
    assert first[:3] == (True, ["3"], [None, None])
    torch.testing.assert_close(last[2], expected)
    torch.testing.assert_close([first[3], last[3]], [model(torch.ones(2, 4))] * 2)


def refuse() -> Any:
    PartialState(cpu=True)
    return refused(["2", "3"]), refused(["9"])


def test_parts_that_do_not_fit_the_processes_are_refused_on_all_of_them() -> None:
    for parts, unknown in ranks(2, refuse):
        assert parts == (
            "prepare_pippy(split_points=['2', '3']) divides the model into 3 parts, but there are 2 "
            "processes, and each process runs one part. Pass 1 split points, or 'auto'."
        )
        assert "prepare_pippy(split_points=...): Unknown module '9'." in unknown


def test_one_process_keeps_the_model() -> None:
    model = network()
    assert prepare_pippy(model, example_args=(torch.randn(2, 4),)) is model
    assert "forward" not in vars(model)
