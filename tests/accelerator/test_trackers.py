"""``log_with``, ``init_trackers``, ``log``, ``get_tracker``, ``end_training``; real files, read back."""

from __future__ import annotations

import csv
import importlib.util
import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks

from paceline import messages
from paceline.accelerator import trackers as module
from paceline.accelerator.trackers import (
    GeneralTracker,
    LoggerTracker,
    Trackers,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from paceline.loggers import CSVLogger, TensorBoardLogger


def rows(folder: str | Path) -> list[dict[str, str]]:
    with open(Path(folder) / "metrics.csv", newline="", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if v != "" and k != "wall_time"} for row in csv.DictReader(file)]


def scalars(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_wandb: None) -> Any:
    """wandb that sends nothing and keeps everything below ``tmp_path``; ends a run that is still going."""
    import wandb

    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "private"))
    for name, value in (("SILENT", "true"), ("CONSOLE", "off"), ("ERROR_REPORTING", "false"), ("MODE", "offline")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("PROJECT", "RUN_ID", "DIR", "NAME"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    yield wandb
    if wandb.run is not None:
        wandb.finish()


class Notes(GeneralTracker):
    """A tracker that writes one JSON line for each call."""

    name = "notes"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, mark: str = "") -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}{mark}.jsonl"

    @property
    def tracker(self) -> Path:
        return self.path

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write("log", values, step, kwargs)

    def finish(self) -> None:
        self._write("finish")

    def _write(self, *what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(module, "_classes", dict(module._classes))
    return module._classes


# ---- the contract of a tracker --------------------------------------------------------------------------------------


def test_a_tracker_without_its_attributes_is_refused_naming_them() -> None:
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match="Nameless is a tracker that does not define 'name' and 'tracker'"):
        Nameless()
    Nameless(_blank=True)


def test_a_tracker_says_which_kind_of_record_it_has_no_form_for(tmp_path: Path) -> None:
    tracker = Notes("p", str(tmp_path))
    for call in (lambda: tracker.log_images({}), lambda: tracker.log_table("t"), lambda: tracker.log_figure("f", None)):
        with pytest.raises(NotImplementedError, match=r"The tracker 'notes' .Notes. has no log_"):
            call()
    with pytest.raises(NotImplementedError, match=r"get_tracker\('notes', unwrap=True\)"):
        tracker.log_artifact("x")


def test_f4_a_tracker_class_gets_project_folder_and_options_and_every_call(tmp_path: Path) -> None:
    trackers = Trackers([Notes], tmp_path)
    trackers.start("project", {"lr": 0.1}, {"notes": {"mark": "_1"}})
    trackers.log({"loss": 2.0}, step=3, log_kwargs={"notes": {"quick": True}})
    trackers.finish()
    lines = [json.loads(line) for line in (tmp_path / "project_1.jsonl").read_text().splitlines()]
    assert lines == [["start"], ["config", {"lr": 0.1}], ["log", {"loss": 2.0}, 3, {"quick": True}], ["finish"]]


def test_a_registered_class_is_asked_for_by_its_name(tmp_path: Path, classes: dict[str, Any]) -> None:
    register_tracker_class(Notes)
    trackers = Trackers("notes", tmp_path)
    trackers.start("p")
    assert isinstance(trackers.get("notes"), Notes)
    assert "notes" in get_available_trackers()
    for wrong, why in (
        (int, "not a subclass"),
        (Notes("p", "."), "not an instance"),
        (GeneralTracker, "must define name"),
    ):
        with pytest.raises(ValueError, match=why):
            register_tracker_class(wrong)  # type: ignore[arg-type]


def test_replacing_a_built_in_tracker_is_said(classes: dict[str, Any]) -> None:
    class Mine(Notes):
        name = "csv"

    with pytest.warns(messages.PacelineWarning, match="'csv' now uses Mine instead of CSVTracker"):
        register_tracker_class(Mine)
    assert classes["csv"] is Mine


