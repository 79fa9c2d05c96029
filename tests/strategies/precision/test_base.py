"""A subclass's own methods are called, and complex tensors stay complex wherever floating-point ones are converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.distributed.tensor import DTensor

from paceline import Trainer, TrainingModule, messages
from paceline.big_model.dispatch import attach_layerwise_casting_hooks
from paceline.compat.accelerate.big_model import set_module_tensor_to_device
from paceline.estimate.memory_estimate import estimate_memory
from paceline.processes.device_transfer import convert, in_dtype
from paceline.strategies import FSDPStrategy
from paceline.strategies.precision import DoublePrecision, MixedPrecision, Precision

BECOMES = {
    "64-true": (torch.float64, torch.complex128),
    "16-true": (torch.float16, torch.complex64),
    "bf16-true": (torch.bfloat16, torch.complex64),
}


class Waves(TrainingModule):
    """Turns its complex input by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.full((4, 4), 0.1 + 0.5j))
        self.register_buffer("shift", torch.full((4,), 1 + 2j))
        self.register_buffer("order", torch.arange(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, z.dtype]
        return self.line(x).float().mean() + (z @ self.turn + self.shift).abs().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 4), torch.full((2, 4), 1j, dtype=torch.complex64)


def check(module: Waves, precision: str) -> None:
    real, complex_ = BECOMES[precision]
    assert module.seen == [real, complex_]
    assert module.line.weight.dtype == real
    assert module.turn.dtype == module.shift.dtype == complex_
    assert module.order.dtype == torch.int64
    torch.testing.assert_close(module.turn.detach().cpu(), torch.full((4, 4), 0.1 + 0.5j), check_dtype=False)
    assert module.shift.cpu().tolist() == [1 + 2j] * 4


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("precision", BECOMES)
def test_complex_weights_and_inputs_stay_complex_in_true_precisions(precision: str, quiet: dict[str, Any]) -> None:
    module = Waves()
    Trainer(**quiet, max_epochs=1, precision=precision).fit(module, [batch()])
    check(module, precision)


def test_complex_buffers_stay_complex_beside_sharded_weights(quiet: dict[str, Any]) -> None:
    class Turned(Waves):
        def __init__(self) -> None:
            super().__init__()
            turn = self.turn.detach()
            del self.turn
            self.register_buffer("turn", turn)

    def run() -> None:
        module = Turned()
        Trainer(**quiet, max_epochs=1, precision="64-true", strategy="fsdp").fit(module, [batch()])
        assert isinstance(module.line.weight, DTensor)
        check(module, "64-true")

    ranks(1, run)


def test_an_estimate_counts_complex_weights_as_they_are_converted() -> None:
    plain, double = (estimate_memory(Waves(), batch(), precision=name) for name in ("32-true", "64-true"))
    assert double.weights - plain.weights == 4 * (16 + 4) + 8 * (16 + 4)


def test_layerwise_casting_leaves_complex_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    before = model[1].weight.detach().clone()
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    assert [layer.weight.dtype for layer in model] == [torch.bfloat16, torch.complex64]
    model[1](torch.ones(1, 2, dtype=torch.complex64))
    assert torch.equal(model[1].weight, before)


def test_a_tensor_set_by_name_keeps_its_kind() -> None:
    model = Waves()
    for name, value in (("turn", torch.full((4, 4), 2j)), ("order", torch.arange(4)), ("line.bias", torch.ones(4))):
        set_module_tensor_to_device(model, name, "cpu", value, dtype=torch.float16)
    assert model.turn[0, 0] == 2j
    assert (model.order.dtype, model.line.bias.dtype) == (torch.int64, torch.float16)


def test_ranks_whose_weights_differ_in_what_is_imaginary_are_told(quiet: dict[str, Any]) -> None:
    def run() -> list[str]:
        said: list[str] = []
        messages.info_once = said.append
        module = Waves()
        trainer = Trainer(**quiet, max_epochs=1, devices=2, strategy="ddp")
        trainer.strategy.setup_environment()
        if trainer.global_rank:
            module.turn.data += 1j
        trainer.strategy.same_model(module)  # type: ignore[attr-defined]
        return said

    for said in ranks(2, run):
        assert len(said) == 1
        assert "with different weights (turn)" in said[0]


