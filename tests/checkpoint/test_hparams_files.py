"""Files of hyperparameters."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from paceline.checkpoint.hparams_files import (
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    read_hparams,
    save_hparams_to_yaml,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hparams.yaml"
    save_hparams_to_yaml(path, Namespace(lr=0.1, layers=[1, 2], act=print))
    assert load_hparams_from_yaml(path) == {"lr": 0.1, "layers": [1, 2], "act": "print"} == read_hparams(path)
    (tmp_path / "tags.csv").write_text("key,value\nlr,0.5\nname,x\n")
    assert load_hparams_from_tags_csv(tmp_path / "tags.csv") == {"lr": 0.5, "name": "x"}
    assert load_hparams_from_yaml(tmp_path / "none.yaml") == load_hparams_from_tags_csv(tmp_path / "none.csv") == {}


def test_interpolations_stay(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    path = tmp_path / "hparams.yaml"
    save_hparams_to_yaml(path, omegaconf.OmegaConf.create({"a": 1, "b": "${a}"}))
    assert load_hparams_from_yaml(path).b == 1


def test_a_folder_has_to_exist_and_a_type_to_be_known(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        save_hparams_to_yaml(tmp_path / "none" / "x.yaml", {})
    with pytest.raises(ValueError, match="unknown file type"):
        read_hparams(tmp_path / "x.ini")
