"""``MLFlowLogger``: logs a run to an MLflow server, a database or a folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import messages
from .checkpoint_uploads import LogModel
from .service import ServiceLogger
from .values import flat

if TYPE_CHECKING:
    from mlflow import MlflowClient

_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_FILE = "file:"
#: URI prefix of a local database.
DATABASE = "sqlite:///"
_NOT_IN_A_NAME = re.compile(r"[^\w\-./: ]")
#: Maximum length of a parameter, and maximum number of parameters per call, that every MLflow store accepts.
_LONGEST_PARAM = 500
_BATCH = 100


class MLFlowLogger(ServiceLogger):
    """Log a run to MLflow: to a tracking server, to a database such as ``sqlite:///mlflow.db``, or to a folder.

    The run is finished at the end of each fit, validation, test or prediction; values logged later are still added to
    it. A resumed fit continues the run that wrote the checkpoint.

    Args:
        experiment_name: the name of the experiment, which is created if it does not exist.
        run_name: display name of the run; None lets MLflow choose one.
        tracking_uri: where the runs are stored. None means ``MLFLOW_TRACKING_URI``. If that variable is not set, the
            runs are in ``save_dir``: as files, if MLflow has already written runs to that folder, or else in the
            database ``mlflow.db``.
        tags: tags of the run.
        save_dir: the folder for local runs; None means ``./mlruns``.
        log_model: when to upload checkpoints as artifacts ``model/checkpoints/<name>``: ``"all"`` (as soon as they are
            written), True (at the end of the run) or False (never).
        prefix: prefix of each metric's name, followed by a dash.
        artifact_location: where a new experiment stores its artifacts; None lets MLflow choose.
        run_id: the id of a run to continue; None means ``MLFLOW_RUN_ID``, or a new run.
        synchronous: if False, values are sent in the background; None means MLflow's default.
    """

    package = "mlflow"

    def __init__(
        self,
        experiment_name: str = "paceline_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: LogModel = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        folder = os.fspath(save_dir or "./mlruns")
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._uri = given or _store_in(folder)
        local = self._uri.removeprefix(_FILE).removeprefix("//") if self._uri.startswith(_FILE) else folder
        super().__init__(experiment_name, run_id or os.environ.get("MLFLOW_RUN_ID"), local, prefix, log_model)
        missing = missing_for(self._uri)
        if missing is not None:
            raise ModuleNotFoundError(messages.missing(f"MLFlowLogger with the database {self._uri}", missing))
        self._run_name = run_name
        self._tags = {name: str(value) for name, value in (tags or {}).items()}
        own_place = None if given else os.path.abspath(os.path.join(folder, experiment_name))
        self._artifact_location = artifact_location or own_place
        self._options: dict[str, Any] = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None
        self._params: dict[str, str] = {}

    @property
    def name(self) -> str | None:
        """The experiment's id, or None on ranks other than 0. Creates the experiment if it does not exist."""
        if self._experiment_id is None and messages.is_rank_zero():
            self._experiment_id = self._find_experiment(self._client())
        return self._experiment_id

    @property
    def run_id(self) -> str | None:
        """The run's id."""
        return self.version

    @property
    def tracking_uri(self) -> str:
        """The URI of the store that contains the runs."""
        return self._uri

    @property
    def experiment(self) -> MlflowClient:
        """The MLflow client. Pass :attr:`run_id` to its methods."""
        return super().experiment

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Save a matplotlib figure as the artifact ``<key>.png``, or ``<key>_<step>.png``."""
        self.experiment.log_figure(self._run(), figure, f"{key}.png" if step is None else f"{key}_{step}.png")

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Save a file or folder as an artifact of the run, in the artifact folder ``artifact_path``."""
        save = self.experiment.log_artifacts if os.path.isdir(path) else self.experiment.log_artifact
        save(self._run(), os.fspath(path), artifact_path)

    def _run(self) -> str:
        _ = self.experiment
        return str(self._id)

    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        if self._uri.startswith(DATABASE):
            os.makedirs(os.path.dirname(self._uri.removeprefix(DATABASE)) or ".", exist_ok=True)
        return MlflowClient(self._uri)

    def _open(self) -> MlflowClient:
        client = self._client()
        if self._id is not None:
            run = client.get_run(self._id)
            client.update_run(self._id, status="RUNNING")
            self._params = dict(run.data.params)
        else:
            run = client.create_run(self._find_experiment(client), tags=self._tags, run_name=self._run_name)
            self._id = run.info.run_id
        self._experiment_id = run.info.experiment_id
        return client

    def _find_experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self._project)
        if found is None:
            return client.create_experiment(self._project, artifact_location=self._artifact_location)
        return found.experiment_id

    def _write(self, run: MlflowClient, values: dict[str, Any], step: int, **options: Any) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in self._shown(values).items()]
        if metrics:
            run.log_batch(str(self._id), metrics=metrics, **{**self._options, **options})

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        client = self.experiment
        texts = {_named(name): str(value)[:_LONGEST_PARAM] for name, value in flat(params).items()}
        changed = [name for name, text in texts.items() if self._params.get(name, text) != text]
        if changed:
            messages.warn(
                f"MLflow keeps the first value of each parameter, so the run {self._id} keeps its earlier values for "
                f"{messages.names(changed, 'and')}: {changed[0]} is {self._params[changed[0]]!r}, not "
                f"{texts[changed[0]]!r}. Start a new run to log other hyperparameters."
            )
        new = [Param(name, text) for name, text in texts.items() if name not in self._params]
        for start in range(0, len(new), _BATCH):
            client.log_batch(str(self._id), params=new[start : start + _BATCH], **self._options)
        self._params = texts | self._params

    def _allowed(self, name: str) -> str:
        return _named(name)

    def _flush(self) -> None:
        if self._options.get("synchronous") is False:
            import mlflow

            mlflow.flush_async_logging()

    def _finish(self, status: str) -> None:
        self._experiment.set_terminated(self._id, _STATUS.get(status, "FINISHED"))

    def _discard(self) -> None:
        self._experiment.delete_run(self._id)

    def _exists(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return self._client().get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _recorded(self) -> dict[str, int]:
        client, run_id = self._client(), str(self._id)
        return {name: len(client.get_metric_history(run_id, name)) for name in client.get_run(run_id).data.metrics}

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        name = Path(path).name
        inside = f"model/checkpoints/{name.removesuffix('.ckpt')}"
        self.log_artifact(path, f"{inside}/{name}" if os.path.isdir(path) else inside)
        self.experiment.log_dict(self._run(), dict(about), f"{inside}/metadata.yaml")
        self.experiment.log_text(
            self._run(), str(["latest", "best"] if is_best else ["latest"]), f"{inside}/aliases.txt"
        )


def _store_in(folder: str) -> str:
    """Return the URI of the store for a folder's runs.

    This is the folder itself if MLflow has already written runs to it, or else a database file in the folder.
    """
    if next(Path(folder).glob("*/meta.yaml"), None) is not None:
        return f"{_FILE}{folder}"
    return f"{DATABASE}{os.path.join(folder, 'mlflow.db')}"


def missing_for(uri: str) -> str | None:
    """Return the name of a missing package that MLflow needs to open the database at ``uri``; None if none is missing.

    Installing ``mlflow`` also installs these packages, but installing ``mlflow-skinny`` does not.
    """
    if not uri.startswith(DATABASE):
        return None
    return next((package for package in ("sqlalchemy", "alembic") if not messages.is_installed(package)), None)


def _named(name: str) -> str:
    """Return ``name`` with an underscore for each character that MLflow does not allow; warn about such characters."""
    allowed = _NOT_IN_A_NAME.sub("_", name)
    if allowed != name:
        messages.warn_once(
            f"MLflow does not allow some characters in the name {name!r}, so it is logged as {allowed!r}. Use letters, "
            "digits, '_', '-', '.', '/', ':' and spaces.",
            key=f"MLflow {name}",
        )
    return allowed
