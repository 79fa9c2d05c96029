"""Real processes, started as a person starts them; most by a launcher inside this process, which has torch already."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import WHOLE_LINES, own_port

import paceline
from paceline.cli import launch as module
from paceline.cli.main import FAILED, main
from paceline.processes.cluster_environment import find_cluster
from paceline.settings import resolve

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into processes as Linux shows them"),
]

ROOT = str(Path(paceline.__file__).absolute().parent.parent)
LIMIT = 180.0
#: What a process is and was given, one line each.
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
names += ("LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
found = {name: value for name, value in os.environ.items() if name in names or name.startswith("PACELINE_")}
found |= {"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "torch": "torch" in sys.modules}
found |= {"cores": sorted(os.sched_getaffinity(0)), "main": sys.modules["__main__"].__dict__ is globals()}
print(json.dumps(found))
"""
#: Arguments that look like the launcher's, like a template of torch elastic's, or like nothing.
ARGUMENTS = ["--cpu", "-h", "--num_processes=3", "--", "", "a b", "$x", "${local_rank}", "--config", "x.yaml"]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", ROOT)


def script(text: str, name: str = "train.py") -> str:
    Path(name).write_text(WHOLE_LINES + text)
    return name


def launched(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command in this process; the status, and what all processes printed."""
    capfd.readouterr()
    root, before = logging.getLogger(), dict(os.environ)
    handlers, root.handlers = root.handlers, []  # pytest's own: what is said goes to standard error
    try:
        status = main(["launch", *words])
    finally:
        root.handlers = handlers
        os.environ.clear()
        os.environ.update(before)
    return status, *capfd.readouterr()


def told(out: str) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda found: found.get("RANK", "0"))


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person does."""
    command = [sys.executable, "-m", "paceline", "launch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


# ---- what is started -----------------------------------------------------------------------------------------------


@pytest.mark.cold
def test_c7_c10_two_cpu_processes_get_the_scripts_arguments_untouched(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = launched(capfd, "--cpu", "--num_processes", "2", script(TELL), *ARGUMENTS)
    assert status == 0
    found = told(out)
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in found] == [("0", "2"), ("1", "2")]
    for one in found:
        assert one["argv"] == ["train.py", *ARGUMENTS]
        assert (one["name"], one["main"], one["torch"]) == ("__main__", True, False)
        assert (one["file"], one["path"]) == (str(Path("train.py").resolve()), str(Path.cwd()))
        assert (one["CUDA_VISIBLE_DEVICES"], one["PACELINE_HIDE_DEVICES"]) == ("", "1")
        assert one["PACELINE_LAUNCH_FLAGS"].split(",") == ["cpu", "num_processes"]
        assert (one["PACELINE_CPU"], one["PACELINE_NUM_PROCESSES"]) == ("true", "2")
        cluster = find_cluster(one)
        assert cluster is not None
        assert cluster.name == "paceline launch"
    assert len(err.splitlines()) == 1


@pytest.mark.cold
def test_c7_one_process_is_the_script_itself_as_under_python() -> None:
    name = script(TELL)
    done = typed("--cpu", name, *ARGUMENTS)
    assert done.returncode == 0
    (found,) = told(done.stdout)
    assert found["argv"] == [name, *ARGUMENTS]
    assert "RANK" not in found
    assert not found["torch"]
    plain = subprocess.run([sys.executable, name, *ARGUMENTS], capture_output=True, text=True, check=True)
    (without,) = told(plain.stdout)
    added = {"CUDA_VISIBLE_DEVICES", "PACELINE_HIDE_DEVICES", "PACELINE_CPU", "PACELINE_LAUNCH_FLAGS"}
    assert {key: value for key, value in found.items() if key not in added} == without
    assert done.stderr == "paceline launch: 1 process on the CPU (--cpu); CPU threads chosen by torch.\n"


@pytest.mark.parametrize("words", [["-m", "package.train"], ["package"], ["python", "-m", "package.train"]])
def test_modules_and_folders_run_too(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    Path("package").mkdir()
    script(TELL, "package/train.py")
    script("import train\n" + TELL, "package/__main__.py")
    status, out, _ = launched(capfd, "--cpu", "--num_processes", "2", "--quiet", *words, "--cpu")
    assert status == 0
    found = [one for one in told(out) if one["name"] == "__main__"]
    assert [one["RANK"] for one in found] == ["0", "1"]
    first = "package" if words == ["package"] else str(Path("package/train.py").resolve())
    assert all(one["argv"] == [first, "--cpu"] for one in found)
    assert all(one["path"] == str(Path("package" if words == ["package"] else ".").resolve()) for one in found)


def test_programs_that_are_not_pythons_run_too(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = launched(capfd, "--cpu", "--num_processes", "2", "--no_python", "sh", "-c", "echo $RANK; exit 3")
    assert status == 3
    assert sorted(out.split()) in (["0", "1"], ["0"], ["1"])


def test_c8_python_before_the_script_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    name = script(TELL)
    status, out, _ = launched(capfd, "--cpu", "--num_processes", "2", "python", name, "--lr", "1")
    assert status == 0
    assert [one["argv"] for one in told(out)] == [[name, "--lr", "1"]] * 2
    status, _, err = launched(capfd, "--cpu", "python", "-u", name)
    assert status == FAILED
    assert err == (
        "paceline launch: Remove 'python', because paceline launch runs Python itself. Pass only the script and its "
        "arguments.\n"
    )


def test_c8_a_config_that_the_script_does_not_read_is_pointed_out(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--cpu", "--num_processes", "2")
    _, _, err = launched(capfd, *words, script("print(1)"), "--config", "accelerate_config.yaml")
    assert "train.py does not seem to read --config" in err
    assert "paceline launch --config_file accelerate_config.yaml train.py" in err
    _, _, err = launched(capfd, *words, script("import sys; sys.argv"), "--config", "own.yaml")
    assert "does not seem" not in err


# ---- how it ends ---------------------------------------------------------------------------------------------------


def test_c7_c18_a_failure_is_one_traceback_of_the_users_frames_and_the_status(
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = script("def step():\n    raise ValueError('mine')\n\nstep()\n")
    status, out, err = launched(capfd, "--cpu", "--num_processes", "2", "--quiet", name)
    assert (status, out) == (1, "")
    head, *lines = err.splitlines()
    assert head in ("Rank 0 of 2 failed (exit status 1):", "Rank 1 of 2 failed (exit status 1):")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{Path(name).resolve()}", line 5, in <module>'
    assert lines[-1] == "ValueError: mine"
    assert err.count("Traceback") == 1
    assert ROOT not in err.replace(str(Path.cwd()), "")


def test_c7_c18_one_process_fails_as_under_python() -> None:
    name = script("def step():\n    raise ValueError('mine')\n\nstep()\n")
    done = typed("--cpu", "--quiet", name)
    plain = subprocess.run([sys.executable, name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize("text", ["import sys; sys.exit(7)", "import os; os._exit(7)"])
def test_c7_the_exit_status_is_the_scripts(capfd: pytest.CaptureFixture[str], text: str) -> None:
    status, _, err = launched(capfd, "--cpu", "--num_processes", "2", "--quiet", script(text))
    assert status == 7
    assert "failed (exit status 7) without an exception" in err
    assert typed("--cpu", "--quiet", "train.py").returncode == 7


def test_a_broken_script_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    status, _, err = launched(capfd, "--cpu", "--num_processes", "2", "--quiet", script("x = (1,\n"))
    assert status == 1
    assert err.count("SyntaxError") == 1
    assert "Traceback" not in err.replace("Traceback (most recent call last):\n  File", "")
    assert "worker.py" not in err


def test_debug_shows_every_process_and_the_settings(capfd: pytest.CaptureFixture[str]) -> None:
    name = script("import os\nraise ValueError(f\"mine {os.environ['RANK']}\")\n")
    status, _, err = launched(capfd, "--cpu", "--num_processes", "2", "--debug", name)
    assert status == 1
    assert re.search(r"\n  num_processes +2 +flag +--num_processes\n", err)
    assert "Rank 0 of 2" in err
    assert "Rank 1 of 2" in err


@pytest.mark.parametrize("variable", ["PACELINE_DEBUG", "ACCELERATE_DEBUG_MODE"])
def test_c17_a_script_that_nobody_launched_shows_its_settings_once(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv(variable, "1")
    for _ in range(2):
        resolve({"mixed_precision": "bf16"})
    resolve()  # asks for a value on the side
    (said,) = caplog.messages
    assert re.search(r"mixed_precision +bf16 +code", said)
    assert re.search(rf"debug +True +env +{variable}", said)
    monkeypatch.setenv("PACELINE_LAUNCH_FLAGS", "")  # the launcher has shown them
    resolve({"mixed_precision": "no"})
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_every_process_and_is_the_status(number: signal.Signals) -> None:
    name = script(
        "import os, signal, sys\n"
        "def end(number, frame):\n    print('told', os.environ['RANK'])\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, end)\nsignal.signal(signal.SIGTERM, end)\n"
        "print('ready')\nwhile True:\n    pass\n"
    )
    command = [sys.executable, "-m", "paceline", "launch", "--cpu", "--num_processes", "2", "--quiet", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (128 + number, "")
    assert sorted(out.splitlines()) == ["told 0", "told 1"]


def test_a_signal_ends_one_process_as_it_ends_the_script() -> None:
    name = script("import signal\nprint('ready', flush=True)\nsignal.pause()\n")
    command = [sys.executable, "-m", "paceline", "launch", "--cpu", "--quiet", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == -signal.SIGTERM


def test_processes_are_started_again_as_often_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    name = script("import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    assert launched(capfd, "--cpu", "--num_processes", "2", "--max_restarts", "1", name)[0] == 0
    assert launched(capfd, "--cpu", "--num_processes", "2", name)[0] == 1


def test_output_is_kept_in_a_folder_and_still_shown(capfd: pytest.CaptureFixture[str]) -> None:
    name = script("import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    status, out, _ = launched(capfd, "--cpu", "--num_processes", "2", "--log_dir", "logs", "--role", "mine", name)
    assert status == 0
    kept = {path.parent.name: path.read_text() for path in Path("logs").rglob("stdout.log")}
    assert kept == {"0": "out 0\n", "1": "out 1\n"}
    assert [path.read_text() for path in Path("logs").rglob("stderr.log")] == ["err\n"] * 2
    assert sorted(out.splitlines()) == ["[mine0]:out 0", "[mine1]:out 1"]


# ---- settings ------------------------------------------------------------------------------------------------------


def test_c11_c20_what_is_chosen_is_said_once_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, err = launched(capfd, "--num-processes", "2", "--cpu", script(TELL))
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 2)
    port = told(out)[0]["MASTER_PORT"]
    assert err == (
        "paceline launch: 2 processes on the CPU (--num_processes; --cpu); backend gloo; "
        f"{threads} CPU thread{'s' * (threads > 1)} each ({cores} core{'s' * (cores > 1)} / 2 processes); "
        f"port {port} (a free one).\n"
    )


def test_c11_a_given_port_is_used_and_a_taken_one_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with own_port() as port:
        words = ("--cpu", "--num_processes", "2", "--main_process_port", str(port), script(TELL))
        with socket.socket() as taken:
            taken.bind(("", port))
            taken.listen()
            status, _, told_first = launched(capfd, *words)
        assert status == FAILED
        status, out, err = launched(capfd, *words)
    assert status == 0
    assert told_first.splitlines() == [
        f"paceline launch: Port {port} (--main_process_port) is already in use on this machine, so the "
        "processes cannot use it. Set --main_process_port to a free port, or omit --main_process_port to use a "
        "free one"
    ]
    assert [one["MASTER_PORT"] for one in told(out)] == [str(port)] * 2
    assert f"port {port} (--main_process_port)" in err


def test_c12_c13_flags_win_over_the_file_which_counts_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.json").write_text(
        json.dumps({"use_cpu": True, "num_processes": 2, "num_cpu_threads_per_process": 3, "mixed_precision": "bf16"})
    )
    words = ("--config_file", "mine.json")
    found = told(launched(capfd, *words, script(TELL))[1])
    assert [one["OMP_NUM_THREADS"] for one in found] == ["3", "3"]
    assert all(one["PACELINE_CONFIG_FILE"] == str(Path("mine.json").resolve()) for one in found)
    more = ("--num_cpu_threads_per_process", "1", "--mixed_precision", "no")
    _, out, err = launched(capfd, *words, *more, "train.py")
    for one in told(out):
        assert one["OMP_NUM_THREADS"] == "1"
        assert one["PACELINE_MIXED_PRECISION"] == "no"
    assert "1 CPU thread each (--num_cpu_threads_per_process)" in err
    assert "mixed_precision='no' from --mixed_precision overrides 'bf16' from mine.json" in err


def test_e11_processes_keep_to_the_cores_of_their_nodes(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    halves = [cores[: len(cores) // 2], cores[len(cores) // 2 :]]
    for number, half in enumerate(halves):
        (tmp_path / "nodes" / f"node{number}").mkdir(parents=True)
        (tmp_path / "nodes" / f"node{number}" / "cpulist").write_text(",".join(map(str, half)) + "\n")
    words = ("--cpu", "--num_processes", "2", "--enable_cpu_affinity", script(TELL))
    monkeypatch.setenv("PACELINE_BIND", str(tmp_path / "nodes"))
    _, out, err = launched(capfd, *words)
    assert [one["cores"] for one in told(out)] == halves
    assert "each process on the cores of one of 2 nodes (--enable_cpu_affinity)" in err
    monkeypatch.setenv("PACELINE_BIND", str(tmp_path / "none"))
    _, out, err = launched(capfd, *words)
    assert [one["cores"] for one in told(out)] == [cores] * 2
    assert "--enable_cpu_affinity has no effect: this machine has one NUMA node" in err


# ---- what cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multi_gpu", "train.py"], "--multi_gpu needs at least 2 GPUs, but torch sees 0"),
        (["--multi_gpu", "--cpu", "train.py"], "--multi_gpu needs at least 2 GPUs, but --cpu leaves 0"),
        (["--tpu", "train.py"], "--tpu needs a TPU, but the package torch_tpu is not installed. Run the command on a"),
        (["--tpu", "--cpu", "train.py"], "--tpu and --cpu cannot be used together."),
        (["--tpu_use_sudo", "train.py"], "--tpu_use_sudo: Paceline starts processes only on this machine"),
        (["--megatron-lm-tp-degree", "2", "train.py"], "--megatron-lm-tp-degree: Megatron-LM is not supported."),
        (["--fp8_backend", "te", "train.py"], "--fp8_backend: 8-bit training uses torchao."),
        (["--aws_access_key_id", "x", "train.py"], "--aws_access_key_id: launching on AWS is not supported"),
        (["--mpirun_hostfile", "x", "train.py"], "--mpirun_hostfile: mpirun is not needed."),
        (["--deepspeed_hostfile", "x", "train.py"], "--deepspeed_hostfile is for DeepSpeed's own launcher"),
        (["--num_processes", "3", "--num_machines", "2", "train.py"], "--num_processes is 3, which cannot be divided"),
        (["--num_processes", "0", "train.py"], "--num_processes: num_processes '0' is out of range."),
        (
            ["--rdzv_conf", "timeout", "--num_processes", "2", "train.py"],
            "rdzv_conf='timeout' contains 'timeout', which",
        ),
        (["trian.py"], "The script 'trian.py' was not found in"),
        (["--no_python", "no-such-program"], "The program 'no-such-program' was not found."),
        (["-m", "--no_python", "train.py"], "-m and --no_python cannot be used together."),
    ],
)
def test_c9_what_cannot_be_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(module, "_find_best", lambda: ("cpu", 0))
    script(TELL)
    status, out, err = launched(capfd, *words)
    assert (status, out) == (FAILED, "")
    assert err.startswith(f"paceline launch: {said}")
    assert len(err.splitlines()) == 1


def test_c9_more_processes_than_gpus_are_refused_with_the_count(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_find_best", lambda: ("cuda", 2))
    status, _, err = launched(capfd, "--num_processes", "3", "--gpu_ids", "0,5", script(TELL))
    assert status == FAILED
    assert "needs 3 GPUs on this machine, but torch sees 2 (CUDA_VISIBLE_DEVICES=0,5)" in err


def test_devices_of_any_kind_are_counted_and_named_and_ids_that_select_none_are_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_replace", subprocess.call)
    text = script("import os; print(os.environ['ZE_AFFINITY_MASK'])")
    with pytest.warns(match="--gpu_ids has no effect, because no GPU is visible"):
        assert launched(capfd, "--gpu_ids", "1,2", text)[:2] == (0, "1,2\n")
    monkeypatch.setattr(module, "_count_tpus", lambda: 1)
    monkeypatch.setattr(module, "_has_torch_tpu", lambda: True)
    with pytest.warns(match="--gpu_ids has no effect, because it cannot select TPUs"):
        launched(capfd, "--tpu", "--gpu_ids", "1", "train.py")
    for kind, title in (("mps", "MPS device"), ("xpu", "XPU device"), ("npu", "NPU device")):
        monkeypatch.setattr(module, "_find_best", lambda kind=kind: (kind, 1))
        assert f"1 process on {title}s (one for each visible {title})" in launched(capfd, "train.py")[2]
        status, _, err = launched(capfd, "--num_processes", "2", "train.py")
        assert (status, f"needs 2 {title}s on this machine, but torch sees 1" in err) == (FAILED, True)


@pytest.mark.parametrize(("words", "kind"), [([], "MULTI_CPU"), (["--use_fsdp"], "FSDP")])
def test_c15_one_command_starts_replicas_and_shards(
    capfd: pytest.CaptureFixture[str], words: list[str], kind: str
) -> None:
    text = "from paceline import Accelerator; print('KIND', Accelerator().distributed_type.value)"
    status, out, _ = launched(capfd, "--cpu", "--num_processes", "2", *words, script(text))
    assert status == 0
    assert out.split() == ["KIND", kind] * 2


def test_c15_deepspeed_that_is_not_there_is_named_with_what_does_the_same(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.messages.is_installed", lambda package: False)
    status, _, err = launched(capfd, "--use_deepspeed", "--zero_stage", "3", script(TELL))
    assert status == FAILED
    assert err.startswith("paceline launch: --use_deepspeed needs the package 'deepspeed'")
    assert "--use_fsdp" in err


def test_several_machines_are_told_what_to_type(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--cpu", "--num_machines", "2", "--num_processes", "4", "--main_process_ip", "10.0.0.1")
    status, _, err = launched(capfd, *words, script(TELL))
    assert status == FAILED
    assert "--main_process_port and --machine_rank are not set" in err
    line = "paceline launch --num_machines 2 --machine_rank {} --main_process_ip 10.0.0.1 --main_process_port 29500"
    for node in range(2):
        assert f"\n  {line.format(node)} --cpu --num_processes 4 train.py\n" in err


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_share_the_processes(capfd: pytest.CaptureFixture[str], backend: str) -> None:
    words = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--rdzv_backend", backend]
    with own_port() as port:
        words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), script(TELL)]
        command = [sys.executable, "-m", "paceline", "launch", "--machine_rank", "1", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
            status, out, err = launched(capfd, "--machine_rank", "0", *words)
            there, _ = other.communicate(timeout=LIMIT)
    assert (status, other.returncode) == (0, 0)
    assert [len(told(text)) for text in (out, there)] == [1, 1]
    assert [one["RANK"] for one in told(out + there)] == ["0", "1"]
    assert "1 process on the CPU (--num_processes; --cpu), machine 0 of 2;" in err


# ---- one script, four ways ------------------------------------------------------------------------------------------

TRAIN = """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import Accelerator, Trainer, TrainingModule, seed_everything


class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


seed_everything(1)
x = torch.randn(24, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
size = 8 // int(os.environ.get("WORLD_SIZE", "1"))
first, second = Net(), Net()
trainer = Trainer(
    max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False
)
trainer.fit(first, DataLoader(data, size, shuffle=True))

accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(
    second, torch.optim.SGD(second.parameters(), lr=0.1), DataLoader(data, size, shuffle=True)
)
for epoch in range(3):
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

if accelerator.is_main_process:
    loss = [nn.functional.mse_loss(net.layer.cpu()(x), data.tensors[1]).item() for net in (first, second)]
    counts = [trainer.world_size, accelerator.num_processes]
    print(json.dumps({"loss": loss, "processes": counts, "threads": torch.get_num_threads()}))
"""


@pytest.mark.cold
def test_a1_c13_one_script_trains_alike_however_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    name = script(TRAIN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch = ["-m", "paceline", "launch", "--cpu", "--num_cpu_threads_per_process", "1"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for start, processes in (([], 1), (launch, 1), ([*launch, "--num_processes", "2"], 2), (torchrun, 2)):
        command = [sys.executable, *start, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found.append(json.loads(line))
        assert found[-1]["processes"] == [processes] * 2
        assert found[-1]["threads"] == 1 or start in ([], torchrun)
    for door in range(2):
        losses = [one["loss"][door] for one in found]
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
        assert losses[0] < 1


def test_a6_hardware_and_precision_come_from_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    name = script(
        "import os\nfrom paceline import Accelerator\nmine = Accelerator()\n"
        "print(os.environ['RANK'], mine.num_processes, mine.mixed_precision, mine.gradient_accumulation_steps)\n"
    )
    words = ("--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "--gradient_accumulation_steps", "4")
    status, out, err = launched(capfd, *words, name)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["0 2 bf16 4", "1 2 bf16 4"]


def test_the_help_shows_defaults_as_they_are_written_and_every_flag_of_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(ROOT) / Path(paceline.__file__).parent.name / "docs" / "commands.md").read_text()
    page = page.partition("## Launch\n")[2].partition("\n## ")[0]
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    assert "(default: FULL_SHARD)" in shown
    assert "(default: true)" in shown
    flags = set(re.findall(r"--\w+", shown))
    named = set(re.findall(r"--[a-z]\w*(?!-)", page.replace("--nproc-per-node", "").replace("--lr", "")))
    assert named <= flags


# ---- a launch from within a launched process -------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_launch_within_a_launched_process_is_one_of_its_own(count: str) -> None:
    script(
        "import os; from paceline import Accelerator; a = Accelerator(); "
        "os.write(1, f'{a.num_processes} {a.gradient_state.num_steps}\\n'.encode())"  # in one piece
    )
    outer = f"""
import os, subprocess, sys
if os.environ["RANK"] == "0":
    command = [sys.executable, "-m", "paceline", "launch", "--cpu", "--num_processes", "{count}", "train.py"]
    sys.stdout.write(subprocess.run(command, stdout=-1, text=True, timeout=180).stdout)
"""
    found = typed("--cpu", "--num_processes", "2", "--gradient_accumulation_steps", "3", script(outer, "outer.py"))
    assert found.stdout.split("\n") == [f"{count} 1"] * int(count) + [""]