# ---- log_with -------------------------------------------------------------------------------------------------------


def test_f4_a_list_mixes_names_enums_classes_objects_and_loggers_each_once(tmp_path: Path) -> None:
    class LoggerType(Enum):
        TENSORBOARD = "tensorboard"

    notes, logger = Notes("p", str(tmp_path)), CSVLogger(tmp_path)
    wanted = filter_trackers(["csv", LoggerType.TENSORBOARD, "tensorboard", Notes, notes, logger, "csv"], tmp_path)
    assert wanted == ["csv", "tensorboard", Notes, notes, logger]
    assert filter_trackers(None) == []
    assert filter_trackers(LoggerType.TENSORBOARD, tmp_path) == ["tensorboard"]


def test_f4_all_takes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost")
    assert filter_trackers("all", tmp_path) == ["csv", "tensorboard", "wandb", "mlflow"]
    assert filter_trackers("all") == ["wandb", "mlflow"]
    hide(monkeypatch, "wandb")
    assert filter_trackers(["all", Notes], tmp_path) == ["csv", "tensorboard", "mlflow", Notes]


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_f7_u24_a_tracker_that_is_not_installed_is_an_error_with_the_pip_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, package)
    with pytest.raises(ModuleNotFoundError, match=f"log_with='{package}' needs .* pip install {package}"):
        Trackers(package, tmp_path)


@pytest.mark.parametrize("asked", ["tensorboard", "csv", ["wandb", "tensorboard"], Notes])
def test_f5_a_tracker_that_writes_files_needs_a_directory(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"no directory is set. Set Accelerator\(project_dir="):
        Trackers(asked)


def test_unknown_trackers_are_named_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown tracker 'wandbb'. Did you mean 'wandb'"):
        filter_trackers("wandbb")
    with pytest.raises(ModuleNotFoundError, match=r"log_with='aim' needs the package 'aim'.*pip install aim"):
        filter_trackers("aim", tmp_path)
    with pytest.raises(TypeError, match=r"got 3 .of type int., which is not a tracker"):
        filter_trackers([3])


def test_options_for_a_tracker_that_does_not_exist_are_refused(tmp_path: Path) -> None:
    trackers = Trackers("csv", tmp_path)
    with pytest.raises(ValueError, match=r"init_kwargs: Unknown tracker 'tensorbord'. Did you mean 'tensorboard'"):
        trackers.start("p", init_kwargs={"tensorbord": {}})
    trackers.start("p", init_kwargs={"wandb": {"name": "not asked for here, which is fine"}})
    with pytest.raises(ValueError, match="log_kwargs: Unknown tracker"):
        trackers.log({"a": 1}, log_kwargs={"nope": {}})


# ---- a run ----------------------------------------------------------------------------------------------------------


def test_f6_u24_log_before_init_trackers_and_after_the_end_is_an_error(tmp_path: Path) -> None:
    trackers = Trackers("csv", tmp_path)
    with pytest.raises(RuntimeError, match=r"accelerator.log\(\['loss'\]\) before init_trackers has no effect"):
        trackers.log({"loss": 1.0})
    with pytest.raises(RuntimeError, match="before init_trackers"):
        trackers.get("csv")
    trackers.start("p")
    trackers.finish()
    with pytest.raises(RuntimeError, match="after end_training"):
        trackers.log({"loss": 1.0})
    with pytest.raises(RuntimeError, match=r"has no tracker. Choose a tracker, for example with Accelerator.log_with="):
        Trackers().log({"loss": 1.0})


