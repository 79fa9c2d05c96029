"""What a process holds while a model of 1 GB goes from 8 files to two processes that have half of it each.

    python benchmarks/sharded_load.py                    # about two minutes; gloo, CPU
    python benchmarks/sharded_load.py --layers 2         # does it work?

Every figure comes from a pair of fresh processes. ``own``: anonymous memory at its highest, less what the process had
before the model was built; ``files``: the same of mapped file pages, which the system takes back as it likes;
``together``: of both at once (what VmHWM counts). The weights that each rank ends with are compared with the files'.

trainer                 Trainer(strategy="fsdp"): configure_model builds it empty and calls load_checkpoint_in_model
prepare, then load      Accelerator(strategy="fsdp"): prepare(model) with the layers' initial values, then the load
load by prepare         the same within accelerator.init_module(), so that prepare reads the files
load, then prepare      the usual way: each process loads the whole, prepare shards it
accelerate              its FSDP2 with cpu_ram_efficient_loading: rank 0 loads the whole, and sends it
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import machine, progress, quiet_environment, table
from torch import Tensor, nn

WIDTH, WORDS, FILES = 1024, 32000, 8
MB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)


class Network(nn.Module):
    """The parameters of a language model; it is not run."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


class Peak:
    """Samples this process's memory in a thread, every millisecond or so."""

    FIELDS = ("RssAnon", "RssFile", "VmRSS")

    def __init__(self) -> None:
        self.before = self.look()
        self.highest = dict(self.before)
        self.done = threading.Event()
        self.started = time.perf_counter()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def look(self) -> dict[str, float]:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {words[0][:-1]: int(words[1]) / 1024 for words in lines if words[0][:-1] in self.FIELDS}

    def watch(self) -> None:
        while not self.done.wait(0.001):
            now = self.look()
            self.highest = {name: max(value, now[name]) for name, value in self.highest.items()}

    def stop(self) -> dict[str, float]:
        self.done.set()
        self.thread.join()
        return {
            "own": self.highest["RssAnon"] - self.before["RssAnon"],
            "files": self.highest["RssFile"] - self.before["RssFile"],
            "together": self.highest["VmRSS"] - self.before["VmRSS"],
            "seconds": time.perf_counter() - self.started,
        }


def right(model: nn.Module, folder: Path) -> bool:
    """Whether this process's parts are those of the files."""
    from safetensors import safe_open

    where = json.loads(next(folder.glob("*.index.json")).read_text())["weight_map"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, parameter in model.named_parameters():
        with safe_open(folder / where[name], framework="pt") as opened:
            parts = opened.get_tensor(name).chunk(world)
        if not torch.equal(parts[rank], parameter.to_local()):  # type: ignore[attr-defined]
            return False
    return True


def trainer(folder: Path, layers: int) -> tuple[dict[str, float], nn.Module]:
    from paceline import Trainer, TrainingModule, init_empty_weights, load_checkpoint_in_model

    class ReadyError(Exception): ...

    class Module(TrainingModule):
        def configure_model(self) -> None:
            self.peak = Peak()
            with init_empty_weights():
                self.network = Network(layers)
            load_checkpoint_in_model(self.network, folder, strict=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.network(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_fit_start(self) -> None:
            self.found = self.peak.stop()
            raise ReadyError

    module = Module()
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = Trainer(strategy="fsdp", accelerator="cpu", max_epochs=1, **off)  # type: ignore[arg-type]
    with suppress(ReadyError):
        run.fit(module, [torch.zeros(1, 1, dtype=torch.long)])
    return module.found, module.network


def accelerator(folder: Path, layers: int, how: str) -> tuple[dict[str, float], nn.Module]:
    from paceline import Accelerator, init_empty_weights, load_checkpoint_in_model

    accelerator = Accelerator(cpu=True, strategy="fsdp")
    peak = Peak()
    if how == "load by prepare":
        with accelerator.init_module(), init_empty_weights():
            network = Network(layers)
            load_checkpoint_in_model(network, folder, strict=True)
    else:
        with init_empty_weights():
            network = Network(layers)
    if how == "load, then prepare":
        load_checkpoint_in_model(network, folder, strict=True)
    network = accelerator.prepare(network)
    if how == "prepare, then load":
        load_checkpoint_in_model(network, folder, strict=True)
    return peak.stop(), network


def accelerate(folder: Path, layers: int) -> tuple[dict[str, float], nn.Module]:
    """What its ``prepare`` does on GPUs; on a CPU it does not shard, so its functions are called one by one."""
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    main = torch.distributed.get_rank() == 0
    peak = Peak()
    with init_empty_weights():
        network = Network(layers)
    if main:
        load_checkpoint_in_model(network, str(folder))
    whole = network.state_dict()
    network = network.to("meta")
    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=main), network, whole)  # type: ignore[arg-type]
    return peak.stop(), network


WAYS = {
    "trainer": trainer,
    "prepare, then load": lambda folder, layers: accelerator(folder, layers, "prepare, then load"),
    "load by prepare": lambda folder, layers: accelerator(folder, layers, "load by prepare"),
    "load, then prepare": lambda folder, layers: accelerator(folder, layers, "load, then prepare"),
    "accelerate": accelerate,
}


def child(way: str, folder: str, layers: str) -> None:
    """Measure one process and print what was found as the last line of standard output."""
    torch.set_num_threads(1)
    found, network = WAYS[way](Path(folder), int(layers))
    right_ones = right(network, Path(folder))
    print("\n" + json.dumps({**found, "right": right_ones}), flush=True)
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)


def ask(way: str, folder: Path, layers: int) -> list[dict[str, Any]]:
    """What each rank of a fresh pair found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # With a fixed threshold what is freed is gone, so that peaks are of what was alive.
    environment = {**quiet_environment(), **place, "MALLOC_MMAP_THRESHOLD_": str(MB), "TERM": "dumb"}
    command = [sys.executable, str(Path(__file__)), "--child", way, str(folder), str(layers)]
    pair = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = [process.communicate(timeout=600) for process in pair]
    if any(process.returncode for process in pair):
        raise RuntimeError("; ".join((errors.strip().splitlines() or ["no answer"])[-1] for _, errors in answers))
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def write(folder: Path, layers: int) -> int:
    """A model's weights in files, drawn by a process that ends. Returns their size in bytes."""
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); from sharded_load import *; from paceline import "
        "Accelerator; torch.manual_seed(0); n = Network(int(sys.argv[3])); "
        "size = sum(p.nbytes for p in n.parameters()); "
        "Accelerator(cpu=True).save_model(n, sys.argv[2], int(size / FILES * 1.1)); print(size)"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, here, str(folder), str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet_environment(), check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        size = write(Path(place), args.layers) / MB
        files = len(list(Path(place).glob("*.safetensors")))
        for way in args.only:
            if way == "accelerate" and find_spec("accelerate") is None:
                continue
            try:
                found = ask(way, Path(place), args.layers)
            except RuntimeError as error:
                progress(f"{way}: {error}")
                continue
            for rank, one in enumerate(found):
                figures = [one["own"], f"{one['own'] / size:.2f}x", one["files"], one["together"], one["seconds"]]
                rows.append([f"{way}, rank {rank}", *figures, "yes" if one["right"] else "NO"])
            progress(f"{way} done")
    print(machine(), end="\n\n")
    print(f"The model has {size:.0f} MB in {files} files; half of it is {size / 2:.0f} MB.", end="\n\n")
    print(table(["", "own, MB", "of the model", "files, MB", "together, MB", "seconds", "weights right"], rows))


if __name__ == "__main__":
    main()
