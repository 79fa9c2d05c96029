"""Models larger than their memory: what loading and running one costs, beside Accelerate.

    python benchmarks/big_model.py              # 3 GB of weights, about five minutes, 7 GB of disk
    python benchmarks/big_model.py --gigabytes 1 --limit 400MB --rounds 1

Every figure comes from a fresh process, which builds the model without weights. ``whole``: all of it into the host's
memory. ``disk``: no more than ``--limit`` there, the rest stays on disk and comes block by block when it runs. Memory
is the highest resident size less that before the load, pages mapped from files included. The outputs of all are
compared to the bit with those of the model as it was written. Files are in the system's cache in every case.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import in_fresh_process, machine, progress, rss_mb, table
from torch import Tensor, nn

WIDTH, VOCABULARY = 2048, 8192
#: Bytes of a block.
BLOCK = 4 * (8 * WIDTH * WIDTH + 4 * WIDTH + WIDTH + 2 * WIDTH)
TOKENS = (1, 64)
FORWARDS = 5


class Block(nn.Module):
    """The feed-forward half of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, and an output layer tied to the embedding."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def write(depth: int, folder: Path) -> dict[str, Any]:
    """Write a model's weights in shards; returns what its outputs are."""
    from paceline import Accelerator

    torch.manual_seed(0)
    model = Model(depth)
    Accelerator(cpu=True).save_model(model, folder, max_shard_size="500MB")
    return {"digests": digests(model), "bytes": sum(p.nbytes for p in model.parameters())}


def digests(model: nn.Module) -> list[str]:
    """What the outputs are, to the bit."""
    with torch.inference_mode():
        return [hashlib.sha256(model(tokens(n)).numpy().tobytes()).hexdigest()[:16] for n in TOKENS]


def tokens(count: int) -> Tensor:
    return torch.arange(count).view(1, -1) % VOCABULARY


def empty(who: str, depth: int) -> Any:
    """The model before anything is loaded; torch alone makes it when it loads."""
    if who == "torch":
        return None
    with __import__(who).init_empty_weights():
        model = Model(depth)
    if who == "accelerate":  # it makes another parameter of a tied one
        model.head.weight = model.embed.weight
    return model


def load(who: str, what: str, model: Any, args: argparse.Namespace) -> nn.Module:
    """Load as ``who`` does."""
    if who == "torch":
        from safetensors.torch import load_file

        model = Model(args.depth)
        state = {}
        for file in sorted(Path(args.folder).glob("*.safetensors")):
            state.update(load_file(file))
        model.load_state_dict(state, strict=False)
        return model
    limits: dict[str, Any] = {"device_map": {"": "cpu"}}
    if what == "disk":
        limits = {"device_map": "auto", "max_memory": {"cpu": args.limit}, "offload_folder": args.offload}
    return __import__(who).load_checkpoint_and_dispatch(model, args.folder, no_split_module_classes=["Block"], **limits)


def child(args: argparse.Namespace) -> dict[str, Any]:
    """One contestant, one case."""
    who, what = args.child
    if who != "torch":
        __import__(who).load_checkpoint_and_dispatch  # noqa: B018 (what is imported lazily is no memory of the load)
    torch.randn(8, 8) @ torch.randn(8, 8)
    model = empty(who, args.depth)
    before = rss_mb()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size begins again from here
    start = time.perf_counter()
    model = load(who, what, model, args)
    found: dict[str, Any] = {"load": time.perf_counter() - start, "load_mb": rss_mb("VmHWM") - before}
    Path("/proc/self/clear_refs").write_text("5")
    with torch.inference_mode():
        model(tokens(1))
    found["first"] = time.perf_counter() - start
    found["digests"] = digests(model)
    for count in TOKENS:
        seconds = []
        with torch.inference_mode():
            for _ in range(FORWARDS):
                start = time.perf_counter()
                model(tokens(count))
                seconds.append(time.perf_counter() - start)
        found[f"forward_{count}"] = statistics.median(seconds)
    found["run_mb"] = rss_mb("VmHWM") - before
    return found


WHOLE = (("torch", "whole"), ("paceline", "whole"), ("accelerate", "whole"))
CASES = (*WHOLE, ("paceline", "disk"), ("accelerate", "disk"))
Results = dict[tuple[str, str], list[dict[str, Any]]]


def ask(case: tuple[str, str], args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure in a fresh process."""
    with tempfile.TemporaryDirectory(dir=args.where) as offload:
        options = ["--folder", folder, "--offload", offload, "--depth", args.depth, "--limit", args.limit]
        return in_fresh_process(__file__, "--child", *case, *options, MALLOC_MMAP_THRESHOLD_=str(2**20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3)
    parser.add_argument("--limit", default="1GB", help="weights in the host's memory in the case 'disk'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--where", help="a folder with room for twice the weights; default: the temporary one")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--offload", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("\n" + json.dumps(child(args)), flush=True)
        return
    args.depth = max(1, round(args.gigabytes * 1e9 / BLOCK))
    with tempfile.TemporaryDirectory(dir=args.where) as folder:
        facts = write(args.depth, Path(folder))
        progress(f"{facts['bytes'] / 1e9:.2f} GB written, {args.depth} blocks of {BLOCK / 1e6:.0f} MB")
        results: Results = {}
        cases = [case for case in CASES if importlib.util.find_spec(case[0])]
        for number in range(args.rounds):
            for case in random.Random(number).sample(cases, len(cases)):
                try:
                    results.setdefault(case, []).append(ask(case, args, folder))
                except RuntimeError as error:
                    progress(f"{case}: {error}")
            progress(f"round {number + 1} done")
    report(results, facts, args)


def report(results: Results, facts: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the medians over the rounds."""
    rows = []
    for case in CASES:
        found = results.get(case)
        if not found:
            continue

        def middle(key: str, found: list[dict[str, Any]] = found) -> float:
            return statistics.median(one[key] for one in found)

        over = f"{middle('load_mb') * 2**20 / facts['bytes']:.2f}x" if case[1] == "whole" else None
        forwards = [f"{middle(f'forward_{count}') * 1000:.0f}" for count in TOKENS]
        same = all(one["digests"] == facts["digests"] for one in found)
        seconds = [f"{middle(key):.2f}" for key in ("load", "first")]
        load_mb, run_mb = (f"{middle(key):.0f}" for key in ("load_mb", "run_mb"))
        rows.append([f"{case[0]}, {case[1]}", *seconds, load_mb, over, run_mb, *forwards, "yes" if same else "NO"])
    print(machine())
    print(f"{facts['bytes'] / 1e6:.0f} MB of float32 weights in shards of 500 MB, {args.depth} blocks of ", end="")
    print(f"{BLOCK / 1e6:.0f} MB; limit {args.limit}; {args.rounds} rounds.\n")
    forwards = [f"forward, {count} token{'s' if count > 1 else ''}, ms" for count in TOKENS]
    head = ["", "load, s", "first output, s", "peak MiB", "of the weights", "peak running", *forwards, "same bits"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
