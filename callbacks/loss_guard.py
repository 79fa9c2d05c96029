"""Callback that keeps batches with a non-finite or outlying loss from damaging the weights."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import messages
from ..checkpoint import manifest
from ..devices.kinds import kind_of
from .base import Callback, Rollback
from .early_stopping import check_mode

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer
    from .base import Step

ACTIONS = ("skip", "rollback", "raise")


class LossSpikeError(RuntimeError):
    """Raised by ``LossGuard(action="raise")`` to stop the run after a bad loss."""


class LossGuard(Callback):
    """Check the loss of each training batch before its backward pass and skip batches with a bad loss.

    A loss is bad if it is NaN or infinite, or if it is worse than the mean of the last ``window`` good losses by at
    least ``rtol`` times that mean and by at least ``atol``. With several processes, their mean loss is checked, so they
    all decide alike, just as a single process with all the data would decide.

    *Actions.* ``"skip"`` skips the batch as if it were not in the data: it produces no gradients, is not counted in the
    accumulation window, and causes no optimizer or scheduler step. Buffers (such as batch norm statistics), torch's RNG
    state and the values passed to ``self.log`` are restored. Only ``torchmetrics`` objects that the step updated still
    include the batch.

    ``"rollback"`` returns to the newest checkpoint whose weights had a good loss, restores everything that a resume
    restores, and skips the batch when it is read again. If the weights are not finite, it skips the previous batch
    instead, because that batch's gradient must have damaged them. If another batch then has a bad loss, the run first
    goes back one more checkpoint, because the weights may have been damaged earlier; it skips the other batch only if
    this does not help. If this run has not saved yet, it restarts from its ``ckpt_path``.

    ``"raise"`` stops the run with an error.

    *Cost.* The loss is read before the backward pass starts. On an accelerator, the host waits there for the forward
    pass, but not for the backward pass or the step, which still run while the next batch is prepared. Buffers that
    change during training are copied in each step. With several processes, two numbers per batch are averaged across
    processes on the CPU.

    Manual optimization, ``training_step(dataloader_iter)`` and strategies that run a step in micro-batches are not
    supported.

    Args:
        mode: ``"min"`` if larger losses are worse, ``"max"`` if smaller ones are.
        window: number of good losses in the running mean.
        warmup: number of good losses before outliers count as bad; until then, only non-finite losses do.
        atol: smallest distance of a bad loss from the running mean; None means any distance.
        rtol: smallest distance as a multiple of the running mean; None means any distance. If both are None, only
            non-finite losses are bad.
        exclude_batches_path: JSON file that lists bad batches. It is read when a fit starts, and the batches in it are
            skipped without running them. It is valid only for one order of the data (seed and batch size).
        finite_only: whether a non-finite loss is bad.
        action: ``"skip"``, ``"rollback"`` or ``"raise"``.
        max_events: number of bad batches to allow; one more stops the run with an error. None means no limit.

    Attributes:
        batches: step, loss and running mean (None if there was no good loss yet) of each bad batch, by epoch and batch
            index.
        left_out: how many times a batch was skipped; written to the loggers as ``loss_guard/left_out`` each time.

    Raises:
        LossSpikeError: for a bad loss with ``action="raise"``.
        RuntimeError: if there are more than ``max_events`` bad batches, or if there is no checkpoint (left) to go back
            to.
        ValueError: if ``action="rollback"`` and the run saves no checkpoints, or only weights.
    """

    skips_together = True

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 100,
        warmup: int = 100,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
        *,
        action: Literal["skip", "rollback", "raise"] = "skip",
        max_events: int | None = 10,
    ) -> None:
        check_mode("LossGuard", mode)
        if action not in ACTIONS:
            raise ValueError(messages.unknown("LossGuard action", action, ACTIONS))
        for name, value, least in (("window", window, 1), ("warmup", warmup, 0), ("max_events", max_events, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"LossGuard: {name}={value!r} must be a whole number of at least {least}.")
        for name, distance in (("atol", atol), ("rtol", rtol)):
            if distance is not None and not distance >= 0:
                raise ValueError(f"LossGuard: {name}={distance!r} must be a number of 0 or more, or None.")
        self.mode, self.window, self.warmup, self.atol, self.rtol = mode, window, warmup, atol, rtol
        self.exclude_batches_path = None if exclude_batches_path is None else os.path.abspath(exclude_batches_path)
        self.finite_only = finite_only
        self.action = action
        self.max_events = max_events
        self.batches: dict[tuple[int, int], dict[str, Any]] = {}
        self.left_out = 0
        self._good: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._way_back = _WayBack()
        self._going_back: Rollback | None = None
        self._at_start: dict[str, Any] = {}

    @property
    def running_mean(self) -> float | None:
        """The mean of the last good losses; None if there has been no good loss yet."""
        return math.fsum(self._good) / len(self._good) if self._good else None

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage != "fit":
            return
        why = _why_not(trainer, pl_module)
        if why:
            raise ValueError(f"LossGuard cannot be used with {why}. Check the loss in training_step instead.")
        if self.action == "rollback" and not trainer.checkpoint_callbacks:
            raise ValueError(
                "LossGuard(action='rollback') needs checkpoints to go back to, but the Trainer has no ModelCheckpoint. "
                "Remove enable_checkpointing=False, or use action='skip'."
            )
        if self.action == "rollback" and all(callback.save_weights_only for callback in trainer.checkpoint_callbacks):
            raise ValueError(
                "LossGuard(action='rollback') needs checkpoints to go back to, but "
                "ModelCheckpoint(save_weights_only=True) writes none that a fit can resume from. Remove "
                "save_weights_only=True, or use action='skip'."
            )
        known = _read(self.exclude_batches_path) if trainer.is_global_zero and self.exclude_batches_path else {}
        self.batches = trainer.strategy.broadcast(known) | self.batches

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        back, self._going_back = self._going_back, None
        if back is None:
            self._way_back.begin(trainer)
            self._at_start = self.state_dict()
        elif not back.own:
            self.load_state_dict(self._at_start)

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        self._going_back = None

    def around_training_step(self, trainer: Trainer, pl_module: TrainingModule, step: Step) -> Step:
        """Wrap the training step so that it returns None for a bad batch, which is then skipped."""
        state, batches, way_back = trainer.state, self.batches, self._way_back
        before = _Before(trainer)

        def guarded(batch: Any, batch_idx: int) -> Any:
            if batches and (state.epoch, state.batch_idx) in batches:
                return self._leave_out(trainer)
            undo = before.remember()
            output = step(batch, batch_idx)
            loss, given_up = _shared(trainer, output)
            if given_up:
                messages.info_once(f"{type(pl_module).__name__}.training_step returned None, so the batch is skipped.")
                undo()
                return None
            if not self._is_bad(loss):
                before.learn()
                self._good.append(loss)
                self._seen += 1
                way_back.last_good = state.global_step, state.epoch, state.batch_idx
                return output
            self._note(trainer, loss)
            undo()
            return self._leave_out(trainer)

        return guarded

    def _is_bad(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return self.finite_only
        mean = self.running_mean
        if mean is None or self._seen < self.warmup or (self.atol is None and self.rtol is None):
            return False
        off = loss - mean if self.mode == "min" else mean - loss
        return off > 0 and off >= (self.atol or 0.0) and off >= (self.rtol or 0.0) * abs(mean)

    def _note(self, trainer: Trainer, loss: float) -> None:
        """Record and report a bad loss and act on it. Returns only if the batch should be skipped."""
        state, mean = trainer.state, self.running_mean
        against = "no running mean yet" if mean is None else f"running mean {mean:.6g} of {len(self._good)} losses"
        what = (
            f"LossGuard: the loss is {loss:.6g} ({against}) at step {state.global_step}, epoch {state.epoch}, batch "
            f"{state.batch_idx}"
        )
        back = self._way_back.find(trainer, what) if self.action == "rollback" else None
        if back is None:
            self._blame(trainer, (state.epoch, state.batch_idx), loss, what)
        elif back.blamed is not None:
            self._blame(trainer, back.blamed, loss, what)
        if self.action == "raise":
            raise LossSpikeError(
                f"{what}. The batch has not changed the weights. Check the batch and the learning rate, or use "
                "action='skip' to skip such batches."
            )
        if back is not None:
            messages.warn(f"{what}: {back}")
            self._going_back = back
            raise back
        messages.warn(f"{what}, so the batch is skipped.")

    def _blame(self, trainer: Trainer, batch: tuple[int, int], loss: float, what: str) -> None:
        self.batches[batch] = {"step": trainer.global_step, "loss": loss, "mean": self.running_mean}
        if trainer.is_global_zero and self.exclude_batches_path:
            _write(self.exclude_batches_path, self.batches)
        if self.max_events is not None and len(self.batches) > self.max_events and self.action != "raise":
            raise RuntimeError(
                f"{what}. This is bad batch number {len(self.batches)}, which exceeds max_events={self.max_events}, so "
                "the cause is probably the data or the learning rate, not a single batch. Check the batches in "
                "LossGuard.batches (epoch, index), lower the learning rate or clip gradients, or raise max_events."
            )

    def _leave_out(self, trainer: Trainer) -> None:
        self.left_out += 1
        trainer.log_metrics({"loss_guard/left_out": self.left_out})

    def state_dict(self) -> dict[str, Any]:
        batches = [{"epoch": epoch, "batch": batch, **about} for (epoch, batch), about in self.batches.items()]
        return {
            "batches": batches,
            "left_out": self.left_out,
            "good": list(self._good),
            "seen": self._seen,
            "last_good": list(self._way_back.last_good),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Batches that were found to be bad after the checkpoint are kept.
        self.batches.update(_by_place(state_dict["batches"]))
        self.left_out, self._seen = state_dict["left_out"], state_dict["seen"]
        self._good = deque(state_dict["good"], maxlen=self.window)
        self._way_back.last_good = tuple(state_dict["last_good"])


class _Saved(NamedTuple):
    """A checkpoint of this run: its number in the sequence of saves, its optimizer step, and its path."""

    sequence: int
    step: int
    path: str


class _WayBack:
    """Chooses the checkpoint to go back to.

    Weights are known to be good once a loss computed with them was good. The newest file with such weights is chosen
    or, if there is none, the newest file whose weights have no loss yet. If there is no such file either, the file that
    the fit started from is chosen.

    Attributes:
        last_good: number of optimizer steps before the last good loss, and the epoch and index of its batch; -1 for
            each of them if there is no good loss yet.
    """

    def __init__(self) -> None:
        self.last_good: tuple[int, int, int] = (-1, -1, -1)
        self._began: tuple[Any, int, int] = (None, 0, 0)
        self._forget()

    def _forget(self) -> None:
        self._place = -1
        self._suspect: tuple[int, int] | None = None
        self._went_to = _Saved(-1, -1, "")
        self._went_to_good = True
        self._passed: set[int] = set()

    def begin(self, trainer: Trainer) -> None:
        """Record where the fit starts (``trainer.ckpt_path``).

        Of the checkpoints that already exist, only those saved up to the fit's starting point count as the fit's own.
        If a fit starts at step 0, none of them do.
        """
        path, newest, before = trainer.ckpt_path, trainer.current_run.saves, 0
        if trainer.global_step and trainer.is_global_zero:
            known = None if path is None else manifest.read_or_none(path)
            before = newest if path is None else known.sequence if known is not None else 0
        self._began = path, before, newest
        self.last_good = min(self.last_good[0], trainer.global_step - 1), *self.last_good[1:]
        self._forget()

    def find(self, trainer: Trainer, what: str) -> Rollback:
        """Return the checkpoint to go back to after a bad loss. All processes get the same one.

        Raises:
            RuntimeError: if there is no checkpoint to go back to.
        """
        state, origin = trainer.state, self._began[0]
        good_step, *before = self.last_good
        batch = state.epoch, state.batch_idx
        if good_step >= 0 and _spoiled(trainer):
            batch = before[0], before[1]
        again = good_step < self._place
        self._place = max(self._place, state.global_step) if again else state.global_step
        saved = [one for one in self._own(trainer) if one.sequence not in self._passed]
        good = [one for one in saved if one.step <= good_step]
        choice = good or [one for one in saved if one.step <= state.global_step]
        blames = not again or batch == self._suspect
        if not blames:
            earlier = [one for one in choice if one.sequence < self._went_to.sequence]
            blames = not earlier and self._went_to_good
            choice = choice if blames else earlier
        if not choice and origin is None:
            raise RuntimeError(f"{what}, {self._nothing()}")
        self._suspect = None if blames else batch
        self._went_to, self._went_to_good = (choice[-1], bool(good)) if choice else (_Saved(-1, -1, ""), True)
        self._passed.update(one.sequence for one in saved if one.sequence > self._went_to.sequence)
        return Rollback(self._went_to.path or origin, own=bool(choice), blamed=batch if blames else None)

    def _nothing(self) -> str:
        if self._went_to.path:
            return (
                f"again after going back to {self._went_to.path!r}. The weights in that checkpoint never had a good "
                "loss, so they were damaged before it was saved, and this run has no earlier checkpoint. Keep more "
                "files (save_top_k=-1), and check the learning rate and the gradients."
            )
        return (
            "and this run has no checkpoint yet to go back to. Save earlier (every_n_train_steps) and save the full "
            "state, or use action='skip'."
        )

    def _own(self, trainer: Trainer) -> list[_Saved]:
        """Return this run's resumable checkpoints, oldest first, as rank 0 sees them."""
        trainer.saver.wait()
        found: set[_Saved] = set()
        _, before, newest = self._began
        for callback in trainer.checkpoint_callbacks if trainer.is_global_zero else []:
            run, folder, depth = callback.state_dict()["run"], callback.dirpath, (callback.filename or "").count("/")
            for path in manifest.checkpoints_in(folder, depth) if folder else ():
                known = manifest.read_or_none(path)
                if known is None or known.weights_only or run not in known.runs or before < known.sequence <= newest:
                    continue
                found.add(_Saved(known.sequence, known.global_step, str(path)))
        return trainer.strategy.broadcast(sorted(found))


