"""Which checkpoint ``ckpt_path="last"`` and ``"auto"`` mean."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Trainer, messages
from paceline.callbacks import ModelCheckpoint, OnExceptionCheckpoint, RunReport
from paceline.checkpoint import manifest
from paceline.strategies import DDPStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def run(folder: Path, ckpt_path: Any = None, epochs: int = 3, **keeper: Any) -> Trainer:
    """Train with all files kept in ``folder``."""
    callback = ModelCheckpoint(dirpath=folder, **{"filename": "{epoch}", "save_top_k": -1, **keeper})
    trainer = Trainer(**QUIET, logger=False, max_epochs=epochs, callbacks=[callback])
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path=ckpt_path)
    return trainer


def number(path: Path) -> int:
    found = manifest.read(path)
    assert found is not None
    return found.sequence


def resumed_from(folder: Path, ckpt_path: str = "last", **keeper: Any) -> str | None:
    found = run(folder, ckpt_path, epochs=0, **keeper).ckpt_path
    return found and Path(found).relative_to(folder).as_posix()


def test_the_number_of_the_save_decides_and_not_the_clock(tmp_path: Path):
    run(tmp_path)
    assert [number(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(3)] == [1, 2, 3]
    for age, epoch in enumerate([0, 1, 2]):
        os.utime(tmp_path / f"epoch={epoch}.ckpt", (1e9 - age, 1e9 - age))
    assert resumed_from(tmp_path) == "epoch=2.ckpt"


def test_a_later_run_in_the_same_folder_counts_on(tmp_path: Path):
    run(tmp_path)
    run(tmp_path, epochs=1, filename="fresh-{epoch}")
    assert number(tmp_path / "fresh-epoch=0.ckpt") == 4
    assert resumed_from(tmp_path) == "fresh-epoch=0.ckpt"
    run(tmp_path, tmp_path / "epoch=0.ckpt", epochs=2, filename="again-{epoch}")
    assert number(tmp_path / "again-epoch=1.ckpt") == 5


def test_a_run_that_goes_on_in_an_empty_folder_counts_on(tmp_path: Path):
    run(tmp_path / "one")
    run(tmp_path / "two", tmp_path / "one" / "epoch=2.ckpt", epochs=4)
    assert number(tmp_path / "two" / "epoch=3.ckpt") == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") // 2] ^= 1
    path.write_bytes(data)


def replace_by_text(path: Path) -> None:
    path.write_text("not a checkpoint")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_other_zip(path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut, "its records cannot be read"),
        (flip, "does not match its checksum"),
        (replace_by_text, "it starts with the bytes b'not '"),
        (empty, "it is empty"),
        (make_folder, "it has no manifest, so it is not a checkpoint or was never completed"),
    ],
)
@pytest.mark.parametrize("word", ["last", "auto"])
def test_what_is_passed_over_is_named_with_the_reason(word: str, spoil: Any, why: str, tmp_path: Path):
    run(tmp_path)
    spoil(tmp_path / "epoch=2.ckpt")
    with pytest.warns(UserWarning, match=rf"'{word}' skips .*epoch=2\.ckpt \(.*") as said:
        assert resumed_from(tmp_path, word) == "epoch=1.ckpt"
    (text,) = [str(one.message) for one in said if "skips" in str(one.message)]
    assert why in text


def test_a_file_of_weights_only_is_passed_over_without_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(tmp_path)
    run(tmp_path, epochs=1, filename="weights", save_weights_only=True)
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ckpt_path")
        assert resumed_from(tmp_path) == "epoch=2.ckpt"
    assert "weights.ckpt (weights only)" in caplog.text


def test_evaluation_takes_weights_only_too(tmp_path: Path):
    run(tmp_path)
    trainer = run(tmp_path, epochs=1, filename="weights", save_weights_only=True)
    trainer.test(TinyModule(), tiny_loader(), ckpt_path="last", verbose=False)
    assert Path(trainer.ckpt_path).name == "weights.ckpt"


def test_files_of_other_tools_come_after_all_others_by_their_time(tmp_path: Path):
    run(tmp_path, epochs=1)
    bare = torch.load(tmp_path / "epoch=0.ckpt")
    for name, time in (("late", 4e9), ("early", 3e9)):
        torch.save(bare, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (time, time))
    make_other_zip(tmp_path / "other.ckpt")
    os.utime(tmp_path / "other.ckpt", (5e9, 5e9))
    assert resumed_from(tmp_path) == "epoch=0.ckpt"
    (tmp_path / "epoch=0.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"other\.ckpt .*it has no 'state_dict'.* uses .*late\.ckpt"):
        assert resumed_from(tmp_path) == "late.ckpt"


def test_auto_starts_fresh_without_alarm_and_last_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ckpt_path")
        assert resumed_from(tmp_path / "none", "auto") is None
    assert "ckpt_path='auto': there is no valid checkpoint in" in caplog.text
    with pytest.warns(UserWarning, match="ckpt_path='last': there is no valid checkpoint in"):
        assert resumed_from(tmp_path / "none", "last") is None


def test_auto_warns_if_all_there_is_is_broken(tmp_path: Path):
    run(tmp_path, epochs=1)
    cut(tmp_path / "epoch=0.ckpt")
    with pytest.warns(UserWarning, match=r"the run starts fresh\. Skipped: .*epoch=0\.ckpt \("):
        assert resumed_from(tmp_path, "auto") is None


def start(folder: Path, epochs: int, ckpt_path: Any = "auto", **arguments: Any) -> Trainer:
    """The command of a cluster job, with the default folders."""
    trainer = Trainer(**QUIET, default_root_dir=folder, max_epochs=epochs, **arguments)
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path=ckpt_path)
    return trainer


def test_the_same_command_goes_on_from_its_earlier_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="paceline")
    paths = [start(tmp_path, epochs).ckpt_path for epochs in (1, 2, 3)]
    assert paths[0] is None
    assert "ckpt_path='auto': no earlier run has saved a checkpoint, so the run starts fresh." in caplog.text
    assert [Path(path).name for path in paths[1:]] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


def test_a_start_of_a_run_that_is_over_says_what_to_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="paceline")
    start(tmp_path / "epochs", 2)
    start(tmp_path / "steps", -1, max_steps=6)
    assert "Nothing to train" not in caplog.text
    for epochs, folder, steps, said in (
        (
            2,
            "epochs",
            -1,
            "2 epochs and 8 steps, and the limits are max_epochs=2 and max_steps=-1. Raise max_epochs to",
        ),
        (-1, "steps", 6, "1 epoch and 6 steps, and the limits are max_epochs=-1 and max_steps=6. Raise max_steps to"),
    ):
        caplog.clear()
        messages.forget()
        start(tmp_path / folder, epochs, max_steps=steps)
        assert caplog.text.count(f"Nothing to train: the run has completed {said} continue.") == 1
        assert caplog.text.count("Nothing to train") == 1


def test_the_versions_of_fresh_starts_are_in_order(tmp_path: Path):
    for _ in range(3):
        start(tmp_path, 1, ckpt_path=None)
    found = {path.relative_to(tmp_path).parts[1]: number(path) for path in sorted(tmp_path.rglob("*.ckpt"))}
    assert found == {"version_0": 1, "version_1": 2, "version_2": 3}
    assert "version_2" in Path(start(tmp_path, 2).ckpt_path).parts


def test_numbers_compare_over_the_folders_of_two_callbacks(tmp_path: Path):
    class Boom(TinyModule):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                raise ZeroDivisionError

    trainer = Trainer(
        **QUIET, default_root_dir=tmp_path, max_epochs=3, callbacks=[OnExceptionCheckpoint(tmp_path / "rescued")]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Boom(), tiny_loader())
    again = start(tmp_path, 3, callbacks=[OnExceptionCheckpoint(tmp_path / "rescued")])
    assert again.ckpt_path == str(tmp_path / "rescued" / "on_exception.ckpt")


def test_ranks_take_what_the_first_one_sees(tmp_path: Path):
    def work() -> Any:
        rank = int(os.environ["RANK"])
        folder = tmp_path if rank == 0 else tmp_path / "a disk that shows nothing yet"
        keeper = ModelCheckpoint(dirpath=folder)
        trainer = Trainer(**QUIET, logger=False, max_epochs=0, callbacks=[keeper], strategy=DDPStrategy(), devices=2)
        trainer.fit(TinyModule(), tiny_loader(), ckpt_path="auto")
        return str(trainer.ckpt_path)

    run(tmp_path, epochs=1)
    assert ranks(2, work) == [str(tmp_path / "epoch=0.ckpt")] * 2


def test_files_in_folders_that_the_template_makes_are_found(tmp_path: Path):
    run(tmp_path, filename="kept/{epoch}")
    assert resumed_from(tmp_path, filename="kept/{epoch}") == "kept/epoch=2.ckpt"


def test_only_the_folders_of_callbacks_that_save_checkpoints_are_searched(tmp_path: Path):
    run(tmp_path / "other", epochs=2)
    run(tmp_path / "own", epochs=1)
    callbacks = [ModelCheckpoint(dirpath=tmp_path / "own"), RunReport(tmp_path / "other")]
    trainer = Trainer(**QUIET, logger=False, max_epochs=0, callbacks=callbacks)
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "own" / "epoch=0.ckpt")
