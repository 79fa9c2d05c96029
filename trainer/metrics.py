"""The store that ``self.log`` writes to.

The first call with a name checks its arguments and creates a record; each further call is one dictionary lookup and one
update of the record, on the value's device. Each flush copies all values from the device together, without waiting for
the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..data.batches import batch_size_of, conflicting_sizes
from ..devices.kinds import kind_of
from .hook_names import calling_hook
from .metric_reductions import MetricRecord, Record, RecordOptions, Table, as_tensor, make_record
from .phases import EVAL_BATCH, SETUP, Moment
from .shared_step_values import Sharing

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .loss import LossWatch
    from .state import RunState

Place = tuple[Moment, Table, int | None]
Send = Callable[[dict[str, float], int], None]
#: Loader index, record and epoch value.
Result = tuple[int | None, Record, Tensor | float]


class Evaluated(NamedTuple):
    """The names that the latest evaluation logged, and the number of training batches before it."""

    batches: int
    names: list[str]


class MetricStore:
    """All values logged in a run, by stage, point in the run and loader.

    Attributes:
        records: the table that ``self.log`` currently uses.
        batch: the current batch, whose size weights epoch means.
        epoch_ended: whether the epoch's values can be computed (true in ``on_*_epoch_end``).
        steps_in_evaluation: whether an evaluation step logs with ``on_step=True``; if so, values are flushed after
            each evaluation batch.
        sent: the values last sent to the loggers.
        listener: receives the values that a step logs while it runs on a micro-batch; None otherwise.
        losses: checks the losses that have reached the host; if None, losses are not checked.
    """

    def __init__(self, state: RunState, strategy: Strategy, send: Send | None) -> None:
        self.state = state
        self.strategy = strategy
        self.send = send
        self.records = Table()
        self.batch: Any = None
        self.epoch_ended = False
        self.sent: dict[str, float] = {}
        self.steps_in_evaluation = False
        self.listener: Callable[[str, Any, RecordOptions], Any] | None = None
        self.losses: LossWatch | None = None
        self._moment: Moment = SETUP
        self._dataloader_idx: int | None = None
        self._tables: dict[tuple[str, str, int | None], Table] = {}
        self._finished: dict[str, Tensor] = {}
        self._evaluated = Evaluated(0, [])
        self._copies: list[_HostCopy] = []
        self._bar = _BarValues()
        self._eval_steps: dict[str, int] = {}
        self._sized: tuple[Any, int] | None = None
        self._sharings: dict[tuple[str, int | None, bool], Sharing] = {}

    def time_with(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let a profiler time some of this object's methods; ``around`` is the profiler's method."""
        for name in ("flush_step", "send_epoch", "finish_epoch", "drain"):
            setattr(self, name, around(f"[Logging].{name}", getattr(self, name)))

    # ---- writing ---------------------------------------------------------------------------------------------------

    def enter(self, moment: Moment, dataloader_idx: int | None = None) -> Place:
        """Set the point in the run that ``self.log`` is called from; return the previous one, for :meth:`back`."""
        before = (self._moment, self.records, self._dataloader_idx)
        self._moment = moment
        self.records = self._tables.setdefault((str(self.state.stage or ""), moment.name, dataloader_idx), Table())
        self._dataloader_idx = dataloader_idx
        return before

    def back(self, place: Place) -> None:
        """Restore the point in the run that :meth:`enter` returned."""
        self._moment, self.records, self._dataloader_idx = place

    def define(self, name: str, value: Any, options: RecordOptions) -> Record:
        """Check the first call with ``name`` at this point in the run, and create its record."""
        if self.listener is not None:
            return self.listener(name, value, options)
        known = self.records.get(name)
        if known is not None and known.resumed and known.fits(options):
            known.options, known.resumed = options, False
            self._shared_with(self._hook()).add(known)
            return known
        if known is not None:
            changed = ", ".join(
                f"{f}={getattr(known.options, f)!r} then {getattr(options, f)!r}"
                for f in RecordOptions._fields
                if getattr(known.options, f) != getattr(options, f)
            )
            if not changed:  # in code that torch 2.11 compiles, named tuples are never equal
                return known
            hooks = " and ".join(dict.fromkeys(hook for hook in (known.hook, self._hook()) if hook))
            raise ValueError(
                f"self.log({name!r}) was called in {hooks} with different arguments ({changed}), so it is not clear "
                "how to reduce the values. Use the same arguments, or two names."
            )
        if self._moment.instead:
            raise RuntimeError(
                f"self.log({name!r}) was called in {self._hook()}, where metrics cannot be logged. Log it in "
                f"{self._moment.instead.format(stage=self._stage_word())} instead."
            )
        weigh, hook = self.weigher(self._moment), self._hook()
        record = make_record(name, value, options, self._moment, hook, self._dataloader_idx, weigh)
        record.hook = hook
        self._refuse_overwriting(name, record)
        if isinstance(record, MetricRecord):
            self._warn_of_mixing(name, record)
        if self._moment.step_allowed:
            self._shared_with(hook).add(record)
        self.records[name] = record
        if self._moment is EVAL_BATCH and record.on_step:
            self.steps_in_evaluation = True
        return record

    def step_value_sharings(self) -> tuple[Sharing, Sharing]:
        """Return the points where processes share step values: after the step, and after the end-of-batch hooks."""
        stage, idx = str(self.state.stage or ""), self._dataloader_idx
        word = {"train": "training"}.get(stage, self._stage_word())
        for after_hooks in (False, True):
            where = f"the hook on_{word.removesuffix('ing')}_batch_end" if after_hooks else f"a {word} batch"
            self._sharings.setdefault((stage, idx, after_hooks), Sharing(self.strategy, where, stage != "predict"))
        return self._sharings[stage, idx, False], self._sharings[stage, idx, True]

    def _shared_with(self, hook: str) -> Sharing:
        return self.step_value_sharings()[hook.endswith("_batch_end")]

    def _refuse_overwriting(self, name: str, record: Record) -> None:
        """Raise if two loaders log under the same key, because the later value would replace the earlier one."""
        for (stage, moment, idx), table in self._tables.items():
            same_moment = stage == self.state.stage and moment == self._moment.name and idx != self._dataloader_idx
            if same_moment and name in table and table[name].key == record.key:
                raise ValueError(
                    f"self.log({name!r}, add_dataloader_idx=False) was called for loaders {idx} and "
                    f"{self._dataloader_idx}, so one value would replace the other. Leave out add_dataloader_idx, or "
                    "use a different name for each loader."
                )

    def _warn_of_mixing(self, name: str, record: MetricRecord) -> None:
        """Warn if a metric object is also logged for another loader, or in both training and validation."""
        stage, idx = str(self.state.stage), self._dataloader_idx
        for (other_stage, _, other_idx), table in self._tables.items():
            metrics = (one for one in table.values() if isinstance(one, MetricRecord))
            other = next((one for one in metrics if one.metric is record.metric), None)
            if other is None or not (record.on_epoch or other.on_epoch):
                continue
            if stage == other_stage and idx != other_idx and None not in (idx, other_idx):
                places, instead = f"loaders {other_idx} and {idx}", "nn.ModuleList([...])[dataloader_idx]"
            elif {stage, other_stage} == {"train", "validate"}:
                places, instead = "training and validation", "self.val_metric = self.train_metric.clone()"
            else:
                continue
            messages.warn_once(
                f"self.log({name!r}) got the same {type(record.metric).__name__} object in {places}, so its values mix "
                f"the samples of both. Use a separate object for each, such as {instead}."
            )

    def _weight(self, name: str) -> int:
        """Return the batch size, computed once per batch."""
        batch = self.batch
        if self._sized is not None:
            if self._sized[0] is batch:
                return self._sized[1]
            first = batch[0] if type(batch) in (tuple, list) and batch else batch
            if type(first) is Tensor and first.ndim:
                self._sized = (batch, size := first.size(0))
                return size
        size = batch_size_of(batch) if batch is not None else 1
        if size is None:
            messages.warn_once(
                f"No tensor was found in the batch of type {type(batch).__name__}, so the epoch mean of {name!r} "
                "gives every batch the same weight. To weight by samples, call "
                f"self.log({name!r}, ..., batch_size=...)."
            )
            size = 1
        elif self._sized is None and len(sizes := conflicting_sizes(batch)) > 1:
            messages.warn_once(
                f"The batch contains tensors with different first dimensions ({', '.join(map(str, sizes))}). The epoch "
                f"mean of {name!r} uses {size} as the batch size. To set the batch size, call self.log({name!r}, ..., "
                "batch_size=...)."
            )
        self._sized = (batch, size)
        return size

    @contextmanager
    def muted(self, module: nn.Module) -> Iterator[None]:
        """Context manager that discards logged values and updates of the module's torchmetrics.

        Used for a batch that a process runs only because the other processes run one. Names that are first logged
        inside the context stay known, so that all processes have the same names.
        """
        table, known, forget = self.records, set(self.records), self.remember_all(module)
        yield
        sharing = self.step_value_sharings()[0]
        logged = dict(sharing.pending)
        forget()
        sharing.muted = True
        sharing.pending.update(logged)  # needed to share values with the other processes
        for name in table.keys() - known:
            table[name].seen = True

    def remember_all(self, module: nn.Module) -> Callable[[], None]:
        """Like :meth:`remember`, but the returned function also restores the module's torchmetrics."""
        forget, metrics = self.remember(), sys.modules.get("torchmetrics")
        kept: list[Any] = [m for m in module.modules() if isinstance(m, metrics.Metric)] if metrics is not None else []
        states = [(metric, metric._copy_state_dict(), metric._update_count) for metric in kept]

        def forget_all() -> None:
            logs_steps = self.steps_in_evaluation  # an evaluation since then may have set it
            forget()
            self.steps_in_evaluation = logs_steps
            for metric, state, updates in states:
                metric.reset()
                for attribute, value in state.items():
                    setattr(metric, attribute, value)
                metric._update_count = updates

        return forget_all

    def remember(self) -> Callable[[], None]:
        """Return a function that discards the values logged since this call, except in torchmetrics states."""
        table, steps, sharing = self.records, self.steps_in_evaluation, self.step_value_sharings()[0]
        pending = dict(sharing.pending)
        before = {name: (r.dump(), r.value, r.fresh, r.seen) for name, r in table.items()}

        def forget() -> None:
            for name, record in table.items():
                Record.reset(record) if isinstance(record, MetricRecord) else record.reset()
                if name in before:
                    state, record.value, record.fresh, record.seen = before[name]
                    record.load(state)
            self.steps_in_evaluation = steps
            sharing.pending.clear()
            sharing.pending.update(pending)

        return forget

    def _hook(self) -> str:
        """Return the name of the hook that is logging, or a description if the stack does not show the name."""
        return calling_hook() or self._moment.name.format(stage=self._stage_word())

    def _stage_word(self) -> str:
        return {"sanity_check": "validation", "validate": "validation"}.get(
            self.state.stage or "", self.state.stage or ""
        )

    @property
    def moment(self) -> Moment:
        """The point in the run from which ``self.log`` is currently called."""
        return self._moment

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _records_of(self, stage: str | None) -> Iterator[tuple[tuple[str, str, int | None], Record]]:
        for place, table in self._tables.items():
            if place[0] == stage:
                for record in table.values():
                    yield place, record

    def _stage_records(self, stage: str | None) -> Iterator[tuple[int | None, Record]]:
        return ((place[2], record) for place, record in self._records_of(stage))

    def known(self) -> Iterator[tuple[str, Record]]:
        """Yield every record of the run, with its stage."""
        return ((stage, record) for (stage, _, _), table in self._tables.items() for record in table.values())

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return every value logged so far, by name, for callbacks to monitor."""
        found, newer = dict(self._finished), self._newer()
        for stage, record in sorted(self.known(), key=lambda known: known[0] == self.state.stage):
            if record.options.rank_zero_only or not record.seen:
                continue
            if stage == "train" and record.on_step and (value := record.step_value()) is not None:
                tensor = as_tensor(value, record.dtype)
                found |= {key: tensor for key in (record.step_key, record.key) if key not in newer}
            if record.on_epoch and stage == self.state.stage and self.epoch_ended:
                value = record.result(self.strategy)
                if not record.is_void:
                    found[record.epoch_key] = found[record.key] = as_tensor(value, record.dtype)
        return found

    def _newer(self) -> Sequence[str]:
        """Return the names whose last value is an evaluation's, because no batch has been trained on since."""
        return self._evaluated.names if self._evaluated.batches == self.state.batches else ()

    def is_step_value(self, name: str) -> bool:
        """Return True if the value to monitor under ``name`` always comes from a training step, not an evaluation."""
        logged = [
            (stage, record)
            for stage, record in self.known()
            if name in (record.key, record.step_key) and not record.options.rank_zero_only
        ]
        return any(record.seen for _, record in logged) and all(
            stage == "train" and record.on_step for stage, record in logged
        )

    def give(self, name: str, value: Tensor | float) -> None:
        """Let callbacks monitor a value that was not logged with ``self.log``."""
        self._finished[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(value)

    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the values logged with ``prog_bar=True``, as numbers.

        On an accelerator, they may lag by one refresh of the progress bar.
        """
        found: dict[str, Any] = {}
        for _, record in self._stage_records(self.state.stage):
            if record.options.prog_bar and record.on_step and (value := record.step_value()) is not None:
                found[record.step_key] = value
        return self._bar.read(found)

    def flush_step(self, stage_step: int, epoch: int | None, output: Any = None) -> None:
        """Send the step values logged since the last flush to the loggers, at ``stage_step`` on the x axis.

        ``output`` is the last output of ``training_step``; its loss is checked.
        """
        fresh: dict[str, Any] = {}
        for record in self.records.values():
            if record.fresh and record.on_step and record.logger:
                record.fresh = False
                value = record.step_value()
                if value is not None:
                    fresh[record.step_key] = value
        if self.losses is not None:
            fresh |= self.losses.within(output)
        self.drain(wait=False)
        if fresh:
            self._copies.append(_HostCopy(fresh, stage_step, epoch))
            self.drain(wait=False)

    def flush_eval_step(self) -> None:
        """Send an evaluation batch's step values; each loader of a stage counts its own steps."""
        stage = str(self.state.stage or "")
        if stage == "sanity_check":
            return
        if self._dataloader_idx:
            stage += f"/{self._dataloader_idx}"
        step = self._eval_steps.get(stage, 0)
        self._eval_steps[stage] = step + 1
        self.flush_step(step, self.epoch_of_eval_step())

    def epoch_of_eval_step(self) -> int | None:
        """Return the epoch that loggers receive with the step values of an evaluation."""
        return self.state.epoch

    def drain(self, wait: bool = True) -> None:
        """Send the values that have reached the host (with ``wait``, all values) to the loggers, in order."""
        while self._copies and (wait or self._copies[0].ready()):
            copy = self._copies.pop(0)
            self._write(copy.values(), copy.step, copy.epoch)

    def _write(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        self._check_values(values, step, epoch)
        if not values:
            return
        if "step" in values:
            step = int(values.pop("step"))
        self.sent.update(values)
        if self.send is not None:
            self.send(values if epoch is None else {"epoch": epoch, **values}, step)

    def _check_values(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        if self.losses is not None:
            at = step if self.state.stage == "train" else self.state.updates
            self.losses.check(values, at, self.state.epoch if epoch is None else epoch)

    # ---- epochs ----------------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Allow the epoch's values to be computed.

        Values shared across processes are computed now, so that a single process can read them later.
        """
        self.epoch_ended = True
        self._share()

    def end_loader(self) -> None:
        """Compute the metrics logged for one evaluation loader, before batches of the next loader update them."""
        self._share()
        for record in self.records.values():
            if isinstance(record, MetricRecord) and record.seen and record.on_epoch:
                record.result(self.strategy)

    def _share(self) -> None:
        """Reduce the values logged since the last call across all processes; every process must call this."""
        if self.strategy.world_size == 1:
            return
        records = {f"{stage}|{moment}|{r.key}": r for (stage, moment, _), r in self._records_of(self.state.stage)}
        pending = {name: r for name, r in records.items() if r.seen and r.on_epoch and r.is_shared and r.shared is None}
        common = set(pending)
        if not self.strategy.same("|".join(sorted(pending))):
            common.intersection_update(*self.strategy.gather_objects(list(pending)))
        for name in sorted(pending):
            pending[name].alone = name not in common
            pending[name].result(self.strategy)
        odd = sorted({records[name].key for name in pending if name not in common})
        if odd:
            messages.warn_once(
                f"{messages.names(odd, 'and')} {'was' if len(odd) == 1 else 'were'} not logged on every rank, so "
                "each rank computes its own epoch value. Log the value on every rank, or call self.log(..., "
                "rank_zero_only=True)."
            )

    def finish_epoch(self) -> list[Result]:
        """Compute the stage's epoch values and reset the records; return a list of (loader, record, value) tuples."""
        self._share()
        self.progress_bar_metrics()  # the bar's last chance to read step values, which are reset next
        results: list[Result] = []
        newer = self._newer()
        for dataloader_idx, record in self._stage_records(self.state.stage):
            if not record.seen:
                continue
            trains = self.state.stage == "train"  # an evaluation's step values only go to the loggers
            if trains and record.on_step and (value := record.step_value()) is not None:
                self._keep(record, record.step_key, value, newer)
            if record.on_epoch:
                value = record.result(self.strategy)
                if record.is_void:
                    self._drop(record)
                    continue
                results.append((dataloader_idx, record, value))
                self._keep(record, record.epoch_key, value)
        if self.state.stage != "train":
            names = [name for _, record, _ in results for name in (record.epoch_key, record.key)]
            self._evaluated = Evaluated(self.state.batches, names)
        for _, record in self._stage_records(self.state.stage):
            record.reset()
        for sharing in self._sharings.values():
            sharing.pending.clear()
        for table in self._tables.values():
            table.groups.clear()  # a later collection may get the id of a deleted one
        self.epoch_ended = False
        self.batch = self._sized = None
        return results

    def _drop(self, record: Record) -> None:
        """Forget the value of an earlier epoch, so that callbacks do not act on it again."""
        for name in (record.epoch_key, record.key):
            self._finished.pop(name, None)

    def _keep(self, record: Record, key: str, value: Tensor | float, newer: Sequence[str] = ()) -> None:
        """Keep a value, except under the ``newer`` names, so that callbacks can monitor it after its epoch."""
        if not record.options.rank_zero_only:
            kept = as_tensor(value, record.dtype).detach()
            self._finished |= {name: kept for name in (key, record.key) if name not in newer}

    def send_epoch(self, results: list[Result]) -> dict[str, float]:
        """Copy epoch values to the host in one transfer, then pass them to the progress bar and the loggers."""
        self.drain()
        numbers = to_host({record.epoch_key: value for _, record, value in results})
        self._bar.keep({r.epoch_key: numbers[r.epoch_key] for _, r, _ in results if r.options.prog_bar})
        logged = {r.epoch_key: numbers[r.epoch_key] for _, r, _ in results if r.logger}
        if logged:
            self._write(logged, self.state.x_axis(self.state.updates), self.state.epoch)
        return numbers

    def check_losses(self, output: Any) -> None:
        """Check an epoch's last losses, including the last step's in ``output`` (this waits for the device)."""
        if self.losses is not None and not self.losses.warned:
            values = self.losses.among(self._finished)
            self._check_values(to_host(values | self.losses.within(output)), self.state.updates, self.state.epoch)

    def discard(self) -> None:
        """Discard everything that the stage has logged. Called after a sanity check, whose values are not results."""
        for key in [key for key in self._tables if key[0] == self.state.stage]:
            del self._tables[key]
        self._finished.clear()
        self._evaluated = Evaluated(0, [])
        self._copies.clear()
        self._bar.clear()
        self.epoch_ended = False
        self.batch = self._sized = None

    # ---- state -----------------------------------------------------------------------------------------------------

    def running(self, stage: str) -> Iterator[tuple[str, int | None, str, Record]]:
        """Yield each record that a stage has updated in this epoch, with its point in the run, loader and name."""
        for (at, moment, idx), table in self._tables.items():
            if at == stage:
                yield from ((moment, idx, name, record) for name, record in table.items() if record.seen)

    def resume(self, stage: str, moment: Moment, idx: int | None, name: str, record: Record) -> None:
        """Restore a record that :meth:`running` yielded in an earlier run."""
        record.resumed = True
        self._tables.setdefault((stage, moment.name, idx), Table())[name] = record

    def weigher(self, moment: Moment) -> Callable[[str], int]:
        """Return the function that computes a value's weight in a mean, for values logged at this point in the run."""
        return self._weight if moment.step_allowed else _alike

    def state_dict(self) -> dict[str, Any]:
        """Return finished values and evaluation step counts; :mod:`.running_metrics` saves the current epoch."""
        finished = {k: v.cpu() for k, v in self._finished.items()}
        return {"finished": finished, "eval": self._eval_steps, "evaluated": self._evaluated._asdict()}

    def finished(self) -> dict[str, Any]:
        """Return the values that can be read after a run, for :meth:`take_over` in another process."""
        return self.state_dict() | {"sent": self.sent, "bar": self.progress_bar_metrics()}

    def take_over(self, found: dict[str, Any]) -> None:
        """Use the values that a run in another process logged; they stay on the CPU."""
        self._finished, self._eval_steps, self.sent = found["finished"], found["eval"], found["sent"]
        self._evaluated = Evaluated(**found["evaluated"])
        self._bar.keep(found["bar"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self._finished = {k: v.to(self.strategy.device) for k, v in state["finished"].items()}
        self._eval_steps = dict(state["eval"])
        self._evaluated = Evaluated(**state.get("evaluated", {"batches": 0, "names": []}))


def _alike(name: str) -> int:
    """Return 1, the weight of a value that is logged once per epoch."""
    return 1


def to_host(values: dict[str, Any]) -> dict[str, float]:
    """Convert scalar tensors to numbers, with one transfer for all that are not on the CPU (waits for the device)."""
    away = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.device.type != "cpu"}
    numbers = dict(zip(away, _stacked(away.values()).tolist(), strict=True)) if away else {}
    here = {k: v.item() if isinstance(v, Tensor) else v for k, v in values.items() if k not in numbers}
    return {k: numbers[k] if k in numbers else float(here[k]) for k in values}


def _stacked(values: Iterable[Tensor]) -> Tensor:
    """Stack scalar tensors on the same device, in float64 if the device supports it."""
    return torch.stack([v.detach().reshape(()).to(kind_of(v.device).widest_float) for v in values])


class _HostCopy:
    """A transfer of scalar values to the host. It starts immediately; the values are read once it is complete."""

    def __init__(self, values: dict[str, Any], step: int = 0, epoch: int | None = 0) -> None:
        self.step, self.epoch = step, epoch
        self._event: Any = None
        away = {k: v for k, v in values.items() if isinstance(v, Tensor) and kind_of(v.device).overlaps_copies()}
        if not away:
            self._numbers = to_host(values)
            return
        kind = kind_of(next(iter(away.values())).device)
        stacked = _stacked(away.values())
        self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        self._names = list(away)
        self._numbers = dict.fromkeys(values, 0.0) | to_host({k: v for k, v in values.items() if k not in away})
        self._event = kind.new_event()
        self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> dict[str, float]:
        if self._event is not None:
            self._event.synchronize()
            self._numbers.update(zip(self._names, self._host.tolist(), strict=True))
        return self._numbers


class _BarValues:
    """The values that the progress bar shows: the latest ones that have reached the host."""

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}
        self._copy: _HostCopy | None = None

    def read(self, values: dict[str, Any]) -> dict[str, float]:
        if self._copy is not None and self._copy.ready():
            self._shown.update(self._copy.values())
            self._copy = None
        if self._copy is None and values:
            copy = _HostCopy(values)
            if copy.ready():
                self._shown.update(copy.values())
            else:
                self._copy = copy
        return dict(self._shown)

    def keep(self, values: dict[str, float]) -> None:
        self._shown.update(values)

    def clear(self) -> None:
        self._shown.clear()
        self._copy = None
