from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.processes.cluster_environment import PORTS, Cluster, find_cluster, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[007-008,011]",
}


def mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def hydra(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return {name: str(value) for name, value in zip(names, (rank, size, local_rank, local_size), strict=True)}


def jsm(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"JSM_NAMESPACE_{name}": str(value) for name, value in values.items()}


def without(environ: dict[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names} | changed


def found(environ: dict[str, str]) -> Cluster:
    cluster = find_cluster(environ)
    assert cluster is not None
    return cluster


# ---- nobody, and torchrun ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"PMI_FD": "3", "SLURM_JOB_ID": "1"},
    ],
)
def test_leftover_variables_are_no_cluster(environ: dict[str, str]) -> None:
    assert find_cluster(environ) is None


def test_this_process_is_read_when_no_variables_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert find_cluster() == find_cluster(TORCHRUN)


def test_torchrun_says_everything() -> None:
    assert found(TORCHRUN) == Cluster("torchrun", 5, 1, 8, 4, 1, 2, "node0", 29500)


def test_torchrun_with_one_process_is_a_cluster_of_one() -> None:
    environ = without(TORCHRUN, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
    assert found(environ | {"GROUP_WORLD_SIZE": "1"}).world_size == 1


def test_rank_zero_of_one_needs_nothing_else() -> None:
    cluster = found({"RANK": "0", "WORLD_SIZE": "1"})
    assert (cluster.rank, cluster.local_rank, cluster.num_nodes, cluster.address) == (0, 0, 1, "127.0.0.1")


def test_on_the_own_address_all_processes_share_the_machine() -> None:
    cluster = found(
        {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    )
    assert (cluster.local_world_size, cluster.node_rank, cluster.num_nodes) == (3, 0, 1)


def test_the_machine_follows_from_rank_or_from_node_rank() -> None:
    assert found(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE")).node_rank == 1
    assert found(without(TORCHRUN, "GROUP_RANK", NODE_RANK="0")).node_rank == 0


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), ("RANK=5", "but not WORLD_SIZE,")),
        (without(TORCHRUN, "RANK"), ("WORLD_SIZE=8", "but not RANK,")),
        (without(TORCHRUN, "MASTER_ADDR"), ("RANK=5", "WORLD_SIZE=8", "but not MASTER_ADDR,")),
        (without(TORCHRUN, "MASTER_PORT"), ("MASTER_ADDR=node0", "but not MASTER_PORT,")),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), ("but not MASTER_ADDR, MASTER_PORT,",)),
        (without(TORCHRUN, "LOCAL_RANK"), ("RANK=5", "but not LOCAL_RANK,")),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), ("MASTER_ADDR=node0", "export LOCAL_WORLD_SIZE=")),
        (without(TORCHRUN, RANK="8"), ("rank 8 with world size 8", "RANK, WORLD_SIZE")),
        (without(TORCHRUN, RANK="-1"), ("rank -1 with world size 8",)),
        (without(TORCHRUN, LOCAL_RANK="4"), ("local rank 4 with local world size 4",)),
        (without(TORCHRUN, GROUP_RANK="2"), ("node rank 2 with node count 2",)),
        (without(TORCHRUN, LOCAL_WORLD_SIZE="9"), ("9 processes on this machine but 8",)),
        (without(TORCHRUN, LOCAL_WORLD_SIZE="0"), ("local rank 1 with local world size 0",)),
        (without(TORCHRUN, WORLD_SIZE="two"), ("WORLD_SIZE='two' is not a whole number",)),
        (without(TORCHRUN, MASTER_PORT="http"), ("MASTER_PORT='http' is not a whole number",)),
        (without(TORCHRUN, MASTER_PORT="70000"), ("MASTER_PORT=70000 is not a valid port",)),
    ],
)
def test_half_set_variables_are_an_error_that_names_them(environ: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError) as raised:
        find_cluster(environ)
    for name in names:
        assert name in str(raised.value)


def test_kubeflow_runs_one_process_a_pod() -> None:
    environ = {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    cluster = found(environ | {"RANK": "2", "WORLD_SIZE": "3"})
    assert cluster == Cluster("Kubeflow", 2, 0, 3, 1, 2, 3, "job-master-0", 23456)


def test_torchrun_in_a_pod_is_torchrun() -> None:
    assert found(TORCHRUN | {"KUBERNETES_PORT": "tcp://10.0.0.1:443"}).name == "torchrun"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "paceline"}, "Paceline"),
        ({"TORCHELASTIC_RUN_ID": "paceline", "PACELINE_STARTER": "paceline launch"}, "paceline launch"),
        ({"TORCHELASTIC_RUN_ID": "none", "PACELINE_STARTER": "paceline launch"}, "torchrun"),
    ],
)
def test_processes_that_paceline_started_do_not_name_torchrun(environ: dict[str, str], name: str) -> None:
    assert found(TORCHRUN | environ).name == name
    with pytest.raises(RuntimeError, match=f"environment of {name} specifies rank 8 with world size 8.*Make RANK, "):
        find_cluster(TORCHRUN | environ | {"RANK": "8"})


