"""Methods of DeepSpeed's engine, which ``transformers.Trainer`` and scripts call on a prepared model."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...accelerator.model_weights import save_object
from ...accelerator.prepare import Prepared

_FILE = "paceline_state.pt"
_LATEST = "latest"


class EngineMethods:
    """Saves and loads a prepared model and its optimizer as DeepSpeed's engine does.

    A checkpoint has full weights and a full optimizer state, so any number of processes can read it.

    Args:
        prepared: the prepared objects of the Accelerator.
        model: the prepared model.
    """

    def __init__(self, prepared: Prepared, model: nn.Module) -> None:
        self._prepared: weakref.ref[Prepared] | None = weakref.ref(prepared)
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineMethods:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_prepared": None, "_model": None}

    def attach(self, model: nn.Module) -> None:
        """Add the engine's methods to the model."""
        for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
            vars(model)[name] = getattr(self, name)
        _let_config_be_read(getattr(model, "config", None))

    def _found(self, asked: str) -> tuple[Any, list[Any]]:
        """Return the model's :class:`PreparedModel` and its optimizers."""
        prepared = None if self._prepared is None else self._prepared()
        model = None if self._model is None else self._model()
        if prepared is None or model is None:
            raise RuntimeError(
                f"model.{asked}() was called on a model that was unpickled, or whose Accelerator no longer exists. "
                "Prepare the model again: model = accelerator.prepare(model)."
            )
        placement = prepared.placement(model, asked)
        return placement, [one for one in prepared.live_optimizers if one.placement is placement]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights and the optimizer's state to ``save_dir/tag``. Every process must call this.

        Args:
            save_dir: folder of checkpoints.
            tag: name of the checkpoint; None means ``global_step`` followed by the number of updates.
            client_state: values that :meth:`load_checkpoint` returns.
            save_latest: whether to write the tag to the file ``latest``.
            exclude_frozen_parameters: whether to leave out parameters that do not require gradients.

        Returns:
            True.
        """
        placement, optimizers = self._found("save_checkpoint")
        strategy, module = placement.strategy, placement.module
        tag = str(tag or f"global_step{getattr(strategy, 'num_updates', 0)}")
        state = {
            "module": _weights(placement, exclude_frozen_parameters),
            "optimizers": [strategy.optimizer_state(module, one.optimizer) for one in optimizers],
            "client_state": dict(client_state or {}),
        }
        if strategy.is_global_zero:
            folder = Path(save_dir) / tag
            folder.mkdir(parents=True, exist_ok=True)
            save_object(state, folder / _FILE, False)
            if save_latest:
                (Path(save_dir) / _LATEST).write_text(tag)
        strategy.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint written by :meth:`save_checkpoint`. Every process must call this.

        Args:
            load_dir: folder of checkpoints.
            tag: name of the checkpoint; None means the name in the file ``latest``.
            load_module_strict: whether the names of the weights must match exactly.
            load_optimizer_states: whether to load the optimizer's state.
            load_lr_scheduler_states: has no effect, because schedules are saved with their own ``state_dict``.
            load_module_only: whether to load only the weights.

        Returns:
            The checkpoint's path and ``client_state``; ``(None, {})`` if ``tag`` is None and ``latest`` does not exist.

        Raises:
            FileNotFoundError: there is no such checkpoint, or DeepSpeed itself wrote the checkpoint.
        """
        del load_lr_scheduler_states
        placement, optimizers = self._found("load_checkpoint")
        strategy, module = placement.strategy, placement.module
        latest = Path(load_dir) / _LATEST
        if tag is None and not latest.is_file():
            return None, {}
        folder = Path(load_dir) / (latest.read_text().strip() if tag is None else str(tag))
        if not (folder / _FILE).is_file():
            raise FileNotFoundError(
                f"load_checkpoint({str(load_dir)!r}): there is no {str(folder / _FILE)!r}. Paceline cannot read "
                "checkpoints that DeepSpeed itself has written. Convert such a checkpoint with DeepSpeed's "
                "zero_to_fp32.py, load the resulting weights into the model, and start a new run."
            )
        state = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
        strategy.load_model_state(module, state["module"], load_module_strict)
        if load_optimizer_states and not load_module_only:
            for one, saved in zip(optimizers, state["optimizers"], strict=True):
                strategy.load_optimizer_state(module, one.optimizer, saved)
        return str(folder), state["client_state"]

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights to one file. Every process must call this.

        Args:
            save_dir: folder for the file.
            save_filename: name of the file.
            exclude_frozen_parameters: whether to leave out parameters that do not require gradients.

        Returns:
            True.
        """
        placement, _ = self._found("save_16bit_model")
        weights = _weights(placement, exclude_frozen_parameters)
        if placement.strategy.is_global_zero:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            save_object(weights, Path(save_dir) / save_filename, False)
        placement.strategy.barrier()
        return True


def _weights(placement: Any, trained_only: bool) -> dict[str, Any]:
    """Return the full weights of a model, on the main process."""
    module = placement.module
    left_out: set[str] = set()
    if trained_only:
        left_out = {name for name, one in module.named_parameters(remove_duplicate=False) if not one.requires_grad}
    state = placement.strategy.model_state(module)
    return {name: value for name, value in state.items() if name not in left_out}


def _let_config_be_read(config: Any) -> None:
    """Add a ``get`` method to a transformers configuration.

    ``Trainer.save_model`` of transformers reads the configuration like a dict.
    """
    kind = getattr(sys.modules.get("transformers"), "PreTrainedConfig", None)
    if kind is not None and isinstance(config, kind) and not hasattr(config, "get"):
        kind.get = _get


def _get(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)
