"""Choose which checkpoints a fit keeps and how they are named."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import messages
from ..checkpoint import file_names, storage
from ..checkpoint.atomic_write import put_link
from ..checkpoint.owned_files import RunFiles
from .base import Callback, overridden
from .early_stopping import check_direction, check_mode, value_of_all

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: Values that file names and rankings can always use.
COUNTERS = ("epoch", "step")


class Checkpoint(Callback):
    """Base class of callbacks that write checkpoints. They run last, so that they save other callbacks' changes.

    Attributes:
        dirpath: the checkpoint folder, which ``ckpt_path="last"`` searches; None means ``checkpoints`` in the run's
            folder.
        filename: the file name, where a slash creates a subfolder; None means a default name without subfolders.
    """

    runs_last = monitors_metrics = True
    dirpath: str | None = None
    filename: str | None = None


class CheckpointKeeper(Checkpoint):
    """Base class that writes checkpoints and keeps the best, the newest, or all of them.

    :class:`ModelCheckpoint` describes the arguments and attributes. Subclasses decide when to save and then call
    :meth:`save` on every rank. A step that is already saved is not saved again.

    Subclasses may override four methods, which have the same names and arguments as in Lightning:
    ``_monitor_candidates`` collects the values by which files can be ranked and named; ``_update_best_and_save`` ranks
    a file that has a score and writes it; ``_save_checkpoint`` writes each file; and ``_remove_checkpoint`` deletes a
    file. ``_remove_checkpoint`` is called only on rank 0, but the two methods that write are called on every rank. A
    file that an override writes is never written in the background.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None,
        filename: str | None,
        monitor: str | None,
        verbose: bool,
        save_last: bool | str | None,
        save_top_k: int,
        save_weights_only: bool,
        mode: str,
        auto_insert_metric_name: bool,
        enable_version_counter: bool,
        async_save: bool | None,
    ) -> None:
        super().__init__()
        check_mode("ModelCheckpoint", mode)
        _check_top_k(save_top_k, monitor)
        check_direction("ModelCheckpoint", monitor, mode)
        self.filename = None if filename is None else str(filename).removesuffix(self.FILE_EXTENSION)
        file_names.check(self.filename or "", "ModelCheckpoint(filename=)")
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = _checked_last(save_last)
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.enable_version_counter = enable_version_counter
        self.async_save = async_save
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.kth_best_model_path = ""
        self._worst = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.kth_value = self._worst
        self.last_model_path = ""
        self.current_score: Tensor | None = None
        self._files = RunFiles("")
        self.dirpath = dirpath  # type: ignore[override] - chosen when the fit starts
        self._inherited: dict[str, Any] | None = None
        self._loading: Trainer | None = None
        self._facts: dict[str, Any] = {}
        self._leftovers: list[str] = []
        self._link_is_due = False
        self._forget_steps(alone=True)

    @property
    def dirpath(self) -> str | None:
        """The absolute path of the checkpoint folder; None until a fit has chosen it. May be set before a fit."""
        return self._files.folder or None

    @dirpath.setter
    def dirpath(self, dirpath: str | os.PathLike[str] | None) -> None:
        self._given_dirpath = None if dirpath is None else storage.absolute(dirpath)
        self._files.folder = self._given_dirpath or ""

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            self._prepare(trainer)

    def _prepare(self, trainer: Trainer) -> None:
        """Choose the checkpoint folder and the ID by which the run recognizes its own files. Called on every rank."""
        files = self._files
        files.folder = trainer.strategy.broadcast(self._folder(trainer))
        if self.save_last == "link" and storage.is_remote(files.folder):
            raise ValueError(
                "ModelCheckpoint(save_last='link') is only supported for local file paths, but dirpath is "
                f"{files.folder!r}, which does not support symbolic links. Pass save_last=True for a complete file."
            )
        files.mark, files.line = trainer.strategy.broadcast((files.mark or uuid.uuid4().hex, uuid.uuid4().hex))
        self._forget_steps(alone=trainer.world_size == 1)
        self._leftovers = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        self._loading = trainer

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._loading = None
        if self._inherited is not None:  # state loaded by user code instead of by the trainer
            self._adopt(trainer, self._inherited)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._saved_step != trainer.global_step:
            self._saved_step, self._saved_path = -1, ""
        if self._last_step != trainer.global_step:
            self._last_step = -1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        self._files.sign(checkpoint)
        if self._facts:
            checkpoint.setdefault("paceline", {}).setdefault("manifest", {}).update(self._facts)

    def _forget_steps(self, alone: bool) -> None:
        self._alone = alone
        self._saved_step = self._last_step = -1
        self._saved_path = ""

    # ---- which -----------------------------------------------------------------------------------------------------

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return True if a checkpoint with the score ``current`` would be kept."""
        return current is not None and self._giving_way(current) is not None

    def may_save(self, trainer: Trainer) -> bool:
        """Return False if nothing may be saved: in the first batch, in a sanity check, and with ``fast_dev_run``."""
        begun = trainer.global_step > 0 or trainer.state.batches > 0
        return begun and not trainer.fast_dev_run and not trainer.sanity_checking

    def save(self, trainer: Trainer, ranked: bool = True, scored: bool = True, background: bool = True) -> None:
        """Write a file for this step if it belongs in the ranking, then the ``last`` file, and notify the loggers.

        Args:
            trainer: the trainer of the fit.
            ranked: whether to write a ranked file; False writes only the ``last`` file.
            scored: whether the monitored metric was computed with the current weights.
            background: if True, follow ``async_save``; if False, wait until the files are on disk.
        """
        ranked = ranked and self.save_top_k != 0
        if not (ranked or self.save_last) or not self.may_save(trainer):
            return
        self._save_as(trainer, self._monitor_candidates(trainer), ranked, scored, background)

    def _save_as(
        self, trainer: Trainer, candidates: dict[str, Tensor], ranked: bool, scored: bool, background: bool
    ) -> None:
        """Write the files that :meth:`save` describes, with the values ``candidates`` to rank and name them by."""
        values = self._values(trainer, candidates)
        if not scored:
            values.pop(self.monitor or "", None)
        score, step = values.get(self.monitor or ""), trainer.global_step
        if ranked and score is not None:
            self.current_score = score
        late = ranked and self._saved_step == step and self._score_late(score)
        gone = self._pushed_out(step, score) if ranked and self._saved_step != step else None
        last = bool(self.save_last) and (late or gone is not None or self._last_step != step)
        if gone is not None or last:
            trainer.saver.wait()  # whether the previous save succeeded decides which files can be replaced
            if gone is not None and score is not None and self._is_ranked_by_program():
                last = self._rank_by_program(trainer, score, candidates, last)
                gone = None
                if not last:
                    return
            path = None if gone is None else self._unused(trainer, values, self.filename, replaces=gone)
            self._write(trainer, values, path, gone, last, self.async_save if background else False)
        elif late:
            trainer.saver.wait()
            self._tell(trainer, "")

    def save_after(self, trainer: Trainer, exception: BaseException) -> None:
        """Save the current step in an unranked file and in the ``last`` file after an exception has ended the fit.

        If saving fails, only warn, so that the original exception is not hidden.
        """
        if trainer.state.stage not in ("train", "validate") or not self.may_save(trainer):
            return
        self._alone = True  # the other processes may be at different points
        step, what = trainer.global_step, type(exception).__name__
        try:
            values = self._values(trainer, self._monitor_candidates(trainer))
            path = self._unused(trainer, values, self.filename) if self._saved_step != step else None
            last = bool(self.save_last) and self._last_step != step
            if path is not None or last:
                self._write(trainer, values, path, None, last)
            if path is not None:
                messages.info(f"{what} ended the fit. The state was saved in {path!r}.")
        except Exception as error:
            messages.warn(f"The state could not be saved after the {what}: {error}")

    def has_saved(self, step: int, weights: bool = False) -> bool:
        """Return True if ``step`` was saved in a file that a fit can resume from or, with ``weights``, in any file."""
        return step in (self._saved_step, self._last_step) and (weights or not self.save_weights_only)

    def save_on_signal(self, trainer: Trainer, name: str) -> None:
        """Save the current step on all ranks when the signal ``name`` ends the fit, unless the step is already saved.

        Only one file is written, because time may be short. If the run keeps a ``last`` file, that file is written.
        Otherwise, without a monitor, the new file replaces the previous one as usual; with a monitor, the new file is
        not ranked, and it is deleted once the resumed run has saved again.
        """
        step = trainer.global_step
        if trainer.state.stage not in ("train", "validate") or not self.may_save(trainer):
            return
        try:
            trainer.saver.wait()
        except Exception as error:  # a failed earlier save is no reason not to save now
            messages.error(f"The last save before {name} failed: {type(error).__name__}: {error}")
        try:
            if self.save_last or (self.monitor is None and self.save_top_k):
                self.save(trainer, ranked=not self.save_last, background=False)
            elif self._saved_step != step:
                values = self._values(trainer, self._monitor_candidates(trainer))
                self._write(trainer, values, self._unused(trainer, values, self.filename), None, False)
        except Exception as error:  # the signal ends the run in any case
            messages.error(f"The state could not be saved after {name}: {type(error).__name__}: {error}")
        else:
            path = self._saved_path if self._saved_step == step else self.last_model_path
            messages.info(f"{name} ends the fit after step {step}. The state was saved in {path!r}.")

    def _is_ranked_by_program(self) -> bool:
        own = overridden(self, "_update_best_and_save", CheckpointKeeper)
        return own is not None and self.monitor is not None

    def _rank_by_program(self, trainer: Trainer, score: Tensor, candidates: dict[str, Tensor], last: bool) -> bool:
        """Call a subclass's ``_update_best_and_save``. Return True if ``last`` must still be written."""
        self._link_is_due = last and self.save_last == "link"
        try:
            self._update_best_and_save(score, trainer, candidates)
            return last and (self.save_last != "link" or self._link_is_due)
        finally:
            self._link_is_due = False

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Rank and write a file with the score ``current``, and delete the file that it replaces.

        Called on every rank if the file belongs in the ranking, but only if a subclass overrides this method. The new
        file is on disk when this method returns.
        """
        candidates = monitor_candidates if self.monitor is None else {**monitor_candidates, self.monitor: current}
        values = self._values(trainer, candidates)
        gone = self._giving_way(values[self.monitor or "epoch"])
        if gone is None:  # an override may pass a worse score
            gone = [self.kth_best_model_path]
        link, self._link_is_due = self._link_is_due, False
        path = self._unused(trainer, values, self.filename, replaces=gone)
        self._write(trainer, values, path, gone, link)

    def _pushed_out(self, step: int, score: Tensor | None) -> list[str] | None:
        """Return the files that this step's file would replace in the ranking; None if the step would not be ranked."""
        gone = self._giving_way(torch.tensor(math.nan) if score is None else score)
        if gone is None and self.verbose and score is not None:
            messages.info(
                f"Step {step}: {self.monitor!r} is {score:.6g}, which is not among the best {self.save_top_k}."
            )
        return gone

    def _take_in(self, path: str, score: Tensor | None, gone: Collection[str]) -> None:
        """Add a file to the ranking and remove the files that it replaces."""
        if self.monitor is None:
            self.best_model_path = path
            return
        for old in gone:
            del self.best_k_models[old]
        self.best_k_models[path] = torch.tensor(math.nan) if score is None else score
        self._rank()

    def _score_late(self, score: Tensor | None) -> bool:
        """Add the score to this step's file if the file was written before validation; return True if it was added."""
        if score is None or not torch.isnan(self.best_k_models.get(self._saved_path, self._worst)):
            return False
        self.best_k_models[self._saved_path] = score
        self._rank()
        return True

    def _giving_way(self, score: Tensor) -> list[str] | None:
        """Return the files that a new file with this score would replace; None if the new file would not be kept."""
        if self.save_top_k == -1:
            return []
        if self.monitor is None:
            return [self.best_model_path] if self.best_model_path else []
        # The sort is stable and the new file comes last, so older files win ties.
        kept = sorted({**self.best_k_models, "": score}.items(), key=lambda item: self._badness(item[1]))
        out = [path for path, _ in kept[self.save_top_k :]]
        return None if "" in out else out

    def _badness(self, score: Tensor) -> tuple[bool, float]:
        number = score.item()
        if math.isnan(number):
            return True, 0.0
        return False, number if self.mode == "min" else -number

    def _rank(self) -> None:
        """Update the attributes for the best and the worst of the kept files."""
        order = sorted(self.best_k_models, key=lambda path: self._badness(self.best_k_models[path]))
        best = order[0] if order and not torch.isnan(self.best_k_models[order[0]]) else ""
        worst = order[-1] if order and len(order) >= self.save_top_k else ""
        self.best_model_path, self.best_model_score = best, self.best_k_models.get(best)
        self.kth_best_model_path, self.kth_value = worst, self.best_k_models.get(worst, self._worst)

    def _write(
        self,
        trainer: Trainer,
        values: dict[str, Tensor],
        path: str | None,
        gone: list[str] | None,
        last: bool,
        background: bool | None = False,
    ) -> None:
        """Write one checkpoint under all its names, and delete the files that it replaces.

        The ranking is updated first, because the checkpoint contains it. If the write fails, the update is undone. If
        ``path`` is None, only ``last`` is written. ``gone`` lists the files that the checkpoint pushes out of the
        ranking; it is None for an unranked checkpoint.
        """
        before = {name: getattr(self, name) for name in _CHANGED_BY_SAVING}
        self.best_k_models = dict(self.best_k_models)
        score, step = values.get(self.monitor or ""), trainer.global_step
        replaced = [*self._leftovers, *(gone or ())]
        paths: list[str] = []
        link = ""
        if path is not None:
            self._saved_step, self._saved_path = step, path
            paths.append(self._meant(path, replaced))
        if path is not None and gone is not None:
            self._take_in(path, score, gone)
        if last:
            replaced.append(self.last_model_path)
            self.last_model_path = self._unused(trainer, values, self.CHECKPOINT_NAME_LAST, replaces=replaced)
            self._last_step = step
            if self.save_last == "link" and path is not None and gone is not None:
                link = self.last_model_path  # recreated whenever its target leaves the ranking
            else:
                paths.append(self._meant(self.last_model_path, replaced))
        gives_way = [path] if path is not None and gone is None else []
        self._leftovers = [old for old in dict.fromkeys(replaced) if old and old not in (*paths, link)]
        after = partial(self._saved, trainer, paths, self._leftovers, link)
        self._leftovers = self._leftovers + gives_way  # kept in state_dict, in case the run ends before the deletion

        def settled(error: BaseException | None) -> None:
            if error is not None:
                vars(self).update(before)
                return
            self._leftovers = gives_way
            if trainer.state.status == "running":
                self._tell(trainer, path or "", score)

        ranked_by = {} if score is None else {"monitor": self.monitor, "score": score.item()}
        self._facts = {"line": self._files.line, **ranked_by}
        try:
            if trainer.has_own_save or overridden(self, "_save_checkpoint", CheckpointKeeper) is not None:
                self._save_by_program(trainer, paths, after)
                settled(None)
            else:
                trainer.saver.save(paths, self.save_weights_only, background, after, settled)
        except BaseException:
            vars(self).update(before)
            raise
        finally:
            self._facts = {}

    def _save_by_program(self, trainer: Trainer, paths: list[str], after: Callable[[], object]) -> None:
        """Call :meth:`_save_checkpoint` for each file, because it or ``Trainer.save_checkpoint`` is overridden."""
        for path in paths:
            self._save_checkpoint(trainer, path)
        if trainer.is_global_zero:
            after()

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Write one checkpoint file. Called on every rank."""
        trainer.save_checkpoint(filepath, self.save_weights_only)

    def _meant(self, path: str, replaced: Collection[str]) -> str:
        """Return ``path``, marked as one that must not exist yet if the save may not overwrite a file there.

        A save may overwrite the ``replaced`` files and, without ``enable_version_counter``, any file.
        """
        return storage.NewPath(path) if self.enable_version_counter and path not in replaced else path

    def _saved(self, trainer: Trainer, paths: Sequence[str], replaced: Iterable[str], link: str = "") -> None:
        """Delete the replaced files once the new ones are on disk. Called on rank 0, possibly in a thread.

        If ``link`` is given, a link to the new file is created at that path first.
        """
        if link:
            put_link(Path(link), Path(paths[0]))
        for old in replaced:
            if old not in paths and old != self._protected(trainer):
                self._remove_checkpoint(trainer, old)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Delete one file if this run wrote it."""
        own = trainer.checkpoint_io.remove_checkpoint if trainer.checkpoint_io.has_own_form else None
        self._files.delete(filepath, own)

    @staticmethod
    def _protected(trainer: Trainer) -> str | None:
        """Return the file that the fit resumed from if the user passed a path; None for keywords such as ``"last"``."""
        path = trainer.ckpt_path
        return None if not path or path == str(trainer.current_run.newest) else storage.absolute(path)

    def _tell(self, trainer: Trainer, path: str, score: Tensor | None = None) -> None:
        """Report a finished save to the user and the loggers."""
        if self.verbose and path:
            reached = f"{self.monitor!r} is {score:.6g}, " if score is not None else ""
            messages.info(f"Step {self._saved_step}: {reached}saved {path!r}.")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)

    # ---- files -----------------------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Tensor | float],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Fill in the file name template and return the checkpoint's path.

        Args:
            metrics: the values that the template may use.
            filename: the template; ``self.filename`` if None.
            ver: version number to append as ``-v<ver>``.
            prefix: text to put in front of the name.

        Example:
            >>> ModelCheckpoint(filename="{epoch:02d}-{loss:.1f}").format_checkpoint_name({"epoch": 3, "loss": 0.25})
            'epoch=03-loss=0.2.ckpt'
        """
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        name = file_names.fill(template, metrics, self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None)
        version = None if ver is None else f"v{ver}"
        name = self.CHECKPOINT_JOIN_CHAR.join(part for part in (prefix, name, version) if part is not None)
        return storage.join(self.dirpath or "", name + self.FILE_EXTENSION)

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Return True if the file exists, as seen by rank 0. Must be called on every rank."""
        return trainer.strategy.broadcast(storage.location(filepath).exists())

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the path and score of each kept file, by default to ``best_k_models.yaml`` in ``dirpath``."""
        if filepath is None and self.dirpath is None:
            raise RuntimeError(
                "ModelCheckpoint.to_yaml() does not know where to write, because neither filepath nor dirpath was "
                "passed and no fit has chosen a dirpath yet. Pass filepath."
            )
        path = filepath or storage.join(self.dirpath or "", "best_k_models.yaml")
        with storage.location(path).open("w", encoding="utf-8") as file:
            for path, score in self.best_k_models.items():
                number = json.dumps(score.item()).replace("Infinity", ".inf").replace("NaN", ".nan")
                file.write(f"{json.dumps(path)}: {number}\n")
            if not self.best_k_models:
                file.write("{}\n")

    def _folder(self, trainer: Trainer) -> str:
        if self._given_dirpath:
            return self._given_dirpath
        root = trainer.default_root_dir
        if not storage.is_remote(root):  # with a remote root, the logs are local
            root = trainer.log_dir or root
        return storage.absolute(storage.join(root, "checkpoints"))

    def _values(self, trainer: Trainer, logged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values for ranking and file names as CPU tensors, the same on all processes. Waits for the device.

        Without a ``monitor``, they are rank 0's values. With a ``monitor``, a value that differs between processes is
        replaced by its mean.
        """
        wanted = {"epoch", "step", self.monitor or "epoch", *file_names.fields(self.filename or "")}
        wanted.update(file_names.fields(self.CHECKPOINT_NAME_LAST))
        values = {
            name: torch.as_tensor(logged[name]).detach().squeeze().cpu().clone() for name in wanted if name in logged
        }
        missing = sorted(wanted - values.keys() - {self.monitor})
        if missing:
            messages.warn_once(
                f"ModelCheckpoint(filename={self.filename!r}) uses values that have not been logged yet "
                f"({messages.names(missing, last='and')}), so the file name contains nan. Log these values, or use "
                f"values that have been logged: {messages.names(sorted(logged))}."
            )
        if self._alone or self.monitor is None:
            return self._agreed(trainer, values)
        first, *others = trainer.strategy.gather_objects(values)
        return {name: value_of_all([value, *(o[name] for o in others if name in o)]) for name, value in first.items()}

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the values by which a file can be ranked and named: the logged metrics, the epoch and the step."""
        found = dict(trainer.callback_metrics)
        for name, counter in zip(COUNTERS, (trainer.current_epoch, trainer.global_step), strict=True):
            found[name] = found[name].int() if name in found else torch.tensor(counter)
        return found

    def _unused(
        self, trainer: Trainer, values: Mapping[str, Tensor], template: str | None, replaces: Collection[str] = ()
    ) -> str:
        """Return a path for a new file: one that is not in use, or the path of a replaced file."""
        path = self.format_checkpoint_name(values, template)
        if self.enable_version_counter:
            versions = (self.format_checkpoint_name(values, template, ver) for ver in count(self.STARTING_VERSION))
            path = self._files.unused(chain([path], versions), [*replaces, *self._leftovers])
        return self._agreed(trainer, path)

    def _agreed(self, trainer: Trainer, value: Any) -> Any:
        return value if self._alone else trainer.strategy.broadcast(value)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        relative = self._files.relative
        return {
            "run": self._files.mark,
            "line": self._files.line,
            "monitor": self.monitor,
            "best_model_path": relative(self.best_model_path),
            "best_model_score": self.best_model_score,
            "best_k_models": {relative(path): score for path, score in self.best_k_models.items()},
            "kth_best_model_path": relative(self.kth_best_model_path),
            "kth_value": self.kth_value,
            "last_model_path": relative(self.last_model_path),
            "current_score": self.current_score,
            "saved_step": self._saved_step,
            "saved_path": relative(self._saved_path),
            "last_step": self._last_step,
            "leftovers": [relative(path) for path in self._leftovers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inherited = state_dict
        self._files.mark = state_dict.get("run", "")
        self.current_score = state_dict.get("current_score")
        if self._loading is not None:
            self._adopt(self._loading, state_dict)

    def _adopt(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Take over the resumed run's files, wherever they are now."""
        self._inherited = self._loading = None
        self._files.mark = self._files.mark or trainer.strategy.broadcast(uuid.uuid4().hex)
        scores = state["best_k_models"]
        named = {*scores, state["best_model_path"], state["last_model_path"]} - {""}
        names = sorted({*named, *state.get("leftovers", ())})
        beside = str(storage.location(storage.absolute(trainer.ckpt_path)).parent) if trainer.ckpt_path else ""
        find = partial(self._files.find, beside=beside, old_folder=state.get("dirpath"))
        found = trainer.strategy.broadcast({name: find(name) for name in names} if trainer.is_global_zero else {})
        self.best_k_models = {path: score for name, score in scores.items() if (path := found[name])}
        self.last_model_path = found.get(state["last_model_path"]) or ""
        if self.monitor is None:
            self.best_model_path = found.get(state["best_model_path"]) or ""
        else:
            self._rank()
        kept = {*self.best_k_models, self.best_model_path, self.last_model_path}
        saved = found.get(state.get("saved_path", ""))
        if saved and saved in kept:
            self._saved_step, self._saved_path = state["saved_step"], saved
        at_step = trainer.is_global_zero and self._files.step_of(self.last_model_path) == state.get("last_step")
        goes_on = trainer.ckpt_path is not None and trainer.ckpt_path == str(trainer.current_run.newest)
        goes_on, at_step = trainer.strategy.broadcast((goes_on, at_step))
        self._last_step = state.get("last_step", -1) if at_step else -1
        if goes_on:
            self._take_up(trainer, state, {path for name in state.get("leftovers", ()) if (path := found[name])} - kept)
        if lost := sorted(name for name in named if found[name] is None):
            messages.info(f"These checkpoints of this run no longer exist: {messages.names(lost, last='and')}.")

    def _take_up(self, trainer: Trainer, state: dict[str, Any], leftovers: Collection[str]) -> None:
        """Continue to manage the resumed run's files.

        Files that the resumed run had no time to delete are deleted now. The next save deletes the files that were
        written after the checkpoint that this fit resumes from, and also that checkpoint if it is not ranked.
        """
        start, files = storage.absolute(trainer.ckpt_path or ""), self._files
        files.line = state.get("line") or files.line
        depth = (self.filename or "").count("/")
        left = trainer.strategy.broadcast(files.go_on(start, leftovers, depth) if trainer.is_global_zero else [])
        kept = {*self.best_k_models, self.best_model_path, self.last_model_path}
        self._leftovers = sorted({*left} - kept)


