"""What can be wrong with the speed of a run. Each finding is a function of the facts alone: a Finding, or None.

A finding says what is slow, why, how much of the time that is, what to change, and what the change should bring. What
it should bring is worked out of the measured times; ``paceline doctor --try`` tries it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ...loggers.messages import ranks as named_ranks
from .facts import Facts

#: Shares of the time from which on something is worth a word.
DATA = 0.20
COPIES = 0.05
COMMUNICATION = 0.20
STRAGGLING = 0.15
EVALUATION = 0.30
CHECKPOINT = 0.15
CALLBACKS = 0.15
COLLECTIONS = 0.05
COMPILING = 0.20
#: Seconds an operator takes on average (forward, backward and update) below which calling it costs more than its work.
SMALL_OPERATOR = 15e-6
#: Samples of a batch above which it is not called small.
SMALL_BATCH = 256
#: Recompilations of one function from which on shapes are said to change.
RECOMPILATIONS = 3
#: Shares of a device's memory.
NEARLY_FULL = 0.92
FRAGMENTED = 0.25
HOST_LEFT = 0.05


@dataclass(frozen=True)
class Finding:
    """One thing that is slow.

    Args:
        key: its name, for programs.
        what: what is slow, with the number.
        why: why.
        change: what to change.
        gain: what that should bring, in words.
        share: of the time, which the findings are sorted by.
        is_note: costs nothing in this run, but would elsewhere.
    """

    key: str
    what: str
    why: str
    change: str
    gain: str
    share: float = 0.0
    is_note: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


Case = Sequence[Facts]


def percent(share: float) -> str:
    """``0.384`` -> ``"38 %"``."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _faster(share: float) -> str:
    return (
        f"Without it a step would take {percent(1 - share)} of its time: {1 / max(1 - share, 0.01):.1f} times as fast."
    )


def _mean(case: Case, *parts: str) -> float:
    return sum(facts.share(*parts) for facts in case) / len(case)


def _of_run(case: Case, part: str) -> float:
    facts = case[0]
    return facts.run_parts.get(part, 0.0) / facts.run_seconds if facts.run_seconds else 0.0


# ---- data ------------------------------------------------------------------------------------------------------------


def _waits_for_data(case: Case) -> Facts | None:
    """The process that waits longest for data, if that is long."""
    worst = max(case, key=lambda facts: facts.share("data"))
    return worst if worst.share("data") >= DATA else None


def _fetch_and_rest(facts: Facts) -> tuple[float, float]:
    """Seconds that loading a batch takes a worker (or this process), and a step without waiting."""
    wait = facts.parts.get("data", 0.0) / max(facts.steps, 1)
    rest = facts.step - wait
    workers = facts.loader.get("num_workers", 0)
    return (facts.step * workers if workers else wait), max(rest, 1e-9)


def wanted_workers(facts: Facts) -> int:
    """Workers a process needs so that a batch is there when the step before is done."""
    fetch, rest = _fetch_and_rest(facts)
    return max(1, math.ceil(fetch / rest * 1.1))


