"""``LocalSGD``: no communication in between, averages on time, the numbers of a loop written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.local_sgd import LocalSGD
from paceline.strategies import DDPStrategy


def data(rank: int, count: int = 7) -> list[tuple[Tensor, Tensor]]:
    """A rank's batches, known to all."""
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)) for _ in range(count)]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].bias.requires_grad_(False)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def by_hand(every: int, window: int) -> dict[str, Tensor]:
    """The same on one process: two models that train apart and are averaged every so many updates and at the end."""
    pairs = [made(), made()]
    updates = 0
    batches = [data(0), data(1)]
    for index in range(len(batches[0])):
        last = index == len(batches[0]) - 1
        for (model, optimizer), own in zip(pairs, batches, strict=True):
            x, y = own[index]
            (nn.functional.mse_loss(model(x), y) / window).backward()
            if (index + 1) % window == 0 or (last and window == 1):
                optimizer.step()
                optimizer.zero_grad()
        updates += (index + 1) % window == 0
        if (index + 1) % window == 0 and updates % every == 0:
            average(pairs)
    if updates % every:
        average(pairs)
    return pairs[0][0].state_dict()


@torch.no_grad()
def average(pairs: Any) -> None:
    for a, b in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
        mean = (a + b) / 2
        a.copy_(mean)
        b.copy_(mean)


def trained(every: int, window: int, enabled: bool = True) -> tuple[dict[str, Tensor], int, bool]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    model, optimizer = accelerator.prepare(*made())
    averaged = 0
    real = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal averaged
        averaged += 1
        return real(*args, **kwargs)

    dist.all_reduce = counted
    apart = False
    with LocalSGD(accelerator, model, every, enabled) as local_sgd:
        for x, y in data(accelerator.process_index):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                apart |= not accelerator.strategy.same(str(model[0].weight.tolist()))
    dist.all_reduce = real
    return model.state_dict(), averaged, apart


@pytest.mark.parametrize(("every", "window"), [(3, 1), (2, 2)])
def test_local_sgd_equals_one_written_by_hand_to_the_bit(every: int, window: int) -> None:
    expected = by_hand(every, window)
    (first, count, apart), (second, _, _) = ranks(2, trained, every, window)
    assert apart
    for name, value in expected.items():
        assert torch.equal(first[name], value)
        assert torch.equal(second[name], value)
    averages = {(3, 1): 3, (2, 2): 2}[every, window]
    assert count == 3 * averages + 7  # the trained parameters; 7 times it is `same` above


def test_local_sgd_switched_off_is_synchronous_training() -> None:
    (first, _, apart), (second, _, _) = ranks(2, trained, 3, 1, False)
    assert not apart
    assert all(torch.equal(first[name], second[name]) for name in first)


def then_synchronous() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made())
    found = []
    with pytest.raises(KeyError), LocalSGD(accelerator, model, 2):
        raise KeyError
    for x, y in data(accelerator.process_index, 2):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.strategy.same(str(model[0].weight.tolist())))
    return found


def test_gradients_are_communicated_again_after_local_sgd_though_it_ended_with_an_error() -> None:
    assert ranks(2, then_synchronous) == [[True, True]] * 2


def without_a_last_backward() -> bool:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*made())
    with LocalSGD(accelerator, model, 2):
        for index, (x, y) in enumerate(data(accelerator.process_index, 2)):
            with accelerator.accumulate(model):
                if index == 0:
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
        return accelerator.strategy.same(str(model[0].weight.grad.tolist()))


def test_gradients_stay_local_also_where_a_window_ends_without_a_backward() -> None:
    assert ranks(2, without_a_last_backward) == [False, False]


def not_yet_recorded() -> None:
    accelerator = Accelerator(cpu=True, strategy=DDPStrategy(static_graph=True))
    model, optimizer = accelerator.prepare(*made())
    batches = data(accelerator.process_index)
    with pytest.raises(ValueError, match="Train one step first"), LocalSGD(accelerator, model, 2):
        pass
    accelerator.backward(nn.functional.mse_loss(model(batches[0][0]), batches[0][1]))
    optimizer.step()
    optimizer.zero_grad()
    with LocalSGD(accelerator, model, 2):
        accelerator.backward(nn.functional.mse_loss(model(batches[1][0]), batches[1][1]))
        assert not accelerator.strategy.same(str(model[0].weight.grad.tolist()))


def test_a_static_graph_is_recorded_before_local_sgd() -> None:
    ranks(2, not_yet_recorded)


def sharded() -> str:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = made()[0].requires_grad_(True)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.raises(NotImplementedError, match="each process holds only part of the model") as found,
        LocalSGD(accelerator, model, 2),
    ):
        pass
    return str(found.value)


def test_a_sharded_model_cannot_train_apart() -> None:
    assert all("Use strategy='ddp'" in text for text in ranks(2, sharded))


def test_local_sgd_on_one_process_changes_nothing() -> None:
    results = []
    for enabled in (True, False):
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*made())
        with LocalSGD(accelerator, model, 2, enabled) as local_sgd:
            for x, y in data(0):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_local_sgd_refuses_what_it_cannot_average() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="Linear that this accelerator has not prepared"):
        LocalSGD(accelerator, model, 2)
    with pytest.raises(ValueError, match=r"is less than 1"):
        LocalSGD(accelerator, accelerator.prepare(model), 0)


def resumed(folder: Path, save_after: int | None = None, load: bool = False, precision: str = "no") -> Any:
    """Train with local SGD for 7 batches; stop after ``save_after`` with a saved state, or continue from that state."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = made()
    loader = DataLoader(ConcatDataset([TensorDataset(*pair) for pair in data(0)]), batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(folder)
    for _ in range(loader.epoch, 2):
        with LocalSGD(accelerator, model, 3) as local_sgd:
            for x, y in loader:
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                if loader.epoch * 4 + loader.batches_done == save_after:
                    accelerator.save_state(folder)
                    return None
    return model.state_dict(), optimizer.state_dict(), local_sgd.num_steps


@pytest.mark.parametrize(("after", "precision"), [(2, "no"), (2, "fp16"), (6, "no")])
def test_a_state_saved_inside_local_sgd_resumes_bit_identically(after: int, precision: str, tmp_path: Path) -> None:
    whole = ranks(2, resumed, tmp_path / "whole", None, False, precision)
    ranks(2, resumed, tmp_path / "state", after, False, precision)
    rest = ranks(2, resumed, tmp_path / "state", None, True, precision)
    for (weights, state, _), (expected, expected_state, steps) in zip(rest, whole, strict=True):
        assert steps == 4
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        for index, values in expected_state["state"].items():
            assert torch.equal(state["state"][index]["momentum_buffer"], values["momentum_buffer"])


def on_one_process(folder: Path) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*made())
    accelerator.load_state(folder)
    return model.state_dict()


def apart(folder: Path) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made())
    with LocalSGD(accelerator, model, 8):
        for x, y in data(accelerator.process_index, 2):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(folder)
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_another_number_of_processes_resumes_with_the_mean_of_weights_that_trained_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    first, second = ranks(2, apart, tmp_path)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    for name, value in on_one_process(tmp_path).items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    assert "the weights of Sequential that processes trained apart (their mean)" in caplog.text
