"""Creates the report page of a run. Does not need torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import messages
from . import html_page as pages
from .history import History, Points, Start
from .html_page import Html, Section
from .svg_charts import line_chart, pie, side_by_side

#: Maximum number of metric charts on a page; the table contains the other metrics.
MOST_CHARTS = 60
#: Largest ratio between positive values on a linear axis; above it, the axis is logarithmic.
_DECADES = 1000.0
_STAGES = re.compile(r"^(train|val|valid|validation|test)(?=[_/.-]|$)[_/.-]?|(?<=.)_(step|epoch)(?=/|$)")


def write(path: str | os.PathLike[str], page: str) -> str:
    """Write a page atomically and return its path."""
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    temporary = where.with_name(f".{where.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, where)
    return str(where)


def single(history: History) -> str:
    """Return the report page of a run."""
    curves = history.curves()
    drawn = {name: points for name, points in curves.items() if name not in history.repeated_rates()}
    sections = [
        Section("How it went", [_ending(history), pages.table(overview(history).items())]),
        Section("Curves", charts(_grouped(drawn)) or ["Nothing was logged."]),
        Section("Values", [_values(curves)] if curves else []),
        Section("Learning rate", [line(history.rates(), "learning rate")]),
        Section("Speed", _speed(history)),
        Section("Where the time went", _split(history)),
        Section("Checkpoints", [_checkpoints(history)]),
        Section("Settings", [pages.table(_settings(history), ("name", "value", "from", ""))]),
        Section("Hyperparameters", [pages.table(history.hyperparameters.items())] if history.hyperparameters else []),
        Section("Environment", [pages.table(environment(history).items())]),
        Section("Starts", [_starts(history)] if len(history.starts) > 1 else []),
    ]
    lead = f"{history.facts.get('name', '')} in {history.path.resolve().parent}"
    return pages.page(history.name, [one for one in sections if one.parts], lead)


def _ending(history: History) -> Html:
    error = history.error
    lines = [f"{history.steps} steps, epoch {history.epochs}, {duration(history.seconds)}"]
    if error:
        lines.append(f"{error['type']}: {error['text']}")
    card = pages.card(history.status.capitalize(), lines, "good" if history.is_well else "bad")
    return Html(card + pages.verbatim(error["traceback"])) if error else card


def overview(history: History) -> dict[str, Any]:
    """Return a summary of the run as a dict of texts by name."""
    facts = history.facts
    strategy, first = facts.get("strategy", {}), history.starts[0] if history.starts else None
    found: dict[str, Any] = {
        "status": history.status,
        "began": _moment(first.facts["time"]) if first else "",
        "ran for": duration(history.seconds),
        "starts": len(history.starts),
        "steps": history.steps,
        "epoch": history.epochs,
        **{name: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for name, value in history.speed().items()},
        "parameters": f"{facts['parameters']:,}" if facts.get("parameters") is not None else None,
        "strategy": ", ".join(str(strategy.get(name)) for name in ("strategy", "device", "precision")),
        "processes": strategy.get("world_size"),
        "seed": facts.get("seed"),
        "stopped by a callback": "yes" if history.starts and history.starts[-1].end.get("asked") else None,
        "rows repeated after a resume": sum(start.repeated for start in history.starts) or None,
    }
    peaks = history.starts[-1].end.get("peak_bytes", {}) if history.starts else {}
    found |= {f"peak memory, {place}": messages.size(size) for place, size in peaks.items()}
    return {name: str(value) for name, value in found.items() if value is not None}


def _grouped(curves: Mapping[str, Points]) -> dict[str, dict[str, Points]]:
    """Group metrics by name, ignoring the stage and the suffix ``_step`` or ``_epoch``."""
    groups: dict[str, dict[str, Points]] = {}
    for name, points in curves.items():
        groups.setdefault(_STAGES.sub("", name) or name, {})[name] = points
    return groups


def charts(groups: Mapping[str, Mapping[str, Points]]) -> list[Html]:
    """Return a chart for each group, but at most ``MOST_CHARTS``."""
    drawn = [line(group, name) for name, group in list(groups.items())[:MOST_CHARTS]]
    left = len(groups) - len(drawn)
    return (
        [*drawn, pages.paragraph(f"The table of values contains {left} more group{'s' * (left > 1)} of metrics.")]
        if left
        else drawn
    )


def line(series: Mapping[str, Points], what: str) -> Html:
    """Return a line chart, with a logarithmic axis if the values span several orders of magnitude."""
    values = [y for points in series.values() for _, y in points if y == y]
    log = bool(values) and min(values) > 0 and max(values) / min(values) > _DECADES
    return line_chart(series, "step", log=log, caption=f"{what}{', logarithmic' if log else ''}")


def _speed(history: History) -> list[Html]:
    """Return one chart for both speeds, because the curves for steps and samples per second have the same shape."""
    (steps, samples), speed = history.speeds(), history.speed()
    if not samples or len(samples) < len(steps):
        unknown = "The loader has no batch size, so the speed is shown in steps only."
        return [line({"steps": steps}, "steps per second"), pages.paragraph(unknown)]
    each = speed["samples per second"] / speed["steps per second"]
    return [line({"samples": samples}, f"samples per second ({each:.4g} in a step)")]


def _values(curves: Mapping[str, Points]) -> Html:
    rows = []
    for name, points in sorted(curves.items()):
        known = [y for _, y in points if y == y]
        rows.append((name, points[-1][1], min(known, default=None), max(known, default=None), len(points)))
    return pages.table(rows, ("metric", "last", "lowest", "highest", "rows"))


def _split(history: History) -> list[Html]:
    clock = history.clock
    rows = [(name, round(seconds, 3), f"{seconds / (history.seconds or 1):.1%}") for name, seconds in clock.items()]
    pies = [pie(clock, "the whole run")]
    whose = "" if len(history.starts) < 2 else ", the last start"
    pies += [pie(split, f"by {source}{whose}") for source, split in history.splits.items()]
    return [
        side_by_side(pies),
        pages.table(rows, ("part", "seconds", "share")),
        pages.paragraph(
            "These times were measured by the host's clock on rank 0. data: waiting for the next batch; step: from "
            "receiving a batch to the end of its hooks; rest: logging, schedulers, and work at the end of epochs."
        ),
    ]


def _checkpoints(history: History) -> Html:
    found = history.checkpoints()
    if not found:
        return pages.paragraph("None.")
    best = max((save.step for save in found), default=0)
    rows = [
        (
            os.path.basename(save.path) + (" (newest)" if save.step == best else ""),
            save.step,
            "" if save.epoch is None else save.epoch,
            save.score,
            "gone" if save.size_bytes is None else messages.size(save.size_bytes),
            save.written[:19].replace("T", " "),
            "" if save.stall_seconds is None else f"{save.stall_seconds * 1000:.1f} ms",
        )
        for save in found
    ]
    return pages.table(rows, ("file", "step", "epoch", "score", "size", "written (UTC)", "training paused for"))


def _settings(history: History) -> list[list[Any]]:
    """Return all arguments and settings, starting with those that are not defaults."""
    rows = history.facts.get("settings", [])
    return [[name, shown(value), *where] for name, value, *where in sorted(rows, key=lambda row: row[2] == "default")]


def shown(value: Any) -> str:
    """Return a setting's value as text; None becomes an empty string."""
    return "" if value is None else str(value)


