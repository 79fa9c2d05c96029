"""Which dtypes a run computes in; composed into a strategy."""

from .base import Precision as Precision
from .choose import choose_precision as choose_precision
from .mixed import MixedPrecision as MixedPrecision
from .true import TruePrecision as TruePrecision
