"""Real processes, started from small scripts: rerun exits the process it is called in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import own_port, until

from paceline.processes import launch, torch_elastic

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their environment, in /proc"),
]

#: Everything ends within this, on a busy machine too; it takes a few seconds.
LIMIT = 120.0

RERUN = """
import os, signal, sys
from paceline.processes.launch import note_failure, register_failure_hook, rerun

if "RANK" not in os.environ:
    os.chdir("/")
    rerun(int(os.environ.get("PROCESSES", "2")), num_nodes=int(os.environ.get("NODES", "1")))
    print("rerun returned")
register_failure_hook()
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, what, one = dist.get_rank(), sys.argv[1], torch.ones(1)
dist.barrier()  # all have connected to each other before one fails


def say(*words):
    sys.stdout.write(" ".join(map(str, (rank, *words))) + "\\n")
    sys.stdout.flush()


if what == "fail" and rank == 1:
    try:
        raise ValueError("mine")
    except ValueError as error:
        note_failure(error)
        dist.destroy_process_group()  # the other fails now, while this one still tidies up
        signal.pause()
        raise
if what == "exit" and rank == 1:
    sys.exit(3)
if what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "step":
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(number))
    dist.barrier()
    say("ready")
    while True:
        stop = torch.tensor(float(len(caught)))
        dist.all_reduce(stop)
        if stop.item() == 2:  # every process was told, once
            say("finished", *caught)
            dist.destroy_process_group()
            sys.exit(128 + caught[0])
if what == "wait":
    say("ready")
    if rank == 1:
        signal.pause()
