from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet_fits import loader, trainer
from rank_processes import ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule
from paceline.callbacks.base import Callback
from paceline.callbacks.weight_averaging import (
    CURRENT_KEY,
    EMAWeightAveraging,
    WeightAverage,
    WeightAveraging,
    equal_weights,
)
from paceline.messages import PacelineWarning
from paceline.strategies.base import Strategy

pytestmark = pytest.mark.filterwarnings("ignore:.*but no val_dataloader, so validation is skipped")


class Net(TrainingModule):
    """A small network with BatchNorm, so that buffers matter."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        self.lr = lr
        self.validated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Recorder(Callback):
    """The weights after each optimizer step, in float64."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.epoch_of_step: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append({n: p.detach().double().clone() for n, p in pl_module.named_parameters()})
            self.epoch_of_step.append(trainer.current_epoch)


def fold(weights: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    average = weights[0]
    for current in weights[1:]:
        average = {n: decay * average[n] + (1 - decay) * current[n] for n in average}
    return average


def assert_close(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(module.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach().double(), value, rtol=1e-5, atol=1e-7)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


# ---- the arithmetic, without a fit -----------------------------------------------------------------------------------


def jitter(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 1.0])
def test_updates_equal_those_of_torchs_averaged_model_to_the_bit(decay: float) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    reference = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    average = WeightAverage(module, get_ema_multi_avg_fn(decay))
    for seed in range(6):
        jitter(module, seed)
        reference.update_parameters(module)
        average.update()
    expected = {n: v for n, v in reference.module.state_dict().items() if "num_batches" not in n}
    assert_same(average.averages(), expected)
    assert average.n_averaged == 6


def test_equal_weights_make_the_arithmetic_mean() -> None:
    module = nn.Linear(3, 2).double()
    average = WeightAverage(module, equal_weights)
    seen = []
    for seed in range(7):
        jitter(module, seed)
        seen.append(module.weight.detach().clone())
        average.update()
    torch.testing.assert_close(average.averages()["weight"], torch.stack(seen).mean(0))


def test_before_the_first_update_there_is_nothing_to_show() -> None:
    module = nn.Linear(3, 2)
    average = WeightAverage(module, equal_weights)
    jitter(module, 0)
    before = weights(module)
    average.show()
    assert average.held is None
    assert_same(module.state_dict(), before)


def test_showing_and_hiding_leave_the_weights_as_they_were_to_the_bit() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    average = WeightAverage(module, equal_weights)
    for seed in range(3):
        jitter(module, seed)
        average.update()
    before, mean = weights(module), {n: v.clone() for n, v in average.averages().items()}
    with torch.inference_mode():
        average.show()
        average.show()
    assert_same({n: v for n, v in module.state_dict().items() if n in mean}, mean)
    average.hide()
    average.hide()
    assert_same(module.state_dict(), before)
    assert_same(average.averages(), mean)
    module(torch.randn(4, 3)).sum().backward()


def test_tied_weights_are_averaged_once_and_appear_under_each_name() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    average = WeightAverage(module, equal_weights)
    for seed in range(3):
        jitter(module, seed)
        average.update()
    found = average.averages()
    assert found["a.weight"] is found["b.weight"]
    assert average.average_state(Strategy()).keys() == module.state_dict().keys()


def test_a_mask_of_infinities_and_integers_are_left_to_the_module() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    module.register_buffer("count", torch.tensor(0))
    average = WeightAverage(module, get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        module.count += 1  # type: ignore[operator]
        average.update()
    assert average.averages().keys() == {"weight", "bias"}
    average.show()
    assert module.count == 3
    assert module.mask[0, 1] == -math.inf
    assert module.mask[1, 0] == 0


def test_a_buffer_that_the_module_replaces_is_followed() -> None:
    module = nn.Module()
    module.register_buffer("level", torch.zeros(1))
    average = WeightAverage(module, equal_weights)
    for value in (1.0, 2.0, 6.0):
        module.level = torch.full((1,), value)
        average.update()
    assert average.averages()["level"].item() == pytest.approx(3.0)


def test_half_precision_weights_are_averaged_in_float32() -> None:
    module = nn.Linear(1, 1, bias=False).bfloat16()
    average = WeightAverage(module, get_ema_multi_avg_fn(0.999))
    nn.init.zeros_(module.weight)
    average.update()
    nn.init.ones_(module.weight)
    for _ in range(10):
        average.update()
    assert average.averages()["weight"].dtype == torch.float32
    assert average.averages()["weight"].item() == pytest.approx(1 - 0.999**10, rel=1e-4)
    average.show()
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.item() == pytest.approx(1 - 0.999**10, rel=1e-2)
    average.hide()
    assert module.weight.item() == 1.0


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "kwargs", "error", "words"),
    [
        (EMAWeightAveraging, {"decay": 1.5}, ValueError, ["decay=1.5", "outside [0, 1]", "such as 0.999"]),
        (EMAWeightAveraging, {"decay": -0.1}, ValueError, ["decay=-0.1", "outside [0, 1]", "such as 0.999"]),
        (EMAWeightAveraging, {"decay": "0.9"}, TypeError, ["decay='0.9'", "str", "Pass a number from 0 to 1"]),
        (EMAWeightAveraging, {"update_every_n_steps": 0}, ValueError, ["update_every_n_steps=0", "at least 1"]),
        (
            EMAWeightAveraging,
            {"update_every_n_steps": 1.5},
            TypeError,
            ["update_every_n_steps=1.5", "is a float", "integer"],
        ),
        (EMAWeightAveraging, {"update_starting_at_step": -1}, ValueError, ["update_starting_at_step=-1", "at least 0"]),
        (
            EMAWeightAveraging,
            {"update_starting_at_epoch": True},
            TypeError,
            ["update_starting_at_epoch=True", "integer"],
        ),
        (EMAWeightAveraging, {"dekay": 0.9}, TypeError, ["'dekay'", "Did you mean 'decay'?", "Choose"]),
        (EMAWeightAveraging, {"avg_fn": max}, TypeError, ["avg_fn", "with decay", "WeightAveraging(avg_fn=...)"]),
        (WeightAveraging, {"avgfn": max}, TypeError, ["'avgfn'", "Did you mean 'avg_fn'?", "Choose"]),
        (WeightAveraging, {"avg_fn": 3}, TypeError, ["avg_fn=3", "is not callable", "Pass a function"]),
        (WeightAveraging, {"avg_fn": max, "multi_avg_fn": max}, ValueError, ["both", "only one", "Pass avg_fn"]),
        (
            WeightAveraging,
            {"device": "gpu0"},
            ValueError,
            ["device='gpu0'", "not a valid PyTorch device", "Pass 'cpu'"],
        ),
        (WeightAveraging, {"device": 1.5}, TypeError, ["device=1.5", "float", "Pass a name"]),
    ],
)
def test_an_invalid_argument_is_told_with_value_reason_and_remedy(
    cls: type, kwargs: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        cls(**kwargs)
    for word in words:
        assert word in str(caught.value)


def test_two_averages_in_one_run_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, WeightAveraging(), EMAWeightAveraging(), max_epochs=1)
    with pytest.raises(ValueError, match=r"'EMAWeightAveraging'.*only one average.*Keep only one"):
        run.fit(Net(), loader())


