"""What ``prepare`` does where parameters are replaced: what belonged to the old ones follows, or is refused.

And ``join_uneven_inputs``: processes with fewer batches do not let the others wait.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import data, loss_of, network, weights, whole_weights
from rank_processes import RanksError, ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.parallelism_config import ParallelismConfig, TorchTensorParallelConfig
from paceline.accelerator.plugins import GradientAccumulationPlugin


def _go_on(strategy: str) -> torch.Tensor | None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for prepared in (False, True):
        if prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        for number in range(2):
            (accelerator.backward if prepared else torch.Tensor.backward)(loss_of(model, data(8 + number)[:]))
            optimizer.step()
            optimizer.zero_grad()
    return whole_weights(accelerator, model)


def test_an_optimizer_that_has_stepped_goes_on_when_its_model_is_sharded() -> None:
    replicated, sharded = (ranks(2, _go_on, strategy)[0] for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(sharded, replicated, rtol=1e-10, atol=1e-12)


def _share(whole_layer: bool) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    first, second = network(), network()
    if whole_layer:
        second[0] = first[0]
    else:
        second[0].weight = first[0].weight
    accelerator.prepare(first, second)


@pytest.mark.parametrize("whole_layer", [False, True])
def test_sharded_models_that_share_parameters_are_refused(whole_layer: bool) -> None:
    with pytest.raises(RanksError, match=r"shares 0\.weight with the prepared Sequential"):
        ranks(2, _share, whole_layer)


# ---- one call or several ------------------------------------------------------------------------------------------

#: Model, optimizer, scheduler and loader by their first letters.
CALLS = ("mosl", "m l o s")


def _trained(strategy: Any, calls: str, folder: Path) -> tuple[list[float], list[Any]]:
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, **strategy)
    model: Any = network(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    parts: dict[str, Any] = {
        "m": model,
        "o": optimizer,
        "s": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9),
        "l": DataLoader(data(12, torch.float32), 2, shuffle=True),
    }
    for call in calls.split():
        found = accelerator.prepare(*(parts[one] for one in call))
        parts.update(zip(call, found if len(call) > 1 else [found], strict=True))
    losses = []
    for batch in parts["l"]:
        loss = loss_of(parts["m"], batch)
        accelerator.backward(loss)
        for name in "os":
            parts[name].step()
        parts["o"].zero_grad()
        losses.append(loss.item())
    accelerator.save_state(folder)
    if not accelerator.is_main_process:
        return losses, []
    state = torch.load(folder / "state.ckpt", weights_only=True)
    del state["paceline"]["manifest"]
    return losses, [str(leaf) for leaf in tree_flatten(state)[0]]


def _in_each_order(strategy: Any, orders: tuple[str, ...], folder: Path) -> list[Any]:
    torch.set_printoptions(precision=10, threshold=10_000)
    if "mesh" in strategy:
        plan = {"0": "colwise", "2": "rowwise"}
        config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
        strategy = {"parallelism_config": config}
    return [_trained(strategy, calls, folder / calls.replace(" ", "_")) for calls in orders]


@pytest.mark.parametrize(
    ("strategy", "orders"),
    [
        ({"strategy": "ddp", "mixed_precision": "bf16"}, (*CALLS, "o m sl")),
        ({"strategy": "ddp"}, (*CALLS, "o m sl")),
        ({"strategy": "fsdp"}, CALLS),
        ({"mesh": "tp"}, CALLS),
        ({"strategy": "deepspeed_stage_2"}, CALLS),
        ({"strategy": "deepspeed_stage_3"}, CALLS),
    ],
)
def test_preparing_in_several_calls_gives_the_same_as_in_one(
    strategy: Any, orders: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "deepspeed" in strategy.get("strategy", ""):
        pytest.importorskip("deepspeed", reason="needs DeepSpeed")
        request.getfixturevalue("deepspeed_imported")
    for found in ranks(2, _in_each_order, strategy, orders, tmp_path):
        assert len(found[0][0]) >= 3
        assert all(one == found[0] for one in found)


def _optimizer_first(strategy: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    accelerator.prepare(torch.optim.SGD(network().parameters(), lr=0.1))


def test_a_sharding_strategy_needs_the_model_before_its_optimizer() -> None:
    with pytest.raises(RanksError, match=r"SGD has no parameters of a prepared model\..*prepare the model first"):
        ranks(2, _optimizer_first, "fsdp")


# ---- uneven inputs ------------------------------------------------------------------------------------------------

SAMPLES = 9


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def own_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Rank 0 has five batches, rank 1 three."""
    x, y = samples(16).tensors
    return [(x[i : i + 2], y[i : i + 2]) for i in (range(0, 10, 2) if rank == 0 else range(10, 16, 2))]


