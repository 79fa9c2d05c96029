"""Everything that is worth knowing on the day a GPU can be had, in the order of its worth, in 25 minutes at most.

    make gpu                                # or: python benchmarks/gpu.py; writes gpu.json, prints one table
    python benchmarks/gpu.py --smoke        # tiny sizes, on the CPU too: does it all work?
    python benchmarks/gpu.py --parts steps --tasks resnet50 --only "by hand" paceline

tests     the tests marked ``gpu``.
waits     a fit with bar, logging and checkpoints while ``torch.cuda.set_sync_debug_mode("error")`` forbids to wait.
steps     a transformer of 124 M parameters and a ResNet-50 in bf16-mixed, by hand, with Paceline and with the peers
          that are installed; as it is, compiled, and as CUDA graphs. A contestant trains in a process of its own
          between two eager loops by hand; batches are ready in pinned memory. A step's time is the median over blocks
          of steps, MFU counts the floating-point operations of the eager network, the peak is of torch's allocator.
stall     how long a save of the transformer with AdamW holds up training, beside copying its state to pinned memory.
doctor    the doctor's split of a step beside the kernel times that torch's profiler adds up.
sharded   FSDP with one process, over NCCL: the same weights as without, and its steps.

Each part runs in a process of its own; what a part has found is kept if a later one breaks or the time is up. The
package is the folder above; nothing needs to be installed but torch and what a fit imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from measuring import SEED, machine, progress, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = ("tests", "waits", "steps", "stall", "doctor", "sharded")
#: Minutes after which a part's process is ended.
LIMITS = {"tests": 8, "waits": 2, "steps": 3, "stall": 3, "doctor": 2, "sharded": 3}
#: Minutes that the part ``steps`` leaves to those after it.
LEFT_OVER = 4
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "max_epochs": 1, "devices": 1}


# ---- the networks --------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """GPT-2 with its 124 M parameters; the embedding of the tokens is also the head."""

    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> None:
        from parallel import Block

        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size, before, after in ((1, channels, inner), (3, inner, inner), (1, inner, 4 * inner)):
            step = stride if size == 3 else 1
            layers += [nn.Conv2d(before, after, size, step, size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.body, self.shortcut = nn.Sequential(*layers[:-1]), nn.Sequential()
        if stride > 1 or channels != 4 * inner:
            convolution = nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """ResNet-50, by its numbers of blocks, as torchvision has it."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers: list[nn.Module] = []
    channels = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for block in range(depth):
            layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
            channels = 4 * inner
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@dataclass(frozen=True)
class Task:
    """What is trained: ``steps`` steps in blocks of ``block``, after ``warmup`` steps."""

    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    warmup: int
    steps: int
    block: int

    @property
    def batches(self) -> int:
        return self.warmup + self.steps + 1

    def fresh(self) -> nn.Module:
        """A network with the same weights each time."""
        torch.manual_seed(SEED)
        return self.network()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def _text(rows: int, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(vocabulary, (rows, context + 1))
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


def _images(rows: int, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, pixels, pixels), torch.randint(classes, (rows,))


def tasks(smoke: bool) -> dict[str, Task]:
    """The two trainings, by name."""
    if smoke:
        small = partial(Transformer, 2, 32, 64, 16)
        tiny = partial(resnet, (1, 1), 4, 10)
        return {
            "transformer": Task(small, partial(_text, 2, 16, 64), adamw, 4, 4, 2),
            "resnet50": Task(tiny, partial(_images, 2, 32, 10), sgd, 4, 4, 2),
        }
    return {
        "transformer": Task(Transformer, partial(_text, 16, 1024, 50257), adamw, 20, 60, 10),
        "resnet50": Task(resnet, partial(_images, 128, 224, 1000), sgd, 20, 60, 10),
    }


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def settle() -> None:
    """Wait for the device, so that what was asked for counts when it is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Batches:
    """Four batches in pinned memory over and over, which note the time of each block's first fetch."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(SEED)
        made = [task.batch() for _ in range(4)]
        pinned = torch.cuda.is_available()
        self.batches = [tuple(part.pin_memory() if pinned else part for part in batch) for batch in made]
        self.task, self.marks = task, []

    def __len__(self) -> int:
        return self.task.batches

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.task.batches):
            if i >= self.task.warmup and (i - self.task.warmup) % self.task.block == 0:
                settle()
                self.marks.append(time.perf_counter())
            yield self.batches[i % len(self.batches)]

    def seconds(self) -> float:
        """Of a step: the median over the blocks."""
        blocks = zip(self.marks, self.marks[1:], strict=False)
        return statistics.median((after - before) / self.task.block for before, after in blocks)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def user_module(base: type, task: Task, net: nn.Module) -> Any:
    """What a user of Paceline or Lightning writes."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer(self.net)

    return Module()


# ---- the contestants -------------------------------------------------------------------------------------------------


def by_hand(task: Task, net: nn.Module, loader: Batches, compiled: dict[str, Any] | None = None) -> None:
    place = device()
    net.to(place)
    optimizer = task.optimizer(net)
    model: Any = net if compiled is None else torch.compile(net, **compiled)
    for batch in loader:
        batch = [part.to(place, non_blocking=True) for part in batch]
        with torch.autocast(place.type, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def paceline(task: Task, net: nn.Module, loader: Batches, **settings: Any) -> None:
    from paceline import Trainer, TrainingModule

    Trainer(precision="bf16-mixed", **QUIET, **settings).fit(user_module(TrainingModule, task, net), loader)


def lightning(task: Task, net: nn.Module, loader: Batches, compiled: dict[str, Any] | None = None) -> None:
    import pytorch_lightning

    module = user_module(pytorch_lightning.LightningModule, task, net)
    if compiled is not None:
        module.net.compile(**compiled)
    pytorch_lightning.Trainer(precision="bf16-mixed", **QUIET).fit(module, loader)


def accelerate(
    task: Task, net: nn.Module, loader: Batches, library: str, compiled: dict[str, Any] | None = None
) -> None:
    options: dict[str, Any] = {"mixed_precision": "bf16", "cpu": device().type == "cpu"}
    if compiled is not None:
        from accelerate.utils import TorchDynamoPlugin

        options["dynamo_plugin"] = TorchDynamoPlugin(**{"backend": "inductor", **compiled})
    accelerator = importlib.import_module(library).Accelerator(**options)
    model, optimizer = accelerator.prepare(net, task.optimizer(net))
    for batch in loader:
        batch = [part.to(accelerator.device, non_blocking=True) for part in batch]
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


def contestants(smoke: bool) -> dict[str, Callable[[Task, nn.Module, Batches], None]]:
    """How the network is trained, by the name in the table. Peers that are not installed are left out."""
    plain: dict[str, Any] = {"backend": "eager"} if smoke else {}
    in_graphs = {"mode": "reduce-overhead", **plain}  # on a CPU, torch compiles without them
    found: dict[str, Callable[[Task, nn.Module, Batches], None]] = {
        "by hand": by_hand,
        "paceline": paceline,
        "by hand, compiled": partial(by_hand, compiled=plain),
        "paceline, compile=True": partial(paceline, compile=plain or True),
        'paceline, compile="step"': partial(paceline, compile={"scope": "step", **plain}),
        "paceline Accelerator": partial(accelerate, library="paceline"),
        "lightning": lightning,
        "accelerate": partial(accelerate, library="accelerate"),
        "by hand, CUDA graphs": partial(by_hand, compiled=in_graphs),
        'paceline, compile="graphs"': partial(paceline, compile="graphs"),
        "lightning, compiled": partial(lightning, compiled=plain),
        "accelerate, compiled": partial(accelerate, library="accelerate", compiled=plain),
        "lightning, CUDA graphs": partial(lightning, compiled=in_graphs),
        "accelerate, CUDA graphs": partial(accelerate, library="accelerate", compiled=in_graphs),
    }
    needs = {"lightning": "pytorch_lightning", "accelerate": "accelerate"}
    there = {peer: importlib.util.find_spec(package) is not None for peer, package in needs.items()}
    if not torch.cuda.is_available():
        del found['paceline, compile="graphs"']  # Paceline refuses it there
    return {name: run for name, run in found.items() if there.get(name.partition(",")[0], True)}


def missing_peers() -> list[str]:
    names = ("pytorch_lightning", "accelerate")
    return [name for name in names if importlib.util.find_spec(name) is None]


# ---- the parts -----------------------------------------------------------------------------------------------------


def run_tests(smoke: bool) -> dict[str, Any]:
    """Run the tests marked ``gpu``; only the files that have some are collected."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *map(str, files[: 1 if smoke else None]), *options]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError((run.stdout + run.stderr)[-2000:])
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        bad = [
            case
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        names = [f"{case.attrib['classname']}::{case.attrib['name']}" for case in bad]
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        return {**counts, "failed": names, "output": run.stdout[-6000:] if bad else ""}


def run_waits(smoke: bool) -> dict[str, Any]:
    """Fit while torch raises where the host waits for the device; say where it waited."""
    from paceline import Callback, Trainer, TrainingModule
    from paceline.callbacks import ModelCheckpoint
    from paceline.loggers import CSVLogger

    task = tasks(smoke)["transformer"]

    class Forbid(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx < task.batches - 3 else "default")

    class Logs(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.fresh()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer(self)

    found: dict[str, Any] = {}
    for name, saves in (("bar and logging", False), ("bar, logging and checkpoints", True)):
        with tempfile.TemporaryDirectory() as folder:
            keep = [ModelCheckpoint(folder, every_n_train_steps=5, async_save=True)] if saves else []
            shown = {"logger": CSVLogger(folder), "enable_progress_bar": True, "enable_checkpointing": saves}
            trainer = Trainer(log_every_n_steps=2, callbacks=[Forbid(), *keep], **{**QUIET, **shown})
            try:
                trainer.fit(Logs(), Batches(task))
                found[name] = "never waits" if torch.cuda.is_available() else "runs; there is no GPU to wait for"
            except RuntimeError as error:
                frames = traceback.extract_tb(error.__traceback__)
                where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "torch/" not in f.filename]
                found[name] = f"waits: {error} at {' < '.join(reversed(where[-3:]))}"
            finally:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("default")
    return found


def timed(task: Task, run: Callable[[Task, nn.Module, Batches], None]) -> dict[str, float]:
    """Train a fresh network; seconds of a step, seconds in all, the peak of memory, and what tells the weights."""
    net, loader = task.fresh(), Batches(task)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    run(task, net, loader)
    settle()
    total = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    weights = sum(p.detach().double().abs().sum().item() for p in net.parameters())
    return {"seconds": loader.seconds(), "total": total, "peak": peak, "weights": weights}


def run_steps(name: str, who: str, smoke: bool) -> dict[str, Any]:
    """Eager loop by hand, contestant, eager loop by hand, back to back in this process."""
    from paceline.callbacks.throughput_monitor import measure_flops, peak_flops

    torch.set_float32_matmul_precision("high")
    task = tasks(smoke)[name]
    before = timed(task, by_hand)
    found = timed(task, contestants(smoke)[who])
    after = timed(task, by_hand)
    with torch.device("meta"):
        net, batch = task.network(), task.batch()
    flops = measure_flops(net, lambda: net(batch[0]), lambda out: out.sum())
    rows, peak = batch[0].shape[0], peak_flops(device(), "bfloat16")
    eager = (before["seconds"] + after["seconds"]) / 2
    return {
        "samples_per_second": rows / found["seconds"],
        "milliseconds": 1e3 * found["seconds"],
        "to_by_hand": found["seconds"] / eager,
        "mfu": flops / found["seconds"] / peak if peak else None,
        "peak_bytes": found["peak"],
        "peak_bytes_by_hand": after["peak"],
        "first_seconds": max(0.0, found["total"] - found["seconds"] * task.batches),
        "weights_apart": abs(found["weights"] / after["weights"] - 1),
    }


def run_stall(smoke: bool) -> dict[str, Any]:
    """Save every few steps in the foreground and in the background; seconds that a save holds up training."""
    from paceline import Trainer, TrainingModule
    from paceline.callbacks import ModelCheckpoint

    task, every = tasks(smoke)["transformer"], 2 if smoke else 20
    found: dict[str, Any] = {}
    for name, background in (("in the foreground", False), ("in the background", True)):
        held: list[float] = []

        class Timed(ModelCheckpoint):
            def on_train_batch_end(self, trainer: Any, *given: Any, held: list[float] = held) -> None:
                if trainer.global_step % every:
                    return
                settle()
                begun = time.perf_counter()
                super().on_train_batch_end(trainer, *given)
                held.append(time.perf_counter() - begun)

        net = task.fresh()
        module = user_module(TrainingModule, task, net)
        with tempfile.TemporaryDirectory() as folder:
            saves = Timed(folder, every_n_train_steps=every, async_save=background)
            options = {**QUIET, "enable_checkpointing": True, "callbacks": [saves]}
            trainer = Trainer(precision="bf16-mixed", **options)
            loader = Batches(task)
            trainer.fit(module, loader)
        state = [*net.state_dict().values()]
        state += [v for one in trainer.optimizers[0].state.values() for v in one.values() if isinstance(v, Tensor)]
        rest = held[1:] or held
        found[name] = {
            "first_seconds": held[0],
            "seconds": statistics.median(rest),
            "copy_seconds": copied(state),
            "state_bytes": sum(value.numel() * value.element_size() for value in state),
            "step_seconds": loader.seconds(),
        }
    return found


def copied(state: list[Tensor]) -> float:
    """Seconds to copy a state into pinned memory that is there: the least that a save in the background can take."""
    pinned = [torch.empty_like(value, device="cpu", pin_memory=value.is_cuda) for value in state]
    taken = []
    for _ in range(3):
        settle()
        begun = time.perf_counter()
        for kept, value in zip(pinned, state, strict=True):
            kept.copy_(value, non_blocking=True)
        settle()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def run_doctor(smoke: bool) -> dict[str, Any]:
    """Shares of forward, backward and optimizer: the doctor's, and those of the kernels that the profiler saw."""
    from paceline import Trainer, TrainingModule
    from paceline.profilers import Doctor

    task, parts = replace(tasks(smoke)["transformer"], steps=24 if smoke else 60), ("forward", "backward", "optimizer")
    module = user_module(TrainingModule, task, task.fresh())
    doctor = Doctor(write=False)
    Trainer(precision="bf16-mixed", profiler=doctor, **QUIET).fit(module, Batches(task))
    split = {} if doctor.report is None else {name: s for name, s in doctor.report.ranks[0].parts.items() if s}
    kernels = dict(zip(parts, kernel_seconds(task, 2 if smoke else 5), strict=True))
    return {
        "split": split,
        "doctor": shares({name: split.get(name, 0.0) for name in parts}),
        "profiler": shares(kernels),
    }


def shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


def kernel_seconds(task: Task, steps: int) -> list[float]:
    """Seconds of kernels (of operators on a CPU) in forward, backward and optimizer: by adding one after the other."""
    place, net, batches = device(), task.fresh(), Batches(task).batches
    net.to(place)
    optimizer, totals = task.optimizer(net), []
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def step(depth: int, batch: Any) -> None:
        with torch.autocast(place.type, torch.bfloat16):
            loss = loss_of(net, [part.to(place) for part in batch])
        if depth > 0:
            loss.backward()
        if depth > 1:
            optimizer.step()
        optimizer.zero_grad()

    for batch in batches[:2]:
        step(2, batch)
    for depth in range(3):
        settle()
        with torch.profiler.profile(activities=activities) as profile:
            for i in range(steps):
                step(depth, batches[i % len(batches)])
            settle()
        kind = "self_device_time_total" if place.type == "cuda" else "self_cpu_time_total"
        totals.append(sum(getattr(event, kind) for event in profile.key_averages()) / 1e6 / steps)
    forward, both, whole = totals
    return [forward, max(both - forward, 0.0), max(whole - both, 0.0)]


def run_sharded(smoke: bool) -> dict[str, Any]:
    """Train with FSDP in one process and without; compare weights and time."""
    import torch.distributed as dist

    from paceline import Callback, Trainer, TrainingModule
    from paceline.strategies import FSDPStrategy

    task, found = tasks(smoke)["transformer"], {}
    weights: dict[str, float] = {}

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0 and dist.is_initialized():
                found["backend"] = dist.get_backend()
                found["sharded"] = sum(type(p).__name__ == "DTensor" for p in pl_module.parameters())

    for name, strategy in (("plain", "auto"), ("fsdp", FSDPStrategy(wrap=[type(task.fresh().blocks[0])]))):
        net, loader = task.fresh(), Batches(task)
        trainer = Trainer(strategy=strategy, precision="bf16-mixed", callbacks=[Look()], **QUIET)
        trainer.fit(user_module(TrainingModule, task, net), loader)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        weights[name] = sum(p.detach().double().abs().sum().item() for p in whole)
        found[f"{name}_seconds"] = loader.seconds()
    found["weights_apart"] = abs(weights["fsdp"] / weights["plain"] - 1)
    return found


# ---- the day -------------------------------------------------------------------------------------------------------


RUNNERS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "tests": run_tests,
    "waits": run_waits,
    "stall": run_stall,
    "doctor": run_doctor,
    "sharded": run_sharded,
}


