"""Callback that prunes parameters during training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: A module, and the name of one of its parameters.
Pair = tuple[nn.Module, str]

_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "l1_unstructured": prune.L1Unstructured,
    "random_unstructured": prune.RandomUnstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
}


class ModelPruning(Callback):
    """Set the least important weights to zero at the end of each epoch, and keep them at zero.

    The callback uses ``torch.nn.utils.prune``: during training, a pruned ``weight`` is computed from the parameter
    ``weight_orig`` and the buffer ``weight_mask``. Checkpoints contain the pruned weights under their plain names, and
    also the masks, so that a resumed fit continues exactly.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``, ``"random_structured"``, a
            subclass of ``BasePruningMethod`` (with ``use_global_unstructured``) or a function
            ``fn(module, name, amount)`` (without it).
        parameters_to_prune: pairs of a module and a parameter name; None means all parameters with a name in
            ``parameter_names``.
        parameter_names: names of the parameters to prune: ``"weight"``, ``"bias"`` or both (the default).
        use_global_unstructured: rank the weights of all parameters together instead of within each tensor.
        amount: a fraction (float) or a number (int) of the remaining weights, or a function of the epoch.
        apply_pruning: whether to prune, or a function that takes the epoch and returns whether to prune.
        make_pruning_permanent: when training ends, turn the pruned weights back into plain parameters.
        use_lottery_ticket_hypothesis: after each pruning, reset the remaining weights to their values at the start of
            training. To do so only in some epochs, pass a function that returns True for those epochs.
        resample_parameters: with ``use_lottery_ticket_hypothesis``, reset the remaining weights to new random values
            (from the module's ``reset_parameters``) instead of their initial values.
        pruning_dim: dimension of the rows or channels that a structured method removes.
        pruning_norm: the order ``n`` of the norm that ``"ln_structured"`` uses.
        verbose: 1 prints the fraction of pruned weights after each pruning; 2 also prints it for each parameter.
        prune_on_train_epoch_end: prune at the end of training epochs (True) or at the end of validations (False).

    Raises:
        ValueError: if the arguments contradict each other.
        TypeError: if ``pruning_fn`` is none of the listed kinds.
        RuntimeError: if the parameters are sharded.
    """

    #: Names of the parameters that are pruned by default.
    PARAMETER_NAMES: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Sequence[Pair] | None = None,
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        for name in parameter_names or ():
            if name not in self.PARAMETER_NAMES:
                raise ValueError(messages.unknown("ModelPruning(parameter_names=...) name", name, self.PARAMETER_NAMES))
        if verbose not in (0, 1, 2):
            raise ValueError(f"ModelPruning: verbose={verbose!r} must be 0 (nothing), 1 (totals) or 2 (everything).")
        self.pruning_fn = _function(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._method_name = _name(pruning_fn)
        self.use_global_unstructured = use_global_unstructured
        self.parameter_names = tuple(parameter_names or self.PARAMETER_NAMES)
        self.amount = amount
        self.verbose = verbose
        self._given = parameters_to_prune
        self._parameters_to_prune: list[Pair] = []
        self._applies, self._permanent = apply_pruning, make_pruning_permanent
        self._lottery, self._resample = use_lottery_ticket_hypothesis, resample_parameters
        self._at_train_epoch_end = prune_on_train_epoch_end
        self._trainer: Trainer | None = None
        self._original: dict[nn.Module, nn.Module] = {}
        self._last: dict[str, dict[str, Tensor]] = {}
        self._load_hooks: list[Any] = []

    # ---- what to prune -----------------------------------------------------------------------------------------------

    def filter_parameters_to_prune(self, parameters_to_prune: Sequence[Pair] = ()) -> Sequence[Pair]:
        """Return the parameters to prune; override this method to leave some out."""
        return parameters_to_prune

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module,
        parameters_to_prune: Sequence[Pair] | None = None,
        parameter_names: Sequence[str] = (),
    ) -> list[Pair]:
        """Check and return the given pairs; if none are given, return all parameters named in ``parameter_names``.

        Raises:
            ValueError: if a pair does not refer to a parameter of a submodule, or if there is nothing to prune.
        """
        parts = {part: name for name, part in pl_module.named_modules() if name}
        if not parameters_to_prune:
            wanted = parameter_names or ModelPruning.PARAMETER_NAMES
            found = [(part, name) for part in parts for name in wanted if _is_parameter(part, name)]
            if not found:
                raise ValueError(
                    f"ModelPruning has nothing to prune, because no submodule of {type(pl_module).__name__} has a "
                    f"parameter named {messages.names(wanted)}. Pass parameters_to_prune=[(module, name), ...]."
                )
            return found
        for part, name in parameters_to_prune:
            if part not in parts:
                raise ValueError(
                    f"ModelPruning(parameters_to_prune=...) contains a {type(part).__name__} that is not a submodule "
                    f"of the {type(pl_module).__name__} being trained. Choose a submodule of the module that you pass "
                    "to fit."
                )
            if not _is_parameter(part, name):
                own = [known for known, _ in part.named_parameters(recurse=False)]
                raise ValueError(
                    f"ModelPruning(parameters_to_prune=...), submodule {parts[part]!r}: "
                    f"{messages.unknown('parameter', name, own)}"
                )
        return list(parameters_to_prune)

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage != "fit":
            return
        self._trainer, self._last = trainer, {}
        found = self.sanitize_parameters_to_prune(pl_module, self._given, self.parameter_names)
        self._parameters_to_prune = list(self.filter_parameters_to_prune(found))
        parts = dict.fromkeys(part for part, _ in self._parameters_to_prune)
        self._original = {part: _plain_copy(part) for part in parts} if self._lottery else {}
        for handle in self._load_hooks:
            handle.remove()
        self._load_hooks = [part.register_load_state_dict_pre_hook(_load_plain) for part in parts]

    # ---- pruning -----------------------------------------------------------------------------------------------------

    def apply_pruning(self, amount: float) -> None:
        """Prune ``amount`` of the remaining weights."""
        pairs = self._parameters_to_prune
        if any(hasattr(_trained(part, name), "to_local") for part, name in pairs):
            raise RuntimeError(
                "ModelPruning cannot prune parameters that are sharded across processes. Train with strategy='ddp' or "
                "on a single device, or remove the callback."
            )
        before = self._zeros()
        with torch.inference_mode(False), torch.no_grad():  # validations run in inference mode
            for part, name in pairs:
                _refresh(part, name)
            with _KeptOrder(pairs):
                if self.use_global_unstructured:
                    prune.global_unstructured(pairs, pruning_method=self.pruning_fn, amount=amount)
                else:
                    for part, name in pairs:
                        self.pruning_fn(part, name=name, amount=amount)
            self._agree("_mask")
        if self.verbose:
            self._report(before, self._zeros(), amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the remaining weights to their initial values, or to new random ones."""
        first = {part: _resampled(kept) if self._resample else kept for part, kept in self._original.items()}
        with torch.inference_mode(False), torch.no_grad():
            for part, name in self._parameters_to_prune:
                _trained(part, name).copy_(getattr(first[part], name))
            if self._resample:
                self._agree("_orig")
            for part, name in self._parameters_to_prune:
                _refresh(part, name)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Turn the pruned weights of a module and its submodules into plain parameters."""
        pairs = [pair for part in module.modules() for pair in _pruned_in(part)]
        with _KeptOrder(pairs):
            for part, name in pairs:
                prune.remove(part, name)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._at_train_epoch_end:
            self._run(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not self._at_train_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._run(trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._permanent:
            self._last = self._state(pl_module)
            self.make_pruning_permanent(pl_module)

    def _run(self, epoch: int) -> None:
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not amount or not (self._applies(epoch) if callable(self._applies) else self._applies):
            return
        self.apply_pruning(amount)
        if self._lottery(epoch) if callable(self._lottery) else self._lottery:
            self.apply_lottery_ticket_hypothesis()

    def _agree(self, suffix: str) -> None:
        """Copy rank 0's masks or values to every rank, because random numbers differ between processes."""
        if self._trainer is not None and self._trainer.world_size > 1:
            for part, name in self._parameters_to_prune:
                own = getattr(part, name + suffix, None)
                if own is not None:
                    own.copy_(self._trainer.strategy.broadcast_tensor(own.detach().clone()))

    def _zeros(self) -> list[tuple[int, int]]:
        """Return the number of masked weights and the total number of weights for each parameter."""
        pairs = self._parameters_to_prune
        masks = [getattr(part, f"{name}_mask", None) for part, name in pairs]
        sizes = [_trained(part, name).numel() for part, name in pairs]
        return [(0 if mask is None else int((mask == 0).sum()), n) for mask, n in zip(masks, sizes, strict=True)]

    def _report(self, before: list[tuple[int, int]], after: list[tuple[int, int]], amount: float) -> None:
        total = sum(size for _, size in after)
        was, now = sum(zeros for zeros, _ in before), sum(zeros for zeros, _ in after)
        messages.info(
            f"Applied `{self._method_name}`. Pruned: {was}/{total} ({was / total:.2%}) -> {now}/{total} "
            f"({now / total:.2%})"
        )
        if self.verbose < 2:
            return
        for (part, name), (was, size), (now, _) in zip(self._parameters_to_prune, before, after, strict=True):
            messages.info(
                f"Applied `{self._method_name}` to `{part!r}.{name}` with amount={amount}. Pruned: {was} "
                f"({was / size:.2%}) -> {now} ({now / size:.2%})"
            )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        for prefix, part in pl_module.named_modules():
            for _, name in _pruned_in(part):
                key = f"{prefix}.{name}" if prefix else name
                if f"{key}_orig" in weights:
                    weights[key] = weights.pop(f"{key}_orig") * weights.pop(f"{key}_mask")
        if "optimizer_states" in checkpoint:
            section = checkpoint["paceline"].setdefault("pruning", {"masks": {}, "masked": {}, "original": {}})
            for kind, values in (self._last or self._state(pl_module)).items():
                section[kind].update(values)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        section = checkpoint.get("paceline", {}).get("pruning")
        if section is None:
            return
        names = {part: name for name, part in pl_module.named_modules()}
        with torch.no_grad():
            for part, name in self._parameters_to_prune:
                key = f"{names[part]}.{name}"
                if key in section["masks"]:
                    mask = section["masks"][key].to(_trained(part, name))
                    if not _is_pruned(part, name):
                        with _KeptOrder([(part, name)]):
                            prune.identity(part, name)
                    getattr(part, f"{name}_mask").copy_(mask)
                    _trained(part, name)[mask == 0] = section["masked"][key].to(mask)
                    _refresh(part, name)
                if key in section["original"] and part in self._original:
                    getattr(self._original[part], name).copy_(section["original"][key])

    def _state(self, pl_module: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Return the state that the plain weights do not contain: masks, masked values and initial values."""
        names = {part: name for name, part in pl_module.named_modules()}
        state: dict[str, dict[str, Tensor]] = {"masks": {}, "masked": {}, "original": {}}
        for part, name in self._parameters_to_prune:
            key = f"{names[part]}.{name}"
            if _is_pruned(part, name):
                mask = getattr(part, f"{name}_mask") != 0
                state["masks"][key] = mask.cpu()
                state["masked"][key] = _trained(part, name).detach()[~mask].cpu()
            if part in self._original:
                state["original"][key] = getattr(self._original[part], name).detach().clone()
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None}


class _KeptOrder:
    """Context manager that restores the order of the parameters, because optimizer states depend on it."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._order = {part: [_plain(part, n) for n, _ in part.named_parameters(recurse=False)] for part, _ in pairs}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for part, order in self._order.items():
            now = {_plain(part, name): name for name, _ in part.named_parameters(recurse=False)}
            for plain in order:
                parameter = getattr(part, now[plain])
                delattr(part, now[plain])
                part.register_parameter(now[plain], parameter)


def _plain(part: nn.Module, name: str) -> str:
    stem = name.removesuffix("_orig")
    return stem if stem != name and hasattr(part, f"{stem}_mask") else name


def _is_pruned(part: nn.Module, name: str) -> bool:
    return hasattr(part, f"{name}_orig") and hasattr(part, f"{name}_mask")


def _is_parameter(part: nn.Module, name: str) -> bool:
    return isinstance(getattr(part, name, None), nn.Parameter) or _is_pruned(part, name)


def _pruned_in(part: nn.Module) -> list[Pair]:
    names = [name.removesuffix("_mask") for name, _ in part.named_buffers(recurse=False) if name.endswith("_mask")]
    return [(part, name) for name in names if _is_pruned(part, name)]


def _trained(part: nn.Module, name: str) -> Tensor:
    """Return the parameter that the optimizer updates."""
    return getattr(part, f"{name}_orig") if _is_pruned(part, name) else getattr(part, name)


def _refresh(part: nn.Module, name: str) -> None:
    """Recompute a pruned weight now; torch would do so only in the next forward pass."""
    if _is_pruned(part, name):
        setattr(part, name, (getattr(part, f"{name}_mask") * getattr(part, f"{name}_orig")).detach())


def _plain_copy(part: nn.Module) -> nn.Module:
    """Return an unpruned copy of a module, on the CPU."""
    for _, name in _pruned_in(part):
        _refresh(part, name)  # a tensor with a graph cannot be copied
    copied = copy.deepcopy(part).cpu()
    for _, name in _pruned_in(copied):
        prune.remove(copied, name)
    return copied


def _resampled(part: nn.Module) -> nn.Module:
    fresh = copy.deepcopy(part)
    reset = getattr(fresh, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"ModelPruning(resample_parameters=True) resets parameters to new random values, but {type(part).__name__} "
            "has no reset_parameters(). Define that method, or leave this module out of parameters_to_prune."
        )
    reset()
    return fresh


def _load_plain(part: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load plain weights into a pruned module; ``on_load_checkpoint`` then restores the masks."""
    for _part, name in _pruned_in(part):
        if prefix + name in state_dict:
            weight = state_dict.pop(prefix + name)
            state_dict[f"{prefix}{name}_orig"], state_dict[f"{prefix}{name}_mask"] = weight, torch.ones_like(weight)


def _name(pruning_fn: Any) -> str:
    if isinstance(pruning_fn, str):
        return _METHODS[pruning_fn].__name__
    return getattr(pruning_fn, "__name__", type(pruning_fn).__name__)


def _function(given: Any, everywhere: bool, dim: int | None, norm: int | None) -> Any:
    """Return the class of the method if all parameters are pruned together, else ``fn(module, name=, amount=)``."""
    if isinstance(given, str):
        _check_name(given, dim, norm)
    elif not callable(given):
        raise TypeError(
            f"ModelPruning: pruning_fn={given!r} is {messages.a(given)}. Pass {messages.names(tuple(_METHODS))}, a "
            "subclass of torch.nn.utils.prune.BasePruningMethod, or a function fn(module, name, amount)."
        )
    if everywhere:
        return _method(given)
    if inspect.isclass(given):
        raise ValueError(
            f"ModelPruning: {_name(given)} is a class, which prunes all parameters together. Pass "
            "use_global_unstructured=True, or a function fn(module, name, amount)."
        )
    if not isinstance(given, str):
        return given
    function, more = getattr(prune, given), {}
    if given.endswith("_structured"):
        more = {"dim": dim} if given == "random_structured" else {"dim": dim, "n": norm}
    return partial(function, **more)


def _check_name(name: str, dim: int | None, norm: int | None) -> None:
    if name not in _METHODS:
        raise ValueError(
            messages.unknown("pruning_fn", name, tuple(_METHODS), ", or pass a BasePruningMethod class or a function")
        )
    if name.endswith("_structured") and dim is None:
        raise ValueError(
            f"ModelPruning({name!r}) needs pruning_dim, the dimension of the rows or channels to remove. Pass "
            "pruning_dim=0, for example."
        )
    if name == "ln_structured" and norm is None:
        raise ValueError(
            "ModelPruning('ln_structured') needs pruning_norm, the order n of the Ln norm. Pass pruning_norm=2, for "
            "example."
        )


def _method(given: Any) -> type[prune.BasePruningMethod]:
    method = _METHODS.get(given, given) if isinstance(given, str) else given
    if not (inspect.isclass(method) and issubclass(method, prune.BasePruningMethod)):
        raise ValueError(
            f"ModelPruning: {_name(given)} is a function, which prunes one parameter at a time. Pass "
            "use_global_unstructured=False, or a subclass of torch.nn.utils.prune.BasePruningMethod."
        )
    if getattr(method, "PRUNING_TYPE", None) != "unstructured":
        raise ValueError(
            f"ModelPruning: {_name(given)} is a structured method, which cannot compare all parameters with each "
            "other. Pass use_global_unstructured=False."
        )
    return method
