"""``Trainer(compile="step")``: one graph a step, and the numbers of the same run without it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks import LossGuard
from paceline.messages import PacelineWarning
from paceline.trainer.compiled_step import MOST_SHAPES

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9),
}
graphs: list[Any] = []


def counted(graph: Any, inputs: Any) -> Any:
    """A backend that runs what was traced as it is, and counts."""
    graphs.append(graph)
    return graph.forward


COUNTED = {"scope": "step", "backend": counted}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    graphs.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compile on this thread: those that torch starts for it live on."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


class Net(TrainingModule):
    def __init__(
        self, optimizer: str = "sgd", schedule: bool = True, items: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 3), nn.Dropout(dropout))
        self.optimizer, self.schedule, self.items = optimizer, schedule, items
        self.rates: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        found = self.net(x)
        loss = nn.functional.cross_entropy(found, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"right": (found.argmax(1) == y).float().mean(), "size": float(len(y))}, on_epoch=True)
        return {"loss": loss, "num_items": len(y)} if self.items else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert all(parameter.grad is None for parameter in self.parameters()) or self.trainer.state.window
        assert not outputs["loss"].requires_grad
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Curves(Callback):
    """What is known of the logged values after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def batches(samples: int = 24, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def trained(quiet: dict[str, Any], module: Any, data: Any = None, epochs: int = 2, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**quiet, "max_epochs": epochs, **arguments})
    trainer.fit(module, batches() if data is None else data)
    return trainer


def same_weights(module: nn.Module, other: nn.Module, exactly: bool = False) -> None:
    for name, value in module.state_dict().items():
        if exactly:
            assert torch.equal(value, other.state_dict()[name]), name
        else:
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_graph_makes_the_steps_of_a_run_without(quiet: dict[str, Any], optimizer: str) -> None:
    plain, compiled = Net(optimizer), Net(optimizer)
    trained(quiet, plain)
    trainer = trained(quiet, compiled, compile=COUNTED)
    same_weights(compiled, plain)
    assert len(graphs) == 1  # the schedule changes the rate each step, an epoch ends, and none of it compiles anew
    assert compiled.rates == plain.rates
    assert type(compiled.rates[-1]) is float
    assert trainer.global_step == 12


def test_the_graph_holds_forward_backward_clipping_and_update(quiet: dict[str, Any]) -> None:
    trained(quiet, Net(), compile=COUNTED, gradient_clip_val=0.1)
    names = " ".join(str(node.target) for node in graphs[0].graph.nodes)
    for part in ("cross_entropy", "grad", "linalg_vector_norm", "add_"):
        assert part in names


@pytest.mark.parametrize(("value", "algorithm"), [(0.05, "norm"), (0.01, "value")])
def test_gradients_are_clipped_in_the_graph(quiet: dict[str, Any], value: float, algorithm: str) -> None:
    clipping = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    plain, compiled, unclipped = Net(), Net(), Net()
    trained(quiet, plain, **clipping)
    trained(quiet, compiled, compile=COUNTED, **clipping)
    trained(quiet, unclipped)
    same_weights(compiled, plain)
    assert len(graphs) == 1
    assert not torch.allclose(unclipped.net[0].weight, compiled.net[0].weight, rtol=1e-3)


@pytest.mark.parametrize("items", [False, True])
def test_windows_are_those_of_a_run_without(quiet: dict[str, Any], items: bool) -> None:
    data = batches(samples=30)  # 8 batches, the last of half the size: windows of 3, 3 and 2
    plain, compiled = Net(items=items), Net(items=items)
    trained(quiet, plain, data, accumulate_grad_batches=3)
    trainer = trained(quiet, compiled, data, accumulate_grad_batches=3, compile=COUNTED)
    same_weights(compiled, plain)
    assert len(graphs) == 4  # the first of a window, one in the middle, the last, the last of a short window
    assert trainer.global_step == 6


def test_a_skipped_batch_takes_no_place_in_the_window(quiet: dict[str, Any]) -> None:
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 5 else loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    plain, compiled = Skipping(), Skipping()
    trained(quiet, plain, accumulate_grad_batches=2)
    trained(quiet, compiled, accumulate_grad_batches=2, compile=COUNTED)
    same_weights(compiled, plain)


