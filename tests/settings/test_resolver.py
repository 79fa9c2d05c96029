"""Which of the places a setting may be written in counts, and what is said about it. Rows D1-D4 and C12."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from paceline import messages
from paceline.settings import SETTINGS, Given, Settings, hand_over, resolve
from paceline.settings.resolver import FLAGS

PLACES = ("code", "flag", "env", "file", "default")


def two_values(name: str) -> tuple[Any, Any]:
    """Two different values of a setting, neither of which is its default; or as different as it has them."""
    one = SETTINGS[name]
    if one.accepts.startswith("true"):
        return (True, False) if one.default is not True else (False, True)
    if one.accepts.startswith("a whole number"):
        values = [n for n in range(5) if n != one.default and is_value(name, n)] or [1]
        return values[0], values[-1]
    if one.accepts.startswith("a number"):
        return 0.5, 2.0
    if one.accepts == "text":
        return "this", "that"
    words = [word for word in one.accepts.split(", ") if word != one.default] or [str(one.default)]
    return words[0], words[-1]


def is_value(name: str, value: Any) -> bool:
    try:
        SETTINGS[name].parse(value)
    except ValueError:
        return False
    return True


def resolved(name: str, folder: Path, values: dict[str, Any], launched: bool = False) -> Settings:
    """The settings where each of some places says something about one of them."""
    environment = {"PACELINE_CONFIG_FILE": "none"}
    if "file" in values:
        (folder / "settings.json").write_text(json.dumps({name: values["file"]}))
        environment["PACELINE_CONFIG_FILE"] = str(folder / "settings.json")
    if "env" in values:
        environment[SETTINGS[name].variable] = str(values["env"])
    flags = {name: str(values["flag"]).lower() if isinstance(values.get("flag"), bool) else values.get("flag")}
    if launched:
        environment |= hand_over(resolve(flags=flags, environment=environment))
        flags = {}
    return resolve({name: values.get("code")}, flags, environment=environment)


@pytest.mark.parametrize("name", SETTINGS)
def test_d1_of_any_two_places_the_higher_one_counts_for_every_setting(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")
    first, second = two_values(name)
    for higher, lower in combinations(PLACES, 2):
        messages.forget()
        caplog.clear()
        settings = resolved(name, tmp_path, {higher: first} | ({} if lower == "default" else {lower: second}))
        assert (settings[name], settings.origin(name).place) == (first, higher)
        assert type(settings[name]) is type(first)
        shown = "Current settings"  # what `debug` asks for
        said = [record.message for record in caplog.records if not record.message.startswith(shown)]
        if lower == "default" or first == second:
            assert not said
        else:
            (line,) = said
            assert line.startswith(f"{name}={first!r} from ")
            assert f" overrides {second!r} from " in line


@pytest.mark.parametrize("name", SETTINGS)
def test_d1_every_setting_falls_through_to_each_place_that_is_left(name: str, tmp_path: Path) -> None:
    first, second = two_values(name)
    values = {place: (first, second)[number % 2] for number, place in enumerate(PLACES[:-1])}
    for place in PLACES[:-1]:
        settings = resolved(name, tmp_path, values)
        assert (settings[name], settings.origin(name).place) == (values.pop(place), place)
    settings = resolved(name, tmp_path, values)
    assert (settings[name], settings.origin(name).place) == (SETTINGS[name].default, "default")


@pytest.mark.parametrize("name", SETTINGS)
def test_d2_none_and_an_empty_variable_are_not_set(name: str) -> None:
    for value in ("", "none", "None", "auto", "null"):
        environment = {SETTINGS[name].variable: value, "PACELINE_CONFIG_FILE": "none"}
        settings = resolve({name: None}, {name: None}, environment=environment)
        if value.lower() in SETTINGS[name].accepts.split(", "):
            assert settings[name] == "none"
        else:
            assert settings.origin(name).place == "default"


@pytest.mark.parametrize(
    ("name", "no"), [("mixed_precision", "no"), ("cpu", False), ("dynamo_backend", "no"), ("use_fsdp", False)]
)
@pytest.mark.parametrize("place", PLACES[:3])
def test_d2_an_explicit_no_wins(name: str, no: Any, place: str, tmp_path: Path) -> None:
    yes = two_values(name)[0]
    settings = resolved(name, tmp_path, {place: no, "file": yes})
    assert (settings[name], settings.origin(name).place) == (no, place)


def test_d3_a_conflict_is_said_once_with_both_values_their_places_and_the_winner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")
    for _ in range(2):
        resolved("mixed_precision", tmp_path, {"code": "no", "file": "bf16"})
    assert [record.message for record in caplog.records] == [
        "mixed_precision='no' from Accelerator(mixed_precision='no') overrides 'bf16' from "
        f"{tmp_path / 'settings.json'}: mixed_precision."
    ]


def test_d3_places_that_agree_are_no_conflict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    resolved("mixed_precision", tmp_path, {"code": "bf16", "env": "BF16", "file": "bf16"})
    assert not caplog.records


def test_d3_what_the_launcher_has_said_its_processes_do_not_say_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"flag": "no", "file": "bf16"}
    environment = {"PACELINE_CONFIG_FILE": str(tmp_path / "settings.json")}
    (tmp_path / "settings.json").write_text('{"mixed_precision": "bf16"}')
    handed = hand_over(resolve(flags={"mixed_precision": "no"}, environment=environment))
    messages.forget()  # another process
    caplog.set_level("INFO", logger="paceline")
    settings = resolve(environment=environment | handed)
    assert settings.origin("mixed_precision") == ("flag", "--mixed_precision")
    assert not caplog.records
    resolve({"mixed_precision": "fp16"}, environment=environment | handed)
    (record,) = caplog.records
    assert all(repr(value) in record.message for value in ("fp16", *values.values()))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_launchers_flag_reaches_its_processes_as_a_flag(name: str, tmp_path: Path) -> None:
    first, second = two_values(name)
    settings = resolved(name, tmp_path, {"flag": first, "env": second, "file": second}, launched=True)
    assert (settings[name], settings.origin(name)) == (first, ("flag", f"--{name}"))


def test_what_is_handed_over_names_the_file_and_nothing_that_was_no_flag(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"cpu": true}')
    settings = resolve(flags={"num_processes": "2"}, config_file=file, environment={"PACELINE_DEBUG": "1"})
    assert hand_over(settings) == {
        "PACELINE_NUM_PROCESSES": "2",
        FLAGS: "num_processes",
        "PACELINE_CONFIG_FILE": str(file),
    }
    assert hand_over(resolve(environment={"PACELINE_CONFIG_FILE": "none"}))["PACELINE_CONFIG_FILE"] == "none"


@pytest.mark.parametrize(
    ("variable", "name"), [(variable, one.name) for one in SETTINGS.values() for variable in one.variables]
)
def test_the_variables_of_accelerate_are_read_after_ours(variable: str, name: str) -> None:
    first, second = two_values(name)
    environment = {variable: str(second), "PACELINE_CONFIG_FILE": "none"}
    settings = resolve(environment=environment)
    assert (settings[name], settings.origin(name)) == (second, ("env", variable))
    settings = resolve(environment=environment | {SETTINGS[name].variable: str(first)})
    assert settings[name] == first


def test_u3_code_beats_the_variable_for_accumulation() -> None:
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8", "PACELINE_CONFIG_FILE": "none"}
    assert resolve({"gradient_accumulation_steps": 2}, environment=environment)["gradient_accumulation_steps"] == 2
    assert resolve({"gradient_accumulation_steps": None}, environment=environment)["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("mixed_precision", "bf17", ("'bf17'", "Did you mean 'bf16'?", "'no', 'fp16', 'bf16' or 'fp8'")),
        ("cpu", "maybe", ("'maybe'", "true or false")),
        ("num_processes", "two", ("'two'", "not a whole number", "1 or more")),
        ("num_processes", 0, ("0", "out of range", "1 or more")),
        ("main_process_port", 65536, ("65536", "from 0 to 65535")),
        ("gradient_clipping", "-1", ("'-1'", "number above 0")),
        ("fsdp_sharding_strategy", "FULL_SHART", ("'FULL_SHART'", "Did you mean 'FULL_SHARD'?", "'FULL_SHARD'")),
    ],
)
@pytest.mark.parametrize("place", PLACES[:4])
def test_a_value_that_a_setting_does_not_have_is_refused_with_its_place(
    name: str, value: Any, parts: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    if place == "env" and not isinstance(value, str):
        parts = (f"'{value}'", *parts[1:])
    where = {
        "code": f"Accelerator({name}=)",
        "flag": f"--{name}",
        "env": f"PACELINE_{name.upper()}",
        "file": f"{tmp_path / 'settings.json'}, key {name}",
    }[place]
    with pytest.raises(ValueError, match=re.escape(where)) as raised:
        resolved(name, tmp_path, {place: value})
    for part in parts:
        assert part in str(raised.value)


def test_an_unknown_setting_in_code_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'mixd_precision'\. Did you mean 'mixed_precision'\?"):
        resolve({"mixd_precision": "no"})
    with pytest.raises(KeyError, match="Did you mean 'mixed_precision'"):
        resolve()["mixed_precison"]


def test_objects_from_code_are_passed_on_as_they_are() -> None:
    tracker, strategy = object(), object()
    settings = resolve({"log_with": [tracker, "wandb"], "strategy": Given(strategy, "Trainer(strategy=)")})
    assert settings["log_with"] == [tracker, "wandb"]
    assert settings["strategy"] is strategy
    assert settings.origin("strategy") == ("code", "Trainer(strategy=)")


def test_numbers_and_cases_of_words_mean_the_word() -> None:
    settings = resolve({"fsdp_sharding_strategy": 2, "dynamo_backend": "INDUCTOR"})
    assert (settings["fsdp_sharding_strategy"], settings["dynamo_backend"]) == ("SHARD_GRAD_OP", "inductor")


def test_d4_the_table_shows_every_setting_with_value_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    settings = resolve({"mixed_precision": "bf16"}, {"cpu": True}, environment={"PACELINE_CONFIG_FILE": "none"})
    settings.print()
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert set(shown) == set(SETTINGS)
    assert shown["mixed_precision"] == ["bf16", "code", "Accelerator(mixed_precision='bf16')"]
    assert shown["cpu"] == ["True", "flag", "--cpu"]
    assert shown["num_machines"] == ["1", "default"]
    settings.print(everything=False)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_settings_can_be_pickled_and_are_a_mapping() -> None:
    settings = resolve({"cpu": True})
    again = pickle.loads(pickle.dumps(settings))
    assert dict(again) == dict(settings)
    assert again.get("nothing", 3) == 3
    assert again.is_set("cpu")
    assert not again.is_set("mixed_precision")


@pytest.mark.cold
def test_u9_settings_are_found_without_torch() -> None:
    program = "import sys; from paceline.settings import resolve; resolve(); print('torch' in sys.modules)"
    environment = {**os.environ, "PACELINE_CONFIG_FILE": "none"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False\n"


def test_every_variable_and_key_belongs_to_one_setting() -> None:
    for read in ([one.variable, *one.variables] for one in SETTINGS.values()), (one.keys for one in SETTINGS.values()):
        every = [text for texts in read for text in texts]
        assert len(every) == len(set(every))


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PACELINE_MIXED_PRECISON", "PACELINE_MIXED_PRECISION"),
        ("PACELINE_PRECISION", "PACELINE_MIXED_PRECISION"),
        ("PACELINE_GRADIENT_ACUMULATION_STEPS", "PACELINE_GRADIENT_ACCUMULATION_STEPS"),
        ("PACELINE_GLOBAL_SED", "PACELINE_GLOBAL_SEED"),
        ("PACELINE_LOGLEVEL", "PACELINE_LOG_LEVEL"),
    ],
)
def test_a_misspelt_variable_is_warned_of_once(variable: str, meant: str) -> None:
    with pytest.warns(messages.PacelineWarning, match=f"{variable} has no effect. Did you mean '{meant}'?") as warned:
        [resolve(environment={variable: "1", "PACELINE_CONFIG_FILE": "none"}) for _ in range(2)]
    assert len(warned) == 1


def test_variables_of_the_package_and_of_other_programs_are_no_misspellings() -> None:
    root = Path(messages.__file__).parent
    others = ("tests", ".", "build")  # a virtual environment lies in a folder whose name begins with a dot
    sources = [path for path in root.glob("*/**/*.py") if not path.relative_to(root).parts[0].startswith(others)]
    own = {name for path in sources for name in re.findall(r"PACELINE_[A-Z_]+[A-Z]", path.read_text())}
    assert len(own) > 10
    foreign = {"PACELINE_MY_MODEL", "PACELINE_HOME", "PACELINE_STRIKE_RANK", "PACELINE_DATA_DIR"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(environment={**dict.fromkeys(own | foreign, "auto"), "PACELINE_CONFIG_FILE": "none"})
