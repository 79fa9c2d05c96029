"""A pair of warm processes that train together and measure what they are asked to.

Run as a program it is one of the two; :class:`Pair` is the handle of who asks.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from measuring import CLOCK, Clock, quiet_environment, rss_mb
from parallel import CONTESTANTS, Job, Raw, weights

PATIENCE = timedelta(seconds=120)


class Pair:
    """Processes of one contestant. They are started at the first question, and once more after one they broke at.

    Args:
        name: a key of ``CONTESTANTS``.
        size: how many; 1 is a group of its own.
    """

    def __init__(self, name: str, size: int = 2) -> None:
        self.name, self.size = name, size
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: IO[str] | None = None
        self.log: IO[str] | None = None

    def ask(self, what: str, job: Job) -> Any:
        """Measure ``"time"``, ``"count"`` or ``"memory"`` of a job.

        Raises:
            RuntimeError: a process ended with an error; its last line.
        """
        if not self.processes:
            self.start()
        for process in self.processes:
            print(json.dumps([what, asdict(job)]), file=process.stdin, flush=True)
        line = self.answers.readline() if self.answers else ""
        if not line:
            raise RuntimeError(self.last_words())
        return json.loads(line)

    def start(self) -> None:
        reader, writer = os.pipe()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when something has failed
        for rank in range(self.size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            place |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "pair"}
            environment = quiet_environment() | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
            if self.size > 1:
                environment |= {key: str(value) for key, value in place.items()}
            if torch.cuda.is_available():
                environment.pop("CUDA_VISIBLE_DEVICES")
            process = subprocess.Popen(
                [sys.executable, __file__, self.name, str(self.size), str(writer)],
                stdin=subprocess.PIPE,
                stdout=self.log,
                stderr=self.log,
                env=environment,
                pass_fds=[writer],
                text=True,
            )
            self.processes.append(process)
        os.close(writer)
        self.answers = os.fdopen(reader)

    def last_words(self) -> str:
        log = self.log
        self.close()
        if log is None:
            return "no answer"
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if "Error" in line]
        return lines[-1] if lines else "no answer"

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            if process.stdin:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        if self.answers:
            self.answers.close()
        self.processes = []


# ---- one of the processes --------------------------------------------------------------------------------------------


def timed(contestant: Any, job: Job) -> tuple[float, float, float]:
    """Wall and CPU time of a batch in us, and the final weights."""
    gc.collect()
    dist.barrier()
    CLOCK.reset(job)
    net = contestant.run(job)
    if CLOCK.count + 1 != job.batches:
        raise RuntimeError(f"{type(contestant).__name__} ran {CLOCK.count + 1} batches of {job.batches}")
    return (*CLOCK.microseconds(), weights(net))


def time_of(contestant: Any, job: Job) -> dict[str, float]:
    """By hand, contestant, by hand, back to back."""
    before, mine, after = timed(Raw(), job), timed(contestant, job), timed(Raw(), job)
    tolerance = 1e-4 if job.precision == "32-true" else 1e-2
    if abs(mine[2] - after[2]) > tolerance * abs(after[2]):
        raise RuntimeError(f"{type(contestant).__name__} ended with other weights than the hand-written loop")
    raw_wall, raw_cpu = ((before[i] + after[i]) / 2 for i in (0, 1))
    return {"wall": mine[0], "cpu": mine[1], "raw_wall": raw_wall, "raw_cpu": raw_cpu}


@contextmanager
def at_tick(actions: dict[int, Callable[[], Any]]) -> Iterator[None]:
    """Run an action each when the clock comes to a count."""
    tick = Clock.tick

    def tick_and_act(clock: Clock) -> None:
        action = actions.get(clock.count + 1)
        if action is not None:
            action()
        tick(clock)

    Clock.tick = tick_and_act
    try:
        yield
    finally:
        Clock.tick = tick


def count_of(contestant: Any, job: Job) -> tuple[dict[str, float], float]:
    """Collectives a batch, by kind, and calls of Python functions a batch; between two ticks of the clock."""
    first, last = job.warmup, job.warmup + job.steps
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with at_tick({first: profile.start, last: profile.stop}):
        timed(contestant, job)
    kinds = Counter(event.name for event in profile.events() or [] if event.name.startswith("c10d::"))
    calls = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with at_tick({first: lambda: sys.setprofile(called), last: lambda: sys.setprofile(None)}):
        timed(contestant, job)
    shown = {name.removeprefix("c10d::").strip("_"): count / job.steps for name, count in sorted(kinds.items())}
    return shown, calls / job.steps


def memory_of(contestant: Any, job: Job) -> list[float]:
    """Resident memory before, its peak until the third step, its peak in the steps after that, MB."""
    found = [rss_mb()]

    def note_peak() -> None:
        found.append(rss_mb("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    with at_tick({2: note_peak, job.warmup + job.steps: note_peak}):
        timed(contestant, job)
    return found


def serve(name: str, size: int, answers: int) -> None:
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    dist.init_process_group(backend, timeout=PATIENCE, **alone)
    for line in sys.stdin:
        what, job = json.loads(line)
        measure = {"time": time_of, "count": count_of, "memory": memory_of}[what]
        answer = measure(CONTESTANTS[name](), Job(**job))
        if dist.get_rank() == 0:
            os.write(answers, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    try:
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank may be waiting: do not wait for it at exit
    os._exit(0)
