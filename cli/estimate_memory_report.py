"""Results of ``paceline estimate-memory``: sizes by dtype and strategy, what fits, and alternatives."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import messages
from ..big_model.module_sizes import size_in_bytes
from ..devices.kinds import kind_of, present
from ..estimate.memory_estimate import MemoryEstimate, estimate_strategies, largest_layer
from .estimate_memory_choices import DTYPES
from .estimate_memory_model import Source, resized

#: Fraction of a device's memory above which little room is left for memory that an estimate does not include.
TIGHT = 0.9
_MOST_PROCESSES = 1024


@dataclass(frozen=True)
class Loading:
    """Sizes for one dtype, in bytes.

    Attributes:
        dtype: name of the dtype, as in --dtypes.
        weights: size of all weights.
        largest_layer: size of the largest layer; a layer is never split between devices.
        inference: peak memory of a forward pass on one device; only the size of the weights if there is no batch.
        offloaded: peak memory of a forward pass if weights are offloaded and loaded layer by layer.
        training: peak memory of training on one device; None if a model cannot be trained in this dtype.
    """

    dtype: str
    weights: int
    largest_layer: int
    inference: int
    offloaded: int
    training: int | None


@dataclass(frozen=True)
class Training:
    """One estimate, and whether the training fits on the devices: ``"yes"``, ``"tight"`` or ``"no"``."""

    estimate: MemoryEstimate
    fits: str


@dataclass
class MemoryReport:
    """All results of a memory estimate.

    Attributes:
        source: the model.
        parameters: number of the model's parameters.
        largest_layer: name of the largest layer.
        memory: memory of one device, in bytes.
        memory_in_words: description of where ``memory`` comes from.
        loading: sizes by dtype.
        training: estimates by strategy and precision.
        verdict: sentences about what fits, and about alternatives.
        notes: assumptions behind the estimates.
    """

    source: Source
    parameters: int
    largest_layer: str
    memory: int
    memory_in_words: str
    loading: list[Loading] = field(default_factory=list)
    training: list[Training] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON, with sizes in bytes."""
        return {
            "model": self.source.what,
            "parameters": self.parameters,
            "largest_layer": self.largest_layer,
            "device_memory": self.memory,
            "loading": [asdict(row) for row in self.loading],
            "training": [{**row.estimate.as_dict(), "fits": row.fits} for row in self.training],
            "verdict": self.verdict,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Machine:
    """The machine to train on.

    Attributes:
        device: type of the device whose kernels the estimates use.
        memory: memory of one device, in bytes.
        shared: whether all processes share ``memory``, as they do on a CPU.
        origin: description of where ``memory`` comes from.
    """

    device: str
    memory: int
    shared: bool
    origin: str

    @classmethod
    def find(cls, asked: str | None) -> Machine:
        """Describe this machine or, if ``asked`` is given, a machine with ``asked`` bytes of memory per device."""
        device = present() if present().counts_memory() else kind_of("cpu")
        kind = device.name
        if asked is not None:
            text = asked if asked[-1:].upper() == "B" or asked.isdecimal() else f"{asked}B"
            size = size_in_bytes(int(text) if text.isdecimal() else text, "--device_memory")
            return cls(kind, size, False, f"devices of {messages.size(size)} each (--device_memory)")
        sizes = [size for index in range(device.count()) if (size := device.total_memory(index)) is not None]
        if sizes:
            return cls(kind, min(sizes), False, f"{len(sizes)} GPUs, the smallest with {messages.size(min(sizes))}")
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            kind,
            size,
            True,
            f"this machine has no GPU: {messages.size(size)} of its main memory, shared by all processes",
        )

    def fits(self, found: MemoryEstimate) -> str:
        """Return whether training fits on each device: ``"yes"``, ``"tight"`` or ``"no"``."""
        need = found.training + (found.host if self.shared else 0)
        have = self.memory // found.num_processes if self.shared else self.memory
        return "no" if need > have else "tight" if need > TIGHT * have else "yes"


