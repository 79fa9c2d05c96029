"""No argument of an Accelerator, its plugins and its loaders is ignored without a word."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import network
from rank_processes import ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from paceline import Accelerator, PartialState
from paceline.accelerator.general_tracker import GeneralTracker
from paceline.accelerator.kwargs_handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from paceline.accelerator.loaders import DataLoaderConfiguration
from paceline.accelerator.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from paceline.accelerator.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from paceline.accelerator.process_state import AcceleratorState, forgotten
from paceline.big_model.loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
from paceline.compat.accelerate import accelerator as compat
from paceline.compat.accelerate import big_model, deepspeed, environment, loader_classes, processes
from paceline.strategies.base import Strategy


@pytest.fixture(autouse=True)
def _no_state() -> Iterator[None]:
    with forgotten():
        yield


class _Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = False
    tracker = None


def _accelerator(**given: Any) -> Accelerator:
    return Accelerator(cpu=True, **given)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(network().parameters(), lr=0.1)


def _slice(*_: Any, **__: Any) -> None: ...


def _load_with_map_location() -> None:
    accelerator = _accelerator()
    accelerator.prepare(network())
    accelerator.load_state(accelerator.save_state("state"), load_kwargs={"map_location": "cpu"})


def _again() -> None:
    PartialState(cpu=True)
    PartialState(backend="nccl")


def _latest() -> None:
    _accelerator()
    AcceleratorState(deepspeed_plugin="mine")


def _trackers(**given: Any) -> None:
    accelerator = _accelerator(log_with=[_Mine()])
    accelerator.init_trackers("project", **given)


def _weights(load: Callable[..., Any], **given: Any) -> None:
    torch.save(network().state_dict(), "weights.bin")
    load(network(), "weights.bin", **given)


def _order(**given: Any) -> None:
    loader_classes.prepared(DataLoader([1], shuffle=True), Strategy("cpu"), DataLoaderConfiguration(**given))


def _states(**given: Any) -> None:
    accelerator = compat.Accelerator(cpu=True, project_config=ProjectConfiguration(**given))
    for name in ("one", "two"):
        accelerator.save_state(name)
    assert Path("one").exists()


#: What is called, the argument that has no effect as a message names it, and a word of the reason.
IGNORED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: _accelerator().prepare_data_loader(DataLoader([1]), slice_fn_for_dispatch=_slice), "slice_fn", "its own"),
    (lambda: _accelerator().prepare_optimizer(_optimizer(), False), "device_placement=False", "parameters"),
    (lambda: _accelerator().save_state("state", safe_serialization=False), "safe_serialization=False", "one file"),
    (_load_with_map_location, "map_location='cpu'", "device"),
    (_again, "backend='nccl'", "already"),
    (_latest, "deepspeed_plugin='mine'", "latest Accelerator"),
    (lambda: _trackers(init_kwargs={"mine": {"a": 1}}), "mine={'a': 1}", "existing tracker object"),
    (lambda: _trackers(init_kwargs={"wandb": {}}), "init_kwargs(wandb=", "log_with"),
    (lambda: _accelerator(kwargs_handlers=[GradScalerKwargs()]), "GradScalerKwargs(", "'fp16' scales"),
    (lambda: _accelerator(kwargs_handlers=[AutocastKwargs()]), "AutocastKwargs(", "'bf16' use autocast"),
    (lambda: DistributedDataParallelKwargs(dim=1), "dim=1", "one device"),
    (lambda: DistributedDataParallelKwargs(check_reduction=True), "check_reduction=True", "always"),
    (lambda: GradientAccumulationPlugin(adjust_scheduler=False), "adjust_scheduler=False", "once per update"),
    (lambda: _accelerator(dynamo_plugin=TorchDynamoPlugin(mode="default")), "mode='default'", "no backend"),
    (lambda: ParallelismConfig(sp_handler=DeepSpeedSequenceParallelConfig()), "sp_handler=", "without DeepSpeed"),
    (lambda: ParallelismConfig(cp_handler=TorchContextParallelConfig()).options(), "cp_handler=", "cp_size is 1"),
    (lambda: TorchContextParallelConfig("alltoall"), "cp_comm_strategy='alltoall'", "always gathered"),
    (lambda: ParallelismConfig(tp_handler=TorchTensorParallelConfig()).options(), "tp_handler=", "tp_size is 1"),
    *(
        (lambda one=one: FullyShardedDataParallelPlugin(**one).options(), next(iter(one)), "FSDP2")
        for one in (
            {"fsdp_version": 1},
            {"backward_prefetch": "NO_PREFETCH"},
            {"forward_prefetch": True},
            {"limit_all_gathers": False},
            {"use_orig_params": False},
            {"sync_module_states": False},
            {"cpu_ram_efficient_loading": True},
            {"state_dict_config": {"a": 1}},
            {"optim_state_dict_config": {"a": 1}},
        )
    ),
    *(
        (lambda one=one: FullyShardedDataParallelPlugin(**one).options(), list(one)[-1], why)
        for one, why in (
            ({"transformer_cls_names_to_wrap": "Linear", "min_num_params": 9}, "transformer_cls_names_to_wrap decides"),
            ({"auto_wrap_policy": "no_wrap", "min_num_params": 8}, "auto_wrap_policy='no_wrap' decides"),
            ({"auto_wrap_policy": "transformer_based_wrap", "min_num_params": 7}, "'transformer_based_wrap' decides"),
            ({"auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": ["A"]}, "'size_based_wrap'"),
            (
                {"auto_wrap_policy": ModuleWrapPolicy([nn.Linear]), "transformer_cls_names_to_wrap": "A"},
                "auto_wrap_policy decides",
            ),
        )
    ),
    (lambda: DeepSpeedPlugin(is_train_batch_min=False).options(), "is_train_batch_min=False", "batch size"),
    (lambda: DeepSpeedPlugin(zero3_init_flag=True).options(), "zero3_init_flag=True", "when they are prepared"),
    (lambda: DeepSpeedPlugin(zero3_save_16bit_model=True).options(), "zero3_save_16bit_model=True", "saving"),
    (lambda: deepspeed.DummyOptim([], eps=1), "eps=1", "file"),
    (lambda: deepspeed.DummyScheduler(None, power=1), "power=1", "file"),
    (lambda: environment.write_basic_config(save_location="basic.yaml", use_xpu=True), "use_xpu=True", "file"),
    (lambda: loader_classes.DataLoaderShard([1], torch_device_mesh="mesh"), "torch_device_mesh='mesh'", "run"),
    (lambda: processes.prepare_data_loader(DataLoader([1]), torch_device_mesh="mesh"), "torch_device_mesh", "run"),
    (lambda: processes.prepare_data_loader(DataLoader([1]), slice_fn_for_dispatch=_slice), "slice_fn", "its own"),
    (lambda: processes.prepare_data_loader(DataLoader([1]), "meta", put_on_device=True), "device='meta'", "cpu"),
    (
        lambda: _weights(load_checkpoint_in_model, full_state_dict=False),
        "in_model(full_state_dict=False",
        "each process",
    ),
    (lambda: _weights(load_checkpoint_and_dispatch, broadcast_from_rank0=True), "from_rank0=True", "each process"),
    (lambda: _weights(load_checkpoint_and_dispatch, offload_state_dict=True), "offload_state_dict", "one chunk"),
    (lambda: big_model.attach_execution_device_hook(network(), "cpu", tied_params_map={1: {}}), "{1: {}}", "memory"),
    (lambda: _order(data_seed=7), "data_seed=7", "use_seedable_sampler is False"),
    (lambda: _states(total_limit=1), "total_limit=1", "the script names"),
]


@pytest.mark.parametrize(("call", "argument", "why"), IGNORED, ids=[one[1] for one in IGNORED])
def test_an_argument_without_effect_is_reported_with_its_value_and_the_reason(
    call: Callable[[], Any], argument: str, why: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "paceline"):
        call()
    (said,) = {line for line in caplog.messages if " has no effect, because " in line}
    before, _, after = said.partition(" has no effect, because ")
    assert argument in before
    assert why in after


def _defaults() -> None:
    accelerator = _accelerator(
        rng_types=["generator"],
        kwargs_handlers=[DistributedDataParallelKwargs()],
        project_config=ProjectConfiguration(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(),
        dynamo_plugin=TorchDynamoPlugin(),
        parallelism_config=ParallelismConfig(),
    )
    accelerator.prepare_optimizer(_optimizer(), True)
    accelerator.prepare_data_loader(DataLoader([1]), True, None)
    accelerator.load_state(accelerator.save_state("state", safe_serialization=True), {"weights_only": True})
    FullyShardedDataParallelPlugin(backward_prefetch="BACKWARD_PRE", use_orig_params=True).options()
    DeepSpeedPlugin().options()


def test_nothing_is_said_about_defaults(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "paceline"):
        _defaults()
    assert "no effect" not in caplog.text


def test_a_function_that_slices_dispatched_batches_is_refused() -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)

    def refused(rank_function: Callable[[], Any]) -> str:
        with pytest.raises(NotImplementedError) as caught:
            rank_function()
        return str(caught.value)

    def both() -> list[str]:
        accelerator = _accelerator(dataloader_config=config)
        loader = DataLoader(range(4))  # type: ignore[arg-type]
        return [
            refused(lambda: accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=_slice)),
            refused(lambda: loader_classes.DataLoaderDispatcher(range(4), slice_fn=_slice)),
        ]

    for ours, theirs in ranks(2, both):
        assert ours.startswith("accelerator.prepare_data_loader(slice_fn_for_dispatch=...) is not supported")
        assert theirs.startswith("DataLoaderDispatcher(slice_fn=...) is not supported")


def _shared_random_states(kinds: list[str]) -> list[float]:
    accelerator = _accelerator(rng_types=kinds)
    loader = accelerator.prepare(DataLoader(range(4)))  # type: ignore[arg-type]
    torch.manual_seed(accelerator.process_index)
    iter(loader)
    return torch.rand(3).tolist()


def test_ranks_share_the_random_states_of_rng_types() -> None:
    first, second = ranks(2, _shared_random_states, ["torch", "generator"])
    assert first == second
    first, second = ranks(2, _shared_random_states, ["generator"])
    assert first != second
    with pytest.raises(ValueError, match=r"Unknown Accelerator\(rng_types=\[...\]\) entry 'tortch'"):
        _accelerator(rng_types=["tortch"])
