from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from terminals import seen
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.callbacks import ModelSummary, RichModelSummary
from paceline.callbacks.model_summary import human_readable, summarize


class Net(TinyModule):
    """conv (80) -> norm (16) -> linear (2890), a loose parameter (3), and an embedding whose weight the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        self.embedding = nn.Embedding(10, 10)
        self.head = nn.Linear(10, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.example_input_array = torch.zeros(2, 1, 8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": self.head(self.net(x)), "inputs": [x]}


def test_parameters_are_counted_by_layer_and_shared_ones_once_in_the_total() -> None:
    summary = summarize(Net())
    counts = {layer.name: layer.parameters for layer in summary.layers}
    assert counts == {"layer": 0, "net": 2986, "embedding": 100, "head": 100, "other params": 3}
    assert summary.total_parameters == 2986 + 100 + 3
    assert summary.trainable_parameters == 2986 + 100
    assert summary.non_trainable_parameters == 3
    assert summary.model_size == pytest.approx(4 * 3089 / 1e6)
    assert summary.shares_parameters
    assert "Some layers share parameters" in str(summary)


def test_the_size_counts_each_parameter_in_its_own_dtype() -> None:
    net = nn.Sequential(nn.Linear(10, 10, bias=False).to(torch.bfloat16), nn.Linear(10, 10, bias=False).double())
    assert summarize(net).parameter_bytes == 100 * 2 + 100 * 8


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["layer", "net", "embedding", "head", "other params"]),
        (2, ["layer", "net", "net.0", "net.1", "net.2", "net.3", "embedding", "head", "other params"]),
        (-1, ["layer", "net", "net.0", "net.1", "net.2", "net.3", "embedding", "head", "other params"]),
    ],
)
def test_max_depth_limits_the_rows_and_never_the_totals(depth: int, names: list[str]) -> None:
    summary = summarize(Net(), depth)
    assert [layer.name for layer in summary.layers] == names
    assert summary.total_parameters == 3089


def test_the_example_input_gives_sizes_and_operations() -> None:
    summary = summarize(Net(), max_depth=2)
    layers = {layer.name: layer for layer in summary.layers}
    assert (layers["net"].in_size, layers["net"].out_size) == ([2, 1, 8, 8], [2, 10])
    assert (layers["net.0"].in_size, layers["net.0"].out_size) == ([2, 1, 8, 8], [2, 8, 6, 6])
    convolution, linear, head = 2 * 2 * 8 * 36 * 9, 2 * 2 * 288 * 10, 2 * 2 * 10 * 10
    assert layers["net.0"].flops == convolution
    assert layers["net"].flops == convolution + linear
    assert summary.total_flops == convolution + linear + head
    assert layers["embedding"].in_size == "?"


def test_a_layer_called_twice_counts_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            self.example_input_array = (torch.zeros(1, 4),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    assert summarize(Twice()).layers[0].flops == 2 * 2 * 16


@pytest.mark.parametrize("inputs", [{"x": torch.zeros(3, 4), "y": torch.zeros(3, 4)}, (torch.zeros(3, 4),) * 2])
def test_several_example_inputs_are_a_tuple_or_a_dict(inputs: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(4, 4, 2)
            self.example_input_array = inputs

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x, y)

    layer = summarize(Two()).layers[0]
    assert (layer.in_size, layer.out_size) == ([[3, 4], [3, 4]], [3, 2])


def test_looking_leaves_no_trace_in_modes_statistics_random_numbers_hooks_or_gradients() -> None:
    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x + torch.rand_like(x))

    module = Noisy()
    module.net[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    summary = summarize(module, -1)
    assert summary.has_sizes
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in module.net] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert all(p.grad is None for p in module.parameters())


def test_modes_are_shown_and_counted() -> None:
    module = Net()
    module.net.eval()
    summary = summarize(module)
    assert {layer.name: layer.training for layer in summary.layers}["net"] is False
    assert (summary.modules_in_train_mode, summary.modules_in_eval_mode) == (3, 5)
    text = str(summary)
    assert "3         Modules in train mode" in text
    assert "5         Modules in eval mode" in text


def test_parameters_without_a_shape_yet_are_marked_and_stay_without_one() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.LazyLinear(3)
            self.example_input_array = torch.zeros(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    module = Lazy()
    summary = summarize(module)
    assert summary.total_parameters == 20
    assert summary.has_lazy_parameters
    assert "0 + ?" in str(summary)
    assert "get their shape in the first forward" in str(summary)
    assert isinstance(module.second, nn.LazyLinear)


def test_an_example_input_that_does_not_fit_warns_and_the_rest_is_shown() -> None:
    module = Net()
    module.example_input_array = torch.zeros(2, 3)
    with pytest.warns(UserWarning, match=r"could not run Net\.forward with its example_input_array.*Correct") as caught:
        summary = summarize(module)
    assert len(caught) == 1
    assert not summary.has_sizes
    assert summary.total_parameters == 3089
    assert module.training
    assert not module.net._forward_hooks


def test_sizes_by_layer_are_those_of_the_forward_pass_and_unknown_elsewhere() -> None:
    summary = summarize(Net())
    assert summary.layer_names == ["layer", "net", "embedding", "head"]
    assert summary.in_sizes == ["?", [2, 1, 8, 8], "?", [2, 10]]
    assert summary.out_sizes == ["?", [2, 10], "?", [2, 10]]
    deep = summarize(Net(), -1)
    assert dict(zip(deep.layer_names, deep.out_sizes, strict=True))["net.0"] == [2, 8, 6, 6]
    module = Net()
    module.example_input_array = None
    assert set(summarize(module).in_sizes) == {"?"}


def test_the_table_lines_up() -> None:
    lines = str(summarize(Net(), -1)).splitlines()
    header, rows = lines[0], lines[2:11]
    assert [column.strip() for column in header.split("|")] == [
        "", "Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes",
    ]  # fmt: skip
    bars = [at for at, letter in enumerate(header) if letter == "|"]
    assert all(row[at] == "|" for row in rows for at in bars)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 K"), (12345, "12.3 K"), (999_999, "1.0 M"), (7 * 10**9, "7.0 B"),
     (2 * 10**15, "2,000 T")],
)  # fmt: skip
def test_large_numbers_are_shortened(number: int, text: str) -> None:
    assert human_readable(number) == text


def fit(callback: ModelSummary, module: Any) -> None:
    trainer = Trainer(
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        accelerator="cpu",
    )
    trainer.fit(module, tiny_loader(1))


class Fits(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 4)


def test_a_fit_shows_the_table_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    fit(ModelSummary(), Fits())
    text = caplog.text
    assert text.count("Total params") == 1
    assert "0 | layer | Linear | 5      | train | 16" in text
    assert "[2, 4]   | [2, 1]" in text


def test_the_example_input_is_moved_and_run_in_the_precision_of_the_run() -> None:
    seen = []

    class Looks(Fits):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(x)

    for precision in ("bf16-true", "bf16-mixed", "64-true"):
        trainer = Trainer(
            callbacks=[ModelSummary()],
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            max_epochs=1,
            limit_train_batches=1,
            accelerator="cpu",
        )
        trainer.fit(Looks(), tiny_loader(1))
        trained = seen[-1]
        assert seen[-2] == trained, precision
    assert {dtype for dtype, _ in seen} == {torch.bfloat16, torch.float32, torch.float64}


def test_the_summary_does_not_change_what_is_trained() -> None:
    weights = []
    for depth in (0, -1):
        torch.manual_seed(3)
        module = Fits()
        module.layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
        fit(ModelSummary(max_depth=depth), module)
        weights.append(module.layer[1].weight.detach().clone())
    assert torch.equal(weights[0], weights[1])


def test_depth_0_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    fit(ModelSummary(max_depth=0), Fits())
    assert "params" not in caplog.text


def test_what_is_shown_can_be_overridden() -> None:
    shown = []

    class Own(RichModelSummary):
        def summarize(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            shown.append(summary.total_parameters)

    fit(Own(), TinyModule())
    assert shown == [5]


@pytest.mark.parametrize("depth", [-2, 1.5, "all", True, math.inf])
def test_a_depth_that_is_no_number_of_levels_is_refused(depth: Any) -> None:
    for make in (ModelSummary, lambda max_depth: summarize(nn.Linear(1, 1), max_depth)):
        with pytest.raises(ValueError, match=r"max_depth=.*must be a number of levels.*-1 for all"):
            make(max_depth=depth)


class Deep(TinyModule):
    """Long names, long types, long sizes."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.feature_extractor = nn.ModuleDict({"positional_encoding_of_tokens": nn.TransformerEncoder(encoder, 2)})
        self.head = Heads()
        self.example_input_array = torch.zeros(2, 16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.feature_extractor["positional_encoding_of_tokens"](x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits_of_the_classes": self.linear(x), "features_before_the_head": [x, x]}


def words(text: str) -> list[str]:
    return re.findall(r"[^\s|]+", text)


@pytest.mark.parametrize("module", [Net, Deep])
@pytest.mark.parametrize("depth", [1, -1])
@pytest.mark.parametrize("columns", [60, 70, 80, 100, 130])
def test_the_table_fits_any_width_from_60_columns_on_and_breaks_no_word(module: Any, depth: int, columns: int) -> None:
    summary = summarize(module(), depth)
    whole = summary.text()
    lines = summary.text(columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert all(len(row) == len(row.rstrip()) for row in lines)
    known = "".join(words(whole))
    for word in words("\n".join(lines)):
        assert word in known or word.endswith("...") or set(word) == {"-"} or "Left" in lines[-1], word


def test_a_table_that_fits_is_left_alone_and_a_wide_one_is_folded_before_columns_are_left_out() -> None:
    summary = summarize(Net(), 2)
    whole = summary.text()
    widest = max(map(len, whole.splitlines()))
    assert summary.text(widest) == whole
    folded = summary.text(widest - 5)
    assert [name.strip() for name in folded.splitlines()[0].split("|")][1:] == [
        "Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes",
    ]  # fmt: skip
    assert len(folded.splitlines()) > len(whole.splitlines())
    narrow = summarize(Deep(), -1).text(60)
    assert "Left out for lack of room: " in narrow


@pytest.mark.parametrize("columns", [60, 80])
def test_a_terminal_gets_a_table_that_it_does_not_break_and_a_pipe_the_whole_one(columns: int) -> None:
    def run() -> None:
        fit(ModelSummary(max_depth=2), Trains())

    class Trains(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.scale.sum() * self.head.weight.sum()

    in_terminal, in_pipe = seen(run, columns), seen(run, None)
    assert str(summarize(Trains(), 2)) in in_pipe.text
    assert summarize(Trains(), 2).text(columns) in in_terminal.text
    (rule, _) = [line for line in in_terminal.lines if line and set(line) == {"-"}]
    assert len(rule) <= columns
    printed = seen(lambda: print(summarize(Trains(), 2)), columns)
    assert printed.text == summarize(Trains(), 2).text(columns)


def test_a_summarize_with_other_arguments_is_refused_with_the_right_ones() -> None:
    class Own(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total_parameters: int, **more: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(TypeError, match=r"Own\.summarize\(summary_data.*Define it as summarize\(self, trainer, pl_mod"):
        Own().on_fit_start(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), Net())