# ---- when a fit updates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_ema_is_the_hand_computed_average_of_the_weights_after_each_step(tmp_path: Path, accumulate: int) -> None:
    module, record, ema = Net(), Recorder(), EMAWeightAveraging(decay=0.8)
    trainer(tmp_path, record, ema, max_epochs=3, accumulate_grad_batches=accumulate).fit(module, loader())
    assert len(record.steps) == 3 * math.ceil(5 / accumulate)
    assert ema.n_averaged == len(record.steps)
    assert_close(module, fold(record.steps, 0.8))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weight_averaging_is_the_mean_of_the_weights_after_each_step(tmp_path: Path, accumulate: int) -> None:
    module, record = Net(), Recorder()
    run = trainer(tmp_path, record, WeightAveraging(), max_epochs=2, accumulate_grad_batches=accumulate)
    run.fit(module, loader())
    mean = {n: torch.stack([s[n] for s in record.steps]).mean(0) for n in record.steps[0]}
    assert_close(module, mean)


@pytest.mark.parametrize("kind", ["avg_fn", "multi_avg_fn"])
def test_a_function_of_the_user_makes_the_average(tmp_path: Path, kind: str) -> None:
    function = get_ema_avg_fn(0.7) if kind == "avg_fn" else get_ema_multi_avg_fn(0.7)
    module, record = Net(), Recorder()
    trainer(tmp_path, record, WeightAveraging(**{kind: function}), max_epochs=2).fit(module, loader())
    assert_close(module, fold(record.steps, 0.7))


