"""``paceline config``: with questions, without, and what it refuses. Rows C1-C5, U22."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.devices.kinds import kind_of
from paceline.settings import SETTINGS, read_file, resolve


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PACELINE_CONFIG_FILE")
    return tmp_path / "config" / "paceline" / "config.yaml"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str, terminal: bool = False) -> None:
    monkeypatch.setattr("sys.stdin", (Terminal if terminal else io.StringIO)("".join(f"{one}\n" for one in answers)))


def asked(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition(" [")[0] for line in capsys.readouterr().out.splitlines() if "?" in line]


#: The questions of a machine without distributed training, in order.
QUESTIONS = [
    "In which compute environment are you running?",
    "Which type of machine are you using?",
    "Do you want to run your training on the CPU only?",
    "Do you wish to optimize your script with torch dynamo?",
    "Do you want to use DeepSpeed?",
    "Which GPUs (by ID) should be used for training on this machine?",
    "Would you like to enable NUMA efficiency? (NVIDIA only)",
    "Do you wish to use mixed precision? (no, fp16, bf16, fp8)",
    "How many micro-batches should be accumulated per optimizer step?",
]


def test_c2_the_questions_answered_as_in_the_post_give_a_file_that_says_so(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ("This machine", "No distributed training", "NO", "NO", "NO", "all", "NO", "bf16")
    answer(monkeypatch, *answers)
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert [line.partition(" [")[0] for line in out.splitlines() if "?" in line] == QUESTIONS
    assert out.splitlines()[-1] == str(own)
    assert read_file(own).values == {
        "num_processes": 1,
        "cpu": False,
        "dynamo_backend": "no",
        "use_deepspeed": False,
        "gpu_ids": "all",
        "enable_cpu_affinity": False,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 1,
    }
    assert own.read_text().startswith("mixed_precision: bf16\n")
    assert resolve()["mixed_precision"] == "bf16"


def test_c1_enter_and_the_end_of_the_input_take_every_default(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for answers in ((), ("",) * len(QUESTIONS)):
        answer(monkeypatch, *answers)
        assert main(["config", "--force"]) == 0
        found.append(read_file(own).values)
    assert found[0] == found[1]
    assert {name: value for name, value in found[0].items() if value != SETTINGS[name].default} == {
        "gpu_ids": "all",
        "num_processes": 1,
    }


def test_c1_it_works_with_piped_input_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    command = [sys.executable, "-m", "paceline", "config", "--config_file", str(path)]
    done = subprocess.run(command, input="\n\nyes\n\nfp16\n4\n", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(path)
    assert not done.stderr
    found = read_file(path).values
    assert (found["cpu"], found["mixed_precision"], found["gradient_accumulation_steps"]) == (True, "fp16", 4)


def test_c3_yes_to_dynamo_asks_for_backend_mode_graph_and_shapes(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "", "", "", "yes")
    assert main(["config"]) == 0
    assert asked(capsys)[4:9] == [
        "Which dynamo backend would you like to use?",
        "Which mode do you want to use? (default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs)",
        "Must the model be compiled as a single graph?",
        "Do you want to enable dynamic shape tracing?",
        "Do you want to compile repeated blocks only once?",
    ]
    found = read_file(own).values
    assert {name: value for name, value in found.items() if name.startswith("dynamo")} == {
        "dynamo_backend": "inductor",
        "dynamo_mode": "default",
        "dynamo_use_fullgraph": False,
        "dynamo_use_dynamic": False,
        "dynamo_use_regional_compilation": False,
    }


def test_c4_several_machines_are_asked_for_rank_address_and_port(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "0", "multi-CPU", "2", "1", "10.0.0.1", "29501", "", "yes", "no", "8", "bf16", "2")
    assert main(["config"]) == 0
    assert read_file(own).values == {
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
        "rdzv_backend": "static",
        "debug": True,
        "cpu": True,
        "dynamo_backend": "no",
        "num_processes": 8,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 2,
    }


FSDP = ("FULL_SHARD", "", "TRANSFORMER_BASED_WRAP", "Block", "SHARDED_STATE_DICT", "", "", "yes", "2", "2", "1", "1")


@pytest.mark.parametrize(
    ("answers", "values"),
    [
        (
            ("2", "", "", "no", "no", "yes", *FSDP, "4"),
            {
                "use_fsdp": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "use_parallelism_config": True,
                "parallelism_config_dp_shard_size": 2,
                "multi_gpu": True,
                "num_processes": 4,
            },
        ),
        (
            ("multi-g", "", "", "no", "yes", "", "3", "nvme", "/fast", "cpu", "yes", "", "yes", "0.5", "2"),
            {
                "use_deepspeed": True,
                "zero_stage": 3,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/fast",
                "offload_param_device": "cpu",
                "zero3_save_16bit_model": True,
                "gradient_clipping": 0.5,
                "num_processes": 2,
            },
        ),
        (("TPU", "", "", "no", ""), {"tpu": True, "use_deepspeed": None, "gpu_ids": None, "num_processes": 1}),
        (("multi-g", "", "", "no", "yes", "ds.json", "2"), {"deepspeed_config_file": "ds.json", "num_processes": 2}),
    ],
)
def test_c4_sharding_has_questions_of_its_own(
    answers: tuple[str, ...], values: dict[str, Any], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "", *answers)
    assert main(["config"]) == 0
    found = read_file(own).values
    assert {name: found.get(name) for name in values} == values


def test_c4_what_is_not_supported_is_said_and_asked_again_on_a_terminal(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "AWS", "", "m", "No distributed training", "", "", "", "", "", "bf17", "bf16", terminal=True)
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert (
        "'AWS' is not supported, because Paceline starts processes only on the machine on which it is launched." in out
    )
    assert (
        "run the following command on each machine, with RANK from 0 to N - 1: paceline launch --num_machines N" in out
    )
    assert "'m' is not one of the choices. Enter a number or a name: 'No distributed training', 'multi-CPU'" in out
    assert "'bf17' is not a valid value. Did you mean 'bf16'?" in out
    assert read_file(own).values["mixed_precision"] == "bf16"


def test_a_wrong_answer_from_a_pipe_ends_it_rather_than_shifting_the_others(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "1")
    assert main(["config"]) == 2
    assert "In which compute environment are you running? '1' is not supported" in capsys.readouterr().err
    assert not own.exists()


def test_u22_flags_alone_write_a_file_without_a_question(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "mixed_precision=bf16", "--set", "num_processes=3", "--yes"]) == 0
    assert capsys.readouterr().out == f"{own}\n"
    assert read_file(own).values == {
        "num_processes": 3,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 1,
        "cpu": False,
        "dynamo_backend": "no",
        "use_fsdp": False,
        "use_deepspeed": False,
    }


def test_what_is_set_is_not_asked_for(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch)
    given = ("mixed_precision=fp16", "cpu=yes", "dynamo_backend=eager")
    assert main(["config", *(word for one in given for word in ("--set", one))]) == 0
    assert asked(capsys) == [QUESTIONS[0], QUESTIONS[1], QUESTIONS[8]]
    found = read_file(own).values
    assert (found["mixed_precision"], found["cpu"], found["dynamo_backend"]) == ("fp16", True, "eager")


def test_u22_a_file_that_is_there_is_not_written_over_and_the_status_is_1(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "default"]) == 0
    before = own.read_text()
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 1
    assert own.read_text() == before
    said = capsys.readouterr().err
    assert f"{own} already exists" in said
    assert "--force" in said
    assert main(["config", "default", "--mixed_precision", "bf16", "--force"]) == 0
    assert read_file(own).values["mixed_precision"] == "bf16"


@pytest.mark.parametrize(("kind", "switch"), [("cuda", "multi_gpu"), ("npu", "multi_gpu"), ("tpu", "tpu")])
def test_the_default_is_a_process_for_each_device_of_the_best_kind(
    own: Path, monkeypatch: pytest.MonkeyPatch, kind: str, switch: str
) -> None:
    monkeypatch.setattr("paceline.processes.devices.find_best", lambda: (kind, 4))
    assert main(["config", "default"]) == 0
    values = read_file(own).values
    assert (values["num_processes"], values[switch]) == (4, True)


@pytest.mark.parametrize(
    ("answers", "kind", "expected"),
    [
        (("multi-GPU", "", "", "", "", "", "", "", ""), "xpu", 4),
        (("multi-GPU", "", "", "", "", "", "", "", ""), "tpu", 2),  # the least that several GPUs are
        (("TPU", "", "", "", "", "", ""), "tpu", 4),
        (("TPU", "", "", "", "", "", ""), "xpu", 1),
    ],
)
def test_the_number_of_processes_counts_devices_of_any_kind(
    own: Path, monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], kind: str, expected: int
) -> None:
    monkeypatch.setattr(kind_of("cuda"), "count", lambda: 0)
    monkeypatch.setattr(kind_of(kind), "count", lambda: 4)
    answer(monkeypatch, "", *answers)
    assert main(["config"]) == 0
    assert read_file(own).values["num_processes"] == expected


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_u22_the_format_follows_the_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"c{suffix}"
    assert main(["config", "default", "--config_file", str(path)]) == 0
    assert {".yaml": "mixed_precision: 'no'", ".json": '"mixed_precision": "no"', ".toml": 'mixed_precision = "no"'}[
        suffix
    ] in path.read_text()


def test_update_changes_what_is_named_and_keeps_the_rest(own: Path) -> None:
    main(["config", "default", "--set", "log_with=wandb"])
    before = read_file(own).values
    assert main(["config", "update", "--set", "mixed_precision=fp16"]) == 0
    assert read_file(own).values == before | {"mixed_precision": "fp16"}


def test_update_reads_a_file_of_accelerate_and_leaves_it_alone(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    theirs = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    assert main(["config", "update"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(own)
    assert read_file(own).values == {"use_fsdp": True, "fsdp_version": 2}
    assert theirs.read_text().startswith("distributed_type")


def test_update_without_a_file_says_so(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "update"]) == 2
    assert "no settings file to update" in capsys.readouterr().err


def test_u22_what_the_environment_says_is_taken_over(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("PACELINE_NUM_PROCESSES", "5")
    assert main(["config", "--from-env", "--yes", "--set", "num_processes=6"]) == 0
    found = read_file(own).values
    assert (found["mixed_precision"], found["fsdp_offload_params"], found["num_processes"]) == ("bf16", True, 6)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("mixed_precison=no", "Did you mean 'mixed_precision'?"),
        ("mixed_precision", "must have the form NAME=VALUE"),
        ("mixed_precision=bf17", "Did you mean 'bf16'?"),
    ],
)
def test_c5_a_setting_that_is_not_one_is_refused(
    given: str, part: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--yes", "--set", given]) == 2
    assert part in capsys.readouterr().err
    assert not own.exists()
