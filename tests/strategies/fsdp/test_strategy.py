"""FSDP on real gloo processes: the numbers of one process with the global batch."""

from __future__ import annotations

import os
import weakref
from collections import Counter, UserDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import RanksError, ranks
from tiny import QUIET
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from paceline import Accelerator, Trainer, TrainingModule
from paceline.callbacks import Callback, EMAWeightAveraging
from paceline.strategies import DDPStrategy, FSDPStrategy

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
SETTINGS: dict[str, Any] = QUIET | {"use_distributed_sampler": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(y := self.norm(x), y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(TrainingModule):
    """Next-token prediction; the head is used as a weight in ``training_step``, tied to the embedding or not."""

    def __init__(self, tied: bool = False, optimizer: Any = None, seed: int = 1) -> None:
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.2, momentum=0.9)
        torch.random.set_rng_state(generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight) * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Tokens(Dataset):
    def __init__(self, count: int) -> None:
        self.data = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def loader(rank: int = 0, world: int = 1, batches: int = 10, size: int = 12) -> DataLoader:
    """``batches`` global batches of ``size`` samples, of which each rank sees its share."""
    share = size // world
    order = [b * size + rank * share + i for b in range(batches) for i in range(share)]
    return DataLoader(Tokens(batches * size), batch_size=share, sampler=order)


def train(
    module: TrainingModule,
    strategy: Any = "single_device",
    world: int = 1,
    batches: int = 10,
    ckpt_path: Any = None,
    **arguments: Any,
) -> Trainer:
    """A fit over this rank's share of the global batches."""
    trainer = Trainer(strategy=strategy, **{**SETTINGS, "max_epochs": 1, **arguments})
    trainer.fit(module, loader(int(os.environ.get("RANK", 0)), world, batches), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.strategy.model_state(trainer.training_module)


def on_ranks(world: int, make: Any, strategy: Any, save: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """The weights after a fit on ``world`` processes."""

    def run() -> Any:
        trainer = train(make(), strategy(), world, **arguments)
        if save is not None:
            trainer.save_checkpoint(save)
        return weights(trainer)

    return ranks(world, run)[0]


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two states, relative to the largest weight of the tensor."""
    assert list(one) == list(other)
    return max(float((one[k] - other[k]).abs().max() / one[k].abs().max()) for k in one)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    # with a smaller eps, a gradient that is rounding error alone (of the keys' bias) would make a step of full size
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
}
#: What float64 leaves of another order of summation after ten steps.
EXACT = 1e-11


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps_equal_one_process_with_the_global_batch(optimizer: str, tied: bool, accumulate: int) -> None:
    make = partial(Transformer, tied, OPTIMIZERS[optimizer])
    how = {"accumulate_grad_batches": accumulate, "precision": "64-true"}
    assert furthest(weights(train(make(), **how)), on_ranks(2, make, FSDPStrategy, **how)) < EXACT


def test_ten_steps_in_float32_equal_one_process_to_a_few_roundings() -> None:
    assert furthest(weights(train(Transformer())), on_ranks(2, Transformer, FSDPStrategy)) < 2e-6


# ---- state -----------------------------------------------------------------------------------------------------------

DOUBLE: dict[str, Any] = {"precision": "64-true", "batches": 4}
ADAMW = partial(Transformer, True, OPTIMIZERS["adamw"])
PLACES: dict[str, tuple[int, Any]] = {
    "single": (1, "single_device"),
    "ddp x2": (2, DDPStrategy),
    "fsdp x2": (2, FSDPStrategy),
    "fsdp x3": (3, FSDPStrategy),
    "hybrid 2x2": (4, partial(FSDPStrategy, data_parallel_replicate=2)),
}


def run_at(place: str, make: Any, save: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """The weights after a fit at one of ``PLACES``."""
    world, strategy = PLACES[place]
    if world > 1:
        return on_ranks(world, make, strategy, save, **arguments)
    trainer = train(make(), strategy, **arguments)
    if save is not None:
        trainer.save_checkpoint(save)
    return weights(trainer)


@pytest.mark.parametrize(
    ("first", "then"),
    [("fsdp x2", place) for place in PLACES] + [("single", "fsdp x2"), ("ddp x2", "fsdp x2"), ("fsdp x3", "fsdp x2")],
)
def test_a_run_goes_on_under_another_strategy_as_if_it_had_not_stopped(first: str, then: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    run_at(first, ADAMW, path, **DOUBLE)
    went_on = run_at(then, partial(ADAMW, seed=2), ckpt_path=path, max_epochs=2, **DOUBLE)
    assert furthest(weights(train(ADAMW(), max_epochs=2, **DOUBLE)), went_on) < EXACT


def test_a_file_written_under_fsdp_is_that_of_one_process(tmp_path: Path) -> None:
    run_at("fsdp x2", ADAMW, tmp_path / "two.ckpt", **DOUBLE)
    run_at("single", ADAMW, tmp_path / "one.ckpt", **DOUBLE)
    one, two = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("one", "two"))
    assert furthest(one["state_dict"], two["state_dict"]) < EXACT
    assert all(type(value) is Tensor for value in two["state_dict"].values())
    assert one["optimizer_states"][0]["param_groups"] == two["optimizer_states"][0]["param_groups"]
    for index, state in one["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(two["optimizer_states"][0]["state"][index][key], value, rtol=1e-9, atol=1e-15)
    storages = {two["state_dict"][name].data_ptr() for name in ("embedding.weight", "head.weight")}
    assert len(storages) == 1, "tied weights were written twice"


# ---- one step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clipping", [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("place", ["fsdp x3", "hybrid 2x2"])
def test_clipping_sees_whole_gradients(place: str, clipping: dict[str, Any]) -> None:
    assert (
        furthest(run_at("single", Transformer, **DOUBLE, **clipping), run_at(place, Transformer, **DOUBLE, **clipping))
        < EXACT
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, torch.inf])
def test_clip_by_norm_returns_the_norm_over_all_parts(norm_type: float) -> None:
    def run() -> Any:
        norms = []

        class Clipped(Transformer):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                norms.append(self.trainer.strategy.clip_by_norm(self.parameters(), 0.05, norm_type))
                norms.append(self.trainer.strategy.clip_by_norm(self.parameters(), 0.05, norm_type))

        train(
            Clipped(),
            "single_device" if "RANK" not in os.environ else FSDPStrategy(),
            int(os.environ.get("WORLD_SIZE", 1)),
            1,
            precision="64-true",
        )
        return norms

    alone, (one, other, _) = run(), ranks(3, run)
    assert one == other
    assert type(one[0]) is Tensor
    torch.testing.assert_close(one, alone)
    assert alone[1].item() == pytest.approx(0.05, rel=1e-4)


class Counted(TorchDispatchMode):
    """How often each collective ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_only_the_last_micro_batch_of_a_window_reduces_gradients(accumulate: int) -> None:
    def run() -> Any:
        counted = Counted()

        class Watched(Transformer):
            def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
                if batch_idx == 0:  # what ranks tell each other before is an all-gather of torch 2.15 too
                    counted.__enter__()

            def on_train_end(self) -> None:
                counted.__exit__(None, None, None)

        train(Watched(), FSDPStrategy(), 2, 6, accumulate_grad_batches=accumulate)
        return counted.calls

    blocks, batches = 3, 6
    counts = ranks(2, run)[0]
    assert counts["reduce_scatter_base"] == (blocks + 1) * batches / accumulate  # the root is a group too
    assert counts["allgather_base"] == (blocks + 1 + blocks) * batches  # the blocks' again for backward


def test_a_window_that_is_cut_short_by_a_hook_still_counts_on_all_ranks() -> None:
    class Stopping(Transformer):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> Any:
            return -1 if batch_idx == 5 else None

    how = {"precision": "64-true", "batches": 7, "accumulate_grad_batches": 3}
    assert furthest(run_at("single", Stopping, **how), run_at("fsdp x2", Stopping, **how)) < EXACT
    how["batches"] = 3
    assert furthest(run_at("single", Stopping, **how), run_at("fsdp x2", Transformer, **how)) < EXACT


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_has_the_numbers_of_one_process(precision: str) -> None:
    alone = run_at("single", Transformer, precision=precision)
    together = run_at("fsdp x2", Transformer, precision=precision)
    exact = run_at("single", Transformer)
    print(precision, furthest(alone, together), furthest(alone, exact))
    assert furthest(alone, together) < 1e-2


def test_a_mixed_precision_policy_of_the_users_replaces_autocast() -> None:
    def run() -> Any:
        seen = set()

        class Looking(Transformer):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                loss = super().training_step(batch, batch_idx)
                seen.update([self.head.weight.dtype, loss.dtype, torch.is_autocast_enabled("cpu")])
                return loss

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        trainer = train(Looking(), FSDPStrategy(mixed_precision=policy), 2, precision="bf16-mixed")
        return seen, weights(trainer)

    (seen, found), _ = ranks(2, run)
    assert seen == {torch.bfloat16, False}
    assert all(value.dtype is torch.float32 for value in found.values())
    print(furthest(run_at("single", Transformer), found))


@pytest.mark.parametrize("ignored", [None, "blocks[.]1|head"])
def test_ranks_agree_on_an_overflow_that_one_of_them_has(ignored: Any) -> None:
    def run() -> Any:
        rank = int(os.environ["RANK"])

        class Overflowing(Transformer):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                loss = super().training_step(batch, batch_idx)
                return loss * torch.inf if batch_idx == 1 and rank == 1 else loss

        trainer = train(Overflowing(), FSDPStrategy(ignored_modules=ignored), 2, 4, precision="16-mixed")
        return trainer.global_step, trainer.strategy.precision.skipped_steps, weights(trainer)

    for steps, skipped, found in ranks(2, run):
        assert (steps, skipped) == (3, 1)
        assert all(value.is_meta or value.isfinite().all() for value in found.values())


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"wrap": None},
        {"wrap": [Block, "Embedding"]},
        {"wrap": 100},
        {"wrap": lambda name, module: name.endswith("mlp")},
        {"sharding": "grad_op"},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": ["MultiheadAttention", nn.Sequential]},
        {"sharding": "hybrid"},
        {"data_parallel_replicate": 2, "data_parallel_shard": 1},
    ],
)
def test_every_way_to_shard_gives_the_same_numbers_and_names(arguments: dict[str, Any]) -> None:
    how = {"precision": "64-true", "batches": 3, "accumulate_grad_batches": 2}
    together = on_ranks(2, Transformer, partial(FSDPStrategy, **arguments), **how)
    assert furthest(run_at("single", Transformer, **how), together) < EXACT


