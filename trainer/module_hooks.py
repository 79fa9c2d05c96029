"""The hooks of a module, with empty bodies. ``callbacks/base.py`` shows when each runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..processes.device_transfer import move

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from ..callbacks.base import Callback


class ModuleHooks:
    """Hooks that a module can define. They run at the same points as a callback's hooks and may do the same things.

    Each hook runs on every rank after the callbacks' hooks of the same name, unless its docstring says otherwise.
    """

    #: If True, :meth:`prepare_data` runs once per machine; if False (for a shared disk), once per run.
    prepare_data_per_node: bool = True

    # ---- set up ----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Called before ``setup`` at the start of each run. Runs once per machine (on local rank 0); other ranks wait.

        The hook may download or unpack data. It must not set attributes, because other ranks would not have them.
        """

    def setup(self, stage: str) -> None:
        """Called when the entry point ``stage`` (``"fit"``, ``"validate"``, ...) begins. Layers can be built here."""

    def teardown(self, stage: str) -> None:
        """Called at the very end of a run, even after an exception."""

    def configure_model(self) -> None:
        """Build large layers here; the strategy shards them afterward.

        This hook runs at every entry point, so build only the layers that do not exist yet.
        """

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return callbacks to add; each replaces the Trainer's callbacks of the same type."""
        return []

    # ---- the run ---------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Called once per fit, when the module is on its device and the optimizers exist."""

    def on_fit_end(self) -> None:
        """Called once per fit, after ``on_train_end``."""

    def on_train_start(self) -> None:
        """Called before the first epoch of a fit."""

    def on_train_end(self) -> None:
        """Called after the last epoch of a fit."""

    def on_train_epoch_start(self) -> None:
        """Called before each epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after each epoch. Values can be logged here."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before each training batch; returning -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int) -> None:
        """Called after each training batch, its update and the callbacks' hooks, before ``ModelCheckpoint`` saves.

        ``outputs["loss"]`` is a detached scalar of shape ().
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before each backward pass. ``loss`` (shape ()) is divided for accumulation but not scaled for fp16."""

    def on_after_backward(self) -> None:
        """Called after each backward pass. Gradients may be scaled, sharded and not yet averaged across ranks."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each optimizer step and before clipping, with unscaled gradients averaged across ranks."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after each optimizer step, before the gradients that it used are cleared."""

    def on_validation_start(self) -> None:
        """Called when validation starts."""

    def on_validation_end(self) -> None:
        """Called when validation has ended."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch. Values can be logged here."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each validation batch."""

    def on_test_start(self) -> None:
        """Called when testing starts."""

    def on_test_end(self) -> None:
        """Called when testing has ended."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch. Values can be logged here."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each test batch."""

    def on_predict_start(self) -> None:
        """Called when prediction starts."""

    def on_predict_end(self) -> None:
        """Called when prediction has ended."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each prediction batch."""

    # ---- train and eval mode ---------------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation inside a fit. Does nothing by default, because the gradients are already cleared."""

    def on_validation_model_eval(self: Any) -> None:
        """Put the module into eval mode for validation, testing or prediction; remember every submodule's mode."""
        self.__dict__["_modes"] = [(module, module.training) for module in self.modules()]
        self.eval()

    def on_validation_model_train(self: Any) -> None:
        """Restore the mode that every submodule had before validation, testing or prediction."""
        module: nn.Module
        for module, training in self.__dict__.pop("_modes", ()):
            module.training = training

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train

    # ---- data ------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the training loader: a DataLoader, any iterable of batches, or a collection of loaders."""

    def val_dataloader(self) -> Any:
        """Return the validation loader or a list of loaders."""

    def test_dataloader(self) -> Any:
        """Return the test loader or a list of loaders."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader or a list of loaders."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host, before it is moved, and return it."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device and return it. Override this hook for batch types that are not supported."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device, and return it."""
        return batch

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read or modify a checkpoint before the module's weights are loaded from it."""