@pytest.mark.parametrize(
    ("kwargs", "taken"),
    [
        ({"update_every_n_steps": 4}, [0, 4, 8, 12]),
        ({"update_starting_at_step": 7}, list(range(7, 15))),
        ({"update_starting_at_step": 6, "update_every_n_steps": 5}, [6, 11]),
        ({"update_starting_at_epoch": 1, "update_every_n_steps": 6}, [0, 6, 9, 12, 14]),
        ({"update_starting_at_epoch": 2, "update_starting_at_step": 13}, [13, 14, 14]),
    ],
)
def test_ema_takes_the_steps_it_is_told_to(tmp_path: Path, kwargs: dict[str, int], taken: list[int]) -> None:
    module, record, ema = Net(), Recorder(), EMAWeightAveraging(decay=0.6, **kwargs)  # type: ignore[arg-type]
    trainer(tmp_path, record, ema, max_epochs=3).fit(module, loader())
    assert ema.n_averaged == len(taken)
    assert_close(module, fold([record.steps[i] for i in taken], 0.6))


def test_an_average_of_epochs_follows_should_update(tmp_path: Path) -> None:
    class EveryEpoch(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None and epoch_idx >= 1

    module, record, average = Net(), Recorder(), EveryEpoch()
    trainer(tmp_path, record, average, max_epochs=4).fit(module, loader())
    ends = [record.steps[i] for i in (9, 14, 19)]
    assert average.n_averaged == 3
    assert_close(module, {n: torch.stack([s[n] for s in ends]).mean(0) for n in ends[0]})


def test_a_skipped_step_updates_nothing(tmp_path: Path) -> None:
    class SkipsEverySecond(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    record, ema = Recorder(), EMAWeightAveraging(decay=0.8)
    module = SkipsEverySecond()
    trainer(tmp_path, record, ema, max_epochs=2).fit(module, loader())
    assert ema.n_averaged == len(record.steps) == 6
    assert_close(module, fold(record.steps, 0.8))


def test_two_optimizers_in_a_batch_make_one_update(tmp_path: Path) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.net[0].parameters(), lr=0.1),
                torch.optim.SGD(self.net[3].parameters(), lr=0.1),
            ]

    every, second = EMAWeightAveraging(), EMAWeightAveraging(update_every_n_steps=2)
    run = trainer(tmp_path, every, max_epochs=1)
    run.fit(Manual(), loader())
    assert run.global_step == 10
    assert every.n_averaged == 5
    trainer(tmp_path, second, max_epochs=1).fit(Manual(), loader())
    assert second.n_averaged == 5


# ---- where a fit uses it ---------------------------------------------------------------------------------------------


def test_validation_runs_with_the_average_and_training_goes_on_as_without(tmp_path: Path) -> None:
    plain, module = Net(), Net()
    alone, record = Recorder(), Recorder()
    trainer(tmp_path, alone, max_epochs=3).fit(plain, loader(), loader())
    ema = EMAWeightAveraging(decay=0.8)
    trainer(tmp_path, record, ema, max_epochs=3, val_check_interval=2).fit(module, loader(), loader())
    for mine, theirs in zip(record.steps, alone.steps, strict=True):
        assert_same(mine, theirs)
    assert len(module.validated) == 6
    for epoch in range(3):
        for nth, batches in enumerate((2, 4)):
            expected = fold(record.steps[: epoch * 5 + batches], 0.8)["net.0.weight"]
            torch.testing.assert_close(module.validated[2 * epoch + nth].double(), expected, rtol=1e-5, atol=1e-7)