def in_process(part: list[str], smoke: bool, limit: float, folder: Path) -> dict[str, Any]:
    """Run a part in a process of its own; return what it found, or why it found nothing."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", *part, "--answer", str(answer), *(["--smoke"] if smoke else [])]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {limit:.0f} s"}
    if answer.exists():
        return json.loads(answer.read_text())
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    return {"failed": lines[-1][:500] if lines else f"ended with {run.returncode}"}


def day(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that were asked for, in order, until the time is up; write the file after each."""
    end = time.monotonic() + 60 * arguments.minutes
    found: dict[str, Any] = {"machine": where(), "smoke": arguments.smoke, "not_installed": missing_peers()}
    work: list[list[str]] = []
    for part in PARTS:
        if part == "steps":
            names = [n for n in contestants(arguments.smoke) if not arguments.only or n in arguments.only]
            work += [[part, task, who] for who in names for task in arguments.tasks]
        else:
            work.append([part])
    with tempfile.TemporaryDirectory() as folder:
        for one in work:
            left = end - time.monotonic() - (60 * LEFT_OVER if one[0] == "steps" else 0)
            if one[0] not in arguments.parts:
                continue
            begun = time.monotonic()
            answer: dict[str, Any] = {"failed": "the time was up"}
            if left > 20:
                answer = in_process(one, arguments.smoke, min(left, 60 * LIMITS[one[0]]), Path(folder))
            answer["took_seconds"] = round(time.monotonic() - begun, 1)
            progress(f"{', '.join(one)}: {answer.get('failed') or 'done'}")
            inner = found
            for name in one[:-1]:
                inner = inner.setdefault(name, {})
            inner[one[-1]] = answer
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def where() -> str:
    name = f"{torch.cuda.get_device_name()}; " if torch.cuda.is_available() else ""
    return name + machine()


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """The lines of the table, by part."""
    rows: list[list[Any]] = []
    for part in PARTS:
        answer = found.get(part, {})
        if part == "steps":
            rows += [step_row(task, who, one) for task, all_of in answer.items() for who, one in all_of.items()]
        elif answer.get("failed") and part != "tests":
            rows.append([part, "", None, None, None, None, None, answer["failed"]])
        elif answer:
            rows += [[part, what, None, None, None, None, None, text] for what, text in WORDS_OF[part](answer)]
    return rows


