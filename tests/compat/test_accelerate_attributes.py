"""Attributes of the Accelerator and of prepared objects that programs for Accelerate read or set."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from paceline.accelerator.enums import LoggerType
from paceline.accelerator.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from paceline.accelerator.process_state import AcceleratorState
from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.gradient_state import GradientState
from paceline.compat.accelerate.loader_classes import DataLoaderShard
from paceline.compat.accelerate.wrappers import AcceleratedScheduler

HANDLERS = {
    "autocast_handler": AutocastKwargs(),
    "ddp_handler": DistributedDataParallelKwargs(),
    "scaler_handler": GradScalerKwargs(init_scale=8.0),
    "init_handler": InitProcessGroupKwargs(),
    "profile_handler": ProfileKwargs(),
}
LINES = torch.arange(8.0).reshape(8, 1)


@pytest.fixture(autouse=True)
def no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(**given: Any) -> tuple[Accelerator, Any, Any]:
    """An Accelerator, a prepared model, and its prepared optimizer."""
    accelerator, model = Accelerator(cpu=True, **given), nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


# ---- handlers --------------------------------------------------------------------------------------------------------


def test_handlers_are_those_that_were_passed_or_none() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=list(HANDLERS.values()))
    assert all(getattr(accelerator, name) is handler for name, handler in HANDLERS.items())
    plain = Accelerator(cpu=True)
    none = (*HANDLERS, "fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler")
    assert [getattr(plain, name) for name in none] == [None] * len(none)
    false = ("native_amp", "fp8_enabled", "has_fp8_handler", "delayed_fp8_autocast", "has_lomo_optimizer")
    assert [getattr(plain, name) for name in false] == [False] * len(false)
    assert accelerator.native_amp


def test_eight_bits_have_a_recipe() -> None:
    pytest.importorskip("torchao")
    given = AORecipeKwargs(pad_inner_dim=False)
    for handlers, expected in (([given], given), ([], AORecipeKwargs())):
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
        assert accelerator.fp8_enabled
        assert accelerator.native_amp
        assert accelerator.has_fp8_handler
        assert (accelerator.ao_recipe_handler, accelerator.te_recipe_handler) == (expected, None)


def test_an_autocast_handler_that_is_set_holds_for_models_that_are_prepared_later() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    outputs = []
    for handler in (None, AutocastKwargs(enabled=False), None):
        accelerator.autocast_handler = handler
        with accelerator.autocast():
            inside = (nn.Linear(1, 1)(LINES)).dtype
        layer = accelerator.prepare(nn.Sequential(nn.Linear(1, 1), nn.Identity()))
        seen: list[torch.dtype] = []
        layer[0].register_forward_hook(lambda *args, seen=seen: seen.append(args[2].dtype))
        layer(LINES)
        outputs.append((inside, *seen))
    assert outputs == [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16,) * 2]


def test_a_profile_handler_that_is_set_is_used() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.profile_handler = ProfileKwargs(record_shapes=True)
    with accelerator.profile() as profiler:
        torch.ones(2) + 1
    assert profiler.record_shapes


def test_handlers_that_are_set_too_late_are_said(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.INFO):
        accelerator.scaler_handler = GradScalerKwargs(init_scale=2.0)
    assert "accelerator(scaler_handler=GradScalerKwargs(" in caplog.text
    assert "the Accelerator has already been created" in caplog.text


def _bucket_sizes() -> list[int]:
    accelerator = Accelerator(cpu=True)
    sizes = []
    for handler in (None, DistributedDataParallelKwargs(bucket_cap_mb=3), None):
        accelerator.ddp_handler = handler
        model = accelerator.prepare(nn.Linear(1, 1))
        wrapped: Any = accelerator.prepared.placement(model, "").strategy._wrapped  # type: ignore[attr-defined]
        sizes.append(wrapped.bucket_bytes_cap >> 20)
    return sizes


def test_a_ddp_handler_that_is_set_holds_for_models_that_are_prepared_later() -> None:
    assert ranks(2, _bucket_sizes) == [[25, 3, 25]] * 2


# ---- precision -------------------------------------------------------------------------------------------------------


def test_native_amp_turns_autocast_off_and_cannot_turn_it_on() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.native_amp
    accelerator.native_amp = False
    with accelerator.autocast():
        assert nn.Linear(1, 1)(LINES).dtype is torch.float32
    plain = Accelerator(cpu=True)
    plain.native_amp = False
    with pytest.raises(ValueError, match=r"native_amp = True has no effect.*mixed_precision='bf16'"):
        plain.native_amp = True


def test_losses_are_scaled_by_the_scaler_that_a_program_sets() -> None:
    accelerator, model, optimizer = made(mixed_precision="fp16")
    assert optimizer.scaler is accelerator.scaler
    scales, before = [], model.bias.item()
    for owner, scale in ((accelerator, 8.0), (optimizer, 16.0), (accelerator, 4.0)):
        owner.scaler = GradScaler("cpu", init_scale=scale)
        assert optimizer.scaler is accelerator.scaler
        accelerator.backward(model(LINES).float().mean())
        scales.append(model.bias.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    assert scales == [8.0, 16.0, 4.0]
    assert model.bias.item() == pytest.approx(before - 3 * 0.5)


def test_a_scaler_cannot_turn_scaling_on_or_off() -> None:
    accelerator, _, optimizer = made()
    accelerator.scaler = optimizer.scaler = GradScaler("cpu", enabled=False)
    assert accelerator.scaler is None
    with pytest.raises(ValueError, match=r"would turn loss scaling on.*mixed_precision='fp16'"):
        accelerator.scaler = GradScaler("cpu")
    scaled, *_ = made(mixed_precision="fp16")
    with pytest.raises(ValueError, match=r"would turn loss scaling off.*enabled=False"):
        scaled.scaler = None


def _set_under_fsdp() -> str:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", strategy="fsdp")
    with pytest.raises(NotImplementedError) as error:
        accelerator.scaler = GradScaler("cpu")
    return str(error.value)


def test_a_strategy_that_unscales_itself_keeps_its_scaler() -> None:
    assert "under FSDPStrategy, which unscales" in ranks(1, _set_under_fsdp)[0]


# ---- prepared objects ------------------------------------------------------------------------------------------------


def test_prepared_objects_know_their_states() -> None:
    accelerator, _, optimizer = made(split_batches=True)
    inner = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    schedule = accelerator.prepare(inner)
    assert optimizer.gradient_state is schedule.gradient_state is accelerator.gradient_state
    assert optimizer.accelerator_state is accelerator.state
    assert (optimizer.device_placement, optimizer.scaler, schedule.split_batches) == (True, None, True)
    assert AcceleratedScheduler(inner, optimizer).split_batches is False


def test_an_accelerator_whose_state_was_reset_still_prepares() -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state()
    assert len(accelerator.prepare(DataLoader(LINES))) == 8


def test_a_prepared_loader_says_where_batches_go_and_what_is_skipped() -> None:
    loader: Any = Accelerator(cpu=True).prepare(DataLoader(LINES, batch_size=2, generator=torch.Generator()))
    assert (loader.device, loader.rng_types, loader.skip_batches) == (torch.device("cpu"), [], 0)
    assert loader.synchronized_generator is None
    loader.skip_batches = 3
    assert [batch.tolist() for batch in loader] == [[[6.0], [7.0]]]
    with pytest.raises(ValueError, match="skip_batches=-1, which is negative"):
        loader.skip_batches = -1
    loader.device = None
    assert loader.device is None
    assert not loader.device_placement
    with pytest.raises(ValueError, match=r"device='meta'.*this process's device, cpu"):
        loader.device = "meta"
    generator = torch.Generator()
    shuffled: Any = Accelerator(cpu=True).prepare(DataLoader(LINES, shuffle=True, generator=generator))
    assert shuffled.synchronized_generator is generator
    by_hand = DataLoaderShard(LINES, rng_types=["torch"], synchronized_generator=generator, skip_batches=1)
    assert (by_hand.device, by_hand.rng_types, by_hand.synchronized_generator) == (None, ["torch"], generator)
    assert by_hand.skip_batches == 1


def test_the_flag_of_a_trigger_is_a_tensor() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert torch.equal(accelerator.flag_tensor, torch.tensor(1))  # type: ignore[arg-type]
    assert accelerator.check_trigger()
    assert accelerator.flag_tensor is None
    accelerator.flag_tensor = torch.tensor(1)
    assert accelerator.check_trigger()


def test_fields_of_the_accumulation_plugin_can_be_set() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    fields = accelerator.gradient_state.plugin_kwargs
    fields["num_steps"] = 1
    assert accelerator.gradient_accumulation_steps == 1
    fields.update(num_steps=2, sync_each_batch=True)
    assert fields == {"num_steps": 2, "sync_each_batch": True}
    assert (repr(fields), len(fields)) == ("{'num_steps': 2, 'sync_each_batch': True}", 2)
    del fields["sync_each_batch"]
    assert "sync_each_batch" not in fields
    with pytest.raises(KeyError, match="Did you mean 'num_steps'"):
        fields["num_step"] = 1


# ---- programs catch and pass what Accelerate's do --------------------------------------------------------------------


def test_a_missing_state_is_a_value_error_and_a_missing_file(tmp_path: Any) -> None:
    accelerator, *_ = made()
    for folder in (tmp_path / "none", tmp_path):
        for kind in (ValueError, FileNotFoundError):
            with pytest.raises(kind, match=r"accelerator\.load_state"):
                accelerator.load_state(folder)


def test_trackers_are_chosen_by_a_logger_type_also_in_a_list(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    for asked in (LoggerType.TENSORBOARD, [LoggerType.TENSORBOARD], (LoggerType.TENSORBOARD, "csv")):
        accelerator = Accelerator(cpu=True, log_with=asked, project_dir=tmp_path)
        assert LoggerType.TENSORBOARD in accelerator.log_with
    accelerator.init_trackers("run", init_kwargs={LoggerType.TENSORBOARD: {}})
    assert accelerator.get_tracker(LoggerType.TENSORBOARD).name == "tensorboard"
    accelerator.end_training()
