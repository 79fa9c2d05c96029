"""The callback hooks: when and on which ranks each one is called, what it may do, and in which order they run.

``FIT_PSEUDO_CODE`` shows the order of the hooks in a fit. It is valid Python: a test executes it and compares the order
of its calls with the order in real fits, so that the pseudo-code cannot drift from the implementation. Each line calls
a hook on every object that defines the hook: first on the callbacks, in the order of ``trainer.callbacks``, then on the
module. For ``setup``, ``teardown`` and ``prepare_data``, the ``DataModule`` comes before the callbacks. There is one
exception: callbacks that monitor metrics (``ModelCheckpoint``, ``EarlyStopping``) run ``on_train_epoch_end`` after the
module, so that they see the values that the module logs in its own ``on_train_epoch_end``.

When batches are prefetched (on a GPU, or when a loader has no length), the three transfer hooks run one batch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import unwrap
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

    Step = Callable[[Any, int], Any]

FIT_PSEUDO_CODE = """\
def fit():
    configure_callbacks()
    prepare_data()
    setup()
    configure_model()
    if resuming:
        on_load_checkpoint()           # the module's, before its weights are loaded
        load_state_dict()              # weights, then callbacks (on_load_checkpoint, load_state_dict)
    configure_optimizers()
    on_fit_start()                     # then optimizers, schedulers, counters and random states are restored
    zero_grad()
    if sanity_checking:
        on_sanity_check_start()
        validate()
        on_sanity_check_end()
    train_dataloader()
    on_train_start()
    for epoch in epochs:
        on_train_epoch_start()
        for batch in train_batches:
            transfer_batch()
            on_train_batch_start()     # returning -1 skips the rest of the epoch
            training_step()
            on_before_backward()
            backward()                 # the loss, divided by accumulate_grad_batches
            on_after_backward()
            if window_complete:        # the last, short window of an epoch counts as complete
                on_before_optimizer_step()
                configure_gradient_clipping()
                optimizer_step()
                on_before_zero_grad()
                optimizer_zero_grad()
                lr_scheduler_step()    # those with interval "step"; "epoch" ones on the epoch's last batch
            on_train_batch_end()
            if validation_due:
                validate()
            if stopping:
                break
        on_train_epoch_end()
        if stopping:
            break
    on_train_end()
    on_fit_end()
    teardown()


def validate():
    on_validation_model_zero_grad()    # not in the sanity check
    on_validation_model_eval()
    on_validation_start()
    on_validation_epoch_start()
    for batch in val_batches:
        transfer_batch()
        on_validation_batch_start()
        validation_step()
        on_validation_batch_end()
    on_validation_epoch_end()
    on_validation_end()
    on_validation_model_train()


def transfer_batch():
    on_before_batch_transfer()
    transfer_batch_to_device()
    on_after_batch_transfer()
"""
"""The hooks of a fit, in the order of their calls.

After an exception or Ctrl-C, ``on_exception`` and ``teardown`` run; then the exception propagates to the caller.

