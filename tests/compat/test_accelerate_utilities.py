"""What programs written for Accelerate use beside the loop: states, settings in the environment, utilities."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from paceline import PartialState
from paceline.accelerator.models import unwrap_model
from paceline.accelerator.operations import CannotPadNestedTensorWarning, pad_across_processes
from paceline.accelerator.plugins import FullyShardedDataParallelPlugin
from paceline.accelerator.process_state import AcceleratorState
from paceline.big_model.device_map import check_coverage
from paceline.compat.accelerate import configs, memory, names, values, wrappers
from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.environment import purge_accelerate_environment, str_to_bool
from paceline.compat.accelerate.gradient_state import GradientState
from paceline.compat.accelerate.processes import reduce
from paceline.strategies.base import Strategy


@pytest.fixture(autouse=True)
def no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- states ----------------------------------------------------------------------------------------------------------


def test_a_gradient_state_can_be_reset_and_exists_without_an_accelerator() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4).gradient_state
    assert GradientState() is first
    GradientState._reset_state()
    assert GradientState() is not first
    assert GradientState() is GradientState()
    assert GradientState().num_steps == 1
    assert GradientState().sync_gradients
    second = Accelerator(cpu=True)
    assert GradientState() is second.gradient_state
    assert (first.plugin_kwargs, second.gradient_state.plugin_kwargs) == ({"num_steps": 4}, {"num_steps": 1})


def test_debug_can_be_set_until_the_state_is_reset() -> None:
    PartialState(cpu=True).debug = True
    assert PartialState().debug
    PartialState._reset_state()
    assert not PartialState(cpu=True).debug


def test_everything_prepared_is_marked() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, optimizer, schedule, DataLoader([1.0]))  # type: ignore[arg-type]
    assert all(one._is_accelerate_prepared for one in prepared)
    assert accelerator.prepare_model(nn.Linear(1, 1))._is_accelerate_prepared
    assert "_is_accelerate_prepared" not in accelerator.get_state_dict(model)
    AcceleratorState._reset_state()
    assert accelerator.prepare(DataLoader([1.0]))._is_accelerate_prepared  # type: ignore[arg-type]


def test_the_environment_can_choose_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:64")
    assert PartialState().device == torch.device("cpu:64")
    assert Accelerator().prepare(nn.Linear(1, 1))(torch.ones(1)).device.type == "cpu"


# ---- configurations --------------------------------------------------------------------------------------------------


def test_a_parallelism_config_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for dim, size in {"DP_REPLICATE": 2, "DP_SHARD": 3, "TP": 4, "CP": 5}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{dim}_SIZE", str(size))
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = configs.ParallelismConfig(dp_shard_size=6)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.cp_size) == (2, 6, 4, 5)
    assert config.cp_handler is not None
    assert config.cp_handler.cp_comm_strategy == "alltoall"
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (2, 6, 5, 4))


def test_a_dynamo_plugin_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configs.TorchDynamoPlugin().to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1")
    assert configs.TorchDynamoPlugin(mode="default").to_kwargs() == {"backend": "aot_eager", "fullgraph": True}
    assert configs.TorchDynamoPlugin().mode == "reduce-overhead"


# ---- utilities -------------------------------------------------------------------------------------------------------


def test_a_class_is_decorated_with_its_subclasses_so_that_each_test_restores_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "1")

    @purge_accelerate_environment
    class First:
        @staticmethod
        def test_static() -> str:
            os.environ["ACCELERATE_KEPT"] = "2"
            return "static"

        def test_method(self) -> None:
            os.environ["ACCELERATE_NEW"] = "1"

        def helper(self) -> None:
            os.environ["ACCELERATE_HELPER"] = "1"

    class Second(First):
        started = 0

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.started += 1

        def test_other(self) -> None:
            os.environ["ACCELERATE_NEW"] = "1"
            raise ValueError

    class Third(Second):
        def test_last(self) -> None:
            os.environ["ACCELERATE_NEW"] = "1"

    assert Third.test_static() == "static"
    Third().test_method()
    Third().test_last()
    with pytest.raises(ValueError, match=r"^$"):
        Second().test_other()
    assert (os.environ["ACCELERATE_KEPT"], "ACCELERATE_NEW" in os.environ, Third.started) == ("1", False, 1)
    Third().helper()
    assert os.environ.pop("ACCELERATE_HELPER") == "1"


def test_a_forward_that_a_program_replaced_is_put_back() -> None:
    model = nn.Linear(1, 1)
    model._original_forward = model.forward  # type: ignore[assignment]
    model.forward = lambda *_: None  # type: ignore[assignment]
    assert unwrap_model(model, keep_fp32_wrapper=False).forward == nn.Linear.forward.__get__(model)


def test_a_nested_tensor_is_not_padded() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning, match=r"^pad_across_processes cannot pad a nested tensor"):
        found = pad_across_processes([nested, torch.ones(1)], Strategy())
    assert found[0] is nested


def test_batch_sizes_shrink_by_a_tenth() -> None:
    tried = []

    @memory.find_executable_batch_size
    def train(batch_size: int, text: str = "XPU") -> str:
        tried.append(batch_size)
        if batch_size > 100:
            raise RuntimeError(f"{text} out of memory.")
        return text

    search: Any = train
    assert search() == "XPU"
    assert tried == [128, 115, 103, 92]
    assert memory.find_executable_batch_size(starting_batch_size=2)(lambda size: size)() == 2
    with pytest.raises(RuntimeError, match=r"^No executable batch size found, reached zero\."):
        memory.find_executable_batch_size(starting_batch_size=0)(lambda size: size)()


def test_sizes_may_be_zero() -> None:
    assert values.convert_file_size_to_int("0MB") == values.convert_file_size_to_int(0) == 0
    assert values.convert_file_size_to_int("5MB") == 5_000_000


def test_a_device_map_for_another_machine_can_be_checked() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    check_coverage(model, {"0": 0, "1": 97})
    with pytest.raises(ValueError, match="does not cover 2 of the 4 tensors"):
        check_coverage(model, {"0": 0})


def test_an_index_may_be_the_map_itself(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_file(dict(model.state_dict()), tmp_path / "w.safetensors")
    (tmp_path / "m.index.json").write_text(json.dumps({"weight": "w.safetensors", "bias": "w.safetensors"}))
    from paceline.big_model.loading import load_checkpoint_in_model

    load_checkpoint_in_model(other, tmp_path / "m.index.json")
    assert torch.equal(model.weight, other.weight)


def save_apart(folder: Path) -> tuple[str, float]:
    accelerator = Accelerator(cpu=True)
    own = folder / str(accelerator.process_index)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(own)
    weight = model.weight.item()
    nn.init.zeros_(model.weight)
    accelerator.load_state(own)
    return str(next(folder.rglob("state.ckpt")).parent), model.weight.item() - weight


def test_a_state_goes_to_one_folder_if_each_process_passes_another(tmp_path: Path) -> None:
    assert ranks(2, save_apart, tmp_path) == [(str(tmp_path / "0"), 0.0)] * 2


def test_tables_of_values_are_accelerates() -> None:
    constants = names.CONSTANTS
    assert constants["BETA_SP_AVAILABLE_DEEPSPEED_VERSION"] == "0.18.2"
    assert nn.Conv2d in names.TARGETS["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"].value()
    assert {"wandb", "tensorboard"} <= names.TARGETS["LOGGER_TYPE_TO_CLASS"].value().keys()


def test_a_reduction_leaves_out_the_scale_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    accelerator = Accelerator(cpu=True)
    assert accelerator.reduce(torch.ones(2), "sum", 2.0).tolist() == [1.0, 1.0]
    assert reduce(torch.ones(1), "mean", scale=3.0).tolist() == [1.0]
    assert [record.message.partition(" has no effect")[0] for record in caplog.records] == [
        "accelerator.reduce(scale=2.0)",
        "reduce(scale=3.0)",
    ]


def test_optimizers_and_schedulers_can_be_created_and_prepared_ones_are_their_instances() -> None:
    own = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    steps = torch.optim.lr_scheduler.StepLR(own, 1)
    optimizer = wrappers.AcceleratedOptimizer(own, device_placement=True, scaler=None)
    scheduler = wrappers.AcceleratedScheduler(steps, optimizer, step_with_optimizer=True, split_batches=False)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    prepared = Accelerator(cpu=True, torch_tp_plugin=None).prepare(own, steps)
    assert [type(one) for one in prepared] == [wrappers.AcceleratedOptimizer, wrappers.AcceleratedScheduler]


def test_a_loaders_pass_can_be_counted_and_opened_by_hand() -> None:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(4), 2))  # type: ignore[arg-type]
    loader.iteration = 3
    assert (loader.iteration, loader.epoch) == (3, 3)
    loader.begin()
    assert accelerator.gradient_state.active_dataloader is loader
    loader.end()
    assert not accelerator.gradient_state.in_dataloader
    list(loader)
    loader.reset()
    assert (loader.iteration, loader.end_of_dataloader) == (4, False)


def test_an_fsdp_plugin_can_be_changed_after_it_was_created() -> None:
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="fp16")
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy == "fp16"
    plugin.set_mixed_precision("bf16", override=True)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert (plugin.mixed_precision_policy, plugin.state_dict_type) == ("bf16", "FULL_STATE_DICT")
    with pytest.raises(ValueError, match="int7"):
        plugin.set_mixed_precision("int7", override=True)


def test_truth_values_can_be_booleans() -> None:
    assert [str_to_bool("yes"), str_to_bool("yes", to_bool=True), str_to_bool("no", to_bool=True)] == [1, True, False]
    assert isinstance(str_to_bool("yes", to_bool=True), bool)
    assert not isinstance(str_to_bool("yes"), bool)
