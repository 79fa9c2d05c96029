"""Does every strategy give the numbers of one process? Prints ``paceline.verify``'s table.

    python benchmarks/parity.py                                   # a small transformer with tied weights
    python benchmarks/parity.py --model train.py:make             # yours: make() returns a TrainingModule and a loader
    python benchmarks/parity.py --strategies ddp fsdp --devices 4 --accumulate 3 --precision bf16-mixed

Ends with status 1 if a strategy departs.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline
from paceline.strategies import ModelParallelStrategy

OURS = str(Path(__file__).resolve().parent.parent / "tests" / "parity" / "networks.py")


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("verified", path)
    if spec is None or spec.loader is None or not Path(path).exists():
        sys.exit(f"--model {path}: there is no such Python file. Pass it as FILE.py:FUNCTION.")
    module = sys.modules["verified"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transformer() -> tuple[Any, Any]:
    networks = load(OURS)
    return networks.TiedLanguage(), networks.loader(networks.TiedLanguage)


def maker(model: str | None) -> Callable[[], tuple[Any, Any]]:
    if model is None:
        return transformer
    path, _, function = model.partition(":")
    return getattr(load(path), function or "make")


def strategies(names: list[str], devices: int) -> list[Any]:
    """Names as they are; ``tensor_parallel`` and ``pipeline_parallel`` over all processes."""
    sizes = ("tensor_parallel", "pipeline_parallel")
    return [ModelParallelStrategy(data_parallel_shard=1, **{n: devices}) if n in sizes else n for n in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="FILE.py:FUNCTION")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "tensor_parallel", "pipeline_parallel"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accelerator", default="auto")
    args = parser.parse_args()
    module, loader = maker(args.model)()
    report = paceline.verify(
        module,
        loader,
        strategies(args.strategies, args.devices),
        devices=args.devices,
        steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        precision=args.precision,
        accelerator=args.accelerator,
    )
    print(report)
    sys.exit(not report.ok)


if __name__ == "__main__":
    main()
