"""From handlers, plugins and settings to one strategy, and what is said on the way."""

from __future__ import annotations

import logging
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import RanksError, ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch.distributed.fsdp import MixedPrecisionPolicy

from paceline import Trainer
from paceline.accelerator.enums import DistributedType
from paceline.accelerator.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    sort_handlers,
)
from paceline.accelerator.parallelism_config import ParallelismConfig
from paceline.accelerator.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from paceline.accelerator.process_info import type_of
from paceline.accelerator.strategy_options import Choice, choose
from paceline.settings import resolve
from paceline.strategies import (
    DDPStrategy,
    FSDPStrategy,
    MixedPrecision,
    ModelParallelStrategy,
    Precision,
    SingleDevice,
    Strategy,
)


def chosen(*handlers: Any, fsdp: Any = None, deepspeed: Any = None, sizes: Any = None, **code: Any) -> Any:
    return choose(Choice(sort_handlers(handlers), fsdp, deepspeed, sizes, resolve(code)))


# ---- which strategy --------------------------------------------------------------------------------------------------


def test_a4_one_process_has_one_device_whatever_is_given_for_several() -> None:
    strategy = chosen(DistributedDataParallelKwargs(static_graph=True), InitProcessGroupKwargs(timeout=timedelta(9)))
    assert type(strategy) is SingleDevice
    assert type(strategy.precision) is Precision


def test_several_processes_get_ddp_with_what_the_handlers_say() -> None:
    def ask() -> Any:
        strategy = chosen(
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=70)),
            mixed_precision="bf16",
        )
        assert isinstance(strategy, DDPStrategy)
        strategy.setup_environment()
        return strategy.ddp_options, strategy.timeout.seconds, strategy.world_size, strategy.precision.name

    options = {"gradient_as_bucket_view": True, "static_graph": True}
    assert ranks(2, ask) == [(options, 70, 2, "bf16-mixed")] * 2


def test_e2_ddp_trains_the_same_with_bucket_views_and_a_static_graph() -> None:
    def fit(*handlers: Any) -> Any:
        torch.manual_seed(1)
        module = TinyModule()
        trainer = Trainer(**QUIET, max_epochs=1, strategy=chosen(*handlers))
        trainer.fit(module, tiny_loader())
        wrapped = trainer.strategy
        assert isinstance(wrapped, DDPStrategy)
        return [parameter.detach() for parameter in module.parameters()], wrapped.ddp_options

    (plain, _), _ = ranks(2, fit)
    (other, options), _ = ranks(2, fit, DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True))
    assert options == {"gradient_as_bucket_view": True, "static_graph": True}
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("cuda", "MULTI_GPU"), ("tpu", "XLA"), ("npu", "MULTI_NPU"), ("xpu", "MULTI_XPU"), ("mps", "MULTI_CPU")],
)
def test_the_type_of_several_processes_follows_their_device_as_in_accelerate(kind: str, name: str) -> None:
    class Four(SingleDevice):
        world_size = 4
        device = SimpleNamespace(type=kind)  # torch knows the name "tpu" only with its package

    assert type_of(object.__new__(Four)).value == name


def test_an_fsdp_plugin_or_the_settings_ask_for_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = chosen(fsdp=FullyShardedDataParallelPlugin(reshard_after_forward=False))
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.reshard_after_forward is False
    assert type_of(strategy) is DistributedType.FSDP
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    strategy = chosen()
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.state_dict_type == "sharded"


