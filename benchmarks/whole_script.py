"""Whole programs: the loop that tutorials teach beside the examples of this repository as they stand.

    python benchmarks/whole_script.py                     # digits and language model, 16 rounds: half an hour
    python benchmarks/whole_script.py --only digits --rounds 3
    python benchmarks/whole_script.py --smoke

Both train the example's network on its data for the same number of batches, with the validation that the example makes.
By hand means what a tutorial writes: a DataLoader, ``loss.item()`` for the printed line, ``.item()`` in validation.
Each runs in a process of its own beside one of the loop by hand, at the same time, each on a core that they change from
round to round, so that both see the same machine: they wait for each other after the first pass, which warms up (and
compiles). The figure is the median over the rounds of the ratio of their median passes, +- its error (95 %); the loop
by hand beside itself shows whether that is right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from measuring import example, machine, median_error, progress, quiet_environment, table

#: What a contestant adds to ``Trainer``; None is the loop by hand.
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "by hand": None,
    "paceline": QUIET,
    "paceline, with log, bar and checkpoints": {},
    "paceline, compile='step'": {**QUIET, "compile": "step"},
}
TASKS = ("digits", "language model")
#: Batches of the language model between two stamps.
BLOCK = 5

Stamps = list[tuple[float, float]]


def stamp(stamps: Stamps) -> None:
    """Note the time; after the first pass wait until the other process is as far."""
    if len(stamps) == 1 and sys.__stdout__ is not None:
        print("warm", file=sys.__stdout__, flush=True)
        sys.stdin.readline()
    stamps.append((time.perf_counter(), time.process_time()))


def digits_by_hand(passes: int) -> Stamps:
    import torch
    from torch.nn.functional import cross_entropy

    script = example("01_first_fit")
    data, model, stamps = script.Digits(), script.Classifier(), []
    data.setup("fit")
    train, val = data.train_dataloader(), data.val_dataloader()
    net, optimizer = model.net, model.configure_optimizers()
    stamp(stamps)
    for epoch in range(passes + 1):
        net.train()
        for number, (images, labels) in enumerate(train):
            loss = cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                print(f"epoch {epoch}, batch {number}: loss {loss.item():.4f}")
        net.eval()
        total, right = 0.0, 0
        with torch.no_grad():
            for images, labels in val:
                logits = net(images)
                total += cross_entropy(logits, labels).item() * len(labels)
                right += (logits.argmax(1) == labels).sum().item()
        print(f"epoch {epoch}: validation loss {total / len(data.val):.4f}, accuracy {right / len(data.val):.1%}")
        stamp(stamps)
    return stamps


def language_model_by_hand(passes: int) -> Stamps:
    import torch
    from torch.utils.data import DataLoader

    script = example("02_language_model")
    train, _ = script.corpus()
    model, stamps = script.LanguageModel(), []
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    model.train()
    for number, batch in enumerate(loader):
        if number % BLOCK == 0:
            stamp(stamps)
        if number == (passes + 1) * BLOCK:
            break
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(batch)
        (loss / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number % 20 == 0:
            print(f"batch {number}: loss {loss.item():.4f}")
    return stamps


def digits(passes: int, arguments: dict[str, Any]) -> Stamps:
    from paceline import Callback, Trainer

    class Stamper(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            stamp(stamps)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            stamp(stamps)

    script, stamps = example("01_first_fit"), []
    Trainer(max_epochs=passes + 1, callbacks=[Stamper()], num_sanity_val_steps=0, **arguments).fit(
        script.Classifier(), datamodule=script.Digits()
    )
    return stamps


def language_model(passes: int, arguments: dict[str, Any]) -> Stamps:
    from torch.utils.data import DataLoader

    from paceline import Trainer

    script, stamps = example("02_language_model"), []

    class Stamped(script.LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % BLOCK == 0:
                stamp(stamps)

        validation_step = None

        def configure_optimizers(self) -> Any:
            import torch

            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)

    train, _ = script.corpus()
    Trainer(
        max_epochs=1,
        limit_train_batches=(passes + 1) * BLOCK + 1,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        **arguments,
    ).fit(Stamped(), DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    return stamps


BY_HAND: dict[str, Callable[[int], Stamps]] = {"digits": digits_by_hand, "language model": language_model_by_hand}
TRAINED: dict[str, Callable[..., Stamps]] = {"digits": digits, "language model": language_model}


def measure(task: str, name: str, passes: int, core: int) -> None:
    """Run one contestant here; print the milliseconds of its median pass, wall and CPU, as JSON on the last line."""
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    arguments = CONTESTANTS[name]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.chdir(folder)
        stamps = BY_HAND[task](passes) if arguments is None else TRAINED[task](passes, arguments)
    pairs = list(pairwise(stamps[1:]))
    if len(pairs) != passes:
        raise RuntimeError(f"{name} made {len(pairs)} passes of {passes}")
    print(json.dumps([statistics.median(1e3 * (after[i] - before[i]) for before, after in pairs) for i in (0, 1)]))


def side_by_side(task: str, names: Sequence[str], passes: int, cores: Sequence[int]) -> list[list[float]]:
    """Wall and CPU milliseconds of each contestant's median pass, when they run at the same time."""
    with contextlib.ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in names]
        running = []
        for name, core, file in zip(names, cores, said, strict=True):
            command = [sys.executable, __file__, "--measure", task, name, str(core), "--passes", str(passes)]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
            running.append(subprocess.Popen(command, env=quiet_environment(), text=True, **pipes))
        warm = [process.stdout.readline() for process in running]  # nothing, from one that failed
        for process in running if all(warm) else ():
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [process.communicate()[0] for process in running]
        for name, process, file in zip(names, running, said, strict=True):
            if process.returncode:
                file.seek(0)
                raise SystemExit(f"{name} failed:\n{file.read()[-2000:]}")
    return [json.loads(out.splitlines()[-1]) for out in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--passes", type=int, default=16, help=f"epochs of the digits, blocks of {BLOCK} text batches")
    parser.add_argument("--only", choices=TASKS, nargs="*", default=TASKS)
    parser.add_argument("--contestants", choices=CONTESTANTS, nargs="*", default=list(CONTESTANTS))
    parser.add_argument("--smoke", action="store_true", help="one round of two passes")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure[:2], args.passes, int(args.measure[2]))
        return
    rounds, passes = (1, 2) if args.smoke else (args.rounds, args.passes)
    cores = usable_cores()
    print(machine())
    for task in args.only:
        found: dict[str, list[list[list[float]]]] = {name: [] for name in args.contestants}
        for number in range(rounds):
            for name in args.contestants:
                names, here = [name, "by hand"], cores if number % 2 else cores[::-1]
                if number // 2 % 2:
                    found[name].append(side_by_side(task, names[::-1], passes, here)[::-1])
                else:
                    found[name].append(side_by_side(task, names, passes, here))
            progress(f"{task}: round {number + 1} of {rounds}")
        rows = []
        for name, times in found.items():
            ratios = ([mine[i] / other[i] for mine, other in times] for i in (1, 0))
            texts = [f"{statistics.median(each):.3f}x +- {median_error(each):.3f}" for each in ratios]
            ms = [statistics.median(pair[who][0] for pair in times) for who in (0, 1)]
            rows.append([name, *ms, *texts])
        print(f"\n### {task.capitalize()}\n")
        print(table(["", "ms a pass", "by hand beside it", "CPU, to by hand", "wall, to by hand"], rows), flush=True)


def usable_cores() -> list[int]:
    """Two cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cores) < 2:
        raise SystemExit("Contestants run side by side, which takes 2 cores; this process may use 1.")
    return cores[:2]


if __name__ == "__main__":
    main()