def test_the_kinds() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool)
    assert [in_dtype(kind, torch.float64) for kind in kinds] == [
        torch.float64,
        torch.float64,
        torch.complex128,
        torch.int8,
        torch.bool,
    ]
    assert [in_dtype(kind, torch.float16) for kind in kinds[2:]] == list(kinds[2:])
    layer = nn.Linear(2, 2, dtype=torch.complex64)
    weight = layer.weight
    assert convert(layer, torch.float64) is layer
    assert layer.weight is weight
    assert layer.weight.dtype == torch.complex128


class Weight(TrainingModule):
    """Notes the batches that its steps get."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[float] = []

    def configure_model(self) -> None:
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(batch))
        return (self.weight * batch).sum()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.seen.append(float(batch))

    predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], 0.1)


BATCHES = [torch.ones(1, 1)]


@pytest.mark.parametrize("base", [Precision, DoublePrecision, MixedPrecision])
def test_methods_that_a_subclass_overrides_are_called(base: Any) -> None:
    calls: list[str] = []

    class Own(base):
        precision = "mine"

        def convert_input(self, data: Any) -> Any:
            calls.append("input")
            return super().convert_input(data) * 100

        def forward_context(self) -> AbstractContextManager[Any]:
            calls.append("context")
            return super().forward_context()

        def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
            calls.append(f"clip {clip_val} {gradient_clip_algorithm}")
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> bool:
            calls.append("step")
            return super().optimizer_step(*args, **kwargs)

        def convert_module(self, module: nn.Module) -> nn.Module:
            calls.append("module")
            return super().convert_module(module)

        def module_init_context(self) -> AbstractContextManager[Any]:
            calls.append("create")
            return super().module_init_context()

        def teardown(self) -> None:
            calls.append("teardown")

    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, plugins=[Own()], gradient_clip_val=0.5, enable_checkpointing=False
    )
    module = Weight()
    trainer.fit(module, BATCHES)
    assert trainer.precision == "mine"
    assert calls == ["create", "module", "input", "context", "clip 0.5 norm", "step", "teardown"]
    assert module.weight.item() == pytest.approx(0.95)  # the clipped gradient is 0.5, not 100
    calls.clear()
    trainer.validate(module, BATCHES, verbose=False)
    trainer.predict(module, BATCHES)
    assert [call for call in calls if call in ("input", "context")] == ["input", "context"] * 2
    assert module.seen == [100, 100, 100]


def test_one_of_the_methods_that_clip_is_enough() -> None:
    class Own(Precision):
        def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
            clipped.append(clip_val)

    class Forward(MixedPrecision):
        def autocast_context_manager(self) -> torch.autocast:
            clipped.append(0)
            return super().autocast_context_manager()

    clipped: list[float] = []
    for own in (Own(), Forward("bf16-mixed")):
        trainer = Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            plugins=[own],
            gradient_clip_val=0.5,
            gradient_clip_algorithm="value",
            enable_checkpointing=False,
        )
        trainer.fit(Weight(), BATCHES)
    assert clipped == [0.5, 0]


def test_a_method_that_would_not_be_called_is_refused_at_construction() -> None:
    def with_method(name: str, method: Any = lambda self, *_: None) -> Precision:
        return type("Own", (Precision,), {name: method})()

    with pytest.raises(TypeError, match="Own overrides clip_gradients, which FSDPStrategy never calls"):
        Trainer(strategy=FSDPStrategy(with_method("clip_gradients")), accelerator="cpu")
    for name in ("clip_gradients", "backward"):
        with pytest.raises(ValueError, match=f"Own overrides '{name}', which would have to run in the middle"):
            Trainer(accelerator="cpu", plugins=[with_method(name)], compile="step")


class Told(Precision):
    """Overrides the methods of a step with the arguments that they have in Lightning, and records the calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
        self.calls.append(f"connect {len(optimizers)}")
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        self.calls.append("pre_backward")
        return super().pre_backward(2 * tensor, module)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"backward {type(optimizer).__name__}")
        super().backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        self.calls.append("post_backward")
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **arguments: Any) -> Any:
        assert isinstance(model, TrainingModule)
        self.calls.append("optimizer_step")
        return super().optimizer_step(optimizer, model=model, closure=closure, **arguments)

    def train_step_context(self) -> Any:
        return self.noting("train")

    def val_step_context(self) -> Any:
        return self.noting("val")

    def test_step_context(self) -> Any:
        return self.noting("test")

    def predict_step_context(self) -> Any:
        return self.noting("predict")

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        self.calls.append(f"enter {name}")
        with super().train_step_context():
            yield
        self.calls.append(f"exit {name}")


