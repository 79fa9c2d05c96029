"""The interface between the loop and the machine, as a subclass sees it driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.strategies import SingleDevice, Strategy
from paceline.strategies.placement import move_optimizer_state

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
INTERFACE = (
    "setup_environment",
    "setup_module",
    "setup_optimizers",
    "batch_mover",
    "bind_step",
    "init_context",
    "backward",
    "scale_gradients",
    "unscale_gradients",
    "clip_by_norm",
    "clip_by_value",
    "optimizer_step",
    "model_state",
    "load_model_state",
    "optimizer_state",
    "load_optimizer_state",
    "teardown",
)


def recording(calls: list[str]) -> Strategy:
    """A third party's strategy that notes how it is driven."""

    def noting(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(SingleDevice, name)(self, *args, **kwargs)

        return method

    return type("Recording", (SingleDevice,), {name: noting(name) for name in INTERFACE})()


class Configures(TinyModule):
    def configure_model(self) -> None: ...


def test_a_fit_drives_a_strategy_in_the_documented_order(tmp_path: Any) -> None:
    calls: list[str] = []
    strategy = recording(calls)
    trainer = Trainer(**QUIET, max_epochs=1, strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(Configures(), tiny_loader(batches=3))
    assert calls == [
        "setup_environment",
        "init_context",
        "setup_module",
        "setup_optimizers",
        "bind_step",
        "batch_mover",
        *["backward", "backward", "unscale_gradients", "clip_by_norm", "optimizer_step"],
        *["backward", "scale_gradients", "unscale_gradients", "clip_by_norm", "optimizer_step"],
        "teardown",
    ]
    calls.clear()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert calls == ["model_state", "optimizer_state"]
    calls.clear()
    again = Trainer(**QUIET, max_epochs=2, strategy=strategy, gradient_clip_val=1.0, gradient_clip_algorithm="value")
    again.fit(Configures(), tiny_loader(batches=1), ckpt_path=tmp_path / "a.ckpt")
    assert calls == [
        *["setup_environment", "init_context", "setup_module", "load_model_state"],
        *["setup_optimizers", "load_optimizer_state"],
        *["bind_step", "batch_mover", "backward", "unscale_gradients", "clip_by_value", "optimizer_step"],
        "teardown",
    ]


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_evaluation_drives_a_strategy_without_a_step(entry: str) -> None:
    calls: list[str] = []
    getattr(Trainer(**QUIET, strategy=recording(calls)), entry)(TinyModule(), tiny_loader(batches=1))
    assert calls == ["setup_environment", "setup_module", "bind_step", "batch_mover", "teardown"]


@pytest.mark.parametrize("where", ["setup", "training_step", "teardown"])
def test_a_strategy_is_torn_down_once_after_an_error(where: str) -> None:
    calls: list[str] = []

    def fails(*args: Any) -> None:
        raise KeyError(where)

    module = TinyModule()
    setattr(module, where, fails)
    with pytest.raises(KeyError):
        Trainer(**QUIET, max_epochs=1, strategy=recording(calls)).fit(module, tiny_loader())
    assert calls.count("teardown") == 1
    assert calls[-1] == "teardown"


def test_a_strategy_is_told_of_an_exception_after_the_hooks() -> None:
    calls: list[Any] = []

    class Told(SingleDevice):
        def on_exception(self, exception: BaseException) -> None:
            calls.append(exception)

        def teardown(self) -> None:
            calls.append("teardown")
            super().teardown()

    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise error

        def on_exception(self, exception: BaseException) -> None:
            calls.append("hook")

    error = KeyError("here")
    with pytest.raises(KeyError):
        Trainer(**QUIET, max_epochs=1, strategy=Told()).fit(Fails(), tiny_loader())
    assert calls == ["hook", error, "teardown"]


def test_a_wrapper_routes_the_step_through_itself() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.calls = 0

        def forward(self, step: Any, *args: Any) -> Any:
            self.calls += 1
            return step(*args)

    class Wraps(SingleDevice):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return Wrapper(super().setup_module(module))

        def bind_step(self, step: Any, wrapped: nn.Module, training: bool = False) -> Any:
            return lambda *args: wrapped(step, *args)

    module, plain = TinyModule(), TinyModule()
    plain.load_state_dict(module.state_dict())
    trainer = Trainer(**QUIET, max_epochs=1, strategy=Wraps())
    trainer.fit(module, tiny_loader(), tiny_loader(batches=2))
    assert isinstance(trainer.model, Wrapper)
    assert trainer.model.calls == 4 + 2 + 2  # training, the sanity check, validation
    assert trainer.training_module is module
    Trainer(**QUIET, max_epochs=1, accelerator="cpu").fit(plain, tiny_loader())
    assert torch.equal(module.layer.weight, plain.layer.weight)


def test_the_single_device_trains_as_a_loop_by_hand_to_the_bit() -> None:
    module, hand = TinyModule(), TinyModule()
    hand.load_state_dict(module.state_dict())
    Trainer(**QUIET, max_epochs=2, strategy="single_device", accelerator="cpu").fit(module, tiny_loader())
    optimizer = torch.optim.SGD(hand.parameters(), lr=hand.lr)
    for _ in range(2):
        for batch in tiny_loader():
            hand.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), hand.parameters(), strict=True))


def test_optimizer_state_moves_and_a_step_counter_on_the_cpu_stays() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    move_optimizer_state(optimizer, torch.device("meta"))
    for state in optimizer.state.values():
        assert {name: value.device.type for name, value in state.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


def test_sparse_gradients_are_weighed_and_clipped() -> None:
    class Sparse(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Embedding(5, 1, sparse=True)  # type: ignore[assignment]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).pow(2).mean()

    batches = [torch.tensor([i, i]) for i in (0, 1, 2)]
    module, hand = Sparse(), Sparse()
    Trainer(**QUIET, max_epochs=1, accelerator="cpu", accumulate_grad_batches=2).fit(module, batches)
    optimizer = torch.optim.SGD(hand.parameters(), lr=hand.lr)
    for window in (batches[:2], batches[2:]):
        (sum(hand.layer(batch).pow(2).mean() for batch in window) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(module.layer.weight, hand.layer.weight)
