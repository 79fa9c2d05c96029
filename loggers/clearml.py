"""``ClearMLLogger``: logs a run to a ClearML task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint_uploads import LogModel
from .service import ServiceLogger
from .values import flat

_STAGES = ("train", "val", "validation", "eval", "test", "predict")


class ClearMLLogger(ServiceLogger):
    """Log a run to ClearML or, after ``clearml.Task.set_offline(True)``, to a folder for a later import.

    If the program already has a task, the logger adds to that task and leaves it open. Otherwise, the logger creates a
    task and closes it if a fit fails or is interrupted, or else at the end of the program. A resumed fit starts a new
    task.

    A metric such as ``val_loss`` or ``val/loss`` is shown as the series ``val`` in the plot ``loss``; a metric without
    such a prefix is shown as the series ``train``.

    Args:
        project_name: the project's name.
        task_name: the task's name; None means the project's name.
        save_dir: the folder for checkpoints.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to upload checkpoints as artifacts: ``"all"`` (as soon as they are written), True (at the end of
            the run) or False (never).
        **kwargs: other arguments of ``clearml.Task.init``, such as ``tags``, ``output_uri`` or
            ``auto_connect_frameworks``.
    """

    package = "clearml"
    can_reopen = False

    def __init__(
        self,
        project_name: str = "paceline_logs",
        task_name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        prefix: str = "",
        log_model: LogModel = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(project_name, None, save_dir, prefix, log_model)
        self._init = {"task_name": task_name or project_name, "reuse_last_task_id": False, **kwargs}
        self._is_own = True

    def log_image(self, key: str, image: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log an image (an array or a PIL image)."""
        title, series = _place(key)
        self.experiment.get_logger().report_image(title, series, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        key: str,
        columns: list[Any] | None = None,
        data: list[Any] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a pandas ``dataframe``."""
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        title, series = _place(key)
        self.experiment.get_logger().report_table(title, series, iteration=step, table_plot=table, **kwargs)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Upload a file or folder."""
        self.experiment.upload_artifact(name or Path(path).name, artifact_object=os.fspath(path), wait_on_upload=True)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because ClearML cannot reopen a task from an offline session."""
        return {}

    def _open(self) -> Any:
        kind = self._sdk().Task
        task = kind.current_task()
        self._is_own = task is None
        if task is None:
            task = kind.init(project_name=self._project, **self._init)
        self._id = task.id
        return task

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        logger = run.get_logger()
        for name, value in self._shown(values).items():
            title, series = _place(name)
            logger.report_scalar(title, series, value, iteration=step, **options)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.experiment.update_parameters({f"Hyperparameters/{name}": value for name, value in flat(params).items()})

    def _flush(self) -> None:
        self._experiment.flush()

    def _finish(self, status: str) -> None:
        if self._is_own:
            if status != "success":
                self._experiment.mark_failed(status_reason=status)
            self._experiment.close()

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        metadata = {name: str(value) for name, value in about.items()} | {"best": str(is_best)}
        name = Path(path).name.removesuffix(".ckpt")
        self.experiment.upload_artifact(name, artifact_object=path, metadata=metadata, wait_on_upload=True)


def _place(name: str) -> tuple[str, str]:
    """Return the names of the plot and the series that show a metric."""
    for stage in _STAGES:
        for joint in "_/":
            if name.startswith(stage + joint):
                return name[len(stage) + 1 :], stage
    return name, "train"
