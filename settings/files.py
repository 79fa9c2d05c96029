"""Find, read and write configuration files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import messages
from .names import SETTINGS

#: Environment variable with the path of the file to use; ``none`` means no file.
CONFIG_VARIABLE = "PACELINE_CONFIG_FILE"
SUFFIXES = (".yaml", ".yml", ".json", ".toml")

#: Keys of Accelerate's files that Paceline does not use, with the values that it ignores without a message.
_IDLE: dict[str, tuple[Any, ...]] = {
    "same_network": (True, False),
    "main_training_function": ("main",),
    "downcast_bf16": (False, "no"),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "command_file", "commands"), ()),
    **dict.fromkeys(("megatron_lm_config", "fp8_config", "mpirun_config"), ()),
}
#: Settings that each ``distributed_type`` in Accelerate's files sets.
_TYPES: dict[str, dict[str, Any]] = {
    "NO": {},
    "MULTI_CPU": {"cpu": True},
    "MULTI_GPU": {"multi_gpu": True},
    "XLA": {"tpu": True},
    "FSDP": {"use_fsdp": True},
    "DEEPSPEED": {"use_deepspeed": True},
}
_SECTIONS = ("dynamo_config", "fsdp_config", "deepspeed_config", "parallelism_config")

_KEYS = {key: one.name for one in SETTINGS.values() for key in (one.name, *one.keys)}


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a configuration file.

    Attributes:
        path: the file's path.
        values: the values that are not empty, by setting name.
        keys: the file's key for each setting in ``values``.
        unused: the file's keys that only Accelerate uses.
    """

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


# ---- finding -------------------------------------------------------------------------------------------------------


