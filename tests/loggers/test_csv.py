from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.loggers import CSVLogger
from paceline.loggers.csv import ExperimentWriter
from paceline.messages import PacelineWarning

Read = Callable[[str], list[dict[str, str]]]


def _without_time(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "wall_time"} for row in rows]


def test_every_row_has_step_epoch_and_wall_time(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    before = time.time()
    logger.log_metrics({"loss": torch.tensor(0.5), "epoch": 0.0}, step=49)
    logger.log_metrics({"loss": 0.25, "epoch": 1}, step=99)
    logger.finalize("success")
    rows = read_csv(logger.log_dir)
    assert _without_time(rows) == [
        {"step": "49", "epoch": "0", "loss": "0.5"},
        {"step": "99", "epoch": "1", "loss": "0.25"},
    ]
    assert all(before <= float(row["wall_time"]) <= time.time() for row in rows)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().partition("\n")[0]
    assert header == "step,epoch,wall_time,loss"


def test_values_of_one_step_share_a_row_also_after_a_flush(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=0)
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=1)
    logger.save()
    logger.log_metrics({"val_loss": 0.75, "epoch": 0}, step=1)
    logger.save()
    logger.log_metrics({"loss_epoch": 0.6}, step=1)
    logger.log_metrics({"loss": 0.4, "epoch": 1}, step=2)
    logger.finalize("success")
    assert _without_time(read_csv(logger.log_dir)) == [
        {"step": "0", "epoch": "0", "loss": "1.0"},
        {"step": "1", "epoch": "0", "loss": "0.5", "val_loss": "0.75", "loss_epoch": "0.6"},
        {"step": "2", "epoch": "1", "loss": "0.4"},
    ]


def test_a_value_logged_twice_at_a_step_or_in_another_epoch_starts_a_row(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=1)
    logger.log_metrics({"loss": 2.0, "epoch": 0}, step=1)
    logger.log_metrics({"test_loss": 3.0, "epoch": 1}, step=1)
    logger.finalize("success")
    assert _without_time(read_csv(logger.log_dir)) == [
        {"step": "1", "epoch": "0", "loss": "1.0"},
        {"step": "1", "epoch": "0", "loss": "2.0"},
        {"step": "1", "epoch": "1", "test_loss": "3.0"},
    ]


_record = st.tuples(
    st.integers(0, 4),
    st.dictionaries(st.sampled_from(["a", "b", "c,d", 'quo"te', "new\nline", "é"]), st.floats(), min_size=1),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_record, max_size=12), st.integers(1, 5))
def test_no_value_is_lost_whatever_the_order_of_names_steps_and_flushes(
    tmp_path_factory: pytest.TempPathFactory, read_csv: Read, records: list[Any], every: int
) -> None:
    logger = CSVLogger(tmp_path_factory.mktemp("csv"), flush_logs_every_n_steps=every)
    for step, metrics, flush in records:
        logger.log_metrics(metrics, step)
        if flush:
            logger.save()
            logger = CSVLogger(logger.save_dir, version=logger.version) if step == 2 else logger
    logger.finalize("success")
    sent = [(step, name, repr(value)) for step, metrics, _ in records for name, value in metrics.items()]
    rows = read_csv(logger.log_dir) if sent else []
    read = [
        (int(row["step"]), name, value)
        for row in rows
        for name, value in row.items()
        if name not in ("step", "epoch", "wall_time")
    ]
    assert sorted(read) == sorted(sent)


def test_the_file_grows_by_appending_and_is_replaced_only_for_a_new_metric(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, step=0)
    path = Path(logger.log_dir) / "metrics.csv"
    first, text = path.stat().st_ino, path.read_text()
    keep = open(path)  # noqa: SIM115 - holds the inode, so that its number is not used again
    for step in range(1, 5):
        logger.log_metrics({"a": 1.0}, step=step)
        assert path.read_text().startswith(text)
        text = path.read_text()
    assert path.stat().st_ino == first
    logger.log_metrics({"b": 1.0}, step=5)
    assert path.stat().st_ino != first
    assert sorted(os.listdir(logger.log_dir)) == ["hparams.yaml", "metrics.csv"]
    keep.close()


def test_rows_reach_the_file_every_n_steps(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=100)
    written = []
    for step in range(49, 500, 50):
        logger.log_metrics({"loss": 1.0}, step=step)
        there = (Path(logger.log_dir) / "metrics.csv").exists()
        written.append(len(read_csv(logger.log_dir)) if there else 0)
    assert written == [0, 0, 3, 3, 5, 5, 7, 7, 9, 9]
    logger.save()
    assert len(read_csv(logger.log_dir)) == 10


def test_an_existing_version_continues(tmp_path: Path, read_csv: Read) -> None:
    for first in (0, 2):
        logger = CSVLogger(tmp_path, version="run")
        logger.log_metrics({"loss": 1.0, f"only_{first}": 5}, step=first)
        logger.log_metrics({"loss": 0.5}, step=first + 1)
        logger.finalize("success")
    rows = _without_time(read_csv(logger.log_dir))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0] == {"step": "0", "loss": "1.0", "only_0": "5"}
    assert rows[2] == {"step": "2", "loss": "1.0", "only_2": "5"}


