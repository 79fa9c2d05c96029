"""``paceline checkpoint show``: describe a checkpoint and its contents."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from ... import messages
from .select import FoundCheckpoint, checkpoints, the_one


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("file", help="a checkpoint file or folder")
    parser.add_argument("--keys", action="store_true", help="also list tensors and hyperparameters (imports torch)")


def run(arguments: Namespace) -> int:
    """Print the checkpoint's manifest and, with --keys, its contents."""
    path = the_one(arguments.file)
    found = next(checkpoints(str(path)))
    if found.path != path:
        raise ValueError(
            f"{arguments.file!r} is a folder of checkpoints. Pass one checkpoint, such as {str(found.path)!r}."
        )
    messages.answer(messages.table([("path", str(found.path)), *_facts(found)]))
    if arguments.keys:
        for line in _contents(found):
            messages.answer(line)
    return 0


def _facts(found: FoundCheckpoint) -> Iterator[tuple[str, str]]:
    yield "state", found.state
    yield "size", messages.size(found.size)
    yield "kind", found.kind
    known = found.known
    if known is None:
        return
    yield from {
        "format": str(known.format),
        "save": str(known.sequence),
        "epoch": str(known.epoch),
        "step": str(known.global_step),
        "score": "-" if known.score is None else f"{known.monitor}={known.score!r}",
        "ranks": str(known.world_size),
        "versions": ", ".join(f"{name} {version}" for name, version in known.versions.items()),
        "runs": ", ".join(known.runs) or "-",
        "written": known.written,
        "checksums": f"{len(known.files)} {'files' if known.kind == 'folder' else 'records'}",
    }.items()


def _contents(found: FoundCheckpoint) -> Iterator[str]:
    """Yield a checkpoint's keys, hyperparameters and tensors as lines of text, without loading the tensors."""
    from ...checkpoint.read import read

    checkpoint = read(found.path, map_location="meta")
    yield f"\nkeys: {', '.join(checkpoint)}"
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in checkpoint:
            yield f"\n{key}:"
            yield from (f"  {name}: {value!r}" for name, value in checkpoint[key].items())
    rows = [_weight(name, value) for name, value in checkpoint["state_dict"].items()]
    total = sum(value.numel() for value in checkpoint["state_dict"].values() if hasattr(value, "numel"))
    yield f"\nstate_dict: {len(rows)} entries, {total:,} numbers"
    yield messages.table([("  name", "shape", "type", "bytes"), *rows])


def _weight(name: str, value: Any) -> tuple[str, str, str, str]:
    if not hasattr(value, "element_size"):
        return f"  {name}", "-", type(value).__name__, "-"
    kind = str(value.dtype).removeprefix("torch.")
    return f"  {name}", str(list(value.shape)), kind, f"{value.numel() * value.element_size():,}"
