"""Creates a page with the differences between two runs and the ratio of their speeds. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import html_page as pages
from .history import History
from .html_page import Section
from .run_page import charts, environment, line, overview, shown
from .svg_charts import stacked_bars


def pair(a: History, b: History) -> str:
    """Return a page that compares two runs side by side."""
    names = titles(a, b)
    each = dict(zip(names, (a, b), strict=True))
    curves = {
        name: {title: points for title, points in zip(names, found, strict=True) if points}
        for name, found in sorted(_both(a.curves(), b.curves()).items())
        if name not in a.repeated_rates() | b.repeated_rates()
    }
    rates = {f"{title}: {name}": points for title, one in each.items() for name, points in one.rates().items()}
    steps = {title: one.speeds()[0] for title, one in each.items()}
    differing = differences(a, b)
    seen = [(name, *values) for name, values in _both(overview(a), overview(b)).items()]
    sections = [
        Section("How they went", [pages.table(seen, ("", *names))]),
        Section("Speed", [pages.table(ratios(a, b), ("", *names, "B / A")), line(steps, "steps per second")]),
        Section("What differs", [pages.table(differing, ("", *names)) if differing else "No setting differs."]),
        Section("Values", [pages.table(last_values(a, b), ("metric, last value", *names, "B - A"))]),
        Section("Curves", charts(curves) or ["Nothing was logged."]),
        Section("Learning rate", [line(rates, "learning rate")]),
        Section("Where the time went", [stacked_bars({t: one.clock for t, one in each.items()}, "s")]),
    ]
    lead = f"A: {a.path.resolve().parent}; B: {b.path.resolve().parent}"
    return pages.page(" and ".join(names), sections, lead)


def titles(a: History, b: History) -> tuple[str, str]:
    """Return a title for each run, consisting of the parts of its path that differ from the other run's path."""
    left, right = ([*one.path.resolve().parent.parts, one.path.stem] for one in (a, b))
    while left and right and left[0] == right[0]:
        left, right = left[1:], right[1:]
    while left and right and left[-1] == right[-1]:
        left, right = left[:-1], right[:-1]
    return f"A: {'/'.join(left)}", f"B: {'/'.join(right)}"


def ratios(a: History, b: History) -> list[tuple[Any, ...]]:
    """Return (name, value of A, value of B, ratio B / A) for each speed that both runs have, and for the total time."""
    left, right = a.speed(), b.speed()
    rows = [(name, left[name], right[name], right[name] / left[name]) for name in left if name in right and left[name]]
    if a.seconds:
        rows.append(("seconds in total", a.seconds, b.seconds, b.seconds / a.seconds))
    return rows


def differences(a: History, b: History) -> list[tuple[str, str, str]]:
    """Return (name, value of A, value of B) for each setting, hyperparameter and fact that differs between runs."""
    rows: list[tuple[str, str, str]] = []
    for found in (_given, lambda one: one.hyperparameters, _placed, environment):
        both = _both(found(a), found(b))
        rows += [(name, shown(x), shown(y)) for name, (x, y) in both.items() if shown(x) != shown(y)]
    return rows


def last_values(a: History, b: History) -> list[tuple[Any, ...]]:
    """Return (metric, last value in A, last value in B, difference) for every metric."""
    rows = []
    for name, (x, y) in sorted(_both(a.curves(), b.curves()).items()):
        left, right = (points[-1][1] if points else None for points in (x, y))
        rows.append((name, left, right, None if left is None or right is None else right - left))
    return rows


def _given(history: History) -> dict[str, Any]:
    return {name: value for name, value, *_ in history.facts.get("settings", [])}


def _placed(history: History) -> dict[str, Any]:
    data = {**history.starts[-1].data} if history.starts else {}
    for name in ("time", "checkpoints"):
        data.pop(name, None)
    return {
        **history.facts.get("strategy", {}),
        "seed": history.facts.get("seed"),
        **data,
        "module": history.facts.get("name"),
    }


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])}
