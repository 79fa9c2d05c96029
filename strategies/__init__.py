"""Where tensors live and who talks to whom."""

from .base import Strategy as Strategy
from .choose import choose_strategy as choose_strategy
from .precision import MixedPrecision as MixedPrecision
from .precision import Precision as Precision
from .precision import TruePrecision as TruePrecision
from .single_device import SingleDevice as SingleDevice

__all__ = ["MixedPrecision", "Precision", "SingleDevice", "Strategy", "TruePrecision", "choose_strategy"]
