"""``self.log`` under a strategy that runs a step on micro-batches: one value per batch, the same on every rank.

The values of a batch's micro-batches are combined (means weighted by samples), sent from the rank that has them to all
other ranks, and logged there as if the step had run once on the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..data.batches import batch_size_of
from .metric_reductions import RecordOptions, Table, check_value, not_synced, reduction_of, taken

if TYPE_CHECKING:
    from .metrics import MetricStore


class Logged(NamedTuple):
    """How a name was logged in one batch: the arguments of ``self.log`` except the value."""

    name: str
    options: RecordOptions
    batch_size: int | None
    dtype: str
    metric: str | None


class JoiningStep:
    """Calls a step on micro-batches and collects the values that it logs."""

    def __init__(self, step: Callable[..., Any], name: str, module: nn.Module, store: MetricStore) -> None:
        self.step, self.module, self.store = step, module, store
        #: Whether every rank needs the step's output.
        self.returns = name == "predict_step"
        self._heard: dict[int, tuple[Any, Any, list[_Call]]] = {}

    def __call__(self, batch: Any, *more: Any) -> Any:
        """Run the step on a micro-batch; running it again on that micro-batch replaces the values logged before."""
        calls: list[_Call] = []
        self._heard[id(batch)] = (batch, None, calls)
        output = listened(self.store, lambda name, value, options: _Call(calls, name, options), self.step, batch, *more)
        if isinstance(output, Mapping) and output.get("num_items") is not None:
            self._heard[id(batch)] = (batch, output["num_items"], calls)  # means are taken over items
        return output

    def take(self) -> tuple[tuple[Logged, ...], list[Any]]:
        """Return how each name was logged, and its value combined over the batch's micro-batches; then reset."""
        heard, self._heard = list(self._heard.values()), {}
        found: dict[tuple[str, int], list[tuple[Any, _Call]]] = {}
        for batch, items, calls in heard:
            size = (batch_size_of(batch) or 1) if items is None else items
            times: dict[str, int] = {}
            for call in calls:
                times[call.name] = times.get(call.name, -1) + 1
                found.setdefault((call.name, times[call.name]), []).append((size, call))
        joined = [self._join(*zip(*entries, strict=True)) for entries in found.values()]
        return tuple(logged for logged, _ in joined), [value for _, value in joined]

    def _join(self, sizes: tuple[Any, ...], calls: tuple[_Call, ...]) -> tuple[Logged, Any]:
        first, given = calls[-1], [call.batch_size for call in calls]
        sized = [size for size in given if size is not None]
        batch_size = sum(sized) if len(sized) == len(calls) else None
        value, options = first.value, first.options._replace(enable_graph=False)
        if options.sync_dist_group is not None:
            raise ValueError(
                f"self.log({first.name!r}, sync_dist_group=...) does not work in a step that runs on micro-batches, "
                "because the values are first sent to all processes of the pipeline. Leave out sync_dist_group."
            )
        if isinstance(value, nn.Module):
            name = next((name for name, module in self.module.named_modules() if module is value), None)
            if name is None:
                raise ValueError(
                    f"self.log({first.name!r}) got {messages.a(value)} that is not part of the module, so the other "
                    "pipeline stages cannot find it. Assign it to an attribute of the module in __init__."
                )
            return Logged(first.name, options, batch_size, "float32", name), self._shown(value, options)
        values = [taken(call.name, call.value) for call in calls]
        reduction = reduction_of(first.name, options.reduce_fx)
        weights = [
            size if call.batch_size is None else call.batch_size for size, call in zip(sizes, calls, strict=True)
        ]
        joined = _reduced(values, weights, reduction)
        options = options._replace(reduce_fx=reduction)
        return Logged(first.name, options, batch_size, str(first.dtype).removeprefix("torch."), None), joined

    def _shown(self, metric: Any, options: RecordOptions) -> Any:
        """Return a metric object's step value, from the last micro-batch; 0 if step values are not logged."""
        on_step = self.store.moment.on_step if options.on_step is None else options.on_step
        if not on_step:
            return 0.0
        if metric._forward_cache is not None:
            return metric._forward_cache
        with not_synced(metric):
            return metric.compute()

    def put(self, logged: Sequence[Logged], values: Tensor) -> None:
        """Log the values from :meth:`take`, of shape (n,), on this rank."""
        self._heard = {}
        store = self.store
        numbers: Sequence[Any] = values.tolist() if values.is_cpu else values.unbind()
        for entry, value in zip(logged, numbers, strict=True):
            record = store.records.get(entry.name)
            what: Any = None
            if entry.metric is not None:
                what = self.module.get_submodule(entry.metric)
                what._forward_cache = torch.as_tensor(value)  # the batch's value, if step values are logged
            if record is None or record.resumed or record.options != entry.options:
                example = torch.zeros((), dtype=getattr(torch, entry.dtype)) if what is None else what
                record = store.define(entry.name, example, entry.options)
            record.update(value if what is None else what, entry.batch_size)


class Heard:
    """Receives one call to ``self.log``, in place of the record that the call would update."""

    def __init__(self, calls: list[Any], name: str, options: RecordOptions) -> None:
        self.calls, self.name, self.options = calls, name, options
        self.value: Any = None
        self.batch_size: int | None = None

    def update(self, value: Any, batch_size: int | None) -> None:
        """Keep the value and its batch size."""
        self.value, self.batch_size = value, batch_size
        self.calls.append(self)


class _Call(Heard):
    """A call to ``self.log`` whose value is checked and copied; ``dtype`` is the value's, or the step's default."""

    def update(self, value: Any, batch_size: int | None) -> None:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        self.dtype = value.dtype if floating else torch.get_default_dtype()
        if isinstance(value, (Tensor, float, int)):
            check_value(self.name, value)
            value = taken(self.name, value)
        super().update(value, batch_size)


def listened(
    store: MetricStore, listener: Callable[[str, Any, RecordOptions], Heard], function: Callable[..., Any], *args: Any
) -> Any:
    """Call ``function``, and use ``listener`` to create a replacement for the record of each name that it logs."""
    before, store.records = store.records, Table()  # empty, so that every self.log call requests its record
    store.listener = listener
    try:
        return function(*args)
    finally:
        store.records, store.listener = before, None


def _reduced(values: Sequence[Any], weights: Sequence[Any], reduction: str) -> Any:
    if len(values) == 1:
        return values[0]
    if reduction == "mean":
        total = sum(value * weight for value, weight in zip(values, weights, strict=True))
        return total / sum(weights)
    if reduction == "sum":
        return sum(values)
    kinds = [value.dtype if isinstance(value, Tensor) else torch.float64 for value in values]
    numbers = torch.stack([torch.as_tensor(v, dtype=kind) for v, kind in zip(values, kinds, strict=True)])
    return numbers.amin() if reduction == "min" else numbers.amax()
