"""``WandbLogger``: logs a run to Weights & Biases, or to a local folder for a later upload."""

from __future__ import annotations

import os
import secrets
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from .base import rank_zero_experiment
from .checkpoint_uploads import CheckpointUploads, LogModel
from .values import mapping, numbers, plain, record

if TYPE_CHECKING:
    import torch
    from wandb.sdk.wandb_run import Run

#: Seconds between two writes by wandb's process to the run's file: a checkpoint waits for one write, and wandb's
#: default of 15 is too long for that.
_FLUSH_SECONDS = 0.05
_FLUSH_SETTING = "x_transaction_log_flush_interval"
#: Maximum seconds to wait for wandb's process to write, and longest flush interval for which :meth:`save` waits.
_PATIENCE_SECONDS, _MAX_FLUSH_SECONDS = 10.0, 1.0
_STEP = "trainer/global_step"
#: A metric that is defined but never logged. Once its definition is in the file, all earlier values are too.
_MARK = "paceline/written"


class WandbLogger(CheckpointUploads):
    """Log a run to Weights & Biases or, with ``offline=True``, to ``save_dir/wandb`` for ``wandb sync``.

    A separate wandb process writes the values to the run's local file 20 times a second, and sends them. Before a
    checkpoint is written, the logger waits until all values are in that file, because wandb's process ends together
    with this process, without writing any pending values. After a successful fit, the wandb run stays open, so that
    ``test`` or ``wandb.log`` can add to it until ``wandb.finish()`` or the end of the program. A failed or interrupted
    run is immediately marked as failed; if the logger is used again, the run continues with the same id. If a wandb run
    is already open, the logger adds to that run.

    A resumed fit continues the wandb run that wrote the checkpoint, with the same id, unless you pass another id.
    Values from after the checkpoint that the service already has are not sent again. Offline, the continued run is in a
    new folder in ``wandb/``, with only the rows after the checkpoint.

    The x axis of all charts is ``trainer/global_step``, the number of optimizer updates.

    Args:
        name: display name of the run; None lets wandb choose one.
        save_dir: the folder in which wandb creates its ``wandb`` folder; None means ``WANDB_DIR``, or the current
            folder.
        version: the run's id; pass an earlier run's id to continue that run.
        offline: if True, nothing is sent. ``WANDB_MODE=offline`` has the same effect.
        dir: the same as ``save_dir``.
        id: the same as ``version``.
        project: the project's name; None means ``WANDB_PROJECT`` or, if that is not set, ``"paceline_logs"``.
        log_model: when to upload checkpoints as artifacts: ``"all"`` (as soon as they are written), True (at the end of
            the run) or False (never). Offline, checkpoints are kept for ``wandb sync``.
        experiment: an existing run from ``wandb.init`` to use.
        prefix: prefix of each metric's name, followed by a dash.
        checkpoint_name: name of the model artifact; None means ``model-<id>``.
        add_file_policy: ``"mutable"`` copies a checkpoint before it is uploaded; ``"immutable"`` does not, which is
            safe only if checkpoints are never overwritten or deleted.
        **kwargs: other arguments of ``wandb.init``, such as ``entity``, ``tags``, ``group``, ``config`` or
            ``settings``.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        project: str | None = None,
        log_model: LogModel = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        if not messages.is_installed("wandb"):
            raise ModuleNotFoundError(messages.missing("WandbLogger", "wandb"), name="wandb")
        _check(version, id, offline, add_file_policy, kwargs)
        super().__init__(log_model)
        given = save_dir if dir is None else dir
        self._save_dir = os.environ.get("WANDB_DIR") or "." if given is None else os.fspath(given)
        self._project = project or os.environ.get("WANDB_PROJECT") or "paceline_logs"
        self._id = version or id or os.environ.get("WANDB_RUN_ID")
        self._is_named = self._id is not None or experiment is not None
        self._checkpoint_name = checkpoint_name
        self._add_file_policy: Literal["mutable", "immutable"] = add_file_policy
        self._prefix = f"{prefix}-" if prefix else ""
        self._init = {"name": name, "resume": "allow", **({"mode": "offline"} if offline else {}), **kwargs}
        self._experiment: Any = experiment
        self._is_own = experiment is None
        self._is_prepared = False
        self._has_unwritten = False
        #: Row of the first record after a resume, and the number of later records that the service already has.
        self._resumed_row: int | None = None
        self._known_rows = 0
        #: First row of the run when it was opened.
        self._first_row = 0

    @property
    def name(self) -> str:
        """The project's name."""
        return self._project if self._experiment is None else self._experiment.project or self._project

    @property
    def version(self) -> str:
        """The run's id."""
        if self._experiment is not None:
            return self._experiment.id
        if self._id is None:
            self._id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
        return self._id

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self._save_dir, self.name)

    @property
    def log_dir(self) -> str:
        """The folder for checkpoints. wandb's own files are in ``save_dir/wandb``."""
        return os.path.join(self.root_dir, self.version)

    @property
    def records_dir(self) -> None:
        """None, because wandb itself reports where its files are."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Run:
        """The wandb run, for anything that this class does not support."""
        if self._experiment is None:
            self._experiment = self._start()
        if not self._is_prepared:
            self._experiment.define_metric(_STEP)
            self._experiment.define_metric("*", step_metric=_STEP, step_sync=True)
            self._is_prepared = True
        return self._experiment

    def save(self) -> None:
        """Wait until all values are in the run's file, so that killing this process loses none of them.

        Returns immediately if ``settings`` sets the flush interval (``x_transaction_log_flush_interval``) to more than
        one second or to 0; values may then be lost.
        """
        run = self._experiment
        if run is None or run.disabled or not self._has_unwritten:
            return
        interval = getattr(run.settings, _FLUSH_SETTING, None) or 0.0
        path = run.settings.sync_file
        if not 0 < interval <= _MAX_FLUSH_SECONDS or not os.path.exists(path):
            return
        size, deadline = os.path.getsize(path), time.monotonic() + _PATIENCE_SECONDS
        run.define_metric(_MARK, hidden=True)
        while not _holds_mark(path, size):
            if time.monotonic() > deadline:
                messages.warn(
                    f"WandbLogger: wandb's process wrote nothing to {path} for {_PATIENCE_SECONDS:.0f} s. Training "
                    "continues, but any values that are not in this file yet are lost if this process is killed. "
                    f"wandb's own messages are in {os.path.join(os.path.dirname(path), 'logs')}."
                )
                return
            time.sleep(0.005)
        self._has_unwritten = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the values of one step. ``step`` defaults to the last logged step."""
        self._log(numbers(metrics, self._prefix), step)

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log anything that wandb can show, such as images; ``options`` are passed to ``wandb.Run.log``.

        With ``commit=False``, the values share a row with the values that are logged next.
        """
        self._log(record(values, self._prefix), step, **options)

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Log a matplotlib figure as an image."""
        import wandb

        self._log({self._prefix + key: wandb.Image(figure)}, step)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None, type: str = "file") -> None:
        """Upload a file or folder as an artifact; by default, it is named after the run and the file."""
        self.experiment.log_artifact(path, name=name or f"{self.version}-{Path(path).name}", type=type)
        self._has_unwritten = True

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Add values to the run's config, keeping their nesting; ``metrics`` are logged at step 0."""
        self.experiment.config.update(plain(mapping(params)), allow_val_change=True)
        self._has_unwritten = True
        if metrics:
            self.log_metrics(metrics, step=0)

    def run_dirs(self) -> list[str]:
        """Return the folders of all runs of the project, or only this run's if the user passed its id."""
        if self._is_named:
            return [self.log_dir]
        return [str(path) for path in sorted(Path(self.root_dir).glob("*")) if path.is_dir()]

    def state_dict(self) -> dict[str, Any]:
        run = self.experiment
        self.save()
        return {"id": self.version, "project": self.name, "row": run.step}

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Return True if the run is in this project and in ``save_dir``, and the user did not pass another id."""
        mine = self.version if self._experiment is not None else self._id
        if state["project"] != self.name or mine not in (None, state["id"]):
            return False
        return any(Path(self._save_dir).glob(f"wandb/*run-*-{state['id']}"))

    def take_over(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]
        if self._experiment is None:
            self._resumed_row = state["row"]

    def withdraw(self) -> None:
        """If a run that this logger opened has no new rows, finish it, and forget its id unless the user passed it."""
        run = self._experiment
        if run is None or not self._is_own or run.step != self._first_row:
            return
        self._finish()
        if not self._is_named:
            self._id = None

    def watch(
        self,
        model: torch.nn.Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Log histograms of gradients or parameters every ``log_freq`` steps, each time waiting for the device."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def log_table(
        self,
        key: str,
        columns: list[Any] | None = None,
        data: list[Any] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table, given as columns and rows or as a pandas ``dataframe``; cells may be images or text."""
        import wandb

        self._log({self._prefix + key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    def log_text(
        self,
        key: str,
        columns: list[Any] | None = None,
        data: list[Any] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log strings as a table."""
        self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log images (arrays, tensors, PIL images or paths).

        Args:
            key: the name of the panel.
            images: the images of one step.
            step: position on the x axis.
            **kwargs: arguments of ``wandb.Image``, each a list with one value per image, such as
                ``caption=["cat", "dog"]``.
        """
        self._log_media("Image", key, images, step, kwargs)

    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Like :meth:`log_image`, for sounds (arrays or paths), for example with ``sample_rate=[16000]``.

        Requires the soundfile package.
        """
        self._log_media("Audio", key, audios, step, kwargs)

    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Like :meth:`log_image`, for videos (arrays or paths), for example with ``fps=[10]``."""
        self._log_media("Video", key, videos, step, kwargs)

    def _log_media(
        self, kind: str, key: str, items: Sequence[Any], step: int | None, options: Mapping[str, Sequence[Any]]
    ) -> None:
        import wandb

        method, word = f"log_{kind.lower()}({key!r})", kind.lower()
        if isinstance(items, str | bytes) or not isinstance(items, Sequence):
            raise TypeError(
                f"{method} got {messages.a(items)}, but needs a list of the {word}s of one step. Put a single "
                f"{word} into a list: [{word}]."
            )
        for option, values in options.items():
            if len(values) != len(items):
                raise ValueError(
                    f"{method}: {option!r} must have one value per {word} ({len(items)} in total), but has "
                    f"{len(values)}."
                )
        make = getattr(wandb, kind)
        panels = [make(item, **{k: v[i] for k, v in options.items()}) for i, item in enumerate(items)]
        self._log({self._prefix + key: panels}, step)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Mark an artifact as an input of the run, and return it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str:
        """Download an artifact and return its folder.

        Args:
            artifact: the artifact's name, such as ``"user/project/model-abc:best"``.
            save_dir: the folder to write to; None lets wandb choose one.
            artifact_type: the type that the artifact must have; None accepts any type.
            use_artifact: whether to mark the artifact as an input of the open run, if there is one.
        """
        import wandb

        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact, type=artifact_type)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return found.download(root=None if save_dir is None else os.fspath(save_dir))

    def finalize(self, status: str) -> None:
        self._upload_the_rest()
        if self._experiment is None:
            return
        self.save()
        if status != "success" and self._is_own:
            self._finish(exit_code=1)

    def close(self) -> None:
        """Finish the run, unless the user opened it."""
        self.finalize("success")
        if self._experiment is not None and self._is_own:
            self._finish()

    def _finish(self, exit_code: int = 0) -> None:
        self._id = self._experiment.id
        self._experiment.finish(exit_code=exit_code)
        self._experiment, self._is_prepared = None, False

    def _start(self) -> Run:
        import wandb

        if wandb.run is not None:
            self._is_own = False
            if self._id not in (None, wandb.run.id):
                messages.warn(
                    f"WandbLogger(version={self._id!r}) adds to the run {wandb.run.id!r}, because that run is already "
                    "open in this process. Call wandb.finish() first to start a new run."
                )
            return wandb.run
        self._is_own = True
        os.makedirs(self._save_dir, exist_ok=True)
        options = {"project": self._project, "dir": self._save_dir, "id": self.version, **self._init}
        settings = options.get("settings") or {}
        if isinstance(settings, dict) and _FLUSH_SETTING in wandb.Settings.model_fields:
            options["settings"] = {_FLUSH_SETTING: _FLUSH_SECONDS, **settings}
        run = wandb.init(**options)
        self._first_row = run.step
        return run

    def _log(self, record: dict[str, Any], step: int | None, commit: bool = True, **options: Any) -> None:
        if step is not None:
            record[_STEP] = step
        run = self.experiment
        row, self._resumed_row = self._resumed_row, None
        if row is not None:
            self._known_rows = max(run.step - row, 0)
        if self._known_rows:
            self._known_rows -= commit
            return
        run.log(record, step=row, commit=commit, **options)
        self._has_unwritten = True

    def _upload(self, path: str, about: Mapping[str, Any], is_best: bool) -> None:
        import wandb

        run = self.experiment
        artifact = wandb.Artifact(self._checkpoint_name or f"model-{run.id}", type="model", metadata=dict(about))
        add = artifact.add_dir if os.path.isdir(path) else artifact.add_file
        add(path, name="model.ckpt", policy=self._add_file_policy)
        run.log_artifact(artifact, aliases=["latest", "best"] if is_best else ["latest"])
        self._has_unwritten = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_id": self.version, "_experiment": None, "_is_prepared": False}


def _check(version: str | None, id: str | None, offline: bool, policy: Any, options: Mapping[str, Any]) -> None:
    if version and id and version != id:
        raise ValueError(
            f"WandbLogger(version={version!r}, id={id!r}) has two different ids, although both arguments set the "
            "run's id. Pass only one of them."
        )
    if policy not in ("mutable", "immutable"):
        raise ValueError(messages.unknown("add_file_policy", policy, ["mutable", "immutable"]))
    if offline and options.get("mode") not in (None, "offline"):
        raise ValueError(
            f"WandbLogger(offline=True, mode={options['mode']!r}) sets two different modes. Leave out "
            "one of the arguments."
        )


def _holds_mark(path: str, since: int) -> bool:
    """Return True if a ``.wandb`` file contains the definition of ``_MARK`` at byte ``since`` or later.

    The file is a LevelDB log: blocks of 32 KiB, each beginning with a 7-byte header; records may cross block
    boundaries.
    """
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    record = messages.MetricRecord(name=_MARK, options={"defined": True, "hidden": True})
    block, header = 32768, 7
    with open(path, "rb") as file:
        file.seek(since)
        data = bytes(since % block) + file.read()
    joined = b"".join(data[at + header : at + block] for at in range(0, len(data), block))
    return record.SerializeToString() in joined
