"""A search leaves no trace but its result: the fit after it is, to the bit, the one without it."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from paceline import DataModule, Trainer
from paceline.callbacks import GradientAccumulationScheduler
from paceline.loggers import CSVLogger
from paceline.messages import PacelineWarning
from paceline.strategies import DeepSpeedStrategy, SingleDevice
from paceline.strategies.model_parallel.strategy import PipelineParallelStrategy
from paceline.tuner.tuner import Tuner

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
FULL = 1 << 46  # bytes that no machine has: the allocator refuses them


def data(count: int = 96) -> TensorDataset:
    return tiny_loader(count, 1).dataset  # type: ignore[return-value]


class Net(TinyModule):
    """Draws from every generator in each step, keeps running statistics, and remembers what it has seen."""

    def __init__(self, batch_size: int = 8, lr: float = 0.05, most: int = 10_000) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.batch_size, self.most = batch_size, most
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[int] = []
        self.last: deque[float] = deque(maxlen=3)
        self.own = torch.Generator().manual_seed(4)
        self.total = torch.zeros(())
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > self.most:
            torch.empty(FULL, dtype=torch.uint8)
        x, y = batch
        noise = torch.rand(x.shape, generator=self.own) * random.random()
        loss = nn.functional.mse_loss(self(x + 0.01 * noise), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(len(x))
        self.last.append(random.random())
        self.total += 1
        self.steps += 1
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > self.most:
            torch.empty(FULL, dtype=torch.uint8)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class FromHooks(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(data(), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(data(), self.batch_size)


class Points(DataModule):
    def __init__(self, batch_size: int = 8) -> None:
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.all = data(int(torch.randint(90, 100, ())))

    def train_dataloader(self) -> Any:
        return DataLoader(self.all, self.hparams.batch_size, shuffle=True)


def everything(trainer: Trainer, module: Net) -> dict[str, Any]:
    optimizer = trainer.optimizers[0].state_dict()
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "moments": [v for s in optimizer["state"].values() for v in s.values()],
        "rate": optimizer["param_groups"][0]["lr"],
        "attributes": (module.seen, list(module.last), module.total.item(), module.steps),
        "counters": trainer.state.state_dict(),
        "drawn": (torch.rand(3), random.random(), torch.rand(3, generator=module.own)),
        "loss": trainer.callback_metrics["loss_epoch"],
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def fit(how: str, tunes: bool, strategy: str = "cpu", **given: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    random.seed(7)
    module = FromHooks() if how == "hooks" else Net()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data(), 8, shuffle=True, generator=generator) if how == "loader" else None
    points = Points() if how == "datamodule" else None
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2, enable_checkpointing=False, **given)
    if tunes:
        tuner = Tuner(trainer)
        found = tuner.lr_find(module, loader, datamodule=points, num_training=20, update_attr=False)
        assert found is not None
        assert len(found.results["lr"]) == 20
        module.most = 20
        size = tuner.scale_batch_size(module, loader, datamodule=points, init_val=8)
        assert size == 16
        assert [(t.size, t.fits) for t in tuner.batch_sizes_tried] == [(8, True), (16, True), (32, False)]
        assert all(t.peak_bytes is None or t.peak_bytes > 1e6 for t in tuner.batch_sizes_tried)
        module.most = 10_000
        assert module.batch_size == 16
        assert loader is None or loader.batch_size == 16
        tuner.scale_batch_size(module, loader, datamodule=points, init_val=8, max_val=8)
    trainer.fit(module, loader, datamodule=points)
    return everything(trainer, module)


@pytest.mark.parametrize("how", ["hooks", "loader", "datamodule"])
def test_a_fit_after_the_search_is_the_fit_without_it_to_the_bit(how: str) -> None:
    assert_same(fit(how, True), fit(how, False))


def test_the_same_holds_with_accumulation() -> None:
    assert_same(fit("loader", True, accumulate_grad_batches=3), fit("loader", False, accumulate_grad_batches=3))


@pytest.mark.parametrize("how", ["hooks", "loader"])
def test_the_same_holds_on_two_processes(how: str) -> None:
    for one, other in zip(ranks(2, fit, how, True, "ddp"), ranks(2, fit, how, False, "ddp"), strict=True):
        assert_same(one, other)


def sharded(tunes: bool) -> Any:
    torch.manual_seed(7)
    module = TinyModule(0.05)
    trainer = Trainer(**QUIET, strategy="fsdp", max_epochs=2, enable_checkpointing=False)
    if tunes:
        assert Tuner(trainer).lr_find(module, tiny_loader(8, 2), num_training=15, update_attr=False) is not None
    trainer.fit(module, tiny_loader(8, 2, shuffle=True))
    state = trainer.strategy.model_state(module)
    return {k: v for k, v in state.items() if not v.is_meta}, torch.rand(3)


def test_the_same_holds_for_sharded_weights() -> None:
    for one, other in zip(ranks(2, sharded, True), ranks(2, sharded, False), strict=True):
        assert_same(one, other)


def test_a_callback_method_that_is_none_counts_as_not_defined() -> None:
    callback: Any = GradientAccumulationScheduler({0: 2})
    callback.get_accumulate_grad_batches = callback.setup = callback.on_train_epoch_start = None
    trainer = Trainer(**QUIET, callbacks=[callback], max_steps=1, enable_checkpointing=False)
    assert Tuner(trainer).lr_find(TinyModule(), tiny_loader(8), num_training=5) is not None


def test_nothing_is_logged_saved_or_called(tmp_path: Path) -> None:
    from paceline import Callback

    class Told(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            raise AssertionError

        setup = on_fit_start = on_train_batch_start

    module, trainer = (
        FromHooks(),
        Trainer(**QUIET | {"logger": CSVLogger(tmp_path)}, max_epochs=1, callbacks=[Told()], default_root_dir=tmp_path),
    )
    before = {k: v.clone() for k, v in module.state_dict().items()}
    Tuner(trainer).lr_find(module, num_training=15)
    Tuner(trainer).scale_batch_size(module, max_val=8)
    assert not list(tmp_path.rglob("*"))
    assert_same(dict(module.state_dict()), before)
    assert trainer.state.global_step == 0


def test_a_copy_of_a_callback_that_runs_in_trials_prepares_the_module() -> None:
    from paceline import Callback

    class Freezes(Callback):
        runs_in_trials = True
        met: ClassVar[list[Callback]] = []

        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            self.met.append(self)
            pl_module.layer.bias.requires_grad_(False)

    class Watched(TinyModule):
        trains_bias: ClassVar[set[bool]] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trains_bias.add(self.layer.bias.requires_grad)
            return super().training_step(batch, batch_idx)

    callback, module = Freezes(), Watched()
    Tuner(Trainer(**QUIET, callbacks=[callback], max_steps=1)).lr_find(module, tiny_loader(8), num_training=5)
    assert Watched.trains_bias == {False}
    assert len(Freezes.met) == 1
    assert callback not in Freezes.met


class SetUpData(DataModule):
    """Has data, and a loader that reads the batch size, from ``setup`` on."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 8

    def setup(self, stage: str) -> None:
        self.rows = data(32)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, self.batch_size)

    val_dataloader = train_dataloader


