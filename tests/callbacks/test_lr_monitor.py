from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import EarlyStopping, LearningRateMonitor
from paceline.loggers import Logger


class Recorder(Logger):
    """Keeps what it is sent: (step, metrics)."""

    name = "recorder"
    version = 0

    def __init__(self) -> None:
        self.sent: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        return None

    def of(self, key: str) -> list[tuple[int | None, float]]:
        return [(step, metrics[key]) for step, metrics in self.sent if key in metrics]

    def keys(self, part: str = "lr-") -> set[str]:
        return {key for _, metrics in self.sent for key in metrics if part in key}


class Optimized(TinyModule):
    """Optimized by what ``make(module)`` returns."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


class Manual(Optimized):
    """Steps every optimizer in every batch."""

    def __init__(self, make: Any, times: int = 1) -> None:
        super().__init__(make)
        self.automatic_optimization = False
        self.times = times

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            for _ in range(self.times):
                self.manual_backward(self.loss(batch))
                optimizer.step()
                optimizer.zero_grad()


def run(monitor: LearningRateMonitor, module: Any, **more: Any) -> Recorder:
    recorder = Recorder()
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "logger": recorder, "accelerator": "cpu", **more}
    trainer = Trainer(
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, tiny_loader(4))
    return recorder


def sgd(module: Any, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=1.0, **more)


def halving(module: Any, interval: str = "step", **more: Any) -> Any:
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, **more}}


def test_the_rate_that_each_step_uses_is_logged_at_that_step() -> None:
    used: list[tuple[int, float]] = []

    class Looks(Optimized):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            used.append((len(used) + 1, optimizer.param_groups[0]["lr"]))

    recorder = run(LearningRateMonitor("step"), Looks(halving))
    assert recorder.of("lr-SGD") == used == [(n + 1, 0.5**n) for n in range(8)]


def test_rates_stand_at_the_same_steps_as_the_step_metrics() -> None:
    recorder = run(LearningRateMonitor("step"), Optimized(halving), log_every_n_steps=3)
    steps = [step for step, _ in recorder.of("train_loss")]
    assert steps == [3, 6]
    assert recorder.of("lr-SGD") == [(3, 0.25), (6, 0.5**5)]


def test_every_interval_none_takes_the_schedulers_own() -> None:
    by_step = run(LearningRateMonitor(), Optimized(halving), max_epochs=1)
    assert len(by_step.of("lr-SGD")) == 4
    by_epoch = run(LearningRateMonitor(), Optimized(lambda module: halving(module, "epoch")), max_epochs=3)
    assert by_epoch.of("lr-SGD") == [(0, 1.0), (4, 0.5), (8, 0.25)]


def test_interval_epoch_logs_once_an_epoch_and_defines_no_step_hook() -> None:
    monitor = LearningRateMonitor("epoch")
    recorder = run(monitor, Optimized(halving))
    assert recorder.of("lr-SGD") == [(0, 1.0), (4, 0.5**4)]
    assert monitor.on_before_optimizer_step is None


def test_an_optimizer_without_scheduler_is_logged_too() -> None:
    assert run(LearningRateMonitor(), Optimized(sgd), max_epochs=1).of("lr-SGD") == [(n, 1.0) for n in (1, 2, 3, 4)]


def test_while_accumulating_each_update_is_logged_once() -> None:
    recorder = run(LearningRateMonitor("step"), Optimized(sgd), accumulate_grad_batches=3, max_epochs=1)
    assert recorder.of("lr-SGD") == [(1, 1.0), (2, 1.0)]


def test_two_optimizers_of_a_class_are_told_apart_by_a_number() -> None:
    def two(module: Any) -> Any:
        return [sgd(module), torch.optim.SGD(module.parameters(), lr=0.5), torch.optim.Adam(module.parameters())]

    recorder = run(LearningRateMonitor(), Manual(two), max_epochs=1)
    assert recorder.keys() == {"lr-SGD", "lr-SGD-1", "lr-Adam"}
    assert recorder.of("lr-SGD-1")[0][1] == 0.5


def test_optimizers_that_are_stepped_together_are_logged_each_at_its_interval() -> None:
    def two(module: Any) -> Any:
        one, other = torch.optim.SGD([module.layer.weight], lr=0.5), torch.optim.Adam([module.layer.bias], lr=0.1)
        return [one, other], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(one, 1, 0.5), "interval": "step"},
            torch.optim.lr_scheduler.StepLR(other, 1, 0.5),
        ]

    recorder = run(LearningRateMonitor(), Optimized(two), max_epochs=2)
    assert recorder.of("lr-SGD") == [(step, 0.5**step) for step in range(1, 9)]
    assert recorder.of("lr-Adam") == [(0, 0.1), (4, 0.05)]


def test_an_optimizer_that_steps_several_times_in_a_batch_is_logged_once_an_update() -> None:
    recorder = run(LearningRateMonitor("step"), Manual(sgd, times=3), max_epochs=1)
    steps = [step for step, _ in recorder.of("lr-SGD")]
    assert steps == [1, 2, 3, 4]


def groups(module: Any, *names: str | None) -> Any:
    parameters = [module.layer.weight, module.layer.bias]
    of_groups = [
        {"params": [parameter], "lr": lr, **({} if name is None else {"name": name})}
        for parameter, lr, name in zip(parameters, (0.5, 0.25), names, strict=True)
    ]
    return torch.optim.SGD(of_groups, lr=1.0)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ((None, None), {"lr-SGD/pg1", "lr-SGD/pg2"}),
        (("weight", None), {"lr-SGD/weight", "lr-SGD/pg2"}),
        (("weight", "bias"), {"lr-SGD/weight", "lr-SGD/bias"}),
    ],
)
def test_parameter_groups_are_named(names: Any, keys: set[str]) -> None:
    recorder = run(LearningRateMonitor(), Optimized(lambda module: groups(module, *names)), max_epochs=1)
    assert recorder.keys() == keys


def test_two_groups_of_one_name_are_refused_when_training_starts() -> None:
    with pytest.raises(
        ValueError, match=r"Two parameter groups of SGD have the same name \(a, a\).*Give each group a different"
    ):
        run(LearningRateMonitor(), Optimized(lambda module: groups(module, "a", "a")))


def test_a_group_that_joins_during_the_run_is_logged_from_then_on() -> None:
    class Grows(Optimized):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.optimizers().optimizer.add_param_group({"params": [self.extra], "lr": 0.125})

        def __init__(self, make: Any) -> None:
            super().__init__(make)
            self.extra = torch.nn.Parameter(torch.zeros(1))

    recorder = run(
        LearningRateMonitor("step"), Grows(lambda module: torch.optim.SGD(module.layer.parameters(), lr=1.0))
    )
    assert len(recorder.of("lr-SGD")) == 4
    assert recorder.of("lr-SGD/pg2") == [(n, 0.125) for n in (5, 6, 7, 8)]


def test_the_name_of_a_scheduler_and_the_prefix_make_the_key() -> None:
    make = lambda module: halving(module, name="warmup")  # noqa: E731
    recorder = run(LearningRateMonitor(log_key_prefix="optim/"), Optimized(make), max_epochs=1)
    assert recorder.keys("optim/") == {"optim/warmup"}


def test_momentum_and_weight_decay_are_logged_on_request() -> None:
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    recorder = run(monitor, Optimized(lambda m: sgd(m, momentum=0.9, weight_decay=0.01)), max_epochs=1)
    assert recorder.of("lr-SGD-momentum")[0] == (1, 0.9)
    assert recorder.of("lr-SGD-weight_decay")[0] == (1, 0.01)
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.01}
    adam = run(monitor, Optimized(lambda m: torch.optim.Adam(m.parameters(), betas=(0.8, 0.99))), max_epochs=1)
    assert adam.of("lr-Adam-momentum")[0] == (1, 0.8)
    assert run(LearningRateMonitor(), Optimized(sgd), max_epochs=1).keys("lr-SGD-") == set()


def test_the_rates_of_the_run_are_kept() -> None:
    monitor = LearningRateMonitor("step")
    run(monitor, Optimized(halving), max_epochs=1)
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5, 0.25, 0.125]}
    run(monitor, Optimized(sgd), max_epochs=1)
    assert monitor.lrs == {"lr-SGD": [1.0] * 4}


def test_a_rate_kept_as_a_tensor_is_logged_as_a_number() -> None:
    make = lambda module: torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5))  # noqa: E731
    ((step, value), *_) = run(LearningRateMonitor(), Optimized(make), max_epochs=1).of("lr-SGD")
    assert (step, value, type(value)) == (1, 0.5, float)


def test_without_a_logger_training_does_not_start() -> None:
    with pytest.raises(RuntimeError, match=r"LearningRateMonitor has nowhere.*logger=False.*Pass a logger"):
        run(LearningRateMonitor(), Optimized(sgd), logger=False)


def test_a_module_without_optimizer_is_warned_about() -> None:
    class None_(TinyModule):  # noqa: N801
        def configure_optimizers(self) -> Any:
            return None

    with pytest.warns(UserWarning, match="LearningRateMonitor has nothing to log, because None_ has no optimizer"):
        run(LearningRateMonitor(), None_())


@pytest.mark.parametrize("interval", ["steps", "batch", 1])
def test_an_unknown_interval_is_refused_with_the_known_ones(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"Unknown logging_interval.*'step' or 'epoch'.*None"):
        LearningRateMonitor(logging_interval=interval)


def test_a_rate_can_be_monitored_and_names_have_the_prefix_everywhere() -> None:
    monitor = LearningRateMonitor(log_key_prefix="opt/", log_momentum=True, log_weight_decay=True)
    assert LearningRateMonitor(log_key_prefix=None).log_key_prefix == ""
    module = Optimized(lambda module: sgd(module, momentum=0.9))
    trainer = Trainer(
        callbacks=[monitor, stopping := EarlyStopping("opt/lr-SGD", patience=1)],
        max_epochs=5,
        log_every_n_steps=1,
        logger=Recorder(),
        accelerator="cpu",
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, tiny_loader(2))
    assert (stopping.best_score, trainer.current_epoch) == (1.0, 2)
    assert monitor.lrs == {"opt/lr-SGD": [1.0] * 4}
    assert monitor.last_momentum_values == {"opt/lr-SGD-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"opt/lr-SGD-weight_decay": 0.0}


def test_momentum_is_0_without_one_and_a_warning_says_so() -> None:
    monitor = LearningRateMonitor(log_momentum=True)
    with pytest.warns(RuntimeWarning, match="logs 0, because no optimizer uses momentum"):
        recorder = run(monitor, Optimized(lambda module: torch.optim.Adagrad(module.parameters())), max_epochs=1)
    assert {value for _, value in recorder.of("lr-Adagrad-momentum")} == {0.0}
    assert monitor.last_weight_decay_values == {"lr-Adagrad-weight_decay": None}


def test_the_rates_of_an_optimizer_that_gets_a_second_group_continue_under_its_new_name() -> None:
    class Grows(Optimized):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                extra = torch.nn.Parameter(torch.zeros(1))
                self.optimizers(use_pl_optimizer=False).add_param_group({"params": [extra], "lr": 0.5})

    monitor = LearningRateMonitor("step")
    run(monitor, Grows(sgd), max_epochs=2)
    assert monitor.lrs == {"lr-SGD/pg1": [1.0] * 8, "lr-SGD/pg2": [0.5] * 4}
