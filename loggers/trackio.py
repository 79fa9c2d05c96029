"""``TrackioLogger``: logs a run to Trackio, which keeps it in a local database or a Hugging Face Space."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from .checkpoint_uploads import LogModel
from .service import ServiceLogger

#: Maximum time to wait for Trackio to write the values to its database.
_PATIENCE_SECONDS = 30.0


class TrackioLogger(ServiceLogger):
    """Log a run to Trackio: to its database in ``TRACKIO_DIR`` or, if ``space_id`` is passed, to a Space.

    The run is finished at the end of each fit, validation, test or prediction; values logged later are still added to
    it. A resumed fit continues the run that wrote the checkpoint. In a Space, values that the run had logged after the
    checkpoint then appear twice.

    Args:
        project: the project's name, which is also the name of its local database.
        name: the run's name; pass an earlier run's name to continue that run. None means a random name.
        save_dir: the folder for checkpoints; Trackio's own files are in ``TRACKIO_DIR``.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to store checkpoints as artifacts: ``"all"`` (as soon as they are written), True (at the end of
            the run) or False (never).
        **kwargs: other arguments of ``trackio.init``, such as ``space_id``, ``group``, ``config`` or ``embed``.
    """

    package = "trackio"

    def __init__(
        self,
        project: str = "paceline_logs",
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        prefix: str = "",
        log_model: LogModel = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(project, name, save_dir, prefix, log_model)
        self._init = {"resume": "allow", "embed": False, **kwargs}
        self._is_local = not (kwargs.get("space_id") or kwargs.get("server_url") or os.environ.get("TRACKIO_SPACE_ID"))
        self._params: dict[str, Any] = {}
        #: Number of rows in the run now, and when it was opened.
        self._rows = self._first_row = 0

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None, type: str = "file") -> None:
        """Store a file or folder with the run."""
        self.experiment.log_artifact(os.fspath(path), name=name or Path(path).name, type=type)

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log images (arrays, PIL images or paths) of one step; ``kwargs`` are arguments of ``trackio.Image``."""
        make = self._sdk().Image
        several = images if isinstance(images, list | tuple) else [images]
        panels = [make(image, **kwargs) for image in several]
        names = [key] if len(panels) == 1 else [f"{key}/{index}" for index in range(len(panels))]
        self.log_record(dict(zip(names, panels, strict=True)), step)

    def _open(self) -> Any:
        if self._id is None:
            self._id = f"run-{secrets.token_hex(4)}"
        self._rows = self._first_row = self._rows_stored()
        config = {**(self._init.get("config") or {}), **self._params}
        return self._sdk().init(self._project, self._id, **{**self._init, "config": config})

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        run.log(values, step=step, **options)
        self._rows += 1

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Keep the hyperparameters in memory; Trackio stores them with the first values after the run is opened."""
        self._params.update(params)
        run = self._experiment
        if run is not None and self._rows == self._first_row:
            run.config.update(params)
        elif run is not None:
            self._flush()
            self._end("success")

    def _flush(self) -> None:
        """Wait for Trackio's thread, which writes to the local database at intervals."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._is_local and self._rows_stored() < self._rows and time.monotonic() < deadline:
            time.sleep(0.02)

    def _finish(self, status: str) -> None:
        current = self._sdk().context_vars.current_run
        self._experiment.finish()
        if current.get() is self._experiment:
            current.set(None)

    @property
    def _storage(self) -> Any:
        return import_module("trackio.sqlite_storage").SQLiteStorage

    def _rows_stored(self) -> int:
        return self._storage.get_log_count(self._project, str(self._id)) if self._is_local else 0

    def _exists(self, run_id: str) -> bool:
        return not self._is_local or any(run.name == run_id for run in self._sdk().Api().runs(self._project))

    def _recorded(self) -> dict[str, int]:
        rows = self._storage.get_logs(self._project, str(self._id)) if self._is_local else []
        return Counter(name for row in rows for name in row)

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        artifact = self._sdk().Artifact(f"model-{self.version}", type="model", metadata=dict(about))
        add = artifact.add_dir if os.path.isdir(path) else artifact.add_file
        add(path)
        self.experiment.log_artifact(artifact, aliases=["latest", "best"] if is_best else ["latest"])
