"""``profiler="pytorch"``: torch.profiler over a few steps, with a trace for Chrome and a table of operators."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from ..devices.kinds import CUDA_KIND, present
from .base import Profiler

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction
    from typing_extensions import Self

    from ..trainer.trainer import Trainer

#: Actions whose end advances the profiler's schedule.
_STEPS = ("run_training_batch", ".validation_step", ".test_step", ".predict_step")
#: The default schedule: the number of steps to skip, to use as warmup and to record.
_DEFAULT = {"wait": 1, "warmup": 1, "active": 3}
#: Arguments of the table for which PyTorchProfiler has its own arguments.
_OWN_IN_TABLE = {"row_limit": "row_limit", "sort_by": "sort_by_key"}


class RegisterRecordFunction:
    """Context manager that marks each submodule's forward pass with its name in profiles.

    The marks read ``[pl][module]torch.nn.modules.linear.Linear: encoder.0``.

    Args:
        model: the module; its own forward pass is not marked.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        from torch.profiler import record_function

        for name, module in self._model.named_modules():
            if not name or isinstance(module, torch.jit.ScriptModule):
                continue
            label = f"[pl][module]{type(module).__module__}.{type(module).__qualname__}: {name}"
            open_ranges: list[Any] = []

            def enter(_: Any, __: Any, label: str = label, ranges: list[Any] = open_ranges) -> None:
                ranges.append(record_function(label))
                ranges[-1].__enter__()

            def leave(_: Any, __: Any, ___: Any, ranges: list[Any] = open_ranges) -> None:
                if ranges:
                    ranges.pop().__exit__(None, None, None)

            self._hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class ScheduleWrapper:
    """A schedule that counts training steps and each kind of evaluation step separately.

    Once recording starts for one kind of step, every step counts toward that kind's schedule until the trace is
    complete.

    Args:
        schedule: a schedule for torch's profiler.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction]) -> None:
        self._schedule = schedule
        self._ended: dict[str, int] = {}
        self._kind = ""
        self._recording = False

    def step(self, kind: str) -> None:
        """Count a step that has ended."""
        if not self._recording:
            self._kind = kind
        self._ended[self._kind] = self._ended.get(self._kind, 0) + 1

    def __call__(self, _: int) -> ProfilerAction:
        """Return the action for the next step."""
        from torch.profiler import ProfilerAction

        action = self._schedule(self._ended.get(self._kind, 0))
        self._recording = action is not ProfilerAction.NONE
        return action


class PyTorchProfiler(Profiler):
    """Records torch's operators on the host and on the GPU.

    In traces, actions are named ``[pl][profile]run_training_batch`` and submodules ``[pl][module]...: name``. Outside a
    run, recording begins with the first action and ends with :meth:`describe`.

    Args:
        dirpath: see :class:`Profiler`. Traces are written to this folder too.
        filename: see :class:`Profiler`.
        group_by_input_shapes: one table row per input shape of an operator (with ``record_shapes=True``).
        emit_nvtx: mark operators and actions as NVTX ranges for Nsight Systems instead of recording anything. Start the
            program with ``nsys profile --capture-range=none -o out python train.py``.
        export_to_chrome: write a trace for chrome://tracing or https://ui.perfetto.dev.
        row_limit: rows in the table; -1 means all.
        sort_by_key: the column to sort by, such as ``"cpu_time_total"`` (the default without a GPU),
            ``"device_time_total"`` or ``"self_cpu_memory_usage"``.
        record_module_names: mark each submodule's forward pass with its name. Has no effect with ``compile``, because
            compiled graphs have no modules.
        table_kwargs: more arguments for the table, such as ``{"max_name_column_width": 80}``.
        **profiler_kwargs: arguments of ``torch.profiler.profile``, such as ``activities``, ``on_trace_ready``,
            ``record_shapes``, ``profile_memory``, ``with_stack``, ``with_flops`` and ``schedule``. If ``schedule`` is
            None, all steps are recorded. The default schedule skips one step, uses one for warmup and records three,
            separately for training and for each kind of evaluation; a shorter run is recorded completely.

    Attributes:
        function_events: events of the latest trace, a ``torch.autograd.profiler_util.EventList``; None before the first
            trace.
        traces: the run's trace files.

    Raises:
        TypeError: torch's profiler does not accept one of ``profiler_kwargs``.
        KeyError: the table does not accept one of ``table_kwargs``, or PyTorchProfiler has its own argument for it.
        RuntimeError: ``emit_nvtx`` is True, but CUDA is not available.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        from torch.autograd.profiler_util import EventList
        from torch.profiler import profile

        known = [name for name in inspect.signature(profile.__init__).parameters if name != "self"]
        for name in profiler_kwargs:
            if name not in known:
                raise TypeError(messages.unknown("PyTorchProfiler argument", name, known))
        in_table = [
            name for name in inspect.signature(EventList.table).parameters if name not in ("self", *_OWN_IN_TABLE)
        ]
        for name in table_kwargs or ():
            if name in _OWN_IN_TABLE:
                raise KeyError(
                    f"Found invalid table_kwargs key: {name}. This is already a positional argument of the Profiler. "
                    f"Pass it as PyTorchProfiler({_OWN_IN_TABLE[name]}=...)."
                )
            if name not in in_table:
                hint = messages.did_you_mean(name, in_table)
                raise KeyError(f"Found invalid table_kwargs key: {name}.{hint} Choose {messages.names(in_table)}.")
        if emit_nvtx and not CUDA_KIND.is_available():
            raise RuntimeError(
                "PyTorchProfiler(emit_nvtx=True) marks ranges for NVIDIA's tools, but this process has no CUDA "
                "device. Run the program on a machine with a GPU, or remove emit_nvtx. PyTorchProfiler() also records "
                "on a CPU."
            )
        self.group_by_input_shapes = group_by_input_shapes
        self.emit_nvtx = emit_nvtx
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key or ("device_time_total" if present().has_timed_events() else "cpu_time_total")
        self.record_module_names = record_module_names
        self.table_kwargs = dict(table_kwargs or {})
        shapes = profiler_kwargs.get("record_shapes", group_by_input_shapes)
        self.profiler_kwargs = {**profiler_kwargs, "record_shapes": shapes}
        self.traces: list[Path] = []
        self._clear()

    def _clear(self) -> None:
        self.profiler: Any = None
        self.function_events: Any = None
        self._averages: Any = None
        self._schedule: ScheduleWrapper | None = None
        self._ranges: list[tuple[str, Any]] = []
        self._marks: RegisterRecordFunction | None = None
        self._nvtx: Any = None
        self._trainer: Trainer | None = None
        self._may_be_short = False

    # ---- a run -----------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        self._stop()
        super().setup(stage, local_rank, log_dir)
        self._clear()
        self.traces = []

    def attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self.record_module_names and trainer.compile is False:
            self._marks = RegisterRecordFunction(trainer.training_module).__enter__()
        self._begin(whole=False)
        self._may_be_short = self._schedule is not None and "schedule" not in self.profiler_kwargs

    def _begin(self, whole: bool) -> None:
        """Start recording; record all steps if ``whole`` is True and no schedule was given."""
        if self.emit_nvtx:
            self._nvtx = torch.autograd.profiler.emit_nvtx(record_shapes=self.group_by_input_shapes)
            self._nvtx.__enter__()
            return
        from torch.profiler import profile, schedule

        # This warning is expected, because training and validation are recorded in separate cycles.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
        options = dict(self.profiler_kwargs)
        wanted = options.pop("schedule", None if whole else schedule(**_DEFAULT, repeat=1))
        if wanted is not None:
            options["schedule"] = self._schedule = ScheduleWrapper(wanted)
        options["on_trace_ready"] = self._ready(options.get("on_trace_ready"))
        self.profiler = profile(**options)
        self.profiler.__enter__()

    def _ready(self, then: Callable[[Any], Any] | None) -> Callable[[Any], None]:
        """Return the function that handles each trace."""

        def ready(profiler: Any) -> None:
            self.function_events = profiler.events()
            self._averages = self.function_events.key_averages(group_by_input_shapes=self.group_by_input_shapes)
            if self.export_to_chrome:
                path = self.path(".pt.trace.json", *([str(len(self.traces))] if self.traces else []))
                profiler.export_chrome_trace(str(path))
                self.traces.append(path)
            if then is not None:
                then(profiler)

        return ready

    # ---- actions ---------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        from torch.profiler import record_function

        if self._stage is None and self.profiler is None and self._nvtx is None:
            self._begin(whole=True)
        if self._may_be_short and (action_name == "run_training_epoch" or self._is_evaluation_step(action_name)):
            self._record_short_run()
        mark = record_function(f"[pl][profile]{action_name}")
        mark.__enter__()
        self._ranges.append((action_name, mark))

    def _is_evaluation_step(self, action_name: str) -> bool:
        return self._stage != "fit" and action_name.endswith(_STEPS)

    def _record_short_run(self) -> None:
        """Drop the default schedule if the run, whose length is known only now, is too short for it."""
        self._may_be_short = False
        if self._trainer is not None and _batches(self._trainer, self._stage) < sum(_DEFAULT.values()):
            self.profiler.__exit__(None, None, None)
            self._schedule = None
            self._begin(whole=True)

    def stop(self, action_name: str) -> None:
        at = next((i for i in reversed(range(len(self._ranges))) if self._ranges[i][0] == action_name), None)
        if at is None:
            raise self._unknown(action_name)
        self._ranges.pop(at)[1].__exit__(None, None, None)
        if self._schedule is None or self.profiler is None or not action_name.endswith(_STEPS):
            return
        if self._trainer is None or not self._trainer.sanity_checking:
            self._schedule.step(action_name)
            self.profiler.step()

    # ---- results ---------------------------------------------------------------------------------

    def describe(self) -> None:
        self._stop()
        super().describe()
        for path in self.traces:
            messages.info(f"Trace for chrome://tracing or https://ui.perfetto.dev: {path}")

    def summary(self) -> str:
        self._stop()
        if self._averages is None:
            return ""
        table = self._averages.table(sort_by=self.sort_by_key, row_limit=self.row_limit, **self.table_kwargs)
        return f"{self._stage.upper() if self._stage else ''} Profiler Report\n{table}".strip()

    def _stop(self) -> None:
        for name in ("profiler", "_nvtx", "_marks"):
            entered = getattr(self, name)
            setattr(self, name, None)
            if entered is not None:
                entered.__exit__(None, None, None)

    def teardown(self, stage: str | None) -> None:
        self._stop()
        self._averages = self._trainer = None
        super().teardown(stage)

    def __getstate__(self) -> dict[str, Any]:
        emptied = ("profiler", "function_events", "_averages", "_schedule", "_marks", "_nvtx", "_trainer")
        return {**vars(self), **dict.fromkeys(emptied), "_ranges": []}


def _batches(trainer: Trainer, stage: str | None) -> float:
    """Return the number of batches in a run; for a fit, the maximum number of training batches."""
    if stage != "fit":
        return sum(getattr(trainer, "num_val_batches" if stage == "validate" else f"num_{stage}_batches"))
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else math.inf
    by_steps = math.inf if trainer.max_steps == -1 else trainer.max_steps * trainer.accumulate_grad_batches
    return min(trainer.num_training_batches * epochs, by_steps)
