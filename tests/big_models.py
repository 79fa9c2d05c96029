"""Models in parts, their weights in files, and programs in processes of their own: ``from big_models import Net``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from paceline import init_empty_weights

WIDTH = 64
HERE = Path(__file__).parent


class Block(nn.Module):
    """What is not to be split, with a buffer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between a linear layer and a tied head, which has a bias of its own."""

    def __init__(self, blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.start = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)
        self.head.weight = self.start.weight
        self.shift = nn.Parameter(torch.randn(width))
        self.order: list[int] = list(range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x) + self.shift
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


def write(state: Mapping[str, Tensor], path: Path, misaligned: bool = False) -> Path:
    """A safetensors file whose tensors begin at a multiple of 64 bytes, or 8 bytes behind one."""
    first: dict[int, str] = {}
    kept = {name: value for name, value in state.items() if first.setdefault(value.data_ptr(), name) == name}
    data = save({name: value.contiguous() for name, value in kept.items()})
    length = int.from_bytes(data[:8], "little")
    pad = -(8 + length) % 64 + (8 if misaligned else 0)
    head = data[8 : 8 + length] + b" " * pad
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
    return path


def empty(make: Any, *args: Any) -> Any:
    """A model without values."""
    with init_empty_weights():
        return make(*args)


def program(text: str, *arguments: Any) -> dict[str, Any]:
    """Run a program in a process of its own; what it prints last is JSON."""
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


#: What a program of :func:`program` measures its memory with.
MEMORY = """
import json, re, sys
from pathlib import Path

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")
"""
