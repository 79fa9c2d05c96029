"""Scripts that are moved over step by step: what is left over is harmless, or is named."""

from __future__ import annotations

import io
import warnings
import weakref
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from own_loop import data, loss_of, network, weights
from rank_processes import RanksError, ranks
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from paceline.accelerator.accelerator import Accelerator
from paceline.messages import PacelineWarning


def test_k2_an_optimizer_that_was_not_prepared_is_named_where_it_would_step_too_early() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    with pytest.raises(RuntimeError, match=r"SGD has parameters of the prepared .* each of the 4 micro-batches"):
        accelerator.backward(loss_of(model, data(4)[:]))
    assert optimizer.param_groups


def test_the_optimizer_that_was_passed_to_prepare_is_named_where_it_steps_too_early() -> None:
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    model, prepared = accelerator.prepare(model, own)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, data(4)[:]))
            prepared.step()
            prepared.zero_grad()
    accelerator.backward(loss_of(model, data(4)[:]))
    with pytest.raises(
        RuntimeError, match=r"SGD\.step\(\) was called on the optimizer that was passed.*each of the 2 micro"
    ):
        own.step()


def test_looking_for_optimizers_passes_over_weak_proxies_of_what_has_gone() -> None:
    class Gone: ...

    proxy = weakref.proxy(Gone())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(network())
    accelerator.backward(loss_of(model, data(4)[:]))
    assert type(proxy) is weakref.ProxyType


def test_an_optimizer_that_was_not_prepared_is_harmless_where_every_batch_steps() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    before = weights(model)
    accelerator.backward(loss_of(model, data(4)[:]))
    optimizer.step()
    assert not torch.equal(weights(model), before)


def _optimizer_of_unsharded_parameters() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, data(4)[:]))
    optimizer.step()


def test_an_optimizer_of_a_sharded_models_old_parameters_is_named() -> None:
    with pytest.raises(RanksError, match="would update tensors that nothing uses"):
        ranks(2, _optimizer_of_unsharded_parameters)


def _prepared_one_after_the_other() -> Any:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    before = accelerator.prepared.placements[id(model)].strategy.model_state(model)
    accelerator.backward(loss_of(model, data(4)[:]))
    optimizer.step()
    after = accelerator.prepared.placements[id(model)].strategy.model_state(model)
    return not accelerator.is_main_process or any(not torch.equal(before[name], after[name]) for name in before)


def test_a_sharded_model_and_its_optimizer_may_be_prepared_one_after_the_other() -> None:
    assert ranks(2, _prepared_one_after_the_other) == [True, True]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_b15_a_scaler_of_the_scripts_own_changes_nothing_where_none_is_needed(precision: str) -> None:
    def loop(scaled: bool) -> torch.Tensor:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = network(torch.float32)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = GradScaler("cpu", init_scale=4.0)
        for _ in range(3):
            loss = loss_of(model, [t.float() for t in data(4)[:]])
            if scaled:
                accelerator.backward(scaler.scale(loss))
                scaler.step(optimizer)
                scaler.update()
            else:
                accelerator.backward(loss)
                optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    assert torch.equal(loop(True), loop(False))