dist.all_reduce(one)
say(int(one), *sys.argv[1:], os.getcwd(), os.environ["OMP_NUM_THREADS"], os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "train.py"
    file.write_text(RERUN)
    return file


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """For the processes of one test, which are found by it: none may be left, nor a temporary file."""
    (tmp_path / "tmp").mkdir()
    root = str(Path(launch.__file__).resolve().parent.parent.parent)
    mark = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": root, "PACELINE_TEST": str(tmp_path)}
    dropped = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", launch.LAUNCHED)
    yield {name: value for name, value in os.environ.items() if name not in dropped} | mark
    left = processes(tmp_path)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


def processes(mark: Path) -> list[int]:
    """Those, still alive, that have the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"PACELINE_TEST={mark}\0".encode() in (folder / "environ").read_bytes()
            if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def begin(command: list[str], environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], env=environ, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["0 ready\n", "1 ready\n"]


def refuses(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


# ---- rerun ---------------------------------------------------------------------------------------------------------


def test_the_command_runs_again_as_it_was_typed_and_silently(
    script: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    arguments = ["ok", "${local_rank}", "$$x y"]
    process = begin(["-u", "-m", "package.train", *arguments], environ, tmp_path)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    lines = sorted(out.splitlines())
    port = int(lines[0].rpartition(" ")[2])
    assert lines == [f"{rank} 2 ok ${{local_rank}} $$x y {tmp_path} {threads} {port}" for rank in range(2)]
    assert refuses(port)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("what", "status", "first", "last"),
    [
        ("fail", 1, "Rank 1 of 2 failed (exit status 1):", "ValueError: mine"),
        ("exit", 3, "Rank 1 of 2 failed (exit status 3)", ""),
        ("kill", 137, "Rank 1 of 2 was killed by signal 9 (SIGKILL), probably", ""),
    ],
)
def test_the_first_failure_is_printed_once_and_is_the_exit_status(
    script: Path, environ: dict[str, str], tmp_path: Path, what: str, status: int, first: str, last: str
) -> None:
    code, out, err = finish(begin([str(script), what], environ, tmp_path))
    assert (code, out) == (status, "")
    lines = err.splitlines()
    assert lines[0].startswith(first)
    assert lines[-1] == last or not last
    assert err.count("Traceback") == bool(last)
    assert len(lines) < 12
    assert not processes(tmp_path)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_step_is_finished(
    script: Path, environ: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    process = begin([str(script), "step"], environ, tmp_path)
    wait_until_ready(process)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, err) == (128 + number, "")
    assert sorted(out.splitlines()) == [f"{rank} finished {int(number)}" for rank in range(2)]
    assert not processes(tmp_path)


def test_no_process_outlives_a_killed_one_that_waits(script: Path, environ: dict[str, str], tmp_path: Path) -> None:
    process = begin([str(script), "wait"], environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}, tmp_path)
    wait_until_ready(process)
    assert len(processes(tmp_path)) == 3
    process.kill()
    until("all have ended", lambda: not processes(tmp_path))
    finish(process)


def test_two_machines_meet_at_the_given_address(script: Path, environ: dict[str, str], tmp_path: Path) -> None:
    with own_port() as port:
        place = environ | {"PROCESSES": "1", "NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        machines = [begin([str(script), "ok"], place | {"NODE_RANK": str(node)}, tmp_path) for node in range(2)]
        ended = [finish(machine) for machine in machines]
    threads = len(os.sched_getaffinity(0))
    expected = [(0, f"{node} 2 ok {tmp_path} {threads} {port}\n") for node in range(2)]
    assert [(status, out) for status, out, _ in ended] == expected
    assert [err for _, _, err in ended] == ["", ""]


def test_a_free_port_under_which_torch_does_not_find_the_server_is_given_up_for_another() -> None:
    import torch.distributed as dist

    ports: list[int] = []

    def store(address: str, port: int, **options: Any) -> Any:
        unlisted = {"multi_tenant": False} if not ports else {}
        made = dist.TCPStore(address, port, **(options | unlisted))
        ports.append(made.port)
        return made

    server = torch_elastic.serve(store, "127.0.0.1", 0)
    assert len(ports) == 3
    assert ports[0] != ports[1] == ports[2] == server.port
    assert dist.TCPStore("127.0.0.1", server.port, is_master=True, multi_tenant=True, wait_for_workers=False)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(OSError, match=rf"Port {port} \(MASTER_PORT\) is already in use.*or omit MASTER_PORT"):
            launch.rerun(2)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("NODE_RANK", "0")
        with pytest.raises(OSError, match=rf"Port {port} \(MASTER_PORT\) is already in use.*to a free port$"):
            launch.rerun(1, num_nodes=2)


def test_machines_that_cannot_find_each_other_are_told_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "4000")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--name", "a b"])
    with pytest.raises(RuntimeError) as raised:
        launch.rerun(2, num_nodes=3)
    text = str(raised.value)
    assert text.startswith("There are 3 machines, but MASTER_ADDR and NODE_RANK are not set")
    for node in (0, 2):
        line = f"MASTER_ADDR=<host of machine 0> MASTER_PORT=4000 NODE_RANK={node} python train.py --name 'a b'"
        assert f"\n  {line}\n" in text


@pytest.mark.parametrize(
    ("name", "value", "kind", "match"),
    [
        ("NODE_RANK", "2", ValueError, "NODE_RANK=2 must be a whole number from 0 to 1"),
        ("MASTER_PORT", "65536", ValueError, "MASTER_PORT=65536 must be a whole number"),
        ("MASTER_ADDR", "no.such.host.invalid", OSError, "MASTER_ADDR=no.such.host.invalid is not the name"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, kind: type[Exception], match: str
) -> None:
    for variable, one in {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000", name: value}.items():
        monkeypatch.setenv(variable, one)
    with pytest.raises(kind, match=match):
        launch.rerun(1, num_nodes=2)


# ---- start ---------------------------------------------------------------------------------------------------------

START = """
import json, os, signal, sys
import torch, torch.distributed as dist
from paceline.processes.launch import start


def work(what, module, name):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.no_grad():
        module.weight.fill_(rank)
    dist.barrier()
    own = bool((module.weight == rank).all())  # no memory shared with the other process
    if what == "fail" and rank == 1:
        raise ValueError("mine")
    if what == "exit" and rank == 1:
        sys.exit(3)
    if what == "cuda":
        dist.destroy_process_group()
        return torch.ones(2, device="cuda")
    if what == "quit":
        dist.destroy_process_group()
        sys.exit()
    if what == "interrupt":
        if rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        while True:
            pass  # in no call that would have to be interrupted: the signal may come just before it
    (torch.ones(1_000_000) + 1).sum()
    dist.destroy_process_group()
    return {"own": own, "name": name, "threads": torch.get_num_threads(), "large": torch.ones(300_000)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    (torch.ones(1_000_000) + 1).sum()  # OpenMP's threads exist, and would not in a fork
    module = torch.nn.Linear(2, 2)
    before = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    method, *kinds = sys.argv[1:]
    for what in kinds:
        try:
            result = start(work, (what, module, "$$a ${local_rank}"), 2, method, numa=True)
            text = result and {**result, "large": result["large"].sum().item()}
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        assert before == (dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
        assert not os.listdir(os.environ["TMPDIR"]) or method == "forkserver"
        print(json.dumps(text))
"""


@pytest.mark.parametrize(
    ("method", "kinds"),
    [("fork", ("ok", "fail", "exit", "quit", "interrupt")), ("spawn", ("ok", "fail"))],
)
def test_start_returns_rank_zeros_result_or_raises_the_first_failure(
    environ: dict[str, str], tmp_path: Path, method: str, kinds: tuple[str, ...]
) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    code, out, err = finish(begin([str(script), method, *kinds], environ, tmp_path))
    assert err == "numa=True has no effect: the processes run on 'cpu'.\n"
    assert code == 0
    result = dict(zip(kinds, map(json.loads, out.splitlines()), strict=True))
    threads = 1 if method == "fork" else max(1, len(os.sched_getaffinity(0)) // 2)
    expected = {"own": True, "name": "$$a ${local_rank}", "threads": threads, "large": 300_000.0}
    assert result["ok"] == expected
    first, *_, last = result["fail"].splitlines()
    assert (first, last) == ("RuntimeError: Rank 1 of 2 failed (exit status 1):", "ValueError: mine")
    assert result["fail"].count("Traceback") == 1
    assert "launch.py" not in result["fail"]
    assert result.get("exit", "Rank 1 of 2 failed (exit status 3)").find("Rank 1 of 2 failed (exit status 3)") >= 0
    assert result.get("quit") is None
    assert result.get("interrupt", "KeyboardInterrupt: ") == "KeyboardInterrupt: "


CRASH = """
import ctypes, multiprocessing, sys
import torch.distributed as dist
from paceline.processes.launch import start


def crash_here():
    ctypes.string_at(0)


def work(what):
    dist.init_process_group("gloo")
    dist.barrier()  # both have connected to each other
    rank = dist.get_rank()
    if what != "itself" and rank == 1:
        child = multiprocessing.get_context("fork").Process(target=crash_here)
        child.start()
        child.join()
    if what == "itself" and rank == 1:
        crash_here()
    if what == "child, exit" and rank == 1:
        sys.exit(3)
    if what != "child, exit":
        dist.barrier()
    dist.destroy_process_group()
    return "fine"


if __name__ == "__main__":
    method, what = sys.argv[1:]
    try:
        print(start(work, (what,), 2, method))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_crash_in_compiled_code_is_to_blame_and_says_where(
    environ: dict[str, str], tmp_path: Path, method: str
) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    code, out, err = finish(begin([str(script), method, "itself"], environ, tmp_path))
    first, *rest = out.partition("\n\n")[0].splitlines()  # Python 3.14 adds the stack of the C calls
    killed = "Rank 1 of 2 was killed by signal 11 (SIGSEGV), because native code crashed."
    assert first == f"{killed} Stack traces at the crash:"
    assert rest[0].startswith("Current thread")
    assert rest[-2].endswith(" in crash_here")
    assert rest[-1].endswith(" in work")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(("what", "said"), [("child", "fine"), ("child, exit", "Rank 1 of 2 failed (exit status 3)")])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_crash_of_a_process_that_a_rank_has_forked_is_none_of_the_rank(
    environ: dict[str, str], tmp_path: Path, method: str, what: str, said: str
) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    code, out, err = finish(begin([str(script), method, what], environ, tmp_path))
    assert code == 0
    assert out.startswith(said)
    assert " in crash_here" in err


STORES = """
import gc
from datetime import timedelta
from torch.distributed import TCPStore
from paceline.callbacks.garbage_collection import frozen_objects
from paceline.processes.launch import start


SOON = timedelta(seconds=120)


def leave():
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
    stores.append(stores)  # a cycle: Python frees them at some later moment
    return [store.port for store in stores[:-1]]


if __name__ == "__main__":
    gc.disable()
    ports = leave()
    start(gc.collect, (), 2, "fork")
    print(frozen_objects())
    print([TCPStore("127.0.0.1", port, is_master=False, timeout=SOON).add("asked", 1) for port in ports])
"""


@pytest.mark.cold
def test_a_fork_leaves_alone_what_the_process_it_copies_has_yet_to_free(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """The threads of stores are not in the copy, which crashes when it frees the stores."""
    script = tmp_path / "stores.py"
    script.write_text(STORES)
    code, out, err = finish(begin([str(script)], environ, tmp_path))
    assert (code, out, err) == (0, "0\n[1, 1, 1]\n", "")


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.others = {"self": self, "fine": [1, 2]}

    def run(self) -> None:
        raise AssertionError("is not called")


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_what_cannot_be_pickled_is_named(start_method: Any) -> None:
    holder = Holder([torch.nn.ReLU(), lambda x: x])
    with pytest.raises(
        TypeError, match=r"but Holder\.value\[1\] \(<function .*<lambda>.*cannot be pickled.*'ddp_fork'"
    ):
        launch.start(print, (1, holder), 2, start_method)
    with pytest.raises(TypeError, match=r"Holder\.value\[1\] "):
        launch.start(holder.run, (), 2, start_method)

    def local() -> None:
        raise AssertionError("is not called")

    with pytest.raises(TypeError, match=r"but test_what_.*<locals>\.local \("):
        launch.start(local, (), 2, start_method)


@pytest.mark.parametrize(
    ("on_path", "reason"),
    [(False, "No module named 'loaded_otherwise'"), (True, "Can't get attribute 'made_later' on .*")],
)
def test_what_a_fresh_process_cannot_import_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: bool, reason: str
) -> None:
    """As test files are under ``pytest --import-mode=importlib``, and as what is defined below a main guard is."""
    (tmp_path / "loaded_otherwise.py").touch()
    module: Any = types.ModuleType("loaded_otherwise")
    exec("def made_later(): raise AssertionError('is not called')", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if on_path:
        monkeypatch.syspath_prepend(tmp_path)
    said = (
        rf"(?s)A fresh process cannot import a definition that the run uses \({reason}\)\. .* "
        r"top level of a \.py file.*`pythonpath`.*strategy='ddp_fork'"
    )
    with pytest.raises(RuntimeError, match=said):
        launch.start(module.made_later, (), 1, "spawn")


def test_numa_on_one_node_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert torch_elastic.numa_of("cuda", False) is None
    one_node = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2
    assert [torch_elastic.numa_of("cuda", True) is None for _ in range(2)] == [one_node] * 2
    assert caplog.messages == ["numa=True has no effect: this machine has one NUMA node."] * one_node


@pytest.mark.gpu
def test_a_fork_after_cuda_was_used_is_refused() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match=r"CUDA was already used in this process.*'ddp_spawn'"):
        launch.start(print, (), 2, "fork", devices_kind="cuda")


@pytest.mark.gpu
def test_starting_forks_leaves_the_gpu_usable_in_them(environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(START.partition("if __name__")[0] + CUDA_FORK)
    code, out, err = finish(begin([str(script)], environ, tmp_path))
    assert (code, out, err) == (0, "cpu [1.0, 1.0]\n", "")


CUDA_FORK = """
if __name__ == "__main__":
    result = start(work, ("cuda", torch.nn.Linear(2, 2), ""), 2, "fork", devices_kind="cuda")
    print(result.device, result.tolist())
"""
