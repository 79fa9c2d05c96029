"""The time that tests take: the end of a run names the slowest, and those without a reason or a line in costly.txt."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rotation import COSTLY, costly

#: Why a test, or one of a file, may take more than ten seconds. Look at one that has none.
REASONS: dict[str, str] = {
    "faults/test_strikes.py::test_a_training_that_is_killed_again_and_again_ends_where_one_does_that_was_left_alone": (
        "trains a whole run, kills it three times, and compares"
    ),
    "faults/test_strikes.py::test_torch_elastics_own_restart_goes_on_to_the_same_end": "trains twice on two processes",
    "faults/test_two_nodes.py::test_training_goes_on_when_a_node_dies_and_when_it_comes_back": (
        "two network namespaces, each with fresh interpreters; torch elastic needs seconds to see that a node is gone"
    ),
    "faults/test_two_nodes.py::test_two_machines_learn_what_one_with_as_many_processes_learns": (
        "six fresh interpreters in two network namespaces"
    ),
    "data/test_stream_weights.py": "starts workers for some twenty runs, on one and on two processes",
    "strategies/deepspeed/test_gradients.py": "the first use of a stage of DeepSpeed compiles and imports",
    "strategies/deepspeed/test_strategy.py": "the first use of a stage of DeepSpeed compiles and imports",
    "loggers/test_csv.py::test_a_program_that_ends_without_finalize_leaves_its_rows": (
        "cold: a fresh interpreter that imports torch"
    ),
    "loggers/test_fit.py::test_three_loggers_at_once_hold_the_same_values_at_the_same_steps": (
        "the first fit of the file that starts wandb's own process"
    ),
    "loggers/test_resume.py::test_wandb_goes_on_with_the_run_of_the_checkpoint": "starts wandb's own process twice",
    "compat/test_lightning.py::test_a_program_and_the_processes_that_it_starts_find_it": (
        "cold: three fresh interpreters one after the other, each of which imports torch"
    ),
    "compat/test_lightning.py::test_the_variable_installs_it_where_paceline_is_imported_and_in_pytest": (
        "cold: two fresh interpreters, one of which starts pytest"
    ),
    "examples/test_migrate_in_four_steps.py::test_b15_k1_a_half_done_and_a_done_migration_start_with_a_launcher": (
        "a launcher and two ranks, each a fresh interpreter"
    ),
    "compat/test_accelerate.py": (
        "the fixture starts programs that import transformers, train on one and two processes, resume and evaluate"
    ),
    "cli/test_config.py::test_c1_it_works_with_piped_input_in_a_process_of_its_own": (
        "cold: a fresh interpreter that imports torch to see the machine's devices"
    ),
    "cli/test_launch.py::test_a1_c13_one_script_trains_alike_however_it_is_started": (
        "cold: eight starts of fresh interpreters, whose hash seeds differ"
    ),
    "trainer/test_multiprocess_run.py::test_fresh_processes_shuffle_as_the_one_that_started_them": (
        "cold: seven fresh interpreters, whose hash seeds differ"
    ),
    "trainer/test_stopping.py::test_a_signal_to_one_rank_stops_all_at_one_step_with_one_save": (
        "its fixture runs the fourteen fits that the whole file reads"
    ),
    "test_site.py::test_the_site_builds_without_a_warning_and_every_link_leads_somewhere": (
        "its fixture builds the whole documentation, which the file reads"
    ),
    "test_public_api.py::test_a_strict_type_checker_accepts_a_program_that_uses_the_installed_wheel": (
        "mypy reads all of torch"
    ),
    "parity/test_parity.py::test_a_strategy_gives_the_numbers_of_one_process": (
        "two or four processes; the first use of a stage of DeepSpeed compiles and imports"
    ),
    "processes/test_output_relay.py::test_a_fit_of_several_processes_shows_one_bar_and_every_print_in_its_cell": (
        "its fixture runs the cells of the file in a kernel"
    ),
    "big_model/test_memory.py::test_i6_memory_stays_under_the_limit_and_one_block": (
        "cold, and its fixture writes 400 MB of weights"
    ),
    "big_model/test_memory.py::test_loading_takes_no_more_than_the_model_and_a_chunk": (
        "cold, and its fixture writes 400 MB of weights"
    ),
    "trainer/test_compiled_step.py::test_a_resumed_run_is_to_the_bit_the_one_that_was_not_interrupted": (
        "inductor compiles C++"
    ),
}
LIMIT_SECONDS = 10.0
#: Tests that take more of the processors than this, and are neither in ``REASONS`` nor in ``costly.txt``, are named.
COSTLY_SECONDS = 2.0
COSTLY_TESTS = costly(Path(__file__).with_name(COSTLY))
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
    remarks = {name: _remark(name, seconds[name], cpu[name]) for name in slowest}
    began = os.environ.get("PACELINE_MAKE_BEGAN")
    if began is not None:
        terminalreporter.write_line(f"make has taken {time.time() - int(began):.0f} s until here")
    terminalreporter.section(f"slowest tests of {len(seconds)}, which took {total:.0f} s, {busy:.0f} s of processors")
    for number, name in enumerate(slowest):
        if number < config.getoption("slowest") or remarks[name]:
            terminalreporter.write_line(f"{seconds[name]:6.1f} s {cpu[name]:6.1f} s  {name}  {remarks[name]}".rstrip())


def _remark(name: str, seconds: float, cpu: float) -> str:
    test = name.partition("[")[0]
    names = (test, test.partition("::")[0])
    reason = next((REASONS[known] for known in names if known in REASONS), "")
    if seconds > LIMIT_SECONDS:
        return reason or "NO REASON in tests/slow.py"
    if cpu > COSTLY_SECONDS and not reason and COSTLY_TESTS.keys().isdisjoint(names):
        return "NOT in tests/costly.txt"
    return ""
