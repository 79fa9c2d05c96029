"""The FSDP plugin of programs for Accelerate: its fields are read as torch takes them, and may be set later."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from paceline.accelerator.plugins import FullyShardedDataParallelPlugin as Plain
from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.details import get_parameters_from_modules
from paceline.compat.accelerate.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin
from paceline.compat.accelerate.models import fsdp2_prepare_model

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
#: Fields as they are written, and as they are read.
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {},
        {
            "fsdp_version": 2,
            "sharding_strategy": None,
            "reshard_after_forward": True,
            "auto_wrap_policy": None,
            "cpu_offload": OffloadPolicy(),
            "mixed_precision_policy": None,
            "activation_checkpointing": False,
            "activation_checkpointing_offload": False,
            "cpu_ram_efficient_loading": False,
            "state_dict_type": StateDictType.FULL_STATE_DICT,
            "state_dict_config": FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            "optim_state_dict_config": FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        },
    ),
    ({"fsdp_version": 1, "backward_prefetch": "BACKWARD_PRE"}, {"fsdp_version": 2, "backward_prefetch": None}),
    (
        {"sharding_strategy": "shard_grad_op"},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "reshard_after_forward": False},
    ),
    ({"reshard_after_forward": "SHARD_GRAD_OP"}, {"sharding_strategy": None, "reshard_after_forward": False}),
    ({"auto_wrap_policy": "transformer_based_wrap"}, {"auto_wrap_policy": transformer_auto_wrap_policy}),
    (
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "7"},
        {"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 7},
    ),
    ({"auto_wrap_policy": "NO_WRAP"}, {"auto_wrap_policy": None}),
    ({"transformer_cls_names_to_wrap": "Block, Layer"}, {"transformer_cls_names_to_wrap": ["Block", "Layer"]}),
    ({"cpu_offload": True}, {"cpu_offload": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())}),
    ({"mixed_precision_policy": "bf16"}, {"mixed_precision_policy": BF16}),
    ({"activation_checkpointing": "true"}, {"activation_checkpointing": True}),
    (
        {"state_dict_type": "sharded_state_dict"},
        {
            "state_dict_type": StateDictType.SHARDED_STATE_DICT,
            "state_dict_config": ShardedStateDictConfig(offload_to_cpu=True),
            "optim_state_dict_config": ShardedOptimStateDictConfig(offload_to_cpu=True),
        },
    ),
]


@pytest.mark.parametrize(("given", "expected"), READ, ids=[str(number) for number in range(len(READ))])
def test_fields_are_read_as_torch_takes_them_and_do_what_was_written(
    given: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plugin = Plugin(**given)
    assert {name: getattr(plugin, name) for name in expected} == expected
    assert not caplog.text
    for one in (plugin, copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin)), plugin.filled({})):
        assert one.arguments() == Plain(**given).arguments()


def test_what_is_left_open_shows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert Plugin().state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert isinstance(Plugin().cpu_offload, CPUOffloadPolicy)
    assert Plugin(state_dict_type="FULL_STATE_DICT").state_dict_type is StateDictType.FULL_STATE_DICT


def test_what_is_shown_is_not_taken_for_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert Plugin().options() == {"wrap": "auto"}
        assert not caplog.text
        Plugin(use_orig_params=False, fsdp_version=1).options()
    assert "FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False) has no effect" in caplog.text


def test_an_unknown_word_is_refused_when_the_plugin_is_created() -> None:
    with pytest.raises(ValueError, match="Did you mean 'FULL_STATE_DICT'"):
        Plugin(state_dict_type="FUL_STATE_DICT")


def test_methods_and_fields_change_what_is_read_and_what_is_done() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"])
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp16")
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(1, 1)))
    plugin.activation_checkpointing = True
    assert plugin.mixed_precision_policy == BF16
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.Linear}}  # type: ignore[union-attr]
    assert plugin.arguments() == {
        "wrap": (nn.Linear,),
        "mixed_precision": BF16,
        "state_dict_type": "sharded",
        "activation_checkpointing": True,
    }


def _wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def _prepared_after_changes() -> tuple[list[list[str]], Any, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(auto_wrap_policy="no_wrap"))
    plugin = accelerator.state.fsdp_plugin
    found = [_wrapped(accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))))]
    plugin.auto_wrap_policy = lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.GRU)
    found.append(_wrapped(accelerator.prepare_model(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)))))
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)))
    return found, model(torch.ones(1, 2))[0].dtype, accelerator.strategy.mixed_precision  # type: ignore[attr-defined]


def test_changes_hold_for_models_that_are_prepared_later() -> None:
    found, dtype, policy = ranks(2, _prepared_after_changes)[0]
    assert found == [[], ["1"]]
    assert (dtype, policy) == (torch.bfloat16, BF16)


def _from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    plugin = Accelerator(cpu=True).state.fsdp_plugin
    return type(plugin).__module__, plugin.fsdp_version


def test_the_plugin_of_a_launcher_is_read_as_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks(1, _from_the_launcher, monkeypatch)[0] == ("paceline.compat.accelerate.fsdp_plugin", 2)


def _sharded_by_the_script() -> Any:
    """Shard a model that is not trained with the plugin's fields, as trl does with a reference model."""
    plugin = Accelerator(cpu=True, fsdp_plugin=Plugin(mixed_precision_policy="bf16")).state.fsdp_plugin
    model = nn.Linear(2, 2)
    policy = plugin.mixed_precision_policy
    fully_shard(
        model,
        reshard_after_forward=plugin.reshard_after_forward,
        offload_policy=plugin.cpu_offload,
        mp_policy=policy,
        ignored_params=get_parameters_from_modules(plugin.ignored_modules, model, "cpu"),
    )
    return model(torch.ones(1, 2)).dtype


def test_a_script_can_shard_another_model_with_the_fields() -> None:
    assert ranks(2, _sharded_by_the_script) == [torch.bfloat16] * 2


def _reference(folder: Path) -> Any:
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin())
    model, reference = nn.Linear(2, 1), nn.Linear(2, 1)
    inputs = torch.ones(1, 2)
    expected = reference(inputs).item()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = fsdp2_prepare_model(accelerator, reference)
    loss = model(inputs).sum() - reference(inputs).detach().sum()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.save_state(folder)
    sharded = isinstance(reference.weight, DTensor)
    return sharded, reference(inputs).item() == pytest.approx(expected), len(accelerator._models)


def test_a_reference_model_is_sharded_and_not_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert ranks(2, _reference, tmp_path / "state") == [(True, True, 1)] * 2
