"""A prepared model is the user's object: names, hooks, copies, precision and compilation."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_loop import data, loss_of, network, weights
from rank_processes import ranks
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.accelerator.accelerator import Accelerator


def names_of_prepared(strategy: str) -> Any:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = network()
    names, kind = list(model.state_dict()), type(model).__name__
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    prepared(data(2)[:][0])
    return (
        prepared is model,
        accelerator.unwrap_model(prepared) is model,
        list(prepared.state_dict()) == names,
        kind in type(model).__name__,
        calls,
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a8_b18_prepare_gives_back_the_same_object_with_the_same_names(strategy: str) -> None:
    assert ranks(2, names_of_prepared, strategy) == [(True, True, True, True, ["hook"])] * 2


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pixel_values: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.layer(pixel_values) * scale}


@pytest.mark.parametrize(("precision", "inside"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_a13_outputs_are_float32_and_the_layers_compute_in_the_chosen_type(precision: str, inside: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(Named())
    seen: list[torch.dtype] = []
    model.layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    found = model(pixel_values=torch.randn(3, 4), scale=2.0)
    assert seen == [inside]
    assert found["logits"].dtype == torch.float32
    assert model.layer.weight.dtype == torch.float32
    assert list(inspect.signature(model.forward).parameters) == ["pixel_values", "scale"]


def test_outputs_keep_their_type_when_asked_to() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", output_dtype="keep")
    model = accelerator.prepare(Named())
    assert model(torch.randn(3, 4))["logits"].dtype == torch.bfloat16


def test_autocast_does_the_same_for_code_outside_of_a_model() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast():
        assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype == torch.bfloat16
        with accelerator.autocast():
            assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype == torch.bfloat16
    plain = Accelerator(cpu=True)
    with plain.autocast():
        assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_prepared_model_is_a_plain_model_of_its_own(copied: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Named())
    other = copied(model)
    with torch.no_grad():
        other.layer.weight.zero_()
        other.layer.bias.zero_()
    x = torch.randn(3, 4)
    assert torch.equal(other(x)["logits"], torch.zeros(3, 2))
    assert not torch.equal(model(x)["logits"], torch.zeros(3, 2))


def test_unwrapping_without_the_wrapper_gives_the_plain_forward_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Named())
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)


def test_unwrapping_keeps_torch_compile_unless_told_not_to() -> None:
    accelerator, model = Accelerator(cpu=True), network()
    compiled = torch.compile(model)
    for wrapped in (compiled, DataParallel(compiled)):
        assert accelerator.unwrap_model(wrapped) is compiled
        assert accelerator.unwrap_model(wrapped, keep_torch_compile=False) is model


def test_a_model_that_was_prepared_already_stays_as_it_is() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Named())
    forward = model.forward
    assert accelerator.prepare(model) is model
    assert model.forward is forward
    assert len(accelerator.prepared.models) == 1


def _wrapped_before(wrap: str) -> Any:
    accelerator = Accelerator(cpu=True)
    model = network()
    given = DistributedDataParallel(model) if wrap == "ddp" else DataParallel(model)
    prepared, optimizer = accelerator.prepare(given, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(prepared, data(4)[:]) * (accelerator.process_index + 1))
    grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
    optimizer.step()
    return prepared is model, grads


@pytest.mark.parametrize("wrap", ["ddp", "dp"])
def test_b15_a_model_that_the_script_wrapped_itself_is_wrapped_once(wrap: str) -> None:
    model = network()
    (loss_of(model, data(4)[:]) * 1.5).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
    for same, grads in ranks(2, _wrapped_before, wrap):
        assert same
        torch.testing.assert_close(grads, expected)


def test_a8_a_compiled_model_is_compiled_inside() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    expected = model(data(4)[:][0])
    prepared = accelerator.prepare(torch.compile(model, backend=backend))
    assert prepared is model
    assert torch.equal(prepared(data(4)[:][0]), expected)
    assert compiled


def test_b22_frozen_layers_train_on_two_processes_without_looking_for_unused_ones() -> None:
    found = ranks(2, _with_frozen_base)
    assert torch.equal(found[0][0], found[1][0])
    assert all(same for _, same in found)


def _with_frozen_base() -> Any:
    accelerator = Accelerator(cpu=True)
    model = network()
    model[0].requires_grad_(False)
    base = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(12), 2))
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), torch.equal(base, model[0].weight)


def _buffers_in_evaluation() -> Any:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(16), 4))
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    before = model[1].running_mean.clone()
    model.eval()
    held_out = accelerator.prepare(DataLoader(data(4), 2))
    with torch.no_grad():
        for batch in held_out:
            model(batch[0])
    return before, model[1].running_mean.clone()


def test_ranks_evaluate_with_rank_0s_buffers() -> None:
    first, second = ranks(2, _buffers_in_evaluation)
    assert not torch.equal(first[0], second[0])  # each has seen other batches
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0], first[1])


def _evaluate_on_one_rank() -> int:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    model.eval()
    with torch.no_grad():
        for _ in range(3 if accelerator.is_main_process else 0):
            model(data(4)[:][0])
    accelerator.wait_for_everyone()
    return dist.get_world_size()


def test_one_rank_may_evaluate_alone() -> None:
    assert ranks(2, _evaluate_on_one_rank) == [2, 2]


@pytest.mark.parametrize("how", ["copied", "restored"])
def test_a_forward_that_was_set_on_the_model_itself_is_kept(how: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(1, 1)
    model.forward = MethodType(_plus_100, model)
    model = accelerator.prepare(model)
    if how == "restored":
        accelerator.free_memory()
    found = copy.deepcopy(model) if how == "copied" else model
    assert found(torch.zeros(1)) == 100.0


def _plus_100(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + 100.0