def test_what_is_logged_is_right_at_every_step_and_over_the_epoch(quiet: dict[str, Any]) -> None:
    curves, expected = Curves(), Curves()
    data = batches(samples=22)
    trained(quiet, Net(), data, callbacks=[expected])
    trained(quiet, Net(), data, callbacks=[curves], compile=COUNTED)
    assert len(graphs) == 2  # the last batch is shorter
    assert len(curves.seen) == 12
    assert curves.seen[-1].keys() == expected.seen[-1].keys()
    for found, wanted in zip(curves.seen, expected.seen, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


def test_the_index_and_the_counters_of_the_trainer_are_no_constants(quiet: dict[str, Any]) -> None:
    class Counting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx) * (1 + batch_idx / 10)
            self.log("step", float(self.global_step))
            return loss

    plain, compiled = Counting(), Counting()
    trained(quiet, plain)
    trainer = trained(quiet, compiled, compile=COUNTED)
    same_weights(compiled, plain)
    assert trainer.callback_metrics["step"] == 11
    assert len(graphs) <= 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_cycled_momentum_compiles_once_more_at_most(quiet: dict[str, Any], optimizer: str) -> None:
    class Cycled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = OPTIMIZERS[self.optimizer](self.parameters())
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=13)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    plain, compiled = Cycled(optimizer), Cycled(optimizer)
    trained(quiet, plain)
    trained(quiet, compiled, compile=COUNTED)
    same_weights(compiled, plain)
    assert len(graphs) == (2 if optimizer == "sgd" else 1)


def test_each_of_a_few_shapes_has_its_graph_and_many_share_one(quiet: dict[str, Any]) -> None:
    data = [batches(samples=size, size=size)[0] for size in range(2, 10)]
    plain, compiled = Net(), Net()
    trained(quiet, plain, data)
    trained(quiet, compiled, data, compile=COUNTED)
    same_weights(compiled, plain)
    assert len(graphs) == MOST_SHAPES + 1


def test_parameters_thawed_in_the_middle_are_trained(quiet: dict[str, Any]) -> None:
    class Thaw(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            pl_module.net[0].bias.requires_grad_(trainer.current_epoch > 0)

    plain, compiled = Net("adamw"), Net("adamw")
    trained(quiet, plain, callbacks=[Thaw()])
    trained(quiet, compiled, callbacks=[Thaw()], compile=COUNTED)
    same_weights(compiled, plain)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions_are_inside_the_graph(quiet: dict[str, Any], precision: str) -> None:
    plain, compiled = Net(), Net()
    trained(quiet, plain, precision=precision)
    trained(quiet, compiled, precision=precision, compile=COUNTED)
    tolerance = 1e-3 if precision == "bf16-mixed" else 1e-12
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=tolerance, atol=tolerance)
    assert len(graphs) == 1


