"""``get_logger``: the standard library's logger, heard once or from everybody."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rank_processes import ranks

from paceline import messages
from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.logging import get_logger


@pytest.fixture(autouse=True)
def quiet() -> Any:
    yield
    for name in ("script", "other"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def heard(meet: bool) -> list[str]:
    messages.set_rank(None)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("script").addHandler(handler)
    logger = get_logger("script", "info")
    logger.info("once %s", "only")
    logger.warning("from all", main_process_only=False)
    logger.debug("too quiet", main_process_only=False)
    if meet:
        Accelerator(cpu=True)
    try:
        logger.info("in turn", in_order=True)
    except RuntimeError as error:
        text.write(str(error))
    return text.getvalue().splitlines()


def test_f3_a_line_comes_from_the_main_process_unless_all_are_asked_for() -> None:
    first, second = ranks(2, heard, True)
    assert first == ["once only", "[RANK 0] from all", "[RANK 0] in turn"]
    assert second == ["[RANK 1] from all", "[RANK 1] in turn"]


def test_lines_in_order_need_processes_that_have_met() -> None:
    for lines in ranks(2, heard, False):
        assert "Create an Accelerator (or a PartialState) first" in lines[-1]


def in_turn(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    handler = logging.FileHandler(Path(folder) / "all.log")
    logging.getLogger("script").addHandler(handler)
    logger = get_logger("script", "INFO")
    for number in range(5):
        logger.info("%d", number, in_order=True)
    accelerator.wait_for_everyone()


def test_lines_in_order_come_one_process_after_the_other(tmp_path: Path) -> None:
    ranks(2, in_turn, str(tmp_path))
    lines = (tmp_path / "all.log").read_text().splitlines()
    assert lines == [f"[RANK {rank}] {number}" for number in range(5) for rank in (0, 1)]


def test_one_process_logs_without_a_rank_and_names_the_users_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("script", "DEBUG")
    logger.debug("first", main_process_only=False)
    logger.info("second", in_order=True, extra={"mark": 1})
    logger.log(logging.INFO, "third")
    for _ in range(2):
        get_logger("script").warning_once("fourth")
    get_logger("other").warning_once("fourth")
    assert [record.message for record in caplog.records] == ["first", "second", "third", "fourth", "fourth"]
    assert {record.pathname for record in caplog.records} == {__file__}
    assert caplog.records[1].__dict__["mark"] == 1


def test_the_level_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger().level
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("script").logger.level == logging.ERROR
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "debug")
    assert get_logger("script").logger.level == logging.DEBUG
    assert get_logger("script", "info").logger.level == logging.INFO
    assert logging.getLogger().level == root
