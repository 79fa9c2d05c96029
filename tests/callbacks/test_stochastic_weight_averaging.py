from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet_fits import SaveAt, SaveInValidation, loader, trainer
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from paceline import TrainingModule
from paceline.callbacks.base import Callback
from paceline.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from paceline.callbacks.weight_averaging import CURRENT_KEY
from paceline.messages import PacelineWarning


class Net(TrainingModule):
    """A small network, with BatchNorm on demand; logs in every step."""

    def __init__(self, batch_norm: bool = False, lr: float = 0.1, schedule: str | None = "epoch") -> None:
        super().__init__()
        torch.manual_seed(1)
        middle = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 6), middle, nn.ReLU(), nn.Linear(6, 1))
        self.lr = lr
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Recorder(Callback):
    """Weights at the end of each epoch, in float64, and the learning rate of each step."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.rates.append([])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates[-1].append(float(optimizer.param_groups[0]["lr"]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append({n: p.detach().double().clone() for n, p in pl_module.named_parameters()})


class SaveEarly(SaveAt):
    """Comes before the callbacks under test where an epoch ends."""

    monitors_metrics = False


def mean(epochs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([epoch[name] for epoch in epochs]).mean(0) for name in epochs[0]}


def assert_close(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(module.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach().double(), value, rtol=1e-5, atol=1e-7)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- the average -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "epochs", "first"), [(0.5, 6, 2), (0.8, 10, 7), (1, 3, 0), (3, 4, 2), (0.0, 3, 0), (1.0, 4, 3)]
)
def test_the_module_ends_with_the_mean_of_the_weights_at_the_ends_of_the_last_epochs(
    tmp_path: Path, start: int | float, epochs: int, first: int
) -> None:
    module, record, swa = Net(), Recorder(), StochasticWeightAveraging(0.05, swa_epoch_start=start)
    trainer(tmp_path, record, swa, max_epochs=epochs).fit(module, loader())
    assert swa.swa_start == first
    assert swa.n_averaged == epochs - first
    assert_close(module, mean(record.epochs[first:]))


def test_accumulated_batches_change_nothing_about_the_epochs_averaged(tmp_path: Path) -> None:
    module, record, swa = Net(), Recorder(), StochasticWeightAveraging(0.05, swa_epoch_start=2)
    trainer(tmp_path, record, swa, max_epochs=4, accumulate_grad_batches=2).fit(module, loader())
    assert [len(rates) for rates in record.rates] == [3, 3, 3, 3]
    assert_close(module, mean(record.epochs[1:]))


def test_a_function_of_the_user_makes_the_average(tmp_path: Path) -> None:
    def halfway(average: Tensor, current: Tensor, n_averaged: Any) -> Tensor:
        return (average + current) / 2

    module, record = Net(), Recorder()
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=2, avg_fn=halfway, device=None)
    trainer(tmp_path, record, swa, max_epochs=4).fit(module, loader())
    a, b, c = (e["net.0.weight"] for e in record.epochs[1:])
    torch.testing.assert_close(module.net[0].weight.detach().double(), ((a + b) / 2 + c) / 2, rtol=1e-5, atol=1e-7)


def test_training_goes_on_with_its_own_weights(tmp_path: Path) -> None:
    alone, record = Recorder(), Recorder()
    trainer(tmp_path, alone, max_epochs=3).fit(Net(schedule=None), loader())
    swa = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    trainer(tmp_path, record, swa, max_epochs=3).fit(Net(schedule=None), loader())
    for mine, theirs in zip(record.epochs, alone.epochs, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value)


def test_an_average_that_never_started_is_told(tmp_path: Path) -> None:
    module, record = Net(), Recorder()
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=9)
    with pytest.warns(
        PacelineWarning, match=r"averaged no weights, because the fit ended after 2 epochs.*lower swa_epoch_start"
    ):
        trainer(tmp_path, record, swa, max_epochs=2).fit(module, loader())
    assert_same({n: p.detach().double() for n, p in module.named_parameters()}, record.epochs[-1])


# ---- the learning rate -----------------------------------------------------------------------------------------------


def annealed(strategy: str, start: float, end: float, over: int, epoch: int) -> float:
    t = 1.0 if over == 0 else min(1.0, epoch / over)
    alpha = t if strategy == "linear" else (1 - math.cos(math.pi * t)) / 2
    return start + (end - start) * alpha


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize(("over", "schedule"), [(0, None), (1, "epoch"), (3, None), (3, "epoch"), (3, "step")])
def test_the_learning_rate_is_annealed_in_place_of_the_schedule(
    tmp_path: Path, strategy: Any, over: int, schedule: str | None
) -> None:
    record = Recorder()
    swa = StochasticWeightAveraging(0.02, swa_epoch_start=3, annealing_epochs=over, annealing_strategy=strategy)
    run = trainer(tmp_path, record, swa, max_epochs=7)
    run.fit(Net(schedule=schedule), loader())
    decay = {None: 1.0, "epoch": 0.99, "step": 0.99**5}[schedule]
    assert record.rates[1][0] == pytest.approx(0.1 * decay)
    present = 0.1 * decay**2
    expected = [annealed(strategy, present, 0.02, over, epoch) for epoch in range(5)]
    for rates, rate in zip(record.rates[2:], expected, strict=True):
        assert rates == pytest.approx([rate] * 5)
    assert len(run.lr_scheduler_configs) == 1
    assert run.lr_scheduler_configs[0].interval == "epoch"


def test_each_parameter_group_gets_its_own_rate(tmp_path: Path) -> None:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": self.net[0].parameters()}, {"params": self.net[3].parameters()}], lr=0.1)

    swa = StochasticWeightAveraging([0.03, 0.01], swa_epoch_start=1, annealing_epochs=1)
    run = trainer(tmp_path, swa, max_epochs=2)
    run.fit(Groups(), loader())
    assert [g["lr"] for g in run.optimizers[0].param_groups] == pytest.approx([0.03, 0.01])


# ---- BatchNorm -------------------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_those_of_the_averaged_weights(tmp_path: Path) -> None:
    module, record = Net(batch_norm=True), Recorder()
    trainer(tmp_path, record, StochasticWeightAveraging(0.05, swa_epoch_start=2), max_epochs=4).fit(module, loader())
    expected = Net(batch_norm=True)
    expected.load_state_dict({n: v.float() for n, v in mean(record.epochs[1:]).items()}, strict=False)
    update_bn(loader(), expected.net)
    torch.testing.assert_close(module.net[1].running_mean, expected.net[1].running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module.net[1].running_var, expected.net[1].running_var, rtol=1e-5, atol=1e-6)
    assert module.net[1].num_batches_tracked == 5
    assert module.net[1].momentum == 0.1
    assert "log" not in vars(module)
    assert_close(module, mean(record.epochs[1:]))


def test_the_extra_pass_sees_the_batches_that_training_sees(tmp_path: Path) -> None:
    class Changed(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return x + 3, y

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return 2 * x, y

    module = Changed(batch_norm=True)
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    trainer(tmp_path, swa, max_epochs=2, limit_train_batches=3).fit(module, loader())
    expected = Net(batch_norm=True)
    expected.load_state_dict(module.state_dict())
    update_bn([2 * (x + 3) for x, _ in list(loader())[:3]], expected.net)
    torch.testing.assert_close(module.net[1].running_mean, expected.net[1].running_mean)
    assert module.net[1].num_batches_tracked == 3


def test_the_extra_pass_has_the_order_of_the_next_epoch(tmp_path: Path) -> None:
    class Seen(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batches.append(batch[1])
            return batch

    batches: list[Tensor] = []
    data = TensorDataset(torch.randn(20, 4), torch.arange(20.0).unsqueeze(1))
    for epochs, callbacks in ((2, [StochasticWeightAveraging(0.05, swa_epoch_start=1)]), (3, [])):
        fit = trainer(tmp_path, *callbacks, max_epochs=epochs)
        fit.fit(Seen(batch_norm=True), DataLoader(data, batch_size=4, shuffle=True))
    assert torch.equal(torch.cat(batches[:15]), torch.cat(batches[15:]))


def test_metrics_do_not_count_the_extra_pass(tmp_path: Path) -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__(batch_norm=True)
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss.detach())
            self.log("mean", self.mean, on_epoch=True)
            return loss

    module = Measured()
    trainer(tmp_path, StochasticWeightAveraging(0.05, swa_epoch_start=1), max_epochs=2).fit(module, loader())
    assert module.net[1].num_batches_tracked == 5
    assert module.mean.update_count == 0


@pytest.mark.parametrize("how", ["untracked", "eval"])
def test_frozen_batch_norm_keeps_its_statistics(tmp_path: Path, how: str) -> None:
    class Frozen(Net):
        def on_train_epoch_start(self) -> None:
            if how == "eval":
                self.net[1].eval()
            else:
                self.net[1].track_running_stats = False

    module = Frozen(batch_norm=True)
    nn.init.constant_(module.net[1].running_mean, 7.0)
    trainer(tmp_path, StochasticWeightAveraging(0.05, swa_epoch_start=1), max_epochs=2).fit(module, loader())
    assert torch.equal(module.net[1].running_mean, torch.full((6,), 7.0))
    assert module.net[1].num_batches_tracked == 0


def test_the_extra_pass_takes_batches_of_several_loaders(tmp_path: Path) -> None:
    class Two(Net):
        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(batch["a"], 0) + super().training_step(batch["b"], 0)

    module = Two(batch_norm=True)
    loaders = {"a": loader(), "b": loader(12)}
    trainer(tmp_path, StochasticWeightAveraging(0.05, swa_epoch_start=1), max_epochs=1).fit(module, loaders)
    assert module.net[1].num_batches_tracked == 10


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [SaveAt, SaveInValidation, SaveEarly])
@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [None, "step"])
def test_a_resumed_run_continues_weights_average_and_rate_to_the_bit(
    tmp_path: Path, epoch: int, save: type[SaveAt], schedule: str | None
) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    def run(ckpt_path: Path | None = None) -> tuple[Net, Any, dict[str, Any]]:
        module = Validated(batch_norm=True, schedule=schedule)
        swa = StochasticWeightAveraging(0.02, swa_epoch_start=3, annealing_epochs=2)
        fit = trainer(tmp_path, save(epoch, tmp_path / "r.ckpt"), swa, max_epochs=5)
        torch.manual_seed(3)
        fit.fit(module, loader(shuffle=True), loader(), ckpt_path=ckpt_path)
        fit.save_checkpoint(tmp_path / "end.ckpt")
        return module, fit, torch.load(tmp_path / "end.ckpt", weights_only=True)

    whole, whole_fit, whole_end = run()
    resumed, resumed_fit, resumed_end = run(tmp_path / "r.ckpt")
    assert_same(dict(resumed.named_parameters()), dict(whole.named_parameters()))
    assert_same(resumed_end[CURRENT_KEY], whole_end[CURRENT_KEY])
    torch.testing.assert_close(resumed.net[1].running_mean, whole.net[1].running_mean)
    rates = [fit.optimizers[0].param_groups[0]["lr"] for fit in (whole_fit, resumed_fit)]
    assert rates[0] == rates[1] == pytest.approx(0.02)


def test_a_checkpoint_after_the_end_holds_the_mean_and_the_training_weights_beside_it(tmp_path: Path) -> None:
    module, record = Net(batch_norm=True), Recorder()
    run = trainer(tmp_path, record, StochasticWeightAveraging(0.05, swa_epoch_start=2), max_epochs=3)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert_same(saved["state_dict"], dict(module.state_dict()))
    current = {n: saved[CURRENT_KEY][n].double() for n in record.epochs[-1]}
    assert_same(current, record.epochs[-1])
    assert saved[CURRENT_KEY]["net.1.num_batches_tracked"] == 15
    assert saved["state_dict"]["net.1.num_batches_tracked"] == 5


def test_a_run_saved_after_its_end_can_be_prolonged(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"

    def swa() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.05, swa_epoch_start=2)

    whole, half, prolonged = (Net(batch_norm=True) for _ in range(3))
    torch.manual_seed(3)
    trainer(tmp_path, swa(), max_epochs=5).fit(whole, loader())
    run = trainer(tmp_path, swa(), max_epochs=3)
    run.fit(half, loader())
    run.save_checkpoint(path)
    trainer(tmp_path, swa(), max_epochs=5).fit(prolonged, loader(), ckpt_path=path)
    assert_same(dict(prolonged.state_dict()), dict(whole.state_dict()))


def test_resuming_a_finished_run_leaves_the_mean_in_the_module(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    first, second = Net(batch_norm=True), Net(batch_norm=True)
    run = trainer(tmp_path, StochasticWeightAveraging(0.05, swa_epoch_start=2), max_epochs=3)
    run.fit(first, loader())
    run.save_checkpoint(path)
    trainer(tmp_path, StochasticWeightAveraging(0.05, swa_epoch_start=2), max_epochs=3).fit(
        second, loader(), ckpt_path=path
    )
    assert_same(dict(second.state_dict()), dict(first.state_dict()))


def test_resuming_at_the_last_epochs_end_leaves_the_same_mean(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    def run(**kwargs: Any) -> dict[str, Any]:
        module, swa = Net(batch_norm=True), StochasticWeightAveraging(0.05, swa_epoch_start=2)
        trainer(tmp_path, swa, SaveAt(2, path), max_epochs=3).fit(module, loader(), **kwargs)
        return dict(module.state_dict())

    assert_same(run(), run(ckpt_path=path))


def test_a_resume_that_trains_nothing_says_that_the_mean_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    def run(**kwargs: Any) -> None:
        swa = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        settings = {"limit_train_batches": 0} if kwargs else {}
        trainer(tmp_path, swa, SaveAt(2, path), max_epochs=3, **settings).fit(Net(), loader(), **kwargs)

    run()
    with pytest.warns(
        PacelineWarning, match=r"nothing left to train.*not the mean of the 2 averaged epochs.*Raise max_epochs"
    ):
        run(ckpt_path=path)


def test_a_resume_without_the_callbacks_state_averages_the_epochs_left(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    trainer(tmp_path, SaveAt(2, path), max_epochs=3).fit(Net(), loader())
    module, record, swa = Net(), Recorder(), StochasticWeightAveraging(0.05, swa_epoch_start=2)
    with pytest.warns(PacelineWarning, match=r"starts in epoch 3 instead of epoch 1"):
        trainer(tmp_path, record, swa, max_epochs=5).fit(module, loader(), ckpt_path=path)
    assert_close(module, mean(record.epochs))


# ---- arguments and runs that do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"swa_lrs": -0.1}, ValueError, ["swa_lrs=-0.1", "invalid learning rate", "must be positive"]),
        ({"swa_lrs": [0.1, 0.0]}, ValueError, ["swa_lrs=[0.1, 0.0]", "invalid learning rate", "must be positive"]),
        ({"swa_lrs": "0.1"}, TypeError, ["swa_lrs='0.1'", "must be a positive number"]),
        ({"swa_lrs": []}, TypeError, ["swa_lrs=[]", "must be a positive number"]),
        ({"swa_epoch_start": 0}, ValueError, ["swa_epoch_start=0", "out of range", "at least 1"]),
        ({"swa_epoch_start": 1.5}, ValueError, ["swa_epoch_start=1.5", "out of range", "0.0 to 1.0"]),
        ({"swa_epoch_start": "5"}, TypeError, ["swa_epoch_start='5'", "str", "integer (counted from 1)"]),
        ({"annealing_epochs": -1}, ValueError, ["annealing_epochs=-1", "must be at least 0"]),
        ({"annealing_strategy": "cosine"}, ValueError, ["'cosine'", "Did you mean 'cos'?", "Choose 'cos' or 'linear'"]),
        ({"avg_fn": 2}, TypeError, ["avg_fn=2", "is not callable", "Pass a function"]),
        ({"device": "gpu0"}, ValueError, ["device='gpu0'", "not a valid PyTorch device", "Pass 'cpu'"]),
    ],
)
def test_an_invalid_argument_is_told_with_value_reason_and_remedy(
    kwargs: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        StochasticWeightAveraging(**({"swa_lrs": 0.1} | kwargs))
    for word in words:
        assert word in str(caught.value)


def test_a_fraction_of_endless_epochs_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, StochasticWeightAveraging(0.1), max_epochs=-1, max_steps=3)
    with pytest.raises(ValueError, match=r"swa_epoch_start=0.8.*max_epochs=-1.*first epoch as an integer"):
        run.fit(Net(), loader())


def test_rates_for_other_groups_than_there_are_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, StochasticWeightAveraging([0.1, 0.2], swa_epoch_start=1), max_epochs=1)
    with pytest.raises(
        ValueError, match=r"has length 2, but the number of parameter groups in the optimizer of Net is 1.*Pass"
    ):
        run.fit(Net(), loader())


def test_several_schedulers_are_refused(tmp_path: Path) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]

    with pytest.raises(ValueError, match=r"Two.configure_optimizers returned 2\..*SequentialLR"):
        trainer(tmp_path, StochasticWeightAveraging(0.1), max_epochs=1).fit(Two(), loader())


def test_manual_optimization_and_several_optimizers_are_refused(tmp_path: Path) -> None:
    class Manual(Net):
        count = 1

        def __init__(self) -> None:
            super().__init__(schedule=None)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.count)]

    class Two(Manual):
        count = 2

    for cls, words in (
        (Manual, r"Manual uses manual optimization.*Use WeightAveraging"),
        (Two, r"Two.*returned 2\. Use EMA"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer(tmp_path, StochasticWeightAveraging(0.1), max_epochs=1).fit(cls(), loader())
