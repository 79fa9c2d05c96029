"""ZeRO by DeepSpeed on real gloo processes: the numbers of one process with the global batch."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import RanksError, ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer, TrainingModule
from paceline.strategies import DeepSpeedStrategy

pytest.importorskip("deepspeed.git_version_info_installed", reason="needs DeepSpeed: pip install deepspeed")

VOCABULARY, WIDTH, LENGTH = 11, 8, 6
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
STAGES = (1, 2, 3)
ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(y := self.norm(x), y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(TrainingModule):
    """Next-token prediction. Uses a parameter of its own and a layer's weight without its layer."""

    def __init__(self, optimizer: Any = ADAMW, tied: bool = False, late: bool = False) -> None:
        super().__init__()
        self.optimizer, self.tied = optimizer, tied
        self.losses: list[float] = []
        if not late:
            self.make()

    def make(self) -> None:
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight) * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> float:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return float(loss)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Late(Transformer):
    """Makes its layers in ``configure_model``."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, late=True)

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.make()


class Tokens(Dataset):
    def __init__(self, count: int, seed: int = 5) -> None:
        self.data = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def strategy(stage: int, **given: Any) -> DeepSpeedStrategy:
    """ZeRO that takes small parameters apart too."""
    zero = {"stage3_param_persistence_threshold": 0, **given.pop("zero", {})}
    return DeepSpeedStrategy(stage=stage, config={"zero_optimization": zero}, **given)


def state(trainer: Trainer, module: TrainingModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.model_state(module).items()}


def fit(
    made: Any, module: Any, count: int = 40, batch_size: int = 2, val: int = 0, ckpt_path: Any = None, **given: Any
) -> Trainer:
    trainer = Trainer(**QUIET, strategy=made, **{"max_epochs": 1, **given})
    torch.manual_seed(5)
    val_loader = DataLoader(Tokens(val, 6), batch_size) if val else None
    trainer.fit(module, DataLoader(Tokens(count), batch_size, shuffle=True), val_loader, ckpt_path=ckpt_path)
    return trainer


def weights(made: Any, module: Any, **given: Any) -> dict[str, Tensor]:
    return state(fit(made, module, **given), module)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-5, atol: float = 2e-7) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


# ---- the same numbers ------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": SGD},
    "windows of 3, the last of 1": {"accumulate_grad_batches": 3},
    "uneven windows": {"accumulate_grad_batches": 3, "count": 37, "optimizer": SGD},
    "norm": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3, "optimizer": SGD},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", "optimizer": SGD},
    "tied": {"tied": True},
}


def run_all(make: Any, batch_size: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, given in RUNS.items():
        own = {key: given[key] for key in ("optimizer", "tied") if key in given}
        rest = {key: value for key, value in given.items() if key not in own}
        found[name] = weights(make(), Transformer(**own), batch_size=batch_size, **rest)
    return found


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_learn_what_one_process_with_their_batches_together_learns(stage: int, offload: bool) -> None:
    alone = run_all(lambda: "cpu", 4)

    def together() -> Any:
        given = {"offload_parameters": True} if offload and stage == 3 else {}
        return run_all(lambda: strategy(stage, offload_optimizer=offload, **given), 2)

    found, _ = ranks(2, together)
    for name, expected in alone.items():
        assert_same(found[name], expected)


class Scheduled(Transformer):
    """Two parameter groups, a schedule for both, some frozen weights, and every override a module may have."""

    def configure_optimizers(self) -> Any:
        self.embedding.requires_grad_(False)
        self.blocks[0].mlp.requires_grad_(False)
        groups = [
            {"params": list(self.embedding.parameters()), "lr": 9.0},
            {"params": [*self.blocks.parameters()], "lr": 3e-3},
            {"params": [self.head.weight, self.scale], "lr": 1e-2, "weight_decay": 0.0},
        ]
        optimizer = self.optimizer(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def backward(self, loss: Tensor) -> None:
        self.losses.append(float(loss))
        (2 * loss).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)


@pytest.mark.parametrize("stage", STAGES)
def test_schedules_groups_frozen_weights_and_overridden_methods_count(stage: int) -> None:
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    alone = weights("cpu", Scheduled(SGD), batch_size=4, **given)

    def together() -> Any:
        return weights(strategy(stage), Scheduled(SGD), **given)

    assert_same(ranks(2, together)[0], alone)


class Items(Transformer):
    """Weighs its losses by a count that differs from batch to batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        kept = batch[batch[:, 0] > 2]
        loss = self.loss(kept) if len(kept) else self.loss(batch) * 0
        return {"loss": loss, "num_items": len(kept)}


