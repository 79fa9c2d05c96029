"""Adds attributes and methods of Lightning's classes to Paceline's, and enables Lightning's ``PL_`` seed variables."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import torch

from ... import messages
from ...callbacks.early_stopping import EarlyStopping
from ...data.datamodule import DataModule
from ...processes import seed
from ...profilers.base import Profiler
from ...strategies.ddp import DDPStrategy
from ...trainer.module import TrainingModule

_DDP_ARGUMENTS = "_ddp_kwargs"
_COMPILER = "_compiler_ctx"


def install() -> None:
    """Add the attributes and methods, and enable the environment variables for seeds that begin with ``PL_``."""
    seed.OTHER_PREFIXES.append("PL")
    _share_rank()
    stopping: Any = EarlyStopping
    stopping.mode_dict = {"min": torch.lt, "max": torch.gt}
    stopping.order_dict = {"min": "<", "max": ">"}
    setattr(DDPStrategy, _DDP_ARGUMENTS, property(_ddp_kwargs))
    data: Any = DataModule
    data.name = None
    profiler_type: Any = Profiler
    profiler_type.local_rank = property(lambda profiler: profiler._local_rank or 0)
    module: Any = TrainingModule
    module.to_torchscript = _refuse_torchscript
    module.to_tensorrt = _refuse_tensorrt
    setattr(module, _COMPILER, None)  # a Trainer unwraps a compiled module


def _share_rank() -> None:
    """Set the rank of lightning-utilities' ``rank_zero_only`` too, which programs import because it is Lightning's."""
    with suppress(ModuleNotFoundError):
        theirs = import_module("lightning_utilities.core.rank_zero").rank_zero_only
        module: Any = messages
        set_rank = messages.set_rank

        def set_both(rank: int | None) -> None:
            set_rank(rank)
            theirs.rank = messages.rank()

        module.set_rank = set_both
        theirs.rank = messages.rank()


def _ddp_kwargs(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the arguments of torch's DistributedDataParallel that the program passed."""
    unused = strategy.find_unused_parameters
    return dict(strategy.ddp_options) if unused is None else {"find_unused_parameters": unused, **strategy.ddp_options}


def _refuse_torchscript(module: TrainingModule, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{type(module).__name__}.to_torchscript is not available, because PyTorch has deprecated TorchScript. Use "
        "torch.export.export(network, example_inputs), module.to_onnx(path), or torch.jit.trace(network, "
        "example_inputs) with a network in the module."
    )


def _refuse_tensorrt(module: TrainingModule, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{type(module).__name__}.to_tensorrt is not available. Compile a network in the module with "
        "torch_tensorrt.compile(network, inputs=example_inputs), or use module.to_onnx(path)."
    )
