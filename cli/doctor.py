"""``paceline doctor``: run a few steps of a script and report what is slow, why, and what to change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import messages
from .launch_script import Script, find_script

#: Seconds that a run may take to exit after SIGTERM, before it is killed.
GRACE_SECONDS = 10.0
#: Exit status of an interrupted command.
INTERRUPTED = 128 + signal.SIGINT


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("--steps", type=int, default=60, help="batches to train (default: 60)")
    parser.add_argument(
        "--try",
        dest="tries",
        action="store_true",
        help="also try changes that may speed up training, each in a short run",
    )
    parser.add_argument(
        "--only", metavar="NAMES", help="with --try, try only these changes: num_workers,batch_size,..."
    )
    parser.add_argument("--out", default=".", help="folder for doctor.html and doctor.json (default: the current one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--num_processes", type=int, default=None, help="run the script with paceline launch and this many processes"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="limit for a run in seconds (default: 1800)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script", help="the training script; its arguments follow")
    parser.add_argument("script_args", nargs=REMAINDER, help="the script's arguments").required = False
    parser.set_defaults(no_python=False)


def run(arguments: Namespace) -> int:
    """Run the script and print the report; return the exit status."""
    from ..doctor.report import Report
    from ..doctor.try_fixes import mark_best, names, tried

    check(arguments)
    only = names(arguments.only) if arguments.only else None
    script = find_script(arguments)
    os.makedirs(arguments.out, exist_ok=True)

    def measure(change: dict[str, Any]) -> dict[str, Any]:
        return examine(script, arguments, change)

    report = Report.from_dict(measure({}))
    status = 0
    if arguments.tries:
        try:
            for row in tried(report, measure, messages.info, only):
                report.trials.append(row)
        except KeyboardInterrupt:
            messages.info("Interrupted. The report covers the results so far.")
            status = INTERRUPTED
        mark_best(report.trials)
    if arguments.json:
        messages.answer(json.dumps(report.as_dict(), indent=1))
    else:
        report.say(answer=True)
    report.write(arguments.out)
    return status


def check(arguments: Namespace) -> None:
    """Check the arguments before the script runs."""
    if arguments.steps < 10:
        raise ValueError(
            f"--steps {arguments.steps} is too low, because the doctor does not measure the first 3 steps. Use 10 or "
            "more."
        )
    if arguments.only is not None and not arguments.tries:
        raise ValueError(f"--only {arguments.only} has no effect without --try. Add --try, or remove --only.")
    if arguments.num_processes is not None and arguments.num_processes < 1:
        raise ValueError(f"--num_processes {arguments.num_processes} is invalid. Use 1 or more.")


def examine(script: Script, arguments: Namespace, change: dict[str, Any]) -> dict[str, Any]:
    """Run the script once with a change applied, and return the report that it wrote.

    Raises:
        RuntimeError: if the script failed, took too long, or did not train.
    """
    from ..doctor.script_options import Plan

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        environment = {**os.environ, **Plan(str(out), arguments.steps, change).environment()}
        processes = 1 if change.get("devices") == 1 else arguments.num_processes
        status = _status(_command(script, processes), environment, arguments.timeout)
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))
    if status:
        raise RuntimeError(f"{script.target} {ended(status)}")
    raise RuntimeError(
        f"{script.target} exited without training, so there is nothing to measure. The script must call Trainer.fit, "
        "or train with an Accelerator in a loop over a prepared DataLoader."
    )


def ended(status: int) -> str:
    """Describe how a failed program exited."""
    if status >= 0:
        return f"exited with status {status}; see the output above."
    name = signal.Signals(-status).name
    reason = " The operating system kills processes when memory runs out, so check dmesg." if name == "SIGKILL" else ""
    return f"was killed by {name}.{reason}"


def _status(command: list[str], environment: dict[str, str], timeout: float) -> int:
    """Run a command, sending its output to standard error, and return its exit status."""
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            return process.wait(timeout)
        except BaseException as error:
            process.terminate()  # a launcher forwards the signal
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise RuntimeError(
                f"The run took longer than --timeout {timeout:g} seconds and was stopped. If the run was not hanging, "
                "raise --timeout or lower --steps."
            ) from None


def _command(script: Script, processes: int | None) -> list[str]:
    if not processes or processes == 1:
        return script.alone()
    module = ["-m"] if script.kind == "module" else []
    package = __name__.partition(".")[0]
    launch = [sys.executable, "-m", package, "launch", "--num_processes", str(processes)]
    return [*launch, *module, script.target, *script.arguments]
