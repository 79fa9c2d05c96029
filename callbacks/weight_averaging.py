"""Weight averages that are kept during training, and the callbacks that use and save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from .. import messages
from ..checkpoint.rank_files import put_back, tensors_apart, whole_buffers
from ..torch_private import own_buffers, own_modules, own_parameters
from .base import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..strategies.base import Strategy
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

AverageOne = Callable[[Tensor, Tensor, int], Tensor]
"""``avg_fn(average, current, n_averaged)`` returns the new average of one tensor, in the shape of ``average``."""
AverageMany = Callable[[list[Tensor], list[Tensor], int], None]
"""``multi_avg_fn(averages, currents, n_averaged)`` updates a list of averages in place."""

#: Key of the current weights in a checkpoint whose ``state_dict`` contains their average.
CURRENT_KEY = "current_model_state"

_HALF = (torch.float16, torch.bfloat16)


class WeightAverage:
    """Running average of a module's weights, kept in separate tensors without copying the module.

    Half-precision weights are averaged in float32, so that small updates are not rounded away. Tensors for which an
    average makes no sense (integers, such as BatchNorm's batch counter, and buffers with infinities or NaN, such as an
    attention mask) are not averaged; the module's current values are used instead.

    Args:
        module: the module whose weights are averaged.
        average: function that updates a list of averages with the current weights.
        device: device of the averages; None keeps each average on the device of its weight.
        use_buffers: also average the buffers.

    Attributes:
        n_averaged: number of updates; 0 if there is no average yet.
        held: the current weights while the module holds the averages, otherwise None.
    """

    def __init__(
        self,
        module: nn.Module,
        average: AverageMany,
        device: torch.device | None = None,
        use_buffers: bool = True,
    ) -> None:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise NotImplementedError(
                f"{type(module).__name__}'s weights cannot be averaged in a pipeline, where each process has only the "
                "weights of its own stages. Remove the callback that averages the weights, or split the model with "
                "ModelParallelStrategy(tensor_parallel=...) or data_parallel_shard instead of pipeline_parallel."
            )
        self.module = module
        self.n_averaged = 0
        self.held: list[Tensor] | None = None
        self._average = average
        self._places: list[tuple[dict[str, Tensor], str]] = []
        self._index: dict[str, int] = {}
        self._averages: list[Tensor] = []
        known: dict[int, int] = {}
        for name, owner, key in _averaged_places(module, use_buffers):
            tensor = owner[key]
            if id(tensor) not in known:
                known[id(tensor)] = len(self._averages)
                self._places.append((owner, key))
                self._averages.append(_copy_for_average(tensor, device))
            self._index[name] = known[id(tensor)]
        self._groups = self._group()

    def _group(self) -> list[tuple[list[Tensor], list[tuple[dict[str, Tensor], str]], bool]]:
        """Group averages by type, device and dtype; list each group's weights and whether they must be converted.

        Sharded parameters are DTensors, and no operation accepts them together with plain buffers.
        """
        groups: dict[Any, tuple[list[Tensor], list[tuple[dict[str, Tensor], str]], bool]] = {}
        for average, (owner, key) in zip(self._averages, self._places, strict=True):
            differs = owner[key].dtype != average.dtype or owner[key].device != average.device
            group = groups.setdefault((type(average), average.device, average.dtype, differs), ([], [], differs))
            group[0].append(average)
            group[1].append((owner, key))
        return list(groups.values())

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the module's weights; the first update copies them."""
        for averages, places, convert in self._groups:
            current = [owner[key].detach() for owner, key in places]
            if convert:
                current = [c.to(a.device, a.dtype) for a, c in zip(averages, current, strict=True)]
            if self.n_averaged:
                self._average(averages, current, self.n_averaged)
            else:
                for a, c in zip(averages, current, strict=True):
                    a.copy_(c)
        self.n_averaged += 1

    @torch.no_grad()
    def show(self) -> None:
        """Replace the module's weights with any averages, and keep the current weights for :meth:`hide`."""
        if self.held is None and self.n_averaged:
            pairs = list(zip(self._places, self._averages, strict=True))
            with torch.inference_mode(False):
                self.held = [owner[key].detach().to(average.device, copy=True) for (owner, key), average in pairs]
            for (owner, key), average in pairs:
                owner[key].copy_(average)

    @torch.no_grad()
    def hide(self) -> None:
        """Restore the weights that :meth:`show` kept. Can be called again if interrupted."""
        if self.held is not None:
            for (owner, key), weight in zip(self._places, self.held, strict=True):
                owner[key].copy_(weight)
            self.held = None

    def averages(self) -> dict[str, Tensor]:
        """Return the averages by weight name. Tied weights appear under each of their names."""
        return {name: self._averages[index] for name, index in self._index.items()}

    def average_state(self, strategy: Strategy) -> dict[str, Any]:
        """Return the averages as a full ``state_dict`` that contains only averaged tensors."""
        return strategy.model_state(_tree(self.averages()))

    def held_state(self, strategy: Strategy) -> dict[str, Any]:
        """Return the weights, if any, that :meth:`show` set aside, in the form of :meth:`average_state`."""
        if self.held is None:
            return {}
        return strategy.model_state(_tree({name: self.held[index] for name, index in self._index.items()}))

    def held_buffers(self) -> dict[str, Tensor]:
        """Return the buffers among the weights that :meth:`show` set aside; an empty dict if there are none."""
        return {} if self.held is None else self._buffers(self.held)

    def buffers(self) -> dict[str, Tensor]:
        """Return the averages of buffers, which each process updates with its own values."""
        return self._buffers(self._averages)

    def _buffers(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: values[self._index[name]] for name in self._index.keys() & whole_buffers(self.module).keys()}

    def load(self, strategy: Strategy, state: Mapping[str, Any], n_averaged: int) -> None:
        """Load averages from a ``state_dict``; averages that it does not contain are left unchanged."""
        averages = self.averages()
        known = {name: value for name, value in state.items() if name in averages}
        strategy.load_model_state(_tree(averages), known, strict=False)
        self.n_averaged = n_averaged


