"""What importing costs, as the list of modules that it brings in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cold

#: None of these may come in with the public names, unless torch itself brings it.
HEAVY = [
    "accelerate",
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "jsonargparse",
    "matplotlib",
    "mlflow",
    "onnx",
    "onnxscript",
    "pandas",
    "rich",
    "safetensors",
    "sklearn",
    "swanlab",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.onnx",
    "torch.profiler",
    "torch.utils.tensorboard",
    "torchmetrics",
    "tqdm",
    "trackio",
    "transformers",
    "wandb",
    "yaml",
]

PROGRAM = """
import json, sys
{before}
old = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - old)))
"""


def modules_of(statement: str, before: str = "") -> list[str]:
    """The modules that a statement adds in a fresh interpreter."""
    program = PROGRAM.format(statement=statement, before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def heavy(modules: list[str]) -> list[str]:
    return [m for m in modules if any(m == h or m.startswith(h + ".") for h in HEAVY)]


def test_a10_k4_the_package_alone_imports_not_even_torch() -> None:
    modules = modules_of("import paceline")
    assert "paceline" in modules
    assert not [m for m in modules if m.partition(".")[0] in ("torch", "numpy")]
    assert not heavy(modules)
    assert [m for m in modules if m.startswith("paceline")] == ["paceline", "paceline.lazy_names", "paceline.old_paths"]


@pytest.mark.parametrize(
    "statement",
    [
        "from paceline import Trainer, TrainingModule",
        "from paceline import *",
        "from paceline import DataModule, CombinedLoader, seed_everything, Callback",
        "import paceline.callbacks, paceline.loggers, paceline.strategies",
        "import paceline.accelerator.trackers",
    ],
)
def test_the_public_names_bring_nothing_heavy_beyond_torch(statement: str) -> None:
    modules = modules_of(statement, before="import torch")
    assert any(m.startswith("paceline.") for m in modules)
    assert not heavy(modules)


HELP = """
import io, contextlib
from paceline import Trainer, TrainingModule
from paceline.cli import TrainerCLI

def help_of(*words):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            TrainerCLI(TrainingModule, args=[*words, "--help"])
        except SystemExit:
            return shown.getvalue()

assert "{fit,validate,test,predict}" in help_of()
for_all = len(set(sys.modules) - old)
assert for_all < 300 and "paceline.strategies.fsdp.strategy" not in sys.modules, for_all
assert "paceline.callbacks.EarlyStopping" in (text := help_of("fit")).replace("\\n", "") and "--train" in text, text
assert "DDPStrategy" in text and "FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy" in text.replace("\\n", " ")
"""


def test_the_help_of_a_command_line_brings_the_classes_of_its_subcommand_only() -> None:
    pytest.importorskip("jsonargparse")
    modules = modules_of(HELP, before="import torch")
    slow = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining", "sympy"}
    assert not {*slow, "rich", "tqdm", "tensorboard"}.intersection(modules)


def test_a_command_line_that_trains_finds_the_classes_that_its_help_leaves_out() -> None:
    pytest.importorskip("jsonargparse")
    text = """
from paceline import TrainingModule
from paceline.cli import TrainerCLI

words = ["--trainer.strategy=FSDPStrategy", "--trainer.strategy.sharding=full", "--trainer.accelerator=cpu"]
assert type(TrainerCLI(TrainingModule, args=words, run=False).trainer.strategy).__name__ == "FSDPStrategy"
try:
    TrainerCLI(TrainingModule, args=[*words, "--help"], run=False)
except SystemExit as ended:
    assert ended.code == 0
"""
    assert "paceline.strategies.fsdp.strategy" in modules_of(text, before="import torch")


def test_the_check_sees_a_heavy_import() -> None:
    assert heavy(modules_of("import rich.console", before="import torch"))
