"""What a step on the CPU costs by how the C library keeps memory that was freed: time, pages, peak.

    python benchmarks/freed_memory.py            # three rounds: some ten minutes
    python benchmarks/freed_memory.py --smoke

The same loop by hand every time, in processes of its own: as it is; with what Paceline sets where a strategy on a CPU
is set up (``processes/cpu_memory.py``); and with what a user may set in the environment. Four tasks: the language model
of ``examples``, layers whose outputs have 64 MB, layers whose weights have 16 MB, and batches that are never of one
size.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from measuring import example, machine, progress, quiet_environment, spread, table

from paceline.processes.cpu_memory import SETTINGS, keep_freed_memory

HEAP = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_MAX_": "0"}
HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}
#: Whether Paceline's thresholds are set, and the environment.
WAYS: dict[str, tuple[bool, dict[str, str]]] = {
    "as it is": (False, {}),
    "paceline": (True, {}),
    " ".join(f"{name}={value}" for name, value in HEAP.items()): (False, HEAP),
    "THP_MEM_ALLOC_ENABLE=1": (False, HUGE),
    "paceline, THP_MEM_ALLOC_ENABLE=1": (True, HUGE),
}


def language_model() -> Callable[[], None]:
    import torch

    script = example("02_language_model")
    train, _ = script.corpus()
    batches = iter(torch.utils.data.DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = script.LanguageModel()

    def loss() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(next(batches))

    return stepping(model, loss)


def layers(width: int, depth: int, rows: Callable[[], int]) -> Callable[[], None]:
    import torch
    from torch import nn

    net = nn.Sequential(
        *[part for _ in range(depth) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    )
    return stepping(net, lambda: net(torch.randn(rows(), width)).square().mean())


def stepping(model: Any, loss: Callable[[], Any]) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


#: What makes the step, and how many steps are timed.
TASKS: dict[str, tuple[Callable[[], Callable[[], None]], int]] = {
    "language model": (language_model, 40),
    "outputs of 64 MB": (lambda: layers(512, 3, lambda: 2**15), 4),
    "weights of 16 MB": (lambda: layers(2048, 8, lambda: 64), 10),
    "batches of any size": (lambda: layers(512, 4, lambda: random.randrange(2**9, 2**14)), 16),
}


def measure(task: str, way: str, steps: int) -> None:
    """Run one task here; print milliseconds of CPU and pages a step, and the peak in MB, as JSON."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)
    step = TASKS[task][0]()
    if WAYS[way][0]:
        keep_freed_memory(torch.device("cpu"))
    for _ in range(2):
        step()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    for _ in range(steps):
        step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    ms = 1e3 * (time.process_time() - began) / steps
    print(json.dumps([ms, (after.ru_minflt - before.ru_minflt) / steps, after.ru_maxrss / 1024]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=TASKS, nargs="*", default=list(TASKS))
    parser.add_argument("--smoke", action="store_true", help="one round of one step")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], args.measure[1], int(args.measure[2]))
        return
    order = random.Random(0)
    foreign = (*SETTINGS, "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")
    own = {name: value for name, value in quiet_environment().items() if name not in foreign}
    print(machine())
    for task in args.only:
        found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        steps = 1 if args.smoke else TASKS[task][1]
        rounds = 1 if args.smoke else args.rounds
        for number in range(rounds):
            for way in order.sample(list(WAYS), len(WAYS)):
                command = [sys.executable, __file__, "--measure", task, way, str(steps)]
                environment = own | WAYS[way][1]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
            progress(f"{task}: round {number + 1} of {rounds}")
        rows = []
        for way, measured in found.items():
            ratios = [mine[0] / other[0] for mine, other in zip(measured, found["as it is"], strict=True)]
            ms, pages, peak = (statistics.median(one[i] for one in measured) for i in range(3))
            rows.append([way, ms, f"{statistics.median(ratios):.2f}x", f"{spread(ratios):.2f}", f"{pages:.0f}", peak])
        print(f"\n### {task[0].upper()}{task[1:]}\n")
        print(table(["", "ms a step (CPU)", "to as it is", "+-", "pages a step", "peak MB"], rows))


if __name__ == "__main__":
    main()
