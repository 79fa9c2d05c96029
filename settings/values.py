"""Parsers for the values of settings, whether they come from code, a flag, a variable or a file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from .. import messages

YES = ("true", "yes", "y", "on", "1")
NO = ("false", "no", "n", "off", "0")
#: Words that other programs write for a value that is not set.
NOTHING = ("", "none", "null", "auto")

#: Returns the parsed value, or raises a ValueError whose text completes a sentence and says what is valid.
Parse = Callable[[Any], Any]


def truth(value: Any) -> bool:
    """Parse a yes/no value."""
    word = str(value).strip().lower()
    if word in YES:
        return True
    if word in NO:
        return False
    raise ValueError(f"is neither yes nor no.{messages.did_you_mean(word, (*YES, *NO))} Use true or false.")


def count(least: int = 0, most: int | None = None) -> Parse:
    """Parse a whole number within bounds."""
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"

    def parse(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"is not a whole number. Use a whole number {bounds}.")
        if number < least or (most is not None and number > most):
            raise ValueError(f"is out of range. Use a whole number {bounds}.")
        return number

    return parse


def positive(value: Any) -> float:
    """Parse a number above zero."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number > 0 or math.isinf(number):
        raise ValueError("is not a positive number. Use a number above 0.")
    return number


def choice(*choices: str, numbered: bool = False) -> Parse:
    """Parse one of several words, ignoring case.

    With ``numbered``, a word may also be given by its number, counting from 1.
    """
    by_word = {word.lower(): word for word in choices}
    if numbered:
        by_word |= {str(number): word for number, word in enumerate(choices, 1)}

    def parse(value: Any) -> str:
        word = str(getattr(value, "value", value)).strip().lower()
        if value is False and "no" in by_word:  # `no` in a YAML file
            word = "no"
        if word not in by_word:
            close = messages.did_you_mean(word.upper() if choices[0].isupper() else word, choices)
            raise ValueError(f"is not a valid value.{close} Choose {messages.names(choices)}.")
        return by_word[word]

    return parse


def text(value: Any) -> str:
    """Parse a string. Several strings, which a file may give as a list, are joined with commas."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, dict)):
        return ",".join(text(one) for one in value)
    raise ValueError(f"is {messages.a(value)}. Use a string.")


def word_or_truth(*words: str) -> Parse:
    """Parse a yes/no value, or one of a given set of words."""
    chosen = choice(*words)

    def parse(value: Any) -> Any:
        if str(value).strip().lower() in (*YES, *NO):
            return truth(value)
        return chosen(value)

    return parse
