"""Gradients that wait for a step are in a state, in whatever form the strategy of then kept them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn

from paceline import Accelerator
from paceline.messages import PacelineWarning

ROWS = torch.arange(48.0).reshape(12, 4) / 48


def made(strategy: Any = None, steps: int = 3) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any, number: int, items: bool = False) -> None:
    """One micro-batch of 4 rows, split over the processes."""
    own = 4 // accelerator.num_processes
    start = 4 * number + own * accelerator.process_index
    with accelerator.accumulate(model):
        loss = model(ROWS[start : start + own]).square().mean()
        accelerator.backward(loss, num_items=own if items else None)
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator: Any, model: Any) -> list[torch.Tensor]:
    return [value.clone() for value in accelerator.get_state_dict(model).values()]


def whole(items: bool = False) -> list[torch.Tensor]:
    parts = made()
    for number in range(3):
        step(*parts, number, items)
    return weights(*parts[:2])


def begin(folder: str, strategy: Any, items: bool) -> None:
    parts = made(strategy)
    for number in range(2):
        step(*parts, number, items)
    parts[0].save_state(folder)


def end(folder: str, strategy: Any, items: bool) -> Any:
    parts = made(strategy)
    parts[0].load_state(folder)
    step(*parts, 2, items)
    return weights(*parts[:2]), parts[0].sync_gradients


@pytest.mark.parametrize("items", [False, True], ids=["micro-batches", "items"])
@pytest.mark.parametrize(
    ("then", "now"),
    [((2, "ddp"), (1, None)), ((1, None), (2, "ddp")), ((2, "ddp"), (2, "fsdp")), ((2, "fsdp"), (1, None))],
    ids=str,
)
def test_g3_a_window_goes_on_under_another_number_of_processes_or_strategy(
    tmp_path: Path, then: Any, now: Any, items: bool
) -> None:
    folder = str(tmp_path / "s")
    expected = whole(items)
    run(then[0], begin, folder, then[1], items)
    found, stepped = run(now[0], end, folder, now[1], items)[0]
    assert stepped
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def run(count: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if count == 1 else ranks(count, function, *args)


def test_models_that_are_trained_in_turn_keep_their_windows(tmp_path: Path) -> None:
    def both() -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        torch.manual_seed(0)
        models = [nn.Linear(4, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in models]
        accelerator.prepare(*models, *optimizers)
        return accelerator, models, accelerator.prepared.optimizers

    def train(parts: Any, which: int, number: int) -> None:
        step(parts[0], parts[1][which], parts[2][which], number)

    turns = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    alone = both()
    for turn in turns:
        train(alone, *turn)
    first = both()
    for turn in turns[:3]:
        train(first, *turn)
    first[0].save_state(tmp_path / "s")
    second = both()
    second[0].load_state(tmp_path / "s", strict=True)
    for turn in turns[3:]:
        train(second, *turn)
    for one, other in zip(alone[1], second[1], strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias, other.bias)


def test_a_loop_without_accumulate_keeps_gradients_that_wait(tmp_path: Path) -> None:
    """Two backwards for a step, by hand."""

    def micro(accelerator: Any, model: Any, optimizer: Any, number: int) -> None:
        accelerator.backward(model(ROWS[4 * number : 4 * number + 4]).square().mean() / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    alone = made(steps=1)
    for number in range(2):
        micro(*alone, number)
    first = made(steps=1)
    micro(*first, 0)
    first[0].save_state(tmp_path / "s")
    second = made(steps=1)
    second[0].load_state(tmp_path / "s")
    micro(*second, 1)
    assert all(map(torch.equal, weights(*alone[:2]), weights(*second[:2])))


def test_no_gradients_are_saved_once_they_were_stepped_with(tmp_path: Path) -> None:
    parts = made(steps=1)
    step(*parts, 0)
    parts[0].save_state(tmp_path / "s")
    state = torch.load(tmp_path / "s" / "state.ckpt", weights_only=True)["paceline"]["ranks"][0]
    assert state["gradients"] == {}


def test_a_strategy_that_cannot_save_gradients_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = made()
    step(*parts, 0)
    (placement,) = parts[0].prepared.placements.values()
    monkeypatch.setattr(placement.strategy, "window_gradients", lambda module: None)
    with pytest.warns(PacelineWarning, match=r"does not contain the gradients of 'Sequential'"):
        parts[0].save_state(tmp_path / "s")
    again = made()
    again[0].load_state(tmp_path / "s")
    assert again[0].gradient_state.window.count == 0
