"""Forms of single operations that Paceline chose between: optimizers, clipping, indexing. CPU time, one thread.

    python benchmarks/alternatives.py

Each figure is the least of many calls, and is compared with the same call of the other form. ``same bits`` compares the
weights after 30 steps on the same gradients.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from measuring import machine, table
from torch import nn

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, momentum": lambda parameters, **form: torch.optim.SGD(parameters, 0.01, momentum=0.9, **form),
    "AdamW": lambda parameters, **form: torch.optim.AdamW(parameters, 0.001, **form),
}
FORMS: dict[str, dict[str, Any]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def least(function: Callable[[], Any], calls: int) -> float:
    """CPU microseconds of the shortest call."""
    found = float("inf")
    for _ in range(calls):
        begun = time.process_time()
        function()
        found = min(found, time.process_time() - begun)
    return found * 1e6


def parameters(count: int, width: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.randn(width, width, generator=generator)) for _ in range(count)]
    for parameter in found:
        parameter.grad = torch.randn(width, width, generator=generator)
    return found


def stepped(make: Any, form: dict[str, Any], count: int, width: int, calls: int) -> tuple[float, list[torch.Tensor]]:
    """Microseconds of a step, and the weights after 30."""
    optimizer = make(trained := parameters(count, width), **form)
    for _ in range(30):
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in trained]
    return least(optimizer.step, calls), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="a few calls of each")
    args = parser.parse_args()
    calls = 3 if args.smoke else args.calls
    torch.set_num_threads(1)
    rows = []
    for name, make in OPTIMIZERS.items():
        for count, width in ((2, 32), (12, 32), (16, 128), (40, 256)):
            found = {form: stepped(make, how, count, width, calls) for form, how in FORMS.items()}
            plain = found["one by one"][1]
            same = ["yes" if all(map(torch.equal, found[f][1], plain)) else "no" for f in ("foreach", "fused")]
            rows.append([name, f"{count} of {width} x {width}", *(found[form][0] for form in FORMS), *same])
    print(machine() + "\n")
    print(table(["us a step", "parameters", *FORMS, "foreach: same bits", "fused: same bits"], rows))

    clipped = parameters(12, 32)
    clip = torch.nn.utils.clip_grad_norm_
    data, chosen = torch.randn(20_000, 784), torch.randperm(20_000)[:64]
    indices = chosen.tolist()
    pairs = [
        ["clipping 12 of 32 x 32", "one by one", least(lambda: clip(clipped, 1.0, foreach=False), calls)],
        ["", "foreach", least(lambda: clip(clipped, 1.0, foreach=True), calls)],
        ["64 rows of 784 floats", "tensor[indices]", least(lambda: data[chosen], calls)],
        ["", "index_select", least(lambda: data.index_select(0, chosen), calls)],
        ["64 indices from a list", "torch.tensor", least(lambda: torch.tensor(indices), calls)],
        ["", "array, frombuffer", least(lambda: torch.frombuffer(array("q", indices), dtype=torch.int64), calls)],
    ]
    print("\n" + table(["", "form", "us"], pairs))


if __name__ == "__main__":
    main()