@pytest.mark.parametrize(("first", "second"), [(COUNTED, None), (None, COUNTED)])
@pytest.mark.parametrize("optimizer", ["adamw"])
def test_checkpoints_go_both_ways(
    quiet: dict[str, Any], tmp_path: Path, first: Any, second: Any, optimizer: str
) -> None:
    plain, half, whole = Net(optimizer), Net(optimizer), Net(optimizer)
    trained(quiet, plain, epochs=4)
    trained(quiet, half, epochs=2, compile=first).save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"][0]
    assert type(state["param_groups"][0]["lr"]) is float
    assert not state["param_groups"][0].get("capturable")
    trainer = Trainer(**quiet, max_epochs=4, compile=second)
    trainer.fit(whole, batches(), ckpt_path=tmp_path / "half.ckpt")
    same_weights(whole, plain)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_resumed_run_is_to_the_bit_the_one_that_was_not_interrupted(
    quiet: dict[str, Any], tmp_path: Path, backend: str, one_thread: None
) -> None:
    class Saving(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.state.batches == 8:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    asked = {"scope": "step", "backend": backend}
    data = batches(samples=22)  # the last batch is shorter, and the resumed run sees that shape earlier
    straight, resumed = Saving(dropout=0.3), Net(dropout=0.3)
    trained(quiet, straight, data, epochs=3, compile=asked)
    torch.manual_seed(5)
    trainer = Trainer(**quiet, max_epochs=3, compile=asked)
    trainer.fit(resumed, data, ckpt_path=tmp_path / "middle.ckpt")
    same_weights(resumed, straight, exactly=True)
    without = Net(dropout=0.3)
    trained(quiet, without, data, epochs=3)
    close = all(
        torch.allclose(a, b, atol=1e-4) for a, b in zip(without.parameters(), straight.parameters(), strict=True)
    )
    assert close is (backend != "inductor")  # which draws its own random numbers


def test_a_run_can_be_resumed_in_the_middle_of_a_window(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Saving(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.state.batches == 5:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    straight, resumed = Saving(items=True), Net(items=True)
    trained(quiet, straight, accumulate_grad_batches=3, compile=COUNTED)
    trainer = Trainer(**quiet, max_epochs=2, accumulate_grad_batches=3, compile=COUNTED)
    trainer.fit(resumed, batches(), ckpt_path=tmp_path / "middle.ckpt")
    same_weights(resumed, straight, exactly=True)


# ---- what does not go with it ----------------------------------------------------------------------------------------


class Hooked(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"strategy": "ddp", "devices": 2}, "strategy='ddp'"),
        ({"precision": "16-mixed"}, "Use precision='bf16-mixed'"),
        ({"detect_anomaly": True}, "detect_anomaly=True"),
        ({"compile": "graphs"}, "CUDA graphs need a CUDA device. Use compile='step'"),
    ],
)
def test_arguments_that_contradict_it_are_refused_at_once(
    quiet: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Trainer(**{**quiet, "compile": "step", **arguments})


def with_method(name: str) -> Net:
    module = Net()
    vars(module)[name] = {
        "backward": lambda loss: loss.backward(),
        "configure_gradient_clipping": lambda optimizer, gradient_clip_val, gradient_clip_algorithm: None,
        "optimizer_step": lambda epoch, batch_idx, optimizer, optimizer_closure: optimizer.step(optimizer_closure),
        "optimizer_zero_grad": lambda epoch, batch_idx, optimizer: optimizer.zero_grad(),
        "on_before_backward": lambda loss: None,
        "on_after_backward": lambda: None,
        "on_before_optimizer_step": lambda optimizer: None,
        "on_before_zero_grad": lambda optimizer: None,
    }[name]
    return module


@pytest.mark.parametrize(
    "name",
    [
        "backward",
        "configure_gradient_clipping",
        "optimizer_step",
        "optimizer_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ],
)
def test_what_a_module_does_in_the_middle_of_a_step_is_refused(quiet: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*use compile=True") as caught:
        trained(quiet, with_method(name), compile="step")
    assert "Net" in str(caught.value) or "lambda" in str(caught.value)


@pytest.mark.parametrize("callback", [Hooked(), LossGuard()])
def test_what_a_callback_does_in_the_middle_of_a_step_is_refused(quiet: dict[str, Any], callback: Callback) -> None:
    with pytest.raises(ValueError, match=rf"{type(callback).__name__}.*use compile=True"):
        trained(quiet, Net(), callbacks=[callback], compile="step")


def test_manual_optimization_and_other_forms_of_the_step_are_refused(quiet: dict[str, Any]) -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Iterating(Net):
        def training_step(self, dataloader_iter: Any) -> Any:
            return None

    with pytest.raises(ValueError, match="ByHand uses manual optimization"):
        trained(quiet, ByHand(), compile="step")
    with pytest.raises(ValueError, match="dataloader_iter"):
        trained(quiet, Iterating(), compile="step")


def test_several_optimizers_step_in_one_graph(quiet: dict[str, Any]) -> None:
    class Joint(Net):
        def configure_optimizers(self) -> Any:
            matrices = torch.optim.SGD([self.net[0].weight], lr=0.1, momentum=0.9)
            rest = torch.optim.AdamW([self.net[0].bias], lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(rest, 0.9)
            return [matrices, rest], [{"scheduler": scheduler, "interval": "step"}]

    plain, compiled = Joint(), Joint()
    arguments: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    trained(quiet, plain, **arguments)
    trainer = trained(quiet, compiled, compile=COUNTED, **arguments)
    same_weights(compiled, plain)
    assert trainer.global_step == 6
    assert len(graphs) == 2  # the first and the last batch of a window


def test_optimizers_that_do_more_than_step_are_refused(quiet: dict[str, Any]) -> None:
    def fit(make: Any) -> None:
        class Own(Net):
            def configure_optimizers(self) -> Any:
                return make(self.parameters())

        trained(quiet, Own(), compile="step")

    def hooked(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    def replaced(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        return optimizer

    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        fit(lambda parameters: torch.optim.LBFGS(parameters))
    with pytest.raises(ValueError, match="SGD has step hooks"):
        fit(hooked)
    with pytest.raises(ValueError, match="the step method of this SGD was replaced"):
        fit(replaced)
    with pytest.raises(ValueError, match="there is no optimizer"):
        fit(lambda parameters: None)


def test_a_step_that_is_no_one_graph_is_an_error_that_says_where(quiet: dict[str, Any]) -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss.item() > 100 else loss

    with pytest.raises(RuntimeError, match=r"compiles Reads.training_step.*test_compiled_step.py.*compile=True"):
        trained(quiet, Reads(), compile=COUNTED)


def test_so_is_one_of_a_step_that_is_no_plain_function(quiet: dict[str, Any]) -> None:
    class Halved(Net):
        def half(self, batch: Any, batch_idx: int, above: float) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss.item() > above else loss

        training_step = partialmethod(half, above=100)  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match=r"compiles Halved.training_step.*Remove that operation from training_step"):
        trained(quiet, Halved(), compile=COUNTED)


def test_an_optimizer_that_is_no_graph_is_named(quiet: dict[str, Any]) -> None:
    class Adaptive(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters(), lr=0.1)

    wanted = r"_adafactor.py.*This code is in the step of Adafactor, so use another optimizer. Or use compile=True"
    with pytest.raises(RuntimeError, match=wanted):
        trained(quiet, Adaptive(), compile=COUNTED)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.detach])
def test_what_changes_at_every_step_is_named_when_torch_gives_up(quiet: dict[str, Any], read: Any) -> None:
    class Collects(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.seen.append(read(loss))
            return loss

    module = Collects()
    module.seen = []
    wanted = r"(?s)compiles Collects.training_step.*gave up.*len\(self\.seen\) == \d+ # self\.seen\.append\(read.*" + (
        r"test_compiled_step\.py:\d+ in training_step\. .*on_train_batch_end, or by calling self\.log.*compile=True"
    )
    with (
        pytest.warns(PacelineWarning, match=r"len\(self\.seen\) == .* on_train_batch_end"),
        pytest.raises(RuntimeError, match=wanted),
    ):
        trained(quiet, module, epochs=3, compile=COUNTED)


@pytest.mark.parametrize("number", [Tensor.item, float])
def test_a_number_read_to_be_logged_is_right_at_every_step(quiet: dict[str, Any], number: Any) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("number", number(loss))
            return loss

    plain, compiled = Curves(), Curves()
    trained(quiet, Logs(), callbacks=[plain])
    trained(quiet, Logs(), callbacks=[compiled], compile=COUNTED)
    assert len(plain.seen) == 12
    assert len({one["number"] for one in plain.seen}) == 12
    for one, other in zip(compiled.seen, plain.seen, strict=True):
        assert one["number"] == pytest.approx(other["number"], rel=1e-5)


def test_a_graph_behind_a_logged_value_is_refused(quiet: dict[str, Any]) -> None:
    class Kept(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, enable_graph=True)
            return loss

    with pytest.raises(
        ValueError, match=r"self.log\('loss', enable_graph=True\) does not work with .* Leave out enable_graph"
    ):
        trained(quiet, Kept(), compile={"scope": "step", "backend": "eager"})


def test_mistakes_in_the_step_are_said_as_without_it(quiet: dict[str, Any]) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            return {"loss": loss, "num_items": 4} if batch_idx == 3 else {"loss": loss}

    with pytest.raises(ValueError, match="'num_items' for some batches but not for all"):
        trained(quiet, Wrong(), compile=COUNTED)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_compiler_that_is_switched_off_changes_nothing(quiet: dict[str, Any], optimizer: str) -> None:
    plain, disabled, eager = Net(optimizer), Net(optimizer), Net(optimizer)
    trained(quiet, plain)
    trained(quiet, disabled, compile={**COUNTED, "disable": True})
    with torch.compiler.set_stance("force_eager"):
        trained(quiet, eager, compile=COUNTED)
    assert not graphs
    same_weights(disabled, plain, exactly=True)
    same_weights(eager, plain)


def test_torchs_switches_are_as_they_were(quiet: dict[str, Any]) -> None:
    import torch._dynamo.config as dynamo

    trained(quiet, Net(), compile=COUNTED)
    assert not dynamo.trace_autograd_ops
    assert not dynamo.allow_unspec_int_on_nn_module
    assert torch.compiler.config.dynamic_sources == ""


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["step", "graphs"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_on_a_gpu_are_those_of_a_run_without(
    quiet: dict[str, Any], tmp_path: Path, scope: str, optimizer: str
) -> None:
    gpu = {**quiet, "accelerator": "gpu", "devices": 1}
    plain, compiled, resumed = Net(optimizer), Net(optimizer), Net(optimizer)
    trained(gpu, plain, epochs=3)
    trained(gpu, compiled, compile=scope, epochs=2).save_checkpoint(tmp_path / "gpu.ckpt")
    Trainer(**gpu, max_epochs=3).fit(resumed, batches(), ckpt_path=tmp_path / "gpu.ckpt")
    same_weights(resumed, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["step", "graphs"])
def test_a_compiled_step_on_a_gpu_does_not_wait_for_it(quiet: dict[str, Any], scope: str) -> None:
    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_epoch_end(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    data = [(x.cuda(), y.cuda()) for x, y in batches()]
    trained({**quiet, "accelerator": "gpu", "devices": 1}, Net(), data, compile=scope, callbacks=[Watch()])
