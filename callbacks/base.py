"""Every hook of a run, when it is called, where, and what it may do; and the order of them all.

``FIT_PSEUDO_CODE`` is the order of a fit. It is Python: a test runs it with recorders in place of the hooks and holds
the result against recorded runs, so it cannot drift from the code. In it a hook's line stands for all who define
the hook: first the callbacks in their order, then the module (for ``setup``, ``teardown`` and ``prepare_data`` the
``DataModule`` comes before both). One exception: in ``on_train_epoch_end`` callbacks that monitor metrics
(``ModelCheckpoint``, ``EarlyStopping``) come after the module, so that they see what it logs there.

While batches are prefetched (on a GPU, or when a loader has no length) the three transfer hooks run one batch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

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
"""A fit, hook by hook. On an exception or Ctrl-C: ``on_exception``, then ``teardown``, then it is raised to the caller.

``test`` and ``predict`` run as ``validate`` does with their own names, between ``setup`` and ``teardown``.
"""


class Callback:
    """Something that acts during a run. Subclass it, define the hooks you need, and pass it to ``Trainer(callbacks=)``.

    A hook that you do not define costs nothing: the trainer looks once, when a run starts. A hook counts as defined
    when your class defines it or the instance carries it; an instance attribute of ``None`` means "not defined".
    A misspelled hook name or a signature that does not fit is an error when the run starts.

    Unless its docstring says otherwise a hook runs on every rank, may read everything, may set
    ``trainer.should_stop = True``, and must not call a collective on some ranks only.
    """

    _defines_defaults: ClassVar[bool] = True

    monitors_metrics: bool = False
    """Whether ``on_train_epoch_end`` of this callback runs after the module's, when all metrics are known."""

    runs_first: bool = False
    """Whether this callback comes before all others, which then see what it changed."""

    runs_last: bool = False
    """Whether ``on_train_batch_end`` and ``on_validation_end`` of this callback run after the module's."""

    @property
    def state_key(self) -> str:
        """The name under which this callback's state lies in a checkpoint. Two callbacks of one run must differ."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """A state key made of the class and the arguments that tell two instances apart."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def _undefine(self, base: type, *hooks: str) -> None:
        """Spare this instance hooks of ``base`` that would do nothing. Hooks of a subclass or of the user stay."""
        for hook in hooks:
            if overridden(self, hook, base) is None:
                setattr(self, hook, None)

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """When fit, validate, test or predict begins, before the module's own ``setup``.

        May add layers or data; must not assume the module is on its device. ``stage`` is the entry point's name.
        """

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Last of all, also after an exception. May release what the callback holds; must not raise."""

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """When anything, Ctrl-C included, ended the run early. May save; must not call a collective."""

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Once a fit, when the module is on its device and the optimizers exist. May change either."""

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Once a fit, after ``on_train_end``. Not called after an exception."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the few validation batches that are tried ahead of training. Random states are put back after."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the sanity check. What was logged in it is discarded next."""

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the first epoch of a fit; after a resume the counters already show where it goes on."""

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the last epoch. Metrics are final. May save; must not train."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """At the start of each epoch, before its first batch is fetched. May change optimizers and loaders."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After each epoch's last batch (and its validation). Epoch metrics can be read from ``callback_metrics``."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int
    ) -> int | None:
        """Before each training batch, which is on its device. May be changed in place; -1 skips the epoch's rest."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int
    ) -> None:
        """After each training batch, optimizer and schedulers included.

        ``outputs`` is what ``training_step`` returned as a dict, its loss detached: scalar, shape (), not divided by
        the accumulation; None if the batch was skipped. Gradients are cleared already: read them in
        ``on_before_optimizer_step``. Must not wait for the device: that costs every step.
        """

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        """Before each backward. ``loss``: scalar, shape (), divided by the accumulation, not yet scaled for fp16."""

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After each backward, of every micro-batch. Gradients may be scaled (fp16), sharded, and not yet averaged."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Before each optimizer step and before clipping. Gradients are unscaled, complete and averaged over ranks.

        The place to read or change gradients (norms, noise). Under sharding each rank sees its own shard.
        """

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Right after the optimizer step, before the gradients it used are cleared."""

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """When a validation starts. The module is in eval mode, gradients are off. May swap weights."""

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """When a validation has ended and its metrics are known. May save; ``ModelCheckpoint`` acts here."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the last validation batch of all loaders. What is logged here joins the epoch's metrics."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each validation batch, which is on its device."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each validation batch; ``outputs`` is what ``validation_step`` returned."""

    def on_test_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """When a test starts. The module is in eval mode, gradients are off."""

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """When a test has ended and its metrics are known."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the last test batch of all loaders. What is logged here joins the epoch's metrics."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each test batch, which is on its device."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each test batch; ``outputs`` is what ``test_step`` returned."""

    def on_predict_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """When a prediction starts. The module is in eval mode, gradients are off."""

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """When a prediction has ended."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """After the last batch of all loaders."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch to predict, which is on its device."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each predicted batch; ``outputs`` is what ``predict_step`` returned. The place to write it away."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """When a checkpoint has been gathered, before it is written. May add plain data and tensors; must not train."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """When a checkpoint is loaded, after the module's weights, before ``load_state_dict`` of this callback."""

    def state_dict(self) -> dict[str, Any]:
        """What of this callback belongs into a checkpoint: plain data and tensors. Empty means nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned when the checkpoint was written."""


def overridden(owner: Any, name: str, base: type | None = None) -> Callable[..., Any] | None:
    """The method ``name`` if ``owner``'s class defines it below ``base`` or the instance carries it, else None.

    A value of None, on the class or on the instance, means "not overridden"; so does a default method, of this object
    or of another one, that the instance carries.

    Args:
        owner: a callback, module, DataModule or another object.
        name: of the method.
        base: the class with the default; None stands for the classes that mark themselves as having defaults.
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


#: Every hook a callback can define, in the order of the class above.
HOOKS: tuple[str, ...] = tuple(
    name
    for name, value in vars(Callback).items()
    if callable(value) and not name.startswith("_") and name not in ("state_dict", "load_state_dict")
)
