"""What is called, and said, on rank 0 alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from paceline import messages
from paceline.utilities.rank_zero import (
    RankZeroDeprecationWarning,
    WarningCache,
    rank_prefixed_message,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    yield
    messages.set_rank(None)


def test_a_function_is_called_on_rank_0_alone() -> None:
    wrapped = rank_zero_only(lambda x: x + 1, default=-1)
    assert (rank_zero_only.rank, wrapped(1)) == (0, 2)
    rank_zero_only.rank = 3
    assert (messages.rank(), wrapped(1)) == (3, -1)


def test_messages_are_of_rank_0_alone(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    caplog.set_level(logging.INFO)
    for number in (1, 0):
        messages.set_rank(number)
        rank_zero_info("note %d", number)
        rank_zero_warn(f"warning {number}")
        rank_zero_deprecation(f"old {number}")
    assert caplog.messages == ["note 0"]
    assert [(str(one.message), one.category) for one in recwarn] == [
        ("warning 0", UserWarning),
        ("old 0", RankZeroDeprecationWarning),
    ]


def test_a_cache_says_each_message_once(recwarn: pytest.WarningsRecorder) -> None:
    cache = WarningCache()
    for _ in range(2):
        cache.warn("once")
    assert [str(one.message) for one in recwarn] == ["once"]


def test_a_rank_stands_before_a_message() -> None:
    assert rank_prefixed_message("x", 2) == "[rank: 2] x"
    assert rank_prefixed_message("x", None) == "x"
