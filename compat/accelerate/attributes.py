"""Attributes of ``accelerate``'s Accelerator that programs read or set, on top of Paceline's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import messages
from ...accelerator import accelerator
from ...accelerator.kwargs_handlers import AORecipeKwargs, DistributedDataParallelKwargs, TERecipeKwargs
from ...strategies.base import Strategy
from ...strategies.ddp import DDPStrategy
from ...strategies.precision import MixedPrecision

#: Fields of ``accelerator.handlers``, with the name of the attribute that shows each one.
_FIELDS = {
    "autocast": "autocast_handler",
    "ddp": "ddp_handler",
    "grad_scaler": "scaler_handler",
    "process_group": "init_handler",
    "profile": "profile_handler",
}


class Handler:
    """Descriptor for a handler of ``kwargs_handlers``; None if there is none of its kind.

    Args:
        field: the handler's field in ``accelerator.handlers``.
    """

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, accelerator: Any, owner: type) -> Any:
        return self if accelerator is None else getattr(accelerator.handlers, self._field)

    def __set__(self, accelerator: Any, handler: Any) -> None:
        if handler is getattr(accelerator.handlers, self._field):
            return
        _apply(accelerator, self._field, handler)
        accelerator.handlers = replace(accelerator.handlers, **{self._field: handler})


def _apply(accelerator: accelerator.Accelerator, field: str, handler: Any) -> None:
    """Make a handler that a program sets take effect for the models that are prepared from now on."""
    strategy = accelerator.strategy
    if field == "autocast" and isinstance(strategy.precision, MixedPrecision):
        strategy.precision.autocast = True if handler is None else handler.enabled
        strategy.precision.cache = None if handler is None else handler.cache_enabled
    elif field == "ddp" and isinstance(strategy, DDPStrategy):
        fresh = DDPStrategy(**(handler or DistributedDataParallelKwargs()).options())
        strategy.find_unused_parameters = fresh.find_unused_parameters
        strategy.hook, strategy.ddp_options = fresh.hook, fresh.ddp_options
    elif field in ("grad_scaler", "process_group"):
        name = _FIELDS[field]
        why = "the Accelerator has already been created. Pass it as Accelerator(kwargs_handlers=[...])"
        messages.ignored("accelerator", why, **{name: handler})


def replace_scaler(strategy: Strategy, scaler: Any) -> None:
    """Make the losses of models be scaled by another ``GradScaler``.

    Raises:
        ValueError: this would turn loss scaling on or off.
        NotImplementedError: the strategy unscales gradients itself.
    """
    precision = strategy.precision
    if scaler is precision.scaler:
        return
    scales, wanted = (one is not None and one.is_enabled() for one in (precision.scaler, scaler))
    if scales is not wanted:
        how = (
            "Accelerator(mixed_precision='fp16'), which scales losses"
            if wanted
            else "Accelerator(kwargs_handlers=[GradScalerKwargs(enabled=False)]), which does not scale losses"
        )
        raise ValueError(
            f"accelerator.scaler = {scaler!r} would turn loss scaling {'on' if wanted else 'off'}, which is decided "
            f"when the Accelerator is created (mixed_precision is {precision.name!r}). Use {how}."
        )
    if not wanted:
        return
    unscales = strategy.communicates_forward or type(strategy).unscale_gradients is not Strategy.unscale_gradients
    if unscales or type(precision) is not MixedPrecision:
        raise NotImplementedError(
            f"accelerator.scaler = {scaler!r} is not supported under {type(strategy).__name__}, which unscales "
            "gradients itself. Pass the scaler's settings as Accelerator(kwargs_handlers=[GradScalerKwargs(...)])."
        )
    precision.use_scaler(scaler)


class Attributes(accelerator.Accelerator):
    """The attributes."""

    autocast_handler, ddp_handler, scaler_handler = Handler("autocast"), Handler("ddp"), Handler("grad_scaler")
    init_handler, profile_handler = Handler("process_group"), Handler("profile")
    #: Handlers that Paceline does not have, and optimizers that it does not prepare in their own way.
    fp8_recipe_handler = msamp_recipe_handler = None
    has_lomo_optimizer = delayed_fp8_autocast = False

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The settings for torchao; None if it is not used."""
        return self._recipe(AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The settings for TransformerEngine; None if it is not used."""
        return self._recipe(TERecipeKwargs)

    def _recipe(self, kind: type[Any]) -> Any:
        found = self.handlers.float8
        if found is None and self.fp8_enabled and kind is AORecipeKwargs:
            return AORecipeKwargs()
        return found if isinstance(found, kind) else None

    @property
    def fp8_enabled(self) -> bool:
        """Whether ``mixed_precision`` is ``"fp8"``."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there are settings for 8-bit products."""
        return self.fp8_enabled

    @property
    def native_amp(self) -> bool:
        """Whether models compute in fewer bits than their weights have. False turns autocast off for later models."""
        precision = self.strategy.precision
        if isinstance(precision, MixedPrecision):
            return precision.autocast
        return self.fp8_enabled

    @native_amp.setter
    def native_amp(self, enabled: bool) -> None:
        precision = self.strategy.precision
        if isinstance(precision, MixedPrecision):
            precision.autocast = enabled
        elif enabled is not self.native_amp:
            raise ValueError(
                f"accelerator.native_amp = {enabled} has no effect, because mixed_precision is "
                f"{self.mixed_precision!r}. Choose the precision when the Accelerator is created: "
                f"mixed_precision={'no' if self.fp8_enabled else 'bf16'!r}."
            )

    @property
    def scaler(self) -> Any:
        """The ``GradScaler`` for fp16; None if losses are not scaled."""
        return self.strategy.precision.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        replace_scaler(self.strategy, scaler)

    @property
    def flag_tensor(self) -> Tensor | None:
        """A tensor of shape () that is 1 after ``set_trigger``; None before it, and after ``check_trigger``."""
        return torch.ones((), dtype=torch.int64, device=self.device) if self._trigger else None

    @flag_tensor.setter
    def flag_tensor(self, flag: Tensor | None) -> None:
        self._trigger = flag is not None and bool(flag)
