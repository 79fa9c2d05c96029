"""Names of the hooks and methods that a run calls, and a function that finds the running hook."""

from __future__ import annotations

from itertools import dropwhile

from ..callbacks.base import HOOKS, OTHER_METHODS
from ..messages import call_stack, owner_of

_LOADERS_AND_TRANSFERS = (
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
#: Methods that a module can define and a callback cannot.
MODULE_METHODS = (
    *("prepare_data", "configure_model", "configure_callbacks", "configure_optimizers", "configure_gradient_clipping"),
    *("training_step", "validation_step", "test_step", "predict_step"),
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "on_validation_model_zero_grad"),
    *(f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")),
    *_LOADERS_AND_TRANSFERS,
)
DATA_METHODS = (
    *("prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict"),
    *_LOADERS_AND_TRANSFERS,
)
#: Steps, whose arguments ``bind_steps.py`` checks.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
#: Hooks of other versions of Lightning, which are never called here, and their replacements.
MOVED = {
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_keyboard_interrupt": "on_exception",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "training_step_end": "on_train_batch_end",
    "training_epoch_end": "on_train_epoch_end",
    "validation_step_end": "on_validation_batch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_step_end": "on_test_batch_end",
    "test_epoch_end": "on_test_epoch_end",
    "configure_sharded_model": "configure_model",
}

_CALLED = frozenset((*HOOKS, *MODULE_METHODS, *OTHER_METHODS))


def calling_hook() -> str:
    """Return the name of the user's hook or step on the call stack; an empty string if there is none."""
    # The innermost frames are self.log and the functions that it calls.
    for frame in dropwhile(lambda frame: owner_of(frame) == "package", call_stack()):
        if owner_of(frame) == "package":
            break
        if frame.f_code.co_name in _CALLED:
            return frame.f_code.co_name
    return ""
