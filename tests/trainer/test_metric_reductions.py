"""One logged name: what a record keeps of its values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies import SingleDevice
from paceline.trainer.metric_reductions import Record, RecordOptions, as_tensor, make_record, reduction_of
from paceline.trainer.phases import EVAL_BATCH, TRAIN_BATCH

DEVICE = SingleDevice()
DEFAULTS = RecordOptions(False, None, None, None, "mean", False, False, None, True, None, False)


def record(
    value: Any = 0.0, moment: Any = EVAL_BATCH, weigh: Callable[[str], int] = lambda name: 1, **options: Any
) -> Record:
    """A record as the first call of ``self.log("v", value, **options)`` makes it, with nothing in it yet."""
    return make_record("v", value, DEFAULTS._replace(**options), moment, "a test", None, weigh)


def computed(kept: Record) -> float:
    return float(kept.compute(DEVICE))


VALUES = st.lists(
    st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 100), st.booleans()), min_size=1, max_size=20
)


@given(values=VALUES)
def test_every_reduction_equals_its_definition_for_numbers_and_tensors_alike(
    values: list[tuple[float, int, bool]],
) -> None:
    kept = {fx: record(reduce_fx=fx) for fx in ("mean", "sum", "min", "max")}
    for value, weight, as_number in values:
        for one in kept.values():
            one.update(value if as_number else torch.tensor(value), weight)
    numbers, weights = [v for v, _, _ in values], [w for _, w, _ in values]
    assert computed(kept["sum"]) == pytest.approx(math.fsum(numbers), abs=1e-6)
    assert (computed(kept["min"]), computed(kept["max"])) == (min(numbers), max(numbers))
    if sum(weights):
        mean = math.fsum(v * w for v, w in zip(numbers, weights, strict=True)) / sum(weights)
        assert computed(kept["mean"]) == pytest.approx(mean, abs=1e-6)
    else:
        assert math.isnan(computed(kept["mean"]))


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_is_not_hidden(reduce_fx: str, place: int) -> None:
    kept = record(reduce_fx=reduce_fx)
    for index in range(3):
        kept.update(math.nan if index == place else 1.0, 1)
    assert math.isnan(computed(kept))


@pytest.mark.parametrize("as_number", [True, False])
def test_a_million_small_terms_lose_no_digits(as_number: bool) -> None:
    kept, value = record(), torch.tensor(0.1)
    number = value.item()
    for _ in range(1_000_000 if as_number else 100_000):
        kept.update(number if as_number else value, 5)
    assert computed(kept) == pytest.approx(number, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_short_floats_are_exact(dtype: torch.dtype) -> None:
    kept, value = record(reduce_fx="sum"), torch.tensor(1.0078125, dtype=dtype)
    for _ in range(1000):
        kept.update(value, None)
    assert computed(kept) == 1000 * value.item()


@pytest.mark.parametrize("options", [{}, {"on_epoch": False}, {"reduce_fx": "max"}])
def test_a_step_value_is_a_copy(options: dict[str, Any]) -> None:
    value = torch.tensor(1.0)
    kept = record(value, TRAIN_BATCH, **{"on_epoch": True, **options})
    kept.update(value, 1)
    value += 1
    assert kept.step_value() == 1.0


def test_enable_graph_keeps_the_graph_and_sums_without_it() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for reduce_fx in ("mean", "sum", "min", "max"):
        kept = record(weight, TRAIN_BATCH, on_epoch=True, enable_graph=True, reduce_fx=reduce_fx)
        kept.update(weight * 3, 1)
        value = kept.step_value()
        assert isinstance(value, torch.Tensor)
        assert torch.autograd.grad(value, weight)[0] == 3.0
        assert as_tensor(kept.compute(DEVICE), kept.dtype).requires_grad is False


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (torch.tensor([[3.0]]), 3.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(7), 7.0),
        (np.float32(0.5), 0.5),
        (np.int64(4), 4.0),
        (np.array(2.0), 2.0),
        (True, 1.0),
        (3, 3.0),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:.*got an integer")
def test_everything_that_is_one_number_is_taken(value: Any, number: float) -> None:
    for options in ({"on_epoch": False}, {"on_epoch": True}, {"on_epoch": True, "reduce_fx": "min"}):
        kept = record(value, TRAIN_BATCH, **options)
        kept.update(value, 1)
        shown = kept.step_value()
        assert shown is not None
        found = as_tensor(shown, kept.dtype)
        assert (found.shape, found.dtype, found.item()) == ((), torch.float32, number)
        if kept.on_epoch:
            assert computed(kept) == number


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.array([1.0, 2.0]), TypeError, r"got array\(\[1., 2.\]\) \(ndarray\)"),
        (1j, TypeError, r"got 1j \(complex\)"),
        (torch.tensor(1j), TypeError, "got a complex tensor, but a real number is needed"),
        (object, TypeError, r"got <class 'object'> \(type\)"),
        ("1.5", TypeError, r"got '1.5' \(str\)"),
        (torch.ones(0), ValueError, r"got a tensor of shape \(0,\), but a single number is needed"),
    ],
    ids=repr,
)
def test_what_is_not_one_number_is_named(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        record(value)


@pytest.mark.parametrize("options", [{"on_epoch": False}, {"on_epoch": True}, {"on_epoch": True, "reduce_fx": "max"}])
@pytest.mark.parametrize("value", ["text", None, torch.ones(3), [1.0]], ids=repr)
def test_a_later_value_that_is_no_number_is_named_where_it_is_logged(options: dict[str, Any], value: Any) -> None:
    kept = record(1.0, TRAIN_BATCH, **options)
    kept.update(1.0, 1)
    with pytest.raises((TypeError, ValueError), match=r"self\.log\('v'\) got"):
        kept.update(value, 1)


def test_a_given_batch_size_spares_looking_for_one() -> None:
    def weigh(name: str) -> int:
        raise AssertionError("asked")

    kept = record(weigh=weigh)
    kept.update(1.0, 3)
    kept.update(5.0, 1)
    assert computed(kept) == 2.0


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_what_a_checkpoint_keeps_goes_on_where_it_was(reduce_fx: str) -> None:
    whole, first, second = (record(reduce_fx=reduce_fx) for _ in range(3))
    for value in (3.0, torch.tensor(-1.0)):
        whole.update(value, 2)
        first.update(value, 2)
    second.load(first.dump())
    for kept in (whole, second):
        kept.update(1.5, 1)
    assert computed(second) == computed(whole)


def test_after_a_reset_nothing_is_left() -> None:
    for reduce_fx in ("mean", "sum", "min", "max"):
        kept = record(reduce_fx=reduce_fx)
        kept.update(100.0, 7)
        kept.reset()
        assert (kept.seen, kept.fresh, kept.step_value()) == (False, False, None)
        kept.update(2.0, 1)
        assert computed(kept) == 2.0


def test_tensors_for_monitors_may_take_part_in_training() -> None:
    with torch.inference_mode():
        found = [
            as_tensor(value, torch.float32) for value in (2.0, torch.tensor(2.0), torch.tensor(2, dtype=torch.int64))
        ]
        assert torch.is_inference_mode_enabled()
    for value in found:
        assert not value.is_inference()
        (torch.ones((), requires_grad=True) * value).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_on_a_gpu_the_same_numbers_come_out_and_nothing_waits(reduce_fx: str) -> None:
    here, there = record(reduce_fx=reduce_fx, on_step=True), record(reduce_fx=reduce_fx, on_step=True)
    values = [torch.tensor(v, device="cuda") for v in (0.1, -3.0, 7.5, 2.0)]
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in values:
            there.update(value, 3)
        there.update(0.25, 1)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for value in values:
        here.update(value.cpu(), 3)
    here.update(0.25, 1)
    result = there.compute(DEVICE)
    assert isinstance(result, torch.Tensor)
    assert result.is_cuda
    assert float(result) == pytest.approx(computed(here), rel=1e-12)
    values[-1] += 100
    assert float(there.extreme if reduce_fx in ("min", "max") else here.compute(DEVICE)) == computed(here)  # type: ignore[attr-defined]


def test_a_reduction_may_be_given_in_any_case() -> None:
    found = {reduce_fx: reduction_of("v", reduce_fx) for reduce_fx in ("SUM", "Mean", "avg", "AVG")}
    assert found == {"SUM": "sum", "Mean": "mean", "avg": "mean", "AVG": "mean"}
    with pytest.raises(ValueError, match=r"self\.log\('\w+'\): Unknown reduce_fx 'MEDIAN'"):
        reduction_of("v", "MEDIAN")