def test_activation_checkpointing_runs_the_forward_again() -> None:
    def run(policy: Any) -> int:
        calls = []

        class Counting(Block):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(1)
                return super().forward(x)

        class Model(Transformer):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Counting() for _ in range(3)])

        train(Model(), FSDPStrategy(activation_checkpointing=policy), 2, 1)
        return len(calls)

    assert ranks(2, run, None) == [3, 3]
    assert ranks(2, run, "Counting") == [6, 6]


def test_sizes_whose_product_is_not_the_number_of_processes_are_refused() -> None:
    for sizes, shown in (
        ((2, 2), "2 x 2 = 4 processes, but this run has 3"),
        ((2, None), "2 x 1 = 2"),
        ((None, 2), "1 x 2 = 2"),
    ):
        strategy = FSDPStrategy(data_parallel_replicate=sizes[0], data_parallel_shard=sizes[1])
        with pytest.raises(ValueError, match=shown):
            strategy.place([torch.device("cpu")] * 3)


def test_a_mesh_of_the_users_is_taken() -> None:
    def run(shape: tuple[int, ...]) -> Any:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[: len(shape)])
        module = Transformer()
        train(module, FSDPStrategy(device_mesh=mesh), 2, 1)
        return [str(placement) for placement in module.head.weight.placements]

    assert ranks(2, run, (1, 2))[0] == ["R", "S(0)"]
    assert ranks(2, run, (2,))[0] == ["S(0)"]


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'hybrid'"):
        FSDPStrategy(sharding="hybird")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state_dict_type"):
        FSDPStrategy(state_dict_type="shards")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Pass a torch.distributed.fsdp.MixedPrecisionPolicy"):
        FSDPStrategy(mixed_precision="bf16")  # type: ignore[arg-type]


