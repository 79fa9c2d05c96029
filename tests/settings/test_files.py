"""Files of settings: which is read, what they may hold, and that they come back as written. Rows C5, C6, U22, U23."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rank_processes import WHOLE_LINES

from paceline.settings import SETTINGS, find_file, read_file, resolve, write_file

#: As `accelerate config` of version 1 writes it, for two GPUs that shard.
ACCELERATES = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: true
  dynamo_use_fullgraph: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
parallelism_config:
  parallelism_config_dp_shard_size: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def written(folder: Path, text: str, name: str = "c.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_file_of_accelerate_is_read_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    file = read_file(written(tmp_path, ACCELERATES))
    assert file.values == {
        "debug": False,
        "use_fsdp": True,
        "enable_cpu_affinity": False,
        "dynamo_backend": "inductor",
        "dynamo_mode": "default",
        "dynamo_use_dynamic": True,
        "dynamo_use_fullgraph": False,
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_version": 2,
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
        "use_parallelism_config": True,
        "parallelism_config_dp_shard_size": 2,
        "rdzv_backend": "static",
        "cpu": False,
    }
    assert file.keys["dynamo_mode"] == "dynamo_config.dynamo_mode"
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("distributed_type: 'NO'\nmixed_precision: 'no'", {"mixed_precision": "no"}),
        ("distributed_type: NO\nmixed_precision: no", {"mixed_precision": "no"}),
        ("distributed_type: MULTI_CPU\nuse_cpu: false", {"cpu": True}),
        ("use_cpu: false\ndistributed_type: MULTI_CPU", {"cpu": True}),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\ngpu_ids: 0,1", {"multi_gpu": True, "gpu_ids": "0,1"}),
        ("gpu_ids: 1", {"gpu_ids": "1"}),
        ("fp16: true", {"mixed_precision": "fp16"}),
        ("dynamo_backend: 'NO'", {"dynamo_backend": "no"}),
        ("fsdp_config: {sharding_strategy: 1, min_num_params: 5}", None),
        ("fsdp_config: {}\ndeepspeed_config: {}\nmixed_precision: null", {}),
        ("", {}),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: auto, "
            "offload_optimizer_device: none, zero_stage: 3, zero3_init_flag: true}",
            {
                "use_deepspeed": True,
                "gradient_accumulation_steps": 4,
                "offload_optimizer_device": "none",
                "zero_stage": 3,
                "zero3_init_flag": True,
            },
        ),
    ],
)
def test_older_and_other_files_of_accelerate_mean_what_they_say(
    text: str, values: dict[str, Any] | None, tmp_path: Path
) -> None:
    expected = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_min_num_params": 5} if values is None else values
    assert read_file(written(tmp_path, text)).values == expected


def test_keys_that_paceline_does_not_use_are_listed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    path = written(tmp_path, "tpu_name: mine\nmegatron_lm_config: {a: 1}\nsame_network: false\ncommands: []")
    for _ in range(2):
        read_file(path)
    (record,) = caplog.records
    assert record.message == f"{path} has keys that Paceline does not use: tpu_name, megatron_lm_config."


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mixd_precision: bf16", ("unknown key 'mixd_precision'", "Did you mean 'mixed_precision'?")),
        ("fsdp_config: {fsdp_sharding_stratgy: 1}", ("Did you mean 'fsdp_config.fsdp_sharding_strategy'?",)),
        ("mixed_precision: bf17", ("key mixed_precision", "'bf17'", "Did you mean 'bf16'?")),
        ("cpu: true\nuse_cpu: false", ("sets cpu twice", "True as cpu", "False as use_cpu")),
        (
            "distributed_type: MLU",
            ("distributed_type: MLU", "does not support", "'MULTI_GPU'", "PACELINE_CONFIG_FILE=none"),
        ),
        ("compute_environment: AMAZON_SAGEMAKER", ("AMAZON_SAGEMAKER", "LOCAL_MACHINE")),
        ("- a\n- b", ("contains a list",)),
        ("a: [", ("is not valid YAML",)),
    ],
)
def test_c5_a_file_that_cannot_be_followed_is_refused(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=str(path)) as raised:
        read_file(path)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".toml"])
def test_u22_a_file_comes_back_as_it_was_written_in_the_format_of_its_suffix(suffix: str, tmp_path: Path) -> None:
    if suffix == ".toml":
        pytest.importorskip("tomllib")
    values = {"mixed_precision": "no", "num_processes": 4, "cpu": True, "monitor_interval": 0.5, "project_dir": 'a "b"'}
    path = tmp_path / "deep" / f"c{suffix}"
    write_file(path, values)
    assert read_file(path).values == values
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    first = path.read_text()[0]
    assert (first == "{") == (suffix == ".json")


def test_a_suffix_without_a_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has an unknown suffix"):
        write_file(tmp_path / "c.ini", {})


def test_every_setting_can_stand_in_a_file_under_its_own_name(tmp_path: Path) -> None:
    values = {name: one.default for name, one in SETTINGS.items() if one.default is not None}
    write_file(tmp_path / "c.yaml", values)
    assert read_file(tmp_path / "c.yaml").values == values


def test_c6_the_nearest_file_is_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HF_HOME": str(tmp_path / "hf")}
    assert find_file(environment) is None
    theirs, mine, here, named = (
        tmp_path / "hf" / "accelerate" / "default_config.yaml",
        tmp_path / "config" / "paceline" / "config.yaml",
        Path("paceline.yaml"),
        tmp_path / "named.yaml",
    )
    for path in (theirs, mine, here):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mixed_precision: bf16")
        assert find_file(environment) == str(path)
        assert resolve(environment=environment).file == str(path)
    named.write_text("mixed_precision: fp16")
    environment["PACELINE_CONFIG_FILE"] = str(named)
    assert resolve(environment=environment)["mixed_precision"] == "fp16"
    assert find_file(environment | {"PACELINE_CONFIG_FILE": "none"}) is None
    said = [record.message for record in caplog.records if "Accelerate wrote" in record.message]
    assert len(said) == 1
    assert str(theirs) in said[0]


def test_a_file_that_is_named_but_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="PACELINE_CONFIG_FILE points to"):
        resolve(environment={"PACELINE_CONFIG_FILE": str(tmp_path / "none.yaml")})
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        resolve(config_file=tmp_path / "none.yaml")


SCRIPT = f"""{WHOLE_LINES}
import os
from paceline import Trainer
trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
print(trainer.precision, trainer.accumulate_grad_batches, trainer.world_size, flush=True)
"""


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]])
def test_u23_a_script_without_the_launcher_finds_the_file(launcher: list[str], tmp_path: Path) -> None:
    own = tmp_path / "config" / "paceline" / "config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(yaml.safe_dump({"mixed_precision": "bf16", "gradient_accumulation_steps": 3}))
    script = written(tmp_path, SCRIPT, "train.py")
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_CONFIG_FILE"}
    environment |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    processes = 2 if launcher else 1
    assert done.stdout.splitlines() == [f"bf16-mixed 3 {processes}"] * processes
    assert done.stderr.count("Trainer takes these arguments from the settings: precision='bf16-mixed'") == 1