def _averaged_places(module: nn.Module, use_buffers: bool) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, owner and key of every tensor to average. Tied tensors appear once per name."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for key, parameter in own_parameters(owner).items():
            if hasattr(parameter, "ds_id"):
                raise NotImplementedError(
                    "Weights cannot be averaged with DeepSpeed stage 3, because each rank holds only a shard of "
                    f"{dot + key}. Use strategy='deepspeed_stage_2' or 'fsdp'."
                )
            if parameter is not None and (parameter.is_floating_point() or parameter.is_complex()):
                yield dot + key, own_parameters(owner), key
        for key, buffer in own_buffers(owner).items() if use_buffers else ():
            if buffer is not None and (buffer.is_floating_point() or buffer.is_complex()) and _is_finite(buffer):
                yield dot + key, own_buffers(owner), key


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())  # waits for the device, once per fit


def _copy_for_average(tensor: Tensor, device: torch.device | None) -> Tensor:
    dtype = torch.float32 if tensor.dtype in _HALF else tensor.dtype
    return tensor.detach().to(device or tensor.device, dtype, copy=True)


def _tree(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a plain module with tensors under their dotted names, so that a strategy can gather or load them."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        node = root
        for part in path:
            if part not in own_modules(node):
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node.register_buffer(key, tensor)
    return root


def one_by_one(avg_fn: AverageOne, averages: list[Tensor], current: list[Tensor], n_averaged: int) -> None:
    """Update each average with ``avg_fn``, one tensor at a time."""
    for a, c in zip(averages, current, strict=True):
        a.copy_(avg_fn(a, c, n_averaged))


def equal_weights(averages: list[Tensor], current: list[Tensor], n_averaged: int) -> None:
    """Update the averages as arithmetic means of all weights so far."""
    get_swa_multi_avg_fn()(averages, current, n_averaged)


def _exponential(decay: float, averages: list[Tensor], current: list[Tensor], n_averaged: int) -> None:
    get_ema_multi_avg_fn(decay)(averages, current, n_averaged)


def checked_device(owner: str, device: torch.device | str | int | None) -> torch.device | None:
    """Convert ``device`` to a ``torch.device``; raise if it is not a valid device."""
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, (str, int)) and not isinstance(device, bool):
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ValueError(
                f"{owner}: device={device!r} is not a valid PyTorch device. Pass 'cpu', 'cuda', 'cuda:0' or a "
                "torch.device, or None for the device of the weights."
            ) from error
    raise TypeError(
        f"{owner}: device={device!r} is {messages.a(device)}, not a device. "
        "Pass a name such as 'cpu', a torch.device, or None for the device of the weights."
    )


