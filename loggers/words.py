"""The words in a logged name, as a person reads them."""

from __future__ import annotations

import re
from functools import lru_cache

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_WORD = re.compile(r"[^a-z0-9]+")
_DIGITS = re.compile(r"\d+")
_STAGE = re.compile(r"(?:train|val|test)(?=[a-z])")


@lru_cache(1024)
def words_in(name: str) -> frozenset[str]:
    """The words of a name in lower case, with and without digits: ``"val/MSELoss2"`` holds ``val``, ``mse``, ``loss``.

    Humps divide words and do not (``mIoU`` is ``miou`` too), and a stage at the beginning is a word (``valacc``).
    """
    parts = [part for text in (_CAMEL.sub(" ", name), name) for part in _NO_WORD.split(text.lower())]
    words = {*parts, *(word for part in parts for word in _DIGITS.split(part))}
    return frozenset(words | {_STAGE.sub("", word, count=1) for word in words}) - {""}