def on_unequal_batches(joined: bool, window: int = 1) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    model, optimizer = accelerator.prepare(*made())

    def train() -> None:
        for x, y in own_batches(accelerator.process_index):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    if joined:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            train()
    else:
        train()
    return model.state_dict()


def test_u12_uneven_data_would_hang_and_joined_do_not() -> None:
    with pytest.raises(RanksError):
        ranks(2, on_unequal_batches, False)
    model, optimizer = made()
    pairs = [own_batches(0), own_batches(1)]
    for index in range(5):
        losses = [nn.functional.mse_loss(model(x), y) for own in pairs for x, y in own[index : index + 1]]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(2, on_unequal_batches, True):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value)


def on_a_prepared_loader(window: int) -> tuple[dict[str, Tensor], list[list[float]], bool]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    model, optimizer, loader = accelerator.prepare(*made(), DataLoader(samples(), batch_size=2))
    seen = []
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x, y in loader:
            seen.append(y.flatten().tolist())
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict(), seen, loader.even_batches


def test_u12_prepared_loaders_give_each_sample_once_inside_and_are_even_again_after() -> None:
    (first, seen, even), (second, also_seen, _) = ranks(2, on_a_prepared_loader, 1)
    assert even
    assert len(seen) != len(also_seen)
    everything = sorted(value for batch in [*seen, *also_seen] for value in batch)
    assert everything == sorted(samples().tensors[1].flatten().tolist())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_joined_processes_may_accumulate() -> None:
    first, second = ranks(2, on_unequal_batches, True, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def two_epochs(count: int, size: int, window: int, each: bool, joined: bool) -> tuple[Tensor, Tensor, float]:
    """Train for two epochs; returns weights, Adam's first moments and the learning rate."""
    torch.manual_seed(0)
    plugin = GradientAccumulationPlugin(num_steps=window, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = network()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(data(count), batch_size=size)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for _ in range(2):
        with accelerator.join_uneven_inputs([model], even_batches=False) if joined else nullcontext():
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
    moments = torch.cat([state["exp_avg"].flatten() for state in optimizer.state_dict()["state"].values()])
    return weights(model), moments, schedule.get_last_lr()[0]


@pytest.mark.parametrize(
    ("count", "processes", "window", "each"),
    [(13, 2, 1, False), (13, 2, 2, False), (13, 2, 2, True), (19, 3, 4, True), (20, 3, 3, False)],
)
def test_joined_processes_learn_what_one_process_learns(count: int, processes: int, window: int, each: bool) -> None:
    expected = two_epochs(count, 2 * processes, window, False, False)
    for found in ranks(processes, two_epochs, count, 2, window, each, True):
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-10, atol=1e-12)
        assert found[2] == expected[2]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from torch.arange(6.0)


def join_a_stream(window: int) -> int:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    model = nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, DataLoader(Stream(), batch_size=4))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).sum())
    return loader.epoch


def test_joined_processes_cannot_accumulate_over_a_stream_without_a_length() -> None:
    assert ranks(2, join_a_stream, 1) == [1, 1]
    with pytest.raises(RanksError, match=r"does not support gradient_accumulation_steps=2 .*\(Stream\) has no length"):
        ranks(2, join_a_stream, 2)


def refused(strategy: str | None) -> Any:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, _ = accelerator.prepare(*made())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        pass


def test_a_sharded_model_cannot_be_joined() -> None:
    with pytest.raises(
        RanksError, match=r"NotImplementedError: FSDPStrategy does not support joinable, because each process holds"
    ):
        ranks(2, refused, "fsdp")


def test_one_process_has_nothing_to_join() -> None:
    refused(None)
    accelerator = Accelerator(cpu=True)
    with (
        pytest.raises(ValueError, match="a Linear that this accelerator has not prepared"),
        accelerator.join_uneven_inputs([nn.Linear(1, 1)]),
    ):
        pass
