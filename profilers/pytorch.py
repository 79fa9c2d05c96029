"""``profiler="pytorch"``: torch.profiler over a few steps, with a trace for Chrome and a table of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from .base import Profiler

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

#: Actions whose end advances the profiler's schedule.
_STEPS = ("run_training_batch", ".validation_step", ".test_step", ".predict_step")


class PyTorchProfiler(Profiler):
    """Record torch's operators on the host and on the GPU.

    Args:
        dirpath: see :class:`Profiler`; traces go there too.
        filename: see :class:`Profiler`.
        group_by_input_shapes: one table line per shape of an operator's inputs (with ``record_shapes=True``).
        emit_nvtx: mark operators and actions as NVTX ranges for Nsight Systems instead of recording anything. Start the
            program with ``nsys profile --capture-range=none -o out python train.py``.
        export_to_chrome: write a trace for chrome://tracing or https://ui.perfetto.dev.
        row_limit: lines of the table; -1 means all.
        sort_by_key: the column to sort by, such as ``"cpu_time_total"`` (the default without a GPU),
            ``"device_time_total"`` or ``"self_cpu_memory_usage"``.
        record_module_names: mark each submodule's forward pass with its name. Not with ``compile``, whose graphs have
            no modules.
        table_kwargs: further arguments of the table, such as ``{"max_name_column_width": 80}``.
        **profiler_kwargs: arguments of ``torch.profiler.profile``: ``activities``, ``schedule`` (by default one step is
            skipped, one is a warmup and three are recorded; None records all), ``on_trace_ready``, ``record_shapes``,
            ``profile_memory``, ``with_stack``, ``with_flops``, ...

    Raises:
        TypeError: for an argument that torch's profiler does not have.
        RuntimeError: ``emit_nvtx`` without CUDA.
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
        from torch.profiler import profile

        known = [name for name in inspect.signature(profile.__init__).parameters if name != "self"]
        for name in profiler_kwargs:
            if name not in known:
                raise TypeError(messages.unknown("argument of PyTorchProfiler", name, known))
        if emit_nvtx and not torch.cuda.is_available():
            raise RuntimeError(
                "PyTorchProfiler(emit_nvtx=True) marks ranges for NVIDIA's tools, but this process sees no CUDA "
                "device. Run it on a machine with one, or remove emit_nvtx: PyTorchProfiler() also records on a CPU."
            )
        self.group_by_input_shapes = group_by_input_shapes
        self.emit_nvtx = emit_nvtx
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key or ("device_time_total" if torch.cuda.is_available() else "cpu_time_total")
        self.record_module_names = record_module_names
        self.table_kwargs = dict(table_kwargs or {})
        shapes = profiler_kwargs.get("record_shapes", group_by_input_shapes)
        self.profiler_kwargs = {**profiler_kwargs, "record_shapes": shapes}
        self.traces: list[Path] = []
        self._clear()

    def _clear(self) -> None:
        self.profiler: Any = None
        self._averages: Any = None
        self._ranges: list[tuple[str, Any]] = []
        self._hooks: list[Any] = []
        self._nvtx: Any = None

    # ---- a run -----------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._clear()
        self.traces = []

    def attach(self, trainer: Trainer) -> None:
        if self.record_module_names and trainer.compile is False:
            self._mark_modules(trainer.training_module)
        if self.emit_nvtx:
            self._nvtx = torch.autograd.profiler.emit_nvtx(record_shapes=self.group_by_input_shapes)
            self._nvtx.__enter__()
            return
        from torch.profiler import profile, schedule

        options = dict(self.profiler_kwargs)
        options.setdefault("schedule", schedule(wait=1, warmup=1, active=3, repeat=1))
        options["on_trace_ready"] = self._ready(options.get("on_trace_ready"))
        self.profiler = profile(**options)
        self.profiler.__enter__()

    def _ready(self, then: Callable[[Any], Any] | None) -> Callable[[Any], None]:
        """Return the function that handles each trace."""

        def ready(profiler: Any) -> None:
            self._averages = profiler.key_averages(group_by_input_shape=self.group_by_input_shapes)
            if self.export_to_chrome:
                path = self.path(".pt.trace.json", *([str(len(self.traces))] if self.traces else []))
                profiler.export_chrome_trace(str(path))
                self.traces.append(path)
            if then is not None:
                then(profiler)

        return ready

    def _mark_modules(self, root: torch.nn.Module) -> None:
        from torch.profiler import record_function

        for name, module in root.named_modules():
            if not name or isinstance(module, torch.jit.ScriptModule):
                continue
            label = f"[module]{type(module).__module__}.{type(module).__qualname__}: {name}"
            open_ranges: list[Any] = []

            def enter(_: Any, __: Any, label: str = label, ranges: list[Any] = open_ranges) -> None:
                ranges.append(record_function(label))
                ranges[-1].__enter__()

            def leave(_: Any, __: Any, ___: Any, ranges: list[Any] = open_ranges) -> None:
                if ranges:
                    ranges.pop().__exit__(None, None, None)

            self._hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    # ---- actions ---------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        from torch.profiler import record_function

        mark = record_function(action_name)
        mark.__enter__()
        self._ranges.append((action_name, mark))

    def stop(self, action_name: str) -> None:
        at = next((i for i in reversed(range(len(self._ranges))) if self._ranges[i][0] == action_name), None)
        if at is None:
            raise self._unknown(action_name)
        self._ranges.pop(at)[1].__exit__(None, None, None)
        if self.profiler is not None and action_name.endswith(_STEPS):
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
        running, self.profiler, self._nvtx = (self.profiler, self._nvtx), None, None
        for one in running:
            if one is not None:
                one.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def teardown(self, stage: str | None) -> None:
        self._stop()
        self._averages = None
        super().teardown(stage)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "profiler": None, "_averages": None, "_ranges": [], "_hooks": [], "_nvtx": None}
