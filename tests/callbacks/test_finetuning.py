from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet_fits import SaveAt, SaveInValidation, loader, trainer
from torch import Tensor, nn
from torch.optim import lr_scheduler

from paceline import Trainer, TrainingModule
from paceline.callbacks.base import Callback
from paceline.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from paceline.messages import PacelineWarning


class Net(TrainingModule):
    """A backbone with BatchNorm and a head; the optimizer gets what trains at first."""

    def __init__(self, schedule: Any = None, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 1)
        self.schedule = schedule
        self.optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=0.01))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.backbone(x)), y)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


class Recorder(Callback):
    """At each epoch's end the backbone's weight and gradient, and the learning rate of each group during the epoch."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.rates: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        assert all(p.grad is None or not p.grad.any() for p in held)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights.append(pl_module.backbone[0].weight.detach().clone())


def frozen(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if not p.requires_grad]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- helpers ---------------------------------------------------------------------------------------------------------


class WithParameter(nn.Module):
    """A layer that owns a parameter and has children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.inner = nn.Linear(2, 2)


def test_flattening_finds_leaves_and_layers_with_parameters_of_their_own_once() -> None:
    own, sequence = WithParameter(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    tree = [own, nn.ModuleDict({"s": sequence}), (sequence[0], nn.ModuleList([own.inner]))]
    assert BaseFinetuning.flatten_modules(tree) == [own, own.inner, sequence[0], sequence[1]]
    assert BaseFinetuning.flatten_modules(sequence) == [sequence[0], sequence[1]]


@pytest.mark.parametrize(
    ("given", "kind"), [("backbone", "str"), (nn.Linear(2, 2).parameters(), "Parameter"), (3, "int")]
)
def test_flattening_refuses_what_is_no_module(given: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"(?s)got .* of type {kind}.*Pass layers such as"):
        BaseFinetuning.flatten_modules(given)


@pytest.mark.parametrize("train_bn", [True, False])
def test_freezing_leaves_batch_norm_trainable_if_asked(train_bn: bool) -> None:
    net = Net()
    BaseFinetuning.freeze(net.backbone, train_bn=train_bn)
    bn = [] if train_bn else ["backbone.1.weight", "backbone.1.bias"]
    assert frozen(net) == ["backbone.0.weight", "backbone.0.bias", *bn]
    assert net.backbone[1].track_running_stats is train_bn
    before = net.backbone[1].running_mean.clone()
    net.backbone(torch.randn(4, 4) + 2)
    assert torch.equal(net.backbone[1].running_mean, before) is not train_bn


def test_freezing_a_layer_with_children_freezes_all_of_it_and_unfreezing_undoes_it() -> None:
    layer = nn.Sequential(WithParameter(), nn.BatchNorm1d(2))
    BaseFinetuning.freeze(layer, train_bn=False)
    assert len(frozen(layer)) == 5
    BaseFinetuning.make_trainable(layer)
    assert frozen(layer) == []
    assert layer[1].track_running_stats is True


def test_batch_norm_without_statistics_is_not_given_any() -> None:
    layer = nn.BatchNorm1d(2, track_running_stats=False)
    BaseFinetuning.freeze(layer, train_bn=False)
    BaseFinetuning.make_trainable(layer)
    assert layer.track_running_stats is False


def test_filtering_yields_each_parameter_once_by_state_and_kind() -> None:
    net = Net()
    net.backbone[0].weight.requires_grad = False
    tree = [net.backbone, net.backbone[0]]

    def names(**kwargs: Any) -> list[str]:
        of = {id(p): name for name, p in net.named_parameters()}
        return [of[id(p)] for p in BaseFinetuning.filter_params(tree, **kwargs)]

    assert names() == ["backbone.0.bias", "backbone.1.weight", "backbone.1.bias"]
    assert names(train_bn=False) == ["backbone.0.bias"]
    assert names(requires_grad=False) == ["backbone.0.weight"]


def test_parameters_of_equal_value_are_told_apart_when_they_join_an_optimizer() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.load_state_dict(first.state_dict())
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    assert BaseFinetuning.filter_on_optimizer(optimizer, second.parameters()) == list(second.parameters())


def test_parameters_that_the_optimizer_holds_are_told_about() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([layer.bias], lr=0.1)
    with pytest.warns(PacelineWarning, match=r"1 of the 2 parameters.*stay in their groups.*requires_grad"):
        assert BaseFinetuning.filter_on_optimizer(optimizer, layer.parameters()) == [layer.weight]


@pytest.mark.parametrize(
    ("kwargs", "rate"), [({}, 0.01), ({"initial_denom_lr": 4.0}, 0.025), ({"lr": 0.5}, 0.5), ({"lr": 0.0}, 0.0)]
)
def test_a_new_group_gets_the_rate_asked_for(kwargs: dict[str, float], rate: float) -> None:
    net = Net()
    BaseFinetuning.freeze(net.backbone)
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    BaseFinetuning.unfreeze_and_add_param_group(net.backbone, optimizer, **kwargs)
    assert frozen(net) == []
    assert optimizer.param_groups[1]["lr"] == pytest.approx(rate)
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in net.backbone.parameters()]


