"""Windows of micro-batches: exact whatever their length, the loop's habits, the models in it and the ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_loop import data, loss_of, network, train, weights
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.kwargs_handlers import GradScalerKwargs
from paceline.accelerator.plugins import GradientAccumulationPlugin


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

    accelerator.prepared.placements[id(model)].strategy._wrapped.register_comm_hook(None, hook)  # type: ignore[attr-defined]
    for _ in range(6):
        counts.append(0)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, data(4)[:]))
            optimizer.step()
            optimizer.zero_grad()
    return counts


# ---- micro-batches that a loop leaves out ----------------------------------------------------------------------------


def pull(accelerator: Accelerator, model: nn.Module, by: float, **given: Any) -> None:
    """A backward whose gradient is ``by``."""
    accelerator.backward(model(torch.ones(1, 1)).sum() * by, **given)


def one_weight(**given: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **given)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_gradients_of_a_window_whose_last_micro_batch_has_no_backward_are_used_once() -> None:
    accelerator, model, optimizer = one_weight(gradient_accumulation_steps=2)
    for by in (1.0, None, 10.0, 10.0):
        with accelerator.accumulate(model):
            if by is not None:
                pull(accelerator, model, by)
            optimizer.step()
            optimizer.zero_grad()
    assert float(model.weight) == -11.0


def test_a_window_whose_last_micro_batch_is_left_out_takes_the_next_one() -> None:
    accelerator, model, optimizer = one_weight(gradient_accumulation_steps=2)
    for by in (1.0, None, 10.0, 4.0, 6.0):
        with accelerator.accumulate(model):
            if by is None:
                continue
            pull(accelerator, model, by)
            optimizer.step()
            optimizer.zero_grad()
    assert float(model.weight) == -(1 + 10) / 2 - (4 + 6) / 2


@pytest.mark.parametrize("accumulates", [True, False])
def test_items_of_gradients_that_the_loop_drops_do_not_count(accumulates: bool) -> None:
    accelerator, model, optimizer = one_weight()
    for by, bad in ((1.0, True), (10.0, False)):
        with accelerator.accumulate(model) if accumulates else nullcontext():
            pull(accelerator, model, by, num_items=4)
            if not bad:
                optimizer.step()
            optimizer.zero_grad()
    assert float(model.weight) == -10.0


def test_clipping_one_of_two_models_that_share_an_optimizer_sees_gradients_of_their_final_size() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, DataLoader([torch.ones(1)]))
    for batch in loader:  # one micro-batch in a window of four
        with accelerator.accumulate(first, second):
            accelerator.backward((first(batch) + second(batch)).sum())
            assert float(accelerator.clip_grad_norm_(second.parameters(), 0.5)) == 1.0


# ---- gradients that torch would leave with their process -------------------------------------------------------------


def _other_method(accelerator: Accelerator, model: nn.Sequential, x: torch.Tensor) -> None:
    accelerator.backward(model[2](model[1](model[0](x))).mean())


def _two_losses(accelerator: Accelerator, model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    accelerator.backward(out.mean(), retain_graph=True)
    accelerator.backward(out.square().mean())


def _train_by(step: Any, accumulate: int) -> torch.Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, _ = data(16)[:]
    for batch in x.chunk(accelerator.num_processes)[accelerator.process_index].chunk(4):
        with accelerator.accumulate(model):
            step(accelerator, model, batch)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [_other_method, _two_losses])
def test_ranks_agree_where_no_forward_of_the_model_goes_before_a_backward(step: Any, accumulate: int) -> None:
    first, second = ranks(2, _train_by, step, accumulate)
    assert torch.equal(first, second)


def test_two_losses_of_one_forward_are_averaged_over_the_ranks() -> None:
    def alike(accelerator: Accelerator, model: nn.Module, x: torch.Tensor) -> None:
        out = model(x)
        accelerator.backward(out.mean() + out.square().mean())

    found, expected = (ranks(2, _train_by, step, 2)[0] for step in (_two_losses, alike))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _thaw(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def _replace_head(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 1, dtype=torch.float64)
    for parameter in model[2].parameters():
        nn.init.ones_(parameter)


def _change_late(change: Any, all_frozen: bool) -> torch.Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    (model if all_frozen else model[0]).requires_grad_(False)
    model = accelerator.prepare(model)
    change(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in (data(16)[part :: accelerator.num_processes * 2] for part in range(accelerator.process_index, 4, 2)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("all_frozen", [False, True])
@pytest.mark.parametrize("change", [_thaw, _replace_head])
def test_parameters_that_come_or_thaw_after_prepare_are_averaged_over_the_ranks(change: Any, all_frozen: bool) -> None:
    first, second = ranks(2, _change_late, change, all_frozen)
    assert torch.equal(first, second)


def _switch_windows() -> torch.Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, other, optimizer = accelerator.prepare(model, nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = data(8)[accelerator.process_index :: 2]
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
    accelerator.gradient_accumulation_steps = 1
    with accelerator.accumulate(model, other):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
    return weights(model)


def test_a_window_of_other_models_communicates_although_one_of_them_was_kept_from_it() -> None:
    first, second = ranks(2, _switch_windows)
    assert torch.equal(first, second)


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust", [True, False])
def test_a_schedule_moves_once_an_update_whatever_adjust_scheduler_says(adjust: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data(20), 2), schedule)
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(round(schedule.get_last_lr()[0], 6))
    assert rates == [0.1, 0.09, 0.09, 0.08, 0.08, 0.07, 0.07, 0.06, 0.06, 0.05]


def _steps_of_one_call() -> list[int]:
    found = []
    for how in ({}, {"split_batches": True}, {"step_scheduler_with_optimizer": False}):
        accelerator, model, optimizer = one_weight(scheduler_steps="per_sample", **how)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
        pull(accelerator, model, 1.0)
        optimizer.step()
        schedule.step()
        found.append(schedule.last_epoch)
    return found


def test_schedules_count_the_batches_of_all_processes_only_where_each_process_has_batches_of_its_own() -> None:
    assert ranks(2, _steps_of_one_call) == [[2, 1, 1]] * 2


# ---- schedulers that are told a metric -------------------------------------------------------------------------------


def test_a_scheduler_that_is_told_a_metric_moves_after_a_pass_that_was_left_within_a_window() -> None:
    accelerator, model, optimizer = one_weight(gradient_accumulation_steps=4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0)
    plateau, loader = accelerator.prepare(plateau, DataLoader(data(4)))
    for _ in range(3):
        for _ in loader:
            with accelerator.accumulate(model):
                pull(accelerator, model, 1.0)
                optimizer.step()
                plateau.step(9.0)  # not counted: the window is open
            break
        plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def _on_a_plateau() -> float:
    accelerator, _, optimizer = one_weight(scheduler_steps="per_sample")
    plateau = accelerator.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=1))
    for _ in range(3):
        plateau.step(1.0)
    return optimizer.param_groups[0]["lr"]


def test_a_metric_is_told_once_where_schedules_count_the_batches_of_all_processes() -> None:
    assert ranks(2, _on_a_plateau) == [0.1, 0.1]


# ---- fp16 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_a_step_of_one_optimizer_does_not_change_the_loss_scale_within_a_window(together: bool) -> None:
    scaling = GradScalerKwargs(init_scale=8.0, growth_interval=1)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[scaling]
    )
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for model in models:
        nn.init.zeros_(model.weight)
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    pairs = list(zip(models, optimizers, strict=True))
    for _ in range(4):
        for window in [pairs] if together else [[pair] for pair in pairs]:
            with accelerator.accumulate(*(model for model, _ in window)):
                accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model, _ in window))
                for _, optimizer in window:
                    optimizer.step()
                    optimizer.zero_grad()
    assert [float(model.weight) for model in models] == [-2.0, -2.0]
