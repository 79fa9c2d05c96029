"""``TensorBoardLogger``: logs curves, hyperparameters, text and the model's graph for TensorBoard."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from ..devices.kinds import kind_of
from ..torch_private import event_writer
from .folder import FolderLogger, call_at_exit, to_disk
from .values import flat, number

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WRITER_OPTIONS = ("purge_step", "max_queue", "flush_secs", "filename_suffix", "comment")


class TensorBoardLogger(FolderLogger):
    """Logs to TensorBoard event files. View them with ``tensorboard --logdir <save_dir>``.

    The writer's own thread writes the files. All values for a step are written as one event with the step and the wall
    time. A metric whose value is a dict is drawn as several curves in one plot. The run's hyperparameters appear in
    ``hparams.yaml`` and, together with the run's final status, in the HParams tab.

    A resumed run continues in a new event file in the same folder. Values that the run logged after the checkpoint are
    removed from the run's files (which have its id in their names), so that each step appears once.

    Args:
        save_dir: the folder for all experiments.
        name: the experiment's name, used as a folder in ``save_dir``; with None, versions are directly in ``save_dir``.
        version: the run's version. None selects a new number; an existing version is continued in a new event file.
        log_graph: log the model's graph, traced with the module's ``example_input_array``.
        default_hp_metric: log ``hp_metric`` as -1 if a new run has hyperparameters but no metrics. To give the metric
            another value, log ``hp_metric`` yourself.
        prefix: prefix for each metric's name, followed by a dash.
        sub_dir: a subfolder of the version's folder, for the event files.
        **kwargs: ``purge_step`` (hide an earlier run's values from this step on), ``max_queue`` (events that may be
            queued before training waits, default 1000), ``flush_secs`` (maximum seconds until queued events are
            written, default 10), ``filename_suffix``, and ``comment``, which has no effect, because SummaryWriter adds
            it only to a folder that it chooses itself.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "paceline_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if not messages.is_installed("tensorboard"):
            raise ModuleNotFoundError(messages.missing("TensorBoardLogger", "tensorboard"), name="tensorboard")
        for option in kwargs:
            if option not in WRITER_OPTIONS:
                raise TypeError(messages.unknown("TensorBoardLogger argument", option, WRITER_OPTIONS))
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = "" if sub_dir is None else os.path.expandvars(os.path.expanduser(sub_dir))
        # Read one by one, because jsonargparse infers from these lines what **kwargs may contain.
        purge_step = kwargs.get("purge_step")
        max_queue = kwargs.get("max_queue", 1000)
        flush_secs = kwargs.get("flush_secs", 10)
        suffix = kwargs.get("filename_suffix", "")
        comment = kwargs.get("comment", "")
        if comment:
            messages.warn_once(
                f"TensorBoardLogger(comment={comment!r}) has no effect, because name and version determine the folder. "
                "Pass version='my_run' to choose the folder's name."
            )
        self._options = {
            "purge_step": purge_step,
            "max_queue": max_queue,
            "flush_secs": flush_secs,
            "filename_suffix": suffix,
        }
        self._hparams_due = False
        self._session_open = False
        self._file: str | Path = ""

    @property
    def sub_dir(self) -> str | None:
        """The subfolder of the version's folder that contains the event files; None if there is no subfolder."""
        return self._sub_dir or None

    @property
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter``, for anything that this class does not support."""
        return super().experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values for one step. ``step`` defaults to the last logged step plus 1."""
        new_value = _tensorboard("compat.proto.summary_pb2").Summary.Value
        step = self._next_step(step)
        now = time.time()
        values = []
        for name, value in metrics.items():
            tag = self._prefix + name
            if isinstance(value, Mapping):
                curves = {key: number(f"{name}/{key}", item) for key, item in value.items()}
                self.experiment.add_scalars(tag, curves, step, now)
            else:
                values.append(new_value(tag=tag, simple_value=number(name, value)))
        if self._hparams_due:
            self._start_session()
        self._record(values, step, now)

    def log_hyperparams(
        self,
        params: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Add values to the run's hyperparameters, and log ``metrics``, which the HParams tab can then compare.

        Args:
            params: the values.
            metrics: numbers by name.
            step: step of the ``metrics``; 0 if None.
        """
        super().log_hyperparams(params)
        if not self.hparams:
            return
        if metrics:
            self._hparams_due = True
            self.log_metrics(metrics, step=step or 0)
        elif self._default_hp_metric and messages.is_rank_zero():
            self._default_hp_metric = False
            if not os.path.isdir(self.log_dir) or not any("tfevents" in name for name in os.listdir(self.log_dir)):
                self.log_metrics({"hp_metric": -1}, None)
        self._hparams_due = True

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log numbers, dicts of numbers (as curves in one plot) and strings for one step."""
        step = self._next_step(step)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        if options or len(texts) < len(values):
            super().log_record({name: value for name, value in values.items() if name not in texts}, step, **options)
        for name, value in texts.items():
            self.log_text(name, value, step)

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log images for one step.

        Args:
            key: name of the panel.
            images: a tensor or array of shape (batch, channels, height, width), or in the layout that ``dataformats``
                specifies. A single image without the batch dimension needs ``dataformats="CHW"`` or ``"HWC"``.
            step: position on the x axis.
            **kwargs: arguments for ``SummaryWriter.add_images``.
        """
        self.experiment.add_images(self._prefix + key, images, self._next_step(step), **kwargs)

    def log_figure(self, key: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log a matplotlib figure as an image. ``kwargs`` are arguments for ``SummaryWriter.add_figure``."""
        self.experiment.add_figure(self._prefix + key, figure, self._next_step(step), **kwargs)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Log text, which is shown as Markdown in the Text tab."""
        self.experiment.add_text(self._prefix + name, text, self._next_step(step))

    def log_graph(self, model: torch.nn.Module, input_array: Any = None) -> None:
        """Log the graph of ``model.forward`` if the logger was created with ``log_graph=True``.

        The model is traced with ``input_array``, or its ``example_input_array``, in eval mode and without gradients.
        The model's training modes and the RNG states are restored afterward. If tracing fails, a warning is shown
        instead of an error.
        """
        if not self._log_graph or not messages.is_rank_zero():
            return
        example = input_array if input_array is not None else getattr(model, "example_input_array", None)
        if example is None:
            messages.warn_once(
                f"TensorBoardLogger(log_graph=True) has no input with which to trace {type(model).__name__}, because "
                "the model's example_input_array is None. Set self.example_input_array = torch.zeros(...) in "
                "__init__."
            )
            return
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            with _undisturbed(model, device):
                self.experiment.add_graph(model, _on_device(example, device))
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            messages.warn(
                f"The graph of {type(model).__name__} was not logged, because tracing failed with "
                f"{type(error).__name__}: {reason} Pass TensorBoardLogger(log_graph=False), or make forward traceable."
            )

    def save(self) -> None:
        super().save()
        if self._hparams_due:
            self._start_session()
        if self._experiment is not None:
            self.experiment.flush()

    def state_dict(self) -> dict[str, Any]:
        self.save()
        files = {}
        for path in self._files():
            to_disk(path)
            files[os.path.relpath(path, self.log_dir)] = path.stat().st_size
        return {**super().state_dict(), "files": files, "session": self._session_open}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._close()
        sizes = dict(state["files"])
        for path in self._files():
            size = sizes.pop(os.path.relpath(path, self.log_dir), None)
            if size is None:
                path.unlink()
            elif size < path.stat().st_size:
                os.truncate(path, size)
        if sizes:
            messages.warn(
                f"Some of the resumed run's event files are missing from {self.log_dir!r} "
                f"({messages.names(sizes, last='and')}), so the run's curves have gaps before the point at which it "
                "resumes. When you move checkpoints, move these files with them."
            )
        _pass_second([path.name for path in self._files()])
        self._session_open = state["session"]
        self._hparams_due = self._hparams_due and not self._session_open

    def _files(self) -> list[Path]:
        """Return this run's event files, including the files of curves that share a plot."""
        return sorted(Path(self.log_dir).rglob(f"*tfevents*{self._mark}*"))

    def _own_files(self) -> Iterator[Path]:
        """Return this run's event files, without the files of curves that share a plot."""
        return Path(self.log_dir).glob(f"*tfevents*{self._mark}*")

    def finalize(self, status: str) -> None:
        self.save()
        if self._session_open:  # even if a resume has removed the end record and nothing was logged since
            self._record([_session_end(succeeded=status == "success")], 0, time.time())
            self._session_open = False
        self._close()

    def _is_deleted(self) -> bool:
        return not os.path.exists(self._file)

    def _begin_again(self) -> None:
        with contextlib.suppress(OSError):  # the writer's thread may have tried to write to the deleted file
            self._close()
        self._experiment = None
        self._hparams_due, self._session_open = self._hparams_due or self._session_open, False

    def _close(self) -> None:
        if self._experiment is not None:
            self._experiment.close()
            self._experiment = None

    @property
    def _mark(self) -> str:
        """The part of a file name that identifies this run's event files."""
        return f".run-{self._run[:12]}"

    def _dir_of(self, version: int | str) -> str:
        return os.path.join(super()._dir_of(version), self._sub_dir) if self._sub_dir else super()._dir_of(version)

    def _open(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        options = {**self._options, "filename_suffix": self._mark + self._options["filename_suffix"]}
        if options["purge_step"] is not None:
            _pass_second([path.name for path in Path(self.log_dir).glob("events.out.tfevents.[0-9]*")])
        before = set(self._own_files())
        writer = SummaryWriter(self.log_dir, **options)
        self._file = next(path for path in self._own_files() if path not in before)
        self._options["purge_step"] = None
        call_at_exit(self, writer.close)
        return writer

    def _record(self, values: Iterable[Any], step: int, now: float) -> None:
        summary = _tensorboard("compat.proto.summary_pb2").Summary(value=values)
        writer = event_writer(self.experiment)
        try:
            writer.add_summary(summary, step, now)
        except OSError as error:  # raised by the writer's thread
            raise self._explained(error) from error

    def _start_session(self) -> None:
        """Write the hyperparameters for the HParams tab once all are known; TensorBoard uses only the first record."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._hparams_due = False
        self._session_open = True
        session = os.path.relpath(self.log_dir, self.save_dir)
        self._record(hparams_pb(flat(self.hparams), trial_id=session).value, 0, time.time())


def _pass_second(names: Iterable[str]) -> None:
    """Wait until the second in the newest file name has passed, because files are sorted by that second."""
    newest = max((int(name.split(".")[3]) for name in names), default=0)
    while newest <= time.time() < newest + 1:
        time.sleep(newest + 1 - time.time())


def _session_end(succeeded: bool) -> Any:
    """Return the record that tells the HParams tab whether the run succeeded."""
    from tensorboard.plugins.hparams import metadata

    api, data = _tensorboard("plugins.hparams.api_pb2"), _tensorboard("plugins.hparams.plugin_data_pb2")
    status = api.STATUS_SUCCESS if succeeded else api.STATUS_FAILURE
    end = data.SessionEndInfo(status=status, end_time_secs=time.time())
    about = metadata.create_summary_metadata(data.HParamsPluginData(session_end_info=end))
    new_value = _tensorboard("compat.proto.summary_pb2").Summary.Value
    return new_value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)


def _tensorboard(module: str) -> Any:
    """Import a module with TensorBoard's protobuf messages, whose members are created at run time."""
    return import_module(f"tensorboard.{module}")


@contextlib.contextmanager
def _undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    numbered = kind_of(device).is_numbered
    try:
        with (
            torch.random.fork_rng([device] if numbered else [], device_type=device.type if numbered else "cuda"),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, training in modes:
            module.training = training


def _on_device(example: Any, device: torch.device) -> Any:
    if isinstance(example, torch.Tensor):
        return example.to(device)
    if isinstance(example, list | tuple):
        return tuple(_on_device(item, device) for item in example)
    if isinstance(example, Mapping):
        return {name: _on_device(item, device) for name, item in example.items()}
    return example
