"""The doctor in a script that ``paceline doctor`` runs: measures some steps, writes a report and exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from .. import messages
from ..callbacks.checkpoint_retention import CheckpointKeeper
from .doctor import Doctor
from .script_options import Plan, loader_change

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class PlannedDoctor(Doctor):
    """A Doctor that writes its report to the plan's file and exits the program after the fit."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(write=False)
        self.plan = plan

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["plan"])

    def connect(self, trainer: Trainer) -> None:
        """Make the run write its checkpoints to a folder where no other run will find them."""
        if trainer.state.fn != "fit":
            return
        keepers = [callback for callback in trainer.callbacks if isinstance(callback, CheckpointKeeper)]
        for number, keeper in enumerate(keepers):
            keeper.dirpath = str(Path(self.plan.out).parent / f"checkpoints{number}")

    def loader_to_prepare(self, loader: Any) -> Any:
        change = loader_change(self.plan.change)
        return changed(loader, **change) if change else loader

    def attach(self, trainer: Trainer) -> None:
        """Make the fit stop after the plan's number of batches, unless the fit ends earlier."""
        super().attach(trainer)
        if trainer.state.fn == "fit":
            steps = max(1, self.plan.steps // trainer.accumulate_grad_batches)
            if not trainer.training_module.automatic_optimization:
                steps = self.plan.steps * max(1, len(trainer.optimizers))  # all optimizers' steps count
            trainer.max_steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

    def describe(self) -> None:
        if self.report is None or not messages.is_rank_zero():
            return
        Path(self.plan.out).write_text(json.dumps(self.report.as_dict()), encoding="utf-8")

    def interrupted(self) -> None:
        """Do nothing, because a script that fails results in an error instead of a report."""

    def ended(self) -> None:
        """Exit the program after the fit."""
        raise SystemExit(0)


def changed(loader: Any, num_workers: int | None = None, pin_memory: bool | None = None, batch_factor: int = 1) -> Any:
    """Return a DataLoader for the same data with different settings.

    Raises:
        ValueError: if this kind of loader cannot be changed.
    """
    if type(loader) is not DataLoader:
        raise ValueError(
            f"The doctor cannot change the settings of a loader of type {type(loader).__name__}. Pass a plain "
            "DataLoader."
        )
    workers = loader.num_workers if num_workers is None else num_workers
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": loader.pin_memory if pin_memory is None else pin_memory,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        "multiprocessing_context": loader.multiprocessing_context if workers else None,
        "persistent_workers": workers > 0,
        "prefetch_factor": (loader.prefetch_factor or 2) if workers else None,
        "timeout": loader.timeout if workers else 0,
    }
    plain = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
    if batch_factor != 1 and not plain:
        raise ValueError(
            "This loader's batch_sampler determines the batch size, so the doctor cannot change it. To try other "
            "sizes, pass batch_size to the DataLoader instead of batch_sampler."
        )
    if plain:
        options |= {"batch_size": (loader.batch_size or 1) * batch_factor, "drop_last": loader.drop_last}
        options["sampler"] = loader.sampler
    elif loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return DataLoader(loader.dataset, **options)
