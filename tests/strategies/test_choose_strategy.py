"""From a Trainer's arguments to a Strategy, and what is refused on the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Trainer, TrainingModule
from paceline.strategies import DDPStrategy, FSDPStrategy, SingleDevice, Strategy, choose_strategy

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["auto", "single_device", "cpu"])
def test_names_of_the_single_device(name: str) -> None:
    found = choose_strategy(name, accelerator="auto" if name == "cpu" else "cpu")
    assert type(found) is SingleDevice
    assert found.device == torch.device("cpu")


def seen_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ({}, "cuda:0"),
        ({"accelerator": "gpu", "devices": [1]}, "cuda:1"),
        ({"accelerator": "cuda", "devices": "1,"}, "cuda:1"),
        ({"accelerator": "cpu"}, "cpu"),
        ({"strategy": "cpu"}, "cpu"),
    ],
)
def test_devices_are_found(arguments: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_cuda(monkeypatch, 2)
    assert choose_strategy(**arguments).device == torch.device(device)


def test_mps_is_taken_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_cuda(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_strategy().device.type == choose_strategy(accelerator="gpu").device.type == "mps"


#: Strategies whose processes come from this one; what an error calls them, and what it says to write.
STARTED_HERE = (
    ("ddp_spawn", "strategy='ddp_spawn'", "strategy='ddp'"),
    ("ddp_fork", "strategy='ddp_fork'", "strategy='ddp'"),
    ("ddp_notebook_find_unused_parameters_true", "strategy='ddp_notebook_.*'", "strategy='ddp_find_unused_.*_true'"),
    (DDPStrategy(start_method="forkserver"), r"DDPStrategy\(start_method='forkserver'\)", "DDPStrategy without start_"),
    (FSDPStrategy(start_method="spawn"), r"FSDPStrategy\(start_method='spawn'\)", "FSDPStrategy without start_method"),
)


@pytest.mark.parametrize("strategy", [*(strategy for strategy, *_ in STARTED_HERE), "ddp"])
def test_where_a_launcher_started_the_ranks_any_strategy_has_several_machines(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "one"}
    for name, value in {**torchrun, "MASTER_PORT": 1, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    chosen = choose_strategy(strategy=strategy, accelerator="cpu", num_nodes=2)
    assert (chosen.num_nodes, chosen.world_size, chosen.global_rank) == (2, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": "dpp"}, ValueError, r"Unknown strategy 'dpp'\. Did you mean 'ddp'\?.*or pass a Strategy"),
        ({"strategy": "dp"}, ValueError, "DataParallel copies the model in every step.*strategy='ddp'"),
        ({"strategy": "cpu", "devices": 2}, ValueError, "contradict each other, because this strategy uses one device"),
        ({"num_nodes": 0}, ValueError, r"num_nodes=0 is not a valid number of machines"),
        ({"strategy": 3}, TypeError, r"strategy=3 is an int"),
        ({"accelerator": "gpu"}, RuntimeError, "this process sees no GPU.*accelerator='auto'"),
        ({"accelerator": "xla"}, ValueError, "Paceline uses TPUs through torch_tpu"),
        ({"accelerator": "gpuu"}, ValueError, r"Unknown accelerator 'gpuu'\. Did you mean 'gpu'"),
        ({"accelerator": 3}, TypeError, r"accelerator=3 is an int"),
        ({"devices": 0}, ValueError, r"devices=0\) selects no device"),
        ({"devices": "two"}, ValueError, r"devices='two' is not a valid number of devices"),
        ({"devices": 1.5}, ValueError, r"devices=1.5 is not a valid number of devices"),
        ({"strategy": SingleDevice("cpu"), "accelerator": "mps"}, (ValueError, RuntimeError), "mps"),
        *(
            ({"strategy": strategy, "num_nodes": 2}, ValueError, f"2 machines, but {said} .* each machine with {fix}")
            for strategy, said, fix in STARTED_HERE
        ),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(
    arguments: dict[str, Any], error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_cuda(monkeypatch, 0)
    with pytest.raises(error, match=message):
        Trainer(**QUIET, **arguments)


def test_more_devices_than_there_are_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_cuda(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match=r"devices \[5\], but this process sees 2 \(CUDA_VISIBLE_DEVICES=0,1\)"):
        Trainer(**QUIET, accelerator="gpu", devices=[5])


def test_cpu_strategy_and_gpu_accelerator_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_cuda(monkeypatch, 1)
    with pytest.raises(ValueError, match=r"strategy='cpu' and accelerator='gpu' contradict each other"):
        Trainer(**QUIET, strategy="cpu", accelerator="gpu")


def test_a_strategy_of_ones_own_is_driven_in_the_documented_order() -> None:
    called: list[str] = []

    class Mine(SingleDevice):
        def setup_environment(self) -> None:
            called.append("setup_environment")

        def setup_module(self, module: Any) -> Any:
            called.append("setup_module")
            return super().setup_module(module)

        def setup_optimizers(self, optimizers: Any) -> Any:
            called.append("setup_optimizers")
            return super().setup_optimizers(optimizers)

        def backward(self, loss: Any, how: Any = None) -> None:
            called.append("backward")
            super().backward(loss, how)

        def optimizer_step(self, optimizer: Any, closure: Any = None) -> bool:
            called.append("optimizer_step")
            return super().optimizer_step(optimizer, closure)

        def teardown(self) -> None:
            called.append("teardown")

    trainer = Trainer(**QUIET, strategy=Mine())
    trainer.fit(Net(), [torch.ones(1)])
    assert called == [
        "setup_environment",
        "setup_module",
        "setup_optimizers",
        "backward",
        "optimizer_step",
        "teardown",
    ]


def test_a_launcher_gets_the_run_and_gives_its_result() -> None:
    launched: list[Any] = []

    class Launches(SingleDevice):
        @property
        def launcher(self) -> Any:
            def launch(run: Any, trainer: Any, request: Any, random: Any) -> Any:
                launched.append(request.fn)
                return run(trainer, request, random)

            return launch

    trainer = Trainer(**QUIET, strategy=Launches())
    trainer.fit(Net(), [torch.ones(1)])
    assert trainer.global_step == 1
    module = Net()
    module.predict_step = lambda batch, batch_idx: batch
    assert trainer.predict(module, [torch.ones(1)]) == [torch.ones(1)]
    assert launched == ["fit", "predict"]


def test_gradients_are_synchronized_on_the_last_micro_batch_of_a_window_only() -> None:
    said: list[bool] = []

    class Communicates(SingleDevice):
        communicates_gradients = True

        def sync_gradients(self, enabled: bool) -> None:
            said.append(enabled)

    Trainer(**QUIET, strategy=Communicates(), accumulate_grad_batches=3).fit(Net(), [torch.ones(1)] * 5)
    assert said == [False, False, True, False, True]


def test_an_installed_package_brings_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brings.py").write_text(
        "from paceline.strategies import SingleDevice\n"
        "class Brought(SingleDevice):\n    pass\n"
        "def other(*a):\n    return 3\n"
    )
    info = tmp_path / "brings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.strategies]\nbrought = brings:Brought\nwrong = brings:other\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = Trainer(**QUIET, strategy="brought", accelerator="cpu")
    assert type(trainer.strategy).__name__ == "Brought"
    trainer.fit(Net(), [torch.ones(1)])
    with pytest.raises(TypeError, match=r"returned an int. The entry point must refer to a subclass"):
        Trainer(**QUIET, strategy="wrong", accelerator="cpu")
    with pytest.raises(ValueError, match=r"'brough'. Did you mean 'brought'"):
        Trainer(**QUIET, strategy="brough", accelerator="cpu")
    sys.modules.pop("brings", None)


def test_defaults_of_a_single_process() -> None:
    strategy = Strategy()
    tensor = torch.ones(2)
    assert (strategy.world_size, strategy.global_rank, strategy.is_global_zero) == (1, 0, True)
    assert strategy.reduce(tensor) is strategy.all_gather(tensor) is strategy.broadcast(tensor) is tensor
    assert strategy.agree(True)
    assert not strategy.agree(False)


def test_clipping_returns_the_norm_before() -> None:
    layer = nn.Linear(1, 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert Strategy().clip_by_norm(layer.parameters(), 1.0) == 5.0
    assert layer.bias.grad.item() == pytest.approx(0.8, rel=1e-5)
    Strategy().clip_by_value(layer.parameters(), 0.5)
    assert layer.bias.grad.item() == 0.5