def test_a_pod_with_a_wrong_rank_is_told_which_variables_to_look_at() -> None:
    environ = {"KUBERNETES_PORT": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "3"}
    with pytest.raises(
        RuntimeError, match=r"Kubeflow specifies rank 3 with world size 3.*Make RANK and WORLD_SIZE agree"
    ):
        find_cluster(environ)


# ---- SLURM ---------------------------------------------------------------------------------------------------------


def test_srun_says_everything() -> None:
    cluster = found(SRUN)
    assert cluster == Cluster("SLURM", 3, 1, 5, 2, 1, 3, "node007", cluster.port)
    assert cluster.port in PORTS


def test_all_tasks_of_a_step_find_the_same_port_and_other_steps_another() -> None:
    first = found(without(SRUN, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"))
    assert first.port == found(SRUN).port
    assert first.port != found(without(SRUN, SLURM_STEP_ID="1")).port
    assert first.port != found(without(SRUN, SLURM_JOB_ID="4712")).port


def test_address_and_port_can_be_given_under_srun() -> None:
    cluster = found(SRUN | {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4000"})
    assert (cluster.address, cluster.port) == ("10.1.2.3", 4000)


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"), [("2(x2),1", "2", 1), ("2,2,1", "0", 2), ("5", "0", 5), ("1(x3)", "7", 2)]
)
def test_the_tasks_of_this_machine_are_read_from_the_list(tasks: str, node: str, local_size: int) -> None:
    environ = without(SRUN, SLURM_TASKS_PER_NODE=tasks, SLURM_NODEID=node, SLURM_LOCALID="0", SLURM_NNODES="3")
    if int(node) >= 3:
        with pytest.raises(RuntimeError, match="node rank 7 with node count 3"):
            find_cluster(environ)
    else:
        assert found(environ).local_world_size == local_size


def test_tasks_per_machine_without_a_list() -> None:
    environ = without(SRUN, "SLURM_TASKS_PER_NODE", SLURM_NTASKS="6")
    assert found(environ | {"SLURM_NTASKS_PER_NODE": "2"}).local_world_size == 2
    assert found(environ).local_world_size == 2


def test_the_step_counts_rather_than_the_job() -> None:
    job = without(SRUN, SLURM_NTASKS="16", SLURM_NNODES="4", SLURM_TASKS_PER_NODE="4(x4)", SLURM_NODELIST="other[1-4]")
    step = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert found(job | step) == found(SRUN)


@pytest.mark.parametrize(
    "environ",
    [
        without(SRUN, "SLURM_STEP_ID"),  # the batch script
        without(SRUN, SLURM_STEP_ID="4294967291"),  # the batch step
        without(SRUN, SLURM_STEP_ID="4294967290"),  # salloc's interactive step
        without(SRUN, SLURM_JOB_NAME="bash", SLURM_PTY_PORT="40000", SLURM_PROCID="0"),  # srun --pty bash
        without(SRUN, "SLURM_PROCID"),
        without(SRUN, SLURM_NTASKS="1", SLURM_PROCID="0"),
    ],
)
def test_without_srun_an_allocation_starts_nothing(environ: dict[str, str]) -> None:
    assert find_cluster(environ) is None


def test_srun_inside_an_interactive_shell_is_a_cluster() -> None:
    assert found(without(SRUN, SLURM_JOB_NAME="bash", SLURM_PTY_PORT="40000", SLURM_STEP_ID="1")).name == "SLURM"
    assert found(without(SRUN, SLURM_JOB_NAME="interactive")).name == "SLURM"


def test_torchrun_under_srun_is_torchrun() -> None:
    assert found(SRUN | TORCHRUN).name == "torchrun"


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        (without(SRUN, "SLURM_LOCALID"), "but not SLURM_LOCALID,"),
        (without(SRUN, SLURM_PROCID="5"), "rank 5 with world size 5.*SLURM_PROCID"),
        (without(SRUN, SLURM_TASKS_PER_NODE="2x2"), "SLURM_TASKS_PER_NODE='2x2' does not have the form"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "MASTER_ADDR=<host of rank 0>"),
        (without(SRUN, SLURM_PROCID="?"), "SLURM_PROCID='\\?' is not a whole number"),
    ],
)
def test_slurm_errors_name_the_variable(environ: dict[str, str], match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        find_cluster(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node[001-003,007]", "node001"),
        ("node[001-003],other", "node001"),
        ("a.example.org,b", "a.example.org"),
        ("rack[2-3]n[05,07]-ib", "rack2n05-ib"),
        ("n[3,5-6]x,n9", "n3x"),
    ],
)
def test_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


# ---- MPI and LSF ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "more", "name"),
    [
        (mpi, {"PMIX_NAMESPACE": "prterun-host-77@1"}, "OpenMPI"),
        (mpi, {}, "OpenMPI"),
        (hydra, {}, "MPICH"),
        (hydra, {"I_MPI_ROOT": "/opt/intel"}, "Intel MPI"),
        (jsm, {"LSB_JOBID": "99"}, "LSF"),
    ],
)
def test_mpi_on_one_machine_needs_no_address(make: Any, more: dict[str, str], name: str) -> None:
    cluster, other = (found(make(rank, 2, rank, 2) | more) for rank in (1, 0))
    assert cluster == Cluster(name, 1, 1, 2, 2, 0, 1, "127.0.0.1", cluster.port)
    assert cluster.port == other.port
    assert cluster.port in PORTS


