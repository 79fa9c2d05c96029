"""A loop as PyTorch has it and the same with an Accelerator: few lines differ, the numbers do not."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from rank_processes import ranks

ROOT = Path(__file__).resolve().parent.parent.parent
LOADED = "paceline_example_own_loop"


def example() -> Any:
    spec = importlib.util.spec_from_file_location(LOADED, ROOT / "examples" / "06_own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(before: str, after: str) -> list[str]:
    found = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in found if line[0] in "+-" and line[2:].strip()]


def test_a9_both_give_the_same_losses() -> None:
    module = example()
    before, after = module.plain(1), module.anywhere(1)
    assert before == after
    assert before[-1] < before[0]


def test_a7_a9_three_lines_change_and_the_loop_is_set_up_in_ten_lines() -> None:
    module = example()
    plain, anywhere = (
        inspect.getsource(function).partition('"""\n')[2] for function in (module.plain, module.anywhere)
    )
    assert [line[2:].strip() for line in changed(plain, anywhere)] == [
        "accelerator = Accelerator()",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "loss.backward()",
        "accelerator.backward(loss)",
    ]
    set_up = anywhere[: anywhere.index("    for _ in range")].strip().splitlines()
    assert len(set_up) <= 10


def test_a5_the_example_names_no_hardware() -> None:
    text = (ROOT / "examples" / "06_own_loop.py").read_text()
    words = (".to(", "cuda", "DistributedSampler", "GradScaler", "autocast", "init_process_group")
    assert not [word for word in words if word in text]


def test_a1_the_example_on_two_processes_sees_each_batch_once_and_learns_the_same() -> None:
    first, second = ranks(2, lambda: example().anywhere(1))
    alone = example().plain(1)
    assert len(first) == len(second) == (len(alone) + 1) // 2
    assert (first[0], first[0] != second[0]) == (alone[0], True)
    assert max(first[-1], second[-1]) < alone[0]