# ---- where weights come from -----------------------------------------------------------------------------------------


def test_rank_0s_initial_weights_are_everybodys() -> None:
    def run() -> Any:
        module = Transformer(seed=int(os.environ["RANK"]))
        module.register_buffer("mark", torch.full((2,), int(os.environ["RANK"]) + 7))
        trainer = train(module, FSDPStrategy(), 2, 1, limit_train_batches=0)
        return weights(trainer), module.mark

    (found, mark), (_, other) = ranks(2, run)
    found.pop("mark")
    assert furthest(found, Transformer(seed=0).state_dict()) == 0
    assert mark.tolist() == other.tolist() == [7, 7]


def test_different_models_on_the_ranks_are_an_error_that_names_the_first_difference() -> None:
    def run() -> None:
        module = Transformer()
        module.head = nn.Linear(WIDTH, VOCABULARY + int(os.environ["RANK"]))
        train(module, FSDPStrategy(), 2, 1)

    with pytest.raises(
        RanksError, match=r"Transformer differs between the ranks: rank 0 has \('head.weight', \(11, 8\)"
    ):
        ranks(2, run)


class Lazy(Transformer):
    """Makes its layers in ``configure_model``, on the meta device if asked to."""

    def __init__(self, meta: bool = True) -> None:
        TrainingModule.__init__(self)
        self.meta = meta
        self.optimizer = OPTIMIZERS["sgd"]

    def configure_model(self) -> None:
        torch.manual_seed(3)
        with torch.device("meta" if self.meta else "cpu"):
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.bend = nn.BatchNorm1d(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))


