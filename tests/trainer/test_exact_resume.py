"""A fit resumed from any of its checkpoints does, to the bit, what the uninterrupted one did."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LossGuard,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from paceline.callbacks.checkpoint_retention import Checkpoint
from paceline.loggers import Logger
from paceline.processes.seed import seed_all
from paceline.strategies import DDPStrategy, SingleDevice

SIZE = 22


def noisy(x: Tensor) -> Tensor:
    return x + 0.1 * (random.random() + float(np.random.rand()) + torch.rand(()).item())


class Noisy(Dataset[Any]):
    """Samples that are changed at random, by every generator, each time they are asked for."""

    def __init__(self, size: int = SIZE) -> None:
        self.x = torch.linspace(-1, 1, size * 3).view(size, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), noisy(self.x[index])


class Together(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return ((torch.tensor(i), noisy(torch.full((3,), i / SIZE))) for i in range(start, SIZE, step))


class SizedStream(Stream):
    def __len__(self) -> int:
        return SIZE


class Placed(IterableDataset[Any]):
    """A stream that shuffles in a buffer, by a generator that is part of its state."""

    def __init__(self) -> None:
        self.generator, self.at, self.buffer = torch.Generator().manual_seed(5), 0, []

    def __iter__(self) -> Iterator[Any]:
        while self.at < SIZE or self.buffer:
            while len(self.buffer) < 5 and self.at < SIZE:
                self.buffer.append(self.at)
                self.at += 1
            index = int(torch.randint(len(self.buffer), (), generator=self.generator))
            yield torch.tensor(i := self.buffer.pop(index)), noisy(torch.full((3,), i / SIZE))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": list(self.buffer), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], list(state["buffer"])
        self.generator.set_state(state["generator"])


class Drawing(Sampler[int]):
    """A sampler that draws from the global generators when it is asked for an iterator."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        return iter(order)


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    data = Noisy() if data is None else data
    return DataLoader(data, batch_size=3, **{"shuffle": not isinstance(data, IterableDataset), **options})


class Drift(nn.Module):
    """Takes off a running mean, which each process sees on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().float().mean(0) * 0.1
        return x - self.mean


class Net(TrainingModule):
    """Draws random numbers in every step, logs, and keeps what it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), Drift(), nn.Dropout(0.5), nn.Linear(6, 1))
        self.seen: list[tuple[int, int, Any, float]] = []
        self.epochs: list[dict[str, float]] = []

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch] if isinstance(batch[0], Tensor) else batch
        loss = sum((self.layers(x.float().view(-1, 3)) - random.random()).pow(2).mean() for _, x in parts)
        digest = [(index.tolist(), x.double().sum().item()) for index, x in parts]
        self.seen.append((self.current_epoch, batch_idx, digest, loss.item()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx=min)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch[1]).mean() + random.random())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": steps, "interval": "step"}, torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ByItems(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch, batch_idx), "num_items": batch_idx % 3 + 1}


class Joint(Net):
    """Muon for a matrix, AdamW for the rest, each with a schedule."""

    def configure_optimizers(self) -> Any:
        matrix, *others = self.parameters()
        matrices, rest = torch.optim.Muon([matrix], lr=0.05), torch.optim.AdamW(others, lr=0.05)
        steps = torch.optim.lr_scheduler.ExponentialLR(rest, 0.97)
        return [matrices, rest], [
            torch.optim.lr_scheduler.StepLR(matrices, 1),
            {"scheduler": steps, "interval": "step"},
        ]