def step_row(task: str, who: str, one: dict[str, Any]) -> list[Any]:
    if "failed" in one:
        return [task, who, None, None, None, None, None, one["failed"]]
    mfu = None if one["mfu"] is None else f"{100 * one['mfu']:.1f} %"
    note = f"weights {one['weights_apart']:.1e} apart" if one["weights_apart"] > 1e-3 else ""
    figures = [f"{one['milliseconds']:.2f}", f"{one['to_by_hand']:.3f}x", mfu]
    peak = f"{one['peak_bytes'] / 2**30:.2f}" if one["peak_bytes"] else None
    return [task, who, one["samples_per_second"], *figures, peak, ", ".join(filter(None, [note, _first(one)]))]


def _first(one: dict[str, Any]) -> str:
    return f"{one['first_seconds']:.0f} s before that" if one["first_seconds"] > 5 else ""


def _of_tests(one: dict[str, Any]) -> list[tuple[str, str]]:
    if "tests" not in one:
        return [("", str(one["failed"]))]
    bad = one["failures"] + one["errors"]
    text = f"{one['tests'] - bad - one['skipped']} passed, {bad} failed, {one['skipped']} skipped"
    return [("marked gpu", text), *(("failed", name) for name in one["failed"])]


def _of_stall(one: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, held in one.items():
        if isinstance(held, dict):
            size, copy = held["state_bytes"] / 2**30, held["copy_seconds"]
            text = f"{held['seconds']:.3f} s a save of {size:.2f} GiB ({held['first_seconds']:.3f} s the first)"
            lines.append((name, f"{text}; a copy to pinned memory takes {copy:.3f} s"))
    return lines


def _of_doctor(one: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for who in ("doctor", "profiler"):
        found.append((who, ", ".join(f"{name} {100 * share:.1f} %" for name, share in one[who].items())))
    return found


def _of_sharded(one: dict[str, Any]) -> list[tuple[str, str]]:
    ratio = one["fsdp_seconds"] / one["plain_seconds"]
    text = f"{one['backend']}, {one['sharded']} parameters sharded, weights {one['weights_apart']:.1e} apart"
    return [("fsdp, one process", f"{text}, a step {ratio:.3f} times the plain one")]


def _of_waits(one: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in one.items() if isinstance(text, str)]


WORDS_OF: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "tests": _of_tests,
    "waits": _of_waits,
    "stall": _of_stall,
    "doctor": _of_doctor,
    "sharded": _of_sharded,
}
HEADER = ["", "who", "samples/s", "ms a step", "to by hand", "MFU", "peak GiB", "found"]


def take_this_package(folder: Path) -> None:
    """Let this process and its children import the folder above as ``paceline``, whatever the folder's name is."""
    (folder / "paceline").symlink_to(ROOT)
    sys.path[:0] = [str(folder), str(HERE)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tasks", nargs="+", choices=tuple(tasks(True)), default=list(tasks(True)))
    parser.add_argument("--only", nargs="+", help="contestants of the part steps")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("paceline").addHandler(logging.NullHandler())
    if arguments.part:
        part, *more = arguments.part
        run = partial(run_steps, *more) if part == "steps" else RUNNERS[part]
        arguments.answer.write_text(json.dumps(run(arguments.smoke)))
        return
    if not (torch.cuda.is_available() or arguments.smoke):
        raise SystemExit("There is no CUDA device here. Use --smoke to try the benchmark with tiny sizes on the CPU.")
    with tempfile.TemporaryDirectory() as folder:
        take_this_package(Path(folder))
        arguments.out = arguments.out.resolve()
        with suppress(KeyboardInterrupt):
            day(arguments)
    found = json.loads(arguments.out.read_text())
    print(f"{found['machine']}\n\n{table(HEADER, rows_of(found))}")
    for peer in found["not_installed"]:
        print(f"\n{peer} is not installed here, so it was not measured.")


if __name__ == "__main__":
    main()