def test_layers_on_the_meta_device_get_the_values_that_one_process_gives_them() -> None:
    how = {"precision": "64-true", "batches": 3}
    assert furthest(run_at("single", partial(Lazy, False), **how), run_at("fsdp x2", Lazy, **how)) < EXACT


def test_a_layer_that_was_made_on_the_meta_device_is_let_go_of_when_it_is_sharded() -> None:
    """No process holds more than one group of the module whole."""

    def run() -> list[int]:
        alive: list[int] = []
        whole_ones: list[weakref.ref[Tensor]] = []

        class Watched(FSDPStrategy):
            def _shard_group(self, part: nn.Module, reshard: Any) -> None:
                whole_ones.extend(weakref.ref(p) for p in part.parameters() if not isinstance(p, DTensor))
                super()._shard_group(part, reshard)
                alive.append(sum(one() is not None for one in whole_ones))

        train(Lazy(), Watched(), 2, 1)
        return alive

    assert ranks(2, run) == [[0] * 4] * 2


def test_tied_layers_on_the_meta_device_stay_tied() -> None:
    def run() -> Any:
        class Tied(Lazy):
            def configure_model(self) -> None:
                super().configure_model()
                self.head.weight = self.embedding.weight

        module = Tied()
        trainer = train(module, FSDPStrategy(), 2, 2)
        return module.head.weight is module.embedding.weight, weights(trainer)

    (tied, found), _ = ranks(2, run)
    assert tied
    assert torch.equal(found["head.weight"], found["embedding.weight"])


