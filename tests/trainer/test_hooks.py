"""Who is called at a hook: found once, in order, and only those that define it."""

from __future__ import annotations

from argparse import Namespace
from functools import wraps
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Callback, DataModule, Trainer, TrainingModule
from paceline.callbacks import Checkpoint, LambdaCallback
from paceline.callbacks.base import HOOKS, replaced
from paceline.strategies.base import SingleDevice
from paceline.trainer.hooks import HookTable, check, overridden, wanted_arguments
from paceline.trainer.start_run import prepare_data


@pytest.fixture
def trainer(quiet: dict[str, Any]) -> Trainer:
    return Trainer(**quiet)


class Plain(TrainingModule):
    """Defines nothing."""


def table(trainer: Trainer, *callbacks: Callback, module: Any = None, datamodule: Any = None) -> HookTable:
    return HookTable(trainer, module or Plain(), list(callbacks), datamodule)


def noting(base: type, order: list[str], who: str, *names: str) -> Any:
    return type(who, (base,), {name: lambda self, *args, **kw: order.append(who) for name in names})()


def test_nobody_is_called_where_nobody_defines_a_hook(trainer: Trainer) -> None:
    found = table(trainer, Callback(), Callback())
    assert all(getattr(found, name) == () for name in (*HOOKS, "on_train_epoch_end_monitors", "prepare_data"))


def test_an_unknown_hook_is_an_error_and_not_empty(trainer: Trainer) -> None:
    with pytest.raises(AttributeError, match="There is no hook 'on_train_batch_ends'"):
        table(trainer).on_train_batch_ends  # noqa: B018


@pytest.mark.parametrize("name", ["setup", "teardown", "on_exception"])
def test_data_come_before_callbacks_and_these_before_the_module(name: str, trainer: Trainer) -> None:
    order: list[str] = []
    found = table(
        trainer,
        noting(Callback, order, "C1", name),
        noting(Callback, order, "C2", name),
        module=noting(Plain, order, "M", name),
        datamodule=noting(DataModule, order, "D", name),
    )
    for hook in getattr(found, name):
        hook("fit")
    assert order == ["D", "C1", "C2", "M"]


def test_callbacks_that_monitor_come_after_the_module_at_the_end_of_an_epoch(trainer: Trainer) -> None:
    order: list[str] = []
    first, second = (noting(Callback, order, who, "on_train_epoch_end") for who in ("monitors", "plain"))
    first.monitors_metrics = True
    found = table(trainer, first, second, module=noting(Plain, order, "M", "on_train_epoch_end"))
    for hook in (*found.on_train_epoch_end, *found.on_train_epoch_end_monitors):
        hook()
    assert order == ["plain", "M", "monitors"]


def test_a_checkpoint_callback_of_ones_own_saves_what_the_module_did_at_the_end_of_an_epoch(trainer: Trainer) -> None:
    order: list[str] = []
    saves, module = (noting(base, order, str(base), "on_train_epoch_end") for base in (Checkpoint, Plain))
    found = table(trainer, saves, module=module)
    for hook in (*found.on_train_epoch_end, *found.on_train_epoch_end_monitors):
        hook()
    assert order == [str(Plain), str(Checkpoint)]