@pytest.mark.parametrize("make", [mpi, hydra, jsm])
def test_mpi_on_several_machines_needs_an_address(make: Any) -> None:
    environ = make(3, 4, 1, 2)
    with pytest.raises(RuntimeError, match=r"2 machines.*MASTER_ADDR=<host of rank 0>"):
        find_cluster(environ)
    cluster = found(environ | {"MASTER_ADDR": "head", "MASTER_PORT": "5000"})
    assert (cluster.node_rank, cluster.num_nodes, cluster.address, cluster.port) == (1, 2, "head", 5000)


@pytest.mark.parametrize(("rank", "local_rank", "node"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_ranks_dealt_round_the_machines_find_theirs(rank: int, local_rank: int, node: int) -> None:
    assert found(mpi(rank, 4, local_rank, 2) | {"MASTER_ADDR": "head"}).node_rank == node


@pytest.mark.parametrize("make", [mpi, hydra, jsm])
def test_mpi_with_part_of_its_variables_is_an_error(make: Any) -> None:
    environ = make(0, 2, 0, 2)
    *first, last = environ
    with pytest.raises(RuntimeError, match=f"{first[0]}=0.*but not {last},"):
        find_cluster(without(environ, last))
    with pytest.raises(RuntimeError, match=f"rank 2 with world size 2.*{first[0]}"):
        find_cluster(environ | {first[0]: "2"})


def test_slurms_own_pmi_is_slurm_and_mpirun_inside_slurm_is_mpi() -> None:
    assert found(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}).name == "SLURM"
    assert found(SRUN | hydra(1, 2, 1, 2)).name == "MPICH"
    assert found(SRUN | mpi(1, 2, 1, 2)).name == "OpenMPI"


def test_lsf_takes_the_first_host_that_computes(tmp_path: Path) -> None:
    environ = jsm(5, 8, 1, 4) | {"LSB_JOBID": "99"}
    assert found(environ | {"LSB_MCPU_HOSTS": "batch5 1 h08 42 h11 42"}).address == "h08"
    assert found(environ | {"LSB_MCPU_HOSTS": "front 1 h08 42 h11 42"}).address == "h08"
    assert found(environ | {"LSB_MCPU_HOSTS": "h08 42 h11 42"}).address == "h08"
    ranks = tmp_path / "ranks"
    ranks.write_text("login1\n" + "h11\n" * 4 + "h12\n" * 4)
    cluster = found(environ | {"LSB_DJOB_RANKFILE": str(ranks), "LSB_MCPU_HOSTS": "h08 42"})
    assert (cluster.name, cluster.address, cluster.node_rank, cluster.num_nodes) == ("LSF", "h11", 1, 2)
    assert found(environ | {"LSB_DJOB_RANKFILE": str(ranks), "MASTER_ADDR": "x"}).address == "x"


def test_export_writes_what_torchrun_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    cluster = found(without(SRUN, SLURM_TASKS_PER_NODE="1,3,1", SLURM_PROCID="1"))
    cluster.export()
    assert os.environ["GROUP_RANK"] == os.environ["NODE_RANK"] == "1"
    again = found(dict(os.environ))
    assert again == Cluster("torchrun", *[getattr(cluster, name) for name in list(Cluster.__dataclass_fields__)[1:]])


def test_a_batch_scripts_world_size_agrees_with_srun_or_is_an_error() -> None:
    assert found({**SRUN, "WORLD_SIZE": SRUN["SLURM_NTASKS"]}) == found(SRUN)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=99 is set, but SLURM started \d+ processes.*unset WORLD_SIZE"):
        find_cluster({**SRUN, "WORLD_SIZE": "99"})
