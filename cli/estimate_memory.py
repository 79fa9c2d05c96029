"""``paceline estimate-memory``: estimate a model's memory use before it is loaded or trained."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from .. import messages
from .estimate_memory_choices import DTYPES, LIBRARIES, STRATEGIES

if TYPE_CHECKING:
    from .estimate_memory_report import MemoryReport

EXAMPLES = """
MODEL is the first of these that matches:
  a folder with config.json, or that file (transformers builds the model, without weights)
  a folder, file or index of weights; only headers (safetensors) or sizes (other files) are read
  module:factory or file.py:factory: a function that returns a model, (model, batch) or (model, batch, loss), where
      loss(model, batch) is a function; the model is an nn.Module or a TrainingModule. If the factory has parameters
      batch_size and sequence_length, they receive the flags' values. Tensors that the factory creates take no memory.
Nothing is downloaded.

  paceline estimate-memory ./Mixtral-8x7B --device_memory 80GiB --num_processes 8
  paceline estimate-memory train.py:build --batch_size 32 --dtypes bf16-mixed --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add = parser.add_argument
    add("model_name", metavar="MODEL", help="the model, see below")
    add("--library_name", choices=LIBRARIES, help="the library for MODEL; detected automatically, except for timm")
    add("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "bf16-mixed", "bfloat16", "int8", "int4"])
    add("--trust_remote_code", action="store_true", help="allow code in the model's folder to run")
    add("--batch_size", type=int, metavar="N", help="samples per batch and process [the factory's, else 1]")
    add("--sequence_length", type=int, metavar="N", help="tokens per sequence [512, or the model's maximum if smaller]")
    add("--optimizer", metavar="NAME", help="a class of torch.optim [from configure_optimizers, else AdamW]")
    add("--accumulate_grad_batches", type=int, default=1, metavar="N", help="micro-batches per optimizer step [1]")
    add("--activation_checkpointing", action="store_true", help="recompute repeated blocks in the backward pass")
    add("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="the strategies to estimate [all]")
    add(
        "--num_processes",
        type=int,
        metavar="N",
        help="number of processes for ddp and fsdp [number of GPUs in this machine, or 2 without GPUs]",
    )
    add("--device_memory", metavar="SIZE", help="memory of one device, such as 24GiB [this machine's]")
    add("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.epilog = EXAMPLES


def run(arguments: Namespace) -> int:
    """Find the model, estimate its memory and print the tables."""
    from .estimate_memory_model import Wish, find
    from .estimate_memory_report import examine

    for name in ("batch_size", "sequence_length", "num_processes", "accumulate_grad_batches"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be 1 or more, but got {value}.")
    wish = Wish(arguments.library_name, arguments.trust_remote_code, arguments.batch_size, arguments.sequence_length)
    report = examine(find(arguments.model_name, wish), arguments)
    messages.answer(json.dumps(report.as_dict(), indent=2) if arguments.json else shown(report))
    return 0


def shown(report: MemoryReport) -> str:
    """Return the tables as text."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, soft_wrap=True)
    console.print(f"{report.source.what}: {report.parameters:,} parameters", highlight=False)
    console.print(_loading(report))
    if report.training:
        console.print(_training(report))
    for line in (*report.verdict, *report.notes):
        console.print(line, highlight=False)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def _table(title: str, columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _loading(report: MemoryReport) -> Any:
    columns = ("dtype", "weights", "largest layer", "inference", "weights offloaded", "training")
    table = _table(f"Loading (largest layer: {report.largest_layer})", columns)
    for row in report.loading:
        sizes = (row.weights, row.largest_layer, row.inference, row.offloaded, row.training)
        table.add_row(row.dtype, *map(_size, sizes))
    return table


def _training(report: MemoryReport) -> Any:
    columns = (
        "strategy",
        "precision",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "peak",
        "on the host",
        "fits",
    )
    table = _table(f"Training, one process; {report.memory_in_words}", columns)
    for row in report.training:
        found = row.estimate
        sizes = (found.weights, found.gradients, found.optimizer, found.activations, found.training)
        name = found.strategy + (f" x{found.num_processes}" if found.num_processes > 1 else "")
        table.add_row(name, found.precision, *map(_size, sizes), _size(found.host or None), row.fits)
    return table


def _size(number: int | None) -> str:
    return "-" if number is None else messages.size(number)
