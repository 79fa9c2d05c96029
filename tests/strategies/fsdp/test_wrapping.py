"""Which modules a wrap policy names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies.fsdp.wrapping import (
    check_ignored,
    check_shapes,
    checkpoint_activations,
    choose_blocks,
    find_ignored,
    parameter_ids,
)


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.gate = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * self.gate(x)


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Embedding(5, 4), nn.Dropout())
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(4, 5)


def names(policy: Any, root: nn.Module | None = None) -> list[str]:
    return list(choose_blocks(root or Net(), policy))


def test_auto_takes_the_repeated_block_and_not_the_layers_in_it(caplog: pytest.LogCaptureFixture) -> None:
    assert names("auto") == ["layers.0", "layers.1", "layers.2"]
    assert "3 Layer modules of Net" in caplog.text


def test_auto_finds_blocks_in_nested_containers() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Sequential(Layer(), Layer()), nn.Linear(4, 5))
    assert names("auto", net) == ["1.0", "1.1"]
    assert names("auto", nn.ModuleDict({"a": nn.ModuleList([Layer()]), "b": nn.ModuleList([Layer()])})) == [
        "a.0",
        "b.0",
    ]


def test_auto_without_a_repeated_block_takes_the_root_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert names("auto", nn.Linear(2, 2)) == []
    assert "FSDPStrategy(wrap=[...])" in caplog.text


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (None, []),
        ("root", []),
        (Layer, ["layers.0", "layers.1", "layers.2"]),
        ("Layer", ["layers.0", "layers.1", "layers.2"]),
        ([Layer, "Embedding"], ["stem.0", "layers.0", "layers.1", "layers.2"]),
        (lambda name, module: name.endswith("0.mlp"), ["layers.0.mlp"]),
        (40, ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
        (25, ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "head"]),
        (45, ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_policies_name_modules(policy: Any, found: list[str]) -> None:
    assert names(policy) == found


def test_a_policy_that_matches_nothing_names_the_classes_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"wrap=Conv2d\) matches no module.*Linear \(10\), Sequential \(4\), Layer \(3\)"
    ):
        names(nn.Conv2d)
    with pytest.raises(ValueError, match=r"wrap=100000\) matches no module"):
        names(100_000)
    with pytest.raises(ValueError, match=r"activation_checkpointing=.*matches no module"):
        checkpoint_activations(Net(), "Blok", {})


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"wrap=1\.5 is a float"):
        names(1.5)
    with pytest.raises(ValueError, match=r"is not a valid number of parameters"):
        names(0)
    with pytest.raises(ValueError, match=r"Linear has none"):
        checkpoint_activations(nn.Linear(1, 1), True, {})


def test_a_block_with_a_tied_parameter_stays_with_the_root(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.head.weight = net.stem[0].weight
    assert names([nn.Embedding, nn.Linear, Layer], net)[:2] == ["layers.0", "layers.0.mlp.0"]
    assert not {"head", "stem.0"} & set(names([nn.Embedding, nn.Linear], net))
    assert "'head' and 'stem.0'" in caplog.text
    inside = Net()
    inside.layers[1].mlp[0].weight = inside.layers[1].mlp[2].weight
    assert names([Layer, nn.Linear], inside).count("layers.1") == 1, "all of its places are inside"
    assert "layers.1.mlp.0" not in names([Layer, nn.Linear], inside)


def test_a_module_at_two_places_is_no_tied_parameter() -> None:
    layer = Layer()
    assert names("auto", nn.Sequential(layer, Layer(), layer)) == ["0", "1"]


def test_checkpointed_activations_change_neither_names_nor_gradients() -> None:
    torch.manual_seed(0)
    net, x = Layer(), torch.randn(2, 4)
    before = list(net.state_dict())
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    checkpoint_activations(net, nn.Sequential, {})
    net(x).sum().backward()
    assert list(net.state_dict()) == before
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)


# ---- ignored modules -------------------------------------------------------------------------------------------------


def test_modules_are_ignored_by_name_or_as_objects() -> None:
    net = Net()
    by_name = find_ignored(net, check_ignored(r"head|layers\..*gate"))
    assert by_name == [net.layers[0].gate, net.layers[1].gate, net.layers[2].gate, net.head]
    assert find_ignored(net, check_ignored(iter([net.head]))) == [net.head]
    assert check_ignored("") is check_ignored([]) is None
    for nothing, shown in (("gate", "'gate'"), ([nn.Linear(1, 1)], r"\[Linear\]")):
        with pytest.warns(match=rf"ignored_modules={shown}\) matches no module of Net"):
            assert find_ignored(net, check_ignored(nothing)) == []


@pytest.mark.parametrize(
    ("ignored", "kind", "match"),
    [
        ("*head", ValueError, "'\\*head' is not a valid regular expression"),
        (nn.Sequential(nn.Linear(1, 1)), TypeError, "is a Sequential. Pass a list of modules"),
        (["head"], TypeError, "is a list. Pass a list of modules, or a regular"),
        (3, TypeError, "is an int"),
    ],
)
def test_what_cannot_be_ignored_is_refused(ignored: Any, kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match):
        check_ignored(ignored)


def test_ignoring_every_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"covers every parameter of Net.*strategy='ddp'"):
        find_ignored(Net(), "stem|layers|head")


def test_blocks_are_chosen_by_their_sharded_parameters() -> None:
    net = Net()
    assert list(choose_blocks(net, "auto", parameter_ids([net.layers[1]]))) == ["layers.0", "layers.2"]
    assert list(choose_blocks(net, [nn.Linear], parameter_ids([net.layers]))) == ["head"]
    assert list(choose_blocks(net, 25, parameter_ids([net.layers]))) == ["head"]
    net.layers[0].gate.weight = net.layers[1].gate.weight
    assert list(choose_blocks(net, "auto")) == ["layers.2"]
    assert list(choose_blocks(net, "auto", parameter_ids([net.layers[0].gate]))) == ["layers.0", "layers.1", "layers.2"]
    net.head.temperature = nn.Parameter(torch.tensor(1.0))
    check_shapes(net, parameter_ids([net.head]))
