"""``paceline checkpoint prune``: delete all checkpoints except the newest and the best."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from ... import messages
from ...checkpoint.atomic_write import sync_folder
from ...checkpoint.checksums import problem
from ...checkpoint.storage import Location, location, remove
from .select import FoundCheckpoint, checkpoints


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.description = (
        "Delete the checkpoints in a folder, except the newest or best ones, which are verified first. Checkpoints\n"
        "that are damaged or have no manifest are neither counted nor deleted. Do not run this command while a fit\n"
        "is saving to the folder."
    )
    parser.add_argument("folder", help="the folder with the checkpoints; subfolders are not touched")
    parser.add_argument("--keep-last", type=int, default=0, metavar="N", help="keep the N newest resumable checkpoints")
    parser.add_argument(
        "--keep-best", type=int, default=0, metavar="K", help="keep the K checkpoints with the best score"
    )
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="whether a low or high score is better")
    parser.add_argument(
        "--monitor", help="the metric to rank checkpoints by, if the folder has scores for several metrics"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(arguments: Namespace) -> int:
    """Print which checkpoints to keep and which to delete, ask for confirmation, and delete the latter."""
    if arguments.keep_last < 0 or arguments.keep_best < 0 or not arguments.keep_last + arguments.keep_best:
        raise ValueError(
            "Nothing would be kept. Pass --keep-last N, --keep-best K, or both, with numbers of 1 or more."
        )
    found = list(checkpoints(arguments.folder, depth=0))
    why = _why_kept(found, arguments)
    gone = [one for one in found if one.path not in why]
    for one in found:
        messages.answer(f"{'keep' if one.path in why else 'delete'}  {one.path}  {why.get(one.path, '')}".rstrip())
    total = f"{len(gone)} of {len(found)} checkpoints, {messages.size(sum(one.size for one in gone))}"
    if arguments.dry_run or not gone:
        messages.answer(f"To delete: {total}. Nothing was deleted.")
        return 0
    if not arguments.yes and not _agreed(total):
        messages.answer("Nothing was deleted.")
        return 1
    for one in gone:
        remove(one.path)
    folder = location(arguments.folder)
    if isinstance(folder, Path):
        sync_folder(folder)
    messages.answer(f"Deleted {total}.")
    return 0


def _why_kept(found: list[FoundCheckpoint], arguments: Namespace) -> dict[Location, str]:
    """Return the checkpoints to keep, each with the reason for keeping it."""
    why = {one.path: f"({one.state}: not counted, and not deleted)" for one in found if one.state != "ok"}
    own = [one for one in found if one.path not in why]
    newest = sorted(own, key=_age, reverse=True)
    resumable = [one for one in newest if one.known is not None and not one.known.weights_only]
    for one in _first_whole(resumable, arguments.keep_last, why):
        why[one.path] = "(among the newest)"
    for one in _first_whole(_best_first(newest, arguments), arguments.keep_best, why):
        score = f"{one.known.monitor}={one.known.score:.4g}" if one.known else ""
        why[one.path] = f"{why.get(one.path, '')} (among the best: {score})".strip()
    return why


def _age(one: FoundCheckpoint) -> tuple[int, str]:
    return (one.known.sequence, one.known.written) if one.known else (0, "")


def _best_first(newest: list[FoundCheckpoint], arguments: Namespace) -> list[FoundCheckpoint]:
    if not arguments.keep_best:
        return []
    scored = {one.path: one.known for one in newest if one.known and one.known.score is not None}
    metrics = {known.monitor for known in scored.values()}
    if arguments.monitor is not None and arguments.monitor not in metrics:
        raise ValueError(messages.unknown("metric", arguments.monitor, sorted(map(str, metrics))))
    if not scored or (len(metrics) > 1 and arguments.monitor is None):
        names = messages.names(sorted(map(str, metrics)), "and")
        which = (
            f"scores for {names}. Pass --monitor with one of these metrics."
            if scored
            else "no scores. Use --keep-last."
        )
        raise ValueError(f"--keep-best {arguments.keep_best}: the checkpoints in this folder have {which}")
    sign = 1 if arguments.mode == "min" else -1
    wanted = [one for one in newest if one.path in scored and arguments.monitor in (None, scored[one.path].monitor)]
    return sorted(wanted, key=lambda one: sign * (scored[one.path].score or 0.0))


def _first_whole(candidates: Iterable[FoundCheckpoint], number: int, why: dict[Location, str]) -> list[FoundCheckpoint]:
    """Return the first ``number`` intact checkpoints. Add damaged ones to ``why``, so that they are kept."""
    kept: list[FoundCheckpoint] = []
    for one in candidates:
        if len(kept) == number:
            break
        wrong = problem(one.path)
        if wrong is None:
            kept.append(one)
        else:
            why[one.path] = f"(damaged: {wrong.why}: not counted, and not deleted)"
    return kept


def _agreed(total: str) -> bool:
    if not sys.stdin.isatty():
        raise RuntimeError(
            f"Deleting {total} requires confirmation, but standard input is not a terminal. Pass --yes or --dry-run."
        )
    return input(f"Delete {total}? [y/N] ").strip().lower() in ("y", "yes")