def cores_each(facts: Facts) -> int:
    """Cores for each process of a machine."""
    return max(1, facts.cores // facts.local_world_size)


def data_bound(case: Case) -> Finding | None:
    """The step waits for data, and more workers are not enough."""
    facts = _waits_for_data(case)
    if facts is None:
        return None
    workers = facts.loader.get("num_workers")
    wanted, cores, more = wanted_workers(facts), cores_each(facts), ""
    if workers is not None and workers < cores and wanted <= cores:
        return None  # too_few_workers
    share, (fetch, rest) = facts.share("data"), _fetch_and_rest(facts)
    where = f" on rank {facts.rank}" if len(case) > 1 else ""
    if workers is None:
        change = (
            f"The batches come from a {facts.loader.get('kind', 'loader')}, which loads in the training process. Give "
            "a DataLoader with num_workers, or prepare the batches before."
        )
    else:
        more = f"num_workers={cores}, then " if workers < cores and cores > 1 else ""
        change = (
            f"Use {more}a cheaper data set: store it decoded and resized, keep it in memory if it fits, move "
            f"augmentation to the device. A batch should take at most {duration(rest * cores)} of one worker."
        )
    return Finding(
        "data_bound",
        f"Waiting for data takes {percent(share)} of each step{where} ({duration(share * facts.step)}).",
        f"Loading a batch takes about {duration(fetch)}, the rest of the step {duration(rest)}; that would need "
        f"{wanted} workers, and there {'is' if cores == 1 else 'are'} {cores} core{'' if cores == 1 else 's'} for "
        "each process.",
        change,
        (
            f"Up to {cores / max(workers, 1):.3g} times as fast with the workers. "
            if workers is not None and more
            else ""
        )
        + _faster(share),
        share,
    )


def too_few_workers(case: Case) -> Finding | None:
    """The step waits for data, and a few more workers would do."""
    facts = _waits_for_data(case)
    if facts is None or facts.loader.get("num_workers") is None:
        return None
    workers, wanted, cores = facts.loader["num_workers"], wanted_workers(facts), cores_each(facts)
    if workers >= cores or wanted > cores:
        return None
    wanted = max(wanted, workers + 1)
    share, (fetch, rest) = facts.share("data"), _fetch_and_rest(facts)
    return Finding(
        "too_few_workers",
        f"Waiting for data takes {percent(share)} of each step ({duration(share * facts.step)}) with "
        f"num_workers={workers}.",
        f"Loading a batch takes about {duration(fetch)}, the rest of the step {duration(rest)}.",
        f"DataLoader(num_workers={wanted}, persistent_workers=True): there are {cores} cores for each process.",
        _faster(share),
        share,
    )


def too_many_workers(case: Case) -> Finding | None:
    """More workers than cores."""
    facts = case[0]
    workers, cores = facts.loader.get("num_workers") or 0, cores_each(facts)
    if workers <= cores or workers < 2:
        return None
    wanted = min(wanted_workers(facts), cores) if facts.share("data") >= DATA else max(1, min(workers, cores) // 2)
    return Finding(
        "too_many_workers",
        f"num_workers={workers}, but there {'is' if cores == 1 else 'are'} {cores} core{'' if cores == 1 else 's'} for "
        "each process.",
        "Workers take the cores from each other and from the training process; each also holds memory, prefetched "
        "batches, and takes a moment to start.",
        f"DataLoader(num_workers={wanted}).",
        "An earlier first step, less memory, and as much throughput or a little more.",
        share=facts.share("data") / 2,
    )


def pageable_copies(case: Case) -> Finding | None:
    """Batches are copied to a GPU from memory that is not pinned."""
    facts = case[0]
    share = max(facts.share("copy") for facts in case)
    if facts.device != "cuda" or facts.loader.get("pin_memory") is not False or share < COPIES:
        return None
    return Finding(
        "pageable_copies",
        f"Bringing batches to the GPU takes {percent(share)} of each step ({duration(share * facts.step)}).",
        "The loader gives pageable memory, which the training process itself must pin before each copy.",
        "DataLoader(pin_memory=True): a thread pins the next batch meanwhile.",
        _faster(share),
        share,
    )


# ---- the device ------------------------------------------------------------------------------------------------------


def host_syncs(case: Case) -> Finding | None:
    """Lines in a step at which the host waits for the device."""
    facts = case[0]
    lines = [line for line in facts.lines if line["times"] >= 1]
    if not lines:
        return None
    first = lines[0]
    listed = "; ".join(
        f"{os.path.basename(line['file'])}:{line['number']} {line['text']!r}"
        + (f" ({line['times']} times)" if line["times"] > 1 else "")
        for line in lines[:3]
    )
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    on_gpu = facts.device == "cuda"
    return Finding(
        "host_syncs",
        f"{len(lines)} line{'s' if len(lines) > 1 else ''} of the step make{'' if len(lines) > 1 else 's'} the host "
        f"wait for the {'GPU' if on_gpu else 'device'}: {listed}{more}.",
        f"The first one {first['what']}. Until the device has caught up nothing new is queued; it then stands idle."
        + ("" if on_gpu else " On the CPU, as here, that costs nothing."),
        "Keep values as tensors: self.log(name, tensor) reads them later, all together; torch.where instead of if.",
        "The device gets its work early again." if on_gpu else "Nothing here; it does on a GPU.",
        share=0.1 if on_gpu else 0.0,
        is_note=not on_gpu,
    )


def batch_too_small(case: Case) -> Finding | None:
    """Calling operators costs more than what they do."""
    facts = case[0]
    small = facts.batch_size is not None and facts.batch_size <= SMALL_BATCH
    if not facts.operators or not small or not facts.steps:
        return None
    share = facts.share("forward", "backward", "optimizer")
    each = facts.quick_step * share / facts.operators
    if each >= SMALL_OPERATOR or share < 0.3:
        return None
    return Finding(
        "batch_too_small",
        f"A step calls {facts.operators} operators that take {duration(each)} each, on a batch of {facts.batch_size}.",
        "Calling one costs some 5 us before anything is computed: batch or model are too small for the device.",
        f"A larger batch (try {(facts.batch_size or 1) * 4}, with the learning rate to match), fewer and fused "
        "operations, or Trainer(compile=True).",
        "Up to a size at which operators take some 50 us, a larger batch takes hardly longer: up to "
        f"{min(16.0, max(1.5, 4 * SMALL_OPERATOR / each)):.0f} times the samples a second.",
        share * 0.5,
    )


def recompiles(case: Case) -> Finding | None:
    """torch.compile compiles the same function again and again."""
    facts = case[0]
    often = [one for one in facts.recompilations if one["times"] >= RECOMPILATIONS]
    share = facts.share("compile")
    if not often and share < COMPILING:
        return None
    spent = facts.run_parts.get("compile", 0.0)
    if not often:
        return Finding(
            "recompiles",
            f"Compiling takes {percent(share)} of the time also after the first steps.",
            "torch.compile makes graphs while the training runs.",
            "Compile once before the training, or see what is compiled with TORCH_LOGS=recompiles.",
            _faster(share),
            share,
        )
    first = often[0]
    return Finding(
        "recompiles",
        f"torch.compile compiled {first['function']} {first['times'] + 1} times ({duration(spent)} for all compiling).",
        f"The last reason: {first['reason'] or 'torch does not say'}.",
        "Bring batches to few shapes (drop_last=True, padding, buckets), or compile for shapes that change "
        "(Trainer(compile={'dynamic': True})).",
        _faster(share)
        if share > 0.01
        else "No more stalls; after 8 recompilations torch gives up and runs uncompiled.",
        max(share, _of_run(case, "compile"), 0.05),
    )


def memory_nearly_full(case: Case) -> Finding | None:
    """Little memory is left, on a GPU or on the host."""
    for facts in case:
        memory = facts.memory
        total, peak = memory.get("total", 0.0), memory.get("peak_allocated", 0.0)
        if total and peak / total >= NEARLY_FULL:
            return Finding(
                "memory_nearly_full",
                f"Tensors fill {percent(peak / total)} of the GPU's {total / 2**30:.0f} GiB on rank {facts.rank}.",
                "The next longer batch ends the run; before that, torch frees and allocates again, and waits for it.",
                "A smaller batch with accumulate_grad_batches, precision='bf16-mixed', activation checkpointing, FSDP.",
                "A run that does not end by chance.",
                0.05,
            )
        host, left = memory.get("host_total", 0.0), memory.get("host_available", 0.0)
        if host and left / host < HOST_LEFT:
            return Finding(
                "memory_nearly_full",
                f"Only {left / 2**30:.1f} of the host's {host / 2**30:.0f} GiB are free.",
                "Memory that is swapped out, or a process that the system kills, stops a run.",
                "Fewer workers or a smaller prefetch_factor; data that are mapped instead of loaded.",
                "A run that does not end by chance.",
                0.05,
            )
    return None


def fragmentation(case: Case) -> Finding | None:
    """Much of the memory that torch holds lies between tensors, and it had to look for space."""
    for facts in case:
        memory = facts.memory
        total, retries = memory.get("total", 0.0), memory.get("retries", 0.0)
        idle = memory.get("peak_reserved", 0.0) - memory.get("peak_allocated", 0.0)
        if total and retries and idle / total >= FRAGMENTED:
            return Finding(
                "fragmentation",
                f"{percent(idle / total)} of the GPU's memory lies unused between tensors on rank {facts.rank}.",
                f"torch had to give memory back and ask anew {retries:.0f} times, waiting for the GPU each time: sizes "
                "change from step to step.",
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and batches of few different shapes.",
                "No more waiting for memory, and room for a larger batch.",
                0.05,
            )
    return None


# ---- several processes -----------------------------------------------------------------------------------------------


def _own(facts: Facts) -> float:
    """Seconds a step in which a process does something itself."""
    return facts.step * (1 - facts.share("communication"))


def _on_the_way(case: Case) -> float:
    """Seconds a step that all ranks wait for gradients: what the last one to come waits is no waiting for another."""
    return min(facts.step * facts.share("communication") for facts in case)


def model_too_small(case: Case) -> Finding | None:
    """One process alone would be faster."""
    n = case[0].world_size
    wait, compute = _on_the_way(case), max(facts.compute for facts in case)
    if n < 2 or not compute or wait <= (n - 1) * compute:
        return None
    alone, together = n * compute, compute + wait
    return Finding(
        "model_too_small",
        f"{n} processes are slower than one: gradients take {duration(wait)} a step, computing {duration(compute)}.",
        f"One process would compute all {n} shares of a batch in at most {duration(alone)}; together they take "
        f"{duration(together)}.",
        "Trainer(devices=1) with the whole batch; several processes pay when a step computes longer than it talks.",
        f"At least {together / alone:.1f} times as fast (paceline doctor --try measures it).",
        wait / max(together, 1e-12),
    )


def communication_bound(case: Case) -> Finding | None:
    """Gradients take longer than backward hides."""
    facts = case[0]
    wait = _on_the_way(case)
    share = wait / facts.step if facts.step else 0.0
    if facts.world_size < 2 or share < COMMUNICATION or model_too_small(case):
        return None
    size = facts.parameter_bytes / 1e6
    half = " DDPStrategy(ddp_comm_hook='bf16') halves the bytes;" if facts.device == "cuda" else ""
    return Finding(
        "communication_bound",
        f"Waiting for gradients takes {percent(share)} of each step ({duration(wait)}), on every rank.",
        f"{size:.3g} MB of gradients go between {facts.world_size} processes, and backward hides only a part of it.",
        f"accumulate_grad_batches=4 communicates a quarter as often;{half} a larger batch computes longer for the same "
        "bytes.",
        f"With accumulate_grad_batches=4 about {1 / (1 - share * 0.75):.1f} times as fast.",
        share,
    )


def stragglers(case: Case) -> Finding | None:
    """One process is slower than the others, who wait for it."""
    if len(case) < 2:
        return None
    slowest = max(case, key=_own)
    others = [facts for facts in case if facts is not slowest]
    typical = median(_own(facts) for facts in others)
    lost = _own(slowest) - typical
    share = lost / slowest.step if slowest.step else 0.0
    if share < STRAGGLING:
        return None
    late = {
        name: slowest.parts.get(name, 0.0) / max(slowest.steps, 1)
        - median(facts.parts.get(name, 0.0) / max(facts.steps, 1) for facts in others)
        for name in slowest.parts
        if name != "communication"
    }
    part = max(late, key=lambda name: late[name])
    waiting = named_ranks(facts.rank for facts in others)
    return Finding(
        "stragglers",
        f"Rank {slowest.rank} takes {duration(lost)} a step longer than the others: {waiting} "
        f"wait{'s' if len(others) == 1 else ''} {percent(share)} of the time.",
        f"It is later in {part} by {duration(late[part])} a step.",
        "Look at what differs there: longer samples (sort or bucket them), other programs on its cores or GPU, a GPU "
        "that runs hot, a slower disk.",
        _faster(share),
        share,
    )


# ---- what stands around the step -------------------------------------------------------------------------------------


def evaluation_share(case: Case) -> Finding | None:
    """Much of the time goes into validation."""
    share = _of_run(case, "evaluation")
    if share < EVALUATION:
        return None
    return Finding(
        "evaluation_share",
        f"Validation takes {percent(share)} of the run.",
        "It runs too often, or over more batches than the figure needs.",
        "check_val_every_n_epoch=, val_check_interval=, limit_val_batches=; larger batches there: it has no gradients.",
        f"Validating a quarter as often: {1 / (1 - 0.75 * share):.1f} times as fast.",
        share * 0.75,
    )


def checkpoint_share(case: Case) -> Finding | None:
    """Training stands still while checkpoints are written."""
    share = _of_run(case, "checkpoint")
    if share < CHECKPOINT:
        return None
    return Finding(
        "checkpoint_share",
        f"Saving checkpoints stops the training for {percent(share)} of the run.",
        "They are large for how often they are written, or the disk is slow.",
        "ModelCheckpoint(every_n_train_steps=...) less often; background=True writes while the training goes on.",
        f"{1 / (1 - share):.1f} times as fast if they are written in the background.",
        share,
    )


def logging_share(case: Case) -> Finding | None:
    """Callbacks, hooks or loggers take much of each step."""
    callbacks, logging = _mean(case, "callbacks"), _mean(case, "logging")
    share = callbacks + logging
    if share < CALLBACKS:
        return None
    most = "hooks of callbacks and of the module" if callbacks >= logging else "sending values to the loggers"
    advice = (
        "Trainer(profiler='simple') lists each hook. Do such work every n steps, or at the end of an epoch."
        if callbacks >= logging
        else "Trainer(log_every_n_steps=...) less often, fewer values, or a logger that writes in the background."
    )
    return Finding(
        "logging_share",
        f"Callbacks and logging take {percent(share)} of each step.",
        f"Most of it goes into {most}.",
        advice,
        _faster(share),
        share,
    )


# ---- the machine -----------------------------------------------------------------------------------------------------


def oversubscribed_threads(case: Case) -> Finding | None:
    """More computing threads than cores."""
    facts = case[0]
    wanted = facts.threads * facts.local_world_size
    if wanted <= facts.cores * 1.5:
        return None
    each = cores_each(facts)
    return Finding(
        "oversubscribed_threads",
        f"{wanted} threads compute on {facts.cores} core{'' if facts.cores == 1 else 's'} "
        f"({facts.local_world_size} process{'' if facts.local_world_size == 1 else 'es'} of {facts.threads}).",
        "They take the cores from each other in the middle of their work, and wait for each other at its end.",
        f"OMP_NUM_THREADS={each}, or torch.set_num_threads({each}).",
        "Often 1.5 to 3 times as fast on the CPU.",
        0.3 if facts.device == "cpu" else 0.1,
    )


def numa_distance(case: Case) -> Finding | None:
    """A process may run on cores that are far from its GPU."""
    far = [facts for facts in case if facts.numa.get("nodes", 1) > 1 and facts.numa["near"] < facts.numa["cores"]]
    if not far:
        return None
    facts = far[0]
    return Finding(
        "numa_distance",
        f"{named_ranks(one.rank for one in far).capitalize()} may run on cores of {facts.numa['nodes']} memory nodes, "
        f"the GPU hangs at node {facts.numa['device_node']}.",
        "Batches that are made on another node cross the machine on their way to the GPU, and launches take longer.",
        "paceline launch --enable_cpu_affinity, DDPStrategy(numa=True), or numactl --cpunodebind.",
        "A few per cent, more where much data is copied.",
        0.03,
    )


def collection_pauses(case: Case) -> Finding | None:
    """Python's garbage collector takes a share of the time."""
    worst = max(case, key=lambda facts: facts.collection_seconds / (facts.total or 1.0))
    share = worst.collection_seconds / worst.total if worst.total else 0.0
    if share < COLLECTIONS:
        return None
    return Finding(
        "collection_pauses",
        f"Python's garbage collector takes {percent(share)} of the time on rank {worst.rank} ({worst.collections} "
        f"runs, {duration(worst.collection_seconds / max(worst.collections, 1))} each).",
        "It walks over all objects of the program, or is called by hand (gc.collect()) in the step.",
        "gc.freeze() when everything is set up, gc.disable() and a gc.collect() every thousand steps on all ranks; "
        "data in arrays instead of many small Python objects.",
        _faster(share),
        share,
    )


#: All of them, in the order in which they stand above; a report sorts them by their share.
FINDINGS: tuple[Callable[[Case], Finding | None], ...] = (
    data_bound,
    too_few_workers,
    too_many_workers,
    pageable_copies,
    host_syncs,
    batch_too_small,
    recompiles,
    memory_nearly_full,
    fragmentation,
    model_too_small,
    communication_bound,
    stragglers,
    evaluation_share,
    checkpoint_share,
    logging_share,
    oversubscribed_threads,
    numa_distance,
    collection_pauses,
)


def examine(case: Case) -> list[Finding]:
    """Everything that is wrong, the largest share first, notes last."""
    if not case or not all(facts.steps for facts in case):
        return []
    found = [finding for look in FINDINGS if (finding := look(case)) is not None]
    return sorted(found, key=lambda finding: (finding.is_note, -finding.share))