@pytest.mark.parametrize("settings", [{"mixed_precision": "fp16"}, {"gradient_accumulation_steps": 2}])
def test_b15_a_scaler_of_the_scripts_own_is_named_where_it_would_spoil_gradients(settings: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    model = network(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = GradScaler("cpu")
    accelerator.backward(scaler.scale(loss_of(model, [t.float() for t in data(4)[:]])))
    with pytest.raises(RuntimeError, match=r"Delete the scaler: scaler.scale\(loss\)"):
        scaler.step(optimizer)


def test_a_scaler_in_prepare_is_refused() -> None:
    with pytest.raises(ValueError, match="Delete the scaler and all calls to it"):
        Accelerator(cpu=True).prepare(GradScaler("cpu"))


def test_a_model_that_was_not_prepared_is_named_by_accumulate() -> None:
    with pytest.raises(ValueError, match="got a Sequential that was not prepared"):
        Accelerator(cpu=True).accumulate(network())


def test_b15_moving_by_hand_is_harmless() -> None:
    accelerator = Accelerator(cpu=True)
    model = network().to(accelerator.device)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.to(accelerator.device)
    accelerator.backward(loss_of(model, [t.to(accelerator.device) for t in data(4)[:]]))
    optimizer.step()


def _unused_parameters() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.ModuleDict({"used": network(), "idle": network()})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(loss_of(model, data(4)[:]))
        optimizer.step()
        optimizer.zero_grad()


def test_k2_parameters_without_gradients_are_named_on_several_processes() -> None:
    with pytest.raises(RanksError, match=r"idle.*DistributedDataParallelKwargs\(find_unused_parameters=True\)"):
        ranks(2, _unused_parameters)


def test_an_optimizer_that_was_not_prepared_is_named_where_losses_are_weighed_by_items() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    with pytest.raises(RuntimeError, match="not yet been divided by the number of items"):
        accelerator.backward(loss_of(model, data(4)[:]), num_items=4)
    del optimizer


def _messages_of_the_first_step(prepared: str, **settings: Any) -> list[str]:
    accelerator = Accelerator(cpu=True, **settings)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizer": optimizer, "loader": DataLoader(data(8), batch_size=2)}
    given.update({name: accelerator.prepare(given[name]) for name in prepared.split()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in given["loader"]:
            accelerator.backward(loss_of(given["model"], batch))
            given["optimizer"].step()
            given["optimizer"].zero_grad()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("prepared", "said"),
    [
        ("optimizer loader", "SGD has no parameter of a prepared model"),
        ("loader", "no model was prepared"),
        ("model optimizer", "no prepared loader is in use"),
    ],
)
def test_what_was_not_prepared_is_named_on_several_processes(prepared: str, said: str) -> None:
    own, other = ranks(2, _messages_of_the_first_step, prepared)
    assert [said in message for message in own] == [True]
    assert other == []


def test_complete_scripts_hear_nothing() -> None:
    assert ranks(2, _messages_of_the_first_step, "model optimizer loader") == [[], []]
    assert _messages_of_the_first_step("") == []


def test_steps_outside_of_accumulate_are_named_where_gradients_are_to_be_accumulated() -> None:
    (said,) = _messages_of_the_first_step("model optimizer loader", gradient_accumulation_steps=2)
    assert "SGD stepped after 1 micro-batch outside of `with accelerator.accumulate(model):`" in said


def _one_optimizer_for_two_sharded_models() -> None:
    first, second = network(), network()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    Accelerator(cpu=True, strategy="fsdp").prepare(first, second, optimizer)


def test_one_optimizer_for_two_sharded_models_is_refused() -> None:
    with pytest.raises(RanksError, match=r"SGD has parameters of 2 prepared models .* one optimizer per model"):
        ranks(2, _one_optimizer_for_two_sharded_models)


def _zipped() -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, short, long = accelerator.prepare(
        model, optimizer, DataLoader(data(5), 2), DataLoader(data(8), 2)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one, _ in zip(short, long, strict=False):
            accelerator.backward(loss_of(model, one))
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def test_loaders_that_are_read_at_once_and_end_unevenly_are_named() -> None:
    own, _ = ranks(2, _zipped)
    assert ["Several prepared loaders are read at once" in message for message in own] == [True]


def _update_of_a_pass(rows: int, ahead: int, count: bool, skipped: int | None = None) -> tuple[Tensor, list[str]]:
    """The weights after one update from a pass that is read ``ahead`` batches at a time, and what is said."""
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(rows), 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = iter(loader)
        for first in range(0, len(loader), ahead):
            group = [next(batches) for _ in range(min(ahead, len(loader) - first))]
            for number, batch in enumerate(group, first):
                if number != skipped:
                    accelerator.backward(loss_of(model, batch), num_items=len(batch[0]) if count else None)
        optimizer.step()
        list(batches)  # the pass ends
    return weights(model), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("count", [False, True])
def test_a_loop_that_reads_batches_ahead_of_their_backward_passes_has_the_weights_of_one_that_does_not(
    count: bool,
) -> None:
    for rows in (5, 7, 11):  # of 5 rows, the second process has no last one of its own
        (expected, said), _ = ranks(2, _update_of_a_pass, rows, 1, count)
        assert said == []
        for ahead in (2, 3):
            (found, said), _ = ranks(2, _update_of_a_pass, rows, ahead, count)
            torch.testing.assert_close(found, expected)
            assert said == []


def test_a_loop_that_skips_a_batch_has_the_weights_of_the_others() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, data(7)[4:]).backward()
    optimizer.step()
    (found, said), _ = ranks(2, _update_of_a_pass, 7, 1, False, 0)
    torch.testing.assert_close(found, weights(model))
    assert said == []


def test_a_loop_that_reads_ahead_and_skips_is_told_that_the_last_batch_was_not_weighted() -> None:
    (_, said), (_, other) = ranks(2, _update_of_a_pass, 15, 2, False, 2)
    assert ["skipped one of them" in text for text in said] == [True]
    assert other == []  # only rank 0 speaks


def _said_of_counted_batches(rows: int) -> list[str]:
    with redirect_stderr(io.StringIO()) as printed:
        _, warned = _update_of_a_pass(rows, 2, True, 2)
    return warned + printed.getvalue().splitlines()


def test_a_loop_that_counts_reads_ahead_and_skips_is_told_only_of_a_batch_that_repeats_another_ranks() -> None:
    assert ranks(2, _said_of_counted_batches, 15) == [[], []]
    own, other = ranks(2, _said_of_counted_batches, 13)
    assert own == []
    assert ["Rank 1's last batch only repeats samples of another rank" in line for line in other] == [True]


def test_a_plain_loop_after_a_window_that_was_left_is_told_that_nothing_steps() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, data(4)[:]))
    with pytest.warns(PacelineWarning, match="a window has only 1 of 3 micro-batches"):
        accelerator.backward(loss_of(model, data(4)[:]))
    optimizer.step()


def _windows_with(backward: str, **settings: Any) -> list[str]:
    """What is said in four micro-batches of two updates whose backward pass is ``backward``."""
    accelerator = Accelerator(cpu=True, **settings)
    model, other = network(torch.float32), network(torch.float32)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    model, other, optimizer = accelerator.prepare(model, other, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = loss_of(model, data(4, torch.float32)[:])
                if backward == "plain":
                    loss.backward()
                elif backward == "scaled":
                    accelerator.scaler.scale(loss).backward()
                elif backward == "nested":
                    with accelerator.accumulate(other):
                        accelerator.backward(loss + loss_of(other, data(4, torch.float32)[:]))
                elif backward == "accelerator":
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                if backward == "none":  # gradients that are all zero
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
    return [str(warning.message) for warning in caught]


def test_a_plain_backward_inside_accumulate_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"SGD.step\(\) .* the window of 2 micro-batches would never be complete. Call acc"
    ):
        _windows_with("plain", gradient_accumulation_steps=2)


def test_a_backward_without_the_accelerator_is_named_once_under_fp16() -> None:
    (said,) = _windows_with("scaled", mixed_precision="fp16")
    assert "SGD.step() divides gradients by the fp16 loss scale" in said
    assert "accelerator.backward(loss) instead of loss.backward()" in said


@pytest.mark.parametrize("backward", ["accelerator", "nested", "none"])
def test_windows_without_a_plain_backward_hear_nothing(backward: str) -> None:
    assert _windows_with(backward, gradient_accumulation_steps=2) == []
    assert _windows_with("plain") == []


def test_a_misspelled_argument_is_corrected() -> None:
    with pytest.raises(TypeError, match="Did you mean 'mixed_precision'"):
        Accelerator(mixed_precison="bf16")  # type: ignore[call-arg]
