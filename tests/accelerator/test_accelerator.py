"""The object itself: made anywhere, what it gives back, what it says of itself."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loop import data, loss_of, network, train, weights
from rank_processes import RanksError, ranks
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline import Accelerator, GradScalerKwargs, TorchDynamoPlugin, set_seed
from paceline.accelerator.enums import DistributedType

ROOMS = tuple(str(Path(paceline.__file__).resolve().parent / room) for room in ("accelerator", "strategies", "trainer"))


def test_a4_b1_b2_no_argument_is_needed_and_everything_is_on_its_device() -> None:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(network(), DataLoader(data(4), 2))
    assert isinstance(accelerator.device, torch.device)
    assert {p.device for p in model.parameters()} == {accelerator.device}
    assert {t.device for batch in loader for t in batch} == {accelerator.device}
    assert (accelerator.num_processes, accelerator.is_main_process) == (1, True)
    assert accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU)


def test_a2_an_apple_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.processes.devices.count", lambda kind: int(kind in ("mps", "cpu")))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert Accelerator().device.type == "mps"
    assert Accelerator(cpu=True).device.type == "cpu"


@pytest.mark.gpu
def test_a3_a13_on_a_gpu_the_same_loop_learns_what_the_cpu_learns() -> None:
    found, _, _ = train(cpu=False)
    expected, _, _ = train(cpu=True)
    assert found is not None
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-10)


def test_a8_a_users_error_ends_in_the_users_line_with_few_frames_of_ours() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Broken())
    with pytest.raises(KeyError) as caught:
        model(torch.ones(1, 4))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "forward"
    assert frames[-1].filename == __file__
    assert len([frame for frame in frames if frame.filename.startswith(ROOMS)]) <= 4


def test_b3_h2_objects_come_back_in_the_order_given_and_one_alone() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = DataLoader(data(4), 2)
    other = {"lr": 1}
    found = accelerator.prepare(schedule, other, loader, optimizer, model)
    assert found[1] is other
    assert found[4] is model
    assert (found[0].scheduler, found[3].optimizer) == (schedule, optimizer)
    assert accelerator.prepare(loader) is not loader
    assert isinstance(accelerator.prepare(DataLoader(data(4), 2)), DataLoader)
    assert all(accelerator.prepare(one) is one for one in found)


def test_b4_a_scheduler_moves_once_for_each_step_on_any_number_of_processes() -> None:
    expected = train(count=24, batch_size=4)[1]
    for _, rates, _ in ranks(2, lambda: train(count=24, batch_size=2)):
        assert rates == expected
    for _, rates, _ in ranks(2, lambda: train(count=24, batch_size=2, scheduler_steps="per_sample")):
        assert rates[-1] == pytest.approx(0.05 * 0.9**12)  # 12 batches move it 24 steps


def test_b7_gradients_are_those_of_plain_pytorch() -> None:
    plain, prepared = network(), network()
    loss_of(plain, data(6)[:]).backward()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(prepared)
    accelerator.backward(loss_of(prepared, data(6)[:]))
    for mine, expected in zip(prepared.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert expected.grad is not None
        assert torch.equal(mine.grad, expected.grad)


def test_b8_an_overflow_in_fp16_skips_the_step_and_the_schedule_waits() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40, growth_interval=1000)]
    )
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    skipped = []
    for _ in range(40):
        before = weights(model)
        accelerator.backward(loss_of(model, [t.float() for t in data(4)[:]]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert torch.equal(before, weights(model)) is skipped[-1]
    assert skipped[0]
    assert not skipped[-1]
    assert schedule.scheduler.last_epoch == skipped.count(False)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "LBFGS"])
def test_b20_optimizers_of_torch_learn_what_they_learn_alone(kind: str) -> None:
    def loop(prepared: bool) -> torch.Tensor:
        model = network()
        optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
        accelerator = Accelerator(cpu=True)
        if prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, data(8)[:])
                accelerator.backward(loss) if prepared else loss.backward()
                return loss

            if kind == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return weights(model)

    assert torch.equal(loop(True), loop(False))


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 20}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
        ("ReduceLROnPlateau", {"patience": 0}),
        ("SequentialLR", {}),
    ],
)
def test_b20_schedulers_of_torch_make_the_curve_they_make_alone(kind: str, arguments: Any, when: str) -> None:
    def make(optimizer: Any) -> Any:
        module = torch.optim.lr_scheduler
        if kind == "SequentialLR":
            parts: Any = [module.LinearLR(optimizer, total_iters=2), module.ExponentialLR(optimizer, 0.9)]
            return module.SequentialLR(optimizer, parts, [2])
        return getattr(module, kind)(optimizer, **arguments)

    def curve(prepared: bool) -> list[float]:
        model = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        accelerator, schedule = Accelerator(cpu=True), make(optimizer) if when == "before prepare" else None
        if prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        schedule = schedule or make(optimizer)
        schedule = accelerator.prepare(schedule) if prepared else schedule
        rates = []
        for _ in range(8):
            loss = loss_of(model, data(8)[:])
            accelerator.backward(loss) if prepared else loss.backward()
            optimizer.step()
            schedule.step(1.0) if kind == "ReduceLROnPlateau" else schedule.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert curve(True) == curve(False)


def drawn(specific: bool) -> tuple[float, float, float]:
    set_seed(7, device_specific=specific)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_b19_set_seed_seeds_everything_and_lets_ranks_differ() -> None:
    assert drawn(False) == drawn(False)
    same = ranks(2, drawn, False)
    assert same[0] == same[1]
    apart = ranks(2, drawn, True)
    assert all(mine != theirs for mine, theirs in zip(*apart, strict=True))


def test_e7_batches_of_three_shapes_compile_at_most_three_graphs() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, "counts_graphs")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.compile(network(), backend="counts_graphs"))
    for size in [2, 5, 3] * 4:
        model(data(size)[:][0])
    assert 1 <= len(graphs) <= 3
    assert TorchDynamoPlugin(backend="eager").compiles


def test_f9_a_loss_is_this_processs_and_reduce_gives_that_of_all() -> None:
    def losses() -> tuple[float, float]:
        accelerator = Accelerator(cpu=True)
        loss = torch.tensor(float(accelerator.process_index))
        return loss.item(), accelerator.reduce(loss, "mean").item()

    assert ranks(2, losses) == [(0.0, 0.5), (1.0, 0.5)]


def test_h4_evaluating_without_no_grad_works() -> None:
    def evaluate() -> int:
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(network(), DataLoader(data(7), 2))
        model.eval()
        return sum(len(accelerator.gather_for_metrics(model(x))) for x, _ in loader)

    assert ranks(2, evaluate) == [7, 7]


def on_the_main_process_only() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))
    accelerator.wait_for_everyone()


def different_shapes() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gather(torch.ones(2, 2 + accelerator.process_index))


def test_k2_a_collective_of_one_process_and_different_shapes_are_named() -> None:
    with pytest.raises(RanksError, match="all_gather"):
        ranks(2, on_the_main_process_only)
    with pytest.raises(RanksError, match=r"rank 0: .*\(2, 2\).*rank 1: .*\(2, 3\)"):
        ranks(2, different_shapes)


@pytest.mark.cold
def test_k4_the_class_costs_little_to_import() -> None:
    code = (
        "import torch, sys, json; before = set(sys.modules); import paceline; paceline.Accelerator; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = {"wandb", "tensorboard", "torchmetrics", "transformers", "yaml", "numpy", "rich", "deepspeed"}
    assert not heavy & {name.partition(".")[0] for name in json.loads(out)}


def test_every_argument_is_described() -> None:
    said = inspect.getdoc(Accelerator) or ""
    assert [name for name in inspect.signature(Accelerator).parameters if f"{name}:" not in said] == []


def test_freed_memory_leaves_plain_models_but_evaluation_goes_on_as_prepared() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(network())
    reference = accelerator.prepare_model(torch.nn.Linear(3, 1), evaluation_mode=True)
    assert "forward" in vars(model)
    before = reference(torch.full((1, 3), 0.1))
    assert accelerator.free_memory(model) == [None]
    assert "forward" not in vars(model)
    assert not accelerator.prepared.models
    assert torch.equal(reference(torch.full((1, 3), 0.1)), before)
    with torch.autocast("cpu", enabled=False):
        assert not torch.equal(type(reference).forward(reference, torch.full((1, 3), 0.1)), before)


def test_a_trigger_of_one_process_reaches_all_once() -> None:
    def loop() -> list[bool]:
        accelerator = Accelerator(cpu=True)
        if accelerator.process_index == 1:
            accelerator.set_trigger()
        return [accelerator.check_trigger(), accelerator.check_trigger()]

    assert ranks(2, loop) == [[True, False]] * 2


def test_gradients_stay_local_under_no_sync_and_are_communicated_on_request() -> None:
    def loop() -> list[bool]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(network())
        batch = data(8)[4 * accelerator.process_index : 4 * accelerator.process_index + 4]
        same = []

        def compare() -> None:
            grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
            both = accelerator.gather(grads).view(2, -1)
            same.append(torch.equal(both[0], both[1]))
            model.zero_grad()

        with accelerator.no_sync(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            compare()
            loss = loss_of(model, batch)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        compare()
        return same

    assert ranks(2, loop) == [[False, True]] * 2