def test_after_a_search_the_trainer_shows_its_module_and_data() -> None:
    module, rows = Net(), SetUpData()
    trainer = Trainer(**QUIET)
    Tuner(trainer).lr_find(module, datamodule=rows, num_training=12)
    assert (trainer.datamodule, trainer.training_module, module.trainer) == (rows, module, trainer)
    assert (trainer.train_dataloader.batch_size, trainer.num_training_batches) == (8, 4)
    assert (trainer.max_epochs, trainer.val_dataloaders, hasattr(rows, "rows")) == (1000, None, False)
    assert Tuner(trainer).scale_batch_size(module, datamodule=rows, max_val=4) == rows.batch_size == 4
    assert trainer.train_dataloader.batch_size == trainer.val_dataloaders.batch_size == 4
    given = DataLoader(data(32), 2)
    trainer = Trainer(**QUIET)
    Tuner(trainer).scale_batch_size(module, dataloaders=given, method="validate", max_val=4)
    assert (trainer.val_dataloaders is given, trainer.train_dataloader, given.batch_size) == (True, None, 4)
    assert trainer.max_epochs is None
    assert not module.log("x", 1.0)


class Made(Net):
    """Makes a layer of random weights when a run begins, and changes with every pass over its workers' data."""

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.head = nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x))

    def train_dataloader(self) -> Any:
        return self.loader


