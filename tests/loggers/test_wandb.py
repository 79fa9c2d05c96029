from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import until

from paceline import messages
from paceline.loggers import WandbLogger
from paceline.messages import PacelineWarning

History = Callable[[str | Path], list[dict[str, Any]]]
Records = Callable[[str | Path], list[Any]]


def _file(folder: Path, run_id: str = "*") -> Path:
    (path,) = folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    return path


def _exit_code(read_wandb: Records, file: Path) -> int:
    """How the run ended; wandb's process notes it at the very end, after ``finish`` has returned."""

    def noted() -> list[int]:
        return [record.exit.exit_code for record in read_wandb(file) if record.WhichOneof("record_type") == "exit"]

    return until("wandb has noted how the run ended", noted)[0]


def _config(records: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records:
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
        found.update({u.key: json.loads(u.value_json) for u in updates if u.key and u.key != "_wandb"})
    return found


def _artifacts(records: list[Any]) -> list[Any]:
    """Artifacts as ``wandb sync`` will upload them: the last record of each."""
    found = [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    found += [
        r.request.log_artifact.artifact
        for r in records
        if r.WhichOneof("record_type") == "request" and r.request.HasField("log_artifact")
    ]
    return found


def test_an_offline_run_is_on_disk_after_finalize_and_stays_open(
    offline_wandb: Path, read_wandb: Records, wandb_history: History
) -> None:
    logger = WandbLogger("trial", save_dir=offline_wandb, offline=True, project="digits", id="abc", tags=["t"])
    assert (logger.name, logger.version, logger.save_dir) == ("digits", "abc", str(offline_wandb))
    assert logger.log_dir == str(offline_wandb / "digits" / "abc")
    logger.log_hyperparams({"opt": {"lr": 0.1, "betas": (0.9, 0.99)}, "where": Path("x"), "f": len}, {"hp": 1.0})
    for step in (49, 99):
        logger.log_metrics({"loss": torch.tensor(1 / step), "epoch": 0, "by": {"a": 1}}, step=step)
    logger.finalize("success")

    records = read_wandb(_file(offline_wandb, "abc"))
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project, run.display_name, list(run.tags)) == ("abc", "digits", "trial", ["t"])
    assert _config(records) == {"opt": {"lr": 0.1, "betas": [0.9, 0.99]}, "where": "x", "f": "builtins.len"}
    axes = {(r.metric.name or r.metric.glob_name): r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "trainer/global_step"
    rows = wandb_history(_file(offline_wandb))
    assert [row["trainer/global_step"] for row in rows] == [0, 49, 99]
    assert [row.get("loss") for row in rows] == [None, pytest.approx(1 / 49), pytest.approx(1 / 99)]
    assert all("_timestamp" in row for row in rows)
    assert (rows[1]["epoch"], rows[1]["by/a"]) == (0, 1)

    logger.log_metrics({"test_loss": 0.5}, step=99)
    logger.finalize("success")
    assert wandb_history(_file(offline_wandb))[-1]["test_loss"] == 0.5


def test_a_failed_run_is_finished_as_failed_and_can_go_on_under_its_id(
    offline_wandb: Path, read_wandb: Records, wandb_history: History
) -> None:
    import wandb

    logger = WandbLogger(save_dir=offline_wandb, offline=True, prefix="p")
    logger.log_metrics({"loss": 1.0}, step=7)
    first = _file(offline_wandb)
    logger.finalize("failed")
    assert wandb.run is None
    assert [row["p-loss"] for row in wandb_history(first)] == [1.0]
    assert _exit_code(read_wandb, first) == 1

    logger.log_metrics({"loss": 0.5})
    assert wandb.run is not None
    assert wandb.run.id == logger.version
    assert first.stem == f"run-{logger.version}"


@pytest.mark.parametrize("open_run", [False, True])
def test_an_artifact_is_downloaded_and_used_by_the_open_run(
    open_run: bool, offline_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is a folder."""
    import wandb

    asked: list[Any] = []

    class Stored:
        def download(self, root: str | None = None) -> str:
            folder = Path(root or offline_wandb / "artifacts")
            folder.mkdir(parents=True)
            (folder / "model.ckpt").write_text("weights")
            return str(folder)

    def find(name: str, type: str | None = None) -> Stored:
        asked.append((name, type))
        return Stored()

    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    if open_run:
        monkeypatch.setattr(logger.experiment, "use_artifact", find)
        monkeypatch.setattr(wandb, "Api", None)
        assert isinstance(logger.use_artifact("me/project/data:v0", "dataset"), Stored)
    else:
        monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(artifact=find))
    folder = WandbLogger.download_artifact("me/project/model-abc:best", offline_wandb / "here", "model")
    assert Path(folder, "model.ckpt").read_text() == "weights"
    assert Path(folder) == offline_wandb / "here"
    assert asked[-1] == ("me/project/model-abc:best", "model")
    if open_run:
        monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(artifact=find))
        monkeypatch.delattr(logger.experiment, "use_artifact")
        assert WandbLogger.download_artifact("x:v0", use_artifact=False) == str(offline_wandb / "artifacts")
    logger.close()


def test_checkpoints_become_artifacts_when_written_or_at_the_end(offline_wandb: Path, read_wandb: Records) -> None:
    files = {name: offline_wandb / name for name in ("a.ckpt", "b.ckpt", "last.ckpt")}
    for age, path in enumerate(files.values()):
        path.write_bytes(b"weights of " + path.name.encode())
        os.utime(path, ns=(age * 10**9, age * 10**9))
    checkpoint = SimpleNamespace(
        best_k_models={str(files["a.ckpt"]): torch.tensor(0.5), str(files["b.ckpt"]): torch.tensor(0.25)},
        best_model_path=str(files["b.ckpt"]),
        best_model_score=torch.tensor(0.25),
        last_model_path=str(files["last.ckpt"]),
        current_score=torch.tensor(0.3),
        monitor="val_loss",
        save_top_k=2,
    )
    logger = WandbLogger(save_dir=offline_wandb, offline=True, id="run1", log_model="all")
    logger.after_save_checkpoint(checkpoint)
    logger.after_save_checkpoint(checkpoint)
    files["last.ckpt"].write_bytes(b"more weights")
    logger.after_save_checkpoint(checkpoint)
    logger._log_model = True
    logger.after_save_checkpoint(checkpoint)
    files["a.ckpt"].write_bytes(b"weights of the last step")
    logger.finalize("interrupted")

    artifacts = _artifacts(read_wandb(_file(offline_wandb)))
    about = [json.loads(a.metadata) for a in artifacts]
    assert [m["original_filename"] for m in about] == ["a.ckpt", "b.ckpt", "last.ckpt", "last.ckpt", "a.ckpt"]
    assert [m["score"] for m in about[:3]] == [0.5, 0.25, pytest.approx(0.3)]
    assert about[0]["SimpleNamespace"] == {"monitor": "val_loss", "save_top_k": 2}
    assert {(a.name, a.type) for a in artifacts} == {("model-run1", "model")}
    assert [sorted(a.aliases) for a in artifacts[:3]] == [["latest"], ["best", "latest"], ["latest"]]
    assert [entry.path for entry in artifacts[1].manifest.contents] == ["model.ckpt"]


def test_tables_texts_and_images_are_in_the_run(offline_wandb: Path, wandb_history: History) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    logger.log_table("scores", columns=["who", "acc"], data=[["a", 0.5]], step=3)
    logger.log_text("samples", columns=["text"], data=[["hello"]], step=3)
    logger.log_image("digits", [np.zeros((4, 4)), np.ones((4, 4))], step=3, caption=["zero", "one"])
    with pytest.raises(ValueError, match=r"'caption' must have one value per image \(1 in total\), but has 2"):
        logger.log_image("digits", [np.zeros((4, 4))], caption=["zero", "one"])
    with pytest.raises(TypeError, match=r"log_image\('digits'\) got a ndarray.*into a list: \[image\]"):
        logger.log_image("digits", np.zeros((4, 4)))  # pyright: ignore[reportArgumentType]
    (offline_wandb / "clip.gif").write_bytes(b"some bytes")
    with pytest.raises(ValueError, match=r"log_audio\('tone'\): 'caption' must have one value per audio"):
        logger.log_audio("tone", ["tone.wav"], caption=["low", "high"])
    logger.log_video("clip", [str(offline_wandb / "clip.gif")], step=3)
    with pytest.raises(ValueError, match=r"log_video\('clip'\): 'fps' must have one value per video"):
        logger.log_video("clip", ["a.gif"], fps=[1, 2])
    logger.finalize("failed")
    row = {name: value for r in wandb_history(_file(offline_wandb)) for name, value in r.items()}
    assert row["trainer/global_step"] == 3
    assert row["digits/captions"] == ["zero", "one"]
    media = list((_file(offline_wandb).parent / "files" / "media").rglob("*.*"))
    assert sorted(p.suffix for p in media if p.suffix != ".json") == [".gif", ".png", ".png"]
    tables = [json.loads(p.read_text()) for p in media if p.name.endswith(".table.json")]
    assert [["a", 0.5]] in [t["data"] for t in tables]
    assert [["hello"]] in [t["data"] for t in tables]


def test_watch_records_histograms_of_gradients(offline_wandb: Path, wandb_history: History) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    model = torch.nn.Linear(2, 1)
    logger.watch(model, log="all", log_freq=1)
    model(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("failed")
    names = {name for row in wandb_history(_file(offline_wandb)) for name in row}
    assert any(name.startswith("gradients/weight") for name in names)


def test_a_run_that_is_going_already_is_used_and_left_open(offline_wandb: Path) -> None:
    import wandb

    run = wandb.init(mode="offline", dir=str(offline_wandb), project="mine", id="going")
    with pytest.warns(PacelineWarning, match=r"version='other'\) adds to the run 'going'.*wandb.finish"):
        assert WandbLogger(version="other").experiment is run
    logger = WandbLogger(experiment=run)
    assert (logger.name, logger.version) == ("mine", "going")
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("failed")
    assert wandb.run is run


def test_copies_made_before_the_run_have_its_id(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    twins = [copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))]
    assert {twin.version for twin in twins} == {logger.version}
    assert len(logger.version) == 8
    assert list(tmp_path.iterdir()) == []


def test_an_id_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "fromenv")
    monkeypatch.setenv("WANDB_PROJECT", "envproject")
    assert (WandbLogger().version, WandbLogger().name) == ("fromenv", "envproject")
    assert (WandbLogger(version="v").version, WandbLogger(project="p").name) == ("v", "p")


def test_drawing_an_id_leaves_the_random_states_alone() -> None:
    import random

    before = random.getstate()
    assert WandbLogger().version != WandbLogger().version
    assert random.getstate() == before


def test_other_ranks_start_no_run(offline_wandb: Path) -> None:
    import wandb

    messages.set_rank(1)
    logger = WandbLogger(save_dir=offline_wandb, offline=True, log_model="all")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    assert wandb.run is None
    assert list(offline_wandb.glob("wandb*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_model": "alle"}, "Unknown log_model 'alle'. Did you mean 'all'.*True or False"),
        ({"add_file_policy": "copy"}, "Unknown add_file_policy 'copy'.*'mutable' or 'immutable'"),
        ({"version": "a", "id": "b"}, "has two different ids.*Pass only one"),
        ({"offline": True, "mode": "online"}, "mode='online'.*two different modes.*Leave out one"),
    ],
)
def test_contradictions_are_refused_when_the_logger_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WandbLogger(**arguments)


def test_a_value_that_is_no_number_is_refused_before_a_run_is_started(offline_wandb: Path) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    with pytest.raises(TypeError, match=r"metric 'loss'.*is not a single number"):
        logger.log_metrics({"loss": "low"}, step=0)
    assert list(offline_wandb.glob("wandb*")) == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"WandbLogger needs the package 'wandb'.*Run: pip install wandb"):
        WandbLogger()


def test_a_folder_named_like_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb_of_mine" / "offline-run").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not messages.is_installed("wandb_of_mine")
    assert messages.is_installed("wandb")


def test_what_finalize_left_open_survives_a_kill(offline_wandb: Path, wandb_history: History) -> None:
    code = f"""
        import os, signal
        from paceline.loggers import WandbLogger
        logger = WandbLogger(save_dir={str(offline_wandb)!r}, offline=True)
        for step in range(20):
            logger.log_metrics({{"loss": 1.0}}, step=step)
        logger.finalize("success")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    assert len(wandb_history(_file(offline_wandb))) == 20


def test_the_end_waits_for_what_was_logged_not_for_a_file_that_grows(
    offline_wandb: Path, wandb_history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    for fit in (1, 2, 3):
        logger.log_metrics({"loss": 1.0}, step=fit)
        file, define = _file(offline_wandb), logger.experiment.define_metric

        def define_and_grow(*args: Any, define: Any = define, file: Path = file, **options: Any) -> None:
            define(*args, **options)
            with file.open("ab") as log:
                log.write(b"\0")  # wandb's process writes at its own place, so over this byte

        with monkeypatch.context() as patch:
            patch.setattr(logger.experiment, "define_metric", define_and_grow)
            logger.finalize("success")
        assert [row["trainer/global_step"] for row in wandb_history(file)] == list(range(1, fit + 1))


def test_a_run_without_a_file_of_its_own_ends_too(offline_wandb: Path) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    logger.log_metrics({"loss": 1.0}, step=0)
    _file(offline_wandb).unlink()
    logger.finalize("success")


def test_the_end_of_a_run_uses_nothing_that_wandb_is_giving_up(offline_wandb: Path, read_wandb: Records) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0 / step}, step=step)
        logger.finalize("success")
    assert {name: logger.experiment.summary[name] for name in ("loss", "trainer/global_step")} == {
        "loss": 0.5,
        "trainer/global_step": 2,
    }
    logger.close()
    assert _exit_code(read_wandb, _file(offline_wandb)) == 0  # the last record, after all that was sent before
    records = read_wandb(_file(offline_wandb))
    assert [record.telemetry.deprecated.ListFields() for record in records if record.HasField("telemetry")][-1] == []
    assert not [record.metric for record in records if record.metric.HasField("summary")]


def test_what_the_user_has_defined_of_the_steps_stays(offline_wandb: Path, read_wandb: Records) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True)
    logger.experiment.define_metric("trainer/global_step", hidden=True)
    logger.log_metrics({"loss": 1.0}, step=3)
    logger.finalize("success")
    assert logger.experiment.summary["trainer/global_step"] == 3
    metrics = [record.metric for record in read_wandb(_file(offline_wandb)) if record.HasField("metric")]
    assert not any(metric._control.overwrite for metric in metrics)
    last = [metric for metric in metrics if metric.name == "trainer/global_step"][-1]
    assert last.options.hidden
    assert not last.HasField("summary")


def test_checkpoints_behind_an_address_are_not_uploaded_which_is_said(offline_wandb: Path) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True, log_model="all")
    with pytest.warns(PacelineWarning, match=r"s3://bucket/x.ckpt is not uploaded"):
        logger.after_save_checkpoint(SimpleNamespace(best_model_path="s3://bucket/x.ckpt"))
