"""``self.log`` in a run: what is kept, reduced, shown and sent, and what is refused."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline import Callback, Trainer, TrainingModule, messages
from paceline.loggers import Logger
from paceline.messages import PacelineWarning


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
            if name not in ("training_step", "validation_step"):
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


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_a_name_of_training_and_validation_has_the_value_that_was_logged_last(
    num_sanity_val_steps: int, quiet: dict[str, Any]
) -> None:
    class Seen(Callback):
        def note(self, trainer: Trainer) -> None:
            seen.append(trainer.callback_metrics["m"].item())

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.note(trainer)

        def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            if not trainer.sanity_checking:
                self.note(trainer)

        def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            self.note(trainer)

    seen: list[float] = []
    module = Values(
        training_step=lambda m, batch: m.log("m", 100.0 + m.trainer.global_step),
        validation_step=lambda m, batch: m.log("m", float(m.trainer.global_step)),
    )
    settings = quiet | {"max_epochs": 2, "num_sanity_val_steps": num_sanity_val_steps, "callbacks": [Seen()]}
    trainer, _ = fit(module, batches(1, 1), batches(1), quiet=settings)
    assert seen == [100.0, 101.0, 2.0, 2.0, 102.0, 103.0, 4.0, 4.0]
    assert trainer.callback_metrics["m"] == 4.0


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
    from paceline.trainer.metric_reductions import MeanRecord, RecordOptions
    from paceline.trainer.metric_reductions import make_record as make
    from paceline.trainer.phases import EVAL_BATCH

    options = RecordOptions(False, None, None, None, "mean", False, False, None, True, None, False)
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
    with pytest.raises(ValueError, match=r"called for loaders 0 and 1, so one value would replace the other"):
        Trainer(**quiet).validate(module, loaders, verbose=False)


def test_suffixes_of_step_and_loader_stand_in_lightnings_order(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean(), on_step=True, on_epoch=True))
    trainer = Trainer(**quiet)
    trainer.validate(module, [DataLoaderLike(batches(2)), DataLoaderLike(batches(4))], verbose=False)
    assert {"v_step/dataloader_idx_0", "v_epoch/dataloader_idx_1"} <= set(trainer.logged_metrics)


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
        ("text", TypeError, r"got 'text' \(str\), but a number, a tensor with one element"),
        (None, TypeError, r"got None \(NoneType\)"),
        ({"a": 1}, TypeError, r"self\.log_dict"),
        (torch.ones(3), ValueError, r"tensor of shape \(3,\), but a single number is needed. Log value.mean\(\)"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, error: type[Exception], message: str, quiet: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        fit(Values(training_step=lambda m, b: m.log("v", value)), batches(1), quiet=quiet)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"on_step": False, "on_epoch": False}, "would discard the value"),
        ({"reduce_fx": "median"}, r"Unknown reduce_fx 'median'.*'mean'"),
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
    with pytest.raises(RuntimeError, match=r"where metrics cannot be logged. Log it in"):
        fit(module, batches(1), batches(1), quiet=quiet)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"])
def test_on_step_in_an_epoch_hook_is_refused(hook: str, quiet: dict[str, Any]) -> None:
    module = Values(**{hook: lambda m: m.log("v", 1.0, on_step=True)})
    with pytest.raises(ValueError, match="runs once per epoch"):
        fit(module, batches(1), batches(1), quiet=quiet)


def test_predict_keeps_no_metrics(quiet: dict[str, Any]) -> None:
    module = Values()
    module.predict_step = lambda batch, batch_idx: module.log("v", 1.0)
    with pytest.raises(RuntimeError, match="was called in predict, where metrics cannot be logged"):
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
    with pytest.warns(UserWarning, match=r"different first dimensions \(2, 3\)\. The epoch mean of '\w+' uses 2 as"):
        fit(module, DataLoaderLike([{"a": torch.ones(2), "b": torch.ones(3)}]), quiet=quiet)


def test_integers_are_told_about_once(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", 3))
    with pytest.warns(UserWarning, match=r"got an integer, which is stored as torch.float32") as told:
        fit(module, batches(1, 1), quiet=quiet)
    assert sum("integer" in str(t.message) for t in told) == 1


# ---- where it is called ----------------------------------------------------------------------------------------------

TRAIN_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
EPOCH_HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
VALIDATION_HOOKS = (
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)


@pytest.mark.parametrize("hook", TRAIN_HOOKS)
def test_hooks_of_a_training_batch_log_its_step(hook: str, quiet: dict[str, Any]) -> None:
    module = Values(**{hook: lambda m, *a: m.log("v", float(m.global_step))})
    trainer, memory = fit(module, batches(1, 1), quiet=quiet)
    assert [step for step, _ in memory.of("v")] == [1, 2]
    assert "v_epoch" not in trainer.callback_metrics


@pytest.mark.parametrize("hook", ["optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad", "backward"])
def test_overridden_parts_of_a_step_log_its_step(hook: str, quiet: dict[str, Any]) -> None:
    def override(*arguments: Any) -> None:
        module.log("v", 1.0)
        getattr(TrainingModule, hook)(module, *arguments)

    module = Values()
    setattr(module, hook, override)
    assert fit(module, batches(1, 1), quiet=quiet)[1].of("v") == [(1, 1.0), (2, 1.0)]


@pytest.mark.parametrize("hook", [*EPOCH_HOOKS, *VALIDATION_HOOKS])
def test_hooks_of_an_epoch_or_an_evaluation_log_one_value(hook: str, quiet: dict[str, Any]) -> None:
    module = Values(**{hook: lambda m, *a: m.log("v", 3.0)})
    _, memory = fit(module, batches(1, 1), batches(1, 1), quiet=quiet, num_sanity_val_steps=0)
    assert memory.of("v") == [(2, 3.0)]


NOWHERE = (
    "prepare_data",
    "setup",
    "configure_callbacks",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "lr_scheduler_step",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "state_dict",
)


@pytest.mark.parametrize("hook", NOWHERE)
def test_each_hook_where_logging_makes_no_sense_refuses_it(hook: str, quiet: dict[str, Any]) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint("now.ckpt")

    def override(*arguments: Any) -> Any:
        module.log("v", 1.0)
        return getattr(TrainingModule, hook)(module, *arguments)

    module = Values()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)])
    setattr(module, hook, override)
    with pytest.raises(RuntimeError, match=r"self.log\('v'\) was called in .*Log it in .* instead"):
        fit(module, batches(1), batches(1), quiet=quiet, callbacks=[Saves()])


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_sanity_check_end"])
def test_a_sanity_check_hook_refuses_logging(hook: str, quiet: dict[str, Any]) -> None:
    callback = Callback()
    setattr(callback, hook, lambda trainer, pl_module: pl_module.log("v", 1.0))
    with pytest.raises(RuntimeError, match=r"a sanity-check hook.*Log it in validation_step"):
        fit(Values(), batches(1), batches(1), quiet=quiet, callbacks=[callback])


@pytest.mark.parametrize(
    "hook",
    [
        "on_predict_model_eval",
        "on_predict_start",
        "on_predict_epoch_start",
        "on_predict_batch_start",
        "on_predict_batch_end",
        "on_predict_epoch_end",
        "on_predict_end",
        "on_predict_model_train",
    ],
)
def test_every_hook_of_predict_refuses_logging(hook: str, quiet: dict[str, Any]) -> None:
    module = Values(**{hook: lambda m, *a: m.log("v", 1.0)})
    module.predict_step = lambda batch: batch
    with pytest.raises(RuntimeError, match="in predict, where metrics cannot be logged"):
        Trainer(**quiet).predict(module, batches(1))


def test_on_load_checkpoint_refuses_logging(quiet: dict[str, Any]) -> None:
    trainer, _ = fit(Values(), batches(1), quiet=quiet)
    trainer.save_checkpoint("one.ckpt")
    module = Values(on_load_checkpoint=lambda m, checkpoint: m.log("v", 1.0))
    with pytest.raises(RuntimeError, match="where metrics cannot be logged"):
        Trainer(max_epochs=2, **quiet).fit(module, batches(1), ckpt_path="one.ckpt")


def test_a_checkpoint_between_two_batches_leaves_logging_as_it_was(quiet: dict[str, Any]) -> None:
    def log_and_save(module: Values, *arguments: Any) -> None:
        module.trainer.save_checkpoint("now.ckpt")
        module.log("late", 1.0)

    _, memory = fit(Values(on_train_batch_end=log_and_save), batches(1, 1), quiet=quiet)
    assert memory.of("late") == [(1, 1.0), (2, 1.0)]


def test_a_callback_that_monitors_may_log_at_the_end_of_an_epoch(quiet: dict[str, Any]) -> None:
    read: list[float] = []

    class Monitor(Callback):
        monitors_metrics = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("mine", float(trainer.current_epoch))
            read.append(float(trainer.callback_metrics["mine"]))

    _, memory = fit(Values(), batches(1, 1), quiet=quiet, callbacks=[Monitor()], max_epochs=3)
    assert memory.of("mine") == [(2, 0.0), (4, 1.0), (6, 2.0)]
    assert read == [0.0, 1.0, 2.0]


def test_a_metric_that_two_loaders_update_is_computed_after_each(quiet: dict[str, Any]) -> None:
    import torchmetrics

    class Module(Values):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.mean.update(batch)
            self.log("m", self.mean)

    module, loaders = Module(), [DataLoaderLike(batches(1, 1)), DataLoaderLike(batches(1, 4))]
    messages.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            results = Trainer(**quiet).validate(module, loaders, verbose=False)
            assert results == [{"m/dataloader_idx_0": 0.5}, {"m/dataloader_idx_1": pytest.approx(11 / 7)}]
    (said,) = caught
    assert said.category is PacelineWarning
    assert "self.log('m') got the same MeanMetric object in loaders 0 and 1" in str(said.message)


@pytest.mark.parametrize("shared", [False, True])
def test_a_metric_of_training_that_validation_updates_is_named(quiet: dict[str, Any], shared: bool) -> None:
    import torchmetrics

    class Module(Values):
        def __init__(self) -> None:
            super().__init__()
            self.one = torchmetrics.MeanMetric()
            self.other = self.one if shared else torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.one.update(batch)
            self.log("train", self.one, on_step=False, on_epoch=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.other.update(batch)
            self.log("val", self.other)
            self.log("val_again", self.other)

    messages.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(**{**quiet, "num_sanity_val_steps": 1}, max_epochs=2)
        module = Module()
        trainer.fit(module, DataLoaderLike(batches(1, 1)), DataLoaderLike(batches(1, 1)))
        trainer.validate(module, DataLoaderLike(batches(1, 1)), verbose=False)
    said = [str(one.message) for one in caught if "the same MeanMetric object" in str(one.message)]
    assert ["in training and validation, so its values mix" in text for text in said] == [True] * 2 * shared


def test_transfer_hooks_leave_the_suffix_of_the_loader(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean()))
    module.on_after_batch_transfer = lambda batch, dataloader_idx: batch + dataloader_idx
    loaders = [DataLoaderLike(batches(2)), DataLoaderLike(batches(4))]
    results = Trainer(**quiet).validate(module, loaders, verbose=False)
    assert results == [{"v/dataloader_idx_0": 0.5}, {"v/dataloader_idx_1": 2.5}]


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_a_module_made_when_the_run_starts_can_log(hook: str, quiet: dict[str, Any]) -> None:
    class Outer(Values):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.inner.log("inner", batch.mean())
            assert self.inner.trainer is self.trainer
            return super().training_step(batch, batch_idx)

    module = Outer(**{hook: lambda m, *a: setattr(m, "inner", Values())})
    assert fit(module, batches(1, 1), quiet=quiet)[1].of("inner") == [(1, 0.0), (2, 1.0)]


def test_a_step_called_by_hand_after_the_run_still_works(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log("v", 1.0))
    trainer, memory = fit(module, batches(1), quiet=quiet)
    with pytest.warns(UserWarning, match=r"self.log\('v'\) has no effect, because no Trainer runs this module"):
        module.training_step(torch.ones(1), 0)
    assert memory.of("v") == [(1, 1.0)]
    assert trainer.callback_metrics["v"] == 1.0


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_epoch", [False, True])
def test_a_value_that_is_changed_in_place_later_was_logged_before(on_epoch: bool, quiet: dict[str, Any]) -> None:
    before: list[float] = []

    class Module(Values):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            before.append(loss.item())
            self.log("v", loss, on_epoch=on_epoch)
            loss += 100
            return loss

    _, memory = fit(Module(), batches(1, 1, 1), quiet=quiet)
    assert [value for _, value in memory.of("v_step" if on_epoch else "v")] == before


def test_an_extreme_is_not_moved_by_a_buffer_that_moves(quiet: dict[str, Any]) -> None:
    class Module(Values):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.tensor(5.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("peak", self.level, on_step=False, on_epoch=True, reduce_fx="max")
            self.level -= 1
            return super().training_step(batch, batch_idx)

    assert fit(Module(), batches(1, 1), quiet=quiet)[0].callback_metrics["peak"] == 5.0


def test_numbers_reach_the_loggers_with_all_their_digits(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log_dict({"v": 0.1, "step": float(2**24 + 1)}))
    trainer, memory = fit(module, batches(1), quiet=quiet)
    assert memory.of("v") == [(2**24 + 1, 0.1)]
    assert trainer.callback_metrics["v"].dtype == torch.float32


def test_float64_values_stay_float64(quiet: dict[str, Any]) -> None:
    value = torch.tensor(1 / 3, dtype=torch.float64)
    module = Values(training_step=lambda m, b: m.log("v", value, on_epoch=True))
    trainer, memory = fit(module, batches(1, 2), quiet=quiet)
    assert trainer.callback_metrics["v_step"].item() == value.item()
    assert trainer.callback_metrics["v_epoch"].item() == pytest.approx(value.item(), rel=1e-15)
    assert memory.of("v_epoch")[0][1] == pytest.approx(1 / 3, rel=1e-15)


def test_an_epoch_of_its_own_wins_over_the_trainers(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log_dict({"epoch": 0.25, "v": 1.0}))
    assert fit(module, batches(1), quiet=quiet)[1].of("epoch") == [(1, 0.25)]


def test_a_batch_of_a_dict_is_weighed_by_its_first_tensor(quiet: dict[str, Any]) -> None:
    data = [{"name": "a", "x": torch.zeros(3)}, {"name": "b", "x": torch.ones(1)}]
    module = Values(training_step=lambda m, b: m.log("v", b["x"].mean(), on_step=False, on_epoch=True))
    assert fit(module, DataLoaderLike(data), quiet=quiet)[0].callback_metrics["v"] == 0.25


def test_every_logged_value_of_a_batch_has_its_weight(quiet: dict[str, Any]) -> None:
    def log(module: Values, batch: torch.Tensor) -> None:
        module.log_dict({"a": batch.mean(), "b": float(batch.mean())}, on_step=False, on_epoch=True)
        module.log("c", batch.mean(), on_step=False, on_epoch=True, batch_size=2)

    trainer, _ = fit(Values(training_step=log), batches(4, 1, 3), quiet=quiet, max_epochs=2)
    assert {k: float(v) for k, v in trainer.callback_metrics.items()} == pytest.approx(
        {"a": 3.5, "b": 3.5, "c": 11.5 / 3}
    )


def test_a_step_that_fetches_its_batches_weighs_by_them(quiet: dict[str, Any], recwarn: Any) -> None:
    class Module(Values):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            self.log("v", batch.mean(), on_step=False, on_epoch=True)
            return super().training_step(batch, 0)

    assert fit(Module(), batches(4, 4, 1), quiet=quiet)[0].callback_metrics["v"] == 4.0
    assert not [w for w in recwarn if "No tensor was found" in str(w.message)]


def test_a_value_logged_once_an_epoch_needs_no_batch_size(quiet: dict[str, Any], recwarn: Any) -> None:
    module = Values(on_train_epoch_end=lambda m: m.log("v", 1.0))
    fit(module, DataLoaderLike(["no tensor"]), quiet=quiet)
    assert not [w for w in recwarn if "No tensor was found" in str(w.message)]


def test_validation_metrics_may_take_part_in_training(quiet: dict[str, Any]) -> None:
    class Module(Values):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.trainer.callback_metrics.get("val", 1.0)

    module = Module(validation_step=lambda m, b: m.log("val", b.mean()))
    trainer, _ = fit(module, batches(1), batches(3), quiet=quiet, max_epochs=2)
    assert not trainer.callback_metrics["val"].is_inference()


def test_a_metric_used_in_inference_mode_can_be_used_out_of_it(quiet: dict[str, Any]) -> None:
    import torchmetrics

    module = Values(validation_step=lambda m, b: (m.mean.update(b), m.log("v", m.mean)))
    module.mean = torchmetrics.MeanMetric()
    for inference_mode in (True, False):
        trainer = Trainer(inference_mode=inference_mode, **quiet)
        assert trainer.validate(module, batches(3), verbose=False) == [{"v": 1.0}]


def test_a_metric_that_is_only_updated_shows_what_it_has_so_far(quiet: dict[str, Any]) -> None:
    import torchmetrics

    module = Values(training_step=lambda m, b: (m.mean.update(b), m.log("v", m.mean, on_epoch=True)))
    module.mean = torchmetrics.MeanMetric()
    _, memory = fit(module, batches(1, 1, 1), quiet=quiet, max_epochs=2)
    assert [value for _, value in memory.of("v_step")] == [0.0, 0.5, 1.0] * 2
    assert [value for _, value in memory.of("v_epoch")] == [1.0, 1.0]


def test_a_metric_of_the_step_only_is_reset_all_the_same(quiet: dict[str, Any]) -> None:
    import torchmetrics

    module = Values(training_step=lambda m, b: (m.mean(b), m.log("v", m.mean)))
    module.mean = torchmetrics.MeanMetric()
    fit(module, batches(1, 1), quiet=quiet)
    assert module.mean.update_count == 0


def test_a_metric_of_the_module_survives_validations_inside_the_epoch(quiet: dict[str, Any]) -> None:
    import torchmetrics

    module = Values(
        training_step=lambda m, b: (m.train_mean.update(b), m.log("t", m.train_mean, on_step=False, on_epoch=True)),
        validation_step=lambda m, b: (m.val_mean.update(b), m.log("v", m.val_mean)),
    )
    module.train_mean, module.val_mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    _, memory = fit(module, batches(1, 1, 1, 1), batches(2, 1), quiet=quiet, val_check_interval=1)
    assert memory.of("t") == [(4, 1.5)]
    assert memory.of("v") == [(step, 1.0) for step in (1, 2, 3, 4)]


def test_a_metric_that_computes_no_number_is_named(quiet: dict[str, Any]) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    def log(module: Values, batch: torch.Tensor) -> None:
        module.each.update(batch.long(), batch.long())
        module.log("each", module.each)

    module = Values(validation_step=log)
    module.each = MulticlassAccuracy(3, average=None)
    with pytest.raises(ValueError, match=r"logged as 'each' \(MulticlassAccuracy\) computes a tensor of shape \(3,\)"):
        Trainer(**quiet).validate(module, batches(3), verbose=False)


def test_a_new_metric_object_each_step_is_refused(quiet: dict[str, Any]) -> None:
    import torchmetrics

    module = Values(training_step=lambda m, b: m.log("v", torchmetrics.MeanMetric()))
    with pytest.raises(
        ValueError, match=r"a different MeanMetric object than last time.*Create the metric once in __init__"
    ):
        fit(module, batches(1, 1), quiet=quiet)


@pytest.mark.parametrize("forward", [False, True])
def test_a_collection_in_training_gives_steps_and_epochs(forward: bool, quiet: dict[str, Any]) -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryF1Score, BinaryPrecision, BinaryRecall

    target, made = torch.tensor([1, 0, 1, 1]), [torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 1, 1])]

    def log(module: Values, batch: torch.Tensor) -> None:
        (module.all if forward else module.all.update)(batch, target)
        module.log_dict(module.all, on_step=forward, on_epoch=True)

    module = Values(training_step=log)
    module.all = MetricCollection([BinaryPrecision(), BinaryRecall(), BinaryF1Score()], prefix="m/")
    _, memory = fit(module, DataLoaderLike(made), quiet=quiet, max_epochs=2)
    assert len(module.all.compute_groups) == (3 if forward else 1)  # torchmetrics finds groups in update() only
    suffix = "_epoch" if forward else ""
    for kind in (BinaryPrecision, BinaryRecall, BinaryF1Score):
        whole = kind()(torch.cat(made), torch.cat([target, target])).item()
        assert [v for _, v in memory.of(f"m/{kind.__name__}{suffix}")] == pytest.approx([whole, whole])
        if forward:
            steps = [kind()(one, target).item() for one in made] * 2
            assert [v for _, v in memory.of(f"m/{kind.__name__}_step")] == pytest.approx(steps)


def test_what_a_batch_and_the_whole_logged_is_returned_under_the_name_of_the_epoch(quiet: dict[str, Any]) -> None:
    module = Values(validation_step=lambda m, b: m.log("v", b.mean(), on_step=True, on_epoch=True))
    assert Trainer(**quiet).validate(module, batches(2), verbose=False) == [{"v_epoch": 0.5}]


def test_values_of_finished_epochs_stay_in_sight(quiet: dict[str, Any]) -> None:
    seen: list[dict[str, float]] = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    module = Values(
        training_step=lambda m, b: m.log("t", b.mean(), on_step=False, on_epoch=True),
        validation_step=lambda m, b: m.log("v", b.mean()),
    )
    fit(module, batches(1, 1), batches(3), quiet=quiet, callbacks=[Look()], max_epochs=3, check_val_every_n_epoch=2)
    assert seen == [{}, {"t": 0.5}, {"t": 0.5, "v": 1.0}]


def test_a_dict_may_change_its_names_from_batch_to_batch(quiet: dict[str, Any]) -> None:
    def log(module: Values, batch: torch.Tensor) -> None:
        value = float(batch.mean())
        module.log_dict({"a": value, "b": value} if value < 3 else {"b": value, "a": -value}, on_epoch=True)

    _, memory = fit(
        Values(training_step=log),
        [torch.full((2,), 1.0), torch.full((2,), 2.0), torch.full((2,), 3.0), torch.full((2,), 4.0)],
        quiet=quiet,
        max_epochs=2,
    )
    assert [value for _, value in memory.of("a_epoch")] == [(1 + 2 - 3 - 4) / 4] * 2
    assert [value for _, value in memory.of("b_epoch")] == [2.5] * 2


def test_the_batch_size_of_a_dict_may_change_and_its_other_arguments_may_not(quiet: dict[str, Any]) -> None:
    def log(module: Values, batch: torch.Tensor) -> None:
        value = float(batch.mean())
        module.log_dict({"a": value}, on_step=False, on_epoch=True, batch_size=int(value))

    _, memory = fit(
        Values(training_step=log), [torch.full((2,), 1.0), torch.full((2,), 2.0), torch.full((2,), 3.0)], quiet=quiet
    )
    assert [value for _, value in memory.of("a")] == [pytest.approx((1 + 4 + 9) / 6)]
    changing = Values(training_step=lambda m, b: m.log_dict({"a": 1.0}, prog_bar=bool(b.mean() > 1)))
    with pytest.raises(ValueError, match=r"self.log\('a'\) was called .* \(prog_bar=False then True\)"):
        fit(changing, [torch.full((2,), 1.0), torch.full((2,), 2.0)], quiet=quiet)


def test_log_dict_goes_through_a_log_of_the_users_own(quiet: dict[str, Any]) -> None:
    class Doubling(Values):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            super().log(name, 2 * value, *args, **kwargs)

    module = Doubling(training_step=lambda m, b: m.log_dict({"a": 1.0, "b": 3.0}, on_step=False, on_epoch=True))
    trainer, _ = fit(module, batches(1, 1, 1), quiet=quiet)
    assert (trainer.callback_metrics["a"], trainer.callback_metrics["b"]) == (2.0, 6.0)


def test_names_that_change_all_the_time_are_not_kept(quiet: dict[str, Any]) -> None:
    def log(module: Values, batch: torch.Tensor) -> None:
        number = int(batch)
        module.log_dict({f"v{bit}": 1.0 for bit in range(7) if number >> bit & 1}, on_step=False, on_epoch=True)
        sizes.append(len(module._metric_store.records.groups))  # type: ignore[union-attr]

    sizes: list[int] = []
    trainer, _ = fit(Values(training_step=log), batches(*[1] * 100), quiet=quiet)
    assert max(sizes) <= 16
    assert sum(value == 1.0 for value in trainer.callback_metrics.values()) == 7


class Collecting(Values):
    def __init__(self, change: Any) -> None:
        from torchmetrics import MeanMetric, MetricCollection

        super().__init__()
        self.all = MetricCollection({"mean": MeanMetric()})
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.change(self.all)
        self.all.update(batch)
        self.log_dict(self.all, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_that_joins_a_collection_is_logged_from_then_on(quiet: dict[str, Any]) -> None:
    from torchmetrics import SumMetric

    module = Collecting(lambda found: found.add_metrics({"sum": SumMetric()}))
    trainer, _ = fit(module, [torch.full((2,), 1.0), torch.full((2,), 4.0)], quiet=quiet)
    assert (trainer.callback_metrics["mean"], trainer.callback_metrics["sum"]) == (2.5, 8.0)


def test_a_metric_that_is_replaced_in_a_collection_is_an_error(quiet: dict[str, Any]) -> None:
    from torchmetrics import MeanMetric

    module = Collecting(lambda found: found.__setitem__("mean", MeanMetric()))
    with pytest.raises(ValueError, match=r"self.log\('mean'\) got a different MeanMetric object than last time"):
        fit(module, [torch.ones(2), torch.ones(2)], quiet=quiet)


def test_log_dict_refuses_what_is_no_dict(quiet: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"self.log_dict got a list. Pass a dict of names and values"):
        fit(Values(training_step=lambda m, b: m.log_dict([1.0])), batches(1), quiet=quiet)


def test_a_name_that_is_no_string_is_refused(quiet: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"as the name. Pass a string first, then the value"):
        fit(Values(training_step=lambda m, b: m.log(b.mean(), "v")), batches(1), quiet=quiet)


def test_no_batch_outlives_its_evaluation(quiet: dict[str, Any]) -> None:
    class Data:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            for _ in range(4):
                batch = torch.ones(2)
                alive.append(weakref.ref(batch))
                yield batch

    alive: list[Any] = []
    module = Values(validation_step=lambda m, b: m.log("v", b.mean()))
    Trainer(**quiet).validate(module, Data(), verbose=False)
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.gpu
def test_on_a_gpu_values_are_kept_as_they_were_and_lose_no_digits() -> None:
    before: list[torch.Tensor] = []

    class Module(Values):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[:, None]).sum()
            before.append(loss.detach().clone())
            self.log("v", loss, on_epoch=True, prog_bar=True)
            self.log("peak", loss, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("third", torch.tensor(1 / 3, dtype=torch.float64, device=loss.device), on_epoch=True)
            self.log("step", torch.tensor(2.0**24 + 1, dtype=torch.float64, device=loss.device))
            loss += 100
            return loss

    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer, memory = fit(Module(), batches(1, 1, 1), quiet=silent, accelerator="gpu")
    want = [v.item() for v in before]
    assert [value for _, value in memory.of("v_step")] == want
    assert memory.of("v_epoch")[0][1] == pytest.approx(sum(want) / 3, rel=1e-12)
    assert trainer.callback_metrics["peak"].item() == max(want)
    assert memory.of("third_step")[0] == (2**24 + 1, 1 / 3)


# ---- step values of several processes --------------------------------------------------------------------------------


class Together(Values):
    """Logs step values that processes share, and looks at them before anybody flushes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mine = float(self.global_rank + 4 * batch_idx)
        self.log("each", mine, sync_dist=True)
        self.log("sum", torch.tensor(mine), reduce_fx="sum", sync_dist=True)
        self.log("most", mine, reduce_fx="max", sync_dist=True)
        self.log("both", torch.tensor([mine]), on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.metrics(batch[0] * 0 + mine)
        self.log_dict(self.metrics, sync_dist=True)
        self.log("own", mine)
        self.log("epoch_value", mine, on_step=False, on_epoch=True, batch_size=1)
        return self.layer(batch).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.seen.append({name: float(metrics[name]) for name in ("each", "sum", "most", "both", "low", "own")})


def logged_together(log_every: int) -> Any:
    import torchmetrics

    module = Together()
    module.metrics = torchmetrics.MetricCollection({"low": torchmetrics.MeanMetric()})
    module.seen = []
    logger = Memory()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=logger,
        log_every_n_steps=log_every,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    reduced: list[str] = []
    reduce = trainer.strategy.reduce
    trainer.strategy.reduce = lambda tensor, op="mean", group=None: reduced.append(op) or reduce(tensor, op, group)
    trainer.fit(module, [torch.ones(1, 1)] * 4)
    kinds = {value.dtype for value in trainer.callback_metrics.values()}
    return module.seen, dict(trainer.logged_metrics), reduced, kinds


@pytest.mark.parametrize("log_every", [1, 50])
def test_step_values_that_processes_share_are_reduced_wherever_they_are_read(log_every: int) -> None:
    pytest.importorskip("torchmetrics")
    expected = [
        {"each": 0.5 + 4 * n, "sum": 1.0 + 8 * n, "most": 1.0 + 4 * n, "both": 0.5 + 4 * n, "low": 0.5 + 4 * n}
        for n in range(2)
    ]
    for rank, (seen, logged, reduced, kinds) in enumerate(ranks(2, logged_together, log_every)):
        assert seen == [{**values, "own": float(rank + 4 * n)} for n, values in enumerate(expected)]
        last = {**expected[-1], "both_step": expected[-1]["both"]} if log_every == 1 else {}
        assert {name: logged[name] for name in last if name != "both"} == {n: v for n, v in last.items() if n != "both"}
        assert logged["both_epoch"] == logged["epoch_value"] == 2.5
        assert kinds == {torch.float32}
        assert reduced.count("max") == 2  # once a batch; so are means and sums, in one reduction


class TogetherUneven(Values):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", batch.mean(), sync_dist=True)
        self.log("sum", batch.sum(), sync_dist=True, reduce_fx="sum")
        return self.layer(batch).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", batch.mean(), sync_dist=True)


def logged_unevenly(size: int) -> list[tuple[float, ...]]:
    module, logger = TogetherUneven(), Memory()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", strategy="ddp", devices=2, logger=logger, max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(torch.arange(float(size))[:, None], 2))
    return [float(trainer.callback_metrics[name]) for name in ("step", "hook", "sum")]


@pytest.mark.parametrize(("size", "mean", "total"), [(7, 5.0, 15.0), (5, 4.0, 4.0), (8, 5.5, 22.0)])
def test_shared_step_means_count_each_sample_of_an_uneven_last_batch_once(size: int, mean: float, total: float) -> None:
    expected = [pytest.approx(value) for value in (mean, mean, total)]
    first, second = ranks(2, logged_unevenly, size)
    assert first == expected
    assert second == expected


# ---- the hooks that errors name --------------------------------------------------------------------------------------


class LogsIn(Values):
    """Logs ``a`` through a helper in the hooks it is told."""

    def __init__(self, **logged: dict[str, Any]) -> None:
        super().__init__(validation_step=lambda *args: None)
        self.logged = logged

    def note(self, hook: str) -> None:
        if hook in self.logged:
            self.log("a", 1.0, **self.logged[hook])

    def setup(self, stage: str) -> None:
        self.note("setup")

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.note("on_fit_start")

    def on_sanity_check_start(self) -> None:
        self.note("on_sanity_check_start")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("on_before_batch_transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.note("on_train_end")

    def on_fit_end(self) -> None:
        self.note("on_fit_end")

    def teardown(self, stage: str) -> None:
        self.note("teardown")


@pytest.mark.parametrize(
    "hook",
    [
        "setup",
        "configure_optimizers",
        "on_fit_start",
        "on_sanity_check_start",
        "on_before_batch_transfer",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ],
)
def test_a_call_where_no_metrics_are_kept_names_the_hook_that_made_it(hook: str, quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    with pytest.raises(
        RuntimeError, match=rf"^self\.log\('a'\) was called in {hook}, where metrics cannot be logged\. Log"
    ):
        trainer.fit(LogsIn(**{hook: {}}), [torch.ones(1, 1)], [torch.ones(1, 1)])


def test_a_name_with_different_arguments_names_the_hooks_that_log_it(quiet: dict[str, Any]) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.log("a", 1.0, prog_bar=True)

    def fit_with(module: Any, *callbacks: Callback) -> None:
        Trainer(**quiet, max_epochs=1, callbacks=list(callbacks)).fit(module, [torch.ones(1, 1)] * 2)

    different = r"with different arguments \(prog_bar=False then True\), so it is not clear how to reduce the values"
    with pytest.raises(ValueError, match=rf"'a'\) was called in on_train_batch_start and training_step {different}"):
        fit_with(LogsIn(on_train_batch_start={}, training_step={"prog_bar": True}))
    with pytest.raises(ValueError, match=rf"'a'\) was called in training_step and on_train_batch_end {different}"):
        fit_with(LogsIn(training_step={}), Logs())
    changing = Values(training_step=lambda m, b: m.log("a", 1.0, prog_bar=m.trainer.global_step > 0))
    with pytest.raises(ValueError, match=rf"'a'\) was called in training_step {different}"):
        fit_with(changing)


def test_an_integer_says_how_to_make_it_a_float(quiet: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    def log(module: Any, batch: Any) -> None:
        module.log("tensor", torch.tensor(3))
        module.log("number", 3)

    fit(Values(training_step=log), batches(1), quiet=quiet)
    said = [str(one.message) for one in recwarn.list if "integer" in str(one.message)]
    assert said == [
        f"self.log('{name}') got an integer, which is stored as torch.float32. Pass {to_float} to avoid this warning."
        for name, to_float in (("tensor", "value.float()"), ("number", "float(value)"))
    ]


def test_log_dict_takes_its_options_by_position_in_lightnings_order(quiet: dict[str, Any]) -> None:
    module = Values(training_step=lambda m, b: m.log_dict({"v": b.mean()}, False, None, False, True, "max"))
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([1.0])])
    assert trainer.callback_metrics["v"] == 5
    with pytest.raises(TypeError, match=r"self\.log_dict got 'prog_bar' twice"):
        module.log_dict({"v": 1.0}, True, prog_bar=True)
    with pytest.raises(TypeError, match=r"self\.log_dict got 13 positional arguments, but takes at most 12"):
        module.log_dict({"v": 1.0}, *[None] * 12)


def test_a_metric_that_computes_none_logs_nothing(quiet: dict[str, Any]) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Lenient(torchmetrics.MeanMetric):
        def compute(self) -> Any:
            return super().compute() if self.update_count else None

    class Sometimes(Values):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Lenient(), Lenient()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if self.trainer.current_epoch:
                self.unused.update(batch)
            self.log_dict({"used": self.used, "unused": self.unused}, on_step=True, on_epoch=True)
            self.used.update(batch)

    seen = []

    class Watch(Callback):
        def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            seen.append(trainer.callback_metrics.get("unused"))

    module, memory = Sometimes(), Memory()
    trainer = Trainer(max_epochs=2, callbacks=[Watch()], **quiet | {"logger": memory})
    assert trainer.validate(module, batches(2), verbose=False)[0].keys() == {"used_epoch"}
    assert "unused_epoch" not in trainer.callback_metrics
    trainer.fit(module, batches(2), batches(2))
    assert [step for step, _ in memory.of("unused_epoch")] == [2]
    assert trainer.callback_metrics["unused"] == trainer.callback_metrics["used"]
    assert seen[0] is seen[1] is None
