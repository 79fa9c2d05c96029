"""How long a save holds up training: a state of 500 MB (weights and Adam), saved every 10 steps.

    python benchmarks/checkpoint_stall.py                    # about four minutes
    python benchmarks/checkpoint_stall.py --only "paceline, in the background" --rounds 3 --folder /scratch

Every figure comes from a fresh process. ``blocked``: seconds in the save call, the median over the saves after the
first, and the same as a multiple of copying the state into memory that is kept, measured in the same process.
``first``: that multiple for the first save, which makes the buffers. ``drag``: what all the steps up to the next save
take longer than steps without any save. ``memory``: what saving adds to the peak of the resident memory, as a multiple
of the state.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import torch
from measuring import SEED, in_fresh_process, machine, progress, rss_mb, table
from torch import Tensor, nn

EVERY, SAVES = 10, 5
STEPS = EVERY * SAVES
WIDTH, DEPTH = 2048, 10  # 42 million parameters


class Log:
    """When each forward began, and how long each save took, by the number of forwards before it."""

    def __init__(self) -> None:
        self.forwards: list[float] = []
        self.saves: dict[int, float] = {}
        self.memory: list[float] = []

    def save(self, work: Callable[[], Any]) -> None:
        """Run ``work``; it counts as a save if it is time for one."""
        if len(self.forwards) % EVERY:
            work()
            return
        if not self.saves:
            self.memory.append(rss_mb("VmHWM"))
        start = time.perf_counter()
        work()
        self.saves[len(self.forwards)] = time.perf_counter() - start


LOG = Log()


class Net(nn.Sequential):
    """Ten wide layers."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def forward(self, input: Tensor) -> Tensor:
        LOG.forwards.append(time.perf_counter())
        return super().forward(input)


class Data:
    """One batch, over and over."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(torch.randn(4, WIDTH), STEPS)


def trained_by(library: Any, base: type, folder: Path, keeper: dict[str, Any], **settings: Any) -> tuple[Net, Any]:
    """Train with a Trainer whose ModelCheckpoint is timed."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    class Timed(library.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, *given: Any) -> None:
            LOG.save(lambda: super(Timed, self).on_train_batch_end(*given))

    module = Module()
    trainer = library.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Timed(folder, every_n_train_steps=EVERY, save_on_train_epoch_end=False, **keeper)],
        **settings,
    )
    trainer.fit(module, Data())
    return module.net, trainer.optimizers[0]


def paceline(folder: Path, background: bool) -> tuple[Net, Any]:
    import paceline as library

    return trained_by(library, library.TrainingModule, folder, {"async_save": background})


def lightning(folder: Path, background: bool) -> tuple[Net, Any]:
    import pytorch_lightning as library
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    plugins = [AsyncCheckpointIO()] if background else []
    return trained_by(library, library.LightningModule, folder, {}, plugins=plugins)


def dcp(folder: Path, background: bool) -> tuple[Net, Any]:
    """A loop by hand that saves with torch.distributed.checkpoint."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as save_at_once

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    net, running = Net(), None
    optimizer = torch.optim.Adam(net.parameters())
    for batch in Data():
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

        def save() -> None:
            nonlocal running
            if len(LOG.forwards) % EVERY == 0:
                if running is not None:
                    running.result()
                state: Any = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                place = folder / str(len(LOG.forwards))
                running = async_save(state, checkpoint_id=place) if background else None
                if not background:
                    save_at_once(state, checkpoint_id=place)

        LOG.save(save)
    if running is not None:
        running.result()
    return net, optimizer


CONTESTANTS: dict[str, tuple[str, Callable[..., tuple[Net, Any]], bool]] = {
    "paceline, in the background": ("paceline", paceline, True),
    "paceline, at once": ("paceline", paceline, False),
    "torch DCP async_save": ("torch", dcp, True),
    "torch DCP save": ("torch", dcp, False),
    "lightning AsyncCheckpointIO": ("pytorch_lightning", lightning, True),
    "lightning, default": ("pytorch_lightning", lightning, False),
}


def copy_seconds(tensors: list[Tensor]) -> float:
    """Copy a state into memory that is kept: the median of five."""
    kept = [torch.zeros_like(tensor) for tensor in tensors]
    found = []
    for _ in range(6):
        start = time.perf_counter()
        for tensor, room in zip(tensors, kept, strict=True):
            room.copy_(tensor)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def drag_seconds() -> float:
    """What the steps after a save take longer, the save itself apart: the median over the saves but the first."""
    times = LOG.forwards
    quiet = statistics.median(b - a for a, b in pairwise(times[2:EVERY]))
    places = sorted(LOG.saves)[1:-1]
    return statistics.median(times[place + EVERY - 1] - times[place] - quiet * (EVERY - 1) for place in places)


def child(name: str, folder: str) -> None:
    """Measure one contestant and print it as the last line of standard output."""
    torch.set_num_threads(1)
    _, train, background = CONTESTANTS[name]
    net, optimizer = train(Path(folder), background)
    peak = rss_mb("VmHWM")
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [parameter.detach() for parameter in net.parameters()] + moments
    state_mb = sum(tensor.nbytes for tensor in tensors) / 2**20
    copy = copy_seconds(tensors)
    first, *others = (LOG.saves[place] for place in sorted(LOG.saves))
    found = {
        "state": state_mb,
        "copy": copy,
        "blocked": statistics.median(others),
        "multiple": statistics.median(others) / copy,
        "first": first / copy,
        "drag": drag_seconds(),
        "memory": (peak - LOG.memory[0]) / state_mb,
    }
    print("\n" + json.dumps(found), flush=True)


def ask(name: str, folder: str) -> dict[str, float]:
    """Measure in a fresh process."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        return in_fresh_process(__file__, "--child", name, inside, TERM="dumb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--folder", help="where to save; default the system's temporary folder")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        sys.stdout.flush()
        os._exit(0)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.only}
    order = random.Random(0)
    for number in range(args.rounds):
        for name in order.sample(list(results), len(results)):
            try:
                results[name].append(ask(name, args.folder))
            except RuntimeError as error:
                progress(f"{name}: {error}")
        progress(f"round {number + 1} done")
    report(results)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians over the rounds."""
    rows = []
    for name, found in results.items():
        if found:
            median = {key: statistics.median(one[key] for one in found) for key in found[0]}
            digits = [f"{median[key]:.2f}" for key in ("blocked", "multiple", "first", "drag", "memory")]
            rows.append([name, digits[0], f"{digits[1]}x", f"{digits[2]}x", digits[3], f"{digits[4]}x"])
    every = [one for found in results.values() for one in found]
    print(machine(), end="\n\n")
    if every:
        copies = statistics.median(one["copy"] for one in every)
        print(f"State: {every[0]['state']:.0f} MB; a copy of it into kept memory: {copies:.3f} s", end="\n\n")
    print(table(["", "blocked, s", "in copies", "first, in copies", "drag, s", "memory, in states"], rows))


if __name__ == "__main__":
    main()
