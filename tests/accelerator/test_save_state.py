"""A loop that goes on from a state is, to the bit, the one that was never stopped."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Counter, Loop, Noisy, same
from rank_processes import RanksError, ranks
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.utils.data import DataLoader

from paceline import Accelerator, Trainer
from paceline.cli.main import main
from paceline.messages import PacelineWarning
from paceline.strategies import FSDPStrategy


def interrupted(folder: Path, stop_at: int, seed: int = 99, **given: Any) -> tuple[list[Any], list[list[int]]]:
    """Train up to a batch, save; then, in a program that begins otherwise, load and train on."""
    first = Loop(**given)
    first.run(stop_at, folder)
    second = Loop(seed=seed, **given)
    second.accelerator.load_state(folder)
    return second.run(), first.seen + second.seen


# ---- to the bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [1, 4, 6, 13, 14, 15, 20], ids=lambda at: f"batch {at}")
def test_g2_u6_a_loop_goes_on_to_the_bit_wherever_it_was_saved(tmp_path: Path, stop_at: int) -> None:
    """Mid-epoch, inside a window, at an epoch's end and after it; the new program has another seed."""
    alone = Loop()
    expected = alone.run()
    found, seen = interrupted(tmp_path / "s", stop_at)
    assert seen == alone.seen
    assert same(found, expected)


@pytest.mark.parametrize(
    "given", [{"workers": 2}, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}, {"num_items": True}], ids=str
)
def test_g2_u6_also_with_workers_precision_and_counted_items(tmp_path: Path, given: dict[str, Any]) -> None:
    alone = Loop(**given)
    expected = alone.run()
    found, seen = interrupted(tmp_path / "s", 8, **given)
    assert seen == alone.seen
    assert same(found, expected)


def whole_and_interrupted(folder: str, stop_at: int, given: dict[str, Any]) -> Any:
    alone = Loop(**given)
    expected = alone.run()
    found, seen = interrupted(Path(folder), stop_at, **given)
    assert seen == alone.seen
    assert same(found, expected)
    return found


def sharded() -> FSDPStrategy:
    return FSDPStrategy(state_dict_type="sharded")


@pytest.mark.parametrize(
    ("stop_at", "given"),
    [(5, {}), (7, {"workers": 2}), (3, {"num_items": True}), (5, {"strategy": "fsdp"}), (5, {"strategy": sharded})],
    ids=["ddp", "epoch's end, workers", "counted items", "fsdp", "fsdp in parts"],
)
def test_g2_u6_two_processes_go_on_to_the_bit(tmp_path: Path, stop_at: int, given: dict[str, Any]) -> None:
    one, other = ranks(2, whole_and_interrupted, str(tmp_path / "s"), stop_at, given)
    assert "strategy" in given or same(one[:2], other[:2])
    assert (tmp_path / "s" / "state.ckpt").is_dir() == (given.get("strategy") is sharded)


def test_saving_changes_nothing_for_the_loop_that_goes_on(tmp_path: Path) -> None:
    expected = Loop().run()
    assert same(Loop().run(8, tmp_path / "s", stop=False), expected)


@pytest.mark.parametrize(("stop_at", "given"), [(5, {}), (3, {"num_items": True})], ids=["in a window", "counted"])
def test_a_loop_can_go_back_to_its_own_state(tmp_path: Path, stop_at: int, given: dict[str, Any]) -> None:
    """As after a loss that was no number: what was accumulated since is forgotten."""
    expected = Loop(**given).run()
    loop = Loop(**given)
    loop.run(stop_at, tmp_path / "s", stop=True)
    batches = iter(loop.loader)
    for _ in range(2):
        loop.step(next(batches))
    loop.accelerator.load_state(tmp_path / "s")
    assert loop.counter.batches == stop_at
    assert same(loop.run(), expected)


# ---- another number of processes -------------------------------------------------------------------------------------


def save_on_two(folder: str, stop_at: int, given: dict[str, Any]) -> list[list[int]]:
    loop = Loop(**given)
    loop.run(stop_at, folder)
    return loop.seen


def go_on(folder: str, batch: int, given: dict[str, Any]) -> tuple[Any, list[list[int]], Any]:
    loop = Loop(batch=batch, seed=7, **given)
    loop.accelerator.load_state(folder)
    drawn = random.random(), torch.rand(1).item()
    loop.accelerator.load_state(folder)
    return loop.run(), loop.seen, drawn


