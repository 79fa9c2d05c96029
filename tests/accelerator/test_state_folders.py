"""Where states are: numbered, the newest, a limited number, and never half of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Loop, same
from rank_processes import RanksError, ranks
from torch import nn

from paceline import Accelerator, ProjectConfiguration
from paceline.accelerator import save_state, state_folders
from paceline.checkpoint import atomic_write
from paceline.messages import PacelineWarning


def made(**config: Any) -> Accelerator:
    """An Accelerator with one prepared model, of a single weight."""
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**config))
    accelerator.prepare(nn.Linear(1, 1, bias=False))
    return accelerator


def put(accelerator: Accelerator, value: float) -> Accelerator:
    nn.init.constant_(accelerator.prepared.models[0].weight, value)
    return accelerator


def value(accelerator: Accelerator) -> float:
    return accelerator.prepared.models[0].weight.item()


def numbered(tmp_path: Path, **config: Any) -> Accelerator:
    return made(project_dir=str(tmp_path), automatic_checkpoint_naming=True, **config)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# ---- names and the newest --------------------------------------------------------------------------------------------


def test_g1_states_are_numbered_and_a_loop_that_goes_on_counts_on(tmp_path: Path) -> None:
    first = numbered(tmp_path)
    assert first.save_state() == str(tmp_path / "checkpoints" / "checkpoint_0")
    put(first, 5.0).save_state()
    second = numbered(tmp_path)
    second.load_state()
    assert value(second) == 5.0
    second.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_a_program_that_begins_anew_in_the_same_project_overwrites_nothing(tmp_path: Path) -> None:
    put(numbered(tmp_path), 1.0).save_state()
    fresh = put(numbered(tmp_path), 2.0)
    fresh.save_state()
    fresh.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    old = made()
    old.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert value(old) == 1.0


def test_the_newest_is_that_which_was_saved_last_whatever_its_name(tmp_path: Path) -> None:
    one = made(project_dir=str(tmp_path))
    put(one, 1.0).save_state(tmp_path / "z")
    put(one, 2.0).save_state(tmp_path / "a")
    again = made(project_dir=str(tmp_path))
    again.load_state()
    assert value(again) == 2.0


def test_u8_a_state_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    one = numbered(tmp_path)
    put(one, 1.0).save_state()
    path = Path(put(one, 2.0).save_state()) / "state.ckpt"
    path.write_bytes(path.read_bytes()[:-100])
    again = numbered(tmp_path)
    with pytest.warns(PacelineWarning, match=r"skipped .*checkpoint_1 \(its records cannot be read"):
        again.load_state()
    assert value(again) == 1.0


def test_what_is_no_state_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no valid state in"):
        accelerator.load_state()
    accelerator.save_state()
    with pytest.raises(FileNotFoundError, match=r"The newest state inside it is '.*checkpoint_0'\. Pass that"):
        accelerator.load_state(tmp_path / "checkpoints")
    with pytest.raises(FileNotFoundError, match="the folder does not exist"):
        accelerator.load_state(tmp_path / "nothing")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="another tool's files"):
        accelerator.load_state(tmp_path)
    for call in (made().save_state, made().load_state):
        with pytest.raises(ValueError, match="got no folder"):
            call()
    with pytest.raises(ValueError, match="but project_dir is not set"):
        made(automatic_checkpoint_naming=True).save_state()


# ---- how many are kept -----------------------------------------------------------------------------------------------


def test_u8_the_limit_keeps_the_newest_also_over_restarts(tmp_path: Path) -> None:
    one = numbered(tmp_path, total_limit=2)
    for _ in range(3):
        one.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    again = numbered(tmp_path, total_limit=2)
    again.load_state()
    again.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]


def test_u8_the_limit_holds_for_names_of_the_users_and_leaves_what_others_wrote(tmp_path: Path) -> None:
    made().save_state(tmp_path / "other")
    one = made(total_limit=2)
    for number in range(4):
        folder = tmp_path / f"step_{number}"
        one.save_state(folder)
        if number == 1:
            (folder / "notes.txt").write_text("mine")
    assert names(tmp_path) == ["other", "step_1", "step_2", "step_3"]
    assert names(tmp_path / "step_1") == ["notes.txt"]


def test_u8_old_states_go_when_the_new_one_is_there_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = numbered(tmp_path, total_limit=1)
    one.save_state()
    monkeypatch.setattr(save_state.single_file, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        one.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "state.ckpt").exists()
    numbered(tmp_path).load_state()


def full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def on_two(folder: str) -> tuple[str, float]:
    one = made(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    put(one, 1.0).save_state()
    last = put(one, 2.0).save_state()
    again = made(project_dir=folder, automatic_checkpoint_naming=True)
    again.load_state()
    return last, value(again)


def test_u8_two_processes_agree_on_the_number_and_write_one_state(tmp_path: Path) -> None:
    expected = str(tmp_path / "checkpoints" / "checkpoint_1")
    assert ranks(2, on_two, str(tmp_path)) == [(expected, 2.0)] * 2
    assert names(tmp_path / "checkpoints") == ["checkpoint_1"]
    assert names(Path(expected)) == ["state.ckpt"]


# ---- killed on the way -----------------------------------------------------------------------------------------------


def killed(work: Callable[[], Any], owner: Any, name: str, times: int) -> None:
    """Run in a forked process, which is killed by signal 9 when ``owner.name`` is called for the ``times``-th time."""
    called, original = [0], getattr(owner, name)
    pid = os.fork()
    if pid == 0:

        def strike(*args: Any, **kwargs: Any) -> Any:
            called[0] += 1
            if called[0] == times:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        try:
            setattr(owner, name, strike)
            work()
        finally:
            os._exit(3)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "it was never called"
    assert os.WTERMSIG(status) == signal.SIGKILL


POINTS = [
    (torch, "save", 1),
    (os, "fsync", 1),
    (atomic_write, "take_place", 1),
    (state_folders.Folders, "delete_old", 1),
]


@pytest.mark.parametrize(("owner", "name", "times"), POINTS, ids=[name for _, name, _ in POINTS])
def test_g1_u8_kill_9_anywhere_in_a_save_leaves_a_state_to_go_on_from(
    tmp_path: Path, owner: Any, name: str, times: int
) -> None:
    expected = Loop().run()
    first = Loop()
    first.run(5, tmp_path / "s")

    def later() -> None:
        again = Loop(seed=3)
        again.accelerator.load_state(tmp_path / "s")
        again.run(9, tmp_path / "s")

    killed(later, owner, name, times)
    last = Loop(seed=4)
    last.accelerator.load_state(tmp_path / "s")
    assert last.counter.batches == (9 if name == "delete_old" else 5)
    assert same(last.run(17, tmp_path / "s", stop=False), expected)
    assert names(tmp_path / "s") == ["state.ckpt"]


def test_u8_what_a_killed_save_left_of_a_numbered_folder_is_replaced(tmp_path: Path) -> None:
    one = numbered(tmp_path)
    one.save_state()
    killed(one.save_state, atomic_write, "take_place", 1)
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]
    again = numbered(tmp_path)
    again.load_state()
    again.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]
    assert names(tmp_path / "checkpoints" / "checkpoint_1") == ["state.ckpt"]


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooked(take_out: bool = True) -> tuple[Accelerator, list[str]]:
    """One whose model is saved by hooks, as libraries of models do it."""
    accelerator, seen = made(), list[str]()

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append(output_dir)
        if accelerator.is_main_process:
            for number, model in enumerate(list(models)):
                folder = Path(output_dir, f"net{number}")
                folder.mkdir()
                torch.save(model.state_dict(), folder / "weights.pt")
                (folder / "config.json").write_text("{}")
                if take_out and weights:
                    weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        for number in range(len(models)):
            models.pop().load_state_dict(torch.load(Path(input_dir, f"net{number}", "weights.pt")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return accelerator, seen


def test_g1_hooks_save_and_load_models_in_the_place_of_the_state(tmp_path: Path) -> None:
    one, seen = hooked()
    put(one, 3.0).save_state(tmp_path / "s")
    assert Path(seen[0]).name == "s"
    assert names(tmp_path / "s") == ["net0", "state.ckpt"]
    again, _ = hooked()
    again.load_state(tmp_path / "s", strict=True)
    assert value(again) == 3.0
    without = made()
    with pytest.warns(PacelineWarning, match=r"model 0 \(Linear\), whose weights a hook removed"):
        without.load_state(tmp_path / "s")


def test_a_handle_takes_a_hook_away(tmp_path: Path) -> None:
    one = made()
    handle = one.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    handle.remove()
    put(one, 4.0).save_state(tmp_path / "s")
    again = made()
    again.load_state(tmp_path / "s", strict=True)
    assert value(again) == 4.0


def test_a_hook_that_fails_leaves_the_old_state_and_its_files(tmp_path: Path) -> None:
    one, _ = hooked()
    put(one, 1.0).save_state(tmp_path / "s")
    one.register_save_state_pre_hook(lambda models, weights, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        put(one, 2.0).save_state(tmp_path / "s")
    assert names(tmp_path / "s") == ["net0", "state.ckpt"]
    again, _ = hooked()
    again.load_state(tmp_path / "s", strict=True)
    assert value(again) == 1.0


def test_a_state_that_cannot_be_written_leaves_the_files_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = hooked()
    put(one, 1.0).save_state(tmp_path / "s")
    monkeypatch.setattr(save_state.single_file, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        put(one, 2.0).save_state(tmp_path / "s")
    assert names(tmp_path / "s") == ["net0", "state.ckpt"]
    again, _ = hooked()
    again.load_state(tmp_path / "s", strict=True)
    assert value(again) == 1.0


@pytest.mark.parametrize("times", [1, 2, 3], ids=["first file", "second file", "the state"])
def test_u8_kill_9_while_the_files_of_hooks_change_places_leaves_the_old_ones_usable(
    tmp_path: Path, times: int
) -> None:
    one, _ = hooked()
    put(one, 1.0).save_state(tmp_path / "s")
    (tmp_path / "s" / "net0" / "mine.txt").write_text("kept")
    killed(lambda: put(one, 2.0).save_state(tmp_path / "s"), Path, "replace", times)
    again, _ = hooked()
    again.load_state(tmp_path / "s", strict=True)
    assert value(again) == 1.0
    put(again, 5.0).save_state(tmp_path / "s")
    assert names(tmp_path / "s") == ["net0", "state.ckpt"]
    assert names(tmp_path / "s" / "net0") == ["config.json", "mine.txt", "weights.pt"]
    last, _ = hooked()
    last.load_state(tmp_path / "s", strict=True)
    assert value(last) == 5.0


def test_a_hooks_file_that_was_changed_is_reported(tmp_path: Path) -> None:
    one, _ = hooked()
    one.save_state(tmp_path / "s")
    (tmp_path / "s" / "net0" / "config.json").write_text("{ }")
    again, _ = hooked()
    with pytest.raises(RuntimeError, match=r"the file net0/config\.json, which differs from the saved one"):
        again.load_state(tmp_path / "s", strict=True)


def fail_on_one(folder: str, saving: bool) -> None:
    one = made()
    one.save_state(folder)

    def hook(*_: Any) -> None:
        if one.process_index == 1:
            raise OSError("the disk of this machine is full")

    (one.register_save_state_pre_hook if saving else one.register_load_state_pre_hook)(hook)
    (one.save_state if saving else one.load_state)(folder)


@pytest.mark.parametrize("saving", [True, False], ids=["save", "load"])
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path, saving: bool) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, fail_on_one, str(tmp_path / "s"), saving)
    first, second = caught.value.errors
    assert "because rank 1 failed: OSError: the disk of this machine is full" in str(first)
    assert str(second) == "the disk of this machine is full"
    assert names(tmp_path / "s") == ["state.ckpt"]


def hooks_on_two(folder: str) -> float:
    one, _ = hooked()
    put(one, 6.0).save_state(folder)
    again, _ = hooked()
    again.load_state(folder, strict=True)
    return value(again)


def test_hooks_of_two_processes_take_out_what_rank_zeros_takes_out(tmp_path: Path) -> None:
    assert ranks(2, hooks_on_two, str(tmp_path / "s")) == [6.0, 6.0]
    assert names(tmp_path / "s") == ["net0", "state.ckpt"]


# ---- nodes that share no disk ----------------------------------------------------------------------------------------


def _on_own_disk(folder: Path) -> tuple[list[str], list[str], str]:
    """This rank is the only one of its node, and the working directory is the node's disk."""
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
    disk = folder / f"node{rank}"
    disk.mkdir()
    os.chdir(disk)
    accelerator = made(project_dir="runs", automatic_checkpoint_naming=True, total_limit=2, save_on_each_node=True)
    found: list[str] = []
    accelerator.register_save_state_pre_hook(lambda *given: Path(given[-1], "own.txt").write_text(rank))
    accelerator.register_load_state_pre_hook(lambda *given: found.append(Path(given[-1], "own.txt").read_text()))
    for number in range(4):
        put(accelerator, number).save_state()
    accelerator.load_state()
    newest = Path("runs", "checkpoints", "checkpoint_3")
    return names(newest.parent), names(newest), "".join(found)


def test_each_node_keeps_whole_states_on_its_own_disk_and_no_more_than_the_limit(tmp_path: Path) -> None:
    for rank, (folders, inside, read) in enumerate(ranks(2, _on_own_disk, tmp_path)):
        assert folders == ["checkpoint_2", "checkpoint_3"]
        assert inside == ["own.txt", "state.ckpt"]
        assert read == str(rank)


def _on_one_disk(folder: Path) -> None:
    os.chdir(folder)
    os.environ |= {"LOCAL_RANK": "0"}
    accelerator = made(project_dir="runs", automatic_checkpoint_naming=True, total_limit=1, save_on_each_node=True)
    for number in range(3):
        put(accelerator, number).save_state()


def test_nodes_that_do_share_a_disk_delete_each_state_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(2, _on_one_disk, tmp_path)
    assert names(tmp_path / "runs" / "checkpoints") == ["checkpoint_2"]
    assert "could not be deleted" not in capfd.readouterr().err
