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
    """Hooks that a module can define to act during its run. They run when a callback's hooks run, with the same rights.

    Each runs on every rank after the callbacks' hook of that name, unless its docstring says otherwise.
    """

    #: Whether every node runs :meth:`prepare_data`, or only the first (for a shared disk).
    prepare_data_per_node: bool = True

    # ---- set up ----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or unpack, once per node (local rank 0).

        Must not set attributes: other ranks would not have them.
        """

    def setup(self, stage: str) -> None:
        """When an entry point begins, named by ``stage`` (``"fit"``, ``"validate"``, ...). May build layers."""

    def teardown(self, stage: str) -> None:
        """Last of all, also after an exception."""

    def configure_model(self) -> None:
        """Build or shard large layers here. Runs at every entry point, so it must not build twice."""

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return callbacks to add; each replaces the Trainer's callbacks of the same type."""
        return []

    # ---- the run ---------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Once per fit, when the module is on its device and the optimizers exist."""

    def on_fit_end(self) -> None:
        """Once per fit, after ``on_train_end``."""

    def on_train_start(self) -> None:
        """Before the first epoch of a fit."""

    def on_train_end(self) -> None:
        """After the last epoch of a fit."""

    def on_train_epoch_start(self) -> None:
        """Before each epoch."""

    def on_train_epoch_end(self) -> None:
        """After each epoch. May log."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before each training batch; -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int) -> None:
        """After each training batch, including its update. ``outputs["loss"]``: detached scalar, shape ()."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before each backward. ``loss``: scalar, shape (), divided by the accumulation, unscaled."""

    def on_after_backward(self) -> None:
        """After each backward. Gradients may be scaled, sharded, and not yet averaged over ranks."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before each optimizer step and before clipping. Gradients are unscaled, complete and averaged."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """After each optimizer step, before its gradients are cleared."""

    def on_validation_start(self) -> None:
        """When a validation starts."""

    def on_validation_end(self) -> None:
        """When a validation has ended."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch. May log."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each validation batch."""

    def on_test_start(self) -> None:
        """When a test starts."""

    def on_test_end(self) -> None:
        """When a test has ended."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch. May log."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each test batch."""

    def on_predict_start(self) -> None:
        """When a prediction starts."""

    def on_predict_end(self) -> None:
        """When a prediction has ended."""

    def on_predict_epoch_start(self) -> None:
        """Before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before each batch to predict."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each predicted batch."""

    # ---- train and eval mode ---------------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Before a validation inside a fit. Gradients are cleared already, so there is nothing to do by default."""

    def on_validation_model_eval(self: Any) -> None:
        """Put the module into eval mode for validation, test or predict; remember the mode of every submodule."""
        self.__dict__["_modes"] = [(module, module.training) for module in self.modules()]
        self.eval()

    def on_validation_model_train(self: Any) -> None:
        """Restore the mode that every submodule had before validation, test or predict."""
        module: nn.Module
        for module, training in self.__dict__.pop("_modes", ()):
            module.training = training

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train

    # ---- data ------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the training loader: a DataLoader, any iterable over batches, or a collection of them."""

    def val_dataloader(self) -> Any:
        """Return the validation loader or a list of them."""

    def test_dataloader(self) -> Any:
        """Return the test loader or a list of them."""

    def predict_dataloader(self) -> Any:
        """Return the loader to predict from or a list of them."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host, before it moves; return it."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch whose type Paceline does not know; return it."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device; return it."""
        return batch

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read, or correct, a checkpoint before the module's weights are loaded from it."""
