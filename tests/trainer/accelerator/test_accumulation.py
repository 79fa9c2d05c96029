"""Windows of micro-batches: exact whatever their length, the loop's habits, the models in it and the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_loop import data, loss_of, network, train, weights
from processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline.trainer.accelerator.accelerator import Accelerator


def test_b10_b11_b13_a_step_is_made_at_each_windows_end_and_at_the_loaders_end() -> None:
    # 7 batches in windows of 3, twice: ceil(7 / 3) updates an epoch
    assert train(count=28, batch_size=4, gradient_accumulation_steps=3)[2] == 6


@pytest.mark.parametrize("count", [24, 28, 26], ids=["full", "short window", "short window and batch"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_b12_windows_of_an_accelerator_learn_what_one_big_batch_learns(count: int, clip: float | None) -> None:
    in_windows, _, updates = train(count, 2, clip=clip, shuffle=False, gradient_accumulation_steps=3)
    at_once, _, expected = train(count, 6, clip=clip, shuffle=False)
    assert updates == expected
    torch.testing.assert_close(in_windows, at_once, rtol=1e-10, atol=1e-12)


def test_gradients_cleared_at_the_beginning_of_a_micro_batch_are_not_lost() -> None:
    def loop(clear_first: bool) -> torch.Tensor:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = network()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(14), 2)
        )
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    if clear_first:
                        optimizer.zero_grad()
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    if not clear_first:
                        optimizer.zero_grad()
        return weights(model)

    assert torch.equal(loop(True), loop(False))


def test_gradients_that_the_loop_drops_on_purpose_are_dropped() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights(model)
    accelerator.backward(loss_of(model, data(4)[:]))
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert torch.equal(weights(model), before)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=2, max_size=7).filter(lambda sizes: sum(sizes) > 0),
    steps=st.integers(1, 4),
)
def test_b12_num_items_gives_the_mean_over_all_items_of_a_window(sizes: list[int], steps: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    reference = nn.Linear(3, 1, dtype=torch.float64)
    reference.load_state_dict(model.state_dict())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    items = [torch.randn(size, 3, dtype=torch.float64) for size in sizes]
    for batch in items:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean() if len(batch) else model(torch.zeros(1, 3).double()).sum() * 0
            accelerator.backward(loss, num_items=len(batch))
            optimizer.step()
            optimizer.zero_grad()
    for first in range(0, len(items) - len(items) % steps, steps):
        window = torch.cat(items[first : first + steps])
        if len(window):
            reference(window).square().mean().backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-10, atol=1e-12)


def test_num_items_for_some_losses_only_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    accelerator.backward(loss_of(model, data(4)[:]))
    with pytest.raises(ValueError, match="with every loss, or with none"):
        accelerator.backward(loss_of(model, data(4)[:]), num_items=4)


def test_an_evaluation_inside_a_window_ends_nothing() -> None:
    def loop(evaluate: bool) -> torch.Tensor:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader, held_out = accelerator.prepare(
            model, optimizer, DataLoader(data(16), 2), DataLoader(data(3), 1)
        )
        for number, batch in enumerate(loader):
            if evaluate and number == 2:
                for one in held_out:
                    model(one[0])
                    if number == 2:
                        break
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if evaluate and number == 5:
                with torch.no_grad():
                    assert len([model(one[0]) for one in held_out]) == 3
        return weights(model)

    assert torch.equal(loop(True), loop(False))


def test_two_models_trained_in_turn_have_windows_of_their_own() -> None:
    def adversaries() -> tuple[nn.Module, nn.Module, Any, Any]:
        torch.manual_seed(0)
        makes, judges = nn.Linear(2, 4).double(), nn.Linear(4, 1).double()
        return (
            makes,
            judges,
            torch.optim.SGD(makes.parameters(), lr=0.1),
            torch.optim.SGD(judges.parameters(), lr=0.1),
        )

    batches = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(2)).double()
    makes, judges, step_make, step_judge = adversaries()
    for first in range(0, 8, 2):  # by hand
        judges.zero_grad()
        for x in batches[first : first + 2]:
            (judges(makes(x).detach()).square().mean() / 2).backward()
        # the maker of each micro-batch sees the judge of that moment
        step_judge.step()
        makes.zero_grad()
        for x in batches[first : first + 2]:
            (-judges(makes(x)).mean() / 2).backward()
        step_make.step()
    expected = (weights(makes), weights(judges))

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    makes, judges, step_make, step_judge = adversaries()
    makes, judges, step_make, step_judge = accelerator.prepare(makes, judges, step_make, step_judge)
    for first in range(0, 8, 2):
        for x in batches[first : first + 2]:
            with accelerator.accumulate(judges):
                accelerator.backward(judges(makes(x).detach()).square().mean())
                step_judge.step()
                step_judge.zero_grad()
        for x in batches[first : first + 2]:
            with accelerator.accumulate(makes):
                accelerator.backward(-judges(makes(x)).mean())
                step_make.step()
                step_make.zero_grad()
        step_judge.zero_grad()
    assert torch.equal(weights(makes), expected[0])


def test_a_nested_window_leaves_the_outer_one_as_it_was() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    outer, inner = accelerator.prepare(network(), network())
    with accelerator.accumulate(outer):
        assert not accelerator.sync_gradients
        accelerator.backward(loss_of(outer, data(4)[:]))
    with accelerator.accumulate(outer):
        assert accelerator.sync_gradients
        with accelerator.accumulate(inner):
            assert not accelerator.sync_gradients
        assert accelerator.sync_gradients


def test_a_second_accelerator_leaves_the_first_one_as_it_was() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    assert (first.gradient_accumulation_steps, first.mixed_precision) == (4, "bf16")
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (1, "no")
    second.sync_gradients = False
    assert first.sync_gradients


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("count", "accumulate"), [(24, 1), (26, 3), (13, 2)])
def test_b4_b7_b9_two_processes_learn_what_one_with_their_batches_together_learns(
    strategy: str, count: int, accumulate: int
) -> None:
    alone, rates, updates = train(count, 4, clip=0.5, gradient_accumulation_steps=accumulate)
    found = ranks(2, _train_on, strategy, count, accumulate)
    torch.testing.assert_close(found[0][0], alone, rtol=1e-10, atol=1e-12)
    assert found[0][1] == found[1][1] == rates
    assert found[0][2] == updates


def _train_on(strategy: str, count: int, accumulate: int) -> Any:
    return train(count, 2, clip=0.5, strategy=strategy, gradient_accumulation_steps=accumulate)


def test_nothing_is_communicated_before_a_windows_last_micro_batch() -> None:
    for reductions in ranks(2, _reductions):
        assert reductions == [0, 0, 1] * 2


def _reductions() -> list[int]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations other than its own
        counts[-1] += 1
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    accelerator._placements[id(model)].strategy._wrapped.register_comm_hook(None, hook)  # type: ignore[attr-defined]
    for _ in range(6):
        counts.append(0)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, data(4)[:]))
            optimizer.step()
            optimizer.zero_grad()
    return counts
