"""Loops with an Accelerator that plugins and handlers change: what is used, and that the weights are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # here once rather than in each process
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.accelerator.kwargs_handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from paceline.accelerator.parallelism_config import ParallelismConfig
from paceline.accelerator.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin

LINES = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loader(batch_size: int) -> DataLoader[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x @ LINES), batch_size)


def train(batch_size: int = 4, look: Callable[[Accelerator, nn.Module], Any] | None = None, **given: Any) -> Any:
    """The weights after two epochs, on rank 0, and what ``look`` sees."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **given)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(batch_size))
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    seen = look(accelerator, model) if look is not None else str(accelerator.distributed_type)
    state: dict[str, Tensor] = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()} if accelerator.is_main_process else None, seen


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_e2_distributed_data_parallel_is_made_as_the_handler_says() -> None:
    def look(accelerator: Accelerator, model: nn.Module) -> Any:
        wrapped: Any = accelerator.prepared.placements[id(model)].strategy._wrapped  # type: ignore[attr-defined]
        return wrapped.gradient_as_bucket_view, wrapped.static_graph, wrapped.bucket_bytes_cap

    def both() -> Any:
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1)
        return train(), train(look=look, kwargs_handlers=[handler])

    ((plain, _), (weights, seen)), _ = ranks(2, both)
    assert seen == (True, True, 1024 * 1024)
    same(weights, plain)  # not to the bit: the first micro-batch is reduced too


def test_plugins_change_where_parameters_lie_and_not_what_is_learned() -> None:
    def all_of_them() -> Any:
        size = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 40}
        return [
            train(),
            train(fsdp_plugin=FullyShardedDataParallelPlugin(reshard_after_forward=False, **size)),  # type: ignore[arg-type]
            train(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True, activation_checkpointing=True)),
            train(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="[24]")),
            train(parallelism_config=ParallelismConfig(dp_shard_size=2)),
            train(parallelism_config=ParallelismConfig(dp_replicate_size=2), strategy="fsdp"),
            train(batch_size=8, parallelism_config=ParallelismConfig(tp_size=2)),
        ]

    (expected, kind), *others = ranks(2, all_of_them, limit=240)[0]
    alone, _ = train(batch_size=8)
    same(expected, alone)
    assert kind == "MULTI_CPU"
    for weights, kind in others:
        assert kind == "FSDP"
        same(weights, expected)


def test_e10_zero_1_2_and_3_train_what_ddp_trains() -> None:
    pytest.importorskip("deepspeed")

    def all_of_them() -> Any:
        found = [train()]
        for stage in (1, 2, 3):
            plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2)
            found.append(train(deepspeed_plugin=plugin))
        return found

    (expected, _), *others = ranks(2, all_of_them, limit=300)[0]
    for weights, kind in others:
        assert kind == "DEEPSPEED"
        same(weights, expected)


def test_e3_a_prepared_model_is_compiled_with_the_plugins_options() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def compiled(model: nn.Module, **given: Any) -> Any:
        graphs.clear()
        accelerator = Accelerator(cpu=True, **given)
        model = accelerator.prepare(model)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model(torch.ones(2, 4))
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    assert compiled(network()) == 0
    assert compiled(network(), dynamo_plugin=None) == 0
    assert compiled(network(), dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True)) == 1
    assert compiled(network(), dynamo_backend="AOT_EAGER") == 1

    class Breaks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(input)

    with pytest.raises(Exception, match="graph_break"):
        compiled(Breaks(4, 1), dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True))
    torch._dynamo.reset()


def test_fp16_starts_at_the_handlers_scale() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=32.0)])
    assert accelerator.scaler.get_scale() == 32.0


def test_autocast_of_a_block_may_differ_from_that_of_models() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", output_dtype="keep")
    model = accelerator.prepare(nn.Linear(2, 2))
    other, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert model(x).dtype is torch.bfloat16
    with accelerator.autocast():
        assert other(x).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert other(x).dtype is torch.float32


def test_deepspeeds_clipping_is_the_accelerators() -> None:
    pytest.importorskip("deepspeed")

    def norms(config: dict[str, Any]) -> Any:
        return train(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **config}))[0]

    def both() -> Any:
        return norms({}), norms({"gradient_clipping": 1e-4})

    free, clipped = ranks(2, both, limit=200)[0]
    assert not torch.equal(free["0.weight"], clipped["0.weight"])
