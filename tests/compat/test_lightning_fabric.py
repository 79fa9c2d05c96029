"""Lightning's ``Fabric`` over an Accelerator: the numbers of hand-written loops, on one process and on two."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline import TrainingModule
from paceline.accelerator.process_state import AcceleratorState
from paceline.compat.lightning.fabric import Fabric
from paceline.compat.lightning.fabric_loggers import FabricCSVLogger, ThroughputMonitor
from paceline.compat.lightning.fabric_wrappers import FabricModule, is_wrapped, unwrapped_in
from paceline.processes.environments import ClusterEnvironment
from paceline.strategies.base import SingleDevice

INPUTS = torch.linspace(-1, 1, 32).view(8, 4)
TARGETS = INPUTS.sum(1, keepdim=True).sin()


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Net(TrainingModule):
    """Its step does not call its forward, and logs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch[0]).tanh()
        loss = mse_loss(self.second(hidden), batch[1])
        self.log("loss", loss)
        self.log_dict({"index": batch_idx})
        return loss

    def probe(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs) * 2


def by_hand(steps: int = 3, clip: float | None = None) -> list[torch.Tensor]:
    """The weights after some steps over all data."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(steps):
        mse_loss(net(INPUTS), TARGETS).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def equal(module: nn.Module, weights: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, module.parameters(), weights))


def test_a_loop_learns_what_a_hand_written_one_learns_and_continues_from_its_file(tmp_path: Path) -> None:
    logger = FabricCSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", loggers=logger)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    assert isinstance(model, FabricModule)
    assert model.module is net
    assert (is_wrapped(model), is_wrapped(optimizer), is_wrapped(net)) == (True, True, False)
    assert unwrapped_in({"a": [model]})["a"][0] is net
    assert next(iter(model.state_dict())) == next(name for name, _ in model.named_parameters()) == "first.weight"
    state = {"model": model, "optimizer": optimizer, "step": 0}
    norms = []
    for step in range(2):
        fabric.backward(model.training_step((INPUTS, TARGETS), step))
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
    assert all(norm > 0.5 for norm in norms)
    fabric.save(tmp_path / "a.ckpt", state, filter={"model": lambda name, value: name != "second.bias"})
    fabric.save(tmp_path / "a.ckpt", {**state, "more": [1]})
    assert torch.load(tmp_path / "a.ckpt")["step"] == 2
    logger.finalize("success")
    assert Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0].split(",")[-2:] == ["loss", "index"]

    fabric, net = Fabric(accelerator="cpu"), Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=7.0))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(tmp_path / "a.ckpt", state) == {"more": [1]}
    assert state["step"] == 2
    fabric.backward(model.training_step((INPUTS, TARGETS), 2))
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    assert equal(net, by_hand(3, clip=0.5))
    assert set(fabric.load(tmp_path / "a.ckpt")) == {"model", "optimizer", "step", "more"}
    with pytest.raises(KeyError, match="has no 'x', only 'model', 'optimizer', 'step' and 'more'"):
        fabric.load(tmp_path / "a.ckpt", {"x": 1})
    torch.save(Net().state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert equal(net, list(Net().parameters()))


def _two_ranks(step: str) -> tuple[list[torch.Tensor], list[Any]]:
    """Accumulate over two micro-batches a rank; ``step`` says how the loss comes about."""
    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    net = Net()
    if fabric.global_rank == 1:
        nn.init.zeros_(net.first.weight)  # rank 0's weights count
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    model.mark_forward_method("probe")
    mine = torch.arange(8).view(2, 2, 2)[fabric.global_rank]
    for _ in range(3):
        for index, rows in enumerate(mine):
            with fabric.no_backward_sync(model, enabled=index == 0):
                inputs, targets = INPUTS[rows], TARGETS[rows]
                if step == "training_step":
                    loss = model.training_step((inputs, targets), index)
                elif step == "probe":
                    loss = mse_loss(model.probe(inputs) / 2, targets)
                else:
                    loss = mse_loss(model(inputs), targets)
                fabric.backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()
    first = INPUTS[:1] * (fabric.global_rank + 1)
    told = [fabric.all_reduce(float(fabric.global_rank), reduce_op="sum"), fabric.broadcast(fabric.global_rank, 1)]
    return [p.detach() for p in net.parameters()], [*told, fabric.all_gather(first).shape, fabric.world_size]


@pytest.mark.parametrize("step", ["forward", "training_step", "probe"])
def test_two_processes_that_accumulate_learn_what_one_learns(step: str) -> None:
    found = ranks(2, _two_ranks, step)
    for weights, told in found:
        assert all(map(torch.equal, weights, found[0][0]))
        for own, wanted in zip(weights, by_hand(3), strict=True):
            torch.testing.assert_close(own, wanted.detach(), rtol=1e-5, atol=1e-6)
        assert told == [torch.tensor(1.0), 1, torch.Size([2, 1, 4]), 2]


def _loaded() -> tuple[list[float], list[float]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    data = TensorDataset(torch.arange(6.0))
    own, whole = (
        fabric.setup_dataloaders(DataLoader(data)),
        fabric.setup_dataloaders(DataLoader(data), use_distributed_sampler=False),
    )
    return [float(x) for (x,) in own], [float(x) for (x,) in whole]


def test_each_process_reads_its_part_unless_it_is_to_read_everything() -> None:
    found = ranks(2, _loaded)
    assert sorted(found[0][0] + found[1][0]) == list(range(6))
    assert found[0][1] == found[1][1] == list(range(6))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_inputs_and_outputs_are_in_the_dtypes_of_the_precision(precision: Any) -> None:
    fabric = Fabric(accelerator="cpu", precision=precision)
    model = fabric.setup(nn.Linear(4, 2))
    assert model(INPUTS).dtype == torch.float32
    with fabric.autocast(), fabric.init_module():
        assert nn.Linear(1, 1).weight.dtype == model.weight.dtype
    kinds = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert model.weight.dtype == kinds.get(precision, torch.float32)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        self.calls.append("setup")

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.calls.append("step")

    def hello(self, *names: str) -> None:
        self.calls += names


class Program(Fabric):
    def run(self, lr: float) -> float:
        model, optimizer = self.setup(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=lr))
        self.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        self.call("hello", "a", "b")
        self.call("nobody_has_this")
        return self.seed_everything(seed=3)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_tensors_and_layers_are_created_in_the_dtype_of_the_precision(precision: Any) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    for context in (fabric.init_tensor, fabric.init_module, fabric.sharded_model):
        with context():
            assert torch.zeros(2).dtype == nn.Linear(1, 1).weight.dtype == dtype
    assert torch.zeros(2).dtype == torch.float32


def _orders(local: bool) -> list[int]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    before = []
    with fabric.rank_zero_first(local):
        store = torch.distributed.distributed_c10d._get_default_store()
        before.append(store.add("ran", 1))
    return before


def test_rank_zero_runs_first() -> None:
    for local in (False, True):
        assert ranks(2, _orders, local) == [[1], [2]]


def test_a_subclass_runs_and_callbacks_are_called() -> None:
    recorder = Recorder()
    assert Program(accelerator="cpu", callbacks=recorder).run(0.1) == 3
    assert recorder.calls == ["setup", "step", "a", "b"]
    assert Fabric(accelerator="cpu").launch(lambda fabric, x: x + fabric.world_size, 2) == 3


def test_a_module_knows_the_fabric_that_set_it_up() -> None:
    fabric, module = Fabric(accelerator="cpu", devices=1), Net()
    fabric.setup(nn.Sequential(module))
    assert module.fabric is fabric


def test_a_module_tells_its_device_and_dtype() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-true")
    for module in (nn.Linear(2, 2), Net()):
        model = fabric.setup(module)
        assert (model.device, model.dtype) == (fabric.device, torch.bfloat16)
    empty = fabric.setup(nn.Identity())
    assert (empty.device, empty.dtype) == (fabric.device, torch.float32)


def test_a_library_s_own_wrapper_and_fabric_use_lightning_s_names() -> None:
    class Own(FabricModule):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            precision = self._strategy.precision
            args, kwargs = precision.convert_input((args, kwargs))
            with precision.forward_context():
                output = self._forward_module(*args, **kwargs)
            return precision.convert_output(output)

    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    assert fabric._precision is fabric.strategy.precision
    alone = Fabric(strategy=SingleDevice(device=fabric.device, precision=fabric._precision))
    net = Net()
    model = alone.setup_module(net)
    expected = model(INPUTS)
    object.__setattr__(model, "__class__", Own)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [weight.clone() for weight in net.parameters()]
    output = model(INPUTS)
    assert torch.equal(output, expected)
    assert output.dtype == torch.float32
    fabric.backward(mse_loss(output, TARGETS), inputs=list(net.first.parameters()))
    fabric.clip_gradients(None, optimizer, max_norm=0.01, error_if_nonfinite=True)
    optimizer.step()
    same = [torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)]
    assert same == [False, False, True, True]


def test_the_csv_logger_takes_strings(tmp_path: Path) -> None:
    logger = FabricCSVLogger(tmp_path)
    Fabric(accelerator="cpu", loggers=logger).log_dict({"stage": "train", "loss": torch.tensor(0.5)}, step=1)
    logger.finalize("success")
    with open(Path(logger.log_dir, "metrics.csv")) as file:
        (row,) = csv.DictReader(file)
    assert (row["step"], row["stage"], row["loss"]) == ("1", "train", "0.5")


def test_what_is_wrong_says_what_to_do(tmp_path: Path) -> None:
    two = Fabric(accelerator="cpu", devices=2)
    with pytest.raises(RuntimeError, match=r"needs 2 processes.*Call fabric.launch"):
        two.setup(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"in pytest.*fabric.launch\(main\)"):
        two.launch()
    fabric = Fabric(accelerator="cpu")
    with pytest.raises(TypeError, match="takes no arguments"):
        fabric.launch(lambda: None)
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    wrong = {
        "already been set up": lambda: fabric.setup(model),
        "exactly one of the two": lambda: fabric.clip_gradients(model, optimizer),
        "not a module that fabric.setup returned": lambda: fabric.no_backward_sync(net),
        "has no method of that name": lambda: model.mark_forward_method("generate"),
        "Did you mean 'model'": lambda: fabric.save(tmp_path / "x", {"model": model}, filter={"modle": print}),
        "the gradient norm is nan": lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0),
    }
    fabric.backward(model(torch.full((1, 1), float("nan"))).sum())
    for text, call in wrong.items():
        with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError), match=text):
            call()


class Elsewhere(ClusterEnvironment):
    creates_processes_externally = False
    main_address, main_port = "127.0.0.1", 1

    def world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return 1

    local_rank, node_rank = global_rank, lambda self: 0


def test_a_process_that_is_one_of_several_does_not_start_the_others() -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, plugins=Elsewhere())
    with pytest.raises(RuntimeError, match=r"this process is not the first: its local_rank\(\) is 1"):
        fabric.launch(lambda fabric: None)


def test_the_throughput_monitor_logs_the_rates_of_all_processes_with_the_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=FabricCSVLogger(tmp_path, name="", version=0))
    monitor = ThroughputMonitor(fabric, window_size=2)
    for count in (1, 2):
        monitor.update(time=2.0 * count, batches=count, samples=8 * count, lengths=32 * count)
        rates = monitor.compute_and_log()
    assert (rates["device/samples_per_sec"], rates["device/items_per_sec"], monitor.step) == (4.0, 16.0, 1)
    fabric.logger.save()
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        first, last = csv.DictReader(file)
    assert (first["step"], last["step"], last["device/samples_per_sec"]) == ("0", "1", "4.0")


def test_setting_up_no_loader_is_an_error() -> None:
    with pytest.raises(ValueError, match="no loader to set up"):
        Fabric(accelerator="cpu").setup_dataloaders()
