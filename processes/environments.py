"""Cluster environments for ``Trainer(plugins=[...])``: objects that read a process's rank from its launcher."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar

from .cluster_environment import LAUNCHERS, Cluster, find_cluster


class ClusterEnvironment(ABC):
    """Base class for your own launcher's environment: the rank of each process, and where the processes meet.

    Paceline detects the launchers that it knows; they need no plugin.
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether the launcher started every process; if False, this process starts the others on its machine."""

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
        """Whether this launcher has started this process."""
        return False

    @abstractmethod
    def world_size(self) -> int:
        """The number of processes."""

    @abstractmethod
    def global_rank(self) -> int:
        """Rank of this process among all processes, 0-based."""

    @abstractmethod
    def local_rank(self) -> int:
        """Rank of this process on its machine, 0-based."""

    @abstractmethod
    def node_rank(self) -> int:
        """Index of this machine, 0-based."""

    def set_world_size(self, size: int) -> None:
        """Called with the number of processes that the Trainer's arguments ask for."""

    def set_global_rank(self, rank: int) -> None:
        """Called with the rank computed from the node rank and local rank."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer's arguments contradict the processes that the launcher started."""

    def teardown(self) -> None:
        """Called when a run ends."""

    def cluster(self, num_devices: int, num_nodes: int) -> Cluster | None:
        """This environment as a :class:`Cluster`; None if this process starts the others.

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
    """An environment that Paceline reads itself."""

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
    """``torchrun`` and everything that sets its variables."""

    names = ("torchrun",)


class SLURMEnvironment(_Known):
    """SLURM's ``srun``.

    Args:
        auto_requeue: whether SIGUSR1 requeues the job; ``Trainer(signals=...)`` sets what signals do.
        requeue_signal: must be None; see ``Trainer(signals=...)``.
    """

    names = ("SLURM",)

    def __init__(self, auto_requeue: bool = True, requeue_signal: int | None = None) -> None:
        if requeue_signal is not None:
            raise ValueError(
                f"SLURMEnvironment(requeue_signal={requeue_signal!r}): use Trainer(signals={{'SIGUSR2': 'requeue'}}) "
                "to choose the signal."
            )
        self.auto_requeue = auto_requeue


class LSFEnvironment(_Known):
    """LSF's ``jsrun``."""

    names = ("LSF",)


class MPIEnvironment(_Known):
    """Open MPI, Intel MPI and MPICH."""

    names = ("OpenMPI", "Intel MPI")


class KubeflowEnvironment(_Known):
    """Kubeflow's training operator."""

    names = ("torchrun",)


class LocalEnvironment(_Known):
    """No launcher: this process starts the others on its machine."""

    names = ()

    @property
    def creates_processes_externally(self) -> bool:
        return find_cluster() is not None

    def _here(self) -> Cluster:
        return find_cluster() or super()._here()

    def local_rank(self) -> int:
        """Rank of this process on its machine; falls back to LOCAL_RANK if no launcher was found."""
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
    """The environment that a Cluster was read from."""
    return LocalEnvironment() if cluster is None else KINDS.get(cluster.name, TorchElasticEnvironment)()
