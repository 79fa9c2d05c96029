"""What forked ranks print and display: in a stream of this process's own memory, and in a real notebook."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import messages
from paceline.messages import PacelineWarning
from paceline.processes import launch

pytestmark = [pytest.mark.cold, pytest.mark.skipif(sys.platform != "linux", reason="forks")]
ROOT = Path(__file__).resolve().parents[3]


def start(function: Any) -> Any:
    return launch.start(function, (), 2, "fork")


# ---- a stream in memory --------------------------------------------------------------------------------------------


def test_ranks_print_whole_lines_and_large_texts_into_a_stream_of_this_process() -> None:
    def talk() -> None:
        for line in range(50):
            print("rank", os.environ["RANK"], "line", line)
        print("\u00e4" * 500_000, end="", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        start(talk)
        print("this process")
    *lines, last = out.getvalue().splitlines()
    assert sorted(lines) == sorted(f"rank {rank} line {line}" for rank in range(2) for line in range(50))
    assert last == "this process"
    assert err.getvalue() == "\u00e4" * 1_000_000


def test_log_lines_of_ranks_come_through_a_handler_of_that_stream_and_messages_past_those_of_pytest() -> None:
    out, log = io.StringIO(), logging.getLogger("mine")
    with contextlib.redirect_stderr(out):
        log.addHandler(logging.StreamHandler(sys.stderr))
        try:
            start(lambda: (log.warning("logged"), messages.info_anywhere("told")))
        finally:
            log.handlers.clear()
    assert sorted(out.getvalue().splitlines()) == ["logged", "logged", "told", "told"]


@pytest.mark.parametrize("redirected", [False, True])
def test_a_log_handler_that_finds_its_stream_itself_is_left_alone(redirected: bool) -> None:
    out, log, handlers = io.StringIO(), logging.getLogger("dill"), type(logging.lastResort)
    log.addHandler(handlers())  # as dill does, which datasets imports
    try:
        with contextlib.redirect_stderr(out) if redirected else contextlib.nullcontext():
            assert start(lambda: log.warning("logged") or "done") == "done"
    finally:
        log.handlers.clear()
    assert out.getvalue().splitlines() == (["logged", "logged"] if redirected else [])


def test_a_stream_that_is_closed_holds_up_no_rank_and_is_reported() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise ValueError("closed")

    with (
        contextlib.redirect_stdout(Closed()),
        pytest.warns(PacelineWarning, match=r"Some of the ranks' output.*'closed'"),
    ):
        assert start(lambda: print("x" * 1_000_000) or "ended") == "ended"


def test_ranks_neither_flush_nor_end_what_is_of_the_process_they_copy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    leave = atexit.register(lambda: os.write(1, b"left\n"))
    handlers = logging.getLogger().handlers.copy()
    streams = sys.stdout, sys.stderr
    try:
        with (tmp_path / "once").open("w") as file:
            file.write("once")
            print("before", end=" ")
            start(lambda: sys.stdout.write("rank\n") and None)
            start(lambda: sys.exit())
    finally:
        atexit.unregister(leave)
    assert (tmp_path / "once").read_text() == "once"
    assert capfd.readouterr().out == "before rank\nrank\n"
    assert (logging.getLogger().handlers, (sys.stdout, sys.stderr)) == (handlers, streams)


# ---- a notebook ----------------------------------------------------------------------------------------------------

CELLS = {
    "definitions": f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
import torch
from IPython.display import display
from tiny import TinyModule, tiny_loader
from paceline import Trainer, notebook_launcher
from paceline.callbacks import TQDMProgressBar
from paceline.strategies import DDPStrategy

class Net(TinyModule):
    def on_train_epoch_end(self):
        print("end of epoch on rank", self.global_rank)

def fit(module, strategy="ddp", max_epochs=2, **more):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = Trainer(
        **quiet, accelerator="cpu", limit_val_batches=0, strategy=strategy, max_epochs=max_epochs, **more
    )
    trainer.fit(module, tiny_loader())
    return trainer
""",
    "alone": "trainer = fit(Net(), 'auto')",
    "together": """
net = Net()
before = net.layer.weight.clone()
trainer = fit(net, devices=2)
print(trainer.global_step, trainer.strategy.world_size, bool((net.layer.weight != before).any()))
""",
    "automatic": "print(fit(Net(), 'auto', devices=2, enable_progress_bar=False).strategy.world_size)",
    "tqdm": "trainer = fit(Net(), devices=2, callbacks=TQDMProgressBar())",
    "display": "notebook_launcher(lambda: display('shown by ' + os.environ['RANK']), num_processes=2)",
    "error": """
class Fails(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise ValueError("mine")
        return super().training_step(batch, batch_idx)
fit(Fails(), devices=2)
""",
    "interrupt": """
class Interrupted(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and self.trainer.global_step == 3:
            os.kill(os.getppid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)
fit(Interrupted(), devices=2, max_epochs=-1, enable_progress_bar=False)
""",
    "spawn": "fit(Net(), 'ddp_spawn', devices=2)",
    "popen": "fit(Net(), DDPStrategy(start_method='popen'), devices=2)",
    "obstacle": """
torch.cuda.is_initialized = lambda: True
from paceline.processes.host_program import find_host, fork_obstacle, refusal_to_fork
print(refusal_to_fork(find_host(), fork_obstacle("cuda")))
""",
    "after": """
import multiprocessing
print(trainer.global_step, multiprocessing.active_children(), 6 * 7)
""",
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Any]]:
    """Of every cell: what a notebook holds after it has run in a real kernel."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    client = NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=200)
    client.execute(env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def text_of(outputs: list[Any], stream: str = "stdout") -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == stream)


def displays_of(outputs: list[Any]) -> list[str]:
    return [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]


def error_of(outputs: list[Any]) -> tuple[str, str]:
    (error,) = [output for output in outputs if output.output_type == "error"]
    return error.ename, error.evalue


def test_a_fit_of_several_processes_shows_one_bar_and_every_print_in_its_cell(outputs: dict[str, list[Any]]) -> None:
    assert text_of(outputs["alone"]) == "end of epoch on rank 0\n" * 2
    _, alone = displays_of(outputs["alone"])  # a line for the first epoch, the bar of the last
    *lines, last = text_of(outputs["together"]).splitlines()
    assert sorted(lines) == [f"end of epoch on rank {rank}" for rank in (0, 0, 1, 1)]
    assert last == "4 2 True"
    _, bar = displays_of(outputs["together"])
    assert ("Epoch 1/1" in alone, "4/4" in alone) == ("Epoch 1/1" in bar, "2/2" in bar) == (True, True)
    assert text_of(outputs["automatic"]).splitlines()[-1] == "2"
    assert text_of(outputs["together"], "stderr") == "Training on 2 processes (ddp, gloo, cpu).\n"


def test_a_bar_of_tqdm_and_displays_of_all_ranks_reach_the_cell(outputs: dict[str, list[Any]]) -> None:
    text = text_of(outputs["tqdm"])
    assert text.count("end of epoch on rank 1") == 2
    assert "\rEpoch 1/1" in text
    assert "2/2" in text
    assert sorted(displays_of(outputs["display"])) == ["'shown by 0'", "'shown by 1'"]


def test_an_error_of_a_rank_and_an_interrupt_end_the_cell(outputs: dict[str, list[Any]]) -> None:
    kind, text = error_of(outputs["error"])
    assert kind == "RuntimeError"
    assert text.startswith("Rank 1 of 2 failed (exit status 1):\nTraceback")
    assert text.endswith('raise ValueError("mine")\nValueError: mine')
    assert error_of(outputs["interrupt"])[0] == "KeyboardInterrupt"
    assert text_of(outputs["after"]) == "4 [] 42\n"


def test_what_cannot_start_in_a_notebook_is_refused_with_what_can(outputs: dict[str, list[Any]]) -> None:
    kind, text = error_of(outputs["spawn"])
    assert kind == "TypeError"
    assert text.startswith("Net is defined in a notebook, and a fresh process cannot import it from there.")
    assert "strategy='ddp'" in text
    kind, text = error_of(outputs["popen"])
    assert kind == "RuntimeError"
    assert "this program is a notebook, so there is no script. Omit start_method" in text
    refusal = text_of(outputs["obstacle"])
    assert "CUDA was already used in this process" in refusal
    assert "Restart the kernel" in refusal
    assert all("ddp_spawn" not in one for one in (text, refusal))
