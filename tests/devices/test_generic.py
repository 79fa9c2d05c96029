"""A whole run on a device that is not a CPU: see ``fake_device``, which stands for any that torch knows by name."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import fake_device
import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch import Tensor, nn

from paceline import Accelerator, PartialState, Trainer, find_executable_batch_size, messages, seed_everything
from paceline.big_model.infer_device_map import get_max_memory
from paceline.callbacks import DeviceStatsMonitor, LossGuard, ModelCheckpoint
from paceline.checkpoint.checkpoint_io import AsyncCheckpointIO
from paceline.devices.hidden import HIDE
from paceline.devices.kinds import kind_of, present
from paceline.loggers import Logger
from paceline.processes.device_transfer import ahead, move, mover
from paceline.processes.devices import find_best, find_devices, find_kind
from paceline.processes.seed import isolate_rng, random_states, set_random_states

FAKE = "fake:0"


class Net(TinyModule):
    """Notes where its batches are and what its layers compute in."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.example_input_array = torch.ones(2, 4)
        self.places: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self(batch[0])
        self.places |= {str(batch[0].device), str(self.device)}
        self.dtypes.add(output.dtype)
        loss = nn.functional.mse_loss(output, batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


def weights(module: nn.Module) -> list[Tensor]:
    return [value.detach().cpu() for value in module.state_dict().values()]


def on_device(function: Any, *args: Any, processes: int = 1) -> Any:
    """Run a function in a process, or several, that see the device; return what each returns."""
    return ranks(processes, _installed, function, args)


def _installed(function: Any, args: tuple[Any, ...]) -> Any:
    fake_device.install()
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    return function(*args)


def trainer(**more: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": "callbacks" in more and "logger" in more,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{"max_epochs": 2, **quiet, **more})


# ---- the whole Trainer -----------------------------------------------------------------------------------------------


def fit_on(accelerator: str) -> tuple[Trainer, Net]:
    seed_everything(3, verbose=False)
    module = Net()
    run = trainer(
        accelerator=accelerator,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        enable_progress_bar=True,
        callbacks=[LossGuard()],
        enable_model_summary=True,
    )
    run.fit(module, tiny_loader(), tiny_loader())
    return run, module


def walk_of_a_fit() -> None:
    run, module = fit_on("auto")
    assert (run.accelerator, type(run.accelerator).__name__) == ("fake", "FAKEAccelerator")
    assert copy.copy(run.accelerator) == "fake"
    assert module.places | {str(value.device) for value in module.parameters()} == {"fake:0"}
    assert {"cpu to fake without waiting", "record_stream", "event", "wait for event"} <= set(fake_device.calls)
    other, same = fit_on("cpu")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights(module), weights(same), strict=True))
    assert {k: v.item() for k, v in run.callback_metrics.items()} == {
        k: v.item() for k, v in other.callback_metrics.items()
    }
    (predicted,) = trainer(accelerator="fake", devices=1).predict(module, tiny_loader(batches=1))
    assert str(predicted.device) == FAKE
    with pytest.raises(ValueError, match="asks for FAKE devices \\[0, 1\\], but this process sees 1"):
        Trainer(accelerator="fake", devices=2)


def test_a_fit_on_another_device_stays_there_and_gives_the_numbers_of_a_cpu() -> None:
    on_device(walk_of_a_fit)
    with pytest.raises(ValueError, match="Unknown accelerator 'fake'"):
        Trainer(accelerator="fake")


def walk_of_a_resume(folder: Path) -> dict[str, Any]:
    def fit(epochs: int, **more: Any) -> Net:
        seed_everything(3, verbose=False)
        module = Net(dropout=0.5)
        run = trainer(max_epochs=epochs)
        run.fit(module, tiny_loader(shuffle=True), **more)
        run.save_checkpoint(folder / f"{epochs}.ckpt")
        return module

    whole = fit(2)
    fit(1)
    torch.rand(7, device="fake")  # resuming puts the generator back
    with warnings.catch_warnings():
        warnings.simplefilter("error", messages.PacelineWarning)
        resumed = fit(2, ckpt_path=folder / "1.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    before = torch.fake.get_rng_state()  # type: ignore[attr-defined]
    with isolate_rng():
        torch.manual_seed(5)
        torch.rand(3, device="fake")
    assert torch.equal(torch.fake.get_rng_state(), before)  # type: ignore[attr-defined]
    states = random_states()
    for saved, now in (("fake", "cpu"), ("cpu", "fake")):
        messages.forget()
        quiet = trainer(max_epochs=1, accelerator=saved)
        quiet.fit(Net(), tiny_loader())
        quiet.save_checkpoint(folder / "other.ckpt")
        with pytest.warns(messages.PacelineWarning, match="random numbers") as told:
            trainer(accelerator=now).fit(Net(), tiny_loader(), ckpt_path=folder / "other.ckpt")
        texts = [str(one.message) for one in told if "random numbers" in str(one.message)]
        assert len(texts) == 1
        assert f"The saved run used the device {saved!r}, but this run uses {now!r}." in texts[0]
    return states


def test_random_states_of_another_device_are_in_checkpoints_and_resume_to_the_bit(tmp_path: Path) -> None:
    (states,) = on_device(walk_of_a_resume, tmp_path)
    (state,) = states["fake"]
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    with isolate_rng(), pytest.warns(match="The RNG state of 'fake' was saved but cannot be restored"):
        set_random_states(states)


def walk_of_mixed_precision() -> None:
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        module = Net()
        run = trainer(precision=precision)
        run.fit(module, tiny_loader())
        assert (module.dtypes, module.places) == ({dtype}, {"fake:0"})
        assert all(value.dtype == torch.float32 for value in module.parameters())
    assert run.scaler.get_scale() == 65536.0 / 2**run.strategy.precision.skipped_steps
    torch.fake.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"autocast on 'fake' devices does not support torch.float16. Use 'bf16-mixed'"
    ):
        Trainer(precision="16-mixed")


