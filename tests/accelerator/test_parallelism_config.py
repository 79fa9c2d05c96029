"""Sizes of dimensions: their product, their mesh, and the strategy that they ask for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from paceline import Accelerator
from paceline.accelerator.parallelism_config import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    check_buffers,
)
from paceline.accelerator.process_state import PartialState
from paceline.settings import resolve
from paceline.strategies.options import Options


def test_j6_the_product_of_the_sizes_must_be_the_number_of_processes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, tp_size=3)
    options = Options(mesh=config.options(), written={"mesh": config.written})
    options.check_size(6)
    with pytest.raises(ValueError, match=r"dp_replicate_size=2, tp_size=3\) needs 6 processes, but this run has 4"):
        options.check_size(4)


def test_sizes_and_names_of_dimensions() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=4, tp_size=5)
    assert config.total_size == 120
    assert (config.data_parallel_size, config.non_data_parallel_size) == (6, 20)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "cp", "tp"]
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert sorted(config.non_dp_dim_names) == ["cp", "tp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    on = [config.dp_replicate_enabled, config.dp_shard_enabled, config.cp_enabled, config.tp_enabled]
    assert on == [True] * 4
    alone = ParallelismConfig()
    assert (alone.total_size, alone.active_mesh_dims, alone.sp_enabled) == (1, [], False)
    assert config.to_json()["tp_size"] == 5


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"tp_size": True}, "tp_size=True"),
        ({"dp_shard_size": "2"}, "dp_shard_size='2'"),
        ({"cp_size": 2, "sp_size": 2}, "both split sequences"),
        ({"cp_backend": "ring"}, "Unknown ParallelismConfig cp_backend 'ring'. Choose 'torch'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ParallelismConfig(**given)


def test_what_is_left_open_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    found = ParallelismConfig(dp_shard_size=1).filled(resolve())
    assert (found.dp_shard_size, found.tp_size, found.cp_size) == (1, 2, 1)


def test_arguments_of_the_strategy() -> None:
    plan = {"a": "colwise"}
    config = ParallelismConfig(
        dp_shard_size=2,
        tp_size=2,
        tp_handler=TorchTensorParallelConfig(plan=plan),
    )
    assert config.options() == {
        "data_parallel_replicate": 1,
        "data_parallel_shard": 2,
        "context_parallel": 1,
        "tensor_parallel": 2,
        "plan": plan,
    }
    split = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall"))
    assert {"context_parallel": 2, "context_parallel_dims": {}}.items() <= split.options().items()
    assert Options(mesh=split.options(), written={"mesh": split.written}).wanted == "model_parallel"
    in_loaders = ParallelismConfig(sp_size=3).options()
    assert {"context_parallel": 3, "context_parallel_dims": "loader"}.items() <= in_loaders.items()
    with pytest.raises(ValueError, match=r"Did you mean 'alltoall'"):
        TorchContextParallelConfig("altoall")


def test_what_there_is_not_is_refused() -> None:
    mesh = ParallelismConfig(sp_size=2)
    with pytest.raises(ValueError, match=r"sp_size=2\) contradict .* works without DeepSpeed .* Leave DeepSpeed out"):
        Options(deepspeed={}, mesh=mesh.options(), written={"deepspeed": "use_deepspeed", "mesh": mesh.written})
    with pytest.raises(NotImplementedError, match="enable_async_tp"):
        ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(enable_async_tp=True)).options()


def test_the_mesh_has_the_active_dimensions_and_the_flattened_ones() -> None:
    def build() -> Any:
        state = PartialState()
        config = ParallelismConfig(dp_shard_size=2)
        assert ParallelismConfig().get_device_mesh("cpu") is None
        assert config.get_device_mesh() is None
        mesh = config.get_device_mesh("cpu")
        assert mesh is not None
        assert config.get_device_mesh() is mesh
        flat = mesh["dp_shard_cp"].size()
        state.wait_for_everyone()
        return mesh.mesh_dim_names, tuple(mesh.shape), flat, mesh.get_local_rank()

    assert ranks(2, build) == [(("dp_shard",), (2,), 2, 0), (("dp_shard",), (2,), 2, 1)]


# ---- sequences split over processes ----------------------------------------------------------------------------------

WORDS, WIDTH, LENGTH = 11, 8, 6


class Language(nn.Module):
    """One block of causal attention, which is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mixed, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.double()

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.mixed(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        seen = None if mask is None else mask[:, None, None, :].bool() & torch.ones(LENGTH, LENGTH).tril().bool()
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=mask is None)
        return x + y.transpose(1, 2).flatten(2)

    def forward(self, words: Tensor, places: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x: Any = checkpoint(self.attend, self.words(words) + self.places(places), attention_mask, use_reentrant=False)
        return self.head(x)


def samples(count: int) -> list[dict[str, Tensor]]:
    lines = torch.randint(WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    places, found = torch.arange(LENGTH), []
    for number, line in enumerate(lines):
        real = places < LENGTH - number % 3
        following = line[1:].where((line[1:] > 2) & real, -100)
        found.append({"words": line[:-1], "places": places, "next": following, "mask": real.long()})
    return found


def learned(batch_size: int, counts: bool, **sizes: int) -> Any:
    """The weights after a pass in windows of two batches, on rank 0, and a loss without gradients."""
    config = ParallelismConfig(**sizes) if sizes else None  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config)
    model = Language()
    model, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), 0.01),
        DataLoader(samples(12), batch_size),  # type: ignore[arg-type]
    )
    for batch in batches:
        given, parts = list(batch.values()), accelerator.strategy.world_size // accelerator.strategy.num_data_ranks
        before = [one.clone() for one in given]
        with accelerator.maybe_context_parallel(given, [1] * 4, no_restore_buffers={given[1]}):
            assert all(one.shape[1] == LENGTH // parts for one in given)
            with accelerator.accumulate(model):
                logits = model(batch["words"], batch["places"], attention_mask=batch["mask"] if counts else None)
                logits, target = logits.flatten(0, 1), batch["next"].flatten()
                if counts:
                    count = (target >= 0).sum()
                    loss = F.cross_entropy(logits, target, reduction="sum") / count.clamp(min=1)
                    accelerator.backward(loss, num_items=count)
                else:
                    accelerator.backward(F.cross_entropy(logits, target.abs() % WORDS))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(given[0], before[0])
        assert torch.equal(given[2], before[2])
        assert given[1].shape[1] == LENGTH // parts
    model.eval()
    for batch in accelerator.prepare(DataLoader(samples(4), 1)):  # type: ignore[arg-type]
        given = [batch["words"], batch["places"]]
        with torch.no_grad():
            full = accelerator.gather_for_metrics(model(*given).mean((1, 2)))
            with accelerator.maybe_context_parallel(given, [1] * 2):
                split = accelerator.gather_for_metrics(model(*given).mean((1, 2)))
        assert full.shape == (accelerator.strategy.num_data_ranks,)
        assert split.shape == (accelerator.num_processes,)
        torch.testing.assert_close(split.view(len(full), -1).mean(1), full)
    state = accelerator.get_state_dict(model)
    return state if accelerator.is_main_process else None


@pytest.mark.parametrize(("processes", "counts", "sizes"), [(2, True, {}), (4, False, {"dp_shard_size": 2})])
def test_split_sequences_train_like_whole_ones(processes: int, counts: bool, sizes: dict[str, int]) -> None:
    found = ranks(processes, partial(learned, 4 * 2 // processes, counts, cp_size=2, **sizes))[0]
    torch.testing.assert_close(found, learned(4, counts), rtol=1e-9, atol=1e-11)


def test_buffers_that_cannot_be_split_are_refused() -> None:
    x, y = torch.zeros(2, 4), torch.zeros(2, 4, requires_grad=True)
    for buffers, dims, unrestored, problem in (
        ([x], [1, 1], (), r"different numbers of buffers and buffer_seq_dims \(1 and 2\)"),
        ([x, x], [1, 1], (), "the same tensor twice"),
        ([x], [1], {y}, "a tensor in no_restore_buffers that is not in buffers"),
        ([x, y], [1, 1], (), r"buffers\[1\], which requires gradients"),
    ):
        with pytest.raises(ValueError, match=f"maybe_context_parallel got {problem}"):
            check_buffers(buffers, dims, unrestored)  # type: ignore[arg-type]
    check_buffers([x], [1], [x])
