"""Two machines, made of network namespaces: a node that dies, and the numbers of one machine."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks, until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 180.0
ADDRESSES = ("10.77.0.1", "10.77.0.2")

SCRIPT = """
import os

import torch
from rank_processes import until
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import ModelCheckpoint


def write(line):
    with open("log", "a") as file:
        file.write(line + "\\n")


class Data(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return index, x, x.sum(0, keepdim=True)


class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        trainer, (index, x, y) = self.trainer, batch
        size, rank, step = trainer.world_size, trainer.global_rank, trainer.global_step
        if rank == size - 1 and f"{size}:{step}" in os.environ["HOLD"].split(","):
            write(f"hold {size}:{step}")
            until("told to end", lambda: trainer.received_sigterm)
        write(f"step {size} {rank} {trainer.current_epoch} {step} {','.join(map(str, index.tolist()))}")
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


seed_everything(1)
trainer = Trainer(
    max_epochs=3,
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ.get("DEVICES", "1")),
    num_nodes=int(os.environ.get("NODES", "1")),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(os.environ["SAVED"], every_n_train_steps=2, save_last=True)],
)
trainer.fit(Net(), DataLoader(Data(), 2, shuffle=True), ckpt_path="last")
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Node:
    """A machine: a network namespace with one interface, and what runs in it.

    Attributes:
        name: of the namespace; its own in every process, so that tests do not meet.
        address: of its interface, in a network that no other namespace is on.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Run Python with ``arguments`` on this machine."""
        command = ["ip", "netns", "exec", self.name, sys.executable, *arguments]
        variables = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "GLOO_"))},
            "PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(ROOT / "tests")]),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "HOLD": "",
            **environment,
        }
        path = Path(f"{self.address}.{len(self.started)}.out")
        with path.open("w") as file:
            process = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT, text=True)
        self.started.append(process)
        return process

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(Path().glob(f"{self.address}.*.out")))

    def pull_the_plug(self) -> None:
        """Kill everything that runs here, the agent and its workers alike."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        for process in self.started:
            process.wait()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the command ip (iproute2)")
    first, second = (Node(f"paceline-{os.getpid()}-{n}", address) for n, address in enumerate(ADDRESSES))
    try:
        try:
            for node in (first, second):
                run("ip", "netns", "add", node.name)
            link = f"ip link add name eth0 netns {first.name} type veth peer name eth0 netns {second.name}"
            run(*link.split())
            for node in (first, second):
                run("ip", "-n", node.name, "addr", "add", f"{node.address}/30", "dev", "eth0")
                for link in ("lo", "eth0"):
                    run("ip", "-n", node.name, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield first, second
    finally:
        for node in (first, second):
            node.pull_the_plug()
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def wait_for(what: str, condition: Callable[[], bool], *nodes: Node) -> None:
    try:
        until(what, condition, LIMIT_SECONDS)
    except AssertionError as error:
        raise AssertionError("\n\n".join([str(error), *(node.output() for node in nodes)])) from None


class Step:
    """A line of the script's log: one rank's part of one step."""

    def __init__(self, words: list[str]) -> None:
        self.world_size, self.rank, self.epoch, self.number = map(int, words[1:5])
        self.samples = [int(index) for index in words[5].split(",")]


def saved(folder: str) -> dict[str, Any]:
    return torch.load(f"{folder}/last.ckpt", weights_only=True)


def log() -> list[list[str]]:
    path = Path("log")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def torchrun(node: Node, leader: Node, **environment: str) -> subprocess.Popen[str]:
    settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    return node.start(
        *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={leader.address}:29400", f"--local-addr={node.address}"),
        *("--rdzv-conf", f"is_host={'true' if node is leader else 'false'},{settings}", "train.py"),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # or torch's agents cannot take in a node later on
        SAVED="saved",
        **environment,
    )


def test_training_goes_on_when_a_node_dies_and_when_it_comes_back(nodes: tuple[Node, Node], script: str) -> None:
    first, second = nodes
    holds = "1:0,2:9,1:13"  # one node alone waits for the other; then step 9 of both and step 13 of one never end
    leader = torchrun(first, first, HOLD=holds)
    torchrun(second, first, HOLD=holds)

    wait_for("two nodes train", lambda: ["hold", "2:9"] in log(), *nodes)
    second.pull_the_plug()
    wait_for("the other goes on alone", lambda: ["hold", "1:13"] in log(), *nodes)
    torchrun(second, first, HOLD="")
    wait_for("both train to the end", lambda: leader.poll() is not None, *nodes)
    assert leader.returncode == 0, first.output()

    steps = [Step(line) for line in log() if line[0] == "step"]
    # Every second step is saved, so of the ten of both nodes eight count; the one left over ends step 13 when it is
    # asked to start anew, and saves. An epoch has 24 samples: 6 steps of both, or 12 of one.
    counted = {
        range(8): [step for step in steps if step.world_size == 2 and step.number < 8],
        range(8, 14): [step for step in steps if step.world_size == 1],
        range(14, 21): [step for step in steps if step.world_size == 2 and step.number >= 10],
    }
    for numbers, part in counted.items():
        made = [step.number for step in part if step.rank == 0]
        assert made == list(numbers)
        assert sorted(step.number for step in part) == sorted(made * part[0].world_size)
    assert {step.number for step in steps} == set(range(21))
    for epoch in range(3):
        samples = [n for part in counted.values() for step in part if step.epoch == epoch for n in step.samples]
        assert sorted(samples) == list(range(24)), f"epoch {epoch}"
    assert saved("saved")["global_step"] == 21
    said = first.output()
    assert "the position, batch 4 of the epoch (batch 2 in the saved run)" in said
    assert "the position, batch 5 of the epoch (batch 10 in the saved run)" in said
    assert said.count("lost the connection to another rank") == 1


def test_two_machines_learn_what_one_with_as_many_processes_learns(
    nodes: tuple[Node, Node], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    meeting = {"NODES": "2", "SAVED": "apart", "MASTER_ADDR": first.address, "MASTER_PORT": "29500"}
    processes = [node.start(script, NODE_RANK=str(n), **meeting) for n, node in enumerate(nodes)]
    wait_for("both train to the end", lambda: all(p.poll() is not None for p in processes), *nodes)
    assert [p.returncode for p in processes] == [0, 0], first.output() + second.output()

    for name, value in {"DEVICES": "2", "SAVED": "together", "HOLD": ""}.items():
        monkeypatch.setenv(name, value)
    ranks(2, lambda: runpy.run_path(script) and None)

    apart, together = saved("apart")["state_dict"], saved("together")["state_dict"]
    assert apart.keys() == together.keys()
    assert all(torch.equal(apart[name], together[name]) for name in together)
    assert saved("apart")["global_step"] == 18
    assert {line[2] for line in log()} == {"0", "1"}
    assert len(log()) == 2 * 2 * 18
