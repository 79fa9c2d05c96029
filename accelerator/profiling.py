"""``accelerator.profile``: torch's profiler around a part of the loop, one Chrome trace for each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .kwargs_handlers import ProfileKwargs

if TYPE_CHECKING:
    from torch.profiler import profile as Profiler

    from .accelerator import Accelerator


@contextmanager
def profile(accelerator: Accelerator, profile_handler: ProfileKwargs | None = None) -> Iterator[Profiler]:
    """Context that gives the running profiler; with a schedule call its ``step()`` after each batch.

    With ``output_trace_dir`` every process writes ``profile_<rank>.json`` there, and all wait for each other.
    Where a schedule repeats, the traces after the first are ``profile_<rank>_1.json``, ``profile_<rank>_2.json``, ...

    Args:
        accelerator: whose processes they are.
        profile_handler: what to record; None: as the Accelerator's ``kwargs_handlers`` say.
    """
    handler = profile_handler or accelerator.handlers.profile or ProfileKwargs()
    profiler = handler.build()
    if handler.output_trace_dir is not None:
        _write_traces(profiler, Path(handler.output_trace_dir), accelerator.process_index)
    with profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        accelerator.wait_for_everyone()


def _write_traces(profiler: Profiler, folder: Path, rank: int) -> None:
    """Let the profiler write each trace before its own ``on_trace_ready`` is called."""
    folder.mkdir(parents=True, exist_ok=True)
    then, written = profiler.on_trace_ready, 0

    def write(ready: Profiler) -> None:
        nonlocal written
        ready.export_chrome_trace(str(folder / f"profile_{rank}{f'_{written}' if written else ''}.json"))
        written += 1
        if then is not None:
            then(ready)

    profiler.on_trace_ready = write
