"""Findings about the work in a step and between steps."""

from __future__ import annotations

import os

from ..strategies.base import SingleDevice
from .finding import Case, Finding, duration, faster, hooks, listed, percent, there

#: Fractions of the time above which a finding is reported.
EVALUATION = 0.30
CHECKPOINT = 0.15
CALLBACKS = 0.15
COMPILING = 0.20
#: Average seconds per operator (forward, backward, update) below which the call costs more than its computation.
SMALL_OPERATOR = 15e-6
#: Largest number of samples in a small batch.
SMALL_BATCH = 256
#: Recompilations of one function above which a finding is reported.
RECOMPILATIONS = 3


def _mean(case: Case, *parts: str) -> float:
    return sum(facts.share(*parts) for facts in case) / len(case)


def _of_loop(case: Case, part: str) -> float:
    """Return the fraction of host time that a part took. Device times would leave out gaps between steps."""
    facts = case[0]
    return facts.seconds.get(part, 0.0) / facts.total if facts.total else 0.0


def host_syncs(case: Case) -> Finding | None:
    """Report lines in a step that make the host wait for the device."""
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
        f"The first line {first['what']}. The host queues no new work until the device has caught up, "
        "so the device is then idle." + ("" if on_gpu else " On a CPU, this costs nothing."),
        there(
            case,
            "Keep values as tensors: self.log(name, tensor) reads them later, all at once.",
            "Keep values as tensors, and read them every n steps, all at once.",
        )
        + " Use torch.where instead of if.",
        "The host can queue work ahead again." if on_gpu else "None on a CPU. On a GPU, the host can queue work ahead.",
        share=0.1 if on_gpu else 0.0,
        is_note=not on_gpu,
    )


def _compiling(case: Case) -> str:
    """Return advice on how to compile, with a warning if compiling could make a small network slower."""
    if not case[0].own_loop and case[0].strategy == SingleDevice.__name__:
        return "Trainer(compile='step'), which takes about 30 s to compile the whole step into one graph."
    asked = there(case, "Trainer(compile=True)", "Accelerator(dynamo_backend='inductor')")
    return f"{asked}, but measure the effect, because small networks can become slower."


def batch_too_small(case: Case) -> Finding | None:
    """Report operators whose calls cost more than their computation."""
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
        f"A step calls {facts.operators} operators, which take {duration(each)} each, on a batch of "
        f"{facts.batch_size} samples.",
        "Calling an operator costs about 5 us before anything is computed, so the batch or the model is too small for "
        "the device.",
        f"Use a larger batch (try {(facts.batch_size or 1) * 4}, with an adjusted learning rate), fewer or fused "
        f"operations, or {_compiling(case)}",
        "A larger batch hardly takes longer until an operator takes about 50 us, which allows up to "
        f"{min(16.0, max(1.5, 4 * SMALL_OPERATOR / each)):.0f} times the samples per second.",
        share * 0.5,
    )


def recompiles(case: Case) -> Finding | None:
    """Report that torch.compile compiles the same function repeatedly."""
    facts = case[0]
    often = [one for one in facts.recompilations if one["times"] >= RECOMPILATIONS]
    share = facts.share("compile")
    if not often and share < COMPILING:
        return None
    spent = facts.run_parts.get("compile", 0.0)
    if not often:
        return Finding(
            "recompiles",
            f"Compilation takes {percent(share)} of the time even after the first steps.",
            "torch.compile is still compiling new graphs during training.",
            "Call torch.compile once, before training. To see what is recompiled and why, set TORCH_LOGS=recompiles.",
            faster(share, "compiling"),
            share,
        )
    first = often[0]
    return Finding(
        "recompiles",
        f"torch.compile compiled {first['function']} {first['times'] + 1} times (compiling took {duration(spent)} in "
        "total).",
        f"The reason given last is: {first['reason']}." if first["reason"] else "Torch gives no reason.",
        "Use fewer batch shapes (drop_last=True, padding, buckets), or compile for dynamic shapes ("
        + there(case, "Trainer(compile={'dynamic': True})", "TorchDynamoPlugin(dynamic=True)")
        + ").",
        faster(share, "compiling")
        if share > 0.01
        else "Training no longer stalls. After 8 recompilations, torch gives up and runs the function uncompiled.",
        max(share, _of_loop(case, "compile"), 0.05),
    )


def evaluation_share(case: Case) -> Finding | None:
    """Report that validation takes a large part of the time."""
    share = _of_loop(case, "evaluation")
    if share < EVALUATION:
        return None
    return Finding(
        "evaluation_share",
        f"Validation takes {percent(share)} of the time.",
        "Validation runs too often, or over more batches than a reliable result needs.",
        there(
            case,
            "Set check_val_every_n_epoch, val_check_interval or limit_val_batches, or use larger validation batches, "
            "because validation needs no memory for gradients.",
            "Evaluate less often or over fewer batches, or use larger batches, because evaluation needs no memory for "
            "gradients.",
        ),
        f"With a quarter of the validations, training would be {1 / (1 - 0.75 * share):.1f} times as fast.",
        share * 0.75,
    )


def checkpoint_share(case: Case) -> Finding | None:
    """Report that training pauses while checkpoints are written."""
    share = _of_loop(case, "checkpoint")
    if share < CHECKPOINT or case[0].often.get("checkpoint", 0) < 2:
        return None  # one save at the end of a short run says nothing about a long run
    return Finding(
        "checkpoint_share",
        f"Saving checkpoints pauses training for {percent(share)} of the time.",
        "The checkpoints are too large to be written so often, or the disk is slow.",
        there(
            case,
            "Save less often with ModelCheckpoint(every_n_train_steps=...), or set async_save=True to write while "
            "training continues.",
            "Save less often, or to a faster disk.",
        ),
        there(
            case,
            f"With checkpoints written in the background, training is {1 / (1 - share):.1f} times as fast.",
            f"With a quarter of the saves, training is {1 / (1 - 0.75 * share):.1f} times as fast.",
        ),
        share,
    )


def logging_share(case: Case) -> Finding | None:
    """Report callbacks, hooks or loggers that take a large part of each step."""
    callbacks, logging = _mean(case, "callbacks"), _mean(case, "logging")
    share = callbacks + logging
    if share < CALLBACKS:
        return None
    first = ""
    if callbacks >= logging:
        named = hooks(max(case, key=lambda facts: facts.share("callbacks")))
        first = next((name for name, one in named.items() if one >= share / 2), "")
        why = (
            f"The time is spent in these hooks: {listed(named)}."
            if named
            else "The time is spent in hooks of callbacks and of the module."
        )
        change = "Do this work every n steps or at the end of an epoch"
        change += ", and raise refresh_rate of the progress bar." if "ProgressBar." in first else "."
        change += there(case, " Trainer(profiler='simple') lists all hooks.", "")
    else:
        why = "The time is spent on sending values to the loggers."
        change = there(case, "Raise Trainer(log_every_n_steps=...)", "Call accelerator.log every n steps")
        change += ", log fewer values, or use a logger that writes in the background."
    what = f"Callbacks and logging take {percent(share)} of each step{f', most of it {first}' if first else ''}."
    return Finding("logging_share", what, why, change, faster(share, "callbacks and logging"), share)


FINDINGS = (host_syncs, batch_too_small, recompiles, evaluation_share, checkpoint_share, logging_share)