_RANKING = ("best_k_models", "best_model_path", "best_model_score", "kth_best_model_path", "kth_value")
_CHANGED_BY_SAVING = (*_RANKING, "last_model_path", "_saved_step", "_saved_path", "_last_step", "_leftovers")


def _check_top_k(save_top_k: int, monitor: str | None) -> None:
    if monitor is not None and not isinstance(monitor, str):
        raise TypeError(
            f"ModelCheckpoint: monitor={monitor!r} is not the name of a metric. "
            "Pass the name used in self.log, such as 'val_loss', or None to keep the newest checkpoint."
        )
    if not isinstance(save_top_k, int) or isinstance(save_top_k, bool) or save_top_k < -1:
        raise ValueError(
            f"ModelCheckpoint: save_top_k={save_top_k!r} must be a non-negative integer (the number of files to "
            "keep), or -1 to keep all files."
        )
    if monitor is None and save_top_k > 1:
        raise ValueError(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) has no metric to rank the best {save_top_k} by. "
            "Pass monitor, or use save_top_k=1 to keep the newest file, -1 to keep all, or 0 to keep none."
        )


def _checked_last(save_last: bool | str | None) -> bool | str:
    if save_last not in (None, False, True, "link"):
        raise ValueError(
            f"ModelCheckpoint: save_last={save_last!r} must be True or False (whether to keep a 'last' file) or 'link'."
        )
    return save_last or False
