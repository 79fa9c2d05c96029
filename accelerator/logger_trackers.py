"""Trackers that ``log_with`` selects by name. They wrap Paceline's loggers and accept Accelerate's arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..loggers.aim import AimLogger
from ..loggers.clearml import ClearMLLogger
from ..loggers.comet import CometLogger
from ..loggers.csv import CSVLogger
from ..loggers.dvclive import DVCLiveLogger
from ..loggers.mlflow import DATABASE, MLFlowLogger, missing_for
from ..loggers.swanlab import SwanLabLogger
from ..loggers.tensorboard import TensorBoardLogger
from ..loggers.trackio import TrackioLogger
from ..loggers.values import present
from ..loggers.wandb import WandbLogger
from .general_tracker import LoggerTracker, on_main_process


class CSVTracker(LoggerTracker):
    """``"csv"``: a :class:`~paceline.loggers.CSVLogger` that writes to ``logging_dir/<project name>/version_N``."""

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(CSVLogger(logging_dir, **{"name": run_name, **kwargs}))


class TensorBoardTracker(LoggerTracker):
    """``"tensorboard"``: :class:`~paceline.loggers.TensorBoardLogger`, in ``logging_dir/<project name>/version_N``."""

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(TensorBoardLogger(logging_dir, **{"name": run_name, "default_hp_metric": False, **kwargs}))

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``."""
        return self.tracker


class OpenedTracker(LoggerTracker):
    """A tracker whose run is opened by ``init_trackers``, so that the tracking package's own functions can be used."""

    @on_main_process
    def start(self) -> None:
        _ = self._logger.experiment

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        super().store_init_configuration(values)
        _ = self.logger

    def resume(self, state: Mapping[str, Any]) -> bool:
        resumed = super().resume(state)
        if not self.is_used:
            self.start()
            _ = self.logger
        return resumed


class WandBTracker(OpenedTracker):
    """``"wandb"``: :class:`~paceline.loggers.WandbLogger`; ``project_name`` is the name of the wandb project.

    The run is also available as ``wandb.run``.
    """

    name = "wandb"
    package = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(WandbLogger(**{"project": run_name, **kwargs}))

    @property
    def run(self) -> Any:
        """The wandb run."""
        return self.tracker

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log_images({name: list(images) for name, images in present(values).items()}, step, **kwargs)


