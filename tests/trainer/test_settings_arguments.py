"""What the Trainer takes from the settings, and what it does not. Rows D1-D3 for door one, C12."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import GradientAccumulationScheduler
from paceline.messages import PacelineWarning
from paceline.strategies import DDPStrategy, FSDPStrategy, SingleDevice
from paceline.strategies.precision.mixed import MixedPrecision
from paceline.trainer.settings_arguments import settled, with_origins


def fill_in(given: dict[str, Any]) -> dict[str, Any]:
    return with_origins(given)[0]


OPEN: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "precision": None,
    "plugins": None,
    "accumulate_grad_batches": None,
    "compile": None,
    "callbacks": None,
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write settings into the file in force."""

    def write(text: str) -> None:
        (tmp_path / "c.yaml").write_text(text)
        monkeypatch.setenv("PACELINE_CONFIG_FILE", str(tmp_path / "c.yaml"))

    return write


@pytest.mark.parametrize(
    ("text", "argument", "value"),
    [
        ("mixed_precision: bf16", "precision", "bf16-mixed"),
        ("mixed_precision: fp16", "precision", "16-mixed"),
        ("mixed_precision: 'no'", "precision", None),
        ("gradient_accumulation_steps: 4", "accumulate_grad_batches", 4),
        ("", "accumulate_grad_batches", 1),
        ("cpu: true", "accelerator", "cpu"),
        ("cpu: false", "accelerator", "auto"),
        ("strategy: ddp", "strategy", "ddp"),
        ("strategy: auto", "strategy", "auto"),
        ("use_fsdp: true\nstrategy: ddp", "strategy", "ddp"),
        ("", "compile", False),
        ("dynamo_backend: 'no'", "compile", False),
        ("dynamo_backend: eager", "compile", {"backend": "eager", "fullgraph": False}),
        (
            "dynamo_config: {dynamo_backend: inductor, dynamo_mode: max-autotune, dynamo_use_dynamic: false}",
            "compile",
            {"backend": "inductor", "fullgraph": False, "mode": "max-autotune", "dynamic": False},
        ),
    ],
)
def test_c12_what_is_left_open_comes_from_the_settings(text: str, argument: str, value: Any, elsewhere: Any) -> None:
    elsewhere(text)
    assert fill_in(OPEN)[argument] == value


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("use_fsdp: true", {"sharding": "full"}),
        ("use_fsdp: true\nfsdp_sharding_strategy: SHARD_GRAD_OP", {"reshard_after_forward": False}),
        ("use_fsdp: true\nfsdp_transformer_layer_cls_to_wrap: Block\nfsdp_state_dict_type: SHARDED_STATE_DICT", {}),
    ],
)
def test_use_fsdp_makes_the_strategy_with_all_its_settings(text: str, options: dict[str, Any], elsewhere: Any) -> None:
    elsewhere(text)
    strategy = fill_in(OPEN)["strategy"]
    assert type(strategy) is FSDPStrategy
    assert {name: getattr(strategy, name) for name in options} == options
    if not options:
        assert strategy.state_dict_type == "sharded"
        assert strategy.wrap in ("Block", ["Block"])


