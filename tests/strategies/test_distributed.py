"""What ranks say to each other, and where they stand."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import RanksError, ranks, wait_at_most
from tiny import TinyModule, tiny_loader
from torch import Tensor

from paceline import Accelerator, Trainer, debug_launcher
from paceline.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    DistributedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

CPU = torch.device("cpu")


def joined(**arguments: Any) -> DistributedStrategy:
    strategy = DistributedStrategy(**arguments)
    strategy.place([CPU] * 2)
    strategy.setup_environment()
    return strategy


def test_collectives_give_every_rank_the_same() -> None:
    def talk() -> Any:
        strategy = joined()
        rank = strategy.global_rank
        mine = torch.tensor([1.0 + rank, 4.0])
        found = {
            "mean": strategy.reduce(mine),
            "sum": strategy.reduce(mine, "sum"),
            "min": strategy.reduce(mine, "min"),
            "max": strategy.reduce(mine, "max"),
            "of ints": strategy.reduce(torch.tensor(rank)),
            "gathered": strategy.all_gather({"a": mine, "b": [torch.tensor(rank)]}),
            "broadcast": strategy.broadcast(f"from {rank}", src=1),
            "objects": strategy.gather_objects(rank * 10),
            "any": strategy.agree(rank == 1),
            "all": strategy.agree(rank == 1, all=True),
            "tensor": strategy.broadcast_tensor(mine.reshape(2, 1).T, src=1),
            "scattered": strategy.scatter_objects(["a", "b"] if rank == 0 else None),
            "alike": strategy.unlike([1, 2]),
            "unlike": strategy.unlike(f"at {rank}"),
        }
        strategy.barrier("here")
        assert mine.tolist() == [1.0 + rank, 4.0]
        return found

    everywhere = ranks(2, talk)
    for found in everywhere:
        assert found["mean"].tolist() == [1.5, 4.0]
        assert found["sum"].tolist() == [3.0, 8.0]
        assert found["min"].tolist() == [1.0, 4.0]
        assert found["max"].tolist() == [2.0, 4.0]
        assert found["of ints"].item() == 0.5
        assert found["gathered"]["a"].tolist() == [[1.0, 4.0], [2.0, 4.0]]
        assert found["gathered"]["b"][0].tolist() == [0, 1]
        assert found["broadcast"] == "from 1"
        assert found["objects"] == [0, 10]
        assert found["any"]
        assert not found["all"]
        assert found["tensor"].tolist() == [[2.0, 4.0]]
        assert found["alike"] == []
        assert found["unlike"] == ["at 0", "at 1"]
    assert [found["scattered"] for found in everywhere] == ["a", "b"]


def test_gradients_flow_through_a_gather_that_keeps_them() -> None:
    def talk() -> Tensor:
        strategy = joined()
        mine = torch.tensor([1.0 + strategy.global_rank], requires_grad=True)
        strategy.all_gather(mine, sync_grads=True).pow(2).sum().backward()
        assert mine.grad is not None
        return mine.grad

    assert [grad.item() for grad in ranks(2, talk)] == [4.0, 8.0]


def test_a_gather_of_different_shapes_names_them_on_every_rank() -> None:
    def talk() -> None:
        strategy = joined()
        strategy.all_gather(torch.ones(2 + strategy.global_rank))

    with pytest.raises(RanksError) as caught:
        ranks(2, talk)
    for error in caught.value.errors:
        assert isinstance(error, ValueError)
        assert "rank 0: [((2,), 'torch.float32')]; rank 1: [((3,), 'torch.float32')]" in str(error)
        assert "Pad them to the same shape" in str(error)


def test_ranks_that_meet_at_different_barriers_are_told_so() -> None:
    def talk() -> None:
        strategy = joined()
        strategy.barrier("left" if strategy.global_rank == 0 else "right")

    with pytest.raises(RanksError, match=r"different barriers: rank 0 at 'left', rank 1 at 'right'"):
        ranks(2, talk)


def test_a_rank_that_waits_in_vain_says_where_it_and_the_others_are() -> None:
    def talk() -> str:
        strategy = joined()
        wait_at_most(1.0)
        other = dist.new_group(backend="gloo")
        if strategy.global_rank == 0:
            try:
                strategy.barrier("only rank 0 comes here")
            except RuntimeError as error:
                dist.all_reduce(torch.zeros(1), group=other)
                return str(error)
        dist.all_reduce(torch.zeros(1), group=other)  # rank 1 is here all the while
        return ""

    said, _ = ranks(2, talk)
    assert "Rank 0 timed out waiting for another rank at" in said
    assert "(barrier 'only rank 0 comes here')" in said
    assert "Rank 1 is at" in said
    assert said.count("test_distributed.py") == 2
    assert "in talk" in said
    assert "if trainer.is_global_zero" in said


def test_a_rank_whose_partner_ended_says_so() -> None:
    def talk() -> None:
        strategy = joined()
        if strategy.global_rank == 1:
            raise ValueError("the cause")
        strategy.barrier("never")

    with pytest.raises(RanksError) as caught:
        ranks(2, talk)
    lost, cause = caught.value.errors
    assert "Rank 0 lost the connection to another rank, which has exited" in str(lost)
    assert isinstance(cause, ValueError)


def test_after_an_error_nobody_is_waited_for() -> None:
    def talk() -> Any:
        strategy = joined()
        if strategy.global_rank == 1:
            return None
        strategy.abandon(ValueError())
        strategy.barrier("alone")
        found = strategy.broadcast("mine", src=1), strategy.agree(False), strategy.reduce(torch.ones(1))
        with pytest.raises(RuntimeError, match="all_gather was called after an error"):
            strategy.all_gather(torch.ones(1))
        return found

    assert ranks(2, talk)[0] == ("mine", False, torch.ones(1))


def test_one_process_makes_a_group_of_its_own() -> None:
    def alone() -> Any:
        import os

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        strategy = DDPStrategy()
        strategy.place([CPU])
        assert strategy.launcher is None
        strategy.setup_environment()
        return strategy.world_size, dist.get_world_size(), strategy.reduce(torch.ones(1)).item()

    assert ranks(1, alone) == [(1, 1, 1.0)]


def test_a_group_of_another_size_is_refused() -> None:
    def talk() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        joined()

    with pytest.raises(
        RanksError, match="A process group with world size 1 already exists, but this run has world size 2"
    ):
        ranks(2, talk)


def test_a_run_on_one_process_is_no_obstacle_to_one_on_two(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": tmp_path, "max_epochs": 1}
    for devices in (1, 2):
        trainer = Trainer(**quiet, strategy=DDPStrategy(start_method="fork"), devices=devices)
        trainer.fit(TinyModule(), tiny_loader())
        assert trainer.world_size == devices
        assert dist.is_initialized() is (devices == 1)
    Trainer(**quiet, strategy="ddp", devices=1).fit(TinyModule(), tiny_loader())
    assert debug_launcher(lambda: Accelerator().num_processes) == 2


def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"DDPStrategy start_method 'spwan'\. Did you mean 'spawn'"):
        DDPStrategy(start_method="spwan")


class Dies(DDPStrategy):
    """A signal comes to the process that waits, or to one of those that start, before they have joined one another."""

    def __init__(self, where: str) -> None:
        super().__init__(start_method="fork")
        self.where = where
        self.ready = os.pipe()

    def setup_environment(self) -> None:
        if self.where == "late":
            super().setup_environment()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ["RANK"] == "1":
            os.write(self.ready[1], b"1")
        else:
            os.read(self.ready[0], 1)
            os.kill(os.getpid() if self.where == "rank" else os.getppid(), signal.SIGTERM)
        signal.pause()


STOPPED_EARLY = [
    "SIGTERM stopped the run's processes (2 in total) while they were starting, so nothing has been trained or saved."
]


@pytest.mark.parametrize(
    ("where", "kind", "told"),
    [
        ("parent", SystemExit, STOPPED_EARLY),
        ("rank", RuntimeError, STOPPED_EARLY),
        ("late", SystemExit, []),
    ],
)
def test_a_signal_that_ends_processes_while_they_start_is_told(
    where: str, kind: type[BaseException], told: list[str], quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(**quiet, strategy=Dies(where), devices=2, max_epochs=1)
    with pytest.raises(kind):
        trainer.fit(TinyModule(), tiny_loader())
    assert isinstance(trainer.strategy, Dies)
    for end in trainer.strategy.ready:
        os.close(end)
    err = capfd.readouterr().err
    assert [line for line in err.splitlines() if "stopped the run's processes (2 in total)" in line] == told


STOPPED_AT_ONCE = """
import os, signal, sys
from tiny import TinyModule, tiny_loader
from paceline import Accelerator, Trainer, debug_launcher

