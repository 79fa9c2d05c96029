"""How a launcher tells a process its rank, as objects; a user's own is a plugin of the Trainer."""

from __future__ import annotations

import os
from typing import Any

import pytest
from rank_processes import own_port, ranks
from tiny import QUIET, TinyModule, tiny_loader

from paceline import Trainer
from paceline.processes.environments import (
    ClusterEnvironment,
    LocalEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    of_cluster,
)

SETTINGS: dict[str, Any] = QUIET | {"max_epochs": 1}


def test_a_known_launcher_is_detected_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not TorchElasticEnvironment.detect()
    assert isinstance(of_cluster(None), LocalEnvironment)
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**told, "MASTER_ADDR": "there", "MASTER_PORT": "12345"}.items():
        monkeypatch.setenv(name, value)
    found = TorchElasticEnvironment()
    assert TorchElasticEnvironment.detect()
    assert not SLURMEnvironment.detect()
    assert (found.global_rank(), found.local_rank(), found.world_size(), found.node_rank()) == (1, 1, 2, 0)
    assert (found.main_address, found.main_port, found.creates_processes_externally) == ("there", 12345, True)


def test_variables_that_are_incomplete_are_still_this_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert TorchElasticEnvironment.detect()


class Mine(ClusterEnvironment):
    """The environment of a launcher that Paceline does not know."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size, self.port = rank, size, port
        self.torn_down = 0

    creates_processes_externally = True  # type: ignore[assignment]
    main_address = "127.0.0.1"  # type: ignore[assignment]

    @property
    def main_port(self) -> int:
        return self.port

    def world_size(self) -> int:
        return self.size

    def global_rank(self) -> int:
        return self.rank

    def local_rank(self) -> int:
        return self.rank

    def node_rank(self) -> int:
        return 0

    def teardown(self) -> None:
        self.torn_down += 1


def fit_as(rank: int, port: int) -> tuple[int, int, str, int]:
    mine = Mine(rank, 2, port)
    trainer = Trainer(**SETTINGS, strategy="ddp", devices=2, plugins=[mine])
    trainer.fit(TinyModule(), tiny_loader())
    return trainer.global_rank, trainer.world_size, type(trainer.strategy.cluster_environment).__name__, mine.torn_down


def _on_rank(port: int) -> Any:
    rank = int(os.environ["RANK"])
    told = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC") or name in told]:
        del os.environ[name]
    return fit_as(rank, port)


def test_a_users_environment_says_who_is_who_and_is_torn_down() -> None:
    with own_port() as port:
        assert ranks(2, _on_rank, port) == [(0, 2, "Mine", 1), (1, 2, "Mine", 1)]
