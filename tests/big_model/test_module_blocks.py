"""Walking a module, and finding its repeated blocks."""

from __future__ import annotations

from torch import nn

from paceline.big_model.module_blocks import bottom_up, repeated_elements


def test_bottom_up_visits_children_first_and_each_module_once() -> None:
    layer = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    visited = [name for name, _ in bottom_up(nn.ModuleDict({"a": layer, "b": layer}))]
    assert visited == ["a.0", "a.1", "a", ""]


def test_what_repeats_inside_a_block_belongs_to_it() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2))
    model = nn.Module()
    model.first, model.blocks = nn.Linear(1, 1), blocks
    assert list(repeated_elements(model)) == ["blocks.0", "blocks.1"]
