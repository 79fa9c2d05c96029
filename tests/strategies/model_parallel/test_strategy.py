"""One mesh of processes: layers split over some, replicas and shards over others; the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import ranks
from tiny import QUIET, TinyModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import DataLoader

from paceline import Trainer, TrainingModule
from paceline.processes.cluster_environment import Cluster
from paceline.strategies import ModelParallelStrategy, Strategy
from paceline.strategies.model_parallel.context_parallel import SplitSequences, check_layers
from paceline.strategies.model_parallel.strategy import find_sizes
from paceline.torch_private import current_function_mode

WORDS, WIDTH, LENGTH, BATCH = 13, 16, 6, 4
SETTINGS: dict[str, Any] = QUIET | {"use_distributed_sampler": False}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        return x + self.dropout(self.network(self.between(x)))


class Language(TrainingModule):
    """Predicts the next word; embedding and head have one weight."""

    def __init__(self, heads: int = 4, dropout: float = 0.0, seed: int = 3, eps: float = 1e-8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(WIDTH, heads, dropout) for _ in range(2))
        self.eps = eps

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=self.eps)


class Pretrained(TrainingModule):
    """A model of the transformers library."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(3)
        words: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1}
        sizes: dict[str, Any] = {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        }  # fmt: skip
        if kind == "llama":
            config = transformers.LlamaConfig(**words, **sizes, num_key_value_heads=2)
            self.net = transformers.LlamaForCausalLM(config)
        elif kind == "qwen3":  # normalizes queries and keys, all heads with one weight
            config = transformers.Qwen3Config(**words, **sizes, num_key_value_heads=2, head_dim=4)
            self.net = transformers.Qwen3ForCausalLM(config)
        elif kind == "bert":
            none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = transformers.BertConfig(**words, **sizes, **none, is_decoder=True)
            self.net = transformers.BertLMHeadModel(config)
        else:
            none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = transformers.GPT2Config(**words, **none, n_embd=16, n_layer=2, n_head=4, n_positions=8)
            self.net = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Encoder(TrainingModule):
    """torch's own encoder: its attention joins q, k and v in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self(batch) - batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count: int = 10, size: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(WORDS, (count, size, LENGTH + 1), generator=generator))


def trained(
    strategy: str | Strategy, module: TrainingModule, data: list[Any], **more: Any
) -> tuple[dict[str, Tensor], Trainer]:
    """The weights after one pass over this rank's share of the data, whole; on rank 0."""
    torch.set_num_threads(1)
    path, val = more.pop("ckpt_path", None), more.pop("val", None)
    trainer = Trainer(strategy=strategy, **{**SETTINGS, "max_epochs": 1, **more})
    shares, place = trainer.strategy.num_data_ranks, trainer.strategy.data_rank
    trainer.fit(module, [batch.chunk(shares)[place] for batch in data], val, ckpt_path=path)
    return trainer.strategy.model_state(module), trainer


