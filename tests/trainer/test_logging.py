"""``self.log``: what is kept, reduced, shown and sent, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Callback, Trainer, TrainingModule
from paceline.loggers import Logger


class Memory(Logger):
    """Keeps what it gets."""

    name = "memory"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        return None

    def of(self, name: str) -> list[tuple[int | None, float]]:
        """(step, value) of one name."""
        return [(step, row[name]) for step, row in self.rows if name in row]


class Values(TrainingModule):
    """Takes batches of numbers; ``log_in`` says what each hook logs."""

    def __init__(self, **log_in: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.log_in = log_in
        for name in log_in:
            if not name.endswith("_step"):
                setattr(self, name, lambda *a, name=name: self.log_in[name](self, *a))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if "training_step" in self.log_in:
            self.log_in["training_step"](self, batch)
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if "validation_step" in self.log_in:
            self.log_in["validation_step"](self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*sizes: int) -> list[torch.Tensor]:
    """Batches of consecutive numbers: 0..n-1 cut into the given sizes."""
    return list(torch.arange(float(sum(sizes))).split(list(sizes)))


def fit(module: Values, train: Any, val: Any = None, quiet: Any = None, **arguments: Any) -> tuple[Trainer, Memory]:
    memory = Memory()
    trainer = Trainer(**{"max_epochs": 1, "log_every_n_steps": 1, **quiet, "logger": memory, **arguments})
    trainer.fit(module, train, val)
    return trainer, memory


def test_a_training_step_logs_its_own_value_every_n_updates(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean()))
    trainer, memory = fit(module, batches(1, 1, 1, 1, 1), quiet=quiet, log_every_n_steps=2)
    assert memory.of("v") == [(2, 1.0), (4, 3.0)]
    assert trainer.callback_metrics == {"v": torch.tensor(4.0)}


def test_the_epoch_mean_weighs_by_batch_size(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean(), on_step=False, on_epoch=True))
    trainer, memory = fit(module, batches(4, 4, 1), quiet=quiet)
    assert trainer.callback_metrics["v"] == 4.0
    assert memory.of("v") == [(3, 4.0)]


def test_a_given_batch_size_wins(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean(), on_epoch=True, on_step=False, batch_size=1))
    assert fit(module, batches(3, 1), quiet=quiet)[0].callback_metrics["v"] == 2.0


def test_step_and_epoch_get_suffixes_and_the_plain_name_stays_for_callbacks(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean(), on_step=True, on_epoch=True, prog_bar=True))
    trainer, memory = fit(module, batches(1, 1), quiet=quiet)
    assert {k: float(v) for k, v in trainer.callback_metrics.items()} == {"v_step": 1.0, "v_epoch": 0.5, "v": 0.5}
    assert memory.of("v_step") == [(1, 0.0), (2, 1.0)]
    assert memory.of("v_epoch") == [(2, 0.5)]
    assert memory.of("v") == []
    assert trainer.progress_bar_metrics == {"v_step": 1.0, "v_epoch": 0.5}


@pytest.mark.parametrize(("fx", "value"), [("sum", 10.0), ("min", 0.0), ("max", 4.0), (torch.max, 4.0), ("mean", 2.0)])
def test_other_reductions(fx: Any, value: float, quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean(), on_epoch=True, on_step=False, reduce_fx=fx))
    assert fit(module, batches(1, 1, 1, 1, 1), quiet=quiet)[0].callback_metrics["v"] == value


def test_each_epoch_starts_over(quiet: dict[str, Any]) -> None:
    module = Values(
        training_step=lambda m, b: m.log("v", b.mean() + m.current_epoch * 10, on_epoch=True, on_step=False)
    )
    _, memory = fit(module, batches(1, 1), quiet=quiet, max_epochs=3)
    assert [value for _, value in memory.of("v")] == [0.5, 10.5, 20.5]
    assert [row["epoch"] for _, row in memory.rows] == [0, 1, 2]


def test_validation_keeps_the_mean_and_logs_it_at_the_training_step(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("val", b.mean()))
    _, memory = fit(module, batches(1, 1, 1, 1), batches(3, 1), quiet=quiet, val_check_interval=2)
    assert memory.of("val") == [(2, 1.5), (4, 1.5)]


def test_several_validations_leave_the_training_mean_alone(quiet: dict[str, Any]) -> None:
    module = Values(
        training_step=lambda m, b: m.log("v", b.mean(), on_epoch=True, on_step=False),
        validation_step=lambda m, b: m.log("v_val", b.mean()),
    )
    trainer, _ = fit(module, batches(1, 1, 1, 1), batches(1), quiet=quiet, val_check_interval=1)
    assert trainer.callback_metrics["v"] == 1.5


def test_the_sanity_check_leaves_no_trace(quiet: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []
    module = Values(
        validation_step=lambda m, b: m.log("val", b.mean()),
        on_train_start=lambda m: seen.append(m.trainer.callback_metrics),
    )
    _, memory = fit(module, batches(1), batches(1), quiet=quiet)
    assert seen == [{}]
    assert len(memory.of("val")) == 1


def test_several_loaders_get_an_index_each(quiet: dict[str, Any]) -> None:
    class Module(Values):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("v", batch.mean())
            self.log("all", batch.mean(), add_dataloader_idx=False) if dataloader_idx == 1 else None

    trainer = Trainer(**quiet)
    results = trainer.validate(Module(), [DataLoaderLike(batches(2)), DataLoaderLike(batches(4))], verbose=False)
    assert results == [{"v/dataloader_idx_0": 0.5}, {"v/dataloader_idx_1": 1.5, "all": 1.5}]


class DataLoaderLike:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        return iter(self.items)


def test_epoch_values_can_be_read_where_they_are_logged_and_by_monitors(quiet: dict[str, Any]) -> None:
    read: dict[str, float] = {}

    class Monitor(Callback):
        monitors_metrics = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            read.update({f"monitor {k}": float(v) for k, v in trainer.callback_metrics.items()})

    def at_the_end(module: Values) -> None:
        read.update({k: float(v) for k, v in module.trainer.callback_metrics.items()})
        module.log("late", 7.0)

    module = Values(
        training_step=lambda m, b: m.log("v", b.mean(), on_epoch=True, on_step=False), on_train_epoch_end=at_the_end
    )
    fit(module, batches(1, 1), quiet=quiet, callbacks=[Monitor()])
    assert read == {"v": 0.5, "monitor v": 0.5, "monitor late": 7.0}


def test_training_values_can_be_monitored_in_a_validation_in_mid_epoch(quiet: dict[str, Any]) -> None:
    seen: list[float] = []
    module = Values(
        training_step=lambda m, b: m.log("v", b.mean()),
        on_validation_end=lambda m: seen.append(float(m.trainer.callback_metrics["v"])),
    )
    fit(module, batches(1, 1, 1, 1), batches(1), quiet=quiet, val_check_interval=2, num_sanity_val_steps=0)
    assert seen == [1.0, 3.0]


def test_a_metric_object_is_computed_and_reset_each_epoch(quiet: dict[str, Any]) -> None:
    import torchmetrics

    class Module(Values):
        def __init__(self) -> None:
            super().__init__()
            self.train_mean = torchmetrics.MeanMetric()
            self.val_max = torchmetrics.MaxMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.train_mean.update(batch + 10 * self.current_epoch)
            self.log("mean", self.train_mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.val_max(batch - self.current_epoch)
            self.log("max", self.val_max)

    module = Module()
    _, memory = fit(module, batches(2, 1), batches(3, 2), quiet=quiet, max_epochs=2)
    assert [v for _, v in memory.of("mean")] == [1.0, 11.0]
    assert [v for _, v in memory.of("max")] == [4.0, 3.0]
    assert module.train_mean.update_count == 0


def test_a_metric_logged_per_step_gives_the_batch_value(quiet: dict[str, Any]) -> None:
    import torchmetrics

    class Module(Values):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(batch)
            self.log("m", self.mean, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, memory = fit(Module(), batches(1, 1, 1), quiet=quiet)
    assert memory.of("m_step") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert memory.of("m_epoch") == [(3, 1.0)]


def test_a_collection_with_compute_groups_equals_its_parts(quiet: dict[str, Any]) -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryPrecision, BinaryRecall

    class Module(Values):
        def __init__(self) -> None:
            super().__init__()
            self.both = MetricCollection({"p": BinaryPrecision(), "r": BinaryRecall()})

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.both.update(*batch)
            self.log_dict(self.both)

    data = [(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 1])), (torch.tensor([1, 0]), torch.tensor([1, 1]))]
    results = Trainer(**quiet).validate(Module(), DataLoaderLike(data), verbose=False)
    assert results == [{"p": pytest.approx(2 / 3), "r": pytest.approx(0.5)}]


def test_values_are_detached_and_nothing_of_the_graph_stays(quiet: dict[str, Any]) -> None:
    class Module(Values):
        graphs: tuple[Any, ...] = ()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("v", loss, on_step=True, on_epoch=True)
            self.graphs += (weakref.ref(loss),)
            return loss

        def on_train_epoch_end(self) -> None:
            gc.collect()
            assert [g() for g in self.graphs[:-1]] == [None] * (len(self.graphs) - 1)
            assert not self.trainer.callback_metrics["v"].requires_grad

    fit(Module(), batches(1, 1, 1), quiet=quiet)


def test_a_million_small_terms_keep_their_digits(quiet: dict[str, Any]) -> None:
    from paceline.strategies import SingleDevice
    from paceline.trainer.phases import EVAL_BATCH
    from paceline.trainer.records import MeanRecord, Options
    from paceline.trainer.records import make_record as make

    options = Options(False, None, None, None, "mean", False, False, None, True, None, False)
    record = make("v", torch.tensor(0.1), options, EVAL_BATCH, "a test", None, lambda name: 1)
    assert isinstance(record, MeanRecord)
    value = torch.tensor(0.1)
    for _ in range(200_000):
        record.update(value, 5)
    assert float(record.compute(SingleDevice())) == pytest.approx(float(value), rel=1e-7)


def test_bfloat16_values_are_kept_with_full_sums(quiet: dict[str, Any]) -> None:
    module = Values(
        training_step=lambda m, b: m.log("v", torch.tensor(1.0078125).bfloat16(), on_epoch=True, on_step=False)
    )
    trainer, _ = fit(module, batches(*[1] * 300), quiet=quiet)
    assert trainer.callback_metrics["v"] == torch.tensor(1.0078125)
    assert trainer.callback_metrics["v"].dtype == torch.float32


def test_two_loaders_may_not_log_under_one_key(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean(), add_dataloader_idx=False))
    loaders = [DataLoaderLike(batches(2)), DataLoaderLike(batches(4))]
    with pytest.raises(ValueError, match=r"called for the loaders 0 and 1; one value would replace the other"):
        Trainer(**quiet).validate(module, loaders, verbose=False)


def test_suffixes_of_step_and_loader_stand_in_lightnings_order(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean(), on_step=True, on_epoch=True))
    trainer = Trainer(**quiet)
    trainer.validate(module, [DataLoaderLike(batches(2)), DataLoaderLike(batches(4))], verbose=False)
    assert {"v_step/dataloader_idx_0", "v_epoch/dataloader_idx_1"} <= set(trainer.callback_metrics)


def test_the_sanity_check_sends_nothing(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean(), on_step=True))
    _, memory = fit(module, batches(1), batches(1), quiet=quiet)
    assert memory.of("v_step") == [(0, 0.0)]


def test_enable_graph_keeps_the_graph_of_the_last_value(quiet: dict[str, Any]) -> None:
    seen: list[bool] = []

    class Module(Values):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("v", loss, on_step=True, on_epoch=True, enable_graph=True)
            seen.append(self.trainer.callback_metrics["v_step"].requires_grad)
            return loss

    fit(Module(), batches(1), quiet=quiet)
    assert seen == [True]


def test_a_key_named_step_is_the_x_axis(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log_dict({"v": b.mean(), "step": 100.0 + b.mean()}))
    assert fit(module, batches(1, 1), quiet=quiet)[1].of("v") == [(100, 0.0), (101, 1.0)]


def test_evaluation_steps_count_on_their_own(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean(), on_step=True, on_epoch=False))
    _, memory = fit(module, batches(1), batches(1, 1), quiet=quiet, max_epochs=2, num_sanity_val_steps=0)
    assert memory.of("v") == [(0, 0.0), (1, 1.0), (2, 0.0), (3, 1.0)]


def test_a_value_that_is_not_logged_again_is_not_sent_again(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean()) if b.item() == 0 else None)
    assert fit(module, batches(1, 1, 1), quiet=quiet)[1].of("v") == [(1, 0.0)]


def test_logger_false_keeps_a_value_from_the_loggers_only(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean(), logger=False))
    trainer, memory = fit(module, batches(1, 1), quiet=quiet)
    assert memory.of("v") == []
    assert "v" in trainer.callback_metrics


def test_rank_zero_only_values_cannot_be_monitored(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", b.mean(), rank_zero_only=True, on_epoch=True))
    trainer, memory = fit(module, batches(1, 1), quiet=quiet)
    assert trainer.callback_metrics == {}
    assert memory.of("v_epoch") == [(2, 0.5)]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("text", TypeError, r"got 'text' \(str\); a number, a tensor with one element"),
        (None, TypeError, r"got None \(NoneType\)"),
        ({"a": 1}, TypeError, r"self\.log_dict"),
        (torch.ones(3), ValueError, r"tensor of shape \(3,\); one number is needed. Log value.mean\(\)"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, error: type[Exception], message: str, quiet: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        fit(Values(training_step=lambda m, b: m.log("v", value)), batches(1), quiet=quiet)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"on_step": False, "on_epoch": False}, "would keep the value nowhere"),
        ({"reduce_fx": "median"}, r"Unknown reduce_fx .* 'median'.*'mean'"),
        ({"reduce_fx": torch.median}, "'median'"),
    ],
)
def test_contradictory_arguments_are_refused(kwargs: Any, message: str, quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Values(training_step=lambda m, b: m.log("v", 1.0, **{"on_epoch": True, **kwargs})), batches(1), quiet=quiet)


def test_other_arguments_for_one_name_are_refused(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", 1.0, prog_bar=bool(b.item())))
    with pytest.raises(ValueError, match="different arguments \\(prog_bar=False then True\\)"):
        fit(module, batches(1, 1), quiet=quiet)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end", "on_validation_end", "on_fit_end", "setup"])
def test_hooks_where_logging_makes_no_sense_say_where_to_log(hook: str, quiet: dict[str, Any]) -> None:
    module = Values(**{hook: lambda m, *a: m.log("v", 1.0)})
    with pytest.raises(RuntimeError, match=r"where no metrics are kept. Log it in"):
        fit(module, batches(1), batches(1), quiet=quiet)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"])
def test_on_step_in_an_epoch_hook_is_refused(hook: str, quiet: dict[str, Any]) -> None:
    module = Values(**{hook: lambda m: m.log("v", 1.0, on_step=True)})
    with pytest.raises(ValueError, match="runs once an epoch"):
        fit(module, batches(1), batches(1), quiet=quiet)


def test_predict_keeps_no_metrics(quiet: dict[str, Any]) -> None:
    module = Values()
    module.predict_step = lambda batch, batch_idx: module.log("v", 1.0)
    with pytest.raises(RuntimeError, match="predict, which has no metrics, where no metrics"):
        Trainer(**quiet).predict(module, batches(1))


def test_without_a_trainer_and_in_barebones_logging_warns_once() -> None:
    module = Values(training_step=lambda m, b: m.log("v", 1.0))
    with pytest.warns(UserWarning, match="no Trainer runs this module") as told:
        module.log_dict({"a": 1.0, "b": 1.0})
    assert len(told) == 1
    with pytest.warns(UserWarning, match="barebones=True") as told:
        Trainer(max_epochs=1, barebones=True, accelerator="cpu").fit(module, batches(1, 1))
    assert sum("barebones" in str(t.message) for t in told) == 1


def test_batches_without_a_tensor_and_of_two_sizes_are_told_about(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", 1.0, on_epoch=True))
    with pytest.warns(UserWarning, match=r"No tensor was found in the batch of type str"):
        fit(module, DataLoaderLike(["a", "b"]), quiet=quiet)
    module = Values(training_step=lambda m, b: m.log("v", 1.0, on_epoch=True))
    with pytest.warns(UserWarning, match=r"different first dimensions \(2, 3\); 2 was taken"):
        fit(module, DataLoaderLike([{"a": torch.ones(2), "b": torch.ones(3)}]), quiet=quiet)


def test_integers_are_told_about_once(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", 3))
    with pytest.warns(UserWarning, match=r"got an integer; it is kept as torch.float32") as told:
        fit(module, batches(1, 1), quiet=quiet)
    assert sum("integer" in str(t.message) for t in told) == 1
