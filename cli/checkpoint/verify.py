"""``paceline checkpoint verify``: compare every byte of each checkpoint with the checkpoint's checksums."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ... import messages
from ...checkpoint.checksums import problem
from .select import checkpoints


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("path", help="a checkpoint, or a folder of checkpoints to verify")


def run(arguments: Namespace) -> int:
    """Verify every byte of every checkpoint; return 1 if any checkpoint is damaged."""
    damaged = 0
    for one in checkpoints(arguments.path):
        wrong = problem(one.path)
        damaged += wrong is not None
        fine = "ok" if one.known is not None else "ok, according to its own checksums (no manifest)"
        messages.answer(f"{one.path}: {fine if wrong is None else wrong.why}")
    return int(damaged > 0)