def test_sizes_ask_for_ddp_fsdp_or_model_parallel() -> None:
    def ask() -> Any:
        sizes: list[dict[str, Any]] = [{"dp_replicate_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}]
        found = [chosen(sizes=ParallelismConfig(**given)) for given in sizes]
        assert isinstance(found[1], FSDPStrategy)
        assert isinstance(found[2], ModelParallelStrategy)
        return [type(one).__name__ for one in found], found[1].sizes, found[2].axis_sizes["tp"]

    names = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy"]
    assert ranks(2, ask) == [(names, (1, 2), 2)] * 2


def test_j6_sizes_that_are_not_the_number_of_processes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tp_size=2\) needs 4 processes, but this run has 1\."):
        chosen(sizes=ParallelismConfig(dp_shard_size=2, tp_size=2))
    with pytest.raises(RanksError, match=r"tp_size=3\) needs 3 processes, but this run has 2\."):
        ranks(2, lambda: chosen(sizes=ParallelismConfig(tp_size=3)))


def test_sizes_and_an_fsdp_plugin_go_together() -> None:
    def ask() -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
        hybrid = chosen(fsdp=plugin, sizes=ParallelismConfig(dp_replicate_size=2))
        split = chosen(fsdp=plugin, sizes=ParallelismConfig(tp_size=2))
        return hybrid.sizes, type(split).__name__, hybrid.mixed_precision == split.mixed_precision == policy

    assert ranks(2, ask) == [((2, 1), "ModelParallelStrategy", True)] * 2


def test_a_strategy_by_name_or_object_is_taken() -> None:
    assert isinstance(chosen(strategy="fsdp"), FSDPStrategy)
    strategy = chosen(AutocastKwargs(), strategy="ddp_find_unused_parameters_true", mixed_precision="bf16")
    assert strategy.find_unused_parameters is True
    assert strategy.precision.name == "bf16-mixed"
    mine = SingleDevice("cpu")
    assert chosen(strategy=mine, mixed_precision="bf16") is mine
    assert mine.precision.name == "bf16-mixed"
    assert isinstance(chosen(strategy="single_device", mixed_precision="fp16").precision, MixedPrecision)
    with pytest.raises(ValueError, match=r"Unknown strategy 'fdsp'. Did you mean 'fsdp'"):
        chosen(strategy="fdsp")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"strategy": "ddp", "fsdp": FullyShardedDataParallelPlugin()}, "'ddp' contradicts fsdp_plugin, .* 'fsdp'"),
        (
            {"deepspeed": DeepSpeedPlugin(), "fsdp": FullyShardedDataParallelPlugin()},
            "deepspeed_plugin and fsdp_plugin contradict each other",
        ),
        (
            {"strategy": SingleDevice("cpu"), "fsdp": FullyShardedDataParallelPlugin()},
            "fsdp_plugin cannot be combined with strategy SingleDevice",
        ),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        chosen(**given)