@pytest.mark.parametrize("stage", STAGES)
def test_items_are_weighed_over_all_ranks(stage: int) -> None:
    alone = weights("cpu", Items(SGD), batch_size=4, accumulate_grad_batches=2)
    together = partial(weights, accumulate_grad_batches=2)
    found, _ = ranks(2, lambda: together(strategy(stage), Items(SGD)))
    assert_same(found, alone)


def test_layers_made_in_configure_model_are_split_at_once_and_equal() -> None:
    alone = weights("cpu", Late(), batch_size=4)

    def together() -> Any:
        module = Late()
        trainer = fit(strategy(3), module)
        return state(trainer, module), module.head.weight.numel(), module.head.weight.ds_numel

    (found, here, whole), _ = ranks(2, together)
    assert_same(found, alone)
    assert (here, whole) == (0, VOCABULARY * WIDTH)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def losses(made: Any, module: Any, path: Any, batch_size: int) -> float:
    trainer = Trainer(**QUIET, strategy=made)
    loader = DataLoader(Tokens(12, 6), batch_size)
    return trainer.validate(module, loader, ckpt_path=path, verbose=False)[0]["val_loss"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_to_one_process_and_to_ddp_and_back(stage: int, tmp_path: Path) -> None:
    """Runs of 5 steps under one strategy and 5 under another are one run of 10 steps on one process."""
    alone = weights("cpu", Transformer(), batch_size=4)

    def first(name: str, made: Any) -> float:
        trainer = fit(made, Transformer(), max_steps=5, val=12, limit_val_batches=0)
        trainer.save_checkpoint(tmp_path / name)
        return losses(made, trainer.training_module, None, 2)

    def second(name: str, made: Any, module: Any) -> dict[str, Tensor]:
        return weights(made, module, ckpt_path=tmp_path / name)

    of_zero = ranks(2, lambda: first("zero", strategy(stage)))[0]
    assert losses("cpu", Transformer(), tmp_path / "zero", 4) == pytest.approx(of_zero, rel=1e-5)
    assert_same(weights("cpu", Transformer(), batch_size=4, ckpt_path=tmp_path / "zero"), alone)
    assert_same(ranks(2, lambda: second("zero", "ddp", Transformer()))[0], alone)
    ranks(2, lambda: first("ddp", "ddp"))
    assert_same(ranks(2, lambda: second("ddp", strategy(stage), Late()))[0], alone)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(stage: int, precision: str, tmp_path: Path) -> None:
    def run() -> Any:
        given = {"max_steps": 10, "accumulate_grad_batches": 2, "max_epochs": 3, "precision": precision}
        whole = weights(strategy(stage), Late(), **given)
        fit(strategy(stage), Late(), **{**given, "max_steps": 4}).save_checkpoint(tmp_path / "half")
        return whole, weights(strategy(stage), Late(), **given, ckpt_path=tmp_path / "half")

    whole, resumed = ranks(2, run)[0]
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_a_checkpoint_that_does_not_fit_a_split_module_says_why(tmp_path: Path) -> None:
    class Wider(Late):
        def make(self) -> None:
            super().make()
            self.extra = nn.Linear(2, 2)
            self.head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)

    fit("cpu", Transformer(), max_steps=1).save_checkpoint(tmp_path / "other")
    with pytest.raises(RanksError) as info:
        ranks(2, lambda: losses(strategy(3), Wider(), tmp_path / "other", 2))
    text = str(info.value.errors[0])
    assert "does not fit Wider" in text
    assert "head.weight" in text
    assert "2 missing in it (extra.weight, extra.bias)" in text


# ---- evaluation and several runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_in_between_and_later_runs_go_through_the_same_weights(stage: int) -> None:
    class Predicts(Transformer):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            return "words", self(batch).argmax(-1)

    def run(made: Any, batch_size: int) -> Any:
        module = Predicts(SGD)
        trainer = Trainer(**QUIET, strategy=made, max_epochs=1, val_check_interval=5, accumulate_grad_batches=2)
        train, val = DataLoader(Tokens(40), batch_size), DataLoader(Tokens(11, 6), batch_size)
        trainer.fit(module, train, val)
        first = float(trainer.callback_metrics["val_loss"])
        again = Trainer(**QUIET, strategy=made, max_epochs=1)
        again.fit(module, train)
        values = again.validate(module, val, verbose=False)[0]["val_loss"]
        predicted = torch.cat([tokens for _, tokens in again.predict(module, val, gather=True)])
        return first, values, predicted, state(again, module)

    first, values, predicted, expected = run("cpu", 4)
    made = ranks(2, lambda: run(strategy(stage), 2))[0]
    assert made[0] == pytest.approx(first, rel=1e-5)
    assert made[1] == pytest.approx(values, rel=1e-5)
    assert torch.equal(made[2], predicted)
    assert_same(made[3], expected)