class MLflowTracker(OpenedTracker):
    """``"mlflow"``: :class:`~paceline.loggers.MLFlowLogger`; ``project_name`` is the name of the MLflow experiment.

    The run is also MLflow's active run, so that MLflow's own functions, such as ``mlflow.log_text``, write to it.

    Args:
        experiment_name: the experiment; ``MLFLOW_EXPERIMENT_NAME`` has priority.
        logging_dir: where a new experiment stores its artifacts.
        run_id: the ID of a run to continue; ``MLFLOW_RUN_ID`` has priority.
        tags: tags of the run, as a dict or as JSON; ``MLFLOW_TAGS`` has priority.
        nested_run: whether the run is a child of MLflow's active run; ``MLFLOW_NESTED_RUN`` has priority.
        run_name: display name of the run.
        description: text shown with the run.
        **kwargs: other arguments of :class:`~paceline.loggers.MLFlowLogger`.
    """

    name = "mlflow"
    package = "mlflow"

    @classmethod
    def is_available(cls) -> bool:
        return super().is_available() and missing_for(os.environ.get("MLFLOW_TRACKING_URI", DATABASE)) is None

    def __init__(
        self,
        experiment_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        **kwargs: Any,
    ) -> None:
        import mlflow

        tags = os.environ.get("MLFLOW_TAGS", tags)
        tags = dict((json.loads(tags) if isinstance(tags, str) else tags) or {})
        self._is_nested = os.environ.get("MLFLOW_NESTED_RUN", str(nested_run)).lower() in ("true", "1")
        parent = mlflow.active_run() if self._is_nested else None
        if parent is not None:
            tags["mlflow.parentRunId"] = parent.info.run_id
        if description is not None:
            tags["mlflow.note.content"] = description
        options = {
            "experiment_name": os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name),
            "artifact_location": None if logging_dir is None else os.fspath(logging_dir),
            "run_id": os.environ.get("MLFLOW_RUN_ID", run_id),
            "tracking_uri": mlflow.get_tracking_uri(),
            **kwargs,
        }
        self._own = MLFlowLogger(run_name=run_name, tags=tags, **options)
        super().__init__(self._own)

    @property
    def tracker(self) -> Any:
        """MLflow's active run."""
        import mlflow

        self.is_used = True
        _ = self.logger.experiment
        return mlflow.active_run()

    @on_main_process
    def start(self) -> None:
        import mlflow

        if mlflow.get_tracking_uri() != self._own.tracking_uri:
            mlflow.set_tracking_uri(self._own.tracking_uri)
        mlflow.start_run(self._own.version, nested=self._is_nested)

    @on_main_process
    def finish(self) -> None:
        import mlflow

        super().finish()
        mlflow.end_run()

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **kwargs: Any) -> None:
        """Save a figure as an artifact."""
        self.is_used = True
        self._own.experiment.log_figure(str(self._own.version), figure, artifact_file, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Save a file with the run."""
        self.is_used = True
        self._own.log_artifact(local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Save the files of a folder with the run."""
        self.log_artifact(local_dir, artifact_path)

    def resume(self, state: Mapping[str, Any]) -> bool:
        import mlflow

        if not self.is_used:
            mlflow.end_run()
        return super().resume(state)


class CometMLTracker(OpenedTracker):
    """``"comet_ml"``: :class:`~paceline.loggers.CometLogger`; ``project_name`` is the name of the Comet project."""

    name = "comet_ml"
    package = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        project = kwargs.pop("project_name", run_name)
        super().__init__(CometLogger(**{"project": project, **kwargs}))

    @property
    def writer(self) -> Any:
        """Comet's experiment."""
        return self.tracker


class TrackioTracker(OpenedTracker):
    """``"trackio"``: :class:`~paceline.loggers.TrackioLogger`; ``project_name`` is the name of the Trackio project."""

    name = "trackio"
    package = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(TrackioLogger(**{"project": run_name, **kwargs}))

    @property
    def run(self) -> Any:
        """Trackio's run."""
        return self.tracker


class ClearMLTracker(OpenedTracker):
    """``"clearml"``: :class:`~paceline.loggers.ClearMLLogger`; ``project_name`` names both the project and the task.

    The environment variables ``CLEARML_PROJECT`` and ``CLEARML_TASK`` have priority.
    """

    name = "clearml"
    package = "clearml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", run_name),
            "task_name": os.environ.get("CLEARML_TASK", run_name),
        }
        super().__init__(ClearMLLogger(**{**names, **kwargs}))


class DVCLiveTracker(LoggerTracker):
    """``"dvclive"``: :class:`~paceline.loggers.DVCLiveLogger`; ``project_name`` is not used.

    No file changes before the first value is logged, because opening a new run deletes the files of an earlier run.

    Args:
        run_name: accepted and ignored.
        live: an existing ``dvclive.Live`` to use.
        **kwargs: other arguments of ``dvclive.Live``.
    """

    name = "dvclive"
    package = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(DVCLiveLogger(experiment=live, **kwargs))

    @property
    def live(self) -> Any:
        """The ``dvclive.Live`` object."""
        return self.tracker


class SwanLabTracker(OpenedTracker):
    """``"swanlab"``: :class:`~paceline.loggers.SwanLabLogger`; ``project_name`` is the name of the SwanLab project."""

    name = "swanlab"
    package = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(SwanLabLogger(**{"project": run_name, **kwargs}))

    @property
    def run(self) -> Any:
        """SwanLab's run."""
        return self.tracker


class AimTracker(OpenedTracker):
    """``"aim"``: :class:`~paceline.loggers.AimLogger` in the repo ``logging_dir``; ``project_name`` names the run."""

    name = "aim"
    requires_logging_directory = True
    package = "aim"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(AimLogger(**{"repo": logging_dir, "run_name": run_name, **kwargs}))

    @property
    def writer(self) -> Any:
        """Aim's run."""
        return self.tracker
