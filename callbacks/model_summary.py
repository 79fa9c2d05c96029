"""Callback that prints a table of a module's layers when training starts."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import messages
from ..devices.kinds import kind_of
from ..report.text_table import fitted
from ..torch_private import pytree
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

UNKNOWN = "?"


class ModelSummary(Callback):
    """Print a table of the module's layers when training starts, on rank 0.

    If ``module.example_input_array`` is set, the forward pass runs once with it to find each layer's input and output
    sizes and floating-point operations. Random states, modes and running statistics are restored afterward.

    Args:
        max_depth: levels of nesting to show; -1 shows all, 0 prints nothing.
    """

    def __init__(self, max_depth: int = 1) -> None:
        _check_depth(max_depth, "ModelSummary")
        self._max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._max_depth == 0:
            return
        # On all ranks, because the forward pass of a sharded module communicates.
        self._hand_over(trainer, pl_module, Summary(pl_module, self._max_depth, _as_trained(trainer)))

    def _hand_over(self, trainer: Trainer, pl_module: TrainingModule, summary: Summary) -> None:
        """Call :meth:`summarize`; raise an error if its signature does not match."""
        try:
            inspect.signature(self.summarize).bind(trainer, pl_module, summary)
        except TypeError:
            raise TypeError(
                f"{type(self).__name__}.summarize{inspect.signature(self.summarize)} cannot be called with (trainer, "
                "pl_module, summary). Define it as summarize(self, trainer, pl_module, summary). The summary has the "
                "table's rows and the totals, such as summary.layers and summary.total_parameters."
            ) from None
        self.summarize(trainer, pl_module, summary)

    def summarize(self, trainer: Trainer, pl_module: TrainingModule, summary: Summary) -> None:
        """Print ``summary``. Called on every rank; override it to show the summary in another way."""
        if trainer.is_global_zero:
            messages.info(f"\n{summary}")


class RichModelSummary(ModelSummary):
    """Lightning's name for its colored summary. This class prints the same table as :class:`ModelSummary`."""


@dataclass
class Layer:
    """One row of a summary.

    Attributes:
        name: the layer's path in the module.
        type: the name of the layer's class.
        parameters: number of the layer's parameters, each counted once; uninitialized ones count as 0.
        lazy: whether some of the layer's parameters have no shape yet.
        training: whether the layer is in train mode; None in the row of the module's own parameters.
        in_size: shapes of the inputs, or "?".
        out_size: shapes of the outputs, or "?".
        flops: floating-point operations of a forward pass, or None.
    """

    name: str
    type: str
    parameters: int
    lazy: bool = False
    training: bool | None = None
    in_size: Any = UNKNOWN
    out_size: Any = UNKNOWN
    flops: int | None = None