def test_callbacks_get_trainer_and_module_and_the_module_only_the_rest(trainer: Trainer) -> None:
    seen: list[tuple[Any, ...]] = []

    class Notes(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(args)

    class Own(Plain):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(args)

    module = Own()
    for hook in table(trainer, Notes(), module=module).on_train_batch_start:
        hook("batch", 3)
    assert seen == [(trainer, module, "batch", 3), ("batch", 3)]


def test_a_hook_carried_by_the_instance_counts_and_none_does_not(trainer: Trainer) -> None:
    order: list[str] = []
    carries, lacks = Callback(), noting(Callback, order, "lacks", "on_fit_end")
    carries.on_fit_end = lambda trainer, pl_module: order.append("carries")  # type: ignore[method-assign]
    lacks.on_fit_end = None
    (hook,) = table(trainer, carries, lacks, LambdaCallback(on_fit_start=lambda *args: None)).on_fit_end
    hook()
    assert order == ["carries"]


def test_a_hook_of_a_class_in_between_is_found_and_none_in_a_subclass_takes_it_out() -> None:
    class Base(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    class Child(Base):
        pass

    class Without(Base):
        on_fit_start = None  # type: ignore[assignment]

    assert overridden(Child(), "on_fit_start", Callback) is not None
    assert overridden(Without(), "on_fit_start", Callback) is None
    assert overridden(Callback(), "on_fit_start", Callback) is None


def test_a_default_hook_carried_by_the_instance_is_not_overridden(quiet: dict[str, Any]) -> None:
    class OfItself(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

        def train_dataloader(self) -> Any:
            return tiny_loader(1)

    class OfAnother(TinyModule):
        def __init__(self, data: DataModule) -> None:
            super().__init__()
            self.train_dataloader = data.train_dataloader  # type: ignore[method-assign]
            self.val_dataloader = data.val_dataloader  # type: ignore[method-assign]
            self.on_after_batch_transfer = data.on_after_batch_transfer

    class OfABase(OfItself):
        def val_dataloader(self) -> Any:
            return tiny_loader(2)

    data = OfItself()
    assert overridden(data, "val_dataloader", DataModule) is None
    assert overridden(OfABase(), "val_dataloader", DataModule) is None
    for arguments in ({"model": TinyModule(), "datamodule": data}, {"model": OfAnother(data)}):
        trainer = Trainer(**quiet, max_epochs=1)
        trainer.fit(**arguments)  # type: ignore[arg-type]
        assert (trainer.global_step, trainer.num_val_batches) == (1, [])
    assert overridden(OfAnother(OfABase()), "on_after_batch_transfer", TrainingModule) is None
    assert "val: none" in str(data)


@pytest.mark.parametrize(
    ("owner", "name", "wanted"),
    [
        (Callback(), "on_train_batch_end", ["trainer", "pl_module", "outputs", "batch", "batch_idx"]),
        (Callback(), "on_test_batch_start", ["trainer", "pl_module", "batch", "batch_idx"]),
        (Callback(), "load_state_dict", ["state_dict"]),
        (Plain(), "on_train_batch_end", ["outputs", "batch", "batch_idx"]),
        (Plain(), "on_exception", ["exception"]),
        (Plain(), "on_sanity_check_start", []),
        (Plain(), "backward", ["loss"]),
        (Plain(), "optimizer_step", ["epoch", "batch_idx", "optimizer", "optimizer_closure"]),
        (Plain(), "val_dataloader", []),
        (DataModule(), "setup", ["stage"]),
        (DataModule(), "on_after_batch_transfer", ["batch", "dataloader_idx"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_hook_is_called_with_is_read_off_its_definition(owner: Any, name: str, wanted: list[str]) -> None:
    assert wanted_arguments(owner, name) == wanted


def test_a_callable_of_another_kind_may_be_a_hook(trainer: Trainer) -> None:
    class Object:
        def __call__(self, trainer: Any, pl_module: Any) -> None:
            self.called = True

    callback, hook = Callback(), Object()
    callback.on_fit_start = hook  # type: ignore[method-assign]
    table(trainer, callback).on_fit_start[0]()
    assert hook.called
    callback.on_fit_start = print  # type: ignore[method-assign]
    assert len(table(trainer, callback).on_fit_start) == 1


def test_every_shipped_class_passes_the_check() -> None:
    import paceline.callbacks as shipped

    kinds = [value for name in shipped.__all__ if isinstance(value := getattr(shipped, name), type)]
    checked = [kind for kind in kinds if issubclass(kind, Callback)]
    assert len(checked) > 15
    for kind in checked:
        check(kind.__new__(kind), Callback, (*HOOKS, "state_dict", "load_state_dict"))
    check(TinyModule(), TrainingModule, HOOKS)


def test_the_stage_is_passed_by_keyword_if_a_hook_has_the_name_and_a_wrapped_default_is_no_transfer_hook(
    trainer: Trainer,
) -> None:
    got: list[Any] = []

    class Data(DataModule):
        def setup(self, stage: str) -> None:
            got.append(stage)

    class Wrapped(Callback):
        setup = wraps(Callback.setup)(lambda self, *args, **kwargs: got.append(kwargs))
        get_accumulate_grad_batches = wraps(Callback.get_accumulate_grad_batches)(lambda *_: got.append("asked"))

    class OtherName(TinyModule):
        def setup(self, fn: str) -> None:  # type: ignore[override]
            got.append(fn)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            got.append("module")
            return batch

    data, module = Data(), OtherName()
    data.train_dataloader = tiny_loader
    default = data.on_after_batch_transfer
    data.on_after_batch_transfer = wraps(default)(lambda *args: got.append("data"))
    trainer.callbacks.append(Wrapped())
    trainer.limit_train_batches, trainer.max_epochs = 1, 1
    trainer.fit(module, datamodule=data)
    assert got == ["fit", {"stage": "fit"}, "fit", "module"]
    assert replaced(data, "on_after_batch_transfer", DataModule) is None
    assert overridden(data, "on_after_batch_transfer", DataModule) is not None


def test_a_hook_may_take_the_stage_by_keyword_only(trainer: Trainer) -> None:
    got: list[Any] = []

    class AnyKeywords(Callback):
        def setup(self, trainer: Any, pl_module: Any, **kwargs: Any) -> None:
            got.append(kwargs)

    class KeywordOnly(TinyModule):
        def teardown(self, *, stage: str) -> None:
            got.append(stage)

    class Data(DataModule):
        def setup(self, **kwargs: Any) -> None:
            got.append(kwargs)

    data = Data()
    data.train_dataloader = tiny_loader
    trainer.callbacks.append(AnyKeywords())
    trainer.limit_train_batches, trainer.max_epochs = 1, 1
    trainer.fit(KeywordOnly(), datamodule=data)
    assert got == [{"stage": "fit"}, {"stage": "fit"}, "fit"]


def test_module_and_data_each_say_whether_every_node_prepares(trainer: Trainer) -> None:
    got: list[str] = []

    class Second(SingleDevice):
        """The only process of the second machine."""

        global_rank = 1

    module, data = noting(TinyModule, got, "M", "prepare_data"), noting(DataModule, got, "D", "prepare_data")
    data.train_dataloader = tiny_loader
    for module_per_node, data_per_node in ((True, True), (True, False), (False, True), (False, False)):
        module.prepare_data_per_node, data.prepare_data_per_node = module_per_node, data_per_node
        got.append("|")
        run = Namespace(strategy=Second("cpu"), hooks=table(trainer, module=module, datamodule=data))
        prepare_data(run)  # type: ignore[arg-type]
    assert "".join(got) == "|DM|M|D|"
