from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.callbacks import LearningRateFinder
from paceline.messages import PacelineWarning
from paceline.tuner.lr_range_test import LRFinder, change_rates, set_rates, shares_of
from paceline.tuner.tuner import Tuner

SHORT: dict[str, Any] = QUIET | {"max_epochs": 1}


def test_rates_grow_as_asked_and_the_range_test_ends_where_the_loss_explodes() -> None:
    found = Tuner(Trainer(**SHORT)).lr_find(TinyModule(), tiny_loader(8, 8), min_lr=1e-4, max_lr=100.0, num_training=80)
    assert found is not None
    rates, losses = found.results["lr"], found.results["loss"]
    assert rates[0] == 1e-4
    assert 20 < len(rates) < 80
    assert {round(b / a, 9) for a, b in itertools.pairwise(rates)} == {round(1e6 ** (1 / 79), 9)}
    assert not losses[-1] <= 4 * min(losses)
    rate = found.suggestion()
    assert rate is not None
    assert 1e-3 < rate < 1
    linear = Tuner(Trainer(**SHORT)).lr_find(
        TinyModule(), tiny_loader(8, 8), min_lr=0.01, max_lr=0.1, num_training=10, mode="linear"
    )
    assert linear is not None
    assert linear.results["lr"] == pytest.approx([0.01 * i for i in range(1, 11)])


def test_the_suggestion_is_where_the_loss_falls_fastest_over_the_logarithm() -> None:
    rates = [10 ** (-5 + i / 10) for i in range(40)]
    losses = [1 / (1 + math.exp(4 * (math.log10(rate) + 3))) for rate in rates]
    found = LRFinder("exponential", rates[0], rates[-1], 40, {"lr": rates, "loss": losses})
    assert found.suggestion() == pytest.approx(1e-3)
    assert found.suggestion(skip_begin=25) == rates[25]
    exploded = [*losses, 9.0, 5.0, 4.0, 3.0]
    found_late = LRFinder("exponential", 0.0, 1.0, 44, {"lr": [*rates, 1.0, 2.0, 3.0, 4.0], "loss": exploded})
    assert found_late.suggestion() == pytest.approx(1e-3)
    losses[30] = math.nan
    assert found.suggestion() == pytest.approx(1e-3)
    with pytest.warns(PacelineWarning, match="ran 40 steps, too few to suggest"):
        assert found.suggestion(skip_begin=39) is None


def test_a_finder_shows_its_settings_and_not_every_rate() -> None:
    found = LRFinder("linear", 0.1, 1.0, 40, {"lr": [0.1] * 40, "loss": [1.0] * 40})
    assert repr(found) == "LRFinder(mode='linear', lr_min=0.1, lr_max=1.0, num_training=40)"