class Summary:
    """Description of a module's layers; ``str()`` returns it as a table.

    Args:
        model: any module; if its ``example_input_array`` is not None, the forward pass runs once with that input.
        max_depth: levels of nesting to describe; -1 describes all, and 0 only counts parameters.
        run: function that runs the forward pass, called as ``run(model, example_input_array)``.

    Attributes:
        layers: the rows of the table.
        total_parameters: number of parameters, with shared ones counted once.
        trainable_parameters: number of parameters that require a gradient.
        parameter_bytes: memory of all parameters in their dtypes.
        modules_in_train_mode: number of modules, at any depth, in train mode.
        modules_in_eval_mode: number of modules, at any depth, in eval mode.
        has_lazy_parameters: whether some parameters have no shape yet, in which case the totals are too small.
        shares_parameters: whether rows share parameters, in which case the rows add up to more than the total.
        total_flops: floating-point operations of a forward pass with the example input, or None.
        has_sizes: whether the forward pass ran with the example input, in which case the sizes are known.
    """

    def __init__(
        self, model: nn.Module, max_depth: int = 1, run: Callable[[nn.Module, Any], None] | None = None
    ) -> None:
        _check_depth(max_depth, "summarize")
        named = list(model.named_modules())[1:]
        shown = {name: layer for name, layer in named if max_depth == -1 or name.count(".") < max_depth}
        rows = {name: _row(name, layer) for name, layer in shown.items()}
        self.layers = list(rows.values())
        loose = list(model.parameters(recurse=False))
        if loose and max_depth != 0:
            self.layers.append(Layer("other params", "n/a", _count(loose), any(map(is_lazy, loose))))
        parameters = list(model.parameters())
        self.total_parameters = _count(parameters)
        self.trainable_parameters = _count(p for p in parameters if p.requires_grad)
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in parameters if not is_lazy(p))
        self.has_lazy_parameters = any(map(is_lazy, parameters))
        self.shares_parameters = len(parameters) < sum(1 for _ in model.named_parameters(remove_duplicate=False))
        modes = [child.training for child in model.modules() if child is not model]
        self.modules_in_train_mode = sum(modes)
        self.modules_in_eval_mode = len(modes) - sum(modes)
        self.total_flops: int | None = None
        inputs = getattr(model, "example_input_array", None)
        if inputs is not None and not self.has_lazy_parameters:
            self.total_flops = _measure(model, inputs, run or _as_it_is, shown, rows)
        self.has_sizes = self.total_flops is not None

    @property
    def _of_modules(self) -> list[Layer]:
        """The rows of the table, except the one for the module's own parameters."""
        return [layer for layer in self.layers if layer.training is not None]

    @property
    def layer_names(self) -> list[str]:
        """Each layer's path in the module."""
        return [layer.name for layer in self._of_modules]

    @property
    def layer_types(self) -> list[str]:
        """Each layer's class."""
        return [layer.type for layer in self._of_modules]

    @property
    def param_nums(self) -> list[int]:
        """The number of parameters in each layer."""
        return [layer.parameters for layer in self._of_modules]

    @property
    def in_sizes(self) -> list[Any]:
        """The shapes of each layer's inputs; ``"?"`` where unknown."""
        return [layer.in_size for layer in self._of_modules]

    @property
    def out_sizes(self) -> list[Any]:
        """The shapes of each layer's outputs; ``"?"`` where unknown."""
        return [layer.out_size for layer in self._of_modules]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each layer is in train mode."""
        return [bool(layer.training) for layer in self._of_modules]

    @property
    def total_training_modes(self) -> dict[str, int]:
        """The number of modules, at any depth, in ``"train"`` and in ``"eval"`` mode."""
        return {"train": self.modules_in_train_mode, "eval": self.modules_in_eval_mode}

    @property
    def total_layer_params(self) -> int:
        """The sum of :attr:`param_nums`."""
        return sum(self.param_nums)

    @property
    def non_trainable_parameters(self) -> int:
        """The number of parameters that do not require a gradient."""
        return self.total_parameters - self.trainable_parameters

    @property
    def model_size(self) -> float:
        """The memory of all parameters in MB (10^6 bytes)."""
        return self.parameter_bytes / 1e6

    def __str__(self) -> str:
        return self.text(messages.columns())

    def text(self, width: int | None = None) -> str:
        """Return the table, at most ``width`` characters wide (60 or more; None means no limit).

        Long cells are wrapped between words. If that is not enough, columns are omitted and listed below the table.
        """
        return table(self._columns(), list(self._totals()), width)

    def _columns(self) -> list[list[str]]:
        layers = self.layers
        columns = [
            ["", *(str(number) for number in range(len(layers)))],
            ["Name", *(layer.name for layer in layers)],
            ["Type", *(layer.type for layer in layers)],
            ["Params", *(human_readable(layer.parameters) + (" + ?" if layer.lazy else "") for layer in layers)],
            ["Mode", *(_mode(layer.training) for layer in layers)],
        ]
        if self.has_sizes:
            columns += [
                ["FLOPs", *(UNKNOWN if layer.flops is None else human_readable(layer.flops) for layer in layers)],
                ["In sizes", *(str(layer.in_size) for layer in layers)],
                ["Out sizes", *(str(layer.out_size) for layer in layers)],
            ]
        return columns

    def _totals(self) -> Iterator[str]:
        yield f"{human_readable(self.trainable_parameters):<10}Trainable params"
        yield f"{human_readable(self.non_trainable_parameters):<10}Non-trainable params"
        yield f"{human_readable(self.total_parameters):<10}Total params"
        yield f"{self.model_size:<10,.3f}Size of the params (MB)"
        yield f"{self.modules_in_train_mode:<10}Modules in train mode"
        yield f"{self.modules_in_eval_mode:<10}Modules in eval mode"
        if self.total_flops is not None:
            yield f"{human_readable(self.total_flops):<10}FLOPs of a forward pass with example_input_array"
        if self.shares_parameters:
            yield "Some layers share parameters; the totals count each parameter once."
        if self.has_lazy_parameters:
            yield "Some parameters get their shape in the first forward pass; the totals do not include them."


def table(columns: list[list[str]], totals: list[str], width: int | None) -> str:
    """Format columns (each starts with its heading) as a table with ``totals`` below; see :meth:`Summary.text`."""
    left_out = ("Mode", "FLOPs", "In sizes", "Out sizes")
    rows, left_out = fitted(columns, width, ("Name", "In sizes", "Out sizes"), left_out, ("Name", "Type"), " | ")
    rule = "-" * max(len(line) for row in rows for line in row.splitlines())
    totals = [*totals, *([f"Left out for lack of room: {', '.join(left_out)}."] if left_out else [])]
    if width is not None:
        totals = [textwrap.fill(total, width, break_long_words=False) for total in totals]
    return "\n".join([rows[0], rule, *rows[1:], rule, *totals])


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Return a :class:`Summary` of a module's layers."""
    return Summary(module, max_depth)