def test_g3_u7_a_state_of_two_processes_goes_on_in_one_at_the_same_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    folder = str(tmp_path / "s")
    before = ranks(2, save_on_two, folder, 4, {})
    _, seen, _ = go_on(folder, 4, {})
    epoch = [i for batch in [*before[0], *before[1], *seen[:3]] for i in batch]
    assert sorted(epoch) == list(range(28))
    said = [text for text in caplog.messages if "The following were derived instead of restored" in text]
    assert "was written by 2 ranks, but this run has 1 rank" in said[0]
    assert "the gradients of the incomplete window" in said[0]


def test_g3_u7_the_random_states_of_ranks_that_were_not_there_are_derived_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "s")
    save_on_two(folder, 4, {"batch": 4})
    expected = go_on(folder, 4, {})[2]
    capfd.readouterr()
    first = ranks(2, go_on, folder, 2, {})
    again = ranks(2, go_on, folder, 2, {})
    assert first[0][2] == expected
    assert first[1][2] != expected
    assert [found[2] for found in first] == [found[2] for found in again]
    assert "the RNG states of rank 1 (seeded from rank 0's state and the rank)" in capfd.readouterr().err


def test_g3_a_window_saved_by_two_processes_weighs_the_same_in_one(tmp_path: Path) -> None:
    """Full windows of both runs have the same samples, so the weights differ by rounding alone."""
    folder, given = str(tmp_path / "s"), {"num_items": True}
    expected = Loop(batch=4, **given)
    plain(expected)
    ranks(2, save_plain, folder, given)
    found = Loop(batch=4, seed=7, **given)
    found.accelerator.load_state(folder)
    plain(found, begin=2)
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def plain(loop: Loop, begin: int = 0, end: int = 3) -> None:
    """Three micro-batches without anything random, of rows that depend on nothing but their place."""
    loop.model.eval()
    size = 4 // loop.accelerator.num_processes
    for number in range(begin, end):
        rows = torch.arange(4)[loop.accelerator.process_index * size :][:size] + 4 * number
        loop.step((loop.loader.dataset.x[rows], loop.loader.dataset.x[rows].sum(1, keepdim=True), rows))


def save_plain(folder: str, given: dict[str, Any]) -> None:
    loop = Loop(**given)
    loop.num_items = True
    plain(loop, end=2)
    loop.accelerator.save_state(folder)


# ---- what is missing -------------------------------------------------------------------------------------------------


def test_u7_one_warning_names_all_that_was_not_restored_and_strict_refuses(tmp_path: Path) -> None:
    loop = Loop()
    loop.accelerator.save_state(tmp_path / "s")
    more = Loop()
    more.accelerator.register_for_checkpointing(Counter())
    more.accelerator.prepare(torch.optim.lr_scheduler.StepLR(more.optimizer.optimizer, 3))
    before = [p.detach().clone() for p in more.model.parameters()]
    with pytest.raises(RuntimeError, match=r"scheduler 1 \(StepLR\); registered object 1 \(Counter\)\. Nothing was"):
        more.accelerator.load_state(tmp_path / "s", strict=True)
    assert same([p.detach() for p in more.model.parameters()], before)
    with pytest.warns(PacelineWarning, match=r"scheduler 1 \(StepLR\); registered object 1 \(Counter\)") as caught:
        more.accelerator.load_state(tmp_path / "s")
    assert len(caught) == 1


def test_u7_what_the_state_has_and_the_loop_has_not_is_named(tmp_path: Path) -> None:
    Loop().accelerator.save_state(tmp_path / "s")
    less = Accelerator(cpu=True)
    less.prepare(Loop().model)
    with pytest.warns(PacelineWarning) as caught:
        less.load_state(tmp_path / "s")
    text = str(caught[0].message)
    for part in ("optimizer 0 (AdamW)", "scheduler 0 (StepLR)", "loader 0", "registered object 0 (Counter)"):
        assert f"{part} of the saved state, which has no counterpart in this run" in text


