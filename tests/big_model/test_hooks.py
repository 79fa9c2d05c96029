"""What is done before and after a module's forward."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.big_model.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

SEEN: list[str] = []


class Say(ModelHook):
    """Writes down what is called; raises where it is told to."""

    def __init__(self, name: str, fails: str = "") -> None:
        self.name = name
        self.fails = fails

    def _say(self, what: str) -> None:
        SEEN.append(f"{self.name} {what}")
        if what == self.fails:
            raise ZeroDivisionError(what)

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._say("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._say("pre")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._say("post")
        return output

    def failed(self, module: nn.Module) -> None:
        self._say("failed")

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self._say("detach")
        return module


class Double(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(2 * value for value in args), kwargs


class AddOne(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def test_hooks_change_what_goes_in_and_comes_out_and_can_be_removed() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = layer(x)
    assert add_hook_to_module(layer, Double()) is layer
    assert torch.equal(layer(x), nn.functional.linear(2 * x, layer.weight, layer.bias))
    add_hook_to_module(layer, AddOne())  # in its place
    assert torch.equal(layer(x), expected + 1)
    assert remove_hook_from_module(layer) is layer
    assert torch.equal(layer(x), expected)
    assert not {"forward", "_hf_hook", "_old_forward"} & vars(layer).keys()


def test_an_appended_hook_comes_after_the_other_which_is_not_begun_again() -> None:
    layer = nn.Identity()
    for name in "abc":
        add_hook_to_module(layer, Say(name), append=True)
    assert SEEN == ["a init", "b init", "c init"]
    SEEN.clear()
    layer(1)
    assert SEEN == ["a pre", "b pre", "c pre", "a post", "b post", "c post"]
    SEEN.clear()
    remove_hook_from_module(layer)
    assert SEEN == ["a detach", "b detach", "c detach"]
    assert layer(1) == 1


def test_a_replaced_hook_is_ended() -> None:
    layer = nn.Identity()
    add_hook_to_module(layer, Say("a"))
    add_hook_to_module(layer, Say("b"))
    assert SEEN == ["a init", "a detach", "b init"]


@pytest.mark.parametrize(
    ("fails", "seen"),
    [
        ("pre", ["a pre", "b pre", "a failed"]),
        ("post", ["a pre", "b pre", "c pre", "a post", "b post", "c failed"]),
    ],
)
def test_hooks_that_have_begun_are_told_that_another_failed(fails: str, seen: list[str]) -> None:
    layer = nn.Identity()
    add_hook_to_module(layer, SequentialHook(Say("a"), Say("b", fails), Say("c")))
    SEEN.clear()
    with pytest.raises(ZeroDivisionError):
        layer(1)
    assert seen == SEEN


def test_hooks_are_told_that_the_forward_failed() -> None:
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, SequentialHook(Say("a"), Say("b")))
    SEEN.clear()
    with pytest.raises(RuntimeError):
        layer(torch.ones(3))
    assert SEEN == ["a pre", "b pre", "a failed", "b failed"]


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "with another"])
def test_a_hook_may_forbid_gradients(wrapped: bool) -> None:
    class Frozen(ModelHook):
        no_grad = True

    layer = add_hook_to_module(nn.Linear(2, 2), Frozen())
    if wrapped:
        add_hook_to_module(layer, AddOne(), append=True)
    assert not layer(torch.ones(2)).requires_grad


def test_a_copy_runs_with_its_own_weights() -> None:
    layer, x = add_hook_to_module(nn.Linear(2, 2), AddOne()), torch.ones(1, 2)
    expected = layer(x)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    with torch.no_grad():
        layer.weight.zero_()
    for twin in twins:
        assert torch.equal(twin(x), expected)
        assert torch.equal(remove_hook_from_module(twin)(x) + 1, expected)


def test_the_forward_looks_as_it_did() -> None:
    class Named(nn.Module):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            """What it does."""
            return inputs

    module = add_hook_to_module(Named(), ModelHook())
    assert list(inspect.signature(module.forward).parameters) == ["inputs", "mask"]
    assert module.forward.__doc__ == "What it does."
    assert module(inputs=1, mask=2) == 1


def test_a_forward_of_the_instance_comes_back() -> None:
    layer = nn.Identity()
    layer.forward = lambda value: value + 5  # type: ignore[method-assign]
    add_hook_to_module(layer, AddOne())
    assert layer(1) == 7
    remove_hook_from_module(layer)
    assert layer(1) == 6


def test_submodules_lose_theirs_too() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    add_hook_to_module(model[1][0], AddOne())
    add_hook_to_module(model, AddOne())
    assert model(1) == 3
    remove_hook_from_submodules(model)
    assert model(1) == 1


def test_weights_of_one_layer_come_from_a_mapping() -> None:
    layer, x = nn.Linear(2, 2).to("meta"), torch.ones(1, 2)
    values = {"weight": torch.randn(2, 2), "bias": torch.randn(2)}
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=values))
    expected = nn.functional.linear(x, values["weight"], values["bias"])
    before = threading.active_count()
    for _ in range(2):
        assert torch.equal(layer(x), expected)
    assert threading.active_count() == before
    with torch.no_grad():
        layer.weight.add_(1)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    remove_hook_from_module(layer)
    assert layer.weight.device.type == "cpu"


def test_inputs_that_are_named_stay_where_they_are() -> None:
    hook = AlignDevicesHook("meta", skip_keys="cache")

    class Two(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            return x, cache

    model = add_hook_to_module(Two(), hook)
    x, cache = model(torch.ones(1), cache=torch.ones(1))
    assert (x.device.type, cache.device.type) == ("meta", "cpu")