def environment(history: History) -> dict[str, Any]:
    """Return the versions, machine, process and git state of the run."""
    facts = history.facts
    git, process, machine = facts.get("git", {}), facts.get("process", {}), facts.get("machine", {})
    found = {name: value for name, value in facts.get("versions", {}).items() if value is not None}
    found |= {name: ", ".join(value) if isinstance(value, list) else value for name, value in machine.items()}
    found |= {name: process.get(name) for name in ("host", "folder", "command")}
    if git:
        changed = git.get("changed files")
        dirty = "unknown" if changed is None else f"changed files: {changed}" if changed else "clean"
        found |= {"git commit": git["commit"], "git branch": git.get("branch"), "git state": dirty}
    else:
        found["git commit"] = "no git repository"
    return {name: value for name, value in found.items() if value not in (None, "")}


def _starts(history: History) -> Html:
    rows = [
        (
            _moment(start.facts["time"]),
            start.facts.get("fn"),
            _from(start),
            max((row["updates"] for row in start.rows), default=0),
            duration(sum(start.clock.values())),
            start.repeated,
            start.end.get("status", "not recorded"),
        )
        for start in history.starts
    ]
    return pages.table(rows, ("began", "what", "from step", "to step", "ran for", "rows repeated", "end"))


def _from(start: Start) -> int:
    return min((row["updates"] for row in start.rows), default=0)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def duration(seconds: float) -> str:
    """Format seconds as text, such as ``"2 h 03 min"``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
