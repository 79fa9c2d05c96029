"""Findings about memory, cores and the interpreter."""

from __future__ import annotations

from ...loggers.messages import ranks as named_ranks
from .finding import Case, Finding, duration, faster, percent, there
from .of_data import cores_each

#: Shares of the time from which on something is worth a word.
COLLECTIONS = 0.05
#: Shares of a device's memory.
NEARLY_FULL = 0.92
FRAGMENTED = 0.25
HOST_LEFT = 0.05


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
        there(
            case,
            "Trainer(callbacks=[GarbageCollection()]), which freezes what is there and collects on all ranks at once, "
            "or a larger every_n_steps where it is at work.",
            "gc.freeze() when everything is set up; gc.collect() less often.",
        )
        + " Data in arrays instead of many small Python objects.",
        faster(share),
        share,
    )