def test_a_plugin_of_another_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Did you mean FullyShardedDataParallelPlugin\(\)\?"):
        chosen(fsdp=FullyShardedDataParallelPlugin)
    with pytest.raises(TypeError, match="Pass a DeepSpeedPlugin"):
        chosen(deepspeed="ds.json")
    with pytest.raises(NotImplementedError, match=r"got 2 plugins \(a, b\)"):
        chosen(deepspeed={"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()})


def test_e10_without_the_package_deepspeed_says_what_to_install() -> None:
    if find_spec("deepspeed") is not None:
        strategy = chosen(deepspeed=DeepSpeedPlugin(zero_stage=3))
        assert type_of(strategy) is DistributedType.DEEPSPEED
        assert strategy.stage == 3
        return
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install 'deepspeed>=0.19'.*'fsdp', which is equivalent to stage 3"
    ):
        chosen(deepspeed=DeepSpeedPlugin(zero_stage=3))


def test_handlers_without_effect_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen(DistributedDataParallelKwargs(), fsdp=FullyShardedDataParallelPlugin())
        chosen(GradScalerKwargs(), mixed_precision="bf16")
    assert "DistributedDataParallelKwargs has no effect with strategy 'fsdp'" in caplog.text
    assert "(kwargs_handlers=GradScalerKwargs(" in caplog.text
    assert "because only 'fp16' scales losses, but mixed_precision is 'bf16'" in caplog.text


# ---- the process group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_e1_nccl_on_the_cpu_is_refused(processes: int) -> None:
    def ask() -> None:
        chosen(InitProcessGroupKwargs(backend="nccl"), cpu=True)

    with pytest.raises(
        (ValueError, RanksError), match=r"backend='nccl'\): NCCL only works with CUDA devices, .* on 'cpu'. Leave"
    ):
        ask() if processes == 1 else ranks(2, ask)


def test_e1_without_a_timeout_the_default_holds() -> None:
    def ask() -> Any:
        return chosen(InitProcessGroupKwargs(timeout=None)).timeout

    assert ranks(2, ask) == [timedelta(minutes=30)] * 2


def test_c19_what_is_given_reaches_init_process_group_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")
    given: dict[str, Any] = {}

    def stub(backend: str, **arguments: Any) -> None:
        given.update(arguments, backend=backend)
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", stub)
    handler = InitProcessGroupKwargs("gloo", "env://?use_libuv=False", timedelta(seconds=77))
    with pytest.raises(InterruptedError):
        chosen(handler).setup_environment()
    assert given == {
        "backend": "gloo",
        "init_method": "env://?use_libuv=False",
        "timeout": timedelta(seconds=77),
        "rank": 1,
        "world_size": 2,
    }


@pytest.mark.parametrize("method", ["env://?use_libuv=False", "file://{}/meet"])
def test_c19_processes_meet_by_an_init_method(method: str, tmp_path: Any) -> None:
    def meet() -> list[int]:
        strategy = chosen(InitProcessGroupKwargs(init_method=method.format(tmp_path)))
        strategy.setup_environment()
        return strategy.gather_objects(strategy.global_rank)

    assert ranks(2, meet) == [[0, 1]] * 2


# ---- precision -------------------------------------------------------------------------------------------------------


def test_fp16_scales_losses_as_the_handler_says() -> None:
    scaler = chosen(GradScalerKwargs(init_scale=8.0, growth_interval=3), mixed_precision="fp16").precision.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_backoff_factor()) == (8.0, 3, 0.5)
    assert not chosen(GradScalerKwargs(enabled=False), mixed_precision="fp16").precision.scaler.is_enabled()


def test_autocast_is_what_the_handler_says() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    cases: list[tuple[AutocastKwargs, torch.dtype, bool]] = [
        (AutocastKwargs(), torch.bfloat16, True),
        (AutocastKwargs(enabled=False), torch.float32, True),
        (AutocastKwargs(cache_enabled=False), torch.bfloat16, False),
    ]
    for handler, dtype, cached in cases:
        step = chosen(handler, mixed_precision="bf16").precision.bind_forward(
            lambda: (layer(x).dtype, torch.is_autocast_cache_enabled())
        )
        assert step() == (dtype, cached)


@pytest.mark.parametrize(
    ("word", "name"), [("no", "32-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed"), ("fp8", "fp8-mixed")]
)
def test_mixed_precision_is_said_in_words(word: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(mixed_precision=word).precision.name == name
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", word)
    assert chosen().precision.name == name


def test_words_of_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown mixed_precision 'bf61'. Did you mean 'bf16'"):
        choose(Choice(settings={"mixed_precision": "bf61"}))


@pytest.mark.parametrize(("mode", "name"), [("bf16", "bf16-true"), ("fp16", "16-true")])
def test_deepspeeds_configuration_may_ask_for_its_16_bits(mode: str, name: str) -> None:
    from paceline.accelerator.strategy_options import precision_of

    plugin = DeepSpeedPlugin(hf_ds_config={mode: {"enabled": True}})
    for word in (None, mode):
        choice = Choice(deepspeed_plugin=plugin, settings={"mixed_precision": word})
        assert precision_of(choice, "cpu").name == name
    with pytest.raises(ValueError, match=f"has {mode}.enabled=true, but mixed_precision is 'no'"):
        precision_of(Choice(deepspeed_plugin=plugin, settings={"mixed_precision": "no"}), "cpu")


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_a12_gpus_that_one_process_leaves_unused_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with caplog.at_level(logging.INFO):
        strategy: Strategy = chosen()
        chosen()
    assert strategy.device == torch.device("cuda:0")
    assert caplog.text.count("This process uses 1 of the 4 GPUs") == 1
    assert "paceline launch --num_processes 4 " in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert chosen(cpu=True).device.type == "cpu"
    assert not caplog.text