def examine(source: Source, arguments: Namespace) -> MemoryReport:
    """Estimate the memory that a model needs with the command's arguments."""
    machine = Machine.find(arguments.device_memory)
    sizes = {name: size.bytes(32) for name, size in source.sizes.items()}
    layer, _ = largest_layer(sizes)
    parameters = sum(size[0] for size in source.sizes.values())
    report = MemoryReport(source, parameters, layer, machine.memory, machine.origin, notes=list(source.notes))
    trainings = Trainings(source, arguments, machine, report.notes)
    precisions = [DTYPES[dtype][0] for dtype in arguments.dtypes]
    rows = [row for precision in precisions if precision for row in trainings.of(precision)]
    report.training = [Training(row, machine.fits(row)) for row in rows]
    report.loading = [_loading(source, dtype, rows) for dtype in arguments.dtypes]
    report.verdict = list(MemoryVerdict(report, trainings, machine, arguments).sentences())
    if source.module is not None and machine.device == "cpu" and not machine.shared:
        report.notes.append("Estimated with CPU kernels, because this machine has no GPU.")
    if any(row.guessed for row in rows):
        report.notes.append(
            "The training step reads values from tensors. All values were assumed to be 1, so the result may differ if "
            "the step depends on these values."
        )
    return report


class Trainings:
    """Estimates training memory with the command's settings.

    If a training step cannot be run, the current estimate and all later ones leave out activations, and a note says
    why.
    """

    def __init__(self, source: Source, arguments: Namespace, machine: Machine, notes: list[str]) -> None:
        self.source, self.arguments, self.machine, self.notes = source, arguments, machine, notes
        self.batch = source.batch
        gpus = present().count()
        self.processes = arguments.num_processes or (gpus if gpus > 1 else 2)

    def of(self, precision: str, strategies: Any = None, **changed: Any) -> list[MemoryEstimate]:
        """Return an estimate for each strategy; ``changed`` overrides the command's arguments."""
        if self.source.module is None:
            return []
        batch_size = changed.pop("batch_size", None)
        settings = {
            "optimizer": self.arguments.optimizer,
            "loss": self.source.loss,
            "precision": precision,
            "num_processes": self.processes,
            "accumulate_grad_batches": self.arguments.accumulate_grad_batches,
            "activation_checkpointing": self.arguments.activation_checkpointing or None,
            "device": self.machine.device,
            **changed,
        }
        strategies = strategies or dict.fromkeys(("single_device", *self.arguments.strategy))
        batch = resized(self.batch, batch_size) if batch_size else self.batch
        try:
            return estimate_strategies(self.source.module, batch, strategies, **settings)
        except RuntimeError as error:
            if self.batch is None:
                raise
            self.notes.append(str(error))
            self.batch = None
            return estimate_strategies(self.source.module, None, strategies, **settings)


def _loading(source: Source, dtype: str, rows: list[MemoryEstimate]) -> Loading:
    precision, bits = DTYPES[dtype]
    weights = sum(size.bytes(bits) for size in source.sizes.values())
    largest = largest_layer({name: size.bytes(bits) for name, size in source.sizes.items()})[1]
    alone = {row.precision: row for row in rows if row.strategy == "single_device"}
    nearest = (
        alone.get(precision or "") or alone.get("bf16-true") or alone.get("16-true") or next(iter(alone.values()), None)
    )
    passing = 0 if nearest is None or nearest.inference is None else max(0, nearest.inference - nearest.weights)
    own = alone.get(precision or "")
    return Loading(dtype, weights, largest, weights + passing, largest + passing, own.training if own else None)