def test_unfreezing_without_batch_norm_leaves_it_frozen_and_out_of_the_optimizer() -> None:
    net = Net()
    BaseFinetuning.freeze(net.backbone, train_bn=False)
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    BaseFinetuning.unfreeze_and_add_param_group(net.backbone, optimizer, train_bn=False)
    assert frozen(net) == ["backbone.1.weight", "backbone.1.bias"]
    assert len(optimizer.param_groups[1]["params"]) == 2
    assert net.backbone[1].track_running_stats is False


def test_gradients_from_before_a_layer_trained_are_dropped() -> None:
    net = Net()
    net.backbone[0].weight.grad = torch.ones(6, 4)
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    BaseFinetuning.unfreeze_and_add_param_group(net.backbone, optimizer)
    assert net.backbone[0].weight.grad is None


# ---- fits ------------------------------------------------------------------------------------------------------------


class Stages(BaseFinetuning):
    """The first layer joins in epoch 1, BatchNorm in epoch 2."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[int] = []

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.called.append(epoch)
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.002)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[1], optimizer)


def test_layers_train_from_the_epoch_they_join_and_their_gradients_are_cleared(tmp_path: Path) -> None:
    module, record, stages = Net(), Recorder(), Stages()
    before = module.backbone[0].weight.detach().clone()
    run = trainer(tmp_path, stages, record, max_epochs=3, gradient_clip_val=1.0)
    run.fit(module, loader())
    assert torch.equal(record.weights[0], before)
    assert not torch.equal(record.weights[1], before)
    assert not torch.equal(record.weights[2], record.weights[1])
    assert not torch.equal(module.backbone[1].weight, torch.ones(6))
    assert record.rates == [[0.01], [0.01, 0.002], [0.01, 0.002, pytest.approx(0.001)]]
    assert stages.called == [0, 1, 2]
    assert len(run.optimizers[0].state) == 6


def test_validating_does_not_freeze(tmp_path: Path) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    module = Validated()
    trainer(tmp_path, Stages(), max_epochs=1).validate(module, loader(), verbose=False)
    assert frozen(module) == []


@pytest.mark.parametrize("save", [SaveAt, SaveInValidation])
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("cls", [Stages, BackboneFinetuning])
@pytest.mark.parametrize("schedule", [None, "lambda"])
def test_a_resumed_run_continues_to_the_bit(
    tmp_path: Path, cls: type[BaseFinetuning], epoch: int, save: type[SaveAt], schedule: str | None
) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    def run(ckpt_path: Path | None = None) -> tuple[Net, Trainer]:
        callback = Stages() if cls is Stages else BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        module = Validated(schedule and (lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e)))
        fit = trainer(tmp_path, callback, save(epoch, tmp_path / "r.ckpt"), max_epochs=4)
        torch.manual_seed(3)
        fit.fit(module, loader(shuffle=True), loader(), ckpt_path=ckpt_path)
        return module, fit

    whole, first = run()
    resumed, second = run(tmp_path / "r.ckpt")
    assert_same(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert frozen(resumed) == frozen(whole) == []
    assert resumed.backbone[1].track_running_stats is whole.backbone[1].track_running_stats is True
    one, other = (fit.optimizers[0].state_dict() for fit in (first, second))
    assert one["param_groups"] == other["param_groups"]
    assert len(one["param_groups"]) > 1


class Every(BackboneFinetuning):
    """Adds the backbone to every optimizer, as the stand-in for Lightning does."""

    _every_optimizer = True


class Second(BaseFinetuning):
    """Adds the backbone to the second optimizer, layer by layer."""

    def __init__(self, unfreeze_backbone_at_epoch: int, **kwargs: Any) -> None:
        super().__init__()
        self.epoch = unfreeze_backbone_at_epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Adam) and epoch in (self.epoch, self.epoch + 1):
            self.unfreeze_and_add_param_group(pl_module.backbone[epoch - self.epoch], optimizer, lr=0.001)


@pytest.mark.parametrize(
    ("cls", "rates"), [(Every, [[0.1, 0.1], [0.01, 0.01]]), (Second, [[0.1], [0.01, 0.001, 0.001]])]
)
def test_several_optimizers_train_what_they_are_given_and_resume_to_the_bit(
    tmp_path: Path, cls: Any, rates: list[list[float]]
) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD([self.head.weight], lr=0.1, momentum=0.9)
            return [sgd, torch.optim.Adam([self.head.bias], lr=0.01)]

    def run(ckpt_path: Path | None = None) -> tuple[Net, Trainer]:
        module, path = Two(), tmp_path / "r.ckpt"
        fit = trainer(tmp_path, cls(1, lambda_func=lambda epoch: 50.0), SaveAt(2, path), max_epochs=5)
        fit.fit(module, loader(), ckpt_path=ckpt_path)
        return module, fit

    (whole, first), (resumed, second) = run(), run(tmp_path / "r.ckpt")
    assert_same(dict(resumed.state_dict()), dict(whole.state_dict()))
    for fit in (first, second):
        assert [[group["lr"] for group in optimizer.param_groups] for optimizer in fit.optimizers] == rates
    for one, other in zip(first.optimizers, second.optimizers, strict=True):
        states = zip(*(optimizer.state_dict()["state"].items() for optimizer in (one, other)), strict=True)
        assert all(str(mine) == str(theirs) for mine, theirs in states)


def test_a_resume_with_another_module_names_the_missing_parameters(tmp_path: Path) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False
            self.backbone = nn.Sequential(nn.Identity(), nn.Linear(4, 6), nn.BatchNorm1d(6))

    path = tmp_path / "r.ckpt"
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=0, train_bn=False)
    trainer(tmp_path, finetuning, SaveAt(0, path), max_epochs=1).fit(Net(), loader())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"] = {n: v for n, v in checkpoint["state_dict"].items() if n.startswith("head")}
    torch.save(checkpoint, path)
    again = trainer(tmp_path, BackboneFinetuning(unfreeze_backbone_at_epoch=0, train_bn=False), max_epochs=2)
    with (
        pytest.raises(RuntimeError, match=r"does not have \(2 in total, such as 'backbone.0.weight'.*Resume with"),
        pytest.warns(PacelineWarning),
    ):
        again.fit(Other(), loader(), ckpt_path=path)


def test_a_parameter_that_is_not_the_modules_is_refused(tmp_path: Path) -> None:
    class Foreign(Stages):
        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(nn.Linear(3, 2), optimizer)

    with pytest.raises(ValueError, match=r"finetune_function.*shape \(2, 3\) that does not belong to Net.*attribute"):
        trainer(tmp_path, Foreign(), max_epochs=1).fit(Net(), loader())


def test_methods_that_are_not_written_are_asked_for(tmp_path: Path) -> None:
    class Nothing(BaseFinetuning):
        pass

    class Half(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

    with pytest.raises(NotImplementedError, match=r"Nothing does not define freeze_before_training.*Define it"):
        trainer(tmp_path, Nothing(), max_epochs=1).fit(Net(), loader())
    with pytest.raises(NotImplementedError, match=r"Half does not define finetune_function.*Define it"):
        trainer(tmp_path, Half(), max_epochs=1).fit(Net(), loader())


# ---- schedulers ------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LambdaLR(o, lambda e: 0.5 + 0.1 * e), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_new_group_follows_the_schedule_of_the_first_in_proportion(tmp_path: Path, name: str) -> None:
    module = Net(SCHEDULES[name], lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    record = Recorder()
    stages = Stages()
    trainer(tmp_path, stages, record, max_epochs=4).fit(module, loader())
    first, added = (torch.tensor([rates[group] for rates in record.rates[1:]]) for group in (0, 1))
    assert len(set(first.tolist())) > 1
    torch.testing.assert_close(added / added[0], first / first[0])
    assert added[0].item() == pytest.approx(0.002)


# ---- BackboneFinetuning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "backbone"),
    [
        ({}, [0.001, 0.002, 0.004, 0.008, 0.01]),
        ({"should_align": False}, [0.001, 0.002, 0.004, 0.008, 0.016]),
        ({"backbone_initial_ratio_lr": 0.5, "lambda_func": lambda epoch: 1.5}, [0.005, 0.0075, 0.01, 0.01, 0.01]),
        ({"backbone_initial_lr": 1e-4, "lambda_func": lambda epoch: epoch}, [1e-4, 3e-4, 12e-4, 60e-4, 0.01]),
        ({"initial_denom_lr": 5.0, "lambda_func": lambda epoch: 1.0}, [0.002] * 5),
    ],
)
def test_the_backbones_rate_grows_until_it_meets_the_others(
    tmp_path: Path, kwargs: dict[str, Any], backbone: list[float]
) -> None:
    record = Recorder()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, **kwargs)
    trainer(tmp_path, finetuning, record, max_epochs=6).fit(Net(), loader())
    assert record.rates[0] == [0.01]
    assert [rates[1] for rates in record.rates[1:]] == pytest.approx(backbone)
    assert [rates[0] for rates in record.rates] == [0.01] * 6


@pytest.mark.parametrize("train_bn", [True, False])
def test_the_backbone_stands_still_until_its_epoch(tmp_path: Path, train_bn: bool) -> None:
    module, record = Net(), Recorder()
    before = module.backbone[0].weight.detach().clone()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, train_bn=train_bn)
    run = trainer(tmp_path, finetuning, record, max_epochs=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PacelineWarning)
        run.fit(module, loader())
    assert [len(group["params"]) for group in run.optimizers[0].param_groups] == ([4, 2] if train_bn else [2, 2])
    assert torch.equal(record.weights[1], before)
    assert not torch.equal(record.weights[2], before)
    assert torch.equal(module.backbone[1].weight, torch.ones(6)) is not train_bn
    assert module.backbone[1].track_running_stats is train_bn


def test_an_optimizer_that_holds_the_frozen_backbone_is_told_about(tmp_path: Path) -> None:
    class All(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    record = Recorder()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)
    with pytest.warns(PacelineWarning, match="already contains 2 of the 2 parameters to unfreeze"):
        trainer(tmp_path, finetuning, record, max_epochs=3).fit(All(), loader())
    assert record.rates == [[0.01]] * 3


def test_rates_are_said_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False, verbose=True, rounding=3)
    trainer(tmp_path, finetuning, max_epochs=3).fit(Net(), loader())
    said = [record.message for record in caplog.records if "backbone" in record.message]
    assert said == [
        "Epoch 1: learning rate 0.01, backbone 0.001",
        "Epoch 2: learning rate 0.01, backbone 0.002",
    ]


def test_a_module_without_backbone_is_told(tmp_path: Path) -> None:
    class Headless(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.backbone

    with pytest.raises(TypeError, match=r"Headless.backbone to be an nn.Module.*found None.*Create the backbone"):
        trainer(tmp_path, BackboneFinetuning(), max_epochs=1).fit(Headless(), loader())


def test_of_several_optimizers_the_first_trains_the_backbone(tmp_path: Path) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.head.parameters()]

    class Nothing(Two):
        def configure_optimizers(self) -> Any:
            return None

    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    run = trainer(tmp_path, finetuning, max_epochs=3)
    run.fit(Two(), loader())
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in run.optimizers]
    assert rates == [[0.1, pytest.approx(0.02)], [0.1]]
    with pytest.raises(ValueError, match=r"Nothing.configure_optimizers returned no optimizer"):
        trainer(tmp_path, BackboneFinetuning(), max_epochs=1).fit(Nothing(), loader())


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"unfreeze_backbone_at_epoch": -1}, ValueError, ["unfreeze_backbone_at_epoch=-1", "at least 0"]),
        ({"unfreeze_backbone_at_epoch": 1.0}, TypeError, ["unfreeze_backbone_at_epoch=1.0", "float", "integer"]),
        ({"lambda_func": 2.0}, TypeError, ["lambda_func=2.0", "is not callable", "Pass a function"]),
        ({"backbone_initial_ratio_lr": 0}, ValueError, ["backbone_initial_ratio_lr=0", "Pass a positive number"]),
        ({"backbone_initial_lr": "1e-3"}, TypeError, ["backbone_initial_lr='1e-3'", "str", "Pass a positive number"]),
        ({"initial_denom_lr": -2.0}, ValueError, ["initial_denom_lr=-2.0", "Pass a positive number"]),
        ({"rounding": -1}, ValueError, ["rounding=-1", "at least 0"]),
        (
            {"backbone_initial_lr": 0.1, "initial_denom_lr": 2.0},
            ValueError,
            ["'backbone_initial_lr' and 'initial_denom_lr'", "only one of them", "Pass only one"],
        ),
    ],
)
def test_an_invalid_argument_is_told_with_value_reason_and_remedy(
    kwargs: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        BackboneFinetuning(**kwargs)
    for word in words:
        assert word in str(caught.value)