``test`` and ``predict`` work like ``validate``, with their own hook names, and run between ``setup`` and ``teardown``.
"""


class Callback:
    """Base class of all callbacks. Define the hooks you need and pass an instance to ``Trainer(callbacks=)``.

    A hook that you do not define costs nothing, because the trainer looks for it only once, when a run starts. A hook
    counts as defined if your class or the instance defines it; an instance attribute of ``None`` means "not defined". A
    misspelled hook name or a wrong signature is an error when the run starts.

    Unless its docstring says otherwise, a hook runs on every rank, may read everything, may set
    ``trainer.should_stop = True``, and must not call a collective on only some ranks.
    """

    _defines_defaults: ClassVar[bool] = True

    monitors_metrics: bool = False
    """Whether this callback's ``on_train_epoch_end`` runs after the module's, when all metrics are known."""

    runs_first: bool = False
    """Whether this callback runs before all others, so that they see its changes."""

    runs_last: bool = False
    """Whether this callback's ``on_train_batch_end`` and ``on_validation_end`` run after the module's."""

    limits_training: bool = False
    """Whether this callback ends training, so that neither ``max_epochs`` nor ``max_steps`` is needed."""

    skips_together: bool = False
    """Whether this callback's :meth:`around_training_step` checks each loss and skips a batch on all ranks or none.

    If True, ``training_step`` may return None on some ranks, and no other check warns about a loss that is not finite.
    """

    runs_in_trials: bool = False
    """Whether a copy of this callback runs in the tuner's trials, for example to freeze layers in ``setup``."""

    _logs_in: TrainingModule | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a number from a hook, with the arguments and rules of ``TrainingModule.log``."""
        self._logging_module(name).log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log every entry of a dict, with the arguments of ``TrainingModule.log_dict``."""
        self._logging_module(", ".join(map(str, dictionary))).log_dict(dictionary, *args, **kwargs)

    def _logging_module(self, names: str) -> TrainingModule:
        if self._logs_in is None:
            raise RuntimeError(
                f"{type(self).__name__}.log({names!r}) was called outside of a run, so there is no module to log to. "
                "Call it in one of the callback's hooks."
            )
        return self._logs_in

    @property
    def state_key(self) -> str:
        """The key under which a checkpoint stores this callback's state. It must be unique within a run."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Build a state key from the class name and the arguments that distinguish two instances."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def _undefine(self, base: type, *hooks: str) -> None:
        """Disable ``hooks``, which would do nothing on this instance, unless a subclass of ``base`` overrides them."""
        for hook in hooks:
            if overridden(self, hook, base) is None:
                setattr(self, hook, None)

    def _require_logger(self, trainer: Trainer, values: str = "its values") -> None:
        if not trainer.loggers:
            raise RuntimeError(
                f"{type(self).__name__} has nowhere to send {values}, because the Trainer has no logger "
                "(logger=False). Pass a logger, such as Trainer(logger=True), or remove the callback."
            )

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Called when fit, validate, test or predict begins, before the module's own ``setup``.

        ``stage`` is the name of the entry point. The hook may add layers or data. It must not assume that the module is
        already on its device.
        """

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Called last, even after an exception. The hook may release the callback's resources. It must not raise."""

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Called when an exception or Ctrl-C ends the run. Each rank that fails calls the hook independently.

        The hook may save a checkpoint: after an exception, ``trainer.save_checkpoint`` does not wait for other ranks
        (rank 0 writes the file; a sharded model cannot be saved). The hook must not call any collective itself.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called once per fit, when the module is on its device and the optimizers exist.

        The hook may change the module and the optimizers. A resume restores the optimizers' state after this hook. The
        hook must not log.
        """

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called once per fit, after ``on_train_end``; not after an exception.

        The hook may write results. It must not train or log.
        """

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the few validation batches that run before training. Random states are restored afterward.

        The hook must not log.
        """

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the sanity check. The values logged during the check are then discarded.

        The hook must not log.
        """

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the first epoch of a fit. A resume has already restored the counters and the optimizers.

        The hook may log values and change the optimizers.
        """

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the last epoch, when metrics are final.

        The hook may save a checkpoint. It must not train or log.
        """

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before an epoch's first batch is fetched.

        The hook may log values and change the optimizers, the loaders and ``trainer.accumulate_grad_batches``.
        """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called at the end of each epoch, after its last batch and after any validation that follows that batch.

        The hook may log values, read ``trainer.callback_metrics`` (which contains the epoch's metrics) and save a
        checkpoint.
        """

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int
    ) -> int | None:
        """Called before each training batch, which is already on the device.

        The hook may log, change the batch in place, and return -1 to skip the rest of the epoch.
        """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int
    ) -> None:
        """Called after each training batch: after its optimizer step, scheduler steps and ``zero_grad``.

        Callbacks come before the module, and ``ModelCheckpoint`` comes after both, so it saves their changes.
        ``outputs`` is the result of ``training_step`` as a dict. Its loss is a detached scalar of shape () and is not
        divided by ``accumulate_grad_batches``. ``outputs`` is None if the batch was skipped. Gradients are already
        cleared, so read them in ``on_before_optimizer_step``. The hook may log, save a checkpoint and stop the run. It
        must not wait for the device, because that would slow down every step.
        """

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        """Called before each backward pass.

        ``loss`` is a scalar of shape (), divided by ``accumulate_grad_batches`` but not yet scaled for fp16. The hook
        may read the loss and log. It must not change the loss: the change would be ignored.
        """

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the backward pass of each micro-batch.

        Gradients can still be scaled (fp16), sharded or not yet averaged. FSDP keeps them elsewhere (``parameter.grad``
        is None) until the last micro-batch of an accumulation window; DeepSpeed always keeps them elsewhere. The hook
        may log values and read the gradients. It must not clear the gradients or step an optimizer.
        """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Called before each optimizer step and before clipping.

        Gradients are fully accumulated, unscaled and averaged across ranks. With a sharded model, each rank sees its
        own shard; DeepSpeed keeps gradients elsewhere (``parameter.grad`` is None). If automatic optimization steps
        several optimizers, ``optimizer`` represents all of them and lists them in ``optimizer.optimizers``. The same
        applies to :meth:`on_before_zero_grad`. The hook may read and change gradients, for example to log norms or add
        noise. It must not step an optimizer.
        """

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Called right after the optimizer step, before the gradients are cleared.

        The hook may log values and read the clipped gradients that the step used.
        """

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called when validation starts, in eval mode and with gradients disabled.

        The hook may log values and swap the weights (restore them in :meth:`on_validation_end`). It must not train.
        """

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called when validation has finished and its metrics are known. ``ModelCheckpoint`` saves here.

        The hook may read ``trainer.callback_metrics`` and save a checkpoint. It must not log.
        """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the first validation batch. The hook may log."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the last validation batch of all loaders.

        The hook may log values, which are added to the epoch's metrics.
        """

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch, which is already on the device.

        The hook may log values and change the batch in place.
        """

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each validation batch; ``outputs`` is what ``validation_step`` returned.

        The hook may log values and keep ``outputs``.
        """

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called when testing starts, in eval mode and with gradients disabled.

        The hook may log values and swap the weights (restore them in :meth:`on_test_end`). It must not train.
        """

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called when testing has finished and its metrics are known.

        The hook may read ``trainer.callback_metrics``. It must not log.
        """

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the first test batch. The hook may log."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the last test batch of all loaders.

        The hook may log values, which are added to the epoch's metrics.
        """

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch, which is already on the device.

        The hook may log values and change the batch in place.
        """

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each test batch; ``outputs`` is what ``test_step`` returned.

        The hook may log values and keep ``outputs``.
        """

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called when prediction starts, in eval mode and with gradients disabled.

        The hook may swap the weights (restore them in :meth:`on_predict_end`). It must not train or log.
        """

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called when prediction has finished.

        The hook may write the predictions. It must not log.
        """

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called before the first prediction batch.

        The hook must not log.
        """

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Called after the last prediction batch of all loaders.

        The hook must not log.
        """

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each prediction batch, which is already on the device.

        The hook may change the batch in place. It must not log.
        """

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each prediction batch; ``outputs`` is what ``predict_step`` returned.

        The hook may write ``outputs`` to a file. It must not log.
        """

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Called when the contents of a checkpoint have been collected, before the checkpoint is written.

        The hook may add plain data and tensors to ``checkpoint``. It must not train.
        """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint's weights are loaded and before this callback's ``load_state_dict``.

        The hook may read the checkpoint. The module's own hook runs before its weights are loaded.
        """

    def around_training_step(self, trainer: Trainer, pl_module: TrainingModule, step: Step) -> Step:
        """Return a function that the trainer calls instead of ``step``. Called once, when training starts.

        The returned function receives ``(batch, batch_idx)`` and runs before the backward pass. It may call ``step``,
        read the output and return a different output; with automatic optimization, returning None skips the batch. It
        must not call backward. This hook is not supported with ``Trainer(compile="step")``, which compiles the step
        into a single graph.
        """
        return step

    def on_profile(self, trainer: Trainer, pl_module: TrainingModule, profiler: str, seconds: dict[str, float]) -> None:
        """Called before ``teardown`` if a profiler has measured how the run's time was spent.

        ``seconds`` maps each part of the run to its time; parts do not overlap. ``profiler`` is the profiler's class
        name.
        """

    def get_accumulate_grad_batches(self, epoch: int) -> int | None:
        """Return the number of batches per optimizer step in ``epoch`` (0-based); None by default.

        A callback that sets ``trainer.accumulate_grad_batches`` must override this method, so that the number of steps
        is known before training.
        """
        return None

    def save_on_signal(self, trainer: Trainer, name: str) -> None:
        """Called on all ranks when the signal ``name`` ends a fit, unless another callback has already saved the step.

        The hook may save a checkpoint.
        """

    def has_saved(self, step: int, weights: bool = False) -> bool:
        """Return True if this callback has saved a checkpoint of step ``step`` that a fit can resume from.

        If ``weights`` is True, a weights-only checkpoint is enough.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return this callback's state for a checkpoint, as plain data and tensors; an empty dict is not saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned when the checkpoint was written."""


