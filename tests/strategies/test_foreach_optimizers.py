"""Taking all parameters at once changes no bit, and nothing that the user chose."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.strategies.foreach_optimizers import FEWEST, MOST_ELEMENTS, SAME_BITS, SAME_BITS_IN, prefer_foreach

OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {
        "momentum": (0, 0.9),
        "dampening": (0, 0.1),
        "weight_decay": (0, 0.01),
        "nesterov": (False, True),
        "maximize": (False, True),
    },
    "Adam": {
        "weight_decay": (0, 0.01),
        "amsgrad": (False, True),
        "maximize": (False, True),
        "betas": ((0.9, 0.999), (0.5, 0.9)),
    },
    "AdamW": {"weight_decay": (0, 0.01), "amsgrad": (False, True), "maximize": (False, True)},
    "RMSprop": {
        "weight_decay": (0, 0.01),
        "momentum": (0, 0.9),
        "centered": (False, True),
        "maximize": (False, True),
    },
}


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    convolution = nn.Conv2d(2, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.ModuleList([nn.Linear(7, 33), nn.BatchNorm1d(33), convolution, nn.Linear(1, 1), nn.Embedding(5, 3)]).to(
        dtype
    )


def trained(kind: type[torch.optim.Optimizer], foreach: bool, options: dict[str, Any], dtype: torch.dtype) -> Any:
    module = network(dtype)
    optimizer = kind(module.parameters(), lr=0.03, **options)  # type: ignore[call-arg]
    if foreach:
        prefer_foreach([optimizer])
        assert optimizer.param_groups[0]["foreach"] is True
    generator = torch.Generator().manual_seed(4)
    for step in range(6):
        for number, parameter in enumerate(module.parameters()):
            drawn = torch.randn(parameter.shape, generator=generator) * 10.0 ** (number - 3)
            parameter.grad = None if step == 2 and number == 1 else drawn.to(dtype)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    return module.state_dict(), [list(state.values()) for state in optimizer.state.values()]


@pytest.mark.parametrize("dtype", SAME_BITS_IN, ids=str)
@pytest.mark.parametrize("kind", SAME_BITS, ids=lambda kind: kind.__name__)
def test_weights_and_states_are_the_same_to_the_bit_with_every_option(kind: Any, dtype: torch.dtype) -> None:
    names = OPTIONS[kind.__name__]
    for values in product(*names.values()):
        options = dict(zip(names, values, strict=True))
        if options.get("nesterov") and (not options["momentum"] or options["dampening"]):
            continue
        found, states = trained(kind, True, options, dtype)
        expected, expected_states = trained(kind, False, options, dtype)
        for name in expected:
            assert torch.equal(found[name], expected[name]), (options, name)
        for one, other in zip(states, expected_states, strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True)), options


def test_sparse_gradients_are_stepped_as_before() -> None:
    found = []
    for foreach in (False, True):
        torch.manual_seed(1)
        layers = [nn.Embedding(6, 4, sparse=number % 2 == 0) for number in range(FEWEST)]
        optimizer = torch.optim.SGD([layer.weight for layer in layers], 0.1)
        if foreach:
            prefer_foreach([optimizer])
        sum(layer(torch.tensor([1, 3, 3])).square().sum() for layer in layers).backward()  # type: ignore[union-attr]
        optimizer.step()
        found.append([layer.weight.detach() for layer in layers])
    assert all(map(torch.equal, *found))


def parameters(count: int = FEWEST, **made: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, **made)) for _ in range(count)]


@pytest.mark.parametrize("chosen", [{"foreach": False}, {"fused": True}, {"differentiable": True}])
def test_what_the_user_chose_stays(chosen: dict[str, bool]) -> None:
    optimizer = torch.optim.Adam(parameters(), **chosen)  # type: ignore[arg-type]
    before = dict(optimizer.param_groups[0])
    prefer_foreach([optimizer])
    assert optimizer.param_groups[0] == before


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_learning_rate_in_a_tensor_is_stepped_as_torch_does(kind: Any) -> None:
    found = []
    for foreach in (False, True):
        module = network(torch.float32)
        optimizer = kind(module.parameters(), lr=torch.tensor(0.01))
        if foreach:
            prefer_foreach([optimizer])
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append(list(module.parameters()))
    assert all(map(torch.equal, *found))


def test_states_do_not_tell_and_loading_one_chooses_again() -> None:
    optimizer, plain = torch.optim.AdamW(parameters()), torch.optim.AdamW(parameters())
    before = plain.state_dict()
    for _ in range(2):
        prefer_foreach([optimizer])
        assert optimizer.param_groups[0]["foreach"] is True
        assert optimizer.state_dict() == before
        optimizer.load_state_dict(before)
    assert optimizer.param_groups[0]["foreach"] is True
    assert copy.deepcopy(optimizer).param_groups[0]["foreach"] is True


def test_an_optimizer_of_which_one_group_is_set_stays() -> None:
    optimizer = torch.optim.SGD([{"params": parameters()}, {"params": parameters(), "foreach": True}], lr=0.1)
    prefer_foreach([optimizer])
    assert [group["foreach"] for group in optimizer.state_dict()["param_groups"]] == [None, True]


def test_only_small_groups_of_several_and_known_optimizers_are_changed() -> None:
    class Own(torch.optim.SGD):
        pass

    large = [*parameters(), nn.Parameter(torch.zeros(MOST_ELEMENTS))]
    groups = [parameters(), parameters(FEWEST - 1), large, parameters(device="meta"), parameters(dtype=torch.bfloat16)]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    own = Own(parameters(), lr=0.1)
    prefer_foreach([optimizer, own])
    assert [group["foreach"] for group in (*optimizer.param_groups, *own.param_groups)] == [True, *[None] * 5]


def test_a_fit_chooses_it() -> None:
    class Deep(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))  # type: ignore[assignment]

    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Deep(), tiny_loader())
    assert trainer.optimizers[0].param_groups[0]["foreach"] is True