def test_before_its_first_update_validation_uses_the_weights_themselves(tmp_path: Path) -> None:
    module, record = Net(), Recorder()
    ema = EMAWeightAveraging(update_starting_at_step=5)
    trainer(tmp_path, record, ema, max_epochs=2).fit(module, loader(), loader())
    assert torch.equal(module.validated[0].double(), record.steps[4]["net.0.weight"])


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt])
def test_an_exception_in_validation_gives_the_training_weights_back(
    tmp_path: Path, exception: type[BaseException]
) -> None:
    class Fails(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            raise exception("on purpose")

    module, record = Fails(), Recorder()
    with pytest.raises(exception, match="on purpose"):
        trainer(tmp_path, record, EMAWeightAveraging(decay=0.5), max_epochs=1).fit(module, loader(), loader())
    assert len(module.validated) == 1
    assert not torch.equal(module.validated[0].double(), record.steps[-1]["net.0.weight"])
    assert_same({n: p.detach().double() for n, p in module.named_parameters()}, record.steps[-1])


def test_validating_after_an_exception_uses_the_weights_in_the_module(tmp_path: Path) -> None:
    class Fails(Net):
        def on_train_epoch_end(self) -> None:
            raise ValueError("on purpose")

    module, record = Fails(), Recorder()
    run = trainer(tmp_path, record, EMAWeightAveraging(decay=0.5), max_epochs=1)
    with pytest.raises(ValueError, match="on purpose"):
        run.fit(module, loader())
    run.validate(module, loader(), verbose=False)
    assert torch.equal(module.validated[-1].double(), record.steps[-1]["net.0.weight"])


def test_an_exception_in_a_hook_of_the_callback_after_it_gives_the_training_weights_back(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            raise ValueError("on purpose")

    module, record = Net(), Recorder()
    with pytest.raises(ValueError, match="on purpose"):
        trainer(tmp_path, record, EMAWeightAveraging(decay=0.5), Fails(), max_epochs=1).fit(module, loader(), loader())
    assert_same({n: p.detach().double() for n, p in module.named_parameters()}, record.steps[-1])


def test_after_the_fit_test_runs_with_the_average(tmp_path: Path) -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.tested = self.net[0].weight.detach().clone()

    module, record = Tested(), Recorder()
    run = trainer(tmp_path, record, EMAWeightAveraging(decay=0.8), max_epochs=2)
    run.fit(module, loader())
    run.test(module, loader(), verbose=False)
    expected = fold(record.steps, 0.8)["net.0.weight"]
    torch.testing.assert_close(module.tested.double(), expected, rtol=1e-5, atol=1e-7)
    run.validate(module, loader(), verbose=False)
    assert torch.equal(module.validated[-1], module.tested)


def test_batch_norm_statistics_are_averaged_and_its_counter_is_not(tmp_path: Path) -> None:
    module, seen = Net(), []

    class Statistics(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(pl_module.net[1].running_mean.double().clone())

    trainer(tmp_path, Statistics(), EMAWeightAveraging(decay=0.8), max_epochs=2).fit(module, loader())
    expected = fold([{"m": s} for s in seen], 0.8)["m"]
    torch.testing.assert_close(module.net[1].running_mean.double(), expected, rtol=1e-5, atol=1e-7)
    assert module.net[1].num_batches_tracked == 10


def test_without_buffers_batch_norm_statistics_are_those_of_the_training(tmp_path: Path) -> None:
    plain, module = Net(), Net()
    trainer(tmp_path, max_epochs=2).fit(plain, loader())
    trainer(tmp_path, EMAWeightAveraging(use_buffers=False), max_epochs=2).fit(module, loader())
    assert torch.equal(module.net[1].running_mean, plain.net[1].running_mean)
    assert not torch.equal(module.net[1].weight, plain.net[1].weight)


def test_a_module_that_cannot_be_copied_can_be_averaged(tmp_path: Path) -> None:
    class Locked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    module, record = Locked(), Recorder()
    trainer(tmp_path, record, EMAWeightAveraging(decay=0.8), max_epochs=1).fit(module, loader())
    assert_close(module, fold(record.steps, 0.8))


def test_an_average_that_never_started_is_told(tmp_path: Path) -> None:
    module, record = Net(), Recorder()
    with pytest.warns(PacelineWarning, match=r"never updated its average in 5 steps.*keeps its last weights.*earlier"):
        trainer(tmp_path, record, EMAWeightAveraging(update_starting_at_step=99), max_epochs=1).fit(module, loader())
    assert_same({n: p.detach().double() for n, p in module.named_parameters()}, record.steps[-1])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class SaveAt(Callback):
    """Saves when the given epoch ends, or its validation does, before other callbacks act."""

    def __init__(self, epoch: int, path: Path, hook: str = "on_train_epoch_end") -> None:
        self.epoch = epoch
        self.path = path
        self.monitors_metrics = True
        setattr(self, hook, self.save)

    def save(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_holds_the_average_and_the_training_weights_beside_it(tmp_path: Path) -> None:
    module, record, path = Net(), Recorder(), tmp_path / "a.ckpt"
    save = SaveAt(1, path)
    trainer(tmp_path, record, EMAWeightAveraging(decay=0.8), save, max_epochs=3).fit(module, loader())
    checkpoint = torch.load(path, weights_only=True)
    expected = fold(record.steps[:10], 0.8)
    for name, value in expected.items():
        torch.testing.assert_close(checkpoint["state_dict"][name].double(), value, rtol=1e-5, atol=1e-7)
        assert torch.equal(checkpoint[CURRENT_KEY][name].double(), record.steps[9][name])
    assert checkpoint["state_dict"].keys() == checkpoint[CURRENT_KEY].keys() == module.state_dict().keys()
    fresh = Net.load_from_checkpoint(path)
    assert_close(fresh, expected)


def test_a_checkpoint_of_weights_only_holds_the_average(tmp_path: Path) -> None:
    module, path = Net(), tmp_path / "w.ckpt"

    class SaveWeights(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.current = weights(pl_module)
            trainer.save_checkpoint(path, weights_only=True)

    save = SaveWeights()
    trainer(tmp_path, EMAWeightAveraging(decay=0.8), save, max_epochs=1).fit(module, loader())
    saved = torch.load(path, weights_only=True)
    assert not torch.equal(saved["state_dict"]["net.0.weight"], save.current["net.0.weight"])
    assert torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight.detach())
    assert CURRENT_KEY not in saved


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end", "on_validation_start"])
@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_continues_weights_and_average_to_the_bit(tmp_path: Path, hook: str, first: bool) -> None:
    path = tmp_path / "r.ckpt"

    def run(epochs: int, ckpt_path: Path | None = None) -> tuple[Net, dict[str, Any]]:
        module, ema, save = Net(), EMAWeightAveraging(decay=0.8, update_every_n_steps=2), SaveAt(1, path, hook)
        callbacks = [ema, save] if not first or hook == "on_train_epoch_end" else [save, ema]
        fit = trainer(tmp_path, *callbacks, max_epochs=epochs)
        torch.manual_seed(3)
        fit.fit(module, loader(shuffle=True), loader(), ckpt_path=ckpt_path)
        fit.save_checkpoint(tmp_path / "end.ckpt")
        return module, torch.load(tmp_path / "end.ckpt", weights_only=True)

    whole, whole_end = run(4)
    resumed, resumed_end = run(4, path)
    assert_same(weights(resumed), weights(whole))
    assert_same(resumed_end["state_dict"], whole_end["state_dict"])
    assert_same(resumed_end[CURRENT_KEY], whole_end[CURRENT_KEY])
    assert not torch.equal(whole_end[CURRENT_KEY]["net.0.weight"], whole_end["state_dict"]["net.0.weight"])


def test_a_run_saved_after_its_end_can_be_prolonged_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    whole, half, prolonged = Net(), Net(), Net()
    torch.manual_seed(3)
    trainer(tmp_path, EMAWeightAveraging(decay=0.8), max_epochs=4).fit(whole, loader(shuffle=True))
    torch.manual_seed(3)
    run = trainer(tmp_path, EMAWeightAveraging(decay=0.8), max_epochs=2)
    run.fit(half, loader(shuffle=True))
    run.save_checkpoint(path)
    trainer(tmp_path, EMAWeightAveraging(decay=0.8), max_epochs=4).fit(prolonged, loader(shuffle=True), ckpt_path=path)
    assert_same(weights(prolonged), weights(whole))


def test_what_is_changed_after_the_fit_is_what_is_saved(tmp_path: Path) -> None:
    module, path = Net(), tmp_path / "end.ckpt"
    run = trainer(tmp_path, EMAWeightAveraging(), max_epochs=1)
    run.fit(module, loader())
    nn.init.zeros_(module.net[3].weight)
    run.save_checkpoint(path)
    assert_same(torch.load(path, weights_only=True)["state_dict"], dict(module.state_dict()))


class SaveEarly(Callback):
    """Saves in the same hook in which an average is updated, ahead of it, when a batch or an epoch has been trained."""

    def __init__(self, path: Path, hook: str, batches: int) -> None:
        self.path = path
        self.batches = batches
        setattr(self, hook, self.save)

    def save(self, trainer: Any, pl_module: Any, outputs: Any = None, batch: Any = None, batch_idx: int = 0) -> None:
        if trainer.state.batches == self.batches:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("hook", "batches"), [("on_train_batch_end", 10), ("on_train_epoch_end", 10)])
def test_an_update_that_was_due_when_a_callback_saved_is_made_after_the_resume(
    tmp_path: Path, hook: str, batches: int
) -> None:
    class StepsAndEpochs(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return True

    def run(ckpt_path: Path | None = None) -> dict[str, Any]:
        save = SaveEarly(tmp_path / "r.ckpt", hook, batches)
        fit = trainer(tmp_path, save, StepsAndEpochs(), max_epochs=3)
        fit.fit(Net(), loader(), ckpt_path=ckpt_path)
        fit.save_checkpoint(tmp_path / "end.ckpt")
        return torch.load(tmp_path / "end.ckpt", weights_only=True)

    whole, resumed = run(), run(tmp_path / "r.ckpt")
    assert whole["callbacks"][StepsAndEpochs.__qualname__]["n_averaged"] == 15 + 3
    assert_same(resumed["state_dict"], whole["state_dict"])
    assert_same(resumed[CURRENT_KEY], whole[CURRENT_KEY])


def test_resuming_a_finished_run_leaves_the_average_in_the_module(tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    first, second = Net(), Net()
    run = trainer(tmp_path, EMAWeightAveraging(decay=0.8), max_epochs=2)
    run.fit(first, loader())
    run.save_checkpoint(path)
    trainer(tmp_path, EMAWeightAveraging(decay=0.8), max_epochs=2).fit(second, loader(), ckpt_path=path)
    assert_same(weights(second), weights(first))


def test_a_checkpoint_without_average_starts_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    path = tmp_path / "plain.ckpt"
    trainer(tmp_path, SaveAt(0, path), max_epochs=1).fit(Net(), loader())
    module, record, ema = Net(), Recorder(), EMAWeightAveraging(decay=0.8)
    record.steps = [{} for _ in range(5)]
    trainer(tmp_path, record, ema, max_epochs=2).fit(module, loader(), ckpt_path=path)
    assert "contains no average from EMAWeightAveraging" in caplog.text
    assert ema.n_averaged == 5
    assert_close(module, fold(record.steps[5:], 0.8))


def test_evaluating_a_checkpoint_uses_the_average_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    ema = EMAWeightAveraging(decay=0.8)
    trainer(tmp_path, ema, SaveAt(1, path), max_epochs=2).fit(Net(), loader())
    module = Net()
    trainer(tmp_path, EMAWeightAveraging(decay=0.8), max_epochs=1).validate(
        module, loader(), ckpt_path=path, verbose=False
    )
    saved = torch.load(path, weights_only=True)["state_dict"]["net.0.weight"]
    assert torch.equal(module.validated[0], saved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_on_a_gpu_does_not_wait_for_the_device() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8).half()).cuda()
    for function in (get_ema_multi_avg_fn(0.9), equal_weights):
        average = WeightAverage(module, function)
        average.update()
        torch.cuda.set_sync_debug_mode("error")
        try:
            average.update()
            average.show()
            average.hide()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_sharded_parameters_and_plain_buffers_are_averaged_as_on_replicas() -> None:
    def averaged(strategy: str) -> dict[str, Tensor]:
        average = EMAWeightAveraging(decay=0.5)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
        trainer = Trainer(**quiet, enable_model_summary=False, accelerator="cpu", strategy=strategy, max_epochs=2)
        trainer.callbacks.append(average)
        module = Net()
        trainer.fit(module, loader)
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in module.state_dict().items()
        }

    replicas, shards = ranks(2, averaged, "ddp")[0], ranks(2, averaged, "fsdp")[0]
    for name, value in replicas.items():
        torch.testing.assert_close(shards[name], value, msg=name)
