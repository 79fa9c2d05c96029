"""Read and write hyperparameter files: YAML, or CSV with a name and a value in each row."""

from __future__ import annotations

import ast
import csv
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_hparams(path: Path) -> dict[str, Any]:
    """Return the values in a ``.yaml``, ``.yml`` or ``.csv`` file.

    Raises:
        ValueError: if the file has a different type.
        ModuleNotFoundError: if the file is YAML and pyyaml is not installed.
    """
    kind = path.suffix.lower()
    if kind == ".csv":
        with path.open(newline="") as lines:
            return {row[0]: _literal(row[1]) for row in list(csv.reader(lines))[1:] if row}
    if kind in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"hparams_file={str(path)!r} is a YAML file, but pyyaml is not installed. Run `pip install pyyaml`."
            ) from error
        return yaml.safe_load(path.read_text()) or {}
    raise ValueError(f"hparams_file={str(path)!r} has an unknown file type. Pass a .yaml, .yml or .csv file.")


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """Return the values in a YAML file; an empty dict if the file does not exist.

    Args:
        config_yaml: path of the file.
        use_omegaconf: whether to return an OmegaConf container if the file contains interpolations and OmegaConf is
            installed.
    """
    path = Path(config_yaml)
    values = read_hparams(path) if path.is_file() else {}
    if use_omegaconf and "${" in str(values):
        try:
            from omegaconf import OmegaConf
        except ModuleNotFoundError:
            return values
        return OmegaConf.create(values)
    return values


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """Return the values in a CSV file; an empty dict if the file does not exist."""
    path = Path(tags_csv)
    return read_hparams(path) if path.is_file() else {}


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write values to a YAML file in an existing folder.

    Args:
        config_yaml: path of the file.
        hparams: a mapping, a namespace or an OmegaConf container. Values that YAML cannot represent are written as
            strings.
        use_omegaconf: whether to write an OmegaConf container's interpolations instead of their values.

    Raises:
        RuntimeError: if the folder does not exist.
    """
    import yaml

    path = Path(config_yaml)
    if not path.parent.is_dir():
        raise RuntimeError(
            f"save_hparams_to_yaml({str(path)!r}): the folder {str(path.parent)!r} does not exist. Create the folder "
            "first."
        )
    if type(hparams).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        if use_omegaconf:
            path.write_text(OmegaConf.to_yaml(hparams))
            return
        hparams = OmegaConf.to_container(hparams, resolve=True)
    values: Mapping[str, Any] = vars(hparams) if isinstance(hparams, Namespace) else dict(hparams)
    path.write_text(yaml.safe_dump({name: _writable(value) for name, value in values.items()}, sort_keys=False))


def _writable(value: Any) -> Any:
    import yaml

    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return getattr(value, "__name__", None) or repr(value)
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