class Breaks(TinyModule):
    """Its loss is no number from a step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.made = first, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.made += 1
        return self.loss(batch) * (math.nan if self.made >= self.first else 1.0)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            1,
            r"the loss was nan from step 1 on, at a rate of 1e-08\. The rate cannot be the cause before the first",
        ),
        (
            4,
            r"the loss was nan from step 4 on, at a rate of 1\.748e-08\. If 1\.748e-08 is too high, lower",
        ),
    ],
)
def test_a_loss_that_is_no_number_is_said_with_its_step(first: int, said: str) -> None:
    module = Breaks(first)
    with pytest.warns(PacelineWarning, match=said + ".*detect_anomaly=True"):
        Tuner(Trainer(**SHORT)).lr_find(module, tiny_loader())
    assert module.lr == 0.1


class Rates(TinyModule):
    """Makes its optimizer in one of several ways."""

    def __init__(self, how: Callable[[Any], Any], lr: float | None = 0.1) -> None:
        super().__init__()
        self.how = how
        self.save_hyperparameters("lr")
        self.lr = lr  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return self.how(self)


def one_cycle(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=module.lr, total_steps=100)]


READERS = {
    "attribute": lambda module: torch.optim.SGD(module.parameters(), lr=module.lr),
    "hyperparameter": lambda module: torch.optim.AdamW(module.parameters(), lr=module.hparams.lr),
    "a multiple": lambda module: torch.optim.Adam(module.parameters(), lr=3 * module.lr),
    "a default": lambda module: torch.optim.SGD(module.parameters(), lr=module.lr or 0.1),
    "a tensor": lambda module: torch.optim.Adam(module.parameters(), lr=torch.tensor(module.lr)),
    "a group": lambda module: torch.optim.SGD(
        [{"params": [module.layer.weight], "lr": 0.1}, {"params": [module.layer.bias], "lr": module.lr}], lr=0.1
    ),
    "a schedule": one_cycle,
}


@pytest.mark.parametrize("how", READERS)
def test_a_rate_that_is_read_in_any_way_is_fine(how: str, recwarn: pytest.WarningsRecorder) -> None:
    module = Rates(READERS[how], lr=None if how == "a default" else 0.1)
    found = Tuner(Trainer(**SHORT)).lr_find(module, tiny_loader(), num_training=20)
    assert found is not None
    assert module.lr == found.suggestion()
    assert not [warning for warning in recwarn if "creates the same optimizer" in str(warning.message)]


def test_a_rate_that_nobody_reads_is_said_before_the_test(recwarn: pytest.WarningsRecorder) -> None:
    module = Rates(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    wanted = r"lr_find sets 'Rates\.lr' and 'Rates\.hparams\.lr', but Rates\.configure_optimizers\(\) creates the same "
    with pytest.warns(
        PacelineWarning, match=wanted + r"optimizer regardless.* Create the optimizer with lr=self\.lr, or pass"
    ):
        Tuner(Trainer(**SHORT)).lr_find(module, tiny_loader(), num_training=20)
    with pytest.warns(PacelineWarning, match=wanted):
        Trainer(**SHORT, callbacks=[LearningRateFinder(num_training_steps=20)]).fit(module, tiny_loader())
    recwarn.clear()
    Tuner(Trainer(**SHORT)).lr_find(module, tiny_loader(), num_training=20, update_attr=False)
    assert not [warning for warning in recwarn if "creates the same optimizer" in str(warning.message)]


def test_the_plot_marks_the_suggestion(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [10 ** (-5 + i / 10) for i in range(40)]
    found = LRFinder("exponential", 0.0, 1.0, 40, {"lr": rates, "loss": [-rate for rate in rates]})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
            found.plot()
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = found.plot(suggest=True)
    assert figure.axes[0].get_xscale() == "log"
    assert len(figure.axes[0].lines) == 2
    figure.savefig(tmp_path / "curve.png")
    assert found.plot(ax=figure.axes[0]) is figure


class Grouped(TinyModule):
    """Two groups, one with a tenth of the rate; remembers the rates of each step."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.other = nn.Linear(4, 1)
        self.rates: list[tuple[float, ...]] = []

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.other(x)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        print("rates", [group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [
                {"params": self.other.parameters(), "lr": self.lr / 10},
                {"params": self.layer.parameters(), "lr": self.lr},
            ]
        )


def test_groups_keep_their_rates_in_proportion(capsys: pytest.CaptureFixture[str]) -> None:
    Tuner(Trainer(**SHORT)).lr_find(Grouped(), tiny_loader(), min_lr=1e-3, max_lr=1e-1, num_training=3)
    said = [eval(line.removeprefix("rates ")) for line in capsys.readouterr().out.splitlines()]
    assert said == [pytest.approx(pair) for pair in ([1e-4, 1e-3], [1e-3, 1e-2], [1e-2, 1e-1])]


def test_the_attribute_gets_the_suggestion_wherever_it_lies() -> None:
    class Nested(TinyModule):
        def __init__(self, optim: dict[str, float]) -> None:
            super().__init__()
            self.save_hyperparameters()
            del self.lr

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.optim["rate"])

    module = Nested({"rate": 0.3})
    found = Tuner(Trainer(**SHORT)).lr_find(module, tiny_loader(), num_training=30, attr_name="optim.rate")
    assert found is not None
    assert module.hparams.optim["rate"] == found.suggestion()


def curve(strategy: str, batch_size: int) -> list[float]:
    torch.manual_seed(0)
    module = TinyModule().double()
    loader = tiny_loader(8, 4)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*(t.double() for t in loader.dataset.tensors)),
        batch_size,  # type: ignore
    )
    found = Tuner(Trainer(**SHORT, strategy=strategy)).lr_find(module, loader, num_training=20, min_lr=1e-3)
    assert found is not None
    return found.results["loss"]


def test_two_processes_see_the_curve_of_one_with_their_batches_together() -> None:
    alone = curve("cpu", 4)
    assert ranks(2, curve, "ddp", 2) == [pytest.approx(alone, rel=1e-12)] * 2


def test_a_training_goes_on_in_proportion_to_a_new_rate() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.01}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    optimizer.step()
    scheduler.step()
    shares = shares_of(optimizer, 0.1)
    assert shares == pytest.approx([1.0, 0.1])
    change_rates(optimizer, [scheduler], shares, 0.4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])
    set_rates(optimizer, shares, 1.0)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1)