def made(tunes: bool, precision: str) -> dict[str, Any]:
    torch.manual_seed(7)
    random.seed(7)
    module = Made()
    module.loader = DataLoader(data(24), 8, shuffle=True, num_workers=1, persistent_workers=True)
    trainer = Trainer(**QUIET, max_epochs=2, enable_checkpointing=False, precision=precision)
    if tunes:
        assert Tuner(trainer).lr_find(module, num_training=8, update_attr=False) is not None
        assert not hasattr(module, "head")
        assert next(module.parameters()).dtype == torch.float32
    trainer.fit(module)
    return everything(trainer, module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_layers_made_in_the_search_are_made_again_and_dtypes_come_back(precision: str) -> None:
    assert_same(made(True, precision), made(False, precision))


def test_a_second_fit_after_a_search_goes_on_where_the_first_ended() -> None:
    def twice(tunes: bool) -> dict[str, Any]:
        torch.manual_seed(7)
        random.seed(7)
        module, trainer = FromHooks(), Trainer(**QUIET, max_epochs=1, enable_checkpointing=False)
        trainer.fit(module)
        if tunes:
            assert Tuner(trainer).lr_find(module, num_training=12, update_attr=False) is not None
        trainer.max_epochs = 2
        trainer.fit(module)
        return everything(trainer, module)

    assert_same(twice(True), twice(False))


@pytest.mark.gpu
def test_a_gpu_that_is_full_ends_the_search() -> None:
    class Wide(FromHooks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wide = torch.zeros(len(batch[0]), 1 << 24, device=self.device, requires_grad=True)  # 64 MiB a sample
            return self.loss(batch) + 0 * wide.sum()

    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        tuner = Tuner(Trainer(**QUIET | {"accelerator": "gpu"}, devices=1, max_epochs=1))
        size = tuner.scale_batch_size(Wide(), mode="binsearch", margin=0.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert size is not None
    assert 12 < size < 48
    peaks = {trial.size: trial.peak_bytes for trial in tuner.batch_sizes_tried if trial.fits}
    assert peaks[8] is not None
    assert peaks[8] > 8 * 2**26
    assert torch.cuda.memory_allocated() < 2**26


# ---- sizes -----------------------------------------------------------------------------------------------------------


def tuned(most: int, module: Any = None, **given: Any) -> tuple[int, list[tuple[int, bool]], FromHooks]:
    module = module or FromHooks()
    module.most = most
    tuner = Tuner(Trainer(**QUIET, max_epochs=1))
    size = tuner.scale_batch_size(module, **given)
    return size, [(t.size, t.fits) for t in tuner.batch_sizes_tried], module


def test_binary_search_closes_in_on_the_largest_that_fits_less_a_margin() -> None:
    size, tried, module = tuned(21, mode="binsearch", margin=0.0)
    assert size == module.batch_size == module.hparams.batch_size == 21
    assert tried[:5] == [(2, True), (4, True), (8, True), (16, True), (32, False)]
    assert tried[5:] == [(24, False), (20, True), (22, False), (21, True)]
    assert tuned(21, mode="binsearch", margin=0.1)[0] == 18


def test_a_first_size_that_does_not_fit_is_halved() -> None:
    assert tuned(5, init_val=32)[:2] == (4, [(32, False), (16, False), (8, False), (4, True)])


def test_the_data_and_the_limit_end_the_search() -> None:
    assert tuned(1000)[0] == 96
    assert tuned(1000, max_val=30)[0] == 30
    assert tuned(1000, max_trials=2)[0] == 4


@pytest.mark.parametrize("name", ["deepspeed", "model_parallel"])
def test_a_strategy_whose_states_cannot_be_restored_is_refused(name: str) -> None:
    kind = {"deepspeed": DeepSpeedStrategy, "model_parallel": PipelineParallelStrategy}[name]
    refused = type("Refused", (SingleDevice,), {"restores_after_trials": kind.restores_after_trials})
    trainer = Trainer(strategy=refused(), max_steps=1, **QUIET)
    with pytest.raises(NotImplementedError, match=r"states that Refused manages.*strategy='ddp'"):
        Tuner(trainer).lr_find(FromHooks())


def test_nothing_that_fits_is_an_error_with_what_was_tried() -> None:
    with pytest.raises(
        RuntimeError, match=r"None of the batch sizes tried fits into memory \(2 ran out of memory.*; 1 "
    ):
        tuned(0)


def test_other_errors_come_through_and_the_size_is_put_back() -> None:
    class Broken(FromHooks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    module = Broken(batch_size=5)
    with pytest.raises(KeyError, match="mine"):
        tuned(9, module)
    assert module.batch_size == 5
    assert module._trainer is None


@pytest.mark.parametrize(("most", "expected"), [(20, (16, 4)), (1000, (64, 1)), (3, (2, 32))])
def test_the_effective_batch_is_kept_by_accumulation(most: int, expected: tuple[int, int]) -> None:
    module = FromHooks(batch_size=32)
    module.most = most
    trainer = Trainer(**QUIET, accumulate_grad_batches=2, max_epochs=1)
    size = Tuner(trainer).scale_batch_size(module, mode="binsearch", margin=0.0, effective_batch="keep")
    assert (size, trainer.accumulate_grad_batches) == (module.batch_size, trainer.accumulate_grad_batches) == expected


def on_two(rank_that_is_short: int) -> Any:
    module, trainer = FromHooks(), Trainer(**QUIET, strategy="ddp", max_epochs=1)
    tuner = Tuner(trainer)
    import os

    module.most = 10 if int(os.environ["RANK"]) == rank_that_is_short else 1000
    size = tuner.scale_batch_size(module, effective_batch=96)
    module.most = 1000
    trainer.fit(module)  # the group is as good as before
    return size, trainer.accumulate_grad_batches, [(t.size, t.where) for t in tuner.batch_sizes_tried]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_process_with_the_least_memory_decides_for_all(rank: int) -> None:
    assert ranks(2, on_two, rank) == [(8, 6, [(2, ()), (4, ()), (8, ()), (16, (rank,))])] * 2


def error_on_one() -> None:
    import os

    class Broken(FromHooks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if os.environ["RANK"] == "1":
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    Tuner(Trainer(**QUIET, strategy="ddp", max_epochs=1)).scale_batch_size(Broken())


def test_an_error_on_one_process_ends_the_search_on_all() -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, error_on_one)
    assert isinstance(caught.value.errors[1], KeyError)
    assert "failed on rank 1: KeyError: 'mine'" in str(caught.value.errors[0])


def test_started_processes_bring_the_result_back() -> None:
    module, trainer = FromHooks(), Trainer(**QUIET, strategy="ddp_fork", devices=2, max_epochs=1)
    module.most = 20
    tuner = Tuner(trainer)
    assert tuner.scale_batch_size(module) == module.batch_size == 16
    found = tuner.lr_find(module, num_training=20, min_lr=1e-4)
    assert found is not None
    assert module.lr == found.suggestion()


def test_the_size_of_a_batch_sampler_that_was_given_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    loader = DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 4, False))
    trainer = Trainer(**QUIET, max_epochs=1)
    assert Tuner(trainer).scale_batch_size(Net(), loader, max_val=16, effective_batch="keep") == 4
    assert Tuner(trainer).scale_batch_size(Net(), loader, max_val=16) == 16
    assert [len(batch[0]) for batch in loader] == [16] * 6
    assert "batch_size was set to 16 (previously 4)" in caplog.text


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_has_its_own_batch_size(method: str) -> None:
    class Evaluated(Net):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > self.most:
                torch.empty(FULL, dtype=torch.uint8)

    module, loader = Evaluated(most=20), DataLoader(data(), 4)
    size = Tuner(Trainer(**QUIET)).scale_batch_size(module, dataloaders=loader, method=method)
    assert size == loader.batch_size == 16
    assert module.training


# ---- what cannot be --------------------------------------------------------------------------------------------------


class Blind(FromHooks):
    def train_dataloader(self) -> Any:
        return DataLoader(data(), 3)


class NoSize(TinyModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()


def test_a_size_that_nobody_reads_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"Blind\.batch_size.* were set to 2, but the loader yields batches of 3, so the loader do"
    ):
        tuned(9, Blind())


def test_a_missing_attribute_is_an_error_that_lists_the_hyperparameters() -> None:
    with pytest.raises(AttributeError, match="NoSize has no attribute or hyperparameter 'batch_size' to set"):
        tuned(9, NoSize())
    with pytest.raises(AttributeError, match=r"'size' to set\. Existing hyperparameters: 'batch_size', 'lr' and"):
        tuned(9, FromHooks(), batch_arg_name="size")
    module = NoSize()
    del module.lr
    with pytest.raises(AttributeError, match="has no attribute or hyperparameter 'lr' or 'learning_rate' to set"):
        Tuner(Trainer(**QUIET)).lr_find(module)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([1, 2], "a list was passed, which yields ready-made batches"),
        ({"a": tiny_loader(), "b": tiny_loader()}, "several loaders were passed"),
        (DataLoader(data(), batch_size=None), r"batches from its dataset \(batch_size=None\)"),
        (
            DataLoader(data(), batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(data()), 2, False)),
            "gets its batches from Mine",
        ),
    ],
)
def test_loaders_whose_batches_are_made_by_others_are_refused(loader: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tuned(9, Net(), train_dataloaders=loader)


def test_a_loader_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(TypeError, match="The train loader is a list_iterator, which can be read only once"):
        Tuner(Trainer(**QUIET)).lr_find(Net(), iter([1, 2]))


class Manual(FromHooks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Exact(FromHooks):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Joint(FromHooks):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


def test_optimizers_whose_rate_says_nothing_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"one optimizer, but Joint\.configure_optimizers\(\) returned 6 optimizers\."
    ):
        Tuner(Trainer(**QUIET)).lr_find(Joint())
    with pytest.raises(RuntimeError, match="Manual uses manual optimization"):
        Tuner(Trainer(**QUIET)).lr_find(Manual())
    with pytest.raises(RuntimeError, match="does not work with LBFGS, which Exact uses"):
        Tuner(Trainer(**QUIET)).lr_find(Exact())
    with pytest.raises(ValueError, match="changes accumulate_grad_batches, which has an effect only in"):
        tuned(9, Manual(), effective_batch=8)


def test_what_is_no_trainer_and_what_is_no_module_are_told_at_once() -> None:
    with pytest.raises(
        TypeError, match=r"Tuner\(\) got a Net, but it needs the Trainer .*Pass the module to lr_find\(\)"
    ):
        Tuner(Net())  # type: ignore[arg-type]
    wanted = r"The Tuner got the class Net as its module, but needs a TrainingModule object\. Did you mean Net\(\)\?"
    with pytest.raises(TypeError, match=wanted):
        Tuner(Trainer(**QUIET)).lr_find(Net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="The Tuner needs a module"):
        Tuner(Trainer(**QUIET)).lr_find(None)  # type: ignore[arg-type]


def test_contradictions_are_told_before_anything_runs() -> None:
    trainer = Trainer(**QUIET, callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(ValueError, match="but so does the callback GradientAccumulationScheduler"):
        Tuner(trainer).scale_batch_size(FromHooks(), effective_batch="keep")
    with pytest.raises(ValueError, match="effective_batch='same'"):
        tuned(9, effective_batch="same")
    with pytest.raises(ValueError, match=r"scale_batch_size mode 'pow'\. Did you mean 'power'"):
        tuned(9, mode="pow")
    with pytest.raises(ValueError, match="the counts must be at least 1"):
        tuned(9, max_trials=0)
    with pytest.raises(ValueError, match="scale_batch_size method 'train'"):
        tuned(9, method="train")
    with pytest.raises(ValueError, match=r"lr_find\(method='test'\) is not supported, because a learning"):
        Tuner(Trainer(**QUIET)).lr_find(Net(), method="test")  # type: ignore[arg-type]
    trainer = Trainer(**QUIET)
    trainer.ckpt_path = "last"
    with pytest.raises(RuntimeError, match=r"resumes from last \(trainer.ckpt_path\)"):
        Tuner(trainer).lr_find(FromHooks())


def test_a_dry_run_searches_for_nothing() -> None:
    tuner, module = Tuner(Trainer(**QUIET, fast_dev_run=True)), FromHooks()
    found = tuner.lr_find(module)
    assert found.results == {"lr": [], "loss": []}
    with pytest.warns(PacelineWarning, match="cannot suggest a learning rate, because .* fast_dev_run"):
        assert found.suggestion() is None
    assert tuner.scale_batch_size(module) is None
    assert (module.lr, module.batch_size) == (0.05, 8)


def sharded_size() -> None:
    Tuner(Trainer(**QUIET, strategy="fsdp")).scale_batch_size(FromHooks())


def test_a_forward_that_communicates_is_refused() -> None:
    with pytest.raises(RanksError, match="on 2 processes with FSDPStrategy, because the forward pass communicates"):
        ranks(2, sharded_size)