def test_f6_log_reaches_every_tracker(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard", "csv"], tmp_path)
    trackers.start("p", {"lr": 0.1, "layers": [1, 2]})
    trackers.log({"loss": torch.tensor(2.5), "acc/top1": 0.5}, step=4)
    trackers.log({"loss": 1.5}, step=8)
    trackers.finish()
    assert rows(tmp_path / "p" / "version_1") == [
        {"step": "4", "loss": "2.5", "acc/top1": "0.5"},
        {"step": "8", "loss": "1.5"},
    ]
    assert scalars(tmp_path / "p" / "version_0") == {"loss": [(4, 2.5), (8, 1.5)], "acc/top1": [(4, 0.5)]}
    assert "lr: 0.1" in (tmp_path / "p" / "version_0" / "hparams.yaml").read_text()


def test_settings_of_a_run_without_a_record_are_kept_too(tmp_path: Path) -> None:
    trackers = Trackers("csv", tmp_path)
    trackers.start("p", {"lr": 0.1})
    assert not (tmp_path / "p").exists()
    trackers.finish()
    assert (tmp_path / "p" / "version_0" / "hparams.yaml").read_text() == "lr: 0.1\n"


def test_texts_and_plots_of_several_curves_are_recorded(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard", "csv"], tmp_path)
    trackers.start("p")
    trackers.log({"note": "hello", "loss": {"a": 1.0, "b": 2.0}}, step=1)
    trackers.log({"note": "only"}, step=2)
    trackers.get("tensorboard").log_images({"seen": torch.zeros(2, 3, 4, 4)}, step=2)
    with pytest.raises(NotImplementedError, match=r"'csv' .CSVTracker. has no log_images"):
        trackers.get("csv").log_images({"seen": torch.zeros(2, 3, 4, 4)})
    trackers.finish()
    assert rows(tmp_path / "p" / "version_1") == [
        {"step": "1", "loss/a": "1.0", "loss/b": "2.0", "note": "hello"},
        {"step": "2", "note": "only"},
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(tmp_path / "p" / "version_0")).Reload().Tags()
    assert tags["images"] == ["seen/0", "seen/1"] or tags["images"] == ["seen"]
    assert tags["tensors"] == ["note/text_summary"]
    assert scalars(tmp_path / "p" / "version_0" / "loss_a") == {"loss": [(1, 1.0)]}


def test_a_value_that_is_none_is_left_out(tmp_path: Path, offline: Any) -> None:
    """A tracker of the user's own gets it and decides for itself."""
    trackers = Trackers(["tensorboard", "csv", "wandb", Notes], tmp_path)
    trackers.start("p", {"best": None}, {"wandb": {"dir": tmp_path}})
    trackers.log({"x": None}, step=0)
    trackers.log({"x": None, "loss": 1.0, "note": "hello", "both": {"a": None, "b": 2.0}, "none": {"c": None}}, step=1)
    for name in ("tensorboard", "wandb"):
        trackers.get(name).log_images({"seen": None}, step=1)
    assert dict(offline.run.summary)["both/b"] == 2
    assert {"x", "both/a", "none"}.isdisjoint(offline.run.summary.keys())
    trackers.finish()
    assert rows(tmp_path / "p" / "version_1")[-1] == {"step": "1", "loss": "1.0", "note": "hello", "both/b": "2.0"}
    assert all(row["step"] == "0" for row in rows(tmp_path / "p" / "version_1")[:-1])
    assert scalars(tmp_path / "p" / "version_0") == {"loss": [(1, 1.0)]}
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[2]) == ["log", {"x": None}, 0, {}]


def test_get_tracker_gives_the_tracker_or_what_is_behind_it(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="mine")
    trackers = Trackers(["csv", logger], tmp_path)
    trackers.start("p")
    assert [tracker.name for tracker in trackers] == ["csv", "tensorboard"]
    assert trackers.get("tensorboard").logger is logger
    assert trackers.get("tensorboard", unwrap=True) is logger.experiment
    assert trackers.get("csv").tracker.metrics_file_path.endswith("metrics.csv")
    with pytest.raises(ValueError, match=r"Unknown tracker 'wandb'. Choose 'csv' or 'tensorboard'"):
        trackers.get("wandb")
    trackers.finish()


def test_f8_two_runs_do_not_mix(tmp_path: Path) -> None:
    for number in (1, 2):
        trackers = Trackers("csv", tmp_path / "made")
        trackers.start("p", {"run": number})
        trackers.log({"loss": number}, step=1)
        trackers.finish()
    trackers.start("p")  # the same Accelerator once more
    trackers.log({"loss": 3}, step=1)
    trackers.start("p")
    trackers.log({"loss": 4}, step=1)
    trackers.finish()
    found = [rows(tmp_path / "made" / "p" / f"version_{n}") for n in range(4)]
    assert found == [[{"step": "1", "loss": str(n)}] for n in (1, 2, 3, 4)]


def test_f8_two_wandb_runs_of_a_process_do_not_mix(tmp_path: Path, offline: Any) -> None:
    ids = []
    for _ in range(2):
        trackers = Trackers("wandb")
        trackers.start("p", {"lr": 1}, {"wandb": {"dir": tmp_path, "name": "mine"}})
        assert offline.run is trackers.get("wandb").run is not None
        assert (offline.run.project, offline.run.name, dict(offline.run.config)) == ("p", "mine", {"lr": 1})
        trackers.log(
            {"loss": 1.0, "picture": offline.Html("<b>x</b>")}, step=1, log_kwargs={"wandb": {"commit": False}}
        )
        trackers.get("wandb").log({"more": 2}, commit=True)
        assert offline.run.step == 1
        ids.append(offline.run.id)
        trackers.finish()
        assert offline.run is None
    assert ids[0] != ids[1]


def test_f7_wandb_dir_says_where_its_files_go(tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "there"))
    trackers = Trackers("wandb")
    trackers.start("p")
    trackers.finish()
    assert list((tmp_path / "there" / "wandb").glob("offline-run-*"))


