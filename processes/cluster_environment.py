"""Read this process's rank, world size and address from the environment variables that its launcher set.

Each launcher uses different names: ``torchrun`` and launchers that imitate it, SLURM's ``srun``, Open MPI, Intel MPI
and MPICH, LSF's ``jsrun``, and Kubeflow's operator. All of them are read into a :class:`Cluster`, whose
:meth:`Cluster.export` sets torchrun's variables, so that later code reads only those. An error is raised if only some
of a launcher's variables are set, because otherwise each process might run as if it were the only one.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .. import messages

Environment = Mapping[str, str]

#: Range for derived ports: above the well-known ports, below the ports that Linux uses for outgoing connections.
PORTS = range(12000, 30000)
#: SLURM steps numbered from here on are not started by ``srun`` (the batch script, an interactive shell).
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
#: Torch elastic's run id for processes that Paceline starts, and the variable that names the command that started them.
RUN_ID = "paceline"
STARTER = "PACELINE_STARTER"
_SHELLS = ("bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh")


@dataclass(frozen=True)
class Cluster:
    """One process's ranks (0-based), the sizes of its cluster, and the address and port on which rank 0 listens.

    ``local`` refers to the processes on this machine, a node is a machine, and ``name`` is the launcher's name:
    ``"torchrun"``, ``"paceline launch"``, ``"Paceline"`` (a Trainer, an Accelerator or a notebook), ``"SLURM"``,
    ``"OpenMPI"``, ``"Intel MPI"``, ``"MPICH"``, ``"LSF"`` or ``"Kubeflow"``.
    """

    name: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int

    def export(self) -> None:
        """Set torchrun's variables, so that ``init_process_group(init_method="env://")`` finds all processes."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.local_rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            GROUP_RANK=str(self.node_rank),
            NODE_RANK=str(self.node_rank),
            GROUP_WORLD_SIZE=str(self.num_nodes),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


def find_cluster(environ: Environment | None = None) -> Cluster | None:
    """Read the variables that this process's launcher has set; return None if there was no launcher.

    Torchrun's variables are checked first, so that ``torchrun`` under ``srun`` counts as torchrun. Next come launchers
    that can run inside another launcher's allocation (LSF, MPI), then SLURM. ``torchrun --nproc-per-node 1`` is a
    cluster of one process. Many batch scripts export WORLD_SIZE without RANK; this WORLD_SIZE must match the launcher's
    world size.

    Args:
        environ: the variables to read; this process's environment if None.

    Raises:
        RuntimeError: the variables are incomplete or contradict each other.
    """
    environ = os.environ if environ is None else environ
    others = (_lsf, _open_mpi, _hydra, _slurm)
    finders = (_torchrun, *others) if "RANK" in environ else (*others, _torchrun)
    cluster = next((found for find in finders if (found := find(environ))), None)
    if cluster is not None:
        _check(cluster)
        _check_world_size(cluster, environ)
    return cluster


def requeue() -> None:
    """Requeue this process's SLURM job with ``scontrol requeue``; SLURM then stops the job's processes."""
    job = _slurm_job(os.environ)
    if job is None:
        messages.info("There is no SLURM job to requeue (SLURM_JOB_ID is not set).")
        return
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        problem = f"exit status {done.returncode}: {(done.stderr or done.stdout).strip()}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        messages.error(
            f"`{' '.join(command)}` failed ({problem}), so the job will not restart automatically. The run's state is "
            "saved, so submit the job again to resume."
        )
    else:
        messages.info(f"SLURM job {job} is back in the queue and will resume when SLURM starts it again.")


def is_requeued(environ: Environment | None = None) -> bool:
    """Return True if SLURM has started this job before, so there may be a checkpoint to resume from."""
    environ = os.environ if environ is None else environ
    return _slurm_job(environ) is not None and _number(environ, "SLURM_RESTART_COUNT", 0) > 0


