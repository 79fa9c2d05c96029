"""Pickling and copying an Accelerator and what it prepared: a copy goes on where the original stood."""

from __future__ import annotations

import copy
import csv
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from own_loop import data, loss_of, weights
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline import Accelerator

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "deepcopy": copy.deepcopy,
}
EPOCHS, BATCHES = 2, 5


class Loop(NamedTuple):
    """What a loop needs; micro-batches of 2, windows of 2, so that the last of an epoch is short."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


def made(**given: Any) -> Loop:
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **given)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = DataLoader(data(2 * BATCHES, torch.float32), 2, shuffle=True)
    return Loop(accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def step(loop: Loop) -> None:
    loop.optimizer.step()
    loop.scheduler.step()
    loop.optimizer.zero_grad()


def train(loop: Loop, stop: int | None = None, inside: bool = False, pause: Callable[[], None] = lambda: None) -> Loop:
    """Train to the end, or call ``pause`` after so many micro-batches; ``inside``: before the step of the last one."""
    done = 0
    if stop == 0:
        pause()
        return loop
    for _ in range(loop.loader.epoch, EPOCHS):
        for batch in loop.loader:
            done += 1
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loss_of(loop.model, batch))
                if done == stop and inside:
                    pause()
                    return loop
                step(loop)
            if done == stop:
                pause()
                return loop
    return loop


@pytest.fixture(scope="module")
def trained() -> Callable[[str], torch.Tensor]:
    """The weights at the end of a loop that nobody interrupted, by precision."""
    found: dict[str, torch.Tensor] = {}

    def of(precision: str) -> torch.Tensor:
        if precision not in found:
            found[precision] = weights(train(made(mixed_precision=precision)).model)
        return found[precision]

    return of


PLACES = {
    "before training": (0, False),
    "in a window": (1, False),
    "before a step": (2, True),
    "after a step": (2, False),
    "in a later window": (8, False),
    "before the step of a short window": (5, True),
    "after a pass": (5, False),
}


@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step... has been overridden")  # torch, of any read scheduler
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("place", PLACES)
def test_a_copy_trains_on_to_the_same_bits(place: str, how: str, trained: Any) -> None:
    copies: list[Loop] = []
    stop, inside = PLACES[place]
    loop = made()
    train(loop, stop, inside, lambda: copies.append(Loop(*COPIES[how](tuple(loop)))))
    other = copies[0]
    before = weights(loop.model)
    if inside:
        step(other)
    train(other)
    assert torch.equal(weights(other.model), trained("no"))
    assert torch.equal(weights(loop.model), before)  # the original stays where it was
    assert other.accelerator.prepared.models == [other.model]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_copy_computes_in_the_precision_of_the_original(precision: str, trained: Any) -> None:
    loop, copies = made(mixed_precision=precision), list[Loop]()
    train(loop, 7, pause=lambda: copies.append(Loop(*COPIES["pickle"](tuple(loop)))))
    assert copies[0].accelerator.mixed_precision == precision
    assert torch.equal(weights(train(copies[0]).model), trained(precision))


@pytest.mark.parametrize("how", COPIES)
def test_each_prepared_object_can_be_copied_by_itself(how: str) -> None:
    loop = made()
    optimizers: list[Any] = []

    def take() -> None:
        optimizers.append(COPIES[how](loop.optimizer))
        step(loop)

    train(loop, 2, inside=True, pause=take)
    optimizers[0].step()
    theirs = [p for group in optimizers[0].param_groups for p in group["params"]]
    assert all(torch.equal(one, other) for one, other in zip(theirs, loop.model.parameters(), strict=True))
    scheduler = COPIES[how](loop.scheduler)
    assert scheduler.get_last_lr() == loop.scheduler.get_last_lr()
    scheduler.step()
    state = COPIES[how](loop.accelerator.gradient_state)
    assert (state.num_steps, state.sync_gradients, state.in_dataloader) == (2, True, False)
    iterator = iter(loop.loader)
    next(iterator)
    loader = COPIES[how](loop.loader)
    fresh = made().loader
    fresh.set_epoch(1)
    assert [x.tolist() for x, _ in loader] == [x.tolist() for x, _ in fresh]  # the pass under way, anew
    assert COPIES[how](loader).epoch == 2
    plain = COPIES[how](loop.model)
    assert torch.equal(weights(plain), weights(loop.model))
    without_model = loop.accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    without_model.param_groups[0]["params"][0].grad = torch.ones(1)
    other = COPIES[how](without_model)
    other.step()
    assert other.param_groups[0]["params"][0].item() == 0


def test_optimizers_that_have_stepped_in_a_window_have_stepped_in_the_copy_too() -> None:
    loop = made()
    copies: list[Any] = []
    for batch in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loss_of(loop.model, batch))
            loop.optimizer.step()
            if loop.accelerator.sync_gradients:
                copies.append(COPIES["pickle"](tuple(loop)))
                break
    other = Loop(*copies[0])
    assert other.model[0].weight.grad is not None
    other.optimizer.zero_grad()
    assert other.model[0].weight.grad is None


def write(path: Path, loop: Loop) -> None:
    path.write_bytes(pickle.dumps(tuple(loop)))


PROGRAM = """
import pickle, sys
from pathlib import Path
import torch
from test_pickling import Loop, train
loop = Loop(*pickle.loads(Path(sys.argv[1]).read_bytes()))
torch.save([p.detach() for p in train(loop).model.parameters()], sys.argv[2])
"""


def test_a_fresh_process_trains_on_with_what_it_reads(tmp_path: Path, trained: Any) -> None:
    loop = made()
    train(loop, 3, pause=lambda: write(tmp_path / "loop", loop))
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[0]), str(here.parents[2])]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{PROGRAM}", "loop", "weights"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.cat([one.reshape(-1) for one in torch.load(tmp_path / "weights")])
    assert torch.equal(found, trained("no"))


def test_a_copy_logs_to_the_same_files(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("p", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=0)
    other = pickle.loads(pickle.dumps(accelerator))
    other.log({"loss": 2.0}, step=1)
    other.end_training()
    with open(tmp_path / "p" / "version_0" / "metrics.csv", newline="") as file:
        assert [(row["step"], row["loss"]) for row in csv.DictReader(file)] == [("0", "1.0"), ("1", "2.0")]


def test_compiled_models_are_compiled_in_the_copy_too() -> None:
    loop = made(dynamo_backend="eager")
    other = Loop(*COPIES["pickle"](tuple(loop)))
    assert torch.equal(loop.model.eval()(torch.ones(1, 4)), other.model.eval()(torch.ones(1, 4)))
    assert hasattr(other.model.forward.train, "_torchdynamo_orig_callable")


def test_what_several_processes_share_is_refused_with_what_to_do_instead() -> None:
    def run() -> list[str]:
        loop = made()
        said = []
        for one in (loop.accelerator, loop.optimizer, loop.scheduler):
            try:
                pickle.dumps(one)
            except TypeError as error:
                said.append(str(error))
        return said

    for said in ranks(2, run):
        assert [text.partition(" cannot")[0] for text in said] == ["An Accelerator", *["A prepared AdamW"] * 2]
        assert all("under DDPStrategy, because 2 processes share it. Save everything with" in text for text in said)


def test_a_module_that_holds_its_own_accelerator_says_what_to_pickle_instead() -> None:
    loop = made()
    loop.model.accelerator = loop.accelerator
    other = pickle.loads(pickle.dumps(loop.accelerator))
    assert other.prepared.models[0].accelerator is other
    loop.accelerator.gradient_state.num_steps = 1
    with pytest.raises(TypeError, match="Sequential stores the Accelerator or optimizer that it was prepared with"):
        pickle.loads(pickle.dumps(loop.model))
