"""Programs under a real Hydra: one folder and one configuration for the ranks of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.processes.host_program import find_host
from paceline.processes.hydra_program import for_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
ROOT = str(Path(__file__).resolve().parents[3])
LIMIT = 120.0
CONFIGURATION = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")

PROGRAM = """
import json, logging, os, sys
import hydra
from hydra.core.hydra_config import HydraConfig
from paceline.processes import launch
from paceline.processes.host_program import find_host, start_method_in

log = logging.getLogger("mine")


def say(cfg):
    rank, config = int(os.environ["RANK"]), HydraConfig.get()
    log.info(f"rank {rank}")
    told = [rank, cfg.lr, cfg.name, config.runtime.output_dir, config.job.name, os.getcwd()]
    sys.stdout.write(f"told {json.dumps(told)}\\n")
    sys.stdout.flush()
    if cfg.lr < 0:
        open(f"{config.runtime.cwd}/meeting", "rw"[rank == 0]).close()  # both ranks have told by then
        if rank == 1:
            raise ValueError("mine")


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    if "RANK" in os.environ:
        launch.register_failure_hook()
        return say(cfg)
    log.info("this process")
    method = start_method_in(find_host(), "auto", None)
    if method == "popen":
        launch.rerun(2)
    return launch.start(say, (cfg,), 2, method)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        single, sys.argv = sys.argv, [sys.argv[0], "--multirun", "lr=1,2", "hydra.sweep.dir=sweep"]
        main()
        sys.argv = single
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    for name in ("config", "other"):
        (tmp_path / "conf" / f"{name}.yaml").write_text(f"lr: 0.1\nname: {name}\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    os.mkfifo(tmp_path / "meeting")
    return tmp_path


def lines_of(log: Path) -> list[str]:
    return [line.rpartition(" - ")[2] for line in log.read_text().splitlines() if "[mine]" in line]


def test_ranks_of_a_job_share_its_folder_and_configuration_in_a_single_run_and_in_a_sweep(folder: Path) -> None:
    typed = ["--config-name", "other", "lr=-1", "name='it\\'s ${lr}'", "hydra.run.dir='runs/a \"b\"'"]
    typed.append("hydra.job.chdir=true")
    environ = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", *typed], cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT
    )
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")]
    swept, single = folder / "sweep", folder / "runs" / 'a "b"'
    assert sorted(one[3] for one in told) == sorted([str(single)] * 2 + [str(swept / job) for job in "0011"])
    by_folder = {(one[3], one[0]): one for one in told}
    for rank in range(2):
        for job, lr in enumerate((1, 2)):
            run = str(swept / str(job))
            assert by_folder[run, rank] == [rank, lr, "config", run, "train", str(folder)]
        job_name = "train" if rank == 0 else "train_rank1"
        assert by_folder[str(single), rank] == [rank, -1, "it's -1", str(single), job_name, str(single)]
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in (".log", ".yaml"))
    outputs = [f"sweep/{job}/{name}" for job in "01" for name in ("train.log", *CONFIGURATION)]
    outputs += [f'runs/a "b"/{name}' for name in ("train.log", "train_rank1.log", *CONFIGURATION)]
    assert files == sorted(["conf/config.yaml", "conf/other.yaml", "sweep/multirun.yaml", *outputs])
    assert lines_of(single / "train.log") == ["this process", "rank 0"]
    assert lines_of(single / "train_rank1.log") == ["rank 1"]
    assert "lr=-1" in (single / ".hydra" / "overrides.yaml").read_text()
    assert done.returncode == 1
    assert "Rank 1 of 2 failed (exit status 1):\nTraceback" in done.stderr
    assert done.stderr.count("ValueError: mine") == 1


@pytest.fixture
def in_a_job(folder: Path) -> Iterator[Any]:
    """Hydra as it stands while it runs a job: a function that sets its mode and folder."""
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import open_dict

    def begin(overrides: list[str], output_dir: str | None, mode: str = "RUN") -> None:
        with initialize_config_dir(str(folder / "conf"), version_base=None):
            config = compose("config", overrides, return_hydra_config=True)
        with open_dict(config):
            config.hydra.mode = RunMode[mode]
            config.hydra.job.name = "train"
            config.hydra.overrides.task = overrides
            if output_dir is not None:
                config.hydra.runtime.output_dir = output_dir
        HydraConfig.instance().set_config(config)

    yield begin
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize(
    ("arguments", "output_dir"),
    [
        ([], "/runs/1"),
        (["lr=0.5", "name=x"], "/a b/c=d,e"),
        (["--config-name", "config", "lr=0.5"], '/it\'s "quoted"'),
        (["lr=0.5", "name=x", "--config-name", "config"], "/ends\\"),
        (["lr=0.5", "-cn", "config", "--config-dir", "conf"], '/back\\"slash'),
        (["--config-name", "config"], "/{x}[y]"),
    ],
)
def test_the_command_of_ranks_is_one_that_hydra_reads(in_a_job: Any, arguments: list[str], output_dir: str) -> None:
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser

    typed = [argument for argument in arguments if "=" in argument]
    in_a_job(typed, output_dir)
    command, _ = for_ranks(["python", "train.py", *arguments], "/")
    read = get_args_parser().parse_args(command[2:])
    assert read.config_name == ("config" if "config" in arguments else None)
    assert read.overrides[: len(typed)] == typed
    values = {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(read.overrides)}
    assert str(values["hydra.run.dir"]) == output_dir
    assert values["hydra.output_subdir"] is None


def test_only_a_job_that_hydra_runs_counts(in_a_job: Any) -> None:
    command = ["python", "train.py"]
    assert for_ranks(command, "/here") == (command, "/here")
    in_a_job([], None)  # composed by hand, as in a notebook
    assert for_ranks(command, "/here") == (command, "/here")
    in_a_job([], "/runs/1", "MULTIRUN")
    assert find_host().name == "pytest"