def _slurm_job(environ: Environment) -> str | None:
    """Return the job ID for ``scontrol``, which is ``<array ID>_<task index>`` for a task of a job array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


# ---- launchers -----------------------------------------------------------------------------------------------------


def _torchrun(environ: Environment) -> Cluster | None:
    if "RANK" not in environ and environ.get("WORLD_SIZE", "1") == "1":
        return None
    fix = "Start the script with torchrun, which sets all of these variables, or unset them all to run a single process"
    _need(environ, ("RANK", "WORLD_SIZE"), fix)
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    alone = world_size == 1
    if not alone:
        _need(environ, ("MASTER_ADDR", "MASTER_PORT"), fix)
    kubeflow = "KUBERNETES_PORT" in environ and "LOCAL_RANK" not in environ
    if kubeflow:
        local_rank, local_world_size = 0, 1
    else:
        if not alone:
            _need(environ, ("LOCAL_RANK",), fix)
        local_rank = _number(environ, "LOCAL_RANK", 0)
        local_world_size = _local_world_size(environ, world_size)
    num_nodes = _number(environ, "GROUP_WORLD_SIZE", -(-world_size // max(local_world_size, 1)))
    node_rank = _number(environ, "GROUP_RANK", -1)
    if node_rank < 0:
        node_rank = _number(environ, "NODE_RANK", rank // max(local_world_size, 1))
    return Cluster(
        "Kubeflow" if kubeflow else _starter(environ),
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank,
        num_nodes,
        environ.get("MASTER_ADDR", "127.0.0.1"),
        _port(environ, str(os.getpid())),
    )


def _starter(environ: Environment) -> str:
    """Return the launcher that set torchrun's variables: torchrun, or Paceline itself."""
    return environ.get(STARTER, "Paceline") if environ.get("TORCHELASTIC_RUN_ID") == RUN_ID else "torchrun"


def _local_world_size(environ: Environment, world_size: int) -> int:
    """Read LOCAL_WORLD_SIZE, which scripts often omit when they set RANK themselves."""
    if "LOCAL_WORLD_SIZE" in environ:
        return _number(environ, "LOCAL_WORLD_SIZE")
    address = environ.get("MASTER_ADDR", "127.0.0.1")
    if world_size == 1 or address in ("localhost", "::1") or address.startswith("127."):
        return world_size
    raise RuntimeError(
        f"RANK={environ['RANK']}, WORLD_SIZE={world_size} and MASTER_ADDR={address} are set, but LOCAL_WORLD_SIZE is "
        "not, so Paceline cannot tell how many processes share this machine. "
        "Start the script with torchrun, or also export LOCAL_WORLD_SIZE=<processes on this machine>."
    )


