"""What compiling brings: the networks alone, or the whole training step as one graph.

    python benchmarks/whole_step.py                     # both tasks, 3 rounds: about a quarter of an hour
    python benchmarks/whole_step.py --tasks mlp --rounds 5
    python benchmarks/whole_step.py --smoke             # a few batches of everything: does it work?

Two tasks: ``mlp`` (64-64-10, batch of 64, SGD with momentum: about the digits) and ``language_model`` (the transformer
of ``examples/02_language_model.py``: 3 blocks of 96, batch of 32 x 96 bytes, AdamW, clipping, a schedule each step).
Each contestant runs in a process of its own, on one thread, between two runs of the eager loop written by hand; the
figure is the median over the rounds of the ratio of CPU times. A step's time is the median over blocks of steps,
counted where batches are fetched, after compiling. Freed memory is kept in all of them as Paceline does, so that only
compiling differs. The final weights are compared with the eager loop's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from measuring import SEED, checksum, example, machine, progress, quiet_environment, spread, table

from paceline.processes.cpu_memory import keep_freed_memory

CONTESTANTS = {
    "raw eager": "loop by hand",
    "raw torch.compile": "loop by hand, torch.compile(network)",
    "paceline": "compile=None",
    "paceline True": "compile=True",
    "paceline step": 'compile="step"',
}


@dataclass(frozen=True)
class Size:
    """How many steps are counted, in blocks, after those in which things are compiled."""

    warmup: int
    steps: int
    block: int

    @property
    def batches(self) -> int:
        return self.warmup + self.steps + 1


TASKS = {"mlp": Size(100, 3000, 100), "language_model": Size(6, 40, 5)}
SMOKE = Size(4, 4, 2)


class Ticking:
    """Ready batches, 16 different ones over and over, that note the time of each block's first fetch."""

    def __init__(self, batches: list[Any], size: Size) -> None:
        self.batches, self.size = batches, size
        self.marks: list[float] = []

    def __len__(self) -> int:
        return self.size.batches

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.size.batches):
            if i >= self.size.warmup and (i - self.size.warmup) % self.size.block == 0:
                self.marks.append(time.process_time())
            yield self.batches[i % len(self.batches)]

    def microseconds(self) -> float:
        """Of a step: the median over the blocks."""
        return statistics.median(
            (b - a) / self.size.block * 1e6 for a, b in zip(self.marks, self.marks[1:], strict=False)
        )


def mlp() -> tuple[Any, list[Any], float | None]:
    """A module, its batches, and the norm to clip to."""
    import torch
    from torch import nn

    from paceline import TrainingModule

    class Mlp(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(SEED)
    return Mlp(), [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(16)], None


def language_model() -> tuple[Any, list[Any], float | None]:
    """The module of the example, batches of bytes, and the norm to clip to."""
    import torch

    script = example("02_language_model")
    torch.manual_seed(SEED)
    module = script.LanguageModel()
    text = torch.randint(0, 128, (16, 32, script.CONTEXT + 1))
    return module, [(windows[:, :-1], windows[:, 1:]) for windows in text], 1.0


MAKERS: dict[str, Callable[[], tuple[Any, list[Any], float | None]]] = {"mlp": mlp, "language_model": language_model}


def raw(module: Any, loader: Ticking, clip: float | None, compiled: bool) -> None:
    """The loop that one writes."""
    import torch

    class Horizon:
        estimated_stepping_batches = len(loader)

    module._trainer = Horizon()
    configured = module.configure_optimizers()
    module._trainer = None
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    module.log = lambda *_, **__: None
    if compiled:
        for network in (module, *module.children()):
            network.compile()
    for batch_idx, batch in enumerate(loader):
        output = module.training_step(batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def paceline(module: Any, loader: Ticking, clip: float | None, compile: Any) -> None:
    """The same by the Trainer."""
    from paceline import Trainer

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=clip, compile=compile, **dict.fromkeys(off, False)
    )
    trainer.fit(module, loader)


RUNNERS: dict[str, Callable[[Any, Ticking, float | None], None]] = {
    "raw eager": lambda *task: raw(*task, compiled=False),
    "raw torch.compile": lambda *task: raw(*task, compiled=True),
    "paceline": lambda *task: paceline(*task, compile=None),
    "paceline True": lambda *task: paceline(*task, compile=True),
    "paceline step": lambda *task: paceline(*task, compile="step"),
}


def run(who: str, task: str, size: Size) -> tuple[float, float]:
    """Train a fresh module; microseconds of a step, and what tells its weights."""
    module, batches, clip = MAKERS[task]()
    loader = Ticking(batches, size)
    RUNNERS[who](module, loader, clip)
    return loader.microseconds(), checksum(module)


def measure(who: str, task: str, size: Size) -> dict[str, float]:
    """Eager loop, contestant, eager loop, back to back in this process."""
    import torch

    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    before, _ = run("raw eager", task, size)
    begun = time.perf_counter()
    found, weights = run(who, task, size)
    seconds = time.perf_counter() - begun
    after, expected = run("raw eager", task, size)
    if abs(weights - expected) > 1e-3 * abs(expected):
        raise RuntimeError(f"{who} ended with other weights than the eager loop: {weights} and {expected}")
    eager = (before + after) / 2
    first = max(0.0, seconds - found * size.batches / 1e6)
    return {"us": found, "eager_us": eager, "ratio": found / eager, "first_seconds": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    args = parser.parse_args()
    os.environ.update(quiet_environment())
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compiling is to take what it takes the first time
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    visits = [(task, who) for _ in range(1 if args.smoke else args.rounds) for task in args.tasks for who in args.only]
    random.Random(SEED).shuffle(visits)
    for number, (task, who) in enumerate(visits, 1):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, who, task, SMOKE if args.smoke else TASKS[task]).result()
        progress(f"{number}/{len(visits)} {task}, {who}: {found['us']:.0f} us, {found['ratio']:.2f} times eager")
        results.setdefault((task, who), []).append(found)
    print(f"{machine()}, one thread\n")
    for task in args.tasks:
        rows = []
        for who in args.only:
            found = results[task, who]
            ratios = [one["ratio"] for one in found]
            middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
            figures = [f"{middle['us']:.0f}", f"{middle['ratio']:.2f}", f"{spread(ratios):.2f}"]
            rows.append([who, CONTESTANTS[who], *figures, f"{middle['first_seconds']:.0f}"])
        header = [task, "what", "CPU us a step", "times the eager loop", "+-", "s before that"]
        print(table(header, rows), end="\n\n")


if __name__ == "__main__":
    main()