class Stops:
    def find_spec(self, name, *_):
        if name == "paceline.trainer.multiprocess_run":
            os.kill(os.getpid(), signal.SIGTERM)

trainer = Trainer(strategy=sys.argv[1], devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
sys.modules.pop("paceline.trainer.multiprocess_run", None)
sys.meta_path.insert(0, Stops())
trainer.fit(TinyModule(), tiny_loader(1))
"""


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_so_is_one_that_comes_while_fit_still_imports_what_starts_them(strategy: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED_AT_ONCE, strategy]
    temporary = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | temporary)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr.splitlines()[-1:] == STOPPED_EARLY
    assert not list(tmp_path.glob("paceline_*"))


def test_constructors_show_the_arguments_that_they_pass_on_and_refuse_others() -> None:
    process = {"process_group_backend", "init_method", "timeout", "start_method", "numa"}
    for kind in (DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy):
        parameters = inspect.signature(kind.__init__).parameters
        assert process < set(parameters), kind
        assert parameters["timeout"].default == timedelta(minutes=30)
        with pytest.raises(TypeError, match=rf"Unknown {kind.__name__} argument 'timeot'. Did you mean 'timeout'\?"):
            kind(timeot=timedelta(hours=1))
    assert "gradient_as_bucket_view" in inspect.signature(DDPStrategy).parameters
    with pytest.raises(TypeError, match=r"ModelParallelStrategy\(device_mesh=\.\.\.\): the strategy sets this"):
        ModelParallelStrategy(device_mesh=None)