ALL = """
mixed_precision: bf16
gradient_accumulation_steps: 4
cpu: true
strategy: ddp
dynamo_backend: inductor
"""


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("precision", "32-true"),
        ("precision", "64-true"),
        ("precision", 16),
        ("accumulate_grad_batches", 1),
        ("accumulate_grad_batches", 2),
        ("accelerator", "gpu"),
        ("strategy", "single_device"),
        ("compile", False),
        ("compile", {"backend": "eager"}),
    ],
)
def test_d2_code_wins_and_says_so_once(
    argument: str, value: Any, elsewhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")
    elsewhere(ALL)
    for _ in range(2):
        filled = fill_in(OPEN | {argument: value})
    assert filled[argument] == value
    overrides = [line for line in caplog.messages if " overrides " in line]
    assert len(overrides) == 1
    assert f"from Trainer({argument}=)" in overrides[0]
    assert len(caplog.messages) == 2


def test_d3_what_agrees_is_no_conflict(elsewhere: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    elsewhere(ALL)
    code = {"precision": "bf16", "accumulate_grad_batches": 4, "accelerator": "cpu", "strategy": "ddp", "compile": True}
    fill_in(OPEN | code)
    assert not caplog.messages


def test_what_was_taken_is_said_with_its_place(elsewhere: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    elsewhere("mixed_precision: bf16\nuse_fsdp: true\n")
    fill_in(OPEN)
    (line,) = caplog.messages
    assert line.startswith("Trainer takes these arguments from the settings: precision='bf16-mixed' (")
    assert "c.yaml: mixed_precision), strategy='FSDPStrategy' (" in line


def test_objects_in_code_count(elsewhere: Any) -> None:
    elsewhere(ALL)
    mixed = MixedPrecision("16-mixed")
    assert fill_in(OPEN | {"plugins": mixed})["precision"] is None
    assert fill_in(OPEN | {"strategy": DDPStrategy(precision=mixed)})["precision"] is None
    assert fill_in(OPEN | {"strategy": DDPStrategy()})["precision"] == "bf16-mixed"
    assert fill_in(OPEN | {"strategy": SingleDevice("cpu")})["accelerator"] == "auto"
    scheduler = GradientAccumulationScheduler({0: 1, 2: 3})
    for callbacks in (scheduler, [scheduler]):
        assert fill_in(OPEN | {"callbacks": callbacks})["accumulate_grad_batches"] == 1


def test_a_strategy_in_code_counts_against_a_switch_and_says_so(
    elsewhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")
    elsewhere("use_fsdp: true")
    assert fill_in(OPEN | {"strategy": "ddp"})["strategy"] == "ddp"
    assert "strategy='ddp' (from Trainer(strategy=)) overrides use_fsdp (from " in caplog.text
    caplog.clear()
    fill_in(OPEN | {"strategy": "fsdp_cpu_offload"})
    assert not caplog.messages


def test_d1_a_fit_runs_with_the_settings(elsewhere: Any, quiet: dict[str, Any]) -> None:
    elsewhere("mixed_precision: bf16\ngradient_accumulation_steps: 2\ncpu: true\ndynamo_backend: eager\n")
    given = {name: value for name, value in quiet.items() if name != "accelerator"}
    trainer = Trainer(**given, max_epochs=1)
    module = TinyModule()
    seen = set()
    module.register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    trainer.fit(module, tiny_loader())
    assert trainer.precision == "bf16-mixed"
    assert trainer.accumulate_grad_batches == 2
    assert trainer.global_step == -(-len(tiny_loader()) // 2)
    assert trainer.compile == {"backend": "eager", "fullgraph": False}
    assert trainer.strategy.device == torch.device("cpu")


def variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_lightnings_variables_give_arguments_that_code_leaves_out_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")
    values = {"max_epochs": "3", "limit_train_batches": "0.5", "default_root_dir": str(tmp_path / "x"), "devices": "1"}
    more = {"inference_mode": "False", "detect_anomaly": "True", "precision": "bf16-mixed", "profiler": ""}
    variables(monkeypatch, **{f"PL_TRAINER_{name.upper()}": value for name, value in (values | more).items()})
    trainer = Trainer(**quiet, inference_mode=True, max_epochs=2)
    assert (trainer.max_epochs, trainer.inference_mode) == (2, True)
    assert (trainer.limit_train_batches, trainer.detect_anomaly) == (0.5, True)
    assert (trainer.default_root_dir, trainer.precision) == (str(tmp_path / "x"), "bf16-mixed")
    (line,) = caplog.messages
    assert line.startswith("Trainer takes these arguments from the settings: ")
    for name in ("limit_train_batches=0.5", "detect_anomaly=True", "precision='bf16-mixed'", "devices=1"):
        assert f"{name} (PL_TRAINER_{name.partition('=')[0].upper()})" in line
    assert "max_epochs" not in line
    rows = {row.name: row for row in trainer.settings_in_force}
    assert rows["limit_train_batches"][1:] == (0.5, "settings", "PL_TRAINER_LIMIT_TRAIN_BATCHES")
    assert (rows["max_epochs"].place, rows["min_epochs"].place) == ("code", "default")


@pytest.mark.parametrize(
    ("places", "value"),
    [
        (("code", "flag", "paceline", "lightning", "file"), "64-true"),
        (("flag", "lightning"), "16-mixed"),
        (("paceline", "lightning", "file"), "16-mixed"),
        (("lightning", "file"), "bf16-true"),
        (("file",), "bf16-mixed"),
        (("None in code", "lightning"), "bf16-true"),
        (("plugins", "lightning"), "16-mixed"),
    ],
)
def test_lightnings_variables_count_after_pacelines_and_before_the_file(
    places: tuple[str, ...],
    value: str,
    elsewhere: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="paceline")
    if "file" in places:
        elsewhere("mixed_precision: bf16")
    if "lightning" in places:
        monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-true")
    if "flag" in places or "paceline" in places:
        monkeypatch.setenv("PACELINE_MIXED_PRECISION", "fp16")
    if "flag" in places:
        monkeypatch.setenv("PACELINE_LAUNCH_FLAGS", "mixed_precision")
    code: dict[str, Any] = {"precision": "64-true"} if "code" in places else {}
    code |= {"precision": None} if "None in code" in places else {}
    code |= {"plugins": MixedPrecision("16-mixed")} if "plugins" in places else {}
    assert Trainer(accelerator="cpu", logger=False, **code).precision == value
    if places == ("paceline", "lightning", "file"):
        assert "overrides 'bf16-true' from PL_TRAINER_PRECISION" in caplog.text
    if places == ("flag", "lightning"):
        assert "PL_TRAINER_PRECISION" not in caplog.text  # the launcher has spoken


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("PL_TRAINER_MAX_EPOCH", "Did you mean 'PL_TRAINER_MAX_EPOCHS'?"),
        ("PACELINE_TRAINER_MAX_EPOCS", "Did you mean 'PL_TRAINER_MAX_EPOCHS'?"),
        ("PACELINE_TRAINER_MAX_EPOCHS", "Did you mean 'PL_TRAINER_MAX_EPOCHS'?"),
        ("PL_TRAINER_GPUS", "Use accelerator='gpu'"),
    ],
)
def test_an_unknown_variable_of_that_kind_is_warned_of(
    variable: str, hint: str, monkeypatch: pytest.MonkeyPatch, quiet: dict[str, Any]
) -> None:
    monkeypatch.setenv(variable, "3")
    with pytest.warns(PacelineWarning, match=rf"{variable} .*no effect.*{re.escape(hint)}") as warned:
        assert [Trainer(**quiet).max_epochs for _ in range(2)] == [None, None]
    assert len(warned) == 1


def test_the_constructor_gets_the_final_value_of_each_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, **final: Any) -> None:
        got.update(final)

    got: dict[str, Any] = {}
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    init.__signature__ = inspect.signature(Trainer.__init__)  # type: ignore[attr-defined]
    made = SimpleNamespace()
    settled(init)(made, max_steps=5)
    assert got.keys() == inspect.signature(Trainer).parameters.keys()
    found = [got[name] for name in ("max_epochs", "accumulate_grad_batches", "max_steps", "compile")]
    assert found == [3, 2, 5, False]
    places = {row.name: row.where for row in made.settings_in_force}
    assert (places["max_epochs"], places["max_steps"]) == ("PL_TRAINER_MAX_EPOCHS", "Trainer(max_steps=)")
