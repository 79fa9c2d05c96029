"""``AimLogger``: logs a run to an Aim repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint_uploads import LogModel
from .service import ServiceLogger


class AimLogger(ServiceLogger):
    """Log a run to Aim: to a local repository or, with ``repo="aim://..."``, to a server.

    The run is closed at the end of each fit, validation, test or prediction; values logged later are still added to it.
    A resumed fit continues the run that wrote the checkpoint, and Aim replaces the values of steps that it already has.

    Args:
        repo: the folder that contains the repository ``.aim``, or a server's URL; None means the current folder.
        experiment: the experiment's name.
        run_name: display name of the run.
        run_hash: the id of a run to continue.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to upload checkpoints as artifacts: ``"all"`` (as soon as they are written), True (at the end of
            the run) or False (never).
        **kwargs: other arguments of ``aim.Run``, such as ``system_tracking_interval``, ``log_system_params`` or
            ``capture_terminal_logs``.
    """

    package = "aim"

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        experiment: str = "paceline_logs",
        run_name: str | None = None,
        run_hash: str | None = None,
        prefix: str = "",
        log_model: LogModel = False,
        **kwargs: Any,
    ) -> None:
        self._repo = os.fspath(repo or ".")
        super().__init__(experiment, run_hash, "." if "://" in self._repo else self._repo, prefix, log_model)
        self._run_name = run_name
        self._init = kwargs

    def log_image(self, key: str, image: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log an image (an array or a PIL image); ``kwargs`` are arguments of ``aim.Image``."""
        image, caption = image if isinstance(image, tuple) else (image, "")
        self.log_record({key: self._sdk().Image(image, caption=caption, **kwargs)}, step)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Upload a file or folder to the run's ``artifacts_uri`` or to the repository's folder ``artifacts``."""
        run = self.experiment
        if run.artifacts_uri is None:
            run.set_artifacts_uri((Path(str(self._save_dir)).absolute() / "artifacts").as_uri())
        upload = run.log_artifacts if os.path.isdir(path) else run.log_artifact
        upload(os.fspath(path), name=name, block=True)

    def _open(self) -> Any:
        if "://" not in self._repo:
            os.makedirs(self._repo, exist_ok=True)
        run = self._sdk().Run(run_hash=self._id, repo=self._repo, experiment=self._project, **self._init)
        if self._run_name is not None:
            run.name = self._run_name
        self._id = run.hash
        return run

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        text, epoch = self._sdk().Text, values.pop("epoch", None)
        for name, value in values.items():
            run.track(text(value) if isinstance(value, str) else value, name=name, step=step, epoch=epoch, **options)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        run = self.experiment
        run["hparams"] = {**(run.get("hparams") or {}), **params}

    def _finish(self, status: str) -> None:
        self._experiment.close()

    def _exists(self, run_id: str) -> bool:
        return run_id in self._sdk().Repo(self._repo).list_all_runs()

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        name = Path(path).name
        self.log_artifact(path, name)
        run = self.experiment
        run["checkpoints"] = {**(run.get("checkpoints") or {}), name: {**about, "best": is_best}}