def _spoiled(trainer: Trainer) -> bool:
    """Return True if any weight on any process is not finite. Must be called on every rank."""
    parameters: Any = trainer.training_module.parameters()
    local = (p.to_local() if hasattr(p, "to_local") else p for p in parameters)  # the local part of a sharded parameter
    mine = not all(torch.isfinite(p).all() for p in local)
    strategy = trainer.strategy
    if strategy.world_size == 1:
        return mine
    return strategy.reduce(torch.tensor([mine], dtype=torch.float64), "mean", strategy.host_group).item() > 0


class _Before:
    """Snapshot of the state, except gradients, that a training step changes: buffers, RNG states, logged values."""

    def __init__(self, trainer: Trainer) -> None:
        self.module, self.metrics = trainer.training_module, trainer.current_run.metrics
        self.device = trainer.strategy.device
        self.kind = kind_of(self.device)
        self.moving: list[Tensor] | None = None
        self.first: list[tuple[Tensor, Tensor]] = []

    def learn(self) -> None:
        """Find out, after the first good step, which buffers a step changes.

        The buffers are compared only once, on the device.
        """
        if self.moving is None:
            self.moving = [buffer for buffer, copy in self.first if not torch.equal(buffer, copy)]
            self.first = []

    def remember(self) -> Callable[[], None]:
        """Take a snapshot; return a function that restores it."""
        buffers = list(self.module.buffers()) if self.moving is None else self.moving
        copies = [buffer.detach().clone() for buffer in buffers]
        if self.moving is None:
            self.first = list(zip(buffers, copies, strict=True))
        forget = self.metrics.remember()
        random = torch.get_rng_state()
        on_device = self.kind.random_state(self.device)

        def undo() -> None:
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy)
            torch.set_rng_state(random)
            if on_device is not None:
                self.kind.set_random_state(on_device, self.device)
            forget()

        return undo