def test_a_table_of_another_program_is_continued_under_its_columns(tmp_path: Path, read_csv: Read) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("epoch,step,loss\n0,10,1.5\n0,20,1.\n0,3")
    logger = CSVLogger(tmp_path, name="", version="run")
    logger.log_metrics({"loss": 0.5, "epoch": 1}, step=30)
    logger.finalize("success")
    rows = read_csv(logger.log_dir)
    assert list(rows[-1]) == ["epoch", "step", "loss", "wall_time"]
    assert _without_time(rows) == [
        {"epoch": "0", "step": "10", "loss": "1.5"},
        {"epoch": "0", "step": "20", "loss": "1."},
        {"epoch": "1", "step": "30", "loss": "0.5"},
    ]


def test_without_a_step_rows_are_counted(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1})
    logger.log_metrics({"a": 2})
    logger.log_metrics({"a": 3}, step=10)
    logger.log_metrics({"a": 4})
    logger.finalize("success")
    assert [row["step"] for row in read_csv(logger.log_dir)] == ["0", "1", "10", "11"]


def test_prefix_and_nested_names_are_columns(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path, prefix="exp")
    logger.log_metrics({"loss": {"train": 1.0}, "acc": 0.5, "epoch": 0}, step=0)
    logger.finalize("success")
    assert _without_time(read_csv(logger.log_dir)) == [
        {"step": "0", "epoch": "0", "exp-loss/train": "1.0", "exp-acc": "0.5"}
    ]


def test_a_metric_named_like_a_fixed_column_is_kept_beside_it(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.warns(PacelineWarning, match=r"'step' is written to the column 'metric/step'"):
        logger.log_metrics({"step": 7.0, "loss": 1.0}, step=3)
    logger.finalize("success")
    assert _without_time(read_csv(logger.log_dir)) == [{"step": "3", "metric/step": "7.0", "loss": "1.0"}]


def test_metrics_that_come_with_settings_stand_at_step_0(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1}, {"hp_acc": 0.5})
    logger.save()
    assert _without_time(read_csv(logger.log_dir)) == [{"step": "0", "hp_acc": "0.5"}]


def test_a_value_that_is_no_number_is_refused_and_the_rows_before_stay(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    with pytest.raises(TypeError, match=r"metric 'loss'.*shape"):
        logger.log_metrics({"loss": torch.zeros(3)}, step=1)
    logger.finalize("failed")
    assert len(read_csv(logger.log_dir)) == 1


def test_a_flush_distance_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"flush_logs_every_n_steps=0\) would never write.*Pass 1"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_a_failed_write_keeps_the_rows_for_the_next_one(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    hidden = path.rename(path.with_suffix(".hidden"))
    path.mkdir()
    logger.log_metrics({"loss": 2.0}, step=1)
    with pytest.raises(OSError, match="Is a directory: CSVLogger cannot write to its folder"):
        logger.save()
    path.rmdir()
    hidden.rename(path)
    logger.save()
    assert [row["loss"] for row in read_csv(logger.log_dir)] == ["1.0", "2.0"]


def test_a_table_that_was_deleted_during_the_run_starts_anew(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    (Path(logger.log_dir) / "metrics.csv").unlink()
    with pytest.warns(PacelineWarning, match="was deleted while the run was writing it, so its contents are lost"):
        logger.log_metrics({"loss": 2.0}, step=1)
    logger.save()
    assert [row["loss"] for row in read_csv(logger.log_dir)] == ["2.0"]


def _program(folder: Path, ending: str) -> int:
    code = f"""
        import os, signal
        from paceline.loggers import CSVLogger
        logger = CSVLogger({str(folder)!r}, name="", version="run")
        logger.log_metrics({{"loss": 1.0}}, step=0)
        {ending}
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE).returncode


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('no finalize')"])
def test_a_program_that_ends_without_finalize_leaves_its_rows(tmp_path: Path, read_csv: Read, ending: str) -> None:
    assert _program(tmp_path, ending) == bool(ending)
    assert [row["loss"] for row in read_csv(str(tmp_path / "run"))] == ["1.0"]


def test_what_save_wrote_survives_a_kill(tmp_path: Path, read_csv: Read) -> None:
    assert _program(tmp_path, "logger.save(); os.kill(os.getpid(), signal.SIGKILL)") == -signal.SIGKILL
    assert [row["loss"] for row in read_csv(str(tmp_path / "run"))] == ["1.0"]


def test_a_forked_child_does_not_write_the_rows_of_its_parent(tmp_path: Path) -> None:
    fork = "pid = os.fork()\n        if pid == 0: del logger\n        else: os.waitpid(pid, 0)\n        os._exit(0)"
    assert _program(tmp_path, fork) == 0
    assert os.listdir(tmp_path / "run") == []


def test_the_writer_is_the_experiment_and_saves_through_the_logger(tmp_path: Path, read_csv: Read) -> None:
    saves: list[int] = []

    class Counts(CSVLogger):
        def save(self) -> None:
            saves.append(len(self.experiment.metrics))
            super().save()

    logger = Counts(tmp_path, flush_logs_every_n_steps=2)
    logger.log_metrics({"loss": 1.0}, step=0)
    assert (saves, len(logger.experiment.metrics)) == ([], 1)
    logger.log_metrics({"loss": 2.0}, step=1)
    assert (saves, logger.experiment.metrics) == ([2], [])
    folder = tmp_path / "alone"
    folder.mkdir()
    writer = ExperimentWriter(folder)
    writer.log_metrics({"loss": torch.tensor(0.5), "epoch": 1})
    writer.log_metrics({"loss": 0.25})
    writer.save()
    assert writer.metrics_file_path == str(folder / ExperimentWriter.NAME_METRICS_FILE)
    assert [(row["step"], row["loss"]) for row in read_csv(str(folder))] == [("0", "0.5"), ("1", "0.25")]
