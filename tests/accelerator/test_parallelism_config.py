"""Sizes of dimensions: their product, their mesh, and the strategy that they ask for."""

from __future__ import annotations

from typing import Any

import pytest
from rank_processes import ranks

from paceline.accelerator.parallelism_config import ParallelismConfig, TorchTensorParallelConfig
from paceline.accelerator.process_state import PartialState
from paceline.settings import resolve
from paceline.strategies.options import Options


def test_j6_the_product_of_the_sizes_must_be_the_number_of_processes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, tp_size=3)
    options = Options(mesh=config.options(), written={"mesh": config.written})
    options.check_size(6)
    with pytest.raises(ValueError, match=r"dp_replicate_size=2, tp_size=3\) needs 6 processes, but this run has 4"):
        options.check_size(4)


def test_sizes_and_names_of_dimensions() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=4, tp_size=5)
    assert config.total_size == 120
    assert (config.data_parallel_size, config.non_data_parallel_size) == (6, 20)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "cp", "tp"]
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert sorted(config.non_dp_dim_names) == ["cp", "tp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    on = [config.dp_replicate_enabled, config.dp_shard_enabled, config.cp_enabled, config.tp_enabled]
    assert on == [True] * 4
    alone = ParallelismConfig()
    assert (alone.total_size, alone.active_mesh_dims, alone.sp_enabled) == (1, [], False)
    assert config.to_json()["tp_size"] == 5


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"tp_size": True}, "tp_size=True"),
        ({"dp_shard_size": "2"}, "dp_shard_size='2'"),
        ({"cp_size": 2, "sp_size": 2}, "both split sequences"),
        ({"cp_backend": "ring"}, "Unknown cp_backend for ParallelismConfig 'ring'. Choose 'torch'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ParallelismConfig(**given)


def test_what_is_left_open_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    found = ParallelismConfig(dp_shard_size=1).filled(resolve())
    assert (found.dp_shard_size, found.tp_size, found.cp_size) == (1, 2, 1)


def test_arguments_of_the_strategy() -> None:
    plan = {"a": "colwise"}
    config = ParallelismConfig(
        dp_shard_size=2,
        tp_size=2,
        tp_handler=TorchTensorParallelConfig(plan=plan),
    )
    assert config.options() == {
        "data_parallel_replicate": 1,
        "data_parallel_shard": 2,
        "tensor_parallel": 2,
        "plan": plan,
    }


def test_what_there_is_not_is_refused() -> None:
    for given in (ParallelismConfig(sp_size=2), ParallelismConfig(cp_size=2)):
        with pytest.raises(NotImplementedError, match=r"p_size=2\) splits sequences.*context_parallel=...\)"):
            given.options()
    with pytest.raises(NotImplementedError, match="enable_async_tp"):
        ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(enable_async_tp=True)).options()


def test_the_mesh_has_the_active_dimensions_and_the_flattened_ones() -> None:
    def build() -> Any:
        state = PartialState()
        config = ParallelismConfig(dp_shard_size=2)
        assert ParallelismConfig().get_device_mesh("cpu") is None
        assert config.get_device_mesh() is None
        mesh = config.get_device_mesh("cpu")
        assert mesh is not None
        assert config.get_device_mesh() is mesh
        flat = mesh["dp_shard_cp"].size()
        state.wait_for_everyone()
        return mesh.mesh_dim_names, tuple(mesh.shape), flat, mesh.get_local_rank()

    assert ranks(2, build) == [(("dp_shard",), (2,), 2, 0), (("dp_shard",), (2,), 2, 1)]
