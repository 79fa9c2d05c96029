"""``DVCLiveLogger``: logs a run to DVCLive files, for DVC, its VS Code extension and Git."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint_uploads import LogModel
from .service import ServiceLogger


class DVCLiveLogger(ServiceLogger):
    """Log a run to ``dvclive.Live``, which writes tables, ``metrics.json`` and ``params.yaml`` to its folder.

    The DVCLive run ends after each fit, validation, test or prediction; values logged later are still added to it. A
    resumed fit continues in the same folder if the folder's run wrote the checkpoint.

    Args:
        run_name: name of the DVC experiment; None lets DVC choose one.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to track checkpoints with DVC, as the artifacts ``best`` and ``latest``: ``"all"`` (as soon as
            they are written), True (at the end of the run) or False (never). Tracking requires a DVC repository.
        experiment: an existing ``dvclive.Live`` to use, which is left open.
        dir: the folder to write to.
        resume: whether to continue the run in the folder; False starts a new run there.
        **kwargs: other arguments of ``dvclive.Live``, such as ``report``, ``save_dvc_exp`` or ``dvcyaml``.
    """

    package = "dvclive"

    def __init__(
        self,
        run_name: str | None = None,
        prefix: str = "",
        log_model: LogModel = False,
        experiment: Any = None,
        dir: str | os.PathLike[str] = "dvclive",
        resume: bool = False,
        **kwargs: Any,
    ) -> None:
        folder = os.fspath(dir) if experiment is None else experiment.dir
        super().__init__(run_name or "dvclive", None, folder, prefix, log_model)
        self._init = {"exp_name": run_name, **kwargs}
        self._continues = resume
        self._params: dict[str, Any] = {}
        self._checkpoints: dict[str, dict[str, Any]] = {}
        self._given = experiment

    @property
    def root_dir(self) -> str | None:
        return self._save_dir

    @property
    def log_dir(self) -> str | None:
        """The folder ``dir``; checkpoints are saved inside it."""
        return self._save_dir

    def run_dirs(self) -> list[str]:
        """Return a list that contains only the folder ``dir``."""
        return [str(self._save_dir)]

    def log_artifact(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Track a file or folder with DVC; ``kwargs`` are arguments of ``Live.log_artifact``."""
        self.experiment.log_artifact(os.fspath(path), **kwargs)

    def log_image(self, key: str, image: Any, step: int | None = None) -> None:
        """Log an image (an array, a PIL image, a figure or a path)."""
        if step is not None:
            self.experiment.step = step
        self.experiment.log_image(key if key.endswith((".png", ".jpg")) else f"{key}.png", image)

    @property
    def _mark(self) -> Path:
        """The file that stores the id of the run in the folder."""
        return Path(str(self._save_dir)) / f".{type(self).__name__}.run"

    def _open(self) -> Any:
        live, continues = self._given, self._continues or self._id is not None
        if live is None:
            live = self._sdk().Live(**{**self._init, "dir": self._save_dir, "resume": continues})
            for name, described in self._checkpoints.items():  # a new Live would remove them from dvc.yaml
                live.log_artifact(name=name, cache=False, **described)
        if self._id is None:
            self._id = secrets.token_hex(8)
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.write_text(self._id, encoding="utf-8")
        return live

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        run.step = step
        for name, value in self._shown(values, int | float | str).items():
            run.log_metric(name, value, **options)
        run.next_step()

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the hyperparameters together with the earlier ones, which a reopened ``Live`` no longer has."""
        self._params.update(params)
        self.experiment.log_params(self._params)

    def _finish(self, status: str) -> None:
        if self._given is None:
            self._experiment.end()

    def _exists(self, run_id: str) -> bool:
        return self._mark.is_file() and self._mark.read_text(encoding="utf-8") == run_id

    def _recorded(self) -> dict[str, int]:
        """Count the values in the run's tables."""
        root = Path(str(self._save_dir)) / "plots" / "metrics"
        tables = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.tsv")}
        return {name: len(path.read_text(encoding="utf-8").splitlines()) - 1 for name, path in tables.items()}

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        described = {"path": path, "type": "model", "meta": dict(about), "copy": True}
        for name in ("latest", "best") if is_best else ("latest",):
            self._checkpoints[name] = described
            self.experiment.log_artifact(name=name, cache=name == "latest", **described)
