"""``Tuner``: the learning rate and the batch size of a fit to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from ..checkpoint.restore import PARTS
from ..processes.launch import told_if_stopped_early
from ..processes.process_group import leave
from ..processes.seed import random_states, set_random_states
from ..trainer.run import Request, Run
from ..trainer.start_run import find_module
from ..trainer.trainer import Trainer
from .attribute_lookup import lr_places
from .batch_size import BatchTrial, SizeSearch, plan, stage_of
from .learning_rate import LRFinder, RangeTest
from .trial import Method
from .trial_run import apart
from .trials_in_run import SizePlaces, effective_now, take_lr, take_size

if TYPE_CHECKING:
    from ..data.datamodule import DataModule
    from ..trainer.module import TrainingModule


class Tuner:
    """Finds a learning rate or a batch size by steps on the module itself, before a fit.

    Everything but the value found is as it was afterwards, so that the fit is, to the bit, the one that would have been
    without the search: weights, buffers, random states, the place in the data, plain attributes of the module, the
    trainer's counters, callbacks and loggers. Callbacks are not called and nothing is logged or saved. What other
    objects keep that a training step changes (a class of your own held by the module, a file) is not put back.

    Args:
        trainer: with which the fit will be made: its strategy, precision, accumulation and clipping count.

    Attributes:
        batch_sizes_tried: by the last :meth:`scale_batch_size`, with the memory that each took.

    Example:
        >>> tuner = Tuner(trainer)                                     # doctest: +SKIP
        >>> tuner.scale_batch_size(module, mode="binsearch")           # doctest: +SKIP
        >>> tuner.lr_find(module).plot(suggest=True)                   # doctest: +SKIP
        >>> trainer.fit(module)                                        # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"Tuner() got {messages.a(trainer)}, but it needs the Trainer of the fit to come: Tuner(Trainer(...)). "
                "The module is passed to lr_find() and scale_batch_size()."
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
        """Train with a rate that grows from step to step, and suggest the one at which the loss falls fastest.

        Parameter groups keep their rates in proportion; schedulers do not advance.

        Args:
            model: the module.
            train_dataloaders: as for ``fit``.
            val_dataloaders: as for ``fit``; not read.
            dataloaders: must be None.
            datamodule: as for ``fit``.
            method: ``"fit"``.
            min_lr: the first rate.
            max_lr: the last.
            num_training: optimizer steps; shorter epochs begin again.
            mode: how it grows: ``"exponential"`` or ``"linear"``.
            early_stop_threshold: end when the smoothed loss is so many times the lowest so far; None: go on to the end.
            update_attr: set the suggestion where the module keeps its rate.
            attr_name: where that is, such as ``"hparams.optim.lr"``; empty: ``lr`` or ``learning_rate``, as an
                attribute or a hyperparameter of the module or the DataModule.
            weights_only: accepted for compatibility.

        Returns:
            What was found; under ``fast_dev_run`` it holds no steps.

        Raises:
            AttributeError: there is no such attribute.
            RuntimeError: manual optimization, LBFGS, or the trainer is to go on from a checkpoint.
        """
        if method != "fit" or dataloaders is not None:
            raise ValueError(
                f"lr_find(method={method!r}{', dataloaders=...' if dataloaders is not None else ''}): a learning rate "
                "is for training. Leave it out, and pass train_dataloaders."
            )
        request = self._request("fit", model, train_dataloaders, val_dataloaders, None, datamodule)
        module = find_module(self.trainer.current_run, request)[0]
        places = lr_places(module, request.datamodule, attr_name) if update_attr else []
        test = RangeTest(min_lr, max_lr, num_training, mode, early_stop_threshold, attr_name if update_attr else None)
        if self._is_dry("The learning rate"):
            return LRFinder(mode, min_lr, max_lr, num_training)
        found: LRFinder = self._run(request, test)
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
        """Try batch sizes by real steps, until memory or the data end; set the largest that fits.

        It is set where hooks read it (``batch_arg_name``); a DataLoader that is passed is changed itself, and the
        attribute too if there is one. With several processes it is the size of each one's batches, and the one with the
        least memory decides.

        Args:
            model: the module.
            train_dataloaders: as for ``fit``: one DataLoader, or None where a hook makes it.
            val_dataloaders: as for ``fit``; not read.
            dataloaders: for the other methods.
            datamodule: as for ``fit``.
            method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            mode: ``"power"`` doubles until a size does not fit; ``"binsearch"`` then closes in on the largest one.
            steps_per_trial: optimizer steps (batches, when evaluating) a size has to stand.
            init_val: the first size. If it does not fit it is halved.
            max_trials: sizes to try in all.
            batch_arg_name: the attribute or hyperparameter of the module or the DataModule, or a path to it.
            margin: share by which the result of ``"binsearch"`` is lowered where memory was the limit.
            max_val: the largest size to try; None: only the data limit it.
            effective_batch: samples that an update is to learn from, over all processes, or ``"keep"``: as many as now
                (batch size x ``accumulate_grad_batches`` x processes). The batch size is then the largest that fits
                *and* divides its share, and ``trainer.accumulate_grad_batches`` makes up for the rest: learning rate
                and results stay as they are, only the speed changes. None: the batch grows as far as it goes and the
                accumulation stays, so an update learns from more samples.

        Returns:
            The batch size that was set; None under ``fast_dev_run``.

        Raises:
            AttributeError: there is no such attribute.
            ValueError: loaders were passed whose batch size cannot be changed.
            RuntimeError: not even one sample fits, the loader does not read the attribute, or the trainer is to go on
                from a checkpoint.
        """
        request = self._request(method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        module, trainer = find_module(self.trainer.current_run, request)[0], self.trainer
        locate, given = SizePlaces(batch_arg_name, method), request.loaders.get(stage_of(method))
        places, world = locate.of(module, request.datamodule, given), trainer.strategy.num_data_ranks
        wanted = effective_batch if method == "fit" and module.automatic_optimization else None
        if wanted != effective_batch:
            raise ValueError(
                f"scale_batch_size(effective_batch={effective_batch!r}) raises accumulate_grad_batches, which is for "
                "training with automatic optimization. Leave it out."
            )
        effective = effective_now(trainer.current_run, places, given, wanted, world)
        plan(1, effective, world)
        search = SizeSearch(locate, method, mode, steps_per_trial, init_val, max_trials, margin, max_val)
        if self._is_dry("The batch size"):
            return None
        found = self._run(request, search)
        self.batch_sizes_tried = found.trials
        return take_size(trainer.current_run, places, given, found, effective, world).size

    # ---- one search ------------------------------------------------------------------------------------------------

    def _request(self, fn: Method, model: Any, train: Any, validate: Any, others: Any, datamodule: Any) -> Request:
        known = ("fit", "validate", "test", "predict")
        if fn not in known:
            raise ValueError(messages.unknown("method of scale_batch_size", fn, known))
        if fn == "fit" and others is not None:
            raise ValueError(
                "dataloaders= is for the methods 'validate', 'test' and 'predict'. Pass train_dataloaders=."
            )
        loaders = {"train": train, "validate": validate} if fn == "fit" else {fn: others}
        first = loaders[stage_of(fn)]
        if hasattr(first, "prepare_data_per_node"):
            if datamodule is not None:
                raise ValueError("Two DataModules were passed. Pass one, as datamodule=.")
            datamodule, loaders[stage_of(fn)] = first, None
        trainer = self.trainer
        if trainer.asked_ckpt_path is not None:
            raise RuntimeError(
                f"The trainer continues from {trainer.asked_ckpt_path} (trainer.ckpt_path), with the values of that "
                "run, so there is nothing to search for. Search before the first fit, or set "
                "trainer.ckpt_path = None."
            )
        if trainer.state.fn is not None:
            raise RuntimeError(
                f"The Tuner was called while {trainer.state.fn} is running. Call it before, or use the callbacks "
                "LearningRateFinder and BatchSizeFinder."
            )
        return Request(fn, model, datamodule, loaders, restore=PARTS, trial=True)

    def _run(self, request: Request, work: Callable[[Run], Any]) -> Any:
        strategy = self.trainer.strategy
        if strategy.launcher is None:
            return apart(self.trainer, request, work)
        with told_if_stopped_early(len(strategy.device_ids)):
            return strategy.launcher(_elsewhere, self.trainer, request, work, random_states())

    def _is_dry(self, what: str) -> bool:
        if self.trainer.fast_dev_run:
            messages.info_once(f"{what} is not searched for in a dry run (fast_dev_run).")
        return bool(self.trainer.fast_dev_run)


def _elsewhere(trainer: Trainer, request: Request, work: Callable[[Run], Any], random: dict[str, Any]) -> Any:
    """The search in one of the processes that were started for it."""
    set_random_states(random)
    found = apart(trainer, request, work)
    leave()
    return found
