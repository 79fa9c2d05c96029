"""A run in processes that were started for it: what rank 0 did there is brought back to the Trainer that asked."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..strategies.distributed import leave
from .seed import set_random_states
from .state import RunState

if TYPE_CHECKING:
    from .trainer import Request, Trainer


def run_and_report(trainer: Trainer, request: Request, random: dict[str, Any]) -> bytes | None:
    """Run a request in this process, one of those started for it. Rank 0 returns a report for :func:`take_over`.

    Args:
        trainer: as it was where the run was asked for.
        request: what to run.
        random: the random states there, which a fresh process goes on from.
    """
    set_random_states(random)
    result = trainer._run(request)
    weights = trainer.strategy.model_state(trainer.training_module)
    report = _report(trainer, result, weights) if trainer.is_global_zero else None
    leave()
    return report


def take_over(trainer: Trainer, request: Request, report: bytes) -> Any:
    """Put the Trainer and the module of this process where the run left them; return what the run returned."""
    found = _Reader(io.BytesIO(report), _anchors(trainer, request.module or trainer._module)).load()
    if request.module is not None:
        trainer._module = trainer.model = request.module
        request.module.trainer = trainer
    for name, value in found["state"].items():
        setattr(trainer.state, name, value)
    trainer.training_module.load_state_dict(found["weights"])  # whole in this process, whatever the strategy
    trainer._metrics.load_state_dict(found["metrics"])
    trainer._metrics.sent = found["sent"]
    for callback, attributes in zip(trainer.callbacks, found["callbacks"], strict=False):
        vars(callback).update(attributes)
    trainer.predictions, trainer.predict_batch_indices = found["predictions"]
    return found["result"]


def _report(trainer: Trainer, result: Any, weights: dict[str, Any]) -> bytes:
    anchors = _anchors(trainer, trainer.training_module)
    report = {
        "result": result,
        "weights": weights,
        "state": {name: getattr(trainer.state, name) for name in RunState.__slots__},
        "metrics": trainer._metrics.state_dict(),
        "sent": trainer._metrics.sent,
        "callbacks": [_portable(callback, anchors) for callback in trainer.callbacks],
        "predictions": (trainer.predictions, trainer.predict_batch_indices),
    }
    report = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), report)
    return _pickled(report, anchors)


def _portable(callback: Any, anchors: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a callback that can be brought to another process."""
    kept = {}
    for name, value in vars(callback).items():
        with suppress(Exception):  # an open file, a live display, a lock: of this process only
            _pickled(value, anchors)
            kept[name] = value
    return kept


def _anchors(trainer: Trainer, module: Any) -> dict[str, Any]:
    """Objects that both processes have and that a report only names."""
    anchors = {"trainer": trainer, "module": module, "datamodule": trainer.datamodule}
    anchors |= {f"logger {index}": logger for index, logger in enumerate(trainer.loggers)}
    anchors |= {f"callback {index}": callback for index, callback in enumerate(trainer.callbacks)}
    return {name: value for name, value in anchors.items() if value is not None}


def _pickled(value: Any, anchors: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    _Writer(stream, anchors).dump(value)
    return stream.getvalue()


class _Writer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, anchors: dict[str, Any]) -> None:
        super().__init__(stream)
        self._names = {id(value): name for name, value in anchors.items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, anchors: dict[str, Any]) -> None:
        super().__init__(stream)
        self._anchors = anchors

    def persistent_load(self, pid: str) -> Any:
        return self._anchors.get(pid)
