"""The dtypes that a run computes in; each strategy holds a Precision."""

from .base import DoublePrecision as DoublePrecision
from .base import HalfPrecision as HalfPrecision
from .base import Precision as Precision
from .base import TruePrecision as TruePrecision
from .bitsandbytes import BitsandbytesPrecision as BitsandbytesPrecision
from .choose import choose_precision as choose_precision
from .float8 import Float8Precision as Float8Precision
from .mixed import MixedPrecision as MixedPrecision
from .transformer_engine import TransformerEnginePrecision as TransformerEnginePrecision