class Telling(Weight):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.calls.append("on_before_backward")

    def on_after_backward(self) -> None:
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("on_before_optimizer_step")

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.calls.append("test_step")


BACKWARD_CALLS = ["pre_backward", "on_before_backward", "backward SGD", "post_backward", "on_after_backward"]
ALONE: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def test_the_methods_of_a_step_are_called_with_lightnings_arguments_and_in_its_order() -> None:
    calls: list[str] = []
    module = Telling(calls)
    trainer = Trainer(max_steps=1, plugins=[Told(calls)], **ALONE)
    trainer.fit(module, BATCHES)
    step = ["optimizer_step", "enter train", "exit train", *BACKWARD_CALLS, "on_before_optimizer_step"]
    assert calls == ["connect 1", *step]
    plain = Weight()
    Trainer(max_steps=1, **ALONE).fit(plain, BATCHES)
    assert module.weight.item() - 1 == pytest.approx(2 * (plain.weight.item() - 1))  # pre_backward doubles the loss
    calls.clear()
    trainer.test(module, BATCHES[:1], verbose=False)
    assert calls == ["connect 1", "enter test", "test_step", "exit test"]
    calls.clear()
    trainer.validate(module, BATCHES[:1], verbose=False)
    trainer.predict(module, BATCHES[:1])
    assert calls == ["connect 1", "enter val", "exit val", "connect 1", "enter predict", "exit predict"]


def test_a_window_steps_once_through_the_precision() -> None:
    calls: list[str] = []
    Trainer(max_steps=1, accumulate_grad_batches=2, plugins=[Told(calls)], **ALONE).fit(Telling(calls), BATCHES * 2)
    one = ["enter train", "exit train", *BACKWARD_CALLS]
    assert calls == ["connect 1", *one, "optimizer_step", *one, "on_before_optimizer_step"]


def test_manual_optimization_runs_through_the_precision() -> None:
    calls: list[str] = []

    class Manual(Telling):
        def training_step(self, batch: torch.Tensor) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            self.manual_backward(self.weight * batch.sum())
            optimizer.step()
            optimizer.zero_grad()

    module = Manual(calls)
    module.automatic_optimization = False
    Trainer(max_steps=1, plugins=[Told(calls)], **ALONE).fit(module, BATCHES)
    backward = [call.replace("SGD", "NoneType") for call in BACKWARD_CALLS]
    step = ["on_before_optimizer_step", "optimizer_step"]
    assert calls == ["connect 1", "enter train", *backward, *step, "exit train"]


def test_connect_must_return_the_same_module() -> None:
    class Other(Precision):
        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
            return nn.Linear(1, 1), optimizers, lr_schedulers

    with pytest.raises(
        TypeError, match=r"Other.connect returned a different module than the one it received \(Weight\)"
    ):
        Trainer(max_steps=1, plugins=[Other()], **ALONE).fit(Weight(), BATCHES)


