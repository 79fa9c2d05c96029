"""``Tuner``: find a learning rate and a batch size for a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from ..checkpoint.restore import PARTS
from ..processes.launch import told_if_stopped_early
from ..processes.process_group import leave
from ..processes.seed import random_states, set_random_states
from ..trainer.arguments import Request
from ..trainer.run import Run
from ..trainer.start_run import find_module
from ..trainer.trainer import Trainer
from .attribute_lookup import lr_places
from .batch_size import BatchTrial, SizeSearch, SizeSearchResult, plan, stage_of
from .lr_range_test import LRFinder, RangeTest
from .trial import Method
from .trial_run import run_separately, show
from .trials_in_run import SizePlaces, effective_now, is_dry, load_with_size, planned, take_lr, take_size

if TYPE_CHECKING:
    from ..data.datamodule import DataModule
    from ..trainer.module import TrainingModule


class Tuner:
    """Finds a learning rate or a batch size before a fit, by running training steps on the module itself.

    Everything but the result is restored afterward (weights, buffers, RNG states, the position in the data, plain
    attributes of the module, and the Trainer's counters, callbacks and loggers), so the fit is bit-identical to one
    without the search. Callbacks are not called, and nothing is logged or saved. Changes to other objects (files, or
    instances of your own classes that the module holds) are not undone.

    Afterward, the Trainer's attributes return the search's module, DataModule and loaders, and the fit's
    ``max_epochs``.

    Args:
        trainer: the Trainer of the fit; the search uses its strategy, precision, accumulation and clipping.

    Attributes:
        batch_sizes_tried: the sizes that the last :meth:`scale_batch_size` tried, with the memory used by each.

    Example:
        >>> tuner = Tuner(trainer)                                     # doctest: +SKIP
        >>> tuner.scale_batch_size(module, mode="binsearch")           # doctest: +SKIP
        >>> tuner.lr_find(module).plot(suggest=True)                   # doctest: +SKIP
        >>> trainer.fit(module)                                        # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"Tuner() got {messages.a(trainer)}, but it needs the Trainer that will run the fit: "
                "Tuner(Trainer(...)). Pass the module to lr_find() or scale_batch_size()."
            )
        self.trainer = trainer
        self.batch_sizes_tried: list[BatchTrial] = []

    def lr_find(
        self,
        model: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> LRFinder:
        """Train with a growing learning rate, and suggest the rate at which the loss falls fastest.

        The ratios between the parameter groups' rates stay the same, and schedulers do not advance.

        Args:
            model: the module.
            train_dataloaders: as for ``fit``.
            val_dataloaders: as for ``fit``; not used.
            dataloaders: must be None.
            datamodule: as for ``fit``.
            method: must be ``"fit"``.
            min_lr: the first rate.
            max_lr: the last rate.
            num_training: number of optimizer steps, which may take several epochs.
            mode: how the rate grows: ``"exponential"`` or ``"linear"``.
            early_stop_threshold: stop when the smoothed loss exceeds its lowest value so far by this factor; if None,
                never stop early.
            update_attr: set the module's attribute to the suggested rate.
            attr_name: name or path of that attribute, such as ``"hparams.optim.lr"``. By default, the attribute or
                hyperparameter ``lr`` or ``learning_rate`` of the module or the DataModule.
            weights_only: accepted for compatibility, and ignored.

        Returns:
            The result, which contains no steps under ``fast_dev_run``.

        Raises:
            AttributeError: if the attribute does not exist.
            RuntimeError: if the module uses manual optimization or LBFGS, or the Trainer resumes from a checkpoint.
        """
        if method != "fit" or dataloaders is not None:
            raise ValueError(
                f"lr_find(method={method!r}{', dataloaders=...' if dataloaders is not None else ''}) is not supported, "
                "because a learning rate is used only in training. Leave out method and dataloaders, and pass "
                "train_dataloaders."
            )
        request = self._request("fit", model, train_dataloaders, val_dataloaders, None, datamodule)
        module = find_module(self.trainer.current_run, request)[0]
        places = lr_places(module, request.datamodule, attr_name) if update_attr else []
        test = RangeTest(min_lr, max_lr, num_training, mode, early_stop_threshold, attr_name if update_attr else None)
        if is_dry(self.trainer.fast_dev_run, "The learning rate"):
            return LRFinder(mode, min_lr, max_lr, num_training)
        found: LRFinder = self._run(request, test, lambda run, _: run.source.train())
        if update_attr:
            take_lr(found, places)
        return found

    def scale_batch_size(
        self,
        model: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int | None = 8192,
        effective_batch: int | Literal["keep"] | None = None,
    ) -> int | None:
        """Try batch sizes with real steps, up to the limit of memory or data, and set the largest one that fits.

        This sets the attribute that hooks read (``batch_arg_name``) and changes a DataLoader that you pass. With
        several processes, the result is the batch size of each process, limited by the one with the least memory.

        Args:
            model: the module.
            train_dataloaders: as for ``fit``: one DataLoader, or None if a hook creates it.
            val_dataloaders: as for ``fit``; not used.
            dataloaders: the loaders for a ``method`` other than ``"fit"``.
            datamodule: as for ``fit``.
            method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            mode: ``"power"`` doubles the size until it does not fit; ``"binsearch"`` then searches for the largest size
                that fits.
            steps_per_trial: optimizer steps (batches, when evaluating) per size.
            init_val: the first size, which is halved if it does not fit.
            max_trials: maximum number of sizes to try.
            batch_arg_name: name or path of the module's or DataModule's attribute or hyperparameter for the batch size.
            margin: fraction by which the result of ``"binsearch"`` is reduced if memory was the limit.
            max_val: the largest size to try; if None, only the amount of data limits it.
            effective_batch: samples per update across all processes, or ``"keep"`` for the current number (batch size x
                ``accumulate_grad_batches`` x processes). The batch size is then the largest that fits *and* evenly
                divides each process's samples per update, and ``trainer.accumulate_grad_batches`` is set to match, so
                only the speed changes. If None, accumulation stays the same, so an update uses more samples.

        Returns:
            The new batch size; None under ``fast_dev_run``.

        Raises:
            AttributeError: if the attribute does not exist.
            ValueError: if a loader's batch size cannot be changed.
            RuntimeError: if not even one sample fits, the loader does not read the attribute, or the Trainer resumes
                from a checkpoint.
        """
        request = self._request(method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        module, trainer = find_module(self.trainer.current_run, request)[0], self.trainer
        locate, given = SizePlaces(batch_arg_name, method), request.loaders.get(stage_of(method))
        places, world = locate.of(module, request.datamodule, given), trainer.strategy.num_data_ranks
        wanted = effective_batch if method == "fit" and module.automatic_optimization else None
        if wanted != effective_batch:
            raise ValueError(
                f"scale_batch_size(effective_batch={effective_batch!r}) changes accumulate_grad_batches, which has an "
                "effect only in training with automatic optimization. Leave out effective_batch."
            )
        effective = effective_now(trainer.current_run, places, given, wanted, world)
        plan(1, effective, world)
        search = SizeSearch(locate, method, mode, steps_per_trial, init_val, max_trials, margin, max_val)
        if is_dry(self.trainer.fast_dev_run, "The batch size"):
            return None

        def load(run: Run, found: SizeSearchResult) -> None:
            load_with_size(run, locate(run), planned(found, effective, world, 1).size, method)

        found = self._run(request, search, load)
        self.batch_sizes_tried = found.trials
        return take_size(trainer.current_run, places, given, found, effective, world).size

    # ---- one search ------------------------------------------------------------------------------------------------

    def _request(self, fn: Method, model: Any, train: Any, validate: Any, others: Any, datamodule: Any) -> Request:
        known = ("fit", "validate", "test", "predict")
        if fn not in known:
            raise ValueError(messages.unknown("scale_batch_size method", fn, known))
        if fn == "fit" and others is not None:
            raise ValueError(
                "dataloaders= is for the methods 'validate', 'test' and 'predict'. For 'fit', pass train_dataloaders=."
            )
        loaders = {"train": train, "validate": validate} if fn == "fit" else {fn: others}
        first = loaders[stage_of(fn)]
        if hasattr(first, "prepare_data_per_node"):
            if datamodule is not None:
                raise ValueError("Two DataModules were passed. Pass only one, as datamodule=.")
            datamodule, loaders[stage_of(fn)] = first, None
        trainer = self.trainer
        if trainer.asked_ckpt_path is not None:
            raise RuntimeError(
                f"The trainer resumes from {trainer.asked_ckpt_path} (trainer.ckpt_path) and restores that run's "
                "learning rate and batch size, so there is nothing to search for. Search before the first fit, or set "
                "trainer.ckpt_path = None."
            )
        if trainer.state.fn is not None:
            raise RuntimeError(
                f"The Tuner cannot search while {trainer.state.fn} is running. Search before that run, or use the "
                "callbacks LearningRateFinder and BatchSizeFinder."
            )
        return Request(fn, model, datamodule, loaders, restore=PARTS, trial=True)

    def _run(self, request: Request, work: Callable[[Run], Any], load: Callable[[Run, Any], Any]) -> Any:
        strategy = self.trainer.strategy
        if strategy.launcher is None:
            return run_separately(self.trainer, request, work, load)
        with told_if_stopped_early(len(strategy.device_ids)):
            found = strategy.launcher(_elsewhere, self.trainer, request, work, random_states())
        show(self.trainer, request)
        return found


def _elsewhere(trainer: Trainer, request: Request, work: Callable[[Run], Any], random: dict[str, Any]) -> Any:
    """Run the search in a process that was launched for this search."""
    set_random_states(random)
    found = run_separately(trainer, request, work)
    leave()
    return found