def human_readable(number: int) -> str:
    """Format a number for reading: ``12345`` becomes ``"12.3 K"``."""
    if number < 1000:
        return str(number)
    value = number / 1000
    units = ["K", "M", "B", "T"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if value >= 99.95 else f"{value:.1f} {units[0]}"


def _check_depth(max_depth: Any, what: str) -> None:
    if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
        raise ValueError(
            f"{what}: max_depth={max_depth!r} must be a number of levels: 1 for the top level, n for n levels, "
            "-1 for all."
        )


def _mode(training: bool | None) -> str:
    return "n/a" if training is None else "train" if training else "eval"


def _as_it_is(module: nn.Module, inputs: Any) -> None:
    """Run the forward pass on the device of the module's first parameter."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    _call(module, pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs))


def _as_trained(trainer: Trainer) -> Callable[[nn.Module, Any], None]:
    """Return a function that runs the forward pass with the trainer's devices, dtypes and precision."""

    def run(module: nn.Module, inputs: Any) -> None:
        move = trainer.strategy.batch_mover()
        with trainer.strategy.precision.forward_context():
            _call(module, inputs if move is None else move(inputs))

    return run


def _call(module: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, tuple):
        module(*inputs)
    elif isinstance(inputs, Mapping):
        module(**inputs)
    else:
        module(inputs)


def _row(name: str, layer: nn.Module) -> Layer:
    parameters = list(layer.parameters())
    return Layer(name, type(layer).__name__, _count(parameters), any(map(is_lazy, parameters)), layer.training)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(0 if is_lazy(p) else p.numel() for p in parameters)


def _measure(
    module: nn.Module,
    inputs: Any,
    run: Callable[[nn.Module, Any], None],
    layers: Mapping[str, nn.Module],
    rows: Mapping[str, Layer],
) -> int | None:
    """Run the forward pass with the example input, record the sizes in the rows and return the number of operations.

    If the forward pass fails, warn and return None.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    handles = [
        handle
        for name, layer in layers.items()
        if not isinstance(layer, torch.jit.ScriptModule)
        for handle in _watch(layer, rows[name], counter.get_total_flops)
    ]
    try:
        with _untouched(module), torch.no_grad(), _plain_attention(), counter:
            run(module, inputs)
    except Exception as error:
        messages.warn(
            f"ModelSummary could not run {type(module).__name__}.forward with its example_input_array, so the table "
            f"has no sizes: {type(error).__name__}: {error}. Correct example_input_array (a tuple is passed as "
            "positional arguments, a dict as keyword arguments), or set it to None."
        )
        return None
    finally:
        for handle in handles:
            handle.remove()
    return counter.get_total_flops()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Context manager that disables the fused inference path of attention, whose FLOPs cannot be counted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _watch(layer: nn.Module, row: Layer, flops: Callable[[], int]) -> tuple[Any, Any]:
    """Record the sizes of the layer's first call and the operations of all its calls in ``row``."""
    row.flops = 0
    started: list[int] = []

    def before(layer: nn.Module, inputs: Any) -> None:
        started.append(flops())

    def after(layer: nn.Module, inputs: Any, output: Any) -> None:
        row.flops = (row.flops or 0) + flops() - started.pop()
        if row.in_size == UNKNOWN:
            row.in_size = _shape(inputs[0] if len(inputs) == 1 else inputs)
            row.out_size = _shape(output)

    return layer.register_forward_pre_hook(before), layer.register_forward_hook(after)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, Mapping):
        return {key: _shape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(item) for item in value]
    return UNKNOWN


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Context manager that puts a module in eval mode, and restores the modes and the RNG states on exit."""
    modes = {child: child.training for child in module.modules()}
    devices = {p.device for p in module.parameters() if kind_of(p.device).is_numbered and p.device.index is not None}
    # A compiled module must not be compiled for the example's shapes.
    eager = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
    kind = next((device.type for device in devices), "cuda")
    with eager, torch.random.fork_rng([device.index for device in devices], device_type=kind):
        module.eval()
        try:
            yield
        finally:
            for child, training in modes.items():
                child.training = training