def furthest(state: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the largest value of its tensor.

    A tensor whose gradient is rounding error alone (the keys' bias) stays near 0, where it began.
    """
    assert list(state) == list(reference)
    return max(float((state[k] - r).abs().max() / r.abs().max().clamp(min=1e-6)) for k, r in reference.items())


#: What float64 leaves of another order of summation after ten steps.
EXACT = 1e-11
DOUBLE: dict[str, Any] = {"precision": "64-true"}
#: By name: processes and sizes of the mesh.
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp x2": (2, {"tensor_parallel": 2}),
    "tp x4": (4, {"tensor_parallel": 4}),
    "shard 2 x tp 2": (4, {"tensor_parallel": 2}),
    "replicate 2 x tp 2": (4, {"tensor_parallel": 2, "data_parallel_replicate": 2}),
    "stages 2 x tp 2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "microbatches": 2}),
}


def on_mesh(
    mesh: str,
    look: Callable[[Trainer], Any],
    make: Callable[[], TrainingModule] = Language,
    plan: Any = "auto",
    data: Any = None,
    **more: Any,
) -> list[Any]:
    """What ``look`` finds in the Trainer of each rank, after a fit on the processes of one of ``MESHES``."""
    world, sizes = MESHES[mesh]

    def run() -> Any:
        return look(trained(ModelParallelStrategy(plan=plan, **sizes), make(), data or batches(), **more)[1])

    return ranks(world, run)


def local_part(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.strategy.model_state(trainer.training_module)


def weights_on(mesh: str, make: Callable[[], TrainingModule] = Language, **more: Any) -> dict[str, Tensor]:
    return on_mesh(mesh, whole_weights, make, **more)[0]


# ---- the numbers of one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "accumulate"), [("tp x2", 1), ("tp x2", 3), ("shard 2 x tp 2", 3), ("replicate 2 x tp 2", 1)]
)
def test_ten_steps_equal_one_process_with_the_global_batch(mesh: str, accumulate: int) -> None:
    how = {**DOUBLE, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.3}
    assert furthest(weights_on(mesh, **how), trained("cpu", Language(), batches(), **how)[0]) < EXACT


def test_a_loader_gives_a_group_one_share_of_the_data() -> None:
    def run(strategy: Callable[[], Any], size: int) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(5)
        loader = DataLoader(torch.cat(batches(6)), batch_size=size, shuffle=True)  # type: ignore[arg-type]
        how = {**SETTINGS, **DOUBLE, "use_distributed_sampler": True, "max_epochs": 2}
        trainer = Trainer(strategy=strategy(), **how)
        torch.manual_seed(5)
        trainer.fit(Language(), loader)
        return whole_weights(trainer)

    one = run(lambda: "cpu", BATCH)
    two = ranks(4, run, lambda: ModelParallelStrategy(tensor_parallel=2), BATCH // 2)[0]
    assert furthest(two, one) < EXACT


def test_split_layers_in_the_stages_of_a_pipeline_train_like_one_process(tmp_path: Path) -> None:
    how = {**DOUBLE, "accumulate_grad_batches": 3, "gradient_clip_val": 0.3}

    def look(trainer: Trainer) -> Any:
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        return whole_weights(trainer), trainer.callback_metrics["loss"]

    reference, alone = trained("cpu", Language(), batches(), **how)
    state, loss = on_mesh("stages 2 x tp 2", look, **how)[0]
    assert furthest(state, reference) < EXACT
    assert loss.item() == pytest.approx(alone.callback_metrics["loss"].item(), rel=1e-6)
    more = {**how, "max_epochs": 2}
    expected, _ = trained("cpu", Language(), batches(), **more)
    went_on = weights_on("stages 2 x tp 2", partial(Language, seed=4), ckpt_path=tmp_path / "one.ckpt", **more)
    assert furthest(went_on, expected) < EXACT


def test_ten_steps_in_float32_stay_near_float64() -> None:
    exact, _ = trained("cpu", Language(), batches(), **DOUBLE)
    found = weights_on("tp x2")
    missed = torch.cat([(found[k] - v).flatten() for k, v in exact.items()])
    assert missed.norm() < 1e-6 * torch.cat([v.flatten() for v in exact.values()]).norm()


#: Layers of two blocks that are split: q, k, v and what joins heads; a network of two or three layers; norms of heads.
SPLIT_LAYERS = {"llama": 2 * (4 + 3), "qwen3": 2 * (4 + 3 + 2), "bert": 2 * (4 + 2), "gpt2": 2 * 2}


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("llama", "tp x2"), ("qwen3", "shard 2 x tp 2"), ("bert", "tp x2"), ("gpt2", "tp x2")],
)
def test_models_of_transformers_are_split(kind: str, mesh: str) -> None:
    def look(trainer: Trainer) -> Any:
        split = [m for m in trainer.training_module.modules() if "forward" in vars(m)]
        return whole_weights(trainer), len(split)

    how = {**DOUBLE, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    reference, _ = trained("cpu", Pretrained(kind), batches(4), **how)
    state, split = on_mesh(mesh, look, partial(Pretrained, kind), data=batches(4), **how)[0]
    assert furthest(state, reference) < 1e-10  # rotary angles are float32
    assert split == SPLIT_LAYERS[kind]


def test_torchs_encoder_trains_and_validates_with_its_attention_whole() -> None:
    data = [torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    state, reference = trained("cpu", Encoder(), data, val=data[:1], **DOUBLE)
    expected = reference.callback_metrics["val_loss"]

    def look(trainer: Trainer) -> Any:
        split = [name for name, p in trainer.training_module.named_parameters() if isinstance(p, DTensor)]
        return whole_weights(trainer), trainer.callback_metrics["val_loss"], split

    (found, loss, split), _ = on_mesh("tp x2", look, Encoder, data=data, val=data[:1], **DOUBLE)
    assert furthest(found, state) < EXACT
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in split} == {"linear1", "linear2"}


def test_every_process_of_a_group_has_the_same_gradients_of_whole_parameters_and_logs_the_same() -> None:
    class Watching(Language):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            whole = {name: p.grad for name, p in self.named_parameters() if not isinstance(p, DTensor)}
            assert {"embed.weight", "blocks.0.before.weight"} <= set(whole)
            assert not any("network" in name for name in whole)
            self.seen = {name: grad.clone() for name, grad in whole.items() if grad is not None}

    def look(trainer: Trainer) -> Any:
        return trainer.training_module.seen, trainer.callback_metrics["loss"]

    (grads, loss), (others, other_loss) = on_mesh("tp x2", look, partial(Watching, dropout=0.3), data=batches(3))
    assert all(torch.equal(grad, others[name]) for name, grad in grads.items())
    assert torch.equal(loss, other_loss)


def test_dropout_is_one_process_s_in_a_group_and_another_where_other_data_are_seen() -> None:
    class Dropping(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.dropped = F.dropout(torch.ones(64))
            return super().training_step(batch, batch_idx)

    make = partial(Dropping, dropout=0.3)
    dropped = on_mesh("shard 2 x tp 2", lambda trainer: trainer.training_module.dropped, make, data=batches(2))
    assert torch.equal(dropped[0], dropped[1])
    assert torch.equal(dropped[2], dropped[3])
    assert not torch.equal(dropped[0], dropped[2])
    reference, _ = trained("cpu", make(), batches(4), **DOUBLE)
    assert furthest(weights_on("tp x2", make, data=batches(4), **DOUBLE), reference) < EXACT


def test_optimizers_take_whole_and_split_parameters_in_one_list() -> None:
    class Grouped(Language):
        def configure_optimizers(self) -> Any:
            split = [p for name, p in self.named_parameters() if "network" in name]
            rest = [p for name, p in self.named_parameters() if "network" not in name]
            one = {"params": split + rest[:3], "foreach": True, "fused": False}
            return torch.optim.AdamW([one, {"params": rest[3:], "fused": True}], lr=1e-2)

    reference, _ = trained("cpu", Grouped(), batches(4), **DOUBLE)
    assert furthest(weights_on("tp x2", Grouped, data=batches(4), **DOUBLE), reference) < EXACT


class Collectives(TorchDispatchMode):
    """Counts sums over processes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it is made of comes by
        self.count += "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


def test_one_sum_a_pair_of_layers_is_communicated_in_forward_and_one_in_backward() -> None:
    def run() -> list[int]:
        counts = []
        for steps in (1, 3):
            with Collectives() as seen:
                trained("model_parallel", Language(), batches(steps))
            counts.append(seen.count)
        return counts

    pairs = 2 * 2  # two blocks, an attention and a network each
    (one, three), _ = ranks(2, run)
    assert (three - one) / 2 == 2 * pairs


def test_bf16_is_near_one_process() -> None:
    one, _ = trained("cpu", Language(), batches(4), precision="bf16-mixed")
    two = weights_on("tp x2", data=batches(4), precision="bf16-mixed")
    missed = torch.cat([(two[k] - v).flatten() for k, v in one.items()])
    assert missed.norm() < 1e-2 * torch.cat([v.flatten() for v in one.values()]).norm()


@pytest.mark.parametrize("mesh", ["tp x2", "shard 2 x tp 2", "stages 2 x tp 2"])
def test_an_overflow_on_one_process_skips_the_step_of_all(mesh: str) -> None:
    class Overflowing(Language):
        def on_after_backward(self) -> None:
            grad = self.blocks[0].network[0].weight.grad
            if self.trainer.global_rank == 1 and self.trainer.state.batch_idx == 1:
                local_part(grad)[0] = torch.inf

    def look(trainer: Trainer) -> Any:
        return trainer.global_step, trainer.strategy.precision.skipped_steps, whole_weights(trainer)

    found = on_mesh(mesh, look, Overflowing, data=batches(3), precision="16-mixed")
    assert [(steps, skipped) for steps, skipped, _ in found] == [(2, 1)] * len(found)
    assert all(value.isfinite().all() for value in found[0][2].values())


class Late(Language):
    """Makes its layers when it is told where; without memory if ``meta``."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        del self.embed, self.head, self.blocks
        self.meta = meta

    def configure_model(self) -> None:
        if "embed" in self._modules:
            return
        torch.manual_seed(9)
        with torch.device("meta" if self.meta else "cpu"):
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.blocks = nn.ModuleList(Block(WIDTH, 4, 0.0) for _ in range(2))


@pytest.mark.parametrize("mesh", ["shard 2 x tp 2", "stages 2 x tp 2"])
def test_layers_without_memory_get_the_initial_values_of_one_process(mesh: str) -> None:
    reference, _ = trained("cpu", Late(False), batches(2), **DOUBLE)
    assert furthest(weights_on(mesh, partial(Late, True), data=batches(2), **DOUBLE), reference) < EXACT


def test_a_module_that_is_split_runs_again() -> None:
    def several_runs(strategy: Callable[[], Any]) -> Any:
        torch.set_num_threads(1)
        module = Language()
        trainer, other = (Trainer(strategy=strategy(), max_epochs=1, **SETTINGS, **DOUBLE) for _ in range(2))
        before = trainer.validate(module, batches(2), verbose=False)
        trainer.fit(module, batches(3), batches(2))
        after = trainer.validate(module, batches(2), verbose=False)
        other.fit(module, batches(3))
        return before[0]["val_loss"], after[0]["val_loss"], whole_weights(other), module.blocks[0].attention.num_heads

    alone = several_runs(lambda: "cpu")
    found, _ = ranks(2, several_runs, lambda: "model_parallel")
    assert found[:2] == pytest.approx(alone[:2], rel=1e-6)
    assert furthest(found[2], alone[2]) < EXACT
    assert (found[3], alone[3]) == (2, 4)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [("tp x2", "cpu"), ("cpu", "tp x2"), ("shard 2 x tp 2", "tp x2")])
def test_a_run_goes_on_under_another_strategy_as_if_it_had_not_stopped(first: str, then: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    whole, _ = trained("cpu", Language(), batches(4), max_epochs=2, **DOUBLE)

    def save(trainer: Trainer) -> None:
        trainer.save_checkpoint(path)

    how = {**DOUBLE, "data": batches(4)}
    if first == "cpu":
        save(trained("cpu", Language(), **how)[1])
    else:
        on_mesh(first, save, **how)
    more = {**how, "ckpt_path": path, "max_epochs": 2}
    other = partial(Language, seed=4)
    went_on = trained("cpu", other(), **more)[0] if then == "cpu" else weights_on(then, other, **more)
    assert furthest(went_on, whole) < EXACT
    saved = torch.load(path, weights_only=True)
    assert all(type(value) is Tensor for value in saved["state_dict"].values())
    moments = [state["exp_avg"] for state in saved["optimizer_states"][0]["state"].values()]
    assert {type(moment) for moment in moments} == {Tensor}
    assert [moment.shape for moment in moments] == [p.shape for p in Language().parameters()]


# ---- sequences split over processes ----------------------------------------------------------------------------------


class Placed(Language):
    """Its batch holds words, positions and following words; a word of 0 does not count."""

    def __init__(self, by_items: bool = False) -> None:
        super().__init__()
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.by_items = by_items

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.embed(batch["words"]) + self.position(batch["positions"])
        for block in self.blocks:
            x = block(x)
        y = batch["following"].flatten()
        if not self.by_items:
            return F.cross_entropy(self.head(x).flatten(0, 1), y)
        count = (y != 0).sum()
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), y, ignore_index=0), "num_items": count}


def placed(count: int) -> list[dict[str, Tensor]]:
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return [{"words": b[:, :-1], "positions": positions, "following": b[:, 1:]} for b in batches(count)]


@pytest.mark.parametrize(
    ("world", "sizes", "by_items"),
    [
        (2, {"activation_checkpointing": True}, True),
        (4, {"tensor_parallel": 2}, False),
        (4, {"data_parallel_shard": 2}, False),
    ],
)
def test_split_sequences_train_like_whole_ones(world: int, sizes: dict[str, Any], by_items: bool) -> None:
    data = placed(4)

    def run() -> Any:
        torch.set_num_threads(1)
        strategy = ModelParallelStrategy(context_parallel=2, context_parallel_dims=1, **sizes)
        trainer = Trainer(strategy=strategy, max_epochs=1, **SETTINGS, **DOUBLE)
        shares, place, module = strategy.num_data_ranks, strategy.data_rank, Placed(by_items)
        trainer.fit(module, [{key: value.chunk(shares)[place] for key, value in batch.items()} for batch in data])
        return whole_weights(trainer)

    trainer = Trainer(strategy="cpu", max_epochs=1, **SETTINGS, **DOUBLE)
    trainer.fit(Placed(by_items), data)
    assert furthest(ranks(world, run)[0], whole_weights(trainer)) < EXACT


def test_a_sequence_that_cannot_be_split_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"context_parallel=2\) must know .* Pass context_parallel_dims"):
        ModelParallelStrategy(context_parallel=2)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        split = SplitSequences(mesh, {"x": 1})
        with pytest.raises(ValueError, match=r"5 elements \('x', dimension 1\).*context_parallel=2"):
            split.cut({"x": torch.zeros(2, 5)})
        with pytest.raises(ValueError, match=r"has the key 'x', but the batch has the keys \['y'\]"):
            split.cut({"y": torch.zeros(2, 4)})
        with pytest.raises(ValueError, match=r"sets 1 as the sequence dimension of 'x', which has shape \(4,\)"):
            split.cut({"x": torch.zeros(4)})
        x = torch.arange(8).reshape(2, 4)
        assert torch.equal(split.cut({"x": x, "y": x})["x"], x[:, 2 * dist.get_rank() :][:, :2])
        assert torch.equal(SplitSequences(mesh, {1: 0}).cut((x, x))[1], x[dist.get_rank()][None])
        q = torch.zeros(1, 1, 2, 4)
        masked = lambda batch: F.scaled_dot_product_attention(q, q, q, torch.ones(2, 2) > 0)  # noqa: E731
        step = SplitSequences(mesh, 1).bind(masked, training=True)
        with pytest.raises(NotImplementedError, match=r"attn_mask.*context_parallel=2"):
            step(x)
        strategy = ModelParallelStrategy(context_parallel=2, context_parallel_dims=1)
        strategy._sequences = SplitSequences(mesh, 1)
        assert "call backward inside the same `with` block" in str(strategy.explain(CheckpointError("differs")))
        with pytest.raises(
            RuntimeError, match=r"context_parallel_dims=1\) already splits .*context_parallel_dims=\{\}"
        ):
            strategy.split_sequences([x], [1])
        with pytest.raises(
            ValueError, match=r"maybe_context_parallel\(buffer_seq_dims=...\) sets 2 as the sequence dimension of buff"
        ):
            SplitSequences(mesh, {}).split([x], [2], ()).__enter__()
        assert x.shape == (2, 4)
        forward = SplitSequences(mesh, {}).without_padding_mask(lambda attention_mask: attention_mask)
        assert forward(attention_mask=x) is x
        split = SplitSequences(mesh, {})
        forward = split.without_padding_mask(lambda attention_mask: F.scaled_dot_product_attention(q, q, q))
        for padding, error in ((x > 4, "precede visible tokens"), (x < 6, "attention is not causal"), (x >= 0, None)):
            with split.split([padding], [1], ()):
                if error is None:
                    assert forward(attention_mask=padding).shape == q.shape
                else:
                    with pytest.raises(NotImplementedError, match=error):
                        forward(attention_mask=padding)
        for layer in (nn.LSTM(1, 1), SimpleNamespace(layer_types=["full_attention", "mamba"])):
            module = nn.Sequential(layer) if isinstance(layer, nn.Module) else nn.Sequential()
            module.config = layer
            with pytest.raises(NotImplementedError, match=r"has layers \((LSTM|mamba)\) that need more of a sequence"):
                check_layers(module)
        module = nn.Sequential()
        module.config = SimpleNamespace(_attn_implementation="eager")  # type: ignore[assignment]
        with pytest.raises(NotImplementedError, match=r"Sequential has attn_implementation='eager'.* Load .*'sdpa'"):
            check_layers(module)

    ranks(2, partial(_with_group, run))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_that_backward_repeats_run_inside_the_context(device: str) -> None:
    no_mesh: Any = None
    attention, seen = SplitSequences(no_mesh, {}).attention, []

    def layer(x: Tensor) -> Tensor:
        seen.append(current_function_mode() is attention)
        return x.sin()

    x = torch.ones(2, device=device, requires_grad=True)
    with attention:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        loss = checkpoint(layer, x, use_reentrant=False)
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            loss.backward()
        loss.backward(torch.ones(2, device=device))
    assert seen == [True] * 4
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def _with_group(run: Callable[[], None]) -> None:
    dist.init_process_group("gloo")
    run()


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_of_the_users_is_followed() -> None:
    plan = {
        "blocks.*.attention.[qkv]": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.0.network.0": ColwiseParallel(),
        "blocks.0.network.2": RowwiseParallel(),
    }

    def look(trainer: Trainer) -> Any:
        kinds = {name for name, p in trainer.training_module.named_parameters() if isinstance(p, DTensor)}
        return whole_weights(trainer), kinds, trainer.training_module.blocks[1].attention.num_heads

    (state, split, heads), _ = on_mesh("tp x2", look, plan=plan, data=batches(4), **DOUBLE)
    reference, _ = trained("cpu", Language(), batches(4), **DOUBLE)
    assert furthest(state, reference) < EXACT
    assert "blocks.0.network.0.weight" in split
    assert "blocks.1.network.0.weight" not in split
    assert heads == 2


@pytest.mark.parametrize("mesh", ["tp x2", "shard 2 x tp 2"])
def test_logits_may_be_split_by_classes(mesh: str) -> None:
    class Untied(Language):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WORDS + 1)

        def forward(self, words: Tensor) -> Tensor:
            logits = super().forward(words)
            self.classes = local_part(logits).shape[-1]
            return logits

    def run() -> Any:
        strategy = ModelParallelStrategy(tensor_parallel=2, loss_parallel=True)
        state, trainer = trained(strategy, Untied(), batches(4), val=batches(1)[:1], **DOUBLE)
        return state, trainer.training_module.classes, trainer.callback_metrics["val_loss"]

    state, classes, loss = ranks(MESHES[mesh][0], run)[0]
    reference, alone = trained("cpu", Untied(), batches(4), val=batches(1)[:1], **DOUBLE)
    assert furthest(state, reference) < EXACT
    assert loss.item() == pytest.approx(alone.callback_metrics["val_loss"].item(), rel=1e-6)
    assert classes == (WORDS + 1) // 2


def test_a_plan_may_split_the_sequence_between_layers() -> None:
    norms = {f"blocks.*.{name}": SequenceParallel() for name in ("before", "between")}
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plan = {
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "blocks.*.attention": PrepareModuleInput(**whole, use_local_output=True),
        "blocks.*.attention.[qkv]": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.network": PrepareModuleInput(**whole, use_local_output=True),
        "blocks.*.network.0": ColwiseParallel(),
        "blocks.*.network.2": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.1": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        **norms,
    }
    how = {**DOUBLE, "gradient_clip_val": 0.1, "data": batches(4)}
    reference, _ = trained("cpu", Language(), **how)
    assert furthest(weights_on("tp x2", plan=plan, **how), reference) < EXACT


def refused(plan: Any, make: Callable[[], TrainingModule], error: str) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=error):
            trained(ModelParallelStrategy(tensor_parallel=2, plan=plan), make(), batches(1))

    ranks(2, run)


def test_a_pattern_that_matches_no_layer_is_an_error_with_the_nearest_name() -> None:
    refused(
        {"blocks.*.attention.q": "colwise", "blocks.0.attn.out": "rowwise"},
        Language,
        r"'blocks\.0\.attn\.out' matches no layer of Language\. Did you mean 'blocks\.0\.attention\.out'\?",
    )
    refused({"blocks.*.attention.q": "column"}, Language, "Unknown style .*'column'.*'colwise' or 'rowwise'")
    refused({"embed": "colwise"}, Language, "'embed' is an Embedding")


def test_heads_that_do_not_divide_are_an_error_with_both_numbers() -> None:
    refused("auto", partial(Language, heads=1), r"Attention \(blocks\.0\.attention\) has 1 heads.*tensor_parallel=2")


def test_a_model_without_layers_to_split_is_an_error_that_says_so() -> None:
    refused("auto", TinyModule, "found nothing to split in TinyModule")


def test_an_attention_with_fixed_widths_is_an_error_that_says_what_to_write() -> None:
    class Fixed(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.v(x).view(*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads).flatten(2))

    class Model(Language):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].attention = Fixed(WIDTH, 4)

    def run() -> None:
        with pytest.raises(RuntimeError, match=r"computes 1/2 of an attention layer's heads.*self\.num_heads, -1"):
            trained("model_parallel", Model(), batches(1))

    ranks(2, run)


def test_a_network_that_needs_all_its_features_at_once_is_an_error() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.gelu(self.fc1(x)).softmax(-1))

    class Model(Language):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].network = Gate()

    refused("auto", Model, r"output of Gate \(blocks\.1\.network\) changes when .* tensor_parallel=2")


# ---- sizes -----------------------------------------------------------------------------------------------------------


def asked(**sizes: Any) -> dict[str, int | str]:
    return ModelParallelStrategy(**sizes).asked


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({}, {"dp_shard": 8}),
        ({"tensor_parallel": 2}, {"dp_shard": 4, "tp": 2}),
        ({"tensor_parallel": "auto"}, {"dp_shard": 2, "tp": 4}),
        ({"tensor_parallel": 2, "data_parallel_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ({"data_parallel_shard": 1, "context_parallel": 8, "context_parallel_dims": 1}, {"cp": 8}),
    ],
)
def test_sizes_left_open_take_what_is_left(sizes: dict[str, Any], found: dict[str, int]) -> None:
    assert {a: n for a, n in find_sizes(asked(**sizes), 8, 4).items() if n > 1} == found


def test_sizes_that_do_not_fit_the_processes_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"is 3, which does not divide the number of processes, 8"):
        find_sizes(asked(tensor_parallel=3), 8, 8)
    with pytest.raises(ValueError, match=r"data_parallel_shard=2 x tensor_parallel=2 is 4, which is not .*, 8"):
        find_sizes(asked(tensor_parallel=2, data_parallel_shard=2), 8, 8)
    with pytest.raises(ValueError, match=r"tensor_parallel=0 is not a valid number of processes.*'auto'"):
        ModelParallelStrategy(tensor_parallel=0)
    with pytest.raises(ValueError, match=r"is 3, which does not divide the number of processes, 2"):
        Trainer(strategy=ModelParallelStrategy(tensor_parallel=3), devices=2, **SETTINGS)
    with pytest.raises(TypeError, match=r"'tensor_paralel'\. Did you mean 'tensor_parallel'"):
        ModelParallelStrategy(tensor_paralel=2)


def test_ranks_of_one_group_see_the_same_data() -> None:
    split = ModelParallelStrategy(tensor_parallel=2, data_parallel_replicate=2, data_parallel_shard=2)
    staged = ModelParallelStrategy(pipeline_parallel=2, data_parallel_replicate=4)
    seen = {}
    for strategy in (split, staged):
        strategy.place([torch.device("cpu")] * 8)
        for rank in range(8):
            strategy._cluster = Cluster("test", rank, rank, 8, 8, 0, 1, "", 0)
            seen.setdefault(strategy, []).append(strategy.data_rank)
        assert strategy.num_data_ranks == 4
    assert seen == {split: [0, 0, 1, 1, 2, 2, 3, 3], staged: [0, 1, 2, 3] * 2}
