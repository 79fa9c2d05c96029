"""The module by itself: what counts as overridden, what it can do without a trainer."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Trainer, TrainingModule
from paceline.callbacks.base import HOOKS
from paceline.callbacks.model_summary import summarize
from paceline.trainer.hook_names import MODULE_METHODS


class Net(TrainingModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.example_input_array = torch.ones(3, width)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_set_on_the_instance_is_the_step(quiet: dict[str, Any]) -> None:
    seen: list[int] = []
    module = Net()

    def step(batch: Any, batch_idx: int) -> Any:
        seen.append(batch_idx)
        return module(batch).sum()

    module.training_step = step
    module.on_train_epoch_end = lambda: seen.append(-1)
    Trainer(max_epochs=1, **quiet).fit(module, [torch.ones(1, 2)] * 2)
    assert seen == [0, 1, -1]


def test_settings_may_be_attributes_and_properties_of_the_class(quiet: dict[str, Any]) -> None:
    class ByHand(TrainingModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        @property
        def example_input_array(self) -> Any:  # type: ignore[override]
            return torch.ones(3, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self(batch).sum())
            self.optimizers().step()  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = ByHand()
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.ones(1, 2)] * 2)
    assert trainer.global_step == 2
    assert summarize(module).out_sizes == [[3, 1]]
    assert TrainingModule().automatic_optimization is True
    assert TrainingModule().example_input_array is None


def test_none_means_not_overridden(quiet: dict[str, Any]) -> None:
    class Module(Net):
        on_train_start = None

        def on_train_end(self) -> None:
            raise AssertionError("switched off below")

    module = Module()
    module.on_train_end = None
    Trainer(max_epochs=1, **quiet).fit(module, [torch.ones(1, 2)])
    module.training_step = None
    with pytest.raises(NotImplementedError, match="Module has no training_step"):
        Trainer(max_epochs=1, **quiet).fit(module, [torch.ones(1, 2)])


def test_without_a_trainer_a_module_is_a_plain_one() -> None:
    module = Net()
    assert (module.current_epoch, module.global_step, module.global_rank, module.logger) == (0, 0, 0, None)
    assert (module.device, module.dtype, module.on_gpu) == (torch.device("cpu"), torch.float32, False)
    assert module.double().dtype == torch.float64
    with pytest.raises(RuntimeError, match="Net is not attached to a Trainer"):
        _ = module.trainer


def test_copies_and_pickles_leave_the_trainer_behind(quiet: dict[str, Any]) -> None:
    module = Net()
    Trainer(max_epochs=1, **quiet).fit(module, [torch.ones(1, 2)])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._trainer is None
        assert torch.equal(other.layer.weight, module.layer.weight)
        assert other.hparams == {"width": 2}


def test_a_module_inside_a_module_knows_the_trainer(quiet: dict[str, Any]) -> None:
    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.inner.log("inner", 1.0)
            assert self.inner.trainer is self.trainer
            return self(batch).sum()

    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(Outer(), [torch.ones(1, 2)])
    assert trainer.callback_metrics["inner"] == 1.0


def test_freeze_and_unfreeze() -> None:
    module = Net().freeze()
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_onnx_export_computes_the_same_and_leaves_modes_and_trainer_alone(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"

    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.asleep = nn.Dropout().eval()

        def forward(self, x: Any) -> Any:
            return self.asleep(self.layer(x))

        def on_train_epoch_end(self) -> None:
            self.to_onnx(path)
            self.log("after", 1.0)
            assert (self.training, self.asleep.training) == (True, False)

    module, trainer = Module(), Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.ones(1, 2)])
    assert trainer.callback_metrics["after"] == 1.0
    onnx.checker.check_model(onnx.load(path))
    x = torch.rand(3, 2)
    (found,) = reference.ReferenceEvaluator(str(path)).run(None, {onnx.load(path).graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x).detach())
    module.example_input_array = None
    with pytest.raises(ValueError, match=r"needs an example input\. Pass input_sample="):
        module.to_onnx(path)


def test_a_step_may_fetch_its_batches_itself(quiet: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Module(Net):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            seen.append((batch.sum().item(), batch_idx, dataloader_idx))
            return self(batch).sum()

    trainer = Trainer(max_epochs=2, **quiet)
    trainer.fit(Module(), [torch.ones(1, 2) * i for i in range(3)])
    assert seen == [(0.0, 0, 0), (2.0, 1, 0), (4.0, 2, 0)] * 2
    assert trainer.global_step == 6


def test_a_step_that_never_fetches_is_told(quiet: dict[str, Any]) -> None:
    class Module(Net):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.layer.weight.sum()

    with pytest.raises(RuntimeError, match=r"without calling next\(dataloader_iter\)"):
        Trainer(max_epochs=1, **quiet).fit(Module(), [torch.ones(1, 2)])


def test_print_goes_through_the_trainer_or_straight_out(capsys: pytest.CaptureFixture[str]) -> None:
    Net().print("hello", 3)
    assert capsys.readouterr().out == "hello 3\n"


class Whole(Net):
    """Everything a run can call is there."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self(batch).sum())

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self(batch).sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


NEEDED = {"fit": ("training_step", "configure_optimizers"), "validate": ("validation_step",), "test": ("test_step",)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*HOOKS, *MODULE_METHODS])
def test_none_stands_for_any_method_that_is_not_overridden(name: str, quiet: dict[str, Any]) -> None:
    data = [torch.ones(1, 2)]
    for entry in ("fit", "validate", "test", "predict"):
        module = Whole()
        setattr(module, name, None)
        trainer = Trainer(max_epochs=1, gradient_clip_val=1.0, **quiet)
        arguments = {"val_dataloaders": data} if entry == "fit" else {}
        if name in NEEDED.get(entry, ()):
            with pytest.raises(NotImplementedError, match=f"Whole has no {name}"):
                getattr(trainer, entry)(module, data, **arguments)
        else:
            getattr(trainer, entry)(module, data, **arguments)
            assert trainer.state.finished


@pytest.mark.parametrize("known", [True, False])
def test_a_step_that_fetches_its_batches_validates_and_schedules_at_the_epochs_end(
    known: bool, quiet: dict[str, Any]
) -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([torch.ones(1, 2)] * 3)

    class Module(Whole):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self(batch).sum()

        def on_validation_start(self) -> None:
            validated.append(self.global_step)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduled.append(self.global_step)
            scheduler.step()

    validated: list[int] = []
    scheduled: list[int] = []
    trainer = Trainer(max_epochs=2, num_sanity_val_steps=0, **quiet)
    trainer.fit(Module(), [torch.ones(1, 2)] * 3 if known else Endless(), [torch.ones(1, 2)])
    assert (validated, scheduled) == ([3, 6], [3, 6])


def test_a_module_loaded_from_a_checkpoint_computes_the_same(tmp_path: Path, quiet: dict[str, Any]) -> None:
    module = Net(3)
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(module, [torch.ones(1, 3)] * 2)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    found = Net.load_from_checkpoint(tmp_path / "net.ckpt")
    assert found.hparams == {"width": 3}
    assert torch.equal(found(torch.ones(1, 3)), module(torch.ones(1, 3)))
    with pytest.raises(RuntimeError, match="with a different shape"):
        Net.load_from_checkpoint(tmp_path / "net.ckpt", width=2)
