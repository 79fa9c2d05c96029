"""``SwanLabLogger``: logs a run to SwanLab, or to a folder for a later upload."""

from __future__ import annotations

import os
import secrets
import string
from collections.abc import Mapping
from typing import Any

from .checkpoint_uploads import LogModel
from .service import ServiceLogger


class SwanLabLogger(ServiceLogger):
    """Log a run to SwanLab or, with ``mode="offline"``, to ``save_dir`` for ``swanlab sync``.

    After a successful fit, the run stays open until ``swanlab.finish()`` or the end of the program, so that ``test``
    can add to it. A failed or interrupted run is finished immediately.

    A resumed fit continues the run that wrote the checkpoint, with the same id. Offline, the continued run is in a new
    folder in ``save_dir``, with only the values after the checkpoint. SwanLab keeps the first value of each step.

    Args:
        project: the project's name.
        save_dir: the folder for local files and checkpoints; None means ``swanlog``.
        id: the run's id; pass an earlier run's id to continue that run. None means a random id.
        prefix: prefix of each metric's name, followed by a dash.
        log_model: when to save checkpoints with the run: ``"all"`` (as soon as they are written), True (at the end of
            the run) or False (never).
        **kwargs: other arguments of ``swanlab.init``, such as ``mode``, ``workspace``, ``name``, ``description`` or
            ``tags``.
    """

    package = "swanlab"
    can_reopen = False

    def __init__(
        self,
        project: str = "paceline_logs",
        save_dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        prefix: str = "",
        log_model: LogModel = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(project, id, kwargs.pop("log_dir", None) or save_dir or "swanlog", prefix, log_model)
        self._init = {"resume": "allow", **kwargs}

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log images (arrays, PIL images or paths) of one step; ``kwargs`` are arguments of ``swanlab.Image``."""
        make = self._sdk().Image
        several = images if isinstance(images, list | tuple) else [images]
        self.log_record({key: [make(image, **kwargs) for image in several]}, step)

    def _open(self) -> Any:
        if self._id is None:
            self._id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
        os.makedirs(str(self._save_dir), exist_ok=True)
        return self._sdk().init(project=self._project, id=self._id, log_dir=self._save_dir, **self._init)

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        text = self._sdk().Text
        shown = {name: text(value) if isinstance(value, str) else value for name, value in values.items()}
        run.log(shown, step=step, **options)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.experiment.config.update(params)

    def _finish(self, status: str) -> None:
        self._experiment.finish(**({} if status == "success" else {"state": "crashed", "error": status}))

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        self.experiment.save(path, base_path=os.path.dirname(path), policy="now")
