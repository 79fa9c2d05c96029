"""Where a module is cut, and how a step runs from one cut to the next; one process plays all stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.strategies.model_parallel.pipeline_stages import Passage, StageExit, StageRun, Stages, even_split

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor | None = None) -> Tensor:
        return x + torch.tanh(self.linear(x)) * mask + (0.0 if shift is None else shift)


class Net(nn.Module):
    """A mask made without weights, a shift made with one, and blocks between two layers."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.start = nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.sum(1, keepdim=True) > 0).float()
        h = self.first(x) + self.start
        shift = self.start * 2
        for block in self.blocks:
            h = block(h, mask, shift=shift)
        return self.last(h)


def pass_through(stages: Stages, step: Any, batch: Any) -> Any:
    """What the stages give one after the other, each with what the one before sends."""
    sent: tuple[Any, ...] = ()
    for index in range(stages.count):
        passage = Passage()
        if index:
            with pytest.raises(StageExit) as found, StageRun(stages, index, passage, stop_at_entry=True):
                step(batch)
            passage.wanted = found.value.leaves
            sent = tuple(sent[position] for position in passage.wanted)
        try:
            with StageRun(stages, index, passage, sent):
                return step(batch)
        except StageExit as left:
            sent = left.leaves
    raise AssertionError("the last stage left")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_one_after_the_other_compute_what_the_whole_computes(count: int) -> None:
    net = Net()
    x = torch.randn(5, 3)
    assert torch.equal(pass_through(Stages(net, count, CPU), net, x), net(x))


def test_only_what_comes_of_weights_is_sent() -> None:
    net = Net()
    passage = Passage()
    with pytest.raises(StageExit) as found, StageRun(Stages(net, 2, CPU), 1, passage, stop_at_entry=True):
        net(torch.randn(5, 3))
    assert found.value.count == 3
    assert found.value.leaves == (0, 2)  # not the mask


def test_a_temporary_tensor_has_its_own_shape_and_a_weight_one_stand_in() -> None:
    stages, weight = Stages(Net(), 2, CPU), nn.Parameter(torch.empty(5, device="meta"))
    twin = stages.without_value(weight)
    for size in range(1, 20):  # a tensor often has the id of the one that is gone
        assert stages.without_value(torch.empty(size, device="meta")).shape == (size,)
    assert stages.without_value(weight) is twin


def test_blocks_are_as_before_after_a_run() -> None:
    net = Net()
    before = [dict(vars(block)) for block in net.blocks]
    with pytest.raises(StageExit), StageRun(Stages(net, 2, CPU), 0, Passage()):
        net(torch.randn(5, 3))
    assert [dict(vars(block)) for block in net.blocks] == before


def test_a_run_tells_which_weights_the_stage_uses() -> None:
    net = Net()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    seen: set[int] = set()
    with pytest.raises(StageExit), StageRun(Stages(net, 2, CPU), 0, Passage(), seen=seen):
        net(torch.randn(5, 3))
    used = {names[i] for i in seen}
    assert {"first.weight", "start", "blocks.1.linear.bias"} <= used
    assert not any(name.startswith(("last", "blocks.2")) for name in used)


def test_an_in_place_write_of_a_weights_result_before_the_entry_is_refused() -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(len(x), 4)
            h[:, :] = self.start
            for block in self.blocks:
                h = block(h, torch.ones(1))
            return h

    net = Writes()
    with pytest.raises(RuntimeError, match="in place"), StageRun(Stages(net, 2, CPU), 1, Passage(), stop_at_entry=True):
        net(torch.randn(5, 3))


def test_a_sequential_is_cut_between_its_layers() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    stages = Stages(nn.ModuleDict({"net": net}), 3, CPU)
    assert stages.names == ["net.0", "net.1", "net.2", "net.3", "net.4"]
    assert stages.starts == [0, 2, 4]


def test_the_list_that_divides_most_of_the_parameters_is_cut() -> None:
    net = Net()
    head = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    whole = nn.Sequential(net, head)
    assert Stages(whole, 2, CPU).names == [f"0.blocks.{i}" for i in range(4)]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7), count=st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], count: int) -> None:
    from itertools import combinations

    heavy = [i for i, size in enumerate(sizes) if size]
    if len(heavy) < count:
        return
    starts = even_split(sizes, count)
    assert starts == sorted(set(starts))
    assert (starts[0], len(starts)) == (0, count)

    def largest(cuts: list[int]) -> int:
        ends = [*cuts[1:], len(sizes)]
        return max(sum(sizes[a:b]) for a, b in zip(cuts, ends, strict=True))

    assert largest(starts) == min(largest([0, *more]) for more in combinations(heavy[1:], count - 1))


def test_split_points_say_where_stages_begin() -> None:
    stages = Stages(Net(), 3, CPU, ["blocks.1", "blocks.3"])
    assert stages.starts == [0, 1, 3]
    assert stages.holders()["blocks.0.linear.weight"] == {0}
    assert stages.holders()["blocks.2.linear.weight"] == {1}
    assert stages.holders()["first.weight"] == {0, 1, 2}


def test_a_stage_may_begin_with_the_decoder() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Block() for _ in range(2))
            self.decoder = nn.ModuleList(Block() for _ in range(2))

    stages = Stages(Both(), 2, CPU, ["decoder.0"])
    assert stages.names == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert stages.starts == [0, 2]


def test_fewer_blocks_than_stages_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"Net has too few blocks .* for 3 pipeline stages"):
        Stages(Net(blocks=2), 3, CPU)


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no nn.ModuleList or nn.Sequential"):
        Stages(nn.Linear(2, 2), 2, CPU)


def test_one_module_at_two_places_is_refused() -> None:
    block = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"net.2 is the same module as net.0"):
        Stages(nn.ModuleDict({"net": nn.Sequential(block, nn.Linear(3, 3), block)}), 2, CPU)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (["blocks.9", "blocks.3"], "Unknown split_points name 'blocks.9'"),
        (["blocks.1"], "must list the name of the first module .*With 3 stages, the list must have 2 names"),
        ("blocks.1", "must list the name of the first module .*With 3 stages, the list must have 2 names"),
        (["blocks.3", "blocks.1"], "in the order in which the modules run"),
        (["blocks.1", "blocks.1.linear"], "is inside another"),
    ],
)
def test_split_points_that_cannot_be_are_refused(points: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Stages(Net(), 3, CPU, points)
