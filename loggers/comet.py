"""``CometLogger``: logs a run to Comet, or to an archive for a later upload."""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from .checkpoint_uploads import LogModel
from .service import ServiceLogger


class CometLogger(ServiceLogger):
    """Log a run to Comet or, with ``online=False``, to archives ``<key>*.zip`` for ``comet upload``.

    After a successful fit, the experiment stays open until the end of the program, so that ``test`` can add to it.
    After a failed or interrupted fit, the experiment ends immediately.

    A resumed fit continues the experiment of the run that wrote the checkpoint, with the same key. Offline, the resumed
    fit writes another archive for that experiment, without the values that the folder's earlier archives already
    contain. Comet writes an archive when the experiment ends, so an offline run that is killed leaves no archive.

    Args:
        api_key: the key of your account; None means Comet's own configuration.
        workspace: the workspace's name; None means your default workspace.
        project: the project's name; None means ``COMET_PROJECT_NAME`` or, if that is not set, ``"paceline_logs"``.
        experiment_key: the key of an experiment to continue or to create; None means a new key.
        mode: ``"get_or_create"``, ``"get"`` (the experiment must exist) or ``"create"`` (it must not exist).
        online: if False, nothing is sent to Comet.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to upload checkpoints as models: ``"all"`` (as soon as they are written), True (at the end of
            the run) or False (never).
        **kwargs: other arguments of ``comet_ml.ExperimentConfig``, such as ``name``, ``tags``, ``offline_directory`` or
            ``log_code``.
    """

    package = "comet_ml"
    can_reopen = False

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        log_model: LogModel = False,
        **kwargs: Any,
    ) -> None:
        project = project or os.environ.get("COMET_PROJECT_NAME") or "paceline_logs"
        self._offline_dir = kwargs.get("offline_directory") or os.environ.get("COMET_OFFLINE_DIRECTORY")
        key = experiment_key or os.environ.get("COMET_EXPERIMENT_KEY")
        super().__init__(project, key, self._offline_dir or ".", prefix or "", log_model)
        self._account = {"api_key": api_key, "workspace": workspace, "online": online}
        self._mode = mode
        self._config = kwargs

    def _open(self) -> Any:
        comet_ml = self._sdk()
        config = self._config.get("experiment_config") or comet_ml.ExperimentConfig(**self._config)
        experiment = comet_ml.start(
            **self._account,
            project_name=self._project,
            experiment_key=self._id,
            mode=self._mode,
            experiment_config=config,
        )
        experiment.log_other("Created from", "paceline")
        self._id = experiment.get_key()
        return experiment

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        epoch = values.pop("epoch", None)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        for name, text in texts.items():
            run.log_other(name, text)
        rest = {name: value for name, value in values.items() if name not in texts}
        run.log_metrics(self._shown(rest), step=step, epoch=None if epoch is None else int(epoch), **options)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.experiment.log_parameters(params)

    def _flush(self) -> None:
        self._experiment.flush()

    def _finish(self, status: str) -> None:
        if status != "success":
            self._experiment.log_other("Status", status)
        self._experiment.end()

    def _recorded(self) -> dict[str, int]:
        """Count each metric's values in earlier archives. An archive without messages counts as empty."""
        counts: Counter[str] = Counter()
        for path in Path(self._offline_dir or ".").glob(f"{self._id}*.zip"):
            with zipfile.ZipFile(path) as archive:
                for name in set(archive.namelist()) & {"messages.json"}:
                    counts.update(_metrics_in(archive.read(name)))
        return counts

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        named = Path(path).name.removesuffix(".ckpt")
        metadata = {**about, "aliases": ["latest", "best"] if is_best else ["latest"]}
        self.experiment.log_model(named, path, metadata=metadata, overwrite=True)


def _metrics_in(messages: bytes) -> Iterator[str]:
    """Yield the metric's name for each value in an archive's messages."""
    for line in map(json.loads, messages.splitlines()):
        if line["type"] == "metric_msg":
            yield line["payload"]["metric"]["metricName"]
