"""``accelerator.doctor()``: the parts of a loop of one's own, and nothing left behind."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from patients import CLOCK, Slow, read_clock
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline import Accelerator
from paceline.doctor.report import Report
from paceline.messages import PacelineWarning

PAUSE = 0.01


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    read_clock(monkeypatch.setattr)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        CLOCK.sleep(PAUSE)
        return self.layer(batch)


def prepared(accelerator: Accelerator, seconds: float = PAUSE, count: int = 12) -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loaders = [DataLoader(Slow(length, seconds)) for length in (count, 3)]
    return accelerator.prepare(model, optimizer, *loaders)


def loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, evaluation: Any) -> None:
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        CLOCK.sleep(PAUSE)
    model.eval()
    with torch.no_grad():
        for batch in evaluation:
            model(batch)
    model.train()


def examined() -> Any:
    accelerator = Accelerator(cpu=True)
    parts = prepared(accelerator)
    with accelerator.doctor(write=False) as doctor:
        loop(accelerator, *parts)
    return None if doctor.report is None else doctor.report.as_dict()


def test_the_parts_of_a_loop_of_one_s_own() -> None:
    (facts,) = Report.from_dict(examined()).ranks
    assert facts.steps == facts.updates == 9
    for part in ("data", "forward", "other"):
        assert facts.seconds[part] >= 9 * PAUSE, part
    assert facts.seconds["evaluation"] >= 3 * 2 * PAUSE
    assert facts.seconds["backward"] > 0
    assert facts.seconds["optimizer"] > 0
    assert facts.loader["num_workers"] == 0


def test_what_is_prepared_inside_is_measured_and_all_is_as_before_after() -> None:
    accelerator = Accelerator(cpu=True)
    before = set(vars(accelerator))
    with accelerator.doctor(write=False) as doctor:
        model, optimizer, loader, evaluation = prepared(accelerator)
        loop(accelerator, model, optimizer, loader, evaluation)
    assert doctor.report is not None
    assert doctor.report.ranks[0].seconds["forward"] > 0
    assert set(vars(accelerator)) == before
    assert "step" not in vars(optimizer)
    assert "_hand_out" not in vars(loader)
    assert "forward" not in vars(model)


class Twice(Net):
    """A method that calls the module itself, as `training_step` does."""

    def loss(self, batch: Any) -> Any:
        return self(batch).square().mean()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_doctor_leaves_models_prepared_and_loaders_their_own(precision: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = Twice()
    model, loader = accelerator.prepare(model, DataLoader(Slow(6, 0.0)))
    own = vars(model).get("forward")
    with accelerator.doctor(write=False), accelerator.doctor(write=False):
        assert own is None or vars(model)["forward"] is own
        loss = accelerator.prepared.placement(model, "loss").route_method("loss")
        shorter = accelerator.skip_first_batches(loader, 2)
        for batch in shorter:
            assert loss(batch).dtype == torch.float32
        assert (shorter.end_of_dataloader, loader.end_of_dataloader) == (True, False)
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        assert "forward" not in vars(model)
    assert "forward" not in vars(model)


def test_an_optimizer_that_is_prepared_inside_steps_through_its_strategy() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Net())
    with accelerator.doctor(write=False) as doctor:
        optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Slow(12, 0.0)))
        own = vars(model)["forward"]
        assert accelerator.prepare(model) is model
        loop(accelerator, model, optimizer, loader, [])
    assert doctor.report is not None
    assert doctor.report.ranks[0].updates == 9
    assert vars(model)["forward"] is own
    assert not {"step", "zero_grad"} & set(vars(optimizer))


def test_an_error_in_the_loop_is_the_loop_s_and_leaves_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model, *_, loader, _ = prepared(accelerator)
    context = accelerator.doctor(write=False)

    def fails() -> None:
        with context:
            model(next(iter(loader)))
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fails()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("broken", [False, True])
def test_a_loop_that_is_ended_by_an_error_is_judged_by_the_steps_it_has_done(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = prepared(accelerator, 0.0)
    context = accelerator.doctor(write=False)
    examiner: list[Any] = []

    def ends() -> None:
        with context as doctor:
            examiner.append(doctor)
            for index, batch in enumerate(loader):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if index == 8:
                    raise KeyboardInterrupt

    if broken:
        monkeypatch.setattr("paceline.doctor.doctor.Doctor.facts", lambda self: 1 / 0)
    told = pytest.warns(PacelineWarning, match="ZeroDivisionError") if broken else nullcontext()
    with told, pytest.raises(KeyboardInterrupt):
        ends()
    if not broken:
        assert examiner[0].report.ranks[0].steps == 8 - 3, "the step under way is left out"
    assert "forward" not in vars(model)


def test_an_evaluation_that_is_broken_off_counts_as_long_as_it_took() -> None:
    accelerator = Accelerator(cpu=True)
    parts = prepared(accelerator)
    found: list[Any] = []

    def ends() -> None:
        with accelerator.doctor(write=False) as doctor:
            found.append(doctor)
            loop(accelerator, *parts)
            parts[0].eval()
            for _ in parts[-1]:
                CLOCK.sleep(0.3)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ends()
    assert found[0].report.ranks[0].seconds["evaluation"] >= 0.3


def test_a_hidden_wait_in_the_loop_names_its_line() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = prepared(accelerator, 0.0)
    with accelerator.doctor(write=False) as doctor:
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())  # the planted line
    assert doctor.report is not None
    (finding,) = [finding for finding in doctor.report.findings if finding.key == "host_syncs"]
    assert "planted line" in finding.what
    assert "self.log" not in finding.change
    assert "every n steps" in finding.change


def test_each_of_two_processes_is_in_the_report() -> None:
    first, second = ranks(2, examined)
    assert second is None
    report = Report.from_dict(first)
    assert [facts.rank for facts in report.ranks] == [0, 1]
    assert all(facts.communication["exposed"] >= 0 for facts in report.ranks)
    assert all(facts.updates == 3 for facts in report.ranks), "12 samples in two shares, the first 3 steps left out"


def test_it_changes_no_number() -> None:
    weights = []
    for measured in (False, True):
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        parts = prepared(accelerator, 0.0)
        if measured:
            with accelerator.doctor(write=False):
                loop(accelerator, *parts)
        else:
            loop(accelerator, *parts)
        weights.append(parts[0].layer.weight.detach().clone())
    assert torch.equal(*weights)