class Constant(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class ByHand(Net):
    """Accumulates two batches for one optimizer, steps the other after each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        two.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        two.step()
        if batch_idx % 2:
            one.step()
            one.zero_grad()

    def configure_optimizers(self) -> Any:
        halves = list(self.layers[0].parameters()), list(self.layers[1:].parameters())
        return [torch.optim.SGD(half, lr=0.05, momentum=0.9) for half in halves]


class Measured(Net):
    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        self.mean(loss)
        self.all.update(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.all.reset()

    def on_train_epoch_end(self) -> None:
        self.epochs.append({"all": self.all.compute().sum().item()})


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": "step", "strict": False},
        }


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return self.loss(batch, batch_idx)


class Rows(Callback):
    """Keeps the values of every epoch."""

    monitors_metrics = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.epochs.append({k: v.item() for k, v in trainer.callback_metrics.items()})


class Memory(Logger):
    """Keeps the rows it is sent."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


class Saves(Callback):
    """Saves at the end of every batch, and at other moments; the names say where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, int] = {}

    def save(self, trainer: Any, where: str) -> None:
        state = trainer.state
        name = f"{state.epoch}-{max(state.batch_idx, 0)}-{where}"
        trainer.save_checkpoint(self.folder / name)
        self.saved[name] = len(trainer.logger.rows)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, "batch")

    def on_validation_batch_end(self, trainer: Any, *rest: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "during")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "validated")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, "epoch")


def fit(folder: Path, case: Case, ckpt_path: Path | None = None, seed: int = 0, saves: bool = False) -> dict[str, Any]:
    """Train two epochs; returns everything that could differ from another run."""
    seed_all(seed)
    module = case.module()
    keeper = Saves(folder)
    trainer = Trainer(
        **{
            "logger": Memory(),
            "log_every_n_steps": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "accelerator": "cpu",
            "max_epochs": 2,
            **case.arguments,
        }
    )
    trainer.callbacks += [Rows(), *([keeper] if saves else [])]
    val = loader(Noisy(4), shuffle=False) if case.validates else None
    trainer.fit(module, case.data(), val, ckpt_path=ckpt_path)
    return {
        "seen": module.seen,
        "epochs": module.epochs,
        "state": {key: value.clone() for key, value in trainer.strategy.model_state(module).items()},
        "optimizers": [trainer.strategy.optimizer_state(trainer.model, one) for one in trainer.optimizers],
        "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "counters": trainer.state.state_dict(),
        "random": (random.random(), float(np.random.rand()), torch.rand(3)),
        "rows": trainer.logger.rows,
        "saved": keeper.saved,
    }


class Case:
    def __init__(
        self,
        data: Callable[[], Any] = loader,
        module: Callable[[], Net] = Net,
        validates: bool = False,
        at: int = 1,
        **arguments: Any,
    ) -> None:
        self.data, self.module, self.validates, self.at, self.arguments = data, module, validates, at, arguments


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert equality to the bit, naming the first place that differs."""
    if isinstance(a, Tensor):
        assert (a.is_meta and b.is_meta) or torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{index}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} {b}"


def same_end(whole: dict[str, Any], resumed: dict[str, Any], name: str) -> None:
    for key in whole:
        if key in ("seen", "epochs"):
            done = len(whole[key]) - len(resumed[key])
            same(whole[key][done:], resumed[key], f"{name}: {key}")
        elif key == "rows":
            same(whole["rows"][whole["saved"][name] :], resumed["rows"], f"{name}: rows")
        elif key != "saved":
            same(whole[key], resumed[key], f"{name}: {key}")
    epoch, batch, where = name.split("-")
    first = (int(epoch) + 1, 0) if where == "epoch" else (int(epoch), int(batch) + 1)
    began = [entry[:2] for entry in whole["seen"] if entry[:2] >= first]
    assert [entry[:2] for entry in resumed["seen"]] == began, name