def _slurm(environ: Environment) -> Cluster | None:
    size = _either(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if "SLURM_PROCID" not in environ or size is None or _number(environ, size) < 2 or not _under_srun(environ):
        return None
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, size)
    nodes = _either(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    num_nodes = 1 if nodes is None else _number(environ, nodes)
    _need(environ, ("SLURM_LOCALID",), "Start the script with srun, which sets them")
    node_rank = _number(environ, "SLURM_NODEID", 0)
    return Cluster(
        "SLURM",
        rank,
        _number(environ, "SLURM_LOCALID"),
        world_size,
        _slurm_local_size(environ, node_rank, -(-world_size // max(num_nodes, 1))),
        node_rank,
        num_nodes,
        _slurm_address(environ, num_nodes),
        _port(environ, f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"),
    )


def _under_srun(environ: Environment) -> bool:
    """Return True if this is an ``srun`` task rather than a batch script or a shell inside an allocation."""
    step = _either(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or _number(environ, step) >= _SLURM_SPECIAL_STEPS:
        return False
    shell = environ.get("SLURM_JOB_NAME") in _SHELLS and "SLURM_PTY_PORT" in environ
    return not (shell and environ[step] == "0")


def _slurm_local_size(environ: Environment, node_rank: int, default: int) -> int:
    """Return the number of tasks on this machine.

    SLURM provides either a list such as ``"2(x3),1"``, which has one entry per machine (``node_rank`` is the index), or
    one number for all machines.
    """
    name = _either(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        return _number(environ, "SLURM_NTASKS_PER_NODE", default)
    sizes: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise RuntimeError(
                f"{name}={environ[name]!r} does not have the form '2(x3),1', so the number of tasks on this machine is "
                f"unknown. Start the script with srun, which sets {name}, or unset {name}."
            )
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes[node_rank] if node_rank < len(sizes) else default


def _slurm_address(environ: Environment, num_nodes: int) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    name = _either(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if name is not None:
        return first_host(environ[name])
    return _mpi_address(environ, "SLURM (without a SLURM_STEP_NODELIST)", num_nodes)


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: ``"node[001-003,007],other"`` -> ``"node001"``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _open_mpi(environ: Environment) -> Cluster | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if names[0] not in environ:
        return None
    job = _either(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _mpi(environ, "OpenMPI", names, "mpirun", environ[job] if job else str(os.getppid()))


def _hydra(environ: Environment) -> Cluster | None:
    """Read Intel MPI's or MPICH's variables. SLURM's own PMI also sets PMI_RANK, but no variables for local ranks."""
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    if names[0] not in environ or ("MPI_LOCALRANKID" not in environ and "SLURM_PROCID" in environ):
        return None
    name = "Intel MPI" if any(key.startswith("I_MPI_") for key in environ) else "MPICH"
    return _mpi(environ, name, names, "mpiexec", str(os.getppid()))


def _lsf(environ: Environment) -> Cluster | None:
    names = [f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if names[0] not in environ:
        return None
    return _mpi(environ, "LSF", names, "jsrun", environ.get("LSB_JOBID", ""), _lsf_address(environ))


def _mpi(
    environ: Environment, name: str, names: list[str], command: str, job: str, address: str | None = None
) -> Cluster:
    """Return the cluster described by MPI variables; ``names`` lists them: rank, size, local rank and local size."""
    _need(environ, names, f"Start the script with {command}, which sets them")
    rank, world_size, local_rank, local_world_size = (_number(environ, variable) for variable in names)
    num_nodes = -(-world_size // max(local_world_size, 1))
    return Cluster(
        name,
        rank,
        local_rank,
        world_size,
        local_world_size,
        _node(rank, local_rank, local_world_size, num_nodes),
        num_nodes,
        address or _mpi_address(environ, name, num_nodes),
        _port(environ, job),
    )


def _node(rank: int, local_rank: int, local_world_size: int, num_nodes: int) -> int:
    """Return the index of a rank's machine. Ranks may fill one machine after another or be assigned round-robin."""
    if local_world_size < 1:
        return 0
    round_robin = rank % local_world_size != local_rank and rank // num_nodes == local_rank
    return rank % num_nodes if round_robin else rank // local_world_size


def _mpi_address(environ: Environment, name: str, num_nodes: int) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if num_nodes <= 1:
        return "127.0.0.1"
    raise RuntimeError(
        f"{name} started processes on {num_nodes} machines, but does not report the host of rank 0, and MASTER_ADDR "
        "is not set. Export these variables to all processes: MASTER_ADDR=<host of rank 0> MASTER_PORT=<a free port "
        "there>."
    )


def _lsf_address(environ: Environment) -> str | None:
    """Return the first compute host of an LSF job.

    LSF may list a launch host before the compute hosts. A launch host is recognized by its single slot or its name.
    """
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    slots: dict[str, int] = {}
    if os.path.isfile(environ.get("LSB_DJOB_RANKFILE", "")):
        with open(environ["LSB_DJOB_RANKFILE"], encoding="utf-8") as file:
            for host in file.read().split():
                slots[host] = slots.get(host, 0) + 1
    else:
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        slots = {host: int(count) for host, count in zip(words[::2], words[1::2], strict=False) if count.isdigit()}
    hosts = list(slots)
    if len(hosts) > 1 and (
        re.match("batch|login|launch", hosts[0]) or slots[hosts[0]] == 1 < min(slots[host] for host in hosts[1:])
    ):
        del hosts[0]
    return hosts[0] if hosts else None


# ---- reading -------------------------------------------------------------------------------------------------------


def _either(environ: Environment, *names: str) -> str | None:
    """Return the first of the given names that is set as an environment variable; None if none of them is set."""
    return next((name for name in names if environ.get(name)), None)


def _need(environ: Environment, names: tuple[str, ...] | list[str], fix: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        known = (*names, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        present = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(known) if environ.get(name))
        raise RuntimeError(
            f"The environment sets {present or 'some of the launch variables'}, but not {', '.join(missing)}, so "
            f"this process cannot find the other processes. {fix}."
        )


def _number(environ: Environment, name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise RuntimeError(
            f"{name}={environ[name]!r} is not a whole number, so this process cannot tell its rank or the number of "
            f"processes. Set {name} to a number, or start the script with the launcher that sets it."
        ) from None


def _port(environ: Environment, job: str) -> int:
    """Return MASTER_PORT, or a port derived from the job.

    The derived port is the same in all of the job's processes, and probably different in other jobs.
    """
    port = _number(environ, "MASTER_PORT", PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    if not 0 < port < 65536:
        raise RuntimeError(
            f"MASTER_PORT={port} is not a valid port number, so the processes cannot find each other. Set MASTER_PORT "
            "to a free port from 1024 to 65535, and use the same port for all processes."
        )
    return port


def _check(cluster: Cluster) -> None:
    """Reject impossible values: a rank outside its range, or more processes on this machine than in total."""
    pairs = (
        ("rank", cluster.rank, "world size", cluster.world_size),
        ("local rank", cluster.local_rank, "local world size", cluster.local_world_size),
        ("node rank", cluster.node_rank, "node count", cluster.num_nodes),
    )
    wrong = [f"{what} {value} with {of} {size}" for what, value, of, size in pairs if not 0 <= value < size]
    if cluster.local_world_size > cluster.world_size:
        wrong.append(f"{cluster.local_world_size} processes on this machine but {cluster.world_size} in total")
    if wrong:
        variables = _VARIABLES.get(cluster.name, _VARIABLES["torchrun"])
        raise RuntimeError(
            f"The environment of {cluster.name} specifies {' and '.join(wrong)}, which is impossible (ranks begin at "
            f"0). Make {variables} agree, or unset them to run a single process."
        )


def _check_world_size(cluster: Cluster, environ: Environment) -> None:
    """Reject a WORLD_SIZE from a batch script that contradicts the launcher."""
    if "RANK" not in environ and _number(environ, "WORLD_SIZE", cluster.world_size) not in (1, cluster.world_size):
        raise RuntimeError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but {cluster.name} started {cluster.world_size} processes. "
            f"Start {environ['WORLD_SIZE']} processes, or unset WORLD_SIZE in the batch script, so that the launcher "
            "sets it."
        )


_MPI_NAMES = "PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS"
_VARIABLES = {
    "torchrun": "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (or NODE_RANK) and GROUP_WORLD_SIZE",
    "Kubeflow": "RANK and WORLD_SIZE",
    "SLURM": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_TASKS_PER_NODE, SLURM_NODEID and SLURM_NNODES",
    "OpenMPI": "OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE",
    "Intel MPI": _MPI_NAMES,
    "MPICH": _MPI_NAMES,
    "LSF": "JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE",
}


#: The function that reads each launcher's variables.
LAUNCHERS = {"torchrun": _torchrun, "LSF": _lsf, "OpenMPI": _open_mpi, "Intel MPI": _hydra, "SLURM": _slurm}