def test_init_module_leaves_layers_without_memory_when_asked() -> None:
    def run() -> Any:
        class Empty(Lazy):
            def configure_model(self) -> None:
                with self.trainer.init_module(empty_init=True):
                    self.meta = False
                    TrainingModule.configure_model(self)
                    self.embedding = nn.Embedding(VOCABULARY, WIDTH)
                    self.blocks = nn.ModuleList([Block() for _ in range(2)])
                    self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
                self.scale = nn.Parameter(torch.ones(1))
                empty.append(self.head.weight.is_meta)

        empty: list[bool] = []
        return weights(train(Empty(), FSDPStrategy(), 2, 2)), empty

    (found, empty), _ = ranks(2, run)
    assert empty == [True]
    assert all(value.isfinite().all() for value in found.values())


class Unfilled(Lazy):
    def configure_model(self) -> None:
        super().configure_model()
        self.positions = nn.Module()
        self.positions.table = nn.Parameter(torch.empty(LENGTH, WIDTH, device="meta"))


def test_what_nobody_gives_a_value_is_an_error_that_names_it() -> None:
    with pytest.raises(RanksError, match=r"nothing sets the values of 'positions.table'"):
        ranks(2, lambda: train(Unfilled(), FSDPStrategy(), 2, 1))


def test_a_checkpoint_may_give_the_values_that_nobody_else_gives(tmp_path: Path) -> None:
    class Filled(Unfilled):
        def configure_model(self) -> None:
            super().configure_model()
            self.positions.table = nn.Parameter(torch.ones(LENGTH, WIDTH))

    run_at("single", partial(Filled, False), tmp_path / "it.ckpt", batches=2)
    found = run_at("fsdp x2", Unfilled, batches=2, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    assert (found["positions.table"] == 1).all()


def test_init_weights_of_a_module_around_it_comes_after_a_layers_own() -> None:
    class Constant(Lazy):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)

    found = ranks(2, lambda: weights(train(Constant(), FSDPStrategy(), 2, 1, limit_train_batches=0)))[0]
    assert (found["head.weight"] == 0.25).all()
    assert (found["blocks.2.mlp.0.weight"] == 0.25).all()


# ---- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True),
        partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
        partial(torch.optim.RMSprop, lr=1e-3, eps=1e-2, momentum=0.5, foreach=True),
    ],
    ids=["foreach", "fused", "rmsprop"],
)
def test_optimizers_go_on_from_a_file(optimizer: Any, tmp_path: Path) -> None:
    make = partial(Transformer, False, optimizer)
    run_at("fsdp x2", make, tmp_path / "it.ckpt", **DOUBLE)
    went_on = run_at("fsdp x3", make, ckpt_path=tmp_path / "it.ckpt", max_epochs=2, **DOUBLE)
    assert furthest(weights(train(make(), max_epochs=2, **DOUBLE)), went_on) < 1e-9


