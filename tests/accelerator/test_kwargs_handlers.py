"""Handlers: what of them differs, how they are sorted, and what reaches torch."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.enums import DDPCommunicationHookType, DistributedType, PrecisionType
from paceline.accelerator.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
    sort_handlers,
)
from paceline.accelerator.parallelism_config import ParallelismConfig
from paceline.accelerator.plugins import TorchDynamoPlugin
from paceline.strategies import MixedPrecision, SingleDevice


def test_kwargs_are_what_differs_from_the_default() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=1024.0, growth_interval=7).to_kwargs() == {
        "init_scale": 1024.0,
        "growth_interval": 7,
    }
    assert GradScalerKwargs(growth_factor=3.0).to_dict()["backoff_factor"] == 0.5


def test_words_equal_plain_strings_and_are_found_in_upper_and_lower_case() -> None:
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert f"{PrecisionType('BF16')} {PrecisionType.NO!s}" == "bf16 no"
    assert DDPCommunicationHookType("POWER_SGD") is DDPCommunicationHookType.POWER_SGD
    with pytest.raises(ValueError, match=r"Unknown PrecisionType 'bf61'. Did you mean 'bf16'\? Choose 'no', 'fp8'"):
        PrecisionType("bf61")


def test_handlers_are_sorted_by_what_they_are_for() -> None:
    handlers: list[KwargsHandler] = [
        ProfileKwargs(),
        AutocastKwargs(),
        DistributedDataParallelKwargs(),
        GradScalerKwargs(),
        InitProcessGroupKwargs(),
    ]
    found = sort_handlers(handlers)
    assert [found.profile, found.autocast, found.ddp, found.grad_scaler, found.process_group] == handlers
    assert sort_handlers(None) == sort_handlers([])


def test_e8_two_handlers_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has two GradScalerKwargs: .*init_scale=1.0.*init_scale=2.0"):
        sort_handlers([GradScalerKwargs(init_scale=1.0), AutocastKwargs(), GradScalerKwargs(init_scale=2.0)])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (3, "got 3, which is not a handler. Pass AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, "),
        (None, "got None"),
        (AutocastKwargs, r"Did you mean AutocastKwargs\(\)\?"),
        (TorchDynamoPlugin(), r"Pass it as Accelerator\(dynamo_plugin=...\)"),
        (ParallelismConfig(), r"Pass it as Accelerator\(parallelism_config=...\)"),
    ],
)
def test_e8_what_is_no_handler_is_refused_and_the_handlers_are_named(given: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        sort_handlers([given])


def test_a_handler_outside_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match="Pass a list of handlers"):
        sort_handlers(AutocastKwargs())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MSAMPRecipeKwargs, FP8RecipeKwargs])
def test_recipes_for_8_bits_of_other_packages_can_be_made_but_not_used(kind: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{kind.__name__}.*not supported. Pass AORecipeKwargs"):
        sort_handlers([kind()])
    with pytest.raises(ValueError, match=r"has two 8-bit recipes: AORecipeKwargs\(.*TERecipeKwargs\("):
        sort_handlers([AORecipeKwargs(), TERecipeKwargs()])


def test_ddp_options_are_those_of_the_strategy() -> None:
    given = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        static_graph=True,
        comm_hook="power_sgd",
        comm_wrapper=DDPCommunicationHookType.FP16,
        comm_state_option={"matrix_approximation_rank": 2},
    )
    assert given.options() == {
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "ddp_comm_hook": "powersgd",
        "ddp_comm_state": {"matrix_approximation_rank": 2},
        "ddp_comm_wrapper": "fp16",
    }
    assert given.to_kwargs() == {"gradient_as_bucket_view": True, "static_graph": True}
    assert DistributedDataParallelKwargs().options() == {}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"comm_hook": "fp61"}, "Unknown DDPCommunicationHookType 'fp61'. Did you mean 'fp16'"),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "is not supported. Choose 'no', 'fp16' or 'bf16'"),
        ({"comm_wrapper": "fp16"}, "have no effect without comm_hook"),
        ({"comm_state_option": {"a": 1}}, "have no effect without comm_hook"),
        ({"comm_hook": "fp16", "comm_state_option": {"a": 1}}, "is for PowerSGD, but comm_hook is 'fp16'"),
    ],
)
def test_communication_hooks_that_cannot_work_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DistributedDataParallelKwargs(**given)


def _compressed() -> tuple[int, float]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    DistributedDataParallelKwargs(comm_hook="fp16").register_comm_hook(model)
    rank = torch.distributed.get_rank()
    model(torch.full((1, 1), 1.0 + rank * 2**-13)).sum().backward()
    DistributedDataParallelKwargs().register_comm_hook(model)
    with pytest.raises(TypeError, match="got a Linear, which does not average gradients"):
        DistributedDataParallelKwargs(comm_hook="fp16").register_comm_hook(nn.Linear(1, 1))
    return rank, model.module.weight.grad.item()


def test_a_handler_registers_its_hook_on_a_model_that_the_script_wrapped() -> None:
    def joined() -> Any:
        Accelerator(cpu=True)
        return _compressed()

    assert ranks(2, joined) == [(0, 1.0), (1, 1.0)]  # 16 bits have no room for 2**-13


def test_a_hook_that_torch_has_broken_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Use comm_hook='power_sgd'"):
        DistributedDataParallelKwargs(comm_hook="batched_power_sgd")


def test_e1_process_group_options_hold_what_is_given() -> None:
    given = InitProcessGroupKwargs(backend="gloo", init_method="env://?use_libuv=False", timeout=timedelta(seconds=9))
    assert given.options() == {
        "process_group_backend": "gloo",
        "init_method": "env://?use_libuv=False",
        "timeout": timedelta(seconds=9),
    }
    assert InitProcessGroupKwargs().options() == {}
    with pytest.raises(TypeError, match=r"timeout=600 is an int. Pass a datetime.timedelta.*timedelta\(seconds=600\)"):
        InitProcessGroupKwargs(timeout=600)  # type: ignore[arg-type]


def test_an_autocast_handler_changes_one_block() -> None:
    strategy = SingleDevice("cpu", MixedPrecision("bf16-mixed"))
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with strategy.precision.forward_context():
        assert layer(x).dtype is torch.bfloat16
    with AutocastKwargs(enabled=False).context(strategy):
        assert layer(x).dtype is torch.float32
    with AutocastKwargs(cache_enabled=False).context(strategy):
        assert layer(x).dtype is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
    with AutocastKwargs().context(SingleDevice("cpu")):
        assert layer(x).dtype is torch.float32


def test_a_profiler_is_built_with_what_is_given() -> None:
    traces: list[Any] = []
    given = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 0, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: traces.append(profiler.step_num),
        record_shapes=True,
        profile_memory=True,
    )
    with given.build() as profiler:
        for _ in range(4):
            torch.ones(3, 5) @ torch.ones(5, 2)
            profiler.step()
    assert traces == [3]
    assert (profiler.record_shapes, profiler.profile_memory, profiler.with_stack) == (True, True, False)
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}
    with ProfileKwargs().build() as profiler:
        torch.ones(3, 5) @ torch.ones(5, 2)
    assert any("mm" in event.key for event in profiler.key_averages())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"activities": ["cpu", "gpu"]}, "Unknown ProfileKwargs activity 'gpu'"),
        ({"schedule_option": {"wait": 1}}, "does not set the number of steps to record. Add the key 'active'"),
        ({"schedule_option": {"activ": 1}}, "Did you mean 'active'"),
    ],
)
def test_a_profiler_that_cannot_be_built_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ProfileKwargs(**given).build()


# ---- ProfileKwargs.record -----------------------------------------------------------------------------------------


def operations(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def profiled(folder: str) -> int:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any(event.key == "aten::mm" for event in profiler.key_averages())
    return len(list(Path(folder).glob("*.json")))


def test_b21_every_process_writes_its_trace_and_all_wait_for_them(tmp_path: Path) -> None:
    assert ranks(2, profiled, str(tmp_path / "made")) == [2, 2]
    for rank in (0, 1):
        assert "aten::mm" in operations(tmp_path / "made" / f"profile_{rank}.json")


def test_a_schedule_that_repeats_gives_a_trace_for_each_cycle_and_calls_the_users_handler(tmp_path: Path) -> None:
    seen: list[Any] = []
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 2}
    handler = ProfileKwargs(
        activities=["cpu"], schedule_option=schedule, on_trace_ready=seen.append, output_trace_dir=tmp_path
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cuda"])])
    with accelerator.profile(handler) as profiler:
        for size in range(1, 9):
            torch.zeros(size).add_(1) if size < 4 else torch.zeros(size).mul_(2)
            profiler.step()
    assert seen == [profiler, profiler]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["profile_0.json", "profile_0_1.json"]
    assert "aten::add_" in operations(tmp_path / "profile_0.json")
    assert "aten::mul_" in operations(tmp_path / "profile_0_1.json")


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    with Accelerator(cpu=True).profile(ProfileKwargs(activities=["cpu"])) as profiler:
        torch.ones(2).exp()
    assert "aten::exp" in {event.key for event in profiler.key_averages()}
    assert not list(tmp_path.iterdir())
