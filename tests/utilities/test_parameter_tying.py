"""Parameters with several names are found, and tied again after a copy has torn them apart."""

from __future__ import annotations

from torch import nn

from paceline.utilities import find_shared_parameters, set_shared_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight


def test_what_is_shared_is_found_and_set_again() -> None:
    module = Tied()
    shared = find_shared_parameters(module)
    assert shared == [["first.weight", "second.weight"]]
    module.second.weight = nn.Parameter(module.first.weight.detach().clone())
    assert find_shared_parameters(module) == []
    assert set_shared_parameters(module, shared).second.weight is module.first.weight