def checked_count(owner: str, name: str, value: Any, minimum: int) -> int:
    """Return ``value`` if it is an integer of at least ``minimum``, else raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{owner}: {name}={value!r} is {messages.a(value)}, but must be an integer of at least {minimum}."
        )
    if value < minimum:
        raise ValueError(f"{owner}: {name}={value} must be at least {minimum}.")
    return value


class WeightAveraging(Callback):
    """Keep an average of the weights and use it for validation, for checkpoints and as the result of the fit.

    A checkpoint's ``state_dict`` contains the averages, and its ``current_model_state`` contains the current weights,
    so a resumed run continues with both. When the fit ends, the module has the averages; after an exception, it has the
    current weights.

    The average is updated after every optimizer step: once per accumulation window, and not after a step that fp16
    skipped. Override :meth:`should_update` to update at other times. Before the first update, the weights themselves
    are used. Averages of half-precision weights are kept and saved in float32.

    Args:
        device: device of the average; None means the device of the weights. ``"cpu"`` saves GPU memory, but each update
            then copies the weights and waits for the device.
        use_buffers: also average floating-point buffers (BatchNorm statistics). If False, the module's current buffers
            are used; ``torch.optim.swa_utils.update_bn`` can re-estimate them.
        **kwargs: ``avg_fn(average, current, n_averaged)`` or ``multi_avg_fn(averages, currents, n_averaged)``, as in
            ``torch.optim.swa_utils.AveragedModel``. If neither is passed, all updates have equal weight.

    Raises:
        TypeError: for any other keyword, or a ``device`` of the wrong type.
        ValueError: if both averaging functions are passed, or for an unknown device.
    """

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        name = type(self).__name__
        for key, value in kwargs.items():
            self._check_argument(key, value)
        if kwargs.get("avg_fn") is not None and kwargs.get("multi_avg_fn") is not None:
            raise ValueError(
                f"{name} got both avg_fn and multi_avg_fn, but only one of them can compute the average. Pass avg_fn "
                "to average one tensor at a time, or multi_avg_fn to average a list of tensors."
            )
        self._device = checked_device(name, device)
        self._use_buffers = use_buffers
        self._avg_fn: AverageOne | None = kwargs.get("avg_fn")
        self._multi_avg_fn: AverageMany | None = kwargs.get("multi_avg_fn")
        self._forget()

    def _check_argument(self, key: str, value: Any) -> None:
        name = type(self).__name__
        if key not in ("avg_fn", "multi_avg_fn"):
            raise TypeError(
                f"{name} has no argument {key!r}.{messages.did_you_mean(key, _ARGUMENTS)} "
                f"Choose {messages.names(_ARGUMENTS)}."
            )
        if value is not None and not callable(value):
            raise TypeError(
                f"{name}: {key}={value!r} is not callable. Pass a function such as "
                "torch.optim.swa_utils.get_ema_multi_avg_fn(0.99) for multi_avg_fn, or None for the arithmetic mean."
            )

    def _forget(self) -> None:
        self._average: WeightAverage | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._restored: dict[str, Any] = {}
        self._last_step = 0
        self._last_epoch = -1
        self._final = False
        self._previous_step = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True if the average should be updated now; by default, after every optimizer step.

        Args:
            step_idx: index (0-based) of the optimizer step that has just run; None when an epoch has ended.
            epoch_idx: index (0-based) of the epoch that has just ended; None after a step.
        """
        return step_idx is not None

    @property
    def n_averaged(self) -> int:
        """The number of updates of the average in the current or last fit."""
        if self._average is None:
            return 0 if self._loaded is None else self._restored["n_averaged"]
        return self._average.n_averaged

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage != "fit":
            return
        others = [type(c).__name__ for c in trainer.callbacks if isinstance(c, WeightAveraging) and c is not self]
        if others:
            raise ValueError(
                f"Trainer(callbacks=...) contains {type(self).__name__} and {messages.names(others, 'and')}, but only "
                "one average can replace the weights in validation and checkpoints. Keep only one of these callbacks."
            )
        self._forget()

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._average = WeightAverage(pl_module, self._averaging(), self._device, self._use_buffers)
        if self._loaded is not None:
            self._average.load(trainer.strategy, self._loaded, self._restored["n_averaged"])
            of_ranks = self._restored.get("buffers", [])
            if len(of_ranks) == trainer.world_size:
                put_back(whole_buffers(_tree(self._average.buffers())), of_ranks[trainer.global_rank])
            self._loaded = None

    def _averaging(self) -> AverageMany:
        if self._avg_fn is not None:
            return partial(one_by_one, self._avg_fn)
        return self._multi_avg_fn or equal_weights

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        state = trainer.state
        if "latest_step" not in self._restored:
            self._last_step, self._last_epoch = state.global_step, state.epoch - 1
        # Make up for updates that were still due when a callback before this one wrote the checkpoint.
        self._step_made(state.global_step)
        self._epoch_ended(state.epoch if state.epoch_done else state.epoch - 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Mapping[str, Any] | None, batch: Any, batch_idx: int
    ) -> None:
        state = trainer.state
        if state.global_step != self._last_step:
            self._step_made(state.global_step)

    def _step_made(self, step: int) -> None:
        if step == self._last_step:
            return
        self._previous_step, self._last_step = self._last_step, step
        if self.should_update(step_idx=step - 1) and self._average is not None:
            self._average.update()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._epoch_ended(trainer.current_epoch)

    def _epoch_ended(self, epoch: int) -> None:
        if epoch <= self._last_epoch:
            return
        self._last_epoch = epoch
        if self.should_update(epoch_idx=epoch) and self._average is not None:
            self._average.update()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn == "fit" and self._average is not None:
            self._average.show()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._hide()

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._average is None:
            return
        if not self._average.n_averaged:
            messages.warn(
                f"{type(self).__name__} never updated its average in {trainer.state.global_step} "
                f"step{'' if trainer.state.global_step == 1 else 's'}, so {type(pl_module).__name__} keeps its last "
                "weights. Train longer, or start the updates earlier."
            )
        self._finish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finish(trainer, pl_module)  # for a resumed fit with nothing left to train

    def _finish(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._average is not None and not self._final:
            self._average.show()
            trainer.strategy.before_evaluation(pl_module)  # each rank has averaged its own buffers
            self._final = True

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        self._hide()

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._hide()

    def _hide(self) -> None:
        if self._average is not None and not self._final:
            self._average.hide()

    def state_dict(self) -> dict[str, Any]:
        return {"n_averaged": self.n_averaged, "latest_step": self._last_step, "latest_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        self._last_step = state_dict.get("latest_step", self._last_step)
        self._last_epoch = state_dict.get("latest_epoch", self._last_epoch)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        average = self._average
        if average is None or average.module is not pl_module or not average.n_averaged:
            return
        state = checkpoint["state_dict"]
        if "callbacks" in checkpoint:  # otherwise, the file contains only weights
            checkpoint[CURRENT_KEY] = _replaced(state, average.held_state(trainer.strategy))
            save_own_buffers(trainer, checkpoint, average.held_buffers())
            of_ranks = trainer.strategy.gather_objects(tensors_apart(average.buffers(), trainer.strategy))
            if any(of_ranks):
                checkpoint["callbacks"][self.state_key]["buffers"] = of_ranks
        if not self._final:
            checkpoint["state_dict"] = _replaced(state, average.average_state(trainer.strategy))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if CURRENT_KEY in checkpoint:
            load_current(trainer, pl_module, checkpoint)
        if own and own["n_averaged"] and CURRENT_KEY in checkpoint:
            self._loaded = checkpoint["state_dict"]
        elif not own:
            messages.info(
                f"The checkpoint contains no average from {type(self).__name__}, so a new average starts from the "
                "resumed weights."
            )


_ARGUMENTS = ("device", "use_buffers", "avg_fn", "multi_avg_fn")


def _replaced(state: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the tensors in ``values`` replaced; names that are not in ``state`` are not added."""
    return {name: values.get(name, value) for name, value in state.items()}


def load_current(trainer: Trainer, pl_module: TrainingModule, checkpoint: Mapping[str, Any]) -> None:
    """Load the current weights into a module, replacing the averages that were loaded from ``state_dict``."""
    trainer.strategy.load_model_state(pl_module, checkpoint[CURRENT_KEY], strict=pl_module.strict_loading is not False)


def save_own_buffers(trainer: Trainer, checkpoint: Mapping[str, Any], held: Mapping[str, Tensor]) -> None:
    """Save each rank's own values of the buffers that now hold averages in the module; every rank must call this."""
    if held:
        own = trainer.strategy.gather_objects(tensors_apart(held, trainer.strategy))
        for entry, values in zip(checkpoint["paceline"]["ranks"], own, strict=True):
            entry["buffers"] = {n: value for n, value in entry["buffers"].items() if n not in held} | values


class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    At the first update, the average is a copy of the weights. :class:`WeightAveraging` describes how the average is
    used.

    Args:
        device: device of the average; None means the device of the weights.
        use_buffers: also average floating-point buffers (BatchNorm statistics).
        decay: fraction of the average to keep at each update, in [0, 1].
        update_every_n_steps: number of optimizer steps from one update to the next.
        update_starting_at_step: the optimizer step (0-based) of the first update; None means the first step.
        update_starting_at_epoch: also update at the end of each epoch from this one on (0-based); None means never.
        **kwargs: accepts no further arguments; it exists to report misspelled ones.

    Raises:
        TypeError: for an argument of the wrong type, or an averaging function (use :class:`WeightAveraging` for that).
        ValueError: for an argument out of range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if isinstance(decay, bool) or not isinstance(decay, (int, float)):
            raise TypeError(
                f"{name}: decay={decay!r} is {messages.a(decay)}, but decay is the fraction of the average to keep at "
                "each update. Pass a number from 0 to 1, such as 0.999."
            )
        if not 0 <= decay <= 1:
            raise ValueError(
                f"{name}: decay={decay} is outside [0, 1]. Pass the fraction of the average to keep at each update, "
                "such as 0.999."
            )
        super().__init__(device, use_buffers, **kwargs)
        self.decay = float(decay)
        self.update_every_n_steps = checked_count(name, "update_every_n_steps", update_every_n_steps, 1)
        self.update_starting_at_step = _optional_index(name, "update_starting_at_step", update_starting_at_step)
        self.update_starting_at_epoch = _optional_index(name, "update_starting_at_epoch", update_starting_at_epoch)

    def _check_argument(self, key: str, value: Any) -> None:
        if key in ("avg_fn", "multi_avg_fn"):
            raise TypeError(
                f"{type(self).__name__} got {key}, but it always computes its average with decay. To use your own "
                f"function, pass it to WeightAveraging({key}=...)."
            )
        choices: Sequence[str] = ("decay", "update_every_n_steps", "update_starting_at_step")
        choices = (*_ARGUMENTS[:2], *choices, "update_starting_at_epoch")
        raise TypeError(
            f"{type(self).__name__} has no argument {key!r}.{messages.did_you_mean(key, choices)} "
            f"Choose {messages.names(choices)}."
        )

    def _averaging(self) -> AverageMany:
        return partial(_exponential, self.decay)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True every ``update_every_n_steps`` steps from the first update on, and after the chosen epochs."""
        if step_idx is None:
            first = self.update_starting_at_epoch
            return first is not None and epoch_idx is not None and epoch_idx >= first
        start, every = self.update_starting_at_step or 0, self.update_every_n_steps
        # With several optimizers, a batch runs several steps, so the step to update at may fall between two calls.
        return (
            step_idx >= start and (step_idx - start) // every > (max(self._previous_step, start) - 1 - start) // every
        )


def _optional_index(owner: str, name: str, value: Any) -> int | None:
    return None if value is None else checked_count(owner, name, value, 0)