# ---- several processes ----------------------------------------------------------------------------------------------


def several(folder: str, on_all: bool) -> Any:
    messages.set_rank(None)
    trackers = Trackers(["csv", Notes], folder)
    if on_all or messages.is_rank_zero():
        trackers.start("p", {"lr": 0.1})
    trackers.log({"loss": 1.0}, step=1)
    trackers.get("notes").anything(1)[2] if not messages.is_rank_zero() else None
    trackers.get("csv", unwrap=True)
    trackers.finish()
    state = trackers.state_dict()
    return len(trackers), state, torch.distributed.is_initialized()


@pytest.mark.parametrize("on_all", [True, False])
def test_f4_only_the_main_process_makes_and_calls_trackers(tmp_path: Path, on_all: bool) -> None:
    (first, second) = ranks(2, several, str(tmp_path), on_all)
    assert first == (2, {}, False)
    assert second == (2 if on_all else 0, {}, False)
    assert rows(tmp_path / "p" / "version_0") == [{"step": "1", "loss": "1.0"}]
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 4
    assert sorted(path.name for path in tmp_path.rglob("version_*")) == ["version_0"]


class Everywhere(Notes):
    name = "everywhere"
    main_process_only = False

    def start(self) -> None:
        self.path = self.path.with_name(f"rank{torch.multiprocessing.current_process().pid}.jsonl")
        super().start()


def test_a_tracker_of_all_processes_is_called_on_all(tmp_path: Path) -> None:
    def run(folder: str) -> None:
        messages.set_rank(None)
        trackers = Trackers(Everywhere, folder)
        trackers.start("p")
        trackers.log({"loss": 1.0}, step=1)
        trackers.finish()

    ranks(2, run, str(tmp_path))
    files = list(tmp_path.glob("rank*.jsonl"))
    assert len(files) == 2
    assert all(len(path.read_text().splitlines()) == 3 for path in files)


# ---- going on -------------------------------------------------------------------------------------------------------


def begun(folder: Path, kind: str) -> tuple[Trackers, dict[str, Any]]:
    """A run that logged steps 1 and 2, was saved, and logged step 3 before it was killed."""
    trackers = Trackers(kind, folder)
    trackers.start("p", {"lr": 0.1})
    trackers.log({"loss": 1.0}, step=1)
    trackers.log({"loss": 2.0}, step=2)
    state = trackers.state_dict()
    trackers.log({"loss": 99.0}, step=3)
    logger = trackers.get(kind)._logger
    logger.save()
    return trackers, state


