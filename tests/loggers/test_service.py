"""What the loggers of all services share, seen on one that keeps everything in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from paceline import loggers, messages
from paceline.loggers.service import ServiceLogger
from paceline.messages import PacelineWarning

SERVICES = ["Aim", "ClearML", "Comet", "DVCLive", "SwanLab", "Trackio"]


class Memory(ServiceLogger):
    """Runs in a dict; ``calls`` lists what was asked of the service."""

    package = "json"
    runs: ClassVar[dict[str, list[tuple[str, int, Any]]]] = {}
    calls: ClassVar[list[Any]] = []

    def __init__(self, project: str = "p", run_id: str | None = None, **options: Any) -> None:
        super().__init__(project, run_id, None, options.pop("prefix", ""), options.pop("log_model", False))

    def _open(self) -> Any:
        self._id = self._id or f"run{len(self.runs)}"
        self.calls.append(("open", self._id))
        return self.runs.setdefault(self._id, [])

    def _write(self, run: Any, values: dict[str, Any], step: int, **options: Any) -> None:
        run.extend((name, step, value) for name, value in self._shown(values).items())

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.calls.append(params)

    def _finish(self, status: str) -> None:
        self.calls.append(status)

    def _recorded(self) -> dict[str, int]:
        names = [name for name, _, _ in self.runs[str(self._id)]]
        return {name: names.count(name) for name in names}

    def _exists(self, run_id: str) -> bool:
        return run_id in self.runs

    def _upload(self, path: str, about: Any, is_best: bool) -> None:
        self.calls.append((Path(path).name, about["score"], is_best))


@pytest.fixture(autouse=True)
def empty() -> None:
    Memory.runs.clear()
    Memory.calls.clear()


def logged(logger: Memory, steps: range) -> Memory:
    for step in steps:
        logger.log_metrics(metrics={"loss": step / 2}, step=step)
        if step % 2:
            logger.log_metrics({"val": {"acc": step}}, step)
    return logger


def test_a_resumed_run_gets_only_the_values_that_it_does_not_have() -> None:
    first = logged(Memory(prefix="x"), range(3))
    state = first.state_dict()
    logged(first, range(3, 6)).finalize("failed")
    again = Memory(prefix="x")
    assert again.recognizes(state)
    again.take_over(state)
    again.load_state_dict(state)
    logged(again, range(3, 8)).finalize("success")
    assert [step for name, step, _ in Memory.runs["run0"] if name == "x-loss"] == list(range(8))
    assert [step for name, step, _ in Memory.runs["run0"] if name == "x-val/acc"] == [1, 3, 5, 7]
    assert Memory.calls == [("open", "run0"), "failed", ("open", "run0"), "success"]
    assert not Memory("other").recognizes(state)
    assert not Memory(run_id="run1").recognizes(state)
    assert not Memory().recognizes({**state, "id": "deleted"})


def test_a_run_without_values_is_given_up_and_a_named_one_keeps_its_id() -> None:
    logger, named = Memory(), Memory(run_id="mine")
    assert (logger.version, named.version) == ("run0", "mine")
    for one in (logger, named):
        one.withdraw()
    assert (logger._id, named._id) == (None, "mine")
    logged(logger, range(1)).withdraw()
    assert logger._id == logger.version is not None


def test_texts_that_a_service_cannot_show_are_left_out_with_a_warning() -> None:
    logger = Memory()
    with pytest.warns(PacelineWarning, match=r"Memory cannot show 'note' \(a str\), so it is left out"):
        logger.log_record({"loss": 1.0, "note": "hello"}, step=2)
    logger.log_metrics({"loss": 0.5})
    assert Memory.runs["run0"] == [("loss", 2, 1.0), ("loss", 3, 0.5)]


def test_other_ranks_open_nothing() -> None:
    messages.set_rank(1)
    logger = logged(Memory(log_model="all"), range(2))
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    assert (logger.version, logger.log_dir, Memory.calls) == (None, None, [])


def test_checkpoints_are_uploaded_when_written_or_at_the_end_each_change_once(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"weights")
    kept = SimpleNamespace(best_k_models={str(path): 0.5}, best_model_path=str(path), best_model_score=0.5)
    logger = Memory(log_model=True)
    logger.after_save_checkpoint(kept)
    assert Memory.calls == []
    logger.finalize("success")
    logger.finalize("success")
    assert Memory.calls == [("a.ckpt", 0.5, True)]
    with pytest.raises(ValueError, match=r"Unknown log_model 'al'. Did you mean 'all'"):
        Memory(log_model="al")


def test_copies_open_the_same_run() -> None:
    logger = logged(Memory(), range(1))
    logged(copy.deepcopy(logger), range(1, 2)).finalize("success")
    assert [step for name, step, _ in Memory.runs["run0"] if name == "loss"] == [0, 1]


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name: str) -> None:
    kind = getattr(loggers, f"{name}Logger")
    with pytest.raises(ModuleNotFoundError, match=rf"{name}Logger needs the package '{kind.package}'.*pip install"):
        kind()
