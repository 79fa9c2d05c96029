"""The fields of FSDP 1 and 2 as arguments of FSDPStrategy: each is honored, refused or said."""

from __future__ import annotations

import functools
import logging
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from paceline.accelerator.plugins import FullyShardedDataParallelPlugin as Plugin
from paceline.settings import resolve
from paceline.strategies import FSDPStrategy

HONORED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"wrap": "auto"}),
    ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, {"wrap": "auto"}),
    ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"wrap": "auto", "reshard_after_forward": False}),
    ({"sharding_strategy": "2"}, {"wrap": "auto", "reshard_after_forward": False}),
    ({"sharding_strategy": "hybrid_shard"}, {"wrap": "auto", "sharding": "hybrid"}),
    (
        {"sharding_strategy": "HYBRID_SHARD_ZERO2"},
        {"wrap": "auto", "sharding": "hybrid", "reshard_after_forward": False},
    ),
    ({"reshard_after_forward": "false"}, {"wrap": "auto", "reshard_after_forward": False}),
    ({"reshard_after_forward": "SHARD_GRAD_OP"}, {"wrap": "auto", "reshard_after_forward": False}),
    ({"auto_wrap_policy": "no_wrap"}, {"wrap": "root"}),
    ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}, {"wrap": 7}),
    ({"auto_wrap_policy": "size_based_wrap"}, {"wrap": 100_000_000}),
    ({"min_num_params": 9}, {"wrap": 9}),
    ({"auto_wrap_policy": "transformer_based_wrap"}, {"wrap": "auto"}),
    ({"transformer_cls_names_to_wrap": "Block, Layer"}, {"wrap": ["Block", "Layer"]}),
    (
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]},
        {"wrap": ["Block"]},
    ),
    ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, {"wrap": (nn.Linear,)}),
    (
        {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.GRU})},
        {"wrap": (nn.GRU,)},
    ),
    ({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=5)}, {"wrap": 5}),
    ({"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 6}, {"wrap": 6}),
    ({"auto_wrap_policy": transformer_auto_wrap_policy}, {"wrap": "auto"}),
    (
        {"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": ["Block"]},
        {"wrap": ["Block"]},
    ),
    ({"cpu_offload": True}, {"wrap": "auto", "cpu_offload": True}),
    ({"cpu_offload": CPUOffload(offload_params=True)}, {"wrap": "auto", "cpu_offload": True}),
    ({"cpu_offload": CPUOffload(offload_params=False)}, {"wrap": "auto"}),
    ({"activation_checkpointing": True}, {"wrap": "auto", "activation_checkpointing": True}),
    ({"ignored_modules": ".*head"}, {"wrap": "auto", "ignored_modules": ".*head"}),
    ({"ignored_modules": []}, {"wrap": "auto"}),
    ({"state_dict_type": "SHARDED_STATE_DICT"}, {"wrap": "auto", "state_dict_type": "sharded"}),
    ({"state_dict_type": StateDictType.FULL_STATE_DICT}, {"wrap": "auto", "state_dict_type": "full"}),
    (
        {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": torch.float32}},
        {"wrap": "auto", "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ),
    (
        {"mixed_precision_policy": "fp16"},
        {
            "wrap": "auto",
            "mixed_precision": MixedPrecisionPolicy(torch.float16, torch.float16, torch.float16),
        },
    ),
    (
        {"mixed_precision_policy": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"wrap": "auto", "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ),
]


@pytest.mark.parametrize(("given", "expected"), HONORED, ids=[str(number) for number in range(len(HONORED))])
def test_fields_become_arguments_of_the_strategy(
    given: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = Plugin(**given).options()
    assert found == expected
    FSDPStrategy(**found)
    assert not caplog.text


def test_policies_that_are_functions_choose_the_same_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))

    def torchs(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or (nonwrapped_numel > 6 and isinstance(module, nn.GRU))

    def ours(name: str, module: nn.Module) -> bool:
        return name == "1"

    lambdas = CustomPolicy(lambda module: isinstance(module, nn.GRU))
    for policy in (torchs, ours, lambdas):
        wrap = Plugin(auto_wrap_policy=policy).options()["wrap"]  # type: ignore[arg-type]
        assert [name for name, module in model.named_modules() if wrap(name, module)] == ["1"]


class Blocks(nn.Sequential):
    _no_split_modules = ("GRU",)


@pytest.mark.parametrize(
    ("given", "wrap"),
    [
        ({"auto_wrap_policy": "transformer_based_wrap"}, (nn.GRU,)),
        ({"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": "Linear"}, (nn.Linear,)),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}, 7),
        ({"auto_wrap_policy": "no_wrap"}, "root"),
        ({}, "auto"),
    ],
)
def test_a_policy_by_name_becomes_torchs_for_a_model(
    given: dict[str, Any], wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = Plugin(**given)
    for _ in range(2):
        plugin.set_auto_wrap_policy(Blocks(nn.Linear(2, 2), nn.GRU(2, 2)))
        with caplog.at_level(logging.INFO):
            assert plugin.options()["wrap"] == wrap
    assert not caplog.text
    assert callable(plugin.auto_wrap_policy) is isinstance(wrap, tuple | int)


def test_a_policy_for_blocks_that_a_model_lacks_is_refused() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linaer"])
    with pytest.raises(ValueError, match=r"'Linaer'. Did you mean 'Linear'.*the classes in Sequential; set transf"):
        plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("asked", [None, False, True, CPUOffload(offload_params=True)])
def test_offloading_becomes_the_policy_that_torch_takes(asked: Any) -> None:
    plugin = Plugin(cpu_offload=asked)
    before = plugin.options()
    plugin.set_cpu_offload()
    assert type(plugin.cpu_offload) is (CPUOffloadPolicy if asked else OffloadPolicy)
    offload = [FSDPStrategy(**given).offload for given in (before, plugin.options())]
    assert offload[0] == offload[1]


def test_a_policy_of_torch_is_passed_on_as_it_is() -> None:
    policy, offload = MixedPrecisionPolicy(output_dtype=torch.float32), CPUOffloadPolicy(pin_memory=False)
    found = Plugin(mixed_precision_policy=policy, cpu_offload=offload).options()
    assert found["mixed_precision"] is policy
    assert found["cpu_offload"] is offload


SAID: list[tuple[str, Any]] = [
    ("fsdp_version", 1),
    ("backward_prefetch", BackwardPrefetch.BACKWARD_POST),
    ("backward_prefetch", "NO_PREFETCH"),
    ("forward_prefetch", True),
    ("limit_all_gathers", False),
    ("use_orig_params", False),
    ("sync_module_states", False),
    ("cpu_ram_efficient_loading", True),
    ("state_dict_config", FullStateDictConfig()),
    ("optim_state_dict_config", FullStateDictConfig()),
]


@pytest.mark.parametrize(("name", "value"), SAID)
def test_fields_without_effect_are_said(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert Plugin(**{name: value}).options() == {"wrap": "auto"}
    assert caplog.text.count("has no effect, because FSDP2 starts") == 1
    assert f"Plugin({name}=" in caplog.text


def test_what_always_happens_may_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Plugin(
            backward_prefetch="BACKWARD_PRE",
            use_orig_params=True,
            sync_module_states=True,
            forward_prefetch=False,
            cpu_ram_efficient_loading=False,
        ).options()
    assert not caplog.text


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"fsdp_version": 3}, ValueError, "the version must be 1 or 2"),
    ({"sharding_strategy": "NO_SHARD"}, ValueError, "shards nothing, which is the same as DDP"),
    ({"sharding_strategy": "FUL_SHARD"}, ValueError, "Did you mean 'FULL_SHARD'"),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, ValueError, "Leave one out"),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "SHARD_GRAD_OP"}, ValueError, "contradict"),
    ({"auto_wrap_policy": "transformer_wrap"}, ValueError, "Did you mean 'TRANSFORMER_BASED_WRAP'"),
    ({"auto_wrap_policy": 3}, TypeError, "is an int. Pass one of 'transformer_based_wrap'"),
    ({"backward_prefetch": "PRE"}, ValueError, "Choose 'BACKWARD_PRE'"),
    ({"state_dict_type": "LOCAL_STATE_DICT"}, ValueError, "Use 'SHARDED_STATE_DICT'"),
    ({"mixed_precision_policy": "bf61"}, ValueError, "Did you mean 'bf16'"),
    ({"mixed_precision_policy": {"param": "bf16"}}, ValueError, "Did you mean 'param_dtype'"),
    ({"mixed_precision_policy": 3}, TypeError, "Pass a torch.distributed.fsdp.MixedPrecisionPolicy"),
    ({"mixed_precision_policy": MixedPrecision(buffer_dtype=torch.bfloat16)}, ValueError, "buffer_dtype"),
    ({"param_init_fn": nn.Module.cpu}, NotImplementedError, "reset_parameters"),
    ({"activation_checkpointing_offload": True}, NotImplementedError, "Use activation_checkpointing alone"),
]


@pytest.mark.parametrize(("given", "kind", "match"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_cannot_be_done_is_refused(given: dict[str, Any], kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match):
        Plugin(**given).options()


def test_no_field_is_left_out_of_the_tests_above() -> None:
    tested = {name for given, *_ in (*HONORED, *REFUSED) for name in given} | {name for name, _ in SAID}
    assert {one.name for one in fields(Plugin)} == tested


def test_what_is_left_open_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
    }.items():
        monkeypatch.setenv(name, value)
    given = Plugin(state_dict_type="FULL_STATE_DICT", activation_checkpointing=False)
    assert given.filled(resolve()).options() == {
        "sharding": "hybrid",
        "cpu_offload": True,
        "wrap": ["Block"],
        "state_dict_type": "full",
    }


def test_the_settings_defaults_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert Plugin().filled(resolve()).options() == {"wrap": "auto"}
    assert not caplog.text
