"""The time that tests take: the end of a run names the slowest, and each of more than ten seconds with its reason."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

#: Why a test may take more than ten seconds. Look at it when the end of a run says that one has no reason.
REASONS: dict[str, str] = {}
LIMIT_SECONDS = 10.0
STARTED = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """What this process and its children that have ended have taken."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest", type=int, default=10, help="how many of the slowest tests are named at the end")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note the processors' time beside the duration of every part of a test."""
    report: Any = yield
    now = cpu_seconds()
    report.user_properties.append(("cpu", now - item.session.stash.get(STARTED, now)))
    item.session.stash[STARTED] = now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds: dict[str, float] = defaultdict(float)
    cpu: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
                cpu[report.nodeid] += dict(report.user_properties).get("cpu", 0.0)
    if not seconds:
        return
    total, busy = sum(seconds.values()), sum(cpu.values())
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    shown = [
        name
        for number, name in enumerate(slowest)
        if number < config.getoption("slowest") or seconds[name] > LIMIT_SECONDS
    ]
    terminalreporter.section(f"slowest tests of {len(seconds)}, which took {total:.0f} s, {busy:.0f} s of processors")
    for name in shown:
        reason = (
            REASONS.get(name.partition("[")[0], "NO REASON in tests/slow.py") if seconds[name] > LIMIT_SECONDS else ""
        )
        terminalreporter.write_line(f"{seconds[name]:6.1f} s {cpu[name]:6.1f} s  {name}  {reason}".rstrip())