def test_a_split_module_is_evaluated_without_a_fit() -> None:
    alone = losses("cpu", Transformer(), None, 4)
    assert ranks(2, lambda: losses(strategy(3), Late(), None, 2)) == [pytest.approx(alone, rel=1e-5)] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_works_like_several(stage: int) -> None:
    def run() -> Any:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            del os.environ[name]
        return weights(strategy(stage), Transformer(), batch_size=4, accumulate_grad_batches=3)

    alone = weights("cpu", Transformer(), batch_size=4, accumulate_grad_batches=3)
    assert_same(ranks(1, run)[0], alone)


# ---- precision -------------------------------------------------------------------------------------------------------

#: Stage 3 multiplies with a linear layer of its own, which rounds to 16 bits at other places (2**-8 for bf16).
ROUNDED = {1: {}, 2: {}, 3: {"rtol": 2e-3, "atol": 2e-5}}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_mixed_precision_has_the_numbers_of_ddp(stage: int, precision: str) -> None:
    given = {"precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    expected = ranks(2, lambda: weights("ddp", Transformer(SGD), **given))[0]
    found, _ = ranks(2, lambda: weights(strategy(stage), Transformer(SGD), **given))
    assert_same(found, expected, **ROUNDED[stage])


class Overflows(Transformer):
    """Its third batch has a gradient that is too large for fp16."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) * (1e38 if batch_idx == 2 and self.trainer.global_rank == 0 else 1.0)


@pytest.mark.parametrize(
    ("stage", "offload", "algorithm"), [(1, False, "norm"), (2, False, "value"), (2, True, "norm"), (3, False, "value")]
)
def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(stage: int, offload: bool, algorithm: str) -> None:
    def run(made: Any) -> Any:
        module = Overflows(SGD)
        given = {"precision": "16-mixed", "gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
        trainer = fit(made, module, **given)
        precision = trainer.strategy.precision
        return state(trainer, module), trainer.global_step, precision.state_dict()

    expected = ranks(2, lambda: run("ddp"))[0]
    found = ranks(2, lambda: run(strategy(stage, offload_optimizer=offload)))
    assert_same(found[0][0], expected[0], **ROUNDED[stage])
    for _, steps, kept in found:
        assert steps == expected[1] == 9
        assert kept == expected[2]


@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_weights_follow_float32_ones(stage: int) -> None:
    """Steps too small for bf16 add up in the float32 weights; plain bf16 weights would never move."""

    def run(precision: str) -> Any:
        module = Transformer(partial(torch.optim.SGD, lr=1e-4))
        trainer = fit(strategy(stage), module, precision=precision, max_epochs=4)
        optimizer = trainer.strategy.optimizer_state(module, trainer.optimizers[0])
        return state(trainer, module), optimizer.get("deepspeed", {}).get("weights")

    exact, _ = ranks(2, lambda: run("32-true"))[0]
    half, kept = ranks(2, lambda: run("bf16-true"))[0]
    names = [name for name in exact if name != "count"]
    assert {half[name].dtype for name in names} == {torch.bfloat16}
    order = [name for name, _ in Transformer().named_parameters()]
    start = dict(Transformer().named_parameters())["head.weight"]
    weight = kept[order.index("head.weight")]
    moved, expected = weight - start.bfloat16().float(), exact["head.weight"] - start
    assert (moved - expected).abs().max() < 0.1 * expected.abs().max()
    assert torch.equal(weight.bfloat16(), half["head.weight"])


# ---- what is said ----------------------------------------------------------------------------------------------------


def chosen(**given: Any) -> Trainer:
    return Trainer(**QUIET, **given)


def test_without_deepspeed_the_error_has_the_pip_line_and_the_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'deepspeed>=0\.19'.*strategy='fsdp'") as info:
        chosen(strategy="deepspeed_stage_3")
    assert "\n" not in str(info.value)
    with pytest.raises(ModuleNotFoundError, match="'ddp'"):
        chosen(strategy="deepspeed")


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [
        ("deepspeed", 2, False, False),
        ("deepspeed_stage_1", 1, False, False),
        ("deepspeed_stage_2_offload", 2, True, False),
        ("deepspeed_stage_3", 3, False, False),
        ("deepspeed_stage_3_offload", 3, True, True),
    ],
)
def test_names_say_stage_and_offload(name: str, stage: int, optimizer: bool, parameters: bool) -> None:
    found = chosen(strategy=name).strategy
    assert isinstance(found, DeepSpeedStrategy)
    assert (found.stage, found.offload_optimizer, found.offload_parameters) == (stage, optimizer, parameters)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 0}, "ZeRO stage 0 was asked for. Choose 1, 2 or 3. Stage 0 is strategy='ddp'"),
        ({"config": {"zero_optimization": {"stage": 4}}}, "ZeRO stage 4 was asked for"),
        ({"stage": 2, "offload_parameters": True}, "only stage 3 takes parameters apart"),
        ({"config": {"optimizer": {"type": "Adam"}}}, "configure_optimizers makes the optimizer"),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, "configure_optimizers makes the scheduler"),
        ({"config": "absent.json"}, "there is no such file"),
        ({"config": {"zero_optimization": {"stage": 1, "overlap_comm": True}}}, "overlap_comm under stage 1"),
        (
            {"config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}},
            "offload_param to 'nvme'",
        ),
        ({"start_method": "thread"}, "start_method"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        DeepSpeedStrategy(**given)


def test_a_config_file_is_read_and_wins_over_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": "auto"}))
    found = DeepSpeedStrategy(stage=1, config=path)
    assert found.stage == 3
    assert found.config == {"zero_optimization": {"stage": 3}}
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        DeepSpeedStrategy(config=path)
    with pytest.raises(TypeError, match="Pass a dict, or the path"):
        DeepSpeedStrategy(config=3)  # type: ignore[arg-type]


def test_a_config_may_repeat_what_the_trainer_says(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 1},
    }
    given = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    alone = weights("cpu", Transformer(SGD), batch_size=4, **given)
    found = ranks(2, lambda: weights(DeepSpeedStrategy(config=config), Transformer(SGD), **given))
    assert_same(found[0], alone)


@pytest.mark.parametrize(
    ("config", "given", "values"),
    [
        ({"gradient_accumulation_steps": 4}, {}, ("=4", "accumulate_grad_batches=1")),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ("=1.0", "gradient_clip_val=0.5")),
        ({"bf16": {"enabled": True}}, {}, ("bf16.enabled=True", "'32-true'")),
        ({"fp16": {"enabled": True}}, {"precision": "bf16-mixed"}, ("fp16.enabled=True", "'bf16-mixed'")),
        ({"train_micro_batch_size_per_gpu": 8}, {}, ("=8", "batch_size=2")),
        ({"train_batch_size": 64}, {}, ("=64", "makes 2 on 1 ranks")),
    ],
)
def test_a_config_that_contradicts_the_trainer_is_an_error_with_both_values(
    config: dict[str, Any], given: dict[str, Any], values: tuple[str, str]
) -> None:
    with pytest.raises(RanksError) as info:
        ranks(1, lambda: fit(DeepSpeedStrategy(config=config), Transformer(), **given))
    error = info.value.errors[0]
    assert isinstance(error, ValueError)
    for value in values:
        assert value in str(error)


class Manual(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def adding_a_group(parameters: Any) -> Any:
    """An optimizer that gets another group when its schedule starts to count."""
    first, *others = list(parameters)
    optimizer = torch.optim.SGD([first], lr=0.1)

    def later(step: int) -> float:
        if step == 2:
            optimizer.add_param_group({"params": others})
        return 1.0

    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, later), "interval": "step"},
    }


@pytest.mark.parametrize(
    ("make", "given", "kind", "said"),
    [
        (Manual, {}, NotImplementedError, "Manual asks for manual optimization"),
        (partial(Transformer, torch.optim.LBFGS), {}, ValueError, "LBFGS cannot be stepped on with the same result"),
        (partial(Transformer, torch.optim.Adagrad), {}, ValueError, "Adagrad cannot be stepped on"),
        (partial(Transformer, adding_a_group), {}, RuntimeError, "has 2 parameter groups, but had 1"),
        (Transformer, {"precision": "64-true"}, ValueError, "DeepSpeed has no precision '64-true'"),
    ],
)
def test_what_zero_cannot_do_is_refused(make: Any, given: dict[str, Any], kind: type, said: str) -> None:
    with pytest.raises(RanksError) as info:
        ranks(1, lambda: fit(DeepSpeedStrategy(), make(), **given))
    error = info.value.errors[0]
    assert isinstance(error, kind)
    assert said in str(error)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_without_a_graph_is_explained_as_on_one_process(stage: int) -> None:
    class Detached(Transformer):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.loss(batch).detach()

    with pytest.raises(RuntimeError) as alone:
        fit("cpu", Detached())
    with pytest.raises(RanksError) as info:
        ranks(1, lambda: fit(strategy(stage), Detached()))
    assert str(info.value.errors[0]) == str(alone.value)


def test_deepspeed_joins_the_group_that_is_there_and_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    import torch.distributed as dist

    def run() -> int:
        before = []
        made = strategy(2)
        join = made.setup_environment

        def joined() -> None:
            join()
            before.append(dist.distributed_c10d._get_default_group())

        made.setup_environment = joined
        fit(made, Transformer())
        assert dist.distributed_c10d._get_default_group() is before[0]
        return made.world_size

    assert ranks(2, run) == [2, 2]
    said = capfd.readouterr()
    assert "DeepSpeed" not in said.out + said.err
    assert "deepspeed" not in said.out + said.err
