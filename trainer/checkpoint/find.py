"""Which file ``ckpt_path`` means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...loggers import messages
from .read import read

if TYPE_CHECKING:
    from ..trainer import Trainer


def find_checkpoint(trainer: Trainer, ckpt_path: Any, fn: str, reused: bool) -> Path | None:
    """The file for ``"best"``, ``"last"``, a path or None.

    Args:
        trainer: whose checkpoint callbacks know their files.
        ckpt_path: as given to the entry point.
        fn: the entry point.
        reused: the module is that of the run before; then None means its best checkpoint, if there is one.
    """
    if ckpt_path is None:
        best = _best(trainer) if reused and fn != "fit" else None
        if best is not None:
            messages.info(
                f"No module was passed to {fn}(): its best checkpoint is used. Pass the module to use it as it is."
            )
        return best
    if ckpt_path == "best":
        best = _best(trainer)
        if best is None:
            raise ValueError(
                f"Trainer.{fn}(ckpt_path='best'): no checkpoint has been saved as the best one. Train with a "
                "ModelCheckpoint "
                "(enable_checkpointing=True) first, or pass the path of a file."
            )
        return best
    if ckpt_path == "last":
        return _last(trainer, fn)
    return Path(ckpt_path)


def _best(trainer: Trainer) -> Path | None:
    return next((Path(c.best_model_path) for c in trainer.checkpoint_callbacks if c.best_model_path), None)


def _last(trainer: Trainer, fn: str) -> Path | None:
    """The newest valid checkpoint in the folders this run saves to; for a fit one that can be resumed from."""
    folders = set(_folders(trainer))
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.ckpt")]
    passed_over = []
    for file in sorted(files, key=lambda f: (f.stat().st_mtime_ns, f.name), reverse=True):
        try:
            found = read(file, map_location="meta")  # its bytes are checked, its tensors not loaded
        except Exception as error:  # a broken file is what is being looked for
            passed_over.append(f"{file} ({type(error).__name__})")
            continue
        if fn == "fit" and "optimizer_states" not in found:
            passed_over.append(f"{file} (weights only)")
            continue
        if passed_over:
            messages.warn(f"ckpt_path='last' passed over {', '.join(passed_over)} and takes {file}.")
        return file
    where = ", ".join(map(str, sorted(folders))) or "no folder"
    broken = f" Broken: {', '.join(passed_over)}." if passed_over else ""
    messages.warn(f"ckpt_path='last': there is no valid checkpoint in {where}; the run starts fresh.{broken}")
    return None


def _folders(trainer: Trainer) -> list[Path]:
    """Where the callbacks save; with the default folder, new for every run, those of the runs before too."""
    folders = [getattr(callback, "dirpath", "") for callback in trainer.callbacks]
    given = [Path(folder) for folder in folders if folder]
    if None not in folders:
        return given
    runs = trainer.loggers[0].run_dirs() if trainer.loggers else [trainer.default_root_dir]
    return given + [Path(folder, "checkpoints") for folder in runs]