def test_mixed_precision_on_another_device_computes_in_its_dtypes() -> None:
    on_device(walk_of_mixed_precision)


def walk_of_ddp() -> str:
    def fit(accelerator: str) -> tuple[Net, Trainer]:
        seed_everything(3, verbose=False)
        module = Net()
        run = trainer(strategy="ddp", accelerator=accelerator, devices=2)
        run.fit(module, tiny_loader())
        return module, run

    with pytest.raises(ValueError, match=r"asks for FAKE devices \[0, 1\], but this process sees 1"):
        fit("fake")
    kind_of("fake").one_per_process = True  # as a TPU's processes
    module, run = fit("fake")
    assert module.places == {"fake:0"}
    assert {"allreduce", "broadcast"} <= set(fake_device.calls)
    same, _ = fit("cpu")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights(module), weights(same), strict=True))
    return run.strategy.backend


def test_ddp_on_another_device_reduces_over_its_backend_and_gives_the_numbers_of_a_cpu() -> None:
    assert on_device(walk_of_ddp, processes=2) == ["cpu:gloo,fake:fakeccl"] * 2


# ---- the whole Accelerator -------------------------------------------------------------------------------------------


def walk_of_an_own_loop(folder: Path) -> None:
    def train(steps: int, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
        for _ in range(steps):
            for x, y in loader:
                with accelerator.accumulate(model):
                    assert str(x.device) == FAKE
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

    seed_everything(3, verbose=False)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Net(dropout=0.5).layer
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.05), tiny_loader())
    assert str(accelerator.device) == FAKE
    train(1, accelerator, *prepared)
    accelerator.save_state(folder / "state")
    train(1, accelerator, *prepared)
    once = weights(model)
    accelerator.load_state(folder / "state")
    train(1, accelerator, *prepared)
    assert all(torch.equal(a, b) for a, b in zip(once, weights(model), strict=True))
    gathered = accelerator.gather_for_metrics(torch.arange(3, device=accelerator.device))
    assert gathered.tolist() == [0, 1, 2]
    assert str(gathered.device) == FAKE


def test_an_own_loop_on_another_device_saves_and_restores_its_state_to_the_bit(tmp_path: Path) -> None:
    on_device(walk_of_an_own_loop, tmp_path)