def connecting(base: Any, change: Any, *arguments: Any) -> Any:
    """Return a precision whose ``connect`` returns ``change(model, optimizers, lr_schedulers)``."""

    def connect(self: Any, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        return change(model, optimizers, lr_schedulers)

    return type("Own", (base,), {"connect": connect})(*arguments)


class Two(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda model, *_: None, "None"),
        (lambda model, optimizers, schedulers: optimizers[0], "SGD"),
        (lambda model, optimizers, schedulers: (model, optimizers), r"\(Weight, \[SGD\]\)"),
        (lambda model, optimizers, schedulers: (model, optimizers[0], schedulers), r"\(Weight, SGD, \[\]\)"),
        (lambda model, optimizers, schedulers: (model, ["adam"], schedulers), r"\(Weight, \[str\], \[\]\)"),
        (lambda model, optimizers, schedulers: (model, optimizers, None), r"\(Weight, \[SGD\], None\)"),
        (lambda model, optimizers, schedulers: (model, optimizers, [1]), r"\(Weight, \[SGD\], \[int\]\)"),
    ],
)
def test_connect_must_return_a_module_optimizers_and_schedulers(returned: Any, said: str) -> None:
    trainer = Trainer(max_steps=1, plugins=[connecting(Precision, returned)], **ALONE)
    with pytest.raises(TypeError, match=rf"Own.connect returned {said}, but .* Return \(model, optimizers,"):
        trainer.fit(Weight(), BATCHES)


def test_optimizers_that_connect_returns_are_checked() -> None:
    def twice(model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        return model, [*optimizers, torch.optim.Adam(optimizers[0].param_groups[0]["params"])], lr_schedulers

    def lbfgs(model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        return model, [torch.optim.LBFGS(optimizers[0].param_groups[0]["params"])], lr_schedulers

    with pytest.raises(ValueError, match=r"Own.connect returned SGD and Adam, and the parameter 'weight' is in both"):
        Trainer(max_steps=1, plugins=[connecting(Precision, twice)], **ALONE).fit(Weight(), BATCHES)
    with pytest.raises(ValueError, match="precision='16-mixed' does not work with LBFGS"):
        Trainer(max_steps=1, plugins=[connecting(MixedPrecision, lbfgs, "16-mixed")], **ALONE).fit(Weight(), BATCHES)


def test_two_optimizers_that_connect_returns_share_a_loss_scale() -> None:
    def split(model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        return model, [torch.optim.SGD(part.parameters(), 0.1) for part in model.children()], lr_schedulers

    own = connecting(MixedPrecision, split, "16-mixed")
    trainer = Trainer(max_steps=1, plugins=[own], **ALONE)
    trainer.fit(Two(), BATCHES)
    assert len(trainer.optimizers) == 2
    assert own.shared_scale() is not None


def test_a_precision_that_does_not_run_the_closure_is_named() -> None:
    class Lazy(Precision):
        def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **arguments: Any) -> Any:
            optimizer.step()

    class Own(Weight):
        def optimizer_step(self, *args: Any) -> None: ...

    with pytest.raises(RuntimeError, match=r"^Lazy.optimizer_step did not run the closure.* closure\(\) to skip"):
        Trainer(max_steps=1, plugins=[Lazy()], **ALONE).fit(Weight(), BATCHES)
    with pytest.raises(RuntimeError, match=r"^Own.optimizer_step did not run the closure"):
        Trainer(max_steps=1, plugins=[Lazy()], **ALONE).fit(Own(), BATCHES)


def test_a_step_that_fp16_skips_does_not_count_whatever_an_override_returns() -> None:
    class Silent(MixedPrecision):
        def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **arguments: Any) -> Any:
            super().optimizer_step(optimizer, model=model, closure=closure, **arguments)

    trainer = Trainer(max_epochs=1, plugins=[Silent("16-mixed")], **ALONE)
    trainer.fit(Weight(), [torch.ones(1, 1), torch.full((1, 1), torch.inf), torch.ones(1, 1)])
    assert trainer.precision_plugin.skipped_steps == 1  # type: ignore[attr-defined]
    assert trainer.global_step == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_steps_through_the_precision(strategy: str) -> None:
    def run() -> tuple[list[str], float]:
        calls: list[str] = []
        module = Telling(calls)
        trainer = Trainer(max_steps=1, devices=2, strategy=strategy, plugins=[Told(calls)], **ALONE)
        trainer.fit(module, BATCHES * 2)
        weight = module.weight
        return calls, float((weight.full_tensor() if isinstance(weight, DTensor) else weight).detach())

    step = ["optimizer_step", "enter train", "exit train", *BACKWARD_CALLS, "on_before_optimizer_step"]
    for calls, weight in ranks(2, run):
        assert calls == ["connect 1", *step]
        assert weight == pytest.approx(0.8)