def test_an_optimizer_made_before_the_parameters_were_sharded_is_refused() -> None:
    class Early(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.early = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.early

    with pytest.raises(RanksError, match=r"does not contain .* of SGD .*Create the optimizer in configure_optimizers"):
        ranks(2, lambda: train(Early(), FSDPStrategy(), 2, 1))


def test_an_optimizer_that_torch_cannot_run_on_parts_is_named() -> None:
    class Unusual(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.linalg.det(next(p.grad for group in self.param_groups for p in group["params"] if p.dim() == 2))

    make = partial(Transformer, False, partial(Unusual, lr=0.1))
    with pytest.raises(RanksError, match=r"torch cannot run an operation on a sharded tensor.*det"):
        ranks(2, lambda: train(make(), FSDPStrategy(), 2, 1))


def test_lbfgs_is_refused_with_the_reason() -> None:
    make = partial(Transformer, False, torch.optim.LBFGS)
    with pytest.raises(RanksError, match=r"LBFGS does not work with FSDPStrategy, because LBFGS needs all parameters"):
        ranks(2, lambda: train(make(), FSDPStrategy(), 2, 1))


class Adversaries(TrainingModule):
    """Two networks that step in turn, by hand; the second has its parameters used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.judge = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        x = batch[:, :4].double()
        with self.toggled_optimizer(first):
            loss = nn.functional.linear(self.maker(x), self.judge.weight).square().mean()
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
        for target in (1.0, 0.0):
            self.manual_backward((self.judge(self.maker(x).detach()) - target).square().mean())
        self.manual_backward(self.judge.weight.square().sum() * 0.01)
        second.step()
        second.zero_grad()
        if batch_idx:
            with torch.no_grad():
                self.log("judged", self.judge(self.maker(x)).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.maker.parameters(), lr=0.1), torch.optim.SGD(self.judge.parameters(), lr=0.01)


def test_several_backwards_and_steps_by_hand_equal_one_process() -> None:
    def make() -> Adversaries:
        torch.manual_seed(4)
        return Adversaries()

    how = {"precision": "64-true", "batches": 4}
    alone = run_at("single", make, **how)
    assert furthest(alone, run_at("fsdp x2", make, **how)) < EXACT
    assert furthest(alone, on_ranks(2, make, partial(FSDPStrategy, wrap=None), **how)) < EXACT
    assert furthest(alone, make().double().state_dict()) > 1e-3


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_before_between_and_after_training_sees_whole_weights() -> None:
    def run() -> Any:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        strategy = FSDPStrategy() if world > 1 else "single_device"
        module, data = Transformer(), loader(rank, world, 3)
        found = []
        trainer = Trainer(strategy=strategy, max_epochs=2, precision="64-true", **SETTINGS)
        found.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
        trainer.fit(module, data, data)
        found.append(float(trainer.callback_metrics["val_loss"]))
        found.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
        trainer = Trainer(
            strategy=FSDPStrategy() if world > 1 else "single_device", max_epochs=1, precision="64-true", **SETTINGS
        )
        trainer.fit(module, data, data)
        return found, weights(trainer)

    found, expected = run()
    for values, state in ranks(2, run):
        assert values == pytest.approx(found, rel=1e-9)
        if not next(iter(state.values())).is_meta:
            assert furthest(expected, state) < EXACT


def test_predictions_are_those_of_one_process() -> None:
    def run() -> Any:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

        class Predicting(Transformer):
            def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return self(batch)

        trainer = Trainer(strategy=FSDPStrategy() if world > 1 else "single_device", **SETTINGS)
        return torch.cat(trainer.predict(Predicting(), loader(rank, world, 2)))

    one, two = ranks(2, run)
    torch.testing.assert_close(torch.cat([one[:6], two[:6], one[6:], two[6:]]), run(), rtol=1e-5, atol=1e-6)


def test_a_sharded_module_is_not_sharded_again_with_other_arguments() -> None:
    def run() -> None:
        module = Transformer()
        train(module, FSDPStrategy(), 2, 1)
        train(module, FSDPStrategy(wrap=None), 2, 1)

    with pytest.raises(RanksError, match=r"This Transformer was sharded by an FSDPStrategy with different arguments"):
        ranks(2, run)


def test_a_wrapped_blocks_weight_used_from_outside_has_an_error_that_says_so() -> None:
    class Outside(Transformer):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + (torch.ones(WIDTH) * self.blocks[0].norm.weight).sum()

    with pytest.raises(RanksError, match=r"are unsharded only while that module's forward runs"):
        ranks(2, lambda: train(Outside(), FSDPStrategy(), 2, 1))


def test_one_process_alone_can_run_it() -> None:
    how = {"precision": "64-true", "batches": 2}
    assert furthest(run_at("single", Transformer, **how), on_ranks(1, Transformer, FSDPStrategy, **how)) < EXACT


# ---- with the rest of a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp", "hybrid_shard", "fsdp_cpu_offload"])
def test_the_names_train(name: str) -> None:
    how = {"precision": "64-true", "batches": 2}
    assert furthest(run_at("single", Transformer, **how), on_ranks(2, Transformer, lambda: name, **how)) < EXACT


def test_averaged_weights_are_averages_of_whole_weights() -> None:
    def run() -> dict[str, Tensor]:
        world = int(os.environ.get("WORLD_SIZE", 1))
        strategy = FSDPStrategy() if world > 1 else "single_device"
        average = EMAWeightAveraging(decay=0.5)
        return weights(train(Transformer(), strategy, world, 4, precision="64-true", callbacks=[average]))

    assert furthest(run(), ranks(2, run)[0]) < EXACT


# ---- ignored modules -------------------------------------------------------------------------------------------------

#: The embedding (and with it the tied head), a whole block and a part of another one.
IGNORING = partial(FSDPStrategy, ignored_modules="embedding|blocks[.]1|blocks[.]2[.]mlp[.].*")


class PartlyFrozen(Transformer):
    """Of the ignored modules, one block is frozen. Records which parameters are whole, and the norms of gradients."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(True, partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True), seed)
        self.blocks[1].requires_grad_(False)
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.trainer.strategy.clip_by_norm(self.parameters(), 1e9))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ignored_modules_are_whole_and_learn_what_one_process_learns(accumulate: int) -> None:
    how = {"batches": 4, "precision": "64-true", "gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}

    def run() -> Any:
        world = int(os.environ.get("WORLD_SIZE", 1))
        module, average = PartlyFrozen(), EMAWeightAveraging(decay=0.5)
        trainer = train(module, IGNORING() if world > 1 else "single_device", world, callbacks=[average], **how)
        whole = {name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
        return weights(trainer), whole, module.norms

    (alone, _, norms), ((found, whole, seen), (_, other, also)) = run(), ranks(2, run)
    assert furthest(alone, found) < EXACT
    block = {name for name in alone if name.startswith("blocks.1.")}
    assert whole == other == {"embedding.weight"} | block | {name for name in alone if name.startswith("blocks.2.mlp.")}
    torch.testing.assert_close(seen, norms, rtol=1e-10, atol=0.0)
    assert seen == also


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(("first", "then"), [(IGNORING, IGNORING), (IGNORING, FSDPStrategy), (FSDPStrategy, IGNORING)])
def test_a_run_goes_on_with_other_ignored_modules(first: Any, then: Any, kind: Any, tmp_path: Path) -> None:
    path, how = tmp_path / "one.ckpt", {**DOUBLE, "batches": 2}

    def run() -> Any:
        train(PartlyFrozen(), first(state_dict_type=kind), 2, **how).save_checkpoint(path)
        return weights(train(PartlyFrozen(seed=2), then(state_dict_type=kind), 2, ckpt_path=path, max_epochs=2, **how))

    assert furthest(weights(train(PartlyFrozen(), max_epochs=2, **how)), ranks(2, run)[0]) < EXACT


def test_gradients_of_ignored_modules_are_saved_in_an_unfinished_window() -> None:
    def step(strategy: Any, micro_batches: Any, saved: bool = False) -> Any:
        accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if saved:
            accelerator.load_state("state")
        for number in micro_batches:
            with accelerator.accumulate(model):
                x = torch.arange(8.0).view(2, 4) * 0.1 + int(os.environ["RANK"]) + number
                accelerator.backward(model(x).square().mean())
                optimizer.step()
        if not accelerator.sync_gradients:
            accelerator.save_state("state")
        return accelerator.get_state_dict(model)

    def run() -> Any:
        ignoring = [FSDPStrategy(ignored_modules="0") for _ in range(2)]
        step(ignoring[0], [0])
        return step(ignoring[1], [1], saved=True), step("ddp", [0, 1])

    found, expected = ranks(2, run)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_ignored_modules_that_one_rank_does_not_use_learn_from_the_others() -> None:
    class Choosing(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.extra, self.spare = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
            for layer in (self.extra, self.spare):
                nn.init.ones_(layer.weight)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
            return loss + self.extra.weight.pow(2).sum() * world if rank == 0 else loss

    def run() -> Any:
        world = int(os.environ.get("WORLD_SIZE", 1))
        strategy = FSDPStrategy(ignored_modules="extra|spare") if world > 1 else "single_device"
        return weights(train(Choosing(), strategy, world, 2, precision="64-true"))

    assert furthest(run(), ranks(2, run)[0]) < EXACT


def test_layers_on_the_meta_device_are_ignored_once_they_have_values() -> None:
    class Configured(TrainingModule):
        def configure_model(self) -> None:
            if not hasattr(self, "layers"):
                torch.manual_seed(4)
                self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch[:, :3].to(self.layers[0].weight.dtype)
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def run() -> Any:
        world = int(os.environ.get("WORLD_SIZE", 1))
        strategy = FSDPStrategy(ignored_modules="layers[.]1") if world > 1 else "single_device"
        return weights(train(Configured(), strategy, world, 2, precision="64-true"))

    assert furthest(run(), ranks(2, run)[0]) < EXACT


def test_parameters_that_are_thawed_between_epochs_learn_from_then_on() -> None:
    class Thawing(Transformer):
        def on_train_epoch_start(self) -> None:
            for part in (self.blocks[1], self.embedding):
                part.requires_grad_(self.current_epoch > 0)

    make = partial(Thawing, False, OPTIMIZERS["adamw"])
    assert (
        furthest(run_at("single", make, **DOUBLE, max_epochs=2), run_at("fsdp x2", make, **DOUBLE, max_epochs=2))
        < EXACT
    )


def test_ranks_may_use_different_parameters_if_they_say_so() -> None:
    class Choosing(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(5))
            self.optimizer = partial(torch.optim.SGD, lr=0.5)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss + self.extra.sum() if os.environ["RANK"] == "0" else loss

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        with pytest.raises(ValueError, match=r"needs torch 2\.13"):
            FSDPStrategy(find_unused_parameters=True)
        return
    found = on_ranks(2, Choosing, partial(FSDPStrategy, find_unused_parameters=True), batches=2)
    assert found["extra"].tolist() == [0.5] * 5  # two steps of 0.5 times the mean of 1 and 0


class Failing(Transformer):
    fails = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fails and batch_idx == 1:
            raise ValueError("on every rank")
        return loss


def test_a_module_can_be_trained_on_after_an_error_or_says_that_it_cannot() -> None:
    def run() -> dict[str, Tensor]:
        module = Failing()
        with pytest.raises(ValueError, match="on every rank"):
            train(module, FSDPStrategy(), 2, precision="64-true")
        module.fails = False
        return weights(train(module, FSDPStrategy(), 2, 3, precision="64-true"))

    if not hasattr(FSDPModule, "reset_iter_state"):
        with pytest.raises(RanksError, match=r"run of this Failing in the middle of a step.*upgrade torch"):
            ranks(2, run)
        return
    module = Transformer()
    train(module, batches=1, precision="64-true")
    assert furthest(weights(train(module, batches=3, precision="64-true")), ranks(2, run)[0]) < EXACT


def test_after_an_error_nobody_waits_for_parts_that_may_not_come() -> None:
    def run() -> str:
        class Saving(Callback):
            def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
                with pytest.raises(RuntimeError, match=r"The state cannot be saved after an error"):
                    trainer.save_checkpoint("never.ckpt")

        with pytest.raises(ValueError, match=r"on every rank"):
            train(Failing(), FSDPStrategy(), 2, callbacks=[Saving()])
        return "came here"

    assert ranks(2, run) == ["came here"] * 2


def test_a_dict_of_another_kind_may_carry_the_loss() -> None:
    class Carrying(Transformer):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return UserDict(loss=super().training_step(batch, batch_idx))

    how = {"precision": "64-true", "batches": 2}
    together = on_ranks(2, Carrying, partial(FSDPStrategy, wrap=None), **how)
    assert furthest(run_at("single", Carrying, **how), together) < EXACT