def own_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's own configuration file, which ``paceline config`` writes."""
    return Path(environment.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "paceline" / "config.yaml"


def accelerates_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the configuration file that ``accelerate config`` writes."""
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environment.get("HF_HOME") or cache).expanduser() / "accelerate" / "default_config.yaml"


def find_file(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the file that PACELINE_CONFIG_FILE refers to or, if the variable is not set, the first file that exists.

    Files are tried in this order: the working directory's file, the user's own file, Accelerate's file.

    Raises:
        FileNotFoundError: the file that PACELINE_CONFIG_FILE refers to does not exist.
    """
    named = environment.get(CONFIG_VARIABLE)
    if named:
        if named.lower() == "none":
            return None
        return str(_existing(Path(named).expanduser(), f"The environment variable {CONFIG_VARIABLE}"))
    mine, theirs = own_file(environment), accelerates_file(environment)
    here = [Path(f"paceline{suffix}") for suffix in SUFFIXES]
    places = [*here, *(mine.with_suffix(suffix) for suffix in SUFFIXES), theirs, theirs.with_suffix(".json")]
    found = next((place for place in places if place.is_file()), None)
    if found is not None and found.parent == theirs.parent:
        messages.info_once(
            f"Settings are read from {found}, which Accelerate wrote. Run `paceline config` to create Paceline's own "
            f"file, or set {CONFIG_VARIABLE}=none to read no file."
        )
    return None if found is None else str(found)


def _existing(path: Path, who: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{who} points to {str(path)!r}, but there is no such file. Run `paceline config` to write one."
        )
    return path


# ---- reading -------------------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a configuration file that was written for Paceline or Accelerate.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not in the format that its suffix indicates, or it has an unknown key, two keys for one
            setting, an invalid value, or a value that Paceline does not support.
    """
    place = _existing(Path(path).expanduser(), "The configuration path")
    found = ConfigFile(str(place))
    for key, value in _flat(load(place), place):
        for name, meant in _meaning(key, value, found).items():
            _put(found, key, name, meant)
    if any(key.startswith("parallelism_config.") for key in found.keys.values()):
        found.values.setdefault("use_parallelism_config", True)
        found.keys.setdefault("use_parallelism_config", "parallelism_config")
    if found.unused:
        messages.info_once(f"{place} has keys that Paceline does not use: {', '.join(found.unused)}.")
    return found


def load(path: Path) -> Any:
    """Return a configuration file's content as plain data.

    Raises:
        ValueError: the file is not in the format that its suffix indicates.
    """
    suffix = _suffix(path)
    try:
        return _PARSERS[suffix](path.read_text(encoding="utf-8"))
    except ValueError as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not valid {suffix[1:].upper()}, although its suffix is {suffix}: {problem}. Correct the file."
        ) from None


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} has an unknown suffix. Use {messages.names(SUFFIXES)}.")
    return path.suffix


def _flat(content: Any, path: Path) -> Iterable[tuple[str, Any]]:
    """Yield a file's keys and values; a key in a section becomes ``section.key``."""
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(
            f"{path} contains {messages.a(content)}, not key-value pairs. Write each setting on its own line, as "
            "`key: value`."
        )
    for key, value in (content or {}).items():
        if key in _SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        elif key not in _SECTIONS or value not in (None, {}):
            yield str(key), value


def _meaning(key: str, value: Any, file: ConfigFile) -> dict[str, Any]:
    """Return the settings that a key in a configuration file sets, with their values."""
    section, _, inner = key.rpartition(".")
    prefixed = f"{section}.{section.removesuffix('_config')}_{inner}"  # the form of the key in older files
    name = _KEYS.get(key) or _KEYS.get(prefixed)
    if name is not None:
        return {} if SETTINGS[name].is_nothing(value) or (key == "num_processes" and value == -1) else {name: value}
    if key in ("distributed_type", "compute_environment"):
        return _of_type(key, value, file)
    if key == "fp16":
        return {"mixed_precision": "fp16"} if value else {}
    if key not in _IDLE:
        known = [*_KEYS, "distributed_type"] if not section else [k for k in _KEYS if k.startswith(f"{section}.")]
        raise ValueError(
            f"{file.path} has an unknown key {key!r}.{messages.did_you_mean(key, known)} Remove the key, or see "
            "`paceline config --help` for the valid keys."
        )
    if value not in (None, "", [], {}, *_IDLE[key]):
        file.unused.append(key)
    return {}


def _of_type(key: str, value: Any, file: ConfigFile) -> dict[str, Any]:
    word = "NO" if value is False else str(value).upper().rpartition(".")[2]
    if key == "compute_environment" and word == "LOCAL_MACHINE":
        return {}
    if key == "compute_environment" or word not in _TYPES:
        known = messages.names(_TYPES) if key == "distributed_type" else "'LOCAL_MACHINE'"
        raise ValueError(
            f"{file.path} has {key}: {value}, which Paceline does not support. Choose {known}, or set "
            f"{CONFIG_VARIABLE}=none to read no file."
        )
    return _TYPES[word]


def _put(file: ConfigFile, key: str, name: str, value: Any) -> None:
    where = f"{file.path}, key {key}"
    value = SETTINGS[name].parsed(value, where)
    if file.values.get(name, value) != value and "distributed_type" not in (key, file.keys[name]):
        raise ValueError(
            f"{file.path} sets {name} twice: {file.values[name]!r} as {file.keys[name]} and {value!r} as {key}. Remove "
            "one of them."
        )
    if file.keys.get(name) != "distributed_type":
        file.values[name], file.keys[name] = value, key


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        raise ModuleNotFoundError("Settings in TOML need Python 3.11 or newer. Write them as YAML or JSON.") from None
    return tomllib.loads(text)


_PARSERS = {".yaml": _yaml, ".yml": _yaml, ".json": json.loads, ".toml": _toml}


# ---- writing -------------------------------------------------------------------------------------------------------


def write_file(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write settings atomically, in the format that the file's suffix indicates. Create the file's folder if needed."""
    place = Path(path).expanduser()
    text = _WRITERS[_suffix(place)](dict(values))
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def _as_yaml(values: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(values, sort_keys=False)


def _as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _as_toml(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


_WRITERS = {".yaml": _as_yaml, ".yml": _as_yaml, ".json": _as_json, ".toml": _as_toml}