class Rollback(Exception):  # noqa: N818 - a request, not an error
    """Raised by a callback on all ranks to end a fit, which then continues from a checkpoint in the same process.

    Attributes:
        path: the checkpoint.
        own: True if this run wrote the checkpoint, in which case everything in it is restored; False if the fit started
            from the checkpoint and therefore starts over.
        blamed: epoch and index of the batch to skip when it comes up again, or None.
    """

    def __init__(self, path: Any, own: bool, blamed: tuple[int, int] | None = None) -> None:
        why = "an earlier checkpoint, because the weights may already be damaged"
        if blamed is not None:
            why = f"to skip batch {blamed[1]} of epoch {blamed[0]} when it comes up again"
        super().__init__(f"going back to {str(path)!r}, {why}.")
        self.path, self.own, self.blamed = path, own, blamed


def overridden(owner: Any, name: str, base: type | None = None) -> Callable[..., Any] | None:
    """Return the method ``name`` if a subclass of ``base`` or the instance defines it, else None.

    A value of None, on the class or on the instance, means "not overridden". An instance attribute that holds a default
    method, whether of this object or of another one, means the same.

    Args:
        owner: a callback, module, DataModule or any other object.
        name: name of the method.
        base: the class that defines the default; None means all classes with ``_defines_defaults = True``.
    """
    method = getattr(owner, name, None)
    function = getattr(method, "__func__", method)
    if method is None or function is getattr(base, name, None):
        return None
    bound_to = getattr(method, "__self__", owner)
    if base is None or bound_to is not owner:
        marked = (kind for kind in type(bound_to).__mro__ if vars(kind).get("_defines_defaults"))
        if any(function is getattr(kind, name, None) for kind in marked):
            return None
    return method


def replaced(owner: Any, name: str, base: type) -> Callable[..., Any] | None:
    """Like :func:`overridden`, but return None for a wrapper (``functools.wraps``) around the default method."""
    method = overridden(owner, name, base)
    inner = method and unwrap(method)
    return None if getattr(inner, "__func__", inner) is getattr(base, name, None) else method


def accumulation_of(callbacks: Iterable[Any], epoch: int) -> int | None:
    """Return the number of batches per optimizer step that callbacks set for an epoch; None if no callback sets it."""
    deciding = (replaced(callback, "get_accumulate_grad_batches", Callback) for callback in callbacks)
    found = (method(epoch) for method in deciding if method is not None)
    return next((batches for batches in found if batches is not None), None)


#: Callback methods that do not appear in the pseudo-code.
OTHER_METHODS = (
    *("around_training_step", "on_profile", "get_accumulate_grad_batches", "save_on_signal", "has_saved"),
    *("state_dict", "load_state_dict"),
)
#: Every hook a callback can define, in the order of the class above.
HOOKS: tuple[str, ...] = tuple(
    name
    for name, value in vars(Callback).items()
    if callable(value) and not name.startswith(("_", "log")) and name not in OTHER_METHODS
)