@dataclass
class MemoryVerdict:
    """Describes which ways of training fit in memory or, if none fits, which alternatives would."""

    report: MemoryReport
    trainings: Trainings
    machine: Machine
    arguments: Namespace

    def sentences(self) -> Iterator[str]:
        """Yield sentences about loading, then about training."""
        memory = self.report.memory
        yield from self._about_loading(memory)
        rows = self.report.training
        if not rows:
            return
        good = [row for row in rows if row.fits == "yes"]
        bad = [row for row in rows if row.fits == "no"]
        if bad:
            least = min(bad, key=lambda row: row.estimate.training).estimate
            yield f"These do not fit: {', '.join(_named(row.estimate) for row in bad[:6])}{' ...' if bad[6:] else ''}."
            if not good:
                yield f"None of the requested strategies fits with room to spare; {_named(least)} needs the least."
        if good:
            yield f"These fit: {', '.join(_named(row.estimate) for row in good[:6])}{' ...' if good[6:] else ''}."
            return
        found = [_named(one, how) for how, one in self._others() if self.machine.fits(one) == "yes"]
        yield (
            f"These would fit: {'; '.join(found)}."
            if found
            else "None of the alternatives that were tried fits either."
        )

    def _about_loading(self, memory: int) -> Iterator[str]:
        fits = [row for row in self.report.loading if row.inference <= memory]
        if len(fits) == len(self.report.loading):
            return
        too_large = [row.dtype for row in self.report.loading if row.inference > memory]
        smaller = [f"{row.dtype} ({messages.size(row.inference)})" for row in fits]
        offloaded = [
            f"{row.dtype} ({messages.size(row.offloaded)})" for row in self.report.loading if row.offloaded <= memory
        ]
        said = f"Loaded in {', '.join(too_large)}, the model does not fit on one device of {messages.size(memory)}."
        said += f" In {' or '.join(smaller)}, the model fits." if smaller else ""
        yield said + (
            f' With device_map="auto" (weights on other devices, in the host\'s memory or on disk), the model fits in '
            f"{' or '.join(offloaded)}."
            if offloaded
            else " The model's largest layer alone is too large for one device in any of these dtypes."
        )

    def _others(self) -> Iterator[tuple[str, MemoryEstimate]]:
        """Yield other ways to train, starting with those that change the least."""
        trained = [row.estimate for row in self.report.training]
        precision = "bf16-mixed"
        size = trained[0].batch_size
        if self.trainings.batch is not None:
            if "bf16-mixed" not in {one.precision for one in trained}:
                yield from (("", one) for one in self.trainings.of(precision))
            if size is not None and size > 1:
                yield from (("batch_size=1", one) for one in self.trainings.of(precision, batch_size=1))
            if not self.arguments.activation_checkpointing:
                try:
                    found = self.trainings.of(precision, activation_checkpointing=True)
                except ValueError:  # no repeated blocks
                    found = []
                yield from (("activation checkpointing", one) for one in found)
        if self.machine.shared:
            return
        for name in ("fsdp", "fsdp_cpu_offload"):
            (found,) = self.trainings.of(precision, [name])
            yield "", found
            processes = self._processes(found)
            if processes is not None:
                yield from (("", one) for one in self.trainings.of(precision, [name], num_processes=processes))

    def _processes(self, found: MemoryEstimate) -> int | None:
        """Return a number of processes with which sharded training fits, found by doubling; None if there is none."""
        divided = sum(found.training_at_peak[kind] for kind in ("weights", "gradients", "optimizer"))
        processes = found.num_processes
        while processes < _MOST_PROCESSES:
            processes *= 2
            if found.training - divided + divided * found.num_processes / processes <= TIGHT * self.machine.memory:
                return processes
        return None


def _named(found: MemoryEstimate, how: str = "") -> str:
    several = f" x{found.num_processes}" if found.num_processes > 1 else ""
    host = f" and {messages.size(found.host)} on the host" if found.host else ""
    how = f" with {how}" if how else ""
    return f"{found.strategy}{several} in {found.precision}{how} ({messages.size(found.training)}{host})"