def test_another_optimizer_or_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    Loop().accelerator.save_state(tmp_path / "s")
    other = Accelerator(cpu=True)
    model = nn.Linear(4, 8)
    other.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"0 \(AdamW\): the number of parameters in group 0 was 6 but is now 2"):
        other.load_state(tmp_path / "s")
    bare = Accelerator(cpu=True)
    bare.prepare(nn.Linear(4, 8))
    with pytest.raises(RuntimeError, match="prepare models in the same order"), pytest.warns(PacelineWarning):
        bare.load_state(tmp_path / "s")


def test_the_weights_of_a_state_are_of_use_to_a_trainer_and_those_of_a_trainer_here(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trained, trainer = TinyModule(), Trainer(**quiet, max_epochs=1, enable_model_summary=False, limit_val_batches=0)
    trainer.fit(trained, tiny_loader())
    trainer.save_checkpoint(tmp_path / "t.ckpt")
    accelerator = Accelerator(cpu=True)
    model = TinyModule()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(PacelineWarning, match=r"t\.ckpt'\) cannot restore everything: RNG states and the position"):
        accelerator.load_state(tmp_path / "t.ckpt")
    assert torch.equal(model.layer.weight, trained.layer.weight)

    nn.init.constant_(model.layer.weight, 3.0)
    accelerator.save_state(tmp_path / "s")
    path, last = tmp_path / "s" / "state.ckpt", Trainer(**quiet, max_epochs=1, limit_train_batches=0)
    with pytest.raises(ValueError, match=r"written by Accelerator\.save_state"):
        last.fit(TinyModule(), tiny_loader(), ckpt_path=path)
    found = TinyModule()
    last.fit(found, tiny_loader(), ckpt_path=path, restore=["model"])
    assert found.layer.weight[0, 0] == 3.0


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_g1_g4_one_call_saves_it_all_and_the_commands_understand_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop()
    loop.run(4, tmp_path / "s")
    assert os.listdir(tmp_path / "s") == ["state.ckpt"]
    assert loop.accelerator.save_state(output_dir=str(tmp_path / "s")) == str(tmp_path / "s")
    loop.accelerator.load_state(input_dir=str(tmp_path / "s"))
    assert main(["checkpoint", "verify", str(tmp_path / "s")]) == 0
    assert main(["checkpoint", "show", str(tmp_path / "s"), "--keys"]) == 0
    assert "0.weight" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path / "s"), str(tmp_path / "w.safetensors")]) == 0
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "w.safetensors")["0.weight"], loop.model[0].weight)


def test_g1_several_models_and_optimizers_come_back(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        one, other = nn.Linear(2, 2), nn.Linear(2, 3)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (one, other)]
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(one, other, *optimizers)

    accelerator, (one, other, first, second) = made(0)
    accelerator.backward(one(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum())
    first.step()
    second.step()
    accelerator.save_state(tmp_path / "s")
    accelerator2, (one2, other2, first2, second2) = made(1)
    accelerator2.load_state(tmp_path / "s")
    assert torch.equal(one.weight, one2.weight)
    assert torch.equal(other.weight, other2.weight)
    for mine, theirs in ((first, first2), (second, second2)):
        pairs = zip(mine.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True)
        assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in pairs)


