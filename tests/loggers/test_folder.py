from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import messages
from paceline.loggers import CSVLogger, Logger, TensorBoardLogger

pytestmark = pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])


def test_versions_count_up_from_the_highest_there_is(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "exp" / "version_7").mkdir(parents=True)
    (tmp_path / "exp" / "version_old").mkdir()
    logger = kind(tmp_path, name="exp")
    assert logger.version == 8
    assert logger.version == 8
    assert kind(tmp_path, name="exp").version == 9
    assert logger.log_dir == str(tmp_path / "exp" / "version_8")
    assert logger.root_dir == str(tmp_path / "exp")
    assert logger.save_dir == str(tmp_path)
    assert logger.name == "exp"


def test_runs_that_start_together_never_share_a_folder(kind: Any, tmp_path: Path) -> None:
    code = (
        f"import sys; from paceline.loggers import {kind.__name__}\n"
        "sys.stdin.readline()\n"
        f"print([{kind.__name__}({str(tmp_path)!r}).version for _ in range(40)])"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdin
        run.stdin.write("go\n")
        run.stdin.flush()
    versions = [number for run in runs for number in yaml.safe_load(run.communicate()[0])]
    assert sorted(versions) == list(range(80))


def test_looking_at_a_logger_makes_no_folder_until_the_version_is_asked_for(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    assert (logger.name, logger.root_dir) == ("paceline_logs", str(tmp_path / "paceline_logs"))
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "folder"), [(3, "exp/version_3"), ("best_run", "exp/best_run"), (0, "exp/version_0")]
)
def test_a_named_version_is_used_as_it_is(kind: Any, tmp_path: Path, version: Any, folder: str) -> None:
    logger = kind(tmp_path, name="exp", version=version)
    assert logger.log_dir == str(tmp_path / folder)
    assert logger.version == version


@pytest.mark.parametrize("name", [None, ""])
def test_without_a_name_versions_lie_in_the_save_dir(kind: Any, tmp_path: Path, name: str | None) -> None:
    assert kind(tmp_path, name=name).log_dir == str(tmp_path / "version_0")


@pytest.mark.parametrize("version", [-1, 1.5, True, ""])
def test_a_version_that_names_no_run_is_refused(kind: Any, tmp_path: Path, version: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a non-negative integer.*Pass version=3"):
        kind(tmp_path, version=version)


def test_a_url_is_refused_before_the_run(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"save_dir='s3://bucket/logs'.*local or mounted"):
        kind("s3://bucket/logs")


def test_settings_are_in_hparams_yaml_at_once(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "net": {"widths": (8, 4), "where": Path("x")}})
    logger.log_hyperparams({"epochs": 3})
    text = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert yaml.safe_load(text) == {"lr": 0.1, "net": {"widths": [8, 4], "where": "x"}, "epochs": 3}
    assert text.startswith("lr:")
    assert not list(Path(logger.log_dir).glob(".hparams*"))


def test_continuing_a_version_keeps_the_settings_of_the_first_run(kind: Any, tmp_path: Path) -> None:
    for rate in (0.1, 0.1, 0.2, 0.3):
        logger = kind(tmp_path, version=0)
        logger.log_hyperparams({"lr": rate})
        logger.log_hyperparams({"more": 1})
    kept = {p.name: yaml.safe_load(p.read_text()) for p in Path(logger.log_dir).glob("hparams*.yaml")}
    assert kept["hparams.yaml"] == {"lr": 0.3, "more": 1}
    assert {"lr": 0.1, "more": 1} in kept.values()
    assert {"lr": 0.2, "more": 1} in kept.values()


def test_hparams_yaml_is_written_without_settings_too(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    logger.log_hyperparams()
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == {}


def _through_pickle(logger: Logger) -> Logger:
    return pickle.loads(pickle.dumps(logger))


@pytest.mark.parametrize("copied", [copy.deepcopy, _through_pickle])
def test_a_copy_made_before_the_run_logs(kind: Any, tmp_path: Path, copied: Any) -> None:
    logger = copied(kind(tmp_path, prefix="p"))
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    assert os.listdir(logger.log_dir)


@pytest.mark.parametrize("copied", [copy.deepcopy, _through_pickle])
def test_a_copy_made_during_the_run_continues_its_version(kind: Any, tmp_path: Path, copied: Any) -> None:
    logger = kind(tmp_path)
    logger.log_hyperparams({"f": len})
    logger.log_metrics({"loss": 1.0}, step=0)
    twin = copied(logger)
    logger.finalize("success")
    twin.log_metrics({"loss": 2.0}, step=1)
    twin.finalize("success")
    assert twin.log_dir == logger.log_dir
    assert twin.hparams == logger.hparams


def test_other_ranks_touch_no_file_and_their_experiment_swallows_all(kind: Any, tmp_path: Path) -> None:
    messages.set_rank(1)
    logger = kind(tmp_path)
    assert logger.version == 0
    logger.log_hyperparams({"lr": 0.1}, {"acc": 0.0})
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=0)
    logger.experiment.add_histogram("weights", [1, 2]).anything(3)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_settings_has_an_empty_hparams_yaml_and_later_settings_replace_it(
    kind: Any, tmp_path: Path
) -> None:
    logger = kind(tmp_path)
    logger.save()
    assert os.listdir(tmp_path) == []  # nothing was logged
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    path = Path(logger.log_dir) / "hparams.yaml"
    assert path.read_text() == "{}\n"
    again = kind(tmp_path, version=0)
    again.log_hyperparams({"lr": 0.1})
    assert yaml.safe_load(path.read_text()) == {"lr": 0.1}
    assert not path.with_name("hparams_1.yaml").exists()
    logger.finalize("success")


def test_the_name_of_a_subclass_names_the_folder(kind: Any, tmp_path: Path) -> None:
    class Named(kind):
        @property
        def name(self) -> str:
            return "mine"

    assert Named(tmp_path).log_dir == str(tmp_path / "mine" / "version_0")