@pytest.mark.parametrize("loads_first", [True, False])
@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_resumed_run_goes_on_in_its_files_and_no_row_is_there_twice(
    tmp_path: Path, kind: str, loads_first: bool
) -> None:
    _, state = begun(tmp_path, kind)
    trackers = Trackers(kind, tmp_path)
    if loads_first:
        trackers.load_state_dict(state)
    trackers.start("p", {"lr": 0.1})
    if not loads_first:
        trackers.load_state_dict(state)
    trackers.log({"loss": 3.0}, step=3)
    trackers.finish()
    assert [path.name for path in (tmp_path / "p").glob("version_*")] == ["version_0"]
    if kind == "csv":
        seen = [(int(row["step"]), float(row["loss"])) for row in rows(tmp_path / "p" / "version_0")]
    else:
        seen = scalars(tmp_path / "p" / "version_0")["loss"]
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_resumed_wandb_run_goes_on_under_its_id_though_another_was_opened(tmp_path: Path, offline: Any) -> None:
    trackers = Trackers("wandb")
    trackers.start("p", {"lr": 0.1}, {"wandb": {"dir": tmp_path}})
    trackers.log({"loss": 1.0}, step=1)
    state, name = trackers.state_dict(), offline.run.id
    trackers.finish()
    trackers = Trackers("wandb")
    trackers.start("p", {"lr": 0.1}, {"wandb": {"dir": tmp_path}})
    assert offline.run.id != name
    trackers.load_state_dict(state)
    assert offline.run.id == name
    assert dict(offline.run.config) == {"lr": 0.1}
    trackers.log({"loss": 2.0}, step=2)
    assert offline.run.step == 2
    trackers.finish()


def test_nothing_is_dropped_where_a_run_has_gone_on_already_or_a_newer_checkpoint_is_there(tmp_path: Path) -> None:
    trackers, state = begun(tmp_path, "csv")
    trackers.load_state_dict(state)  # back to the best model, to evaluate it
    trackers.log({"test": 5.0}, step=3)
    trackers.finish()
    before = rows(tmp_path / "p" / "version_0")
    assert [row["step"] for row in before] == ["1", "2", "3"]
    assert before[2] == {"step": "3", "loss": "99.0", "test": "5.0"}
    again = Trackers("csv", tmp_path)
    again.start("p")
    again.load_state_dict(state, newer="checkpoint_7")
    again.log({"loss": 1.0}, step=1)
    again.finish()
    assert rows(tmp_path / "p" / "version_0") == before
    assert rows(tmp_path / "p" / "version_1") == [{"step": "1", "loss": "1.0"}]


def test_loggers_of_the_users_own_go_on_too(tmp_path: Path) -> None:
    def run(state: Any = None) -> Any:
        trackers = Trackers([CSVLogger(tmp_path, "one"), CSVLogger(tmp_path, "two")])
        trackers.load_state_dict(state or {})
        trackers.start("p")
        trackers.log({"loss": 1.0}, step=2 if state else 1)
        state = trackers.state_dict()
        trackers.finish()
        return state

    first = run()
    assert sorted(first) == ["CSVLogger 0", "CSVLogger 1"]
    run(first)
    for name in ("one", "two"):
        assert [row["step"] for row in rows(tmp_path / name / "version_0")] == ["1", "2"]


def test_a_logger_object_closes_only_what_is_its_own(tmp_path: Path, offline: Any) -> None:
    from paceline.loggers import WandbLogger

    run = offline.init(project="mine", dir=tmp_path)
    tracker = LoggerTracker(WandbLogger(experiment=run))
    assert tracker.name == "wandb"
    tracker.log({"loss": 1.0})
    tracker.finish()
    assert offline.run is run