def test_b22_a_frozen_base_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        model[0].requires_grad_(False)
        accelerator = Accelerator(cpu=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        return accelerator, *accelerator.prepare(model, torch.optim.Adam(trained))

    accelerator, model, optimizer = made(0)
    accelerator.backward(model(torch.randn(8, 64)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "whole")
    accelerator.save_state(tmp_path / "trained", only_trainable=True)
    sizes = [(tmp_path / name / "state.ckpt").stat().st_size for name in ("whole", "trained")]
    assert sizes[0] - sizes[1] >= 64 * 65 * 4
    again, loaded, _ = made(1)
    base = loaded[0].weight.detach().clone()
    again.load_state(tmp_path / "trained", strict=True)
    assert torch.equal(loaded[2].weight, model[2].weight)
    assert torch.equal(loaded[1].running_mean, model[1].running_mean)
    assert torch.equal(loaded[0].weight, base)
    assert "The 2 frozen weights keep their current values" in caplog.text


def test_a_state_that_is_not_plain_is_an_error_that_names_the_place_and_leaves_the_old_one(tmp_path: Path) -> None:
    loop = Loop()
    loop.accelerator.save_state(tmp_path / "s")

    class Odd(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"rule": {"how": lambda x: x}}

    loop.accelerator.register_for_checkpointing(Odd())
    with pytest.raises(TypeError, match=r"registered object 1 \(Odd\)\['rule'\]\['how'\] is of type builtins.function"):
        loop.accelerator.save_state(tmp_path / "s")
    assert os.listdir(tmp_path / "s") == ["state.ckpt"]
    Loop().accelerator.load_state(tmp_path / "s")


def test_objects_without_a_state_are_refused_all_by_name() -> None:
    """Objects are told apart by identity: tensors cannot be compared as a whole."""
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r": 1: int, 2: Tensor, 3: Tensor\."):
        accelerator.register_for_checkpointing(Counter(), 3, torch.zeros(2), torch.zeros(3))
    assert accelerator.states.contents.objects == []


def test_an_object_is_registered_once() -> None:
    accelerator, one, other = Accelerator(cpu=True), Counter(), Counter()
    accelerator.register_for_checkpointing(one, other, one)
    accelerator.register_for_checkpointing(other)
    assert accelerator.states.contents.objects == [one, other]


def own_counters(folder: str) -> int:
    loop = Loop()
    rank = loop.accelerator.process_index
    loop.counter.batches = 10 + rank
    loop.accelerator.save_state(folder)
    again = Loop()
    again.accelerator.load_state(folder)
    return again.counter.batches


def test_u8_each_rank_gets_back_its_own_registered_state(tmp_path: Path) -> None:
    assert ranks(2, own_counters, str(tmp_path / "s")) == [10, 11]


# ---- all ranks must call ---------------------------------------------------------------------------------------------


def save_on_one(folder: str) -> None:
    loop = Loop()
    if loop.accelerator.is_main_process:
        loop.accelerator.save_state(folder)
    loop.accelerator.wait_for_everyone()


def test_g1_a_call_on_one_rank_only_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, save_on_one, str(tmp_path / "s"))
    for error in caught.value.errors:
        assert 'rank 0 at "accelerator.save_state(' in str(error)


def different_folders(folder: str) -> None:
    loop = Loop()
    loop.accelerator.save_state(f"{folder}-{loop.accelerator.process_index}")


def test_u8_folders_that_differ_between_ranks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="The ranks are waiting at different barriers"):
        ranks(2, different_folders, str(tmp_path / "s"))


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_that_are_not_known_or_would_run_code_are_refused(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(TypeError, match="only_trainable"):
        loop.accelerator.save_state(tmp_path / "s", only_trainble=True)
    loop.accelerator.save_state(tmp_path / "s")
    with pytest.raises(ValueError, match="never run"):
        loop.accelerator.load_state(tmp_path / "s", load_kwargs={"weights_only": False})
    loop.accelerator.load_state(tmp_path / "s", map_location="cpu")


def test_the_next_pass_over_an_evaluation_loader_is_whole(tmp_path: Path) -> None:
    """It was saved between two passes of it."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Noisy(), 4))
    assert len(list(loader)) == 7
    accelerator.save_state(tmp_path / "s")
    again = Accelerator(cpu=True)
    fresh = again.prepare(DataLoader(Noisy(), 4))
    again.load_state(tmp_path / "s", strict=True)
    assert len(list(fresh)) == 7


# ---- trackers --------------------------------------------------------------------------------------------------------


def logged(folder: Path) -> Loop:
    loop = Loop(log_with="csv", project_dir=str(folder))
    loop.accelerator.init_trackers("run")
    return loop


def test_g1_a_tracker_goes_on_with_the_rows_it_had_when_the_state_was_saved(tmp_path: Path) -> None:
    first = logged(tmp_path / "p")
    for step in range(4):
        first.accelerator.log({"loss": float(step)}, step=step)
        if step == 2:
            first.accelerator.save_state(tmp_path / "s")
    first.accelerator.end_training()
    again = logged(tmp_path / "p")
    again.accelerator.load_state(tmp_path / "s")
    again.accelerator.log({"loss": 30.0}, step=3)
    again.accelerator.end_training()
    (rows,) = (path.read_text().splitlines() for path in (tmp_path / "p").rglob("metrics.csv"))
    assert [row.split(",")[-1] for row in rows[1:]] == ["0.0", "1.0", "2.0", "30.0"]
