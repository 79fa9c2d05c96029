"""What importing Paceline adds to importing torch, beside the peers that are installed.

    python benchmarks/import_time.py --rounds 9

Fresh processes, interleaved in random order; the first round only warms the disk's cache. CPU time is the figure to
trust on a shared machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics

from measuring import in_fresh_process, machine, progress, spread, table

STATEMENTS = {
    "paceline": "import paceline",
    "paceline, used": "from paceline import Trainer, TrainingModule",
    "ignite": "import ignite.engine",
    "accelerate": "from accelerate import Accelerator",
    "lightning": "import pytorch_lightning",
}

PROGRAM = """
import json, sys, time
start = time.process_time()
import torch
middle, before = time.process_time(), len(sys.modules)
{statement}
end = time.process_time()
print(json.dumps([(middle - start) * 1e3, (end - middle) * 1e3, len(sys.modules) - before]))
"""


def measure(statement: str) -> list[float]:
    """CPU milliseconds of ``import torch``, of the statement after it, and how many modules that added."""
    return in_fresh_process("-c", PROGRAM.format(statement=statement))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    statements = {n: s for n, s in STATEMENTS.items() if importlib.util.find_spec(s.split()[1].partition(".")[0])}
    results: dict[str, list[list[float]]] = {name: [] for name in statements}
    order = random.Random(0)
    for number in range(args.rounds + 1):
        for name in order.sample(list(statements), len(statements)):
            answer = measure(statements[name])
            if number:
                results[name].append(answer)
        progress(f"round {number} of {args.rounds} done")
    torch_ms = statistics.median([run[0] for runs in results.values() for run in runs])
    rows = []
    for name, runs in results.items():
        added = [run[1] for run in runs]
        share = f"{statistics.median(added) / torch_ms:+.1%}"
        rows.append([f"`{statements[name]}`", statistics.median(added), spread(added), share, int(runs[0][2])])
    print(f"{machine()}\n\n`import torch` itself: {torch_ms:.0f} ms CPU\n")
    print(table(["after import torch", "CPU ms", "+-", "over torch", "new modules"], rows))


if __name__ == "__main__":
    main()
