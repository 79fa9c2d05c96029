"""Cluster environments for ``Trainer(plugins=[...])``, which read a process's rank from its launcher."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar

from .cluster_environment import LAUNCHERS, Cluster, find_cluster


class ClusterEnvironment(ABC):
    """Base class for your own launcher's environment, which tells each process its rank and rank 0's address.

    Launchers that Paceline supports are detected automatically and need no such plugin.
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether the launcher started every process; if False, this process starts the others on its own machine."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The host on which rank 0 listens."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """The port on which rank 0 listens."""

    @classmethod
    def detect(cls) -> bool:
        """Return True if this launcher started this process."""
        return False

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes."""

    @abstractmethod
    def global_rank(self) -> int:
        """Return this process's rank among all processes, 0-based."""

    @abstractmethod
    def local_rank(self) -> int:
        """Return this process's rank on its machine, 0-based."""

    @abstractmethod
    def node_rank(self) -> int:
        """Return the index of this machine, 0-based."""

    def set_world_size(self, size: int) -> None:
        """Called with the number of processes that the Trainer's arguments require."""

    def set_global_rank(self, rank: int) -> None:
        """Called with the rank that was computed from the node rank and the local rank."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise an error if the Trainer's arguments do not match the processes that the launcher started."""

    def teardown(self) -> None:
        """Called when a run ends."""

    def cluster(self, num_devices: int, num_nodes: int) -> Cluster | None:
        """Return this environment as a :class:`Cluster`; None if this process starts the other processes.

        Args:
            num_devices: number of processes on this machine, one per device.
            num_nodes: number of machines.
        """
        if not self.creates_processes_externally:
            return None
        self.validate_settings(num_devices, num_nodes)
        self.set_world_size(num_devices * num_nodes)
        self.set_global_rank(self.node_rank() * num_devices + self.local_rank())
        return Cluster(
            name=type(self).__name__,
            rank=self.global_rank(),
            local_rank=self.local_rank(),
            world_size=self.world_size(),
            local_world_size=num_devices,
            node_rank=self.node_rank(),
            num_nodes=num_nodes,
            address=self.main_address,
            port=self.main_port,
        )


class _Known(ClusterEnvironment):
    """The environment of a launcher that Paceline supports."""

    names: ClassVar[tuple[str, ...]]

    @classmethod
    def _read(cls) -> Cluster | None:
        return next((found for name in cls.names if (found := LAUNCHERS[name](os.environ))), None)

    @classmethod
    def detect(cls) -> bool:
        try:
            return cls._read() is not None
        except RuntimeError:  # only some of this launcher's variables are set
            return True

    def _here(self) -> Cluster:
        return self._read() or Cluster(type(self).__name__, 0, 0, 1, 1, 0, 1, "127.0.0.1", 0)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._here().address

    @property
    def main_port(self) -> int:
        return self._here().port

    def world_size(self) -> int:
        return self._here().world_size

    def global_rank(self) -> int:
        return self._here().rank

    def local_rank(self) -> int:
        return self._here().local_rank

    def node_rank(self) -> int:
        return self._here().node_rank

    def cluster(self, num_devices: int, num_nodes: int) -> Cluster | None:
        return find_cluster()


class TorchElasticEnvironment(_Known):
    """The environment of ``torchrun`` and of other launchers that set torchrun's variables."""

    names = ("torchrun",)


class SLURMEnvironment(_Known):
    """The environment of SLURM's ``srun``.

    Args:
        auto_requeue: whether SIGUSR1 requeues the job. To set other signals, use ``Trainer(signals=...)``.
        requeue_signal: must be None; use ``Trainer(signals=...)`` instead.
    """

    names = ("SLURM",)

    def __init__(self, auto_requeue: bool = True, requeue_signal: int | None = None) -> None:
        if requeue_signal is not None:
            raise ValueError(
                f"SLURMEnvironment(requeue_signal={requeue_signal!r}) is not supported. To choose the signal, use "
                "Trainer(signals={'SIGUSR2': 'requeue'})."
            )
        self.auto_requeue = auto_requeue


class LSFEnvironment(_Known):
    """The environment of LSF's ``jsrun``."""

    names = ("LSF",)


class MPIEnvironment(_Known):
    """The environment of Open MPI, Intel MPI and MPICH."""

    names = ("OpenMPI", "Intel MPI")


class KubeflowEnvironment(_Known):
    """The environment of Kubeflow's training operator."""

    names = ("torchrun",)


class LocalEnvironment(_Known):
    """The environment without a launcher: this process starts the other processes on its machine."""

    names = ()

    @property
    def creates_processes_externally(self) -> bool:
        return find_cluster() is not None

    def _here(self) -> Cluster:
        return find_cluster() or super()._here()

    def local_rank(self) -> int:
        """Return this process's rank on its machine; without a launcher, return the value of LOCAL_RANK."""
        return int(os.environ.get("LOCAL_RANK", 0)) if find_cluster() is None else super().local_rank()


#: The environment class for each Cluster name.
KINDS: dict[str, type[ClusterEnvironment]] = {
    "torchrun": TorchElasticEnvironment,
    "SLURM": SLURMEnvironment,
    "LSF": LSFEnvironment,
    "OpenMPI": MPIEnvironment,
    "Intel MPI": MPIEnvironment,
    "MPICH": MPIEnvironment,
    "Kubeflow": KubeflowEnvironment,
}


def of_cluster(cluster: Cluster | None) -> ClusterEnvironment:
    """Return the environment that a Cluster was read from."""
    return LocalEnvironment() if cluster is None else KINDS.get(cluster.name, TorchElasticEnvironment)()