CASES: dict[str, Case] = {
    "map": Case(at=2),
    "in order": Case(lambda: loader(shuffle=False)),
    "workers": Case(lambda: loader(num_workers=2), at=5),
    "persistent workers": Case(lambda: loader(num_workers=2, persistent_workers=True), at=9),
    "all at once": Case(lambda: loader(Together(), num_workers=1), at=5),
    "single samples": Case(lambda: DataLoader(Noisy(6), batch_size=None, shuffle=True, num_workers=1), at=9),
    "stream": Case(lambda: loader(SizedStream()), at=3),
    "stream, workers": Case(lambda: loader(SizedStream(), num_workers=2), at=5),
    "stream without length": Case(lambda: loader(Stream()), at=3),
    "stream with a place": Case(lambda: loader(Placed())),
    "iterator": Case(module=Iterates, at=3),
    "own generator": Case(lambda: loader(generator=torch.Generator().manual_seed(3))),
    "own generator, limited": Case(lambda: loader(generator=torch.Generator().manual_seed(3)), limit_train_batches=4),
    "own generator, persistent workers": Case(
        lambda: loader(generator=torch.Generator().manual_seed(3), num_workers=1, persistent_workers=True), at=5
    ),
    "drawing sampler": Case(lambda: loader(shuffle=None, sampler=Drawing()), at=3),
    "drawing sampler, workers": Case(lambda: loader(shuffle=None, sampler=Drawing(), num_workers=1), at=5),
    "combined": Case(lambda: {"a": loader(), "b": loader(Noisy(8))}, at=2),
    "combined, starting over": Case(lambda: [loader(), loader(Noisy(8)), loader(Noisy(13))]),
    "combined, own generators": Case(
        lambda: [loader(data, generator=torch.Generator().manual_seed(3)) for data in (Noisy(), Noisy(8), Noisy(9))]
    ),
    "combined, workers": Case(lambda: {"a": loader(num_workers=1), "b": loader(Noisy(8), num_workers=1)}, at=5),
    "accumulation": Case(accumulate_grad_batches=3),
    "accumulation by epoch": Case(callbacks=[GradientAccumulationScheduler({0: 2, 1: 3})], at=2),
    "accumulation by items": Case(module=ByItems, accumulate_grad_batches=3),
    "two optimizers": Case(module=Joint, precision="16-mixed", accumulate_grad_batches=2, gradient_clip_val=0.5),
    "by hand": Case(module=ByHand),
    "validation inside": Case(validates=True, val_check_interval=3),
    "plateau of steps": Case(module=Plateau, validates=True, val_check_interval=2, at=3),
    "torchmetrics": Case(module=Measured),
    "compiled": Case(compile={"backend": "eager"}, at=6),
    "bf16": Case(precision="bf16-mixed", at=3),
    "fp16, accumulation": Case(precision="16-mixed", accumulate_grad_batches=2, at=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_fit_resumed_from_any_checkpoint_is_bit_identical(case: Case, tmp_path: Path) -> None:
    whole = fit(tmp_path, case, saves=True)
    assert len(whole["saved"]) > 5
    for name in list(whole["saved"])[1 :: case.at]:
        same_end(whole, fit(tmp_path, case, tmp_path / name, seed=7), name)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_is_entered_where_it_was(workers: int, tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    case = Case(lambda: torchdata.StatefulDataLoader(SizedStream(), batch_size=3, num_workers=workers))
    whole = fit(tmp_path, case, saves=True)
    for name in list(whole["saved"])[1::5]:
        same_end(whole, fit(tmp_path, case, tmp_path / name, seed=7), name)


SPREAD: dict[str, Case] = {
    "ddp": Case(strategy="ddp", devices=2),
    "ddp, accumulation": Case(strategy="ddp", devices=2, accumulate_grad_batches=3, module=ByItems),
    "ddp, two optimizers": Case(module=Joint, strategy="ddp", devices=2, accumulate_grad_batches=3, at=2),
    "ddp, workers": Case(lambda: loader(num_workers=1), strategy="ddp", devices=2, at=2),
    "ddp, torchmetrics": Case(module=Measured, strategy="ddp", devices=2, at=2),
    "fsdp, two optimizers": Case(module=Joint, strategy="fsdp", devices=2, at=4),
    "fsdp, accumulation": Case(strategy="fsdp", devices=2, accumulate_grad_batches=3),
    "fsdp, averaged": Case(
        module=Constant,
        callbacks=[StochasticWeightAveraging(0.1, swa_epoch_start=1, annealing_epochs=2)],
        max_epochs=3,
        strategy="fsdp",
        devices=2,
        at=3,
    ),
    "fsdp, averaged, validation": Case(
        module=Constant,
        validates=True,
        val_check_interval=3,
        callbacks=[EMAWeightAveraging(decay=0.5)],
        strategy="fsdp",
        devices=2,
        at=2,
    ),
    "ddp, own averages": Case(
        module=Constant,
        validates=True,
        val_check_interval=3,
        callbacks=[EMAWeightAveraging(decay=0.5)],
        strategy=DDPStrategy(broadcast_buffers=False),
        devices=2,
        at=2,
    ),
}


def everywhere(case: Case, folder: Path) -> None:
    whole = fit(folder, case, saves=True)
    assert len(whole["saved"]) > 5
    for name in list(whole["saved"])[1 :: case.at]:
        same_end(whole, fit(folder, case, folder / name, seed=7), name)


@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD)
def test_a_fit_on_two_ranks_resumed_from_any_checkpoint_is_bit_identical(case: Case, tmp_path: Path) -> None:
    ranks(2, everywhere, case, tmp_path)


# ---- another number of ranks -----------------------------------------------------------------------------------------


class Whole(Callback):
    """Saves after the first batches of an epoch, inside the second window."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def cut(
    path: Path, batch: int, devices: int, resume: bool = False, accumulate: int = 1, make: Callable[[], Net] = Net
) -> Any:
    """One epoch of 24 samples in batches of 2 a rank; saved after a batch, or gone on with from there."""
    seed_all(devices)
    module = make()
    trainer = Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        strategy="ddp" if devices > 1 else "auto",
        devices=devices,
        callbacks=[] if resume else [Whole(path, batch)],
    )
    trainer.fit(module, DataLoader(Noisy(24), 2, shuffle=True), ckpt_path=path if resume else None)
    samples = [index for *_, digest, _ in module.seen for indices, _ in digest for index in indices]
    return samples, {key: value.item() for key, value in trainer.callback_metrics.items()}, module.seen


def test_on_another_number_of_ranks_the_epoch_goes_on_at_the_same_sample_and_one_message_says_what_was_derived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")
    two = ranks(2, cut, tmp_path / "two", 2, 2)
    rest, metrics, seen = cut(tmp_path / "two", 0, 1, resume=True)
    done = [*two[0][0][:6], *two[1][0][:6]]
    assert sorted([*done, *rest]) == list(range(24))
    losses = [entry[3] for found in two for entry in found[2][:3]] + [entry[3] for entry in seen]
    assert metrics["loss_epoch"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert metrics["least"] == min(losses)
    (said,) = [record.message for record in caplog.records if "derived instead of restored" in record.message]
    assert "written by 2 ranks, but this run has 1 rank" in said
    assert "batch 6 of the epoch (batch 3 in the saved run)" in said
    assert "running metrics" in said
    assert "RNG states" not in said


class Counts(TinyModule):
    """Logs the mean and, as a torchmetrics object, the sum of the samples that it trains on."""

    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.sum = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.log("mean", x.mean(), on_epoch=True)
        self.sum(x)
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        return (self.layer.weight.sum() + self.layer.bias.sum()) * 0


class WithoutWindow(SingleDevice):
    """Cannot save the gradients of a window, like DeepSpeed."""

    def window_gradients(self, module: nn.Module) -> None:
        return None


def count(path: Path, saves_after: int | None, devices: int = 1, strategy: Any = "auto") -> dict[str, float]:
    """One epoch over 0..47 in batches of 2 for each rank and windows of 4; resumed from a file if there is one."""
    trainer = make(devices=devices, strategy="ddp" if devices > 1 else strategy, accumulate_grad_batches=4)
    trainer.callbacks += [] if saves_after is None else [Whole(path, saves_after)]
    data = TensorDataset(torch.arange(48.0))
    trainer.fit(Counts(), DataLoader(data, 2), ckpt_path=path if path.exists() else None)
    return {name: trainer.callback_metrics[name].item() for name in ("mean_epoch", "sum")}


@pytest.mark.parametrize("then", [1, 2])
def test_on_another_number_of_ranks_a_repeated_window_counts_once(then: int, tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    count(tmp_path / "saved", 5) if then == 1 else ranks(2, count, tmp_path / "saved", 5, 2)
    found = count(tmp_path / "saved", None) if then == 2 else ranks(2, count, tmp_path / "saved", None, 2)[0]
    assert found == {"mean_epoch": 23.5, "sum": 1128}


@pytest.mark.parametrize("again", [None, 4, 5, 6])
def test_a_window_that_a_resume_repeats_counts_once(again: int | None, tmp_path: Path) -> None:
    """Also if the resumed run is saved and resumed again: inside the repeated batches, at their end, after it."""
    pytest.importorskip("torchmetrics")
    count(tmp_path / "saved", 5, strategy=WithoutWindow())
    if again is not None:
        count(tmp_path / "saved", again, strategy=WithoutWindow())
    assert count(tmp_path / "saved", None, strategy=WithoutWindow()) == {"mean_epoch": 23.5, "sum": 1128}


class Evaluates(Counts):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch[0].mean(), on_step=True)


def test_step_values_of_a_validation_inside_a_repeated_window_keep_reaching_the_loggers(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    memory, data = Memory(), TensorDataset(torch.arange(48.0))
    for more in ({"callbacks": [Whole(tmp_path / "saved", 6)]}, {"logger": memory}):
        trainer = make(strategy=WithoutWindow(), accumulate_grad_batches=4, val_check_interval=2, **more)
        path = tmp_path / "saved" if "logger" in more else None
        trainer.fit(Evaluates(), DataLoader(data, 2), DataLoader(data, 24), ckpt_path=path)
    assert sum("value_step" in key for _, row in memory.rows for key in row) == 20  # ten validations of two batches


class Sorted(Net):
    """Logs a torchmetrics object with states of two dtypes in lists."""

    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.auroc = torchmetrics.AUROC("binary")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        self.auroc(torch.tensor([0.2, 0.8]) + batch_idx / 50, torch.tensor([batch_idx % 3 > 0, 1]).int())
        self.log("auroc", self.auroc, on_step=True, on_epoch=True)
        return loss


def test_ranks_without_a_batch_of_the_resumed_epoch_have_its_values_too(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    _, expected, _ = cut(tmp_path / "one", 11, 1, make=Sorted)
    for samples, found, _ in ranks(2, cut, tmp_path / "one", 11, 2, True, 1, Sorted):
        assert samples == []
        assert found == pytest.approx(expected)


class ByHandAlone(TinyModule):
    """Steps after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def by_hand(path: Path, devices: int, resume: bool = False) -> Tensor:
    seed_all(3)
    module = ByHandAlone()
    trainer = make(devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=1)
    trainer.callbacks += [] if resume else [Whole(path, 2)]
    trainer.fit(module, tiny_loader(6 * devices, batch_size=4 // devices), ckpt_path=path if resume else None)
    return module.layer.weight.detach()


@pytest.mark.parametrize("then", [1, 2])
def test_on_another_number_of_ranks_a_manual_window_continues_with_its_gradients(then: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    expected = by_hand(path, 1) if then == 1 else ranks(2, by_hand, path, 2)[0]
    found = by_hand(path, 1, True) if then == 2 else ranks(2, by_hand, path, 2, True)[0]
    torch.testing.assert_close(found, expected)


def test_a_rank_that_was_not_there_derives_its_random_states_and_a_window_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut(tmp_path / "one", 4, 1, accumulate=4)
    first, second = (ranks(2, resumed_on_two, tmp_path / "one") for _ in range(2))
    assert first == second
    assert [len(found[0]) for found in first] == [8, 8]
    assert first[0][1] != first[1][1]
    assert "the accumulation window, which starts over (batches trained on again: 1)" in first[0][2]
    assert "the RNG states of rank 1 (seeded" in first[0][2]
    assert first[1][2] == ""


def resumed_on_two(path: Path) -> Any:
    import io
    import logging

    stream = io.StringIO()
    log = logging.getLogger("paceline")
    log.setLevel("INFO")
    log.addHandler(logging.StreamHandler(stream))
    samples, _, seen = cut(path, 0, 2, resume=True, accumulate=4)
    told = [line for line in stream.getvalue().splitlines() if "derived instead of restored" in line]
    return samples, seen[0][3], "".join(told)


def test_a_file_that_one_rank_wrote_alone_after_an_error_is_gone_on_from_by_all(tmp_path: Path) -> None:
    ranks(2, failing_on_two, tmp_path / "alone")
    kept = torch.load(tmp_path / "alone", weights_only=True)["paceline"]
    assert [entry["rank"] for entry in kept["ranks"]] == [0]
    found = ranks(2, resumed_on_two, tmp_path / "alone")
    assert [len(samples) for samples, *_ in found] == [8, 8]
    assert "The checkpoint does not contain everything" in found[0][2]
    assert "the RNG states of rank 1 (seeded" in found[0][2]


def failing_on_two(path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ValueError("mine")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(path)

    trainer = make(strategy="ddp", devices=2, callbacks=[Fails()])
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Net(), DataLoader(Noisy(24), 2, shuffle=True))


# ---- in part ---------------------------------------------------------------------------------------------------------


def make(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**{"enable_checkpointing": False, "max_epochs": 1, **quiet, **arguments})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    seed_all(0)
    make(callbacks=[Whole(tmp_path / "x.ckpt", 3)]).fit(Net(), loader())
    return tmp_path / "x.ckpt"


class Steeper(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


def test_without_schedulers_a_resume_takes_the_new_learning_rate_at_the_old_place(saved: Path) -> None:
    module, trainer = Steeper(), make(max_steps=5)
    trainer.fit(module, loader(), ckpt_path=saved, restore=("model", "optimizer", "loops", "rng", "callbacks"))
    assert [entry[1] for entry in module.seen] == [4]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert next(iter(trainer.optimizers[0].state.values()))["step"].item() == 5


def test_only_the_weights_start_the_fit_anew(saved: Path) -> None:
    weights = torch.load(saved, weights_only=True)["state_dict"]

    class Compares(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            same(weights, {key: value.clone() for key, value in pl_module.state_dict().items()})
            assert not trainer.optimizers[0].state
            assert (trainer.global_step, trainer.current_epoch) == (0, 0)

    module = Steeper()
    make(callbacks=[Compares()]).fit(module, loader(), ckpt_path=saved, restore=["model"])
    assert [entry[1] for entry in module.seen] == list(range(8))


def test_a_part_that_there_is_not_is_an_error(saved: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Unknown Trainer\.fit\(restore=\.\.\.\) part 'optimizers'\. Did you mean 'opt"
    ):
        make().fit(Net(), loader(), ckpt_path=saved, restore=("model", "optimizers"))


# ---- after a failure -------------------------------------------------------------------------------------------------


def test_gradients_that_a_failed_fit_left_are_not_the_next_ones() -> None:
    class Fails(Net):
        fails = True

        def on_after_backward(self) -> None:
            if self.fails and self.trainer.state.batch_idx == 4:
                raise ValueError("mine")

        def on_train_start(self) -> None:
            self.found = [p.grad for p in self.parameters() if p.grad is not None]

    module, trainer = Fails(), make(accumulate_grad_batches=3)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(module, loader())
    assert module.layers[0].weight.grad is not None
    module.fails = False
    trainer.fit(module, loader())
    assert module.found == []
    assert [entry[1] for entry in module.seen] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert trainer.global_step == 3


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize(("batch_size", "count"), [(4, 2), (2, 1), (3, 2)])
def test_a_run_with_another_batch_size_goes_on_at_the_same_sample(
    tmp_path: Path, quiet: dict[str, Any], batch_size: int, count: int, combined: bool
) -> None:
    def run(size: int, devices: int = 1, **more: Any) -> list[int]:
        seen: list[int] = []

        class Notes(TinyModule):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                batch = batch[0] if combined else batch
                seen.extend(batch[2].tolist())
                return super().training_step(batch[:2], batch_idx)

        class Saves(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 3 and not more:
                    trainer.save_checkpoint(tmp_path / "r.ckpt")

        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x[:, :1], torch.arange(24)), size, shuffle=True)
        strategy = "ddp" if devices > 1 else "auto"
        torch.manual_seed(5)
        Trainer(**quiet, max_epochs=1, callbacks=[Saves()], strategy=strategy, devices=devices).fit(
            Notes(), [loader, DataLoader(range(24), size)] if combined else loader, **more
        )
        return seen

    whole = run(4)
    if count == 1:
        assert run(batch_size, ckpt_path=tmp_path / "r.ckpt") == whole[12:]
    else:
        shares = ranks(2, lambda: run(batch_size, 2, ckpt_path=tmp_path / "r.ckpt"))
        assert sorted(index for share in shares for index in share) == sorted(
            whole[12 // (2 * batch_size) * 2 * batch_size :]
        )


@pytest.mark.parametrize("ends", ["max_steps", "early stopping", "max_epochs"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end", "monitors"])
def test_what_follows_the_last_save_is_done_when_the_run_is_started_again(
    tmp_path: Path, quiet: dict[str, Any], ends: str, hook: str
) -> None:
    class Killed(BaseException): ...

    def run(folder: Path, kill: bool = False, **more: Any) -> tuple[list[Any], list[str]]:
        rows: list[Any] = []
        called: list[str] = []

        class Rows(Logger):
            name = version = ""

            def log_metrics(self, metrics: Any, step: int | None = None) -> None:
                rows.append((step, dict(metrics)))

            def log_hyperparams(self, params: Any, metrics: Any = None) -> None: ...

        class Saves(Checkpoint):
            def save(self, trainer: Any, *_: Any) -> None:
                if kill and trainer.global_step == 4 and not trainer.sanity_checking:
                    trainer.save_checkpoint(folder / "r.ckpt")
                    raise Killed

            def on_train_end(self, *_: Any) -> None:
                called.append("on_train_end")

        saves = Saves()
        saves.monitors_metrics = hook == "monitors"
        setattr(saves, "on_train_epoch_end" if hook == "monitors" else hook, saves.save)
        stops = [EarlyStopping("val_loss", stopping_threshold=1e9, check_on_train_epoch_end=False)]
        limits: dict[str, Any] = {"max_steps": 4} if ends == "max_steps" else {"max_epochs": 1}
        trainer = Trainer(
            **{**quiet, "logger": Rows()},
            **limits,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            val_check_interval=4,
            callbacks=[*(stops if ends == "early stopping" else []), saves],
        )
        batches = 4 if ends == "max_epochs" else 6
        torch.manual_seed(0)
        with contextlib.suppress(Killed):
            trainer.fit(TinyModule(), tiny_loader(batches), tiny_loader(2), **more)
        return rows, called

    (whole, ended), (before, _) = run(tmp_path), run(tmp_path, kill=True)
    after, called = run(tmp_path, ckpt_path=tmp_path / "r.ckpt")
    assert before + after == whole
    assert called == ended == ["on_train_end"]


def test_what_the_modules_own_hooks_do_is_in_the_checkpoint(tmp_path: Path, quiet: dict[str, Any]) -> None:
    class Target(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(4, 1)
            self.target.requires_grad_(False)

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for mine, theirs in zip(self.target.parameters(), self.layer.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)

        def on_validation_end(self) -> None:
            with torch.no_grad():
                self.target.bias += 1

    def run(**more: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Target()
        keep = ModelCheckpoint(tmp_path / "files", every_n_train_steps=1, save_top_k=-1)
        checked = ModelCheckpoint(tmp_path / "checked", save_top_k=-1, save_on_train_epoch_end=False)
        trainer = Trainer(**{**quiet, "enable_checkpointing": True}, max_epochs=2, callbacks=[keep, checked])
        trainer.fit(module, tiny_loader(), tiny_loader(), **more)
        return module.state_dict()

    whole = run()
    for file in ("files/epoch=0-step=3.ckpt", "checked/epoch=0-step=4.ckpt"):
        resumed = run(ckpt_path=tmp_path / file)
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("ends", [{"max_epochs": 2}, {"max_epochs": 2, "max_steps": 6}], ids=str)
@pytest.mark.parametrize("average", [EMAWeightAveraging, partial(StochasticWeightAveraging, 0.1), None])
def test_a_run_that_is_done_saves_the_same_again_when_it_is_started_again(
    tmp_path: Path, quiet: dict[str, Any], average: Any, ends: dict[str, int]
) -> None:
    def run(file: str, seed: int, **more: Any) -> dict[str, Any]:
        seed_all(seed)
        averages = [average()] if average else []
        stop, guard, clock = EarlyStopping("val_loss", patience=9), LossGuard(warmup=1), Timer("00:01:00:00")
        keep = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_last=True)
        waits = ModelCheckpoint(tmp_path / "waits", train_time_interval="01:00:00:00")
        trainer = Trainer(
            **{**quiet, "enable_checkpointing": True}, **ends, callbacks=[*averages, stop, guard, clock, keep, waits]
        )
        trainer.fit(TinyModule(), tiny_loader(4, shuffle=True), tiny_loader(2), **more)
        trainer.save_checkpoint(tmp_path / file)
        return torch.load(tmp_path / file, weights_only=True)

    one, other = run("one.ckpt", 1), run("other.ckpt", 2, ckpt_path=tmp_path / "one.ckpt")
    for found in (one, other):
        del found["paceline"]["manifest"], found["paceline"]["runs"]
        for state in found["callbacks"].values():
            for name in ("run", "line", "time_elapsed", "seconds_left"):
                state.pop(name, None)
    same(one, other)
