"""Pipelines in real processes: the numbers of one process, from modules that know nothing of stages."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # so that forked processes have it
from parity.networks import ConvNet, loader
from rank_processes import RanksError, ranks
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from paceline.loggers import CSVLogger
from paceline.strategies import ModelParallelStrategy
from paceline.utilities import grad_norm

WORDS, WIDTH = 11, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(size, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, -1))
        return x + self.mlp(self.norm2(x))


class Language(TrainingModule):
    """A forward as people write it: a mask, a position parameter, a loop over blocks, a head that may be tied."""

    def __init__(
        self, tied: bool = True, blocks: int = 4, dropout: float = 0.0, items: bool = False, adam: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.adam = items, adam
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=words.device).tril()
        x = self.embedding(words) + self.positions[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def loss(self, batch: dict[str, Any]) -> Tensor:
        words = batch["words"]
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "num_items": (batch["words"][:, 1:] != 0).sum()} if self.items else loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("samples", float(len(batch["words"])), reduce_fx="sum")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self(batch["words"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Pair(Language):
    """One optimizer for matrices, another for the rest, which automatic optimization steps together."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2, eps=1e-3)


def data(size: int = 8, batches: int = 10, lowest: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(lowest, WORDS, (batches, size, 7), generator=generator)
    return [{"words": part, "names": ["a"] * size} for part in words]


def pipeline(size: int = 2, **options: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy(pipeline_parallel=size, **{"microbatches": 4, **options})


def trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options},
    )