def _why_not(trainer: Trainer, module: TrainingModule) -> str:
    """Return why a batch's loss cannot be checked before its backward pass; empty if it can."""
    if not module.automatic_optimization:
        return f"manual optimization, which {type(module).__name__} uses"
    if next(iter(inspect.signature(module.training_step).parameters), "") == "dataloader_iter":
        return "training_step(dataloader_iter)"
    if trainer.strategy.splits_batches:
        return f"{type(trainer.strategy).__name__}, which runs each step in micro-batches"
    return ""


def _shared(trainer: Trainer, output: Any) -> tuple[float, bool]:
    """Return the mean loss of all processes, and whether any process skipped the batch by returning None.

    This waits for the device and for the other processes.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    mine = float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else 0.0
    strategy = trainer.strategy
    if strategy.world_size == 1:
        return mine, output is None
    both = torch.tensor([mine, float(output is None)], dtype=torch.float64)
    mean, given_up = strategy.reduce(both, "mean", strategy.host_group).tolist()
    return mean, given_up > 0


def _by_place(batches: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    return {
        (one["epoch"], one["batch"]): {"step": one["step"], "loss": float(one["loss"]), "mean": one["mean"]}
        for one in batches
    }


def _read(path: str) -> dict[tuple[int, int], dict[str, Any]]:
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return _by_place(json.load(file)["batches"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"LossGuard: the file exclude_batches_path={path!r} was not written by LossGuard ({type(error).__name__}: "
            f"{error}). Remove the file to start without excluded batches."
        ) from None


def _write(path: str, batches: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
    """Replace the file atomically. JSON has no non-finite numbers, so a non-finite loss is written as a string."""
    listed = [
        {"epoch": epoch, "batch": batch, **about, "loss": loss if math.isfinite(loss := about["loss"]) else str(loss)}
        for (epoch, batch), about in sorted(batches.items())
    ]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"batches": listed}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