def two_ranks(dropout: float, **more: Any) -> tuple[Accelerator, Any, Any]:
    """An Accelerator on this rank, a prepared network, and what trains it for an epoch and returns its outputs."""
    kind_of("fake").one_per_process = True  # as a TPU's processes
    seed_everything(3, verbose=False)
    accelerator = Accelerator(gradient_accumulation_steps=2, **more)
    net = Net(dropout).layer
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05), tiny_loader())

    def train() -> list[Tensor]:
        outputs = []
        for x, y in loader:
            with accelerator.accumulate(model):
                outputs.append(model(x))
                accelerator.backward(nn.functional.mse_loss(outputs[-1], y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return outputs

    return accelerator, model, train


def walk_of_two_ranks(cpu: bool) -> tuple[list[Tensor], str, set[str], list[str]]:
    accelerator, model, train = two_ranks(0.0, cpu=cpu)
    devices = {str(output.device) for output in train()}
    gathered = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    assert gathered.tolist() == [0, 1]
    return weights(model), accelerator.strategy.backend, devices | {str(gathered.device)}, fake_device.calls


def test_an_own_loop_on_two_ranks_of_another_device_gives_the_numbers_of_a_cpu() -> None:
    fakes, hosts = (on_device(walk_of_two_ranks, cpu, processes=2) for cpu in (False, True))
    for (mine, backend, devices, calls), (theirs, other, others, _) in zip(fakes, hosts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert (backend, devices) == ("cpu:gloo,fake:fakeccl", {FAKE})
        assert (other, others) == ("gloo", {"cpu"})
        assert {"cpu to fake without waiting", "allreduce", "broadcast"} <= set(calls)


def walk_of_two_random_states(folder: Path) -> tuple[list[int], list[Tensor]]:
    accelerator, model, train = two_ranks(0.5, mixed_precision="bf16")
    computed: set[torch.dtype] = set()
    accelerator.unwrap_model(model)[-1].register_forward_hook(lambda module, args, output: computed.add(output.dtype))
    torch.rand(3 + accelerator.process_index, device="fake")  # the ranks' random states differ
    train()
    assert computed == {torch.bfloat16}
    state = torch.fake.get_rng_state()  # type: ignore[attr-defined]
    accelerator.save_state(folder / "state")
    train()
    once = weights(model)
    accelerator.load_state(folder / "state")
    assert torch.equal(torch.fake.get_rng_state(), state)  # type: ignore[attr-defined]
    train()
    assert all(torch.equal(a, b) for a, b in zip(once, weights(model), strict=True))
    return state.tolist(), [value.detach().cpu() for value in model.parameters()]


def test_each_rank_on_another_device_saves_its_random_state_and_continues_to_the_bit(tmp_path: Path) -> None:
    (first, mine), (second, theirs) = on_device(walk_of_two_random_states, tmp_path, processes=2)
    assert first != second
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def walk_of_hidden_devices() -> None:
    assert (find_kind("auto"), find_best()) == ("fake", ("fake", 1))
    os.environ[HIDE] = "1"  # as `paceline launch --cpu` does
    assert (find_kind("auto"), find_best(), present().name) == ("cpu", ("cpu", 0), "cpu")
    assert trainer().accelerator == "cpu"
    assert PartialState().default_device.type == "cpu"
    assert Accelerator().device.type == "cpu"
    for name, what in (("fake", "FAKE device"), ("gpu", "GPU"), ("mps", "MPS device")):
        with pytest.raises(RuntimeError, match=f"`paceline launch --cpu` hides every {what} from this process"):
            trainer(accelerator=name)


def test_every_kind_of_device_can_be_hidden() -> None:
    on_device(walk_of_hidden_devices)


# ---- the single answers ----------------------------------------------------------------------------------------------


def walk_of_the_answers() -> None:
    device, kind = torch.device(FAKE), present()
    assert (kind.name, kind.title, kind.count(), kind.is_initialized()) == ("fake", "FAKE device", 1, True)
    assert kind is kind_of(device)
    assert find_kind("auto") == "fake"
    assert find_devices("auto", "fake") == [device]
    assert (kind.name_of(device), kind.collective_backend()) == ("Fake 1", "fakeccl")
    assert "already used" in (kind.fork_obstacle() or "")
    kind.initialize()
    kind.make_current(device)

    kept = torch.zeros(1000, device=device)
    assert kind.counts_memory()
    assert kind.allocated_memory(device) >= 4000 == kept.nbytes
    kind.reset_peak_memory(device)
    torch.zeros(500, device=device)
    assert kind.peak_memory(device) - kind.allocated_memory(device) == 2000
    assert kind.total_memory(device) == 2**30
    assert kind.free_memory(device) == 2**30 - kind.allocated_memory(device)
    assert kind.stats(device)["allocated_bytes.all.current"] == kind.allocated_memory(device)
    assert 0 < get_max_memory()[0] < 2**30
    kind.release_cached_memory()
    kind.synchronize(device)
    assert fake_device.calls[-2:] == ["empty_cache", "wait for device"]

    kind.seed(7)
    state = kind.random_state(device)
    drawn = torch.rand(4, device=device)
    assert state is not None
    kind.set_random_state(state, device)
    assert torch.equal(torch.rand(4, device=device), drawn)

    side = ahead(mover(device))
    assert side is not None
    moved = side([torch.ones(3), {"a": torch.zeros(2)}])
    side.ready()
    assert str(moved[0].device) == str(moved[1]["a"].device) == FAKE
    assert move(nn.utils.rnn.pack_sequence([torch.ones(2)]), device).data.device == device
    with pytest.raises(RuntimeError, match="device"):
        torch.add(moved[0], torch.ones(3))  # a tensor of the host


def test_a_device_that_only_torch_knows_answers_every_question() -> None:
    on_device(walk_of_the_answers)


class Recorder(Logger):
    """Keeps the metrics that it is sent."""

    name, version = "recorder", 0

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.sent |= metrics

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None: ...


def walk_of_memory(folder: Path) -> None:
    sizes = []

    @find_executable_batch_size(starting_batch_size=8)
    def work(batch_size: int) -> None:
        sizes.append(batch_size)
        if batch_size > 4:
            raise torch.OutOfMemoryError("out of memory")

    work()  # type: ignore[reportCallIssue]
    assert sizes == [8, 4]
    recorder = Recorder()
    callbacks = [DeviceStatsMonitor(), ModelCheckpoint(folder, filename="a")]
    run = trainer(logger=recorder, log_every_n_steps=1, callbacks=callbacks, plugins=[AsyncCheckpointIO()])
    module = Net()
    run.fit(module, tiny_loader())
    assert recorder.sent["DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.peak"] > 0
    saved = torch.load(folder / "a.ckpt")["state_dict"]
    assert {value.device.type for value in saved.values()} == {"cpu"}
    assert all(torch.equal(a, b) for a, b in zip(saved.values(), weights(module), strict=True))


def test_memory_figures_and_snapshots_come_from_the_device(tmp_path: Path) -> None:
    on_device(walk_of_memory, tmp_path)