def fit(module: TrainingModule, batches: Any, strategy: Any = "auto", devices: int = 1, **options: Any) -> Any:
    """Weights, logged values and the losses that callbacks see."""
    seen = Losses()
    run = trainer(strategy, devices, callbacks=[seen], **options)
    run.fit(module, batches)
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return run.strategy.model_state(module), metrics, seen.losses


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def error(state: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest distance of a tensor from the float64 one, as a fraction of its norm."""
    assert state.keys() == exact.keys()
    return max(((state[k].double() - exact[k].double()).norm() / exact[k].double().norm()).item() for k in exact)


# ---- the numbers of one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_schedule_gives_the_numbers_of_one_process(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    exact, metrics, losses = fit(Language(), data(), precision="64-true", **options)

    def run() -> Any:
        names = ("gpipe", "1f1b", "interleaved_1f1b")
        return [fit(Language(), data(), pipeline(pipeline_schedule=name), 2, **options) for name in names]

    first, second = ranks(2, run)
    for (state, logged, seen), (_, logged_too, seen_too) in zip(first, second, strict=True):
        assert error(state, exact) < 1e-6
        assert logged == logged_too
        assert seen == seen_too
        assert seen == pytest.approx(losses, rel=1e-5)
        assert logged == pytest.approx(metrics, rel=1e-5)


def test_four_stages_and_two_copies_of_two_give_the_numbers_of_one_process() -> None:
    exact, _, _ = fit(Language(tied=False), data(), precision="64-true", accumulate_grad_batches=3)
    exact_tied, _, _ = fit(Language(), data(), precision="64-true")

    def run() -> Any:
        four = fit(Language(), data(), pipeline(4), 4)
        return four, copies(), torch.distributed.get_pg_count()

    def copies() -> Any:
        strategy = pipeline()
        share = [{"words": batch["words"][rank_of(strategy) :: 2]} for batch in data()]
        options = {"accumulate_grad_batches": 3, "use_distributed_sampler": False}
        return fit(Language(tied=False), share, strategy, 4, **options)

    def rank_of(strategy: ModelParallelStrategy) -> int:
        strategy.place([torch.device("cpu")] * 4)
        return strategy.data_rank

    found = ranks(4, run)
    four, two_copies, _ = found[0]
    assert len({groups for *_, groups in found}) == 1  # else the next group hangs
    assert error(four[0], exact_tied) < 1e-6
    assert error(two_copies[0], exact) < 1e-6


@pytest.mark.parametrize("kind", [Language, Pair])
def test_gradients_are_clipped_by_the_norm_over_all_stages(kind: type[Language]) -> None:
    exact, _, _ = fit(kind(), data(), precision="64-true", gradient_clip_val=0.5)
    untouched, _, _ = fit(kind(), data(), precision="64-true")
    assert error(untouched, exact) > 1e-2
    (state, _, _), _ = ranks(2, lambda: fit(kind(), data(), pipeline(), 2, gradient_clip_val=0.5))
    assert error(state, exact) < 1e-6


class Measured(Language):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_logged_norms_of_gradients_are_those_of_all_stages(tied: bool) -> None:
    _, expected, _ = fit(Measured(tied), data(), precision="64-true")
    assert "grad_2.0_norm_total" in expected
    for _, found, _ in ranks(2, lambda: fit(Measured(tied), data(), pipeline(), 2, precision="64-true")):
        assert found == pytest.approx(expected, rel=1e-4)
        assert found["loss_step"] == pytest.approx(expected["loss_step"], rel=1e-12)  # sent in float64


@pytest.mark.parametrize("average", [EMAWeightAveraging, lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1)])
def test_weights_of_other_stages_cannot_be_averaged(average: Any) -> None:
    def run() -> None:
        trainer(pipeline(), 2, callbacks=[average()], max_epochs=2).fit(Language(), data())

    with pytest.raises(RanksError) as raised:
        ranks(2, run)
    for error in raised.value.errors:
        assert "Language's weights cannot be averaged in a pipeline" in str(error)


def test_losses_are_weighed_by_items_over_micro_batches_and_windows() -> None:
    batches = data(lowest=-3)
    batches = [{"words": batch["words"].clamp(min=0)} for batch in batches]
    options = {"accumulate_grad_batches": 3}
    exact, metrics, _ = fit(Language(items=True), batches, precision="64-true", **options)
    (state, logged, _), _ = ranks(2, lambda: fit(Language(items=True), batches, pipeline(), 2, **options))
    assert error(state, exact) < 1e-6
    assert logged == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("size", [7, 3])
def test_samples_that_cannot_be_shared_out_evenly_count_as_in_one_process(size: int) -> None:
    exact, metrics, _ = fit(Language(), data(size), precision="64-true")

    def run() -> Any:
        return [fit(Language(), data(size), pipeline(pipeline_schedule=n), 2) for n in ("1f1b", "interleaved_1f1b")]

    for state, logged, _ in ranks(2, run)[0]:
        assert error(state, exact) < 1e-6
        assert logged == pytest.approx(metrics, rel=1e-5)


def test_batches_of_changing_length_and_size_are_learned_as_they_come() -> None:
    batches = [{"words": batch["words"][: 8 - i % 3, : 4 + i % 4]} for i, batch in enumerate(data())]
    exact, _, _ = fit(Language(), batches, precision="64-true")
    (state, _, _), _ = ranks(2, lambda: fit(Language(), batches, pipeline(), 2))
    assert error(state, exact) < 1e-6


def test_bf16_is_off_by_what_it_is_off_in_one_process() -> None:
    exact, _, _ = fit(Language(), data(), precision="64-true")
    alone, _, _ = fit(Language(), data(), precision="bf16-mixed")
    (state, _, _), _ = ranks(2, lambda: fit(Language(), data(), pipeline(), 2, precision="bf16-mixed"))
    assert error(state, exact) < 3 * error(alone, exact)


@pytest.mark.parametrize("kind", [Language, Pair])
def test_an_overflow_on_one_stage_skips_the_step_on_all(kind: type[Language]) -> None:
    class Overflows(kind):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            weight = self.blocks[-1].out.weight  # on the last stage only
            return super().training_step(batch, batch_idx) + (0.0 if batch_idx != 2 else math.inf) * weight.sum()

    def run() -> Any:
        run = trainer(pipeline(), 2, precision="16-mixed")
        run.fit(Overflows(), data())
        scaler = run.strategy.precision.scaler
        return run.global_step, run.strategy.precision.skipped_steps, scaler.get_scale()

    first, second = ranks(2, run)
    assert first == second
    assert first[0] == 9
    assert first[1] == 1


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_gives_the_values_of_one_process_on_every_stage() -> None:
    def run(strategy: Any, devices: int) -> Any:
        module, batches = Language(), data(6, 3)
        one = trainer(strategy, devices, num_sanity_val_steps=1)
        one.fit(module, data(), batches)
        values = one.validate(module, batches, verbose=False)[0]
        return values, {k: v.item() for k, v in one.callback_metrics.items()}, one.predict(module, batches)

    values, metrics, predictions = run("auto", 1)
    assert values["samples"] == 18.0
    for found in ranks(2, lambda: run(pipeline(pipeline_schedule="interleaved_1f1b"), 2)):
        assert found[0] == pytest.approx(values, rel=1e-5)
        assert found[1] == pytest.approx(metrics, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(found[2], predictions, strict=True))


def test_loggers_of_the_first_process_get_what_the_last_stage_logs(tmp_path: Path) -> None:
    def run(strategy: Any, devices: int, name: str) -> list[float]:
        logger = CSVLogger(tmp_path, name=name)
        trainer(strategy, devices, logger=logger, log_every_n_steps=1).fit(Language(), data())
        if devices > 1 and torch.distributed.get_rank():
            return []
        rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        return [float(row["loss_step"]) for row in rows if row["loss_step"]]

    alone = run("auto", 1, "one")
    assert len(alone) == 10
    assert ranks(2, lambda: run(pipeline(), 2, "two"))[0] == pytest.approx(alone, rel=1e-5)


def test_values_are_there_for_whoever_monitors_them(tmp_path: Path) -> None:
    def run() -> Any:
        keeper = ModelCheckpoint(tmp_path, monitor="val_loss", filename="{epoch}-{val_loss:.3f}")
        one = trainer(pipeline(), 2, callbacks=[keeper], enable_checkpointing=True, max_epochs=2)
        one.fit(Language(), data(), data(6, 3))
        return keeper.best_model_path, float(keeper.best_model_score)

    first, second = ranks(2, run)
    assert first == second
    assert torch.load(first[0], weights_only=True)["epoch"] in (0, 1)


def test_a_metric_object_counts_the_samples_that_the_last_stage_saw() -> None:
    classification = pytest.importorskip("torchmetrics.classification")

    class Accurate(Language):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = classification.MulticlassAccuracy(WORDS, average="micro")

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            words = batch["words"]
            self.accuracy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            self.log("accuracy", self.accuracy)

    def run(strategy: Any, devices: int) -> Any:
        one = trainer(strategy, devices)
        return one.validate(Accurate(), data(), verbose=False)[0]["accuracy"]

    alone = run("auto", 1)
    assert 0 < alone < 1
    assert ranks(2, lambda: run(pipeline(), 2)) == pytest.approx([alone] * 2)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_resumed_pipeline_goes_on_to_the_bit_and_its_file_fits_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")

    def train(
        strategy: Any, devices: int, dropout: float, epochs: int, resume: str | None = None, save: str = ""
    ) -> Any:
        torch.manual_seed(3)
        module = Language(dropout=dropout, adam=True)
        one = trainer(strategy, devices, max_epochs=epochs, accumulate_grad_batches=3)
        one.fit(module, data(), ckpt_path=resume)
        assert not any(parameter.is_meta for parameter in one.optimizers[0].state)
        if save:
            one.save_checkpoint(save)
        return one.strategy.model_state(module)

    def run(dropout: float) -> Any:
        file = f"{path}{dropout}"
        whole = train(pipeline(), 2, dropout, 2)
        train(pipeline(), 2, dropout, 1, save=file)
        return whole, train(pipeline(), 2, dropout, 2, resume=file)

    found = ranks(2, lambda: {dropout: run(dropout) for dropout in (0.0, 0.2)})[0]
    for whole, resumed in found.values():
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    whole, _ = found[0.0]
    assert error(train("auto", 1, 0.0, 2, resume=f"{path}0.0"), whole) < 1e-6
    saved = torch.load(f"{path}0.0", weights_only=True)
    assert len(saved["optimizer_states"][0]["state"]) == len(list(Language().parameters()))

    alone = train("auto", 1, 0.0, 2)
    train("auto", 1, 0.0, 1, save=path)
    assert error(ranks(2, lambda: train(pipeline(), 2, 0.0, 2, resume=path))[0], alone) < 1e-6


def test_running_statistics_are_saved_from_the_stage_that_has_them() -> None:
    class Normed(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before = nn.BatchNorm1d(4)
            self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.after = nn.BatchNorm1d(4)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.after(self.net(self.before(batch))) * batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    batches = list(torch.randn(5, 8, 4))
    alone, _, _ = fit(Normed(), batches)
    (state, _, _), _ = ranks(2, lambda: fit(Normed(), batches, pipeline(microbatches=1), 2))
    assert all(torch.allclose(state[name], alone[name], atol=1e-6) for name in alone)


# ---- what lies where -------------------------------------------------------------------------------------------------


def test_each_process_holds_its_stage_and_what_it_uses_besides() -> None:
    def run(tied: bool) -> Any:
        module = Language(tied=tied, adam=True)
        one = trainer(pipeline(), 2)
        one.fit(module, data())
        (optimizer,) = one.optimizers
        held = {name for name, p in module.named_parameters() if not p.is_meta}
        return held, {name for name, p in module.named_parameters() if optimizer.state.get(p)}, module.device

    for tied in (False, True):
        (first, state, device), (second, state_too, device_too) = ranks(2, run, tied)
        assert first == state
        assert second == state_too
        assert device == device_too == torch.device("cpu")
        assert first | second == {name for name, _ in Language(tied=tied).named_parameters()}
        assert first & second == ({"embedding.weight"} if tied else set())
        assert {"positions", "blocks.1.out.bias"} <= first
        assert {"norm.weight", "blocks.2.out.bias"} <= second


def test_random_numbers_drawn_before_the_network_are_the_same_on_all_stages() -> None:
    class Denoiser(TrainingModule):
        """Blocks that change nothing: the loss is 0 if the noise that went in is the noise that is compared with."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            for layer in self.net:
                nn.init.eye_(layer.weight)  # type: ignore[reportArgumentType]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            noise = torch.randn_like(batch)
            self.log("low", noise.mean(), reduce_fx="min", on_epoch=True)
            self.log("high", noise.mean(), reduce_fx="max", on_epoch=True)
            return (self.net(batch + noise) - batch - noise).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def run() -> Any:
        return fit(Denoiser(), list(torch.zeros(3, 8, 4)), pipeline(), 2)[1:]

    (metrics, losses), _ = ranks(2, run)
    assert max(losses) < 1e-12
    assert metrics["low_epoch"] < metrics["high_epoch"]


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_models_of_transformers_are_cut_as_they_are(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    configs = {
        "GPT2": {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "Llama": {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    }
    names = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}

    class Wrapped(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = getattr(transformers, names[kind])(
                getattr(transformers, f"{kind}Config")(**small, **configs[kind])
            )

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    words = torch.randint(32, (4, 8, 6), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(words[0])
    attended[::2, 4:] = 0
    batches = [{"input_ids": ids, "attention_mask": attended, "labels": ids} for ids in words]
    exact, _, _ = fit(Wrapped(), batches, precision="64-true")
    (state, _, _), _ = ranks(2, lambda: fit(Wrapped(), batches, pipeline(), 2))
    assert error(state, exact) < 2e-6


def test_frozen_stages_stay_as_they_are() -> None:
    class Frozen(Language):
        def __init__(self) -> None:
            super().__init__(tied=False)
            for part in (self.embedding, self.blocks[0], self.blocks[1]):
                part.requires_grad_(False)
            self.positions.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    exact, _, _ = fit(Frozen(), data(), precision="64-true")
    (state, _, _), _ = ranks(2, lambda: fit(Frozen(), data(), pipeline(), 2))
    assert error(state, exact) < 1e-6


def test_blocks_may_be_compiled() -> None:
    class Compiled(Language):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.compile(backend="eager")

    exact, _, _ = fit(Language(), data(), precision="64-true")
    (state, _, _), _ = ranks(2, lambda: fit(Compiled(), data(), pipeline(), 2))
    assert error(state, exact) < 1e-6


# ---- errors ----------------------------------------------------------------------------------------------------------


class Skips(Language):
    def forward(self, words: Tensor) -> Tensor:
        x = start = self.embedding(words)
        for block in self.blocks:
            x = block(x, torch.ones(1, 1, dtype=torch.bool))
        return self.head(self.norm(x + start))


class Shortcut(Language):
    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks[:2]:
            x = block(x, torch.ones(1, 1, dtype=torch.bool))
        return self.head(x)


class NoLoss(Language):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Manual(Language):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Newton(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class CompiledWhole(Language):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class Fails(Language):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise KeyError("of the user's")


@pytest.mark.parametrize(
    ("module", "kind", "says"),
    [
        (Skips, RuntimeError, "needs the value of a tensor that an earlier stage computes"),
        (Shortcut, RuntimeError, "finished without calling blocks.2"),
        (NoLoss, TypeError, "returned None for a micro-batch"),
        (Manual, ValueError, "manual optimization"),
        (Newton, ValueError, "LBFGS needs all weights"),
        (CompiledWhole, ValueError, "is compiled as a whole"),
        (Fails, KeyError, "of the user's"),
    ],
)
def test_what_a_pipeline_cannot_run_is_said(module: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(RanksError) as failed:
        ranks(2, lambda: fit(module(), data(), pipeline(), 2))
    found = [error for error in failed.value.errors if isinstance(error, kind)]
    assert any(re.search(says, str(error)) for error in found), failed.value.errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pipeline_schedule": "1f2b"}, "Unknown pipeline schedule '1f2b'. Did you mean '1f1b'?"),
        ({"virtual_stages": 2}, "one stage per process"),
        ({"virtual_stages": 1, "pipeline_schedule": "interleaved_1f1b"}, "is the same as '1f1b'"),
        ({"microbatches": 0}, "microbatches=0 is not a positive integer"),
        ({"data_parallel_shard": 2}, "cannot be sharded"),
        ({"context_parallel": 2, "context_parallel_dims": 1}, "context_parallel=2"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        pipeline(**options)


def test_pipeline_arguments_without_a_pipeline_are_refused() -> None:
    with pytest.raises(ValueError, match=r"microbatches=4.* has no effect without a pipeline"):
        ModelParallelStrategy(microbatches=4)


def save_with_buffers(folder: Path) -> list[str]:
    strategy = ModelParallelStrategy(data_parallel_shard=1, pipeline_parallel=2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(**quiet, accelerator="cpu", devices=2, strategy=strategy, max_steps=2)
    trainer.fit(ConvNet(), loader(ConvNet))
    trainer.save_checkpoint(folder / "x.ckpt")
    return sorted(torch.load(folder / "x.ckpt")["state_dict"])


def test_buffers_of_other_stages_are_no_trouble_for_a_checkpoint(tmp_path: Path) -> None:
    assert ranks(2, save_with_buffers, tmp_path)[0] == sorted(ConvNet().state_dict())
