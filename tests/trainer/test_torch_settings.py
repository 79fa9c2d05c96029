"""Settings of torch hold during a run and are put back after it, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer


def settings() -> dict[str, Any]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "anomaly": torch.is_anomaly_enabled(),
        "check nan": torch.is_anomaly_check_nan_enabled(),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = settings()
    yield
    torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn only"])
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.autograd.set_detect_anomaly(before["anomaly"], before["check nan"])


class Looks(TinyModule):
    """Notes the settings in a step of each kind; fails in the training step if told to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(settings())
        if self.fails:
            raise KeyError("on purpose")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(settings())


@pytest.mark.parametrize(
    ("arguments", "during"),
    [
        ({}, {}),
        (
            {"deterministic": True},
            {"deterministic": True, "warn only": False, "benchmark": False, "cublas": ":4096:8"},
        ),
        (
            {"deterministic": "warn"},
            {"deterministic": True, "warn only": True, "benchmark": False, "cublas": ":4096:8"},
        ),
        ({"deterministic": False}, {"deterministic": False, "warn only": False}),
        ({"benchmark": True}, {"benchmark": True}),
        ({"benchmark": False}, {"benchmark": False}),
        ({"detect_anomaly": True}, {"anomaly": True, "check nan": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["fit", "fails", "test"])
@pytest.mark.parametrize("before", ["defaults", "set by the user"])
def test_settings_hold_during_a_run_and_are_put_back(
    before: str, how: str, arguments: dict[str, Any], during: dict[str, Any], quiet: dict[str, Any]
) -> None:
    if before == "set by the user":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        torch.autograd.set_detect_anomaly(False, check_nan=False)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        during = {**during, **({"cublas": ":16:8"} if "cublas" in during else {})}
    outside = settings()
    trainer, module = Trainer(**quiet, max_epochs=1, **arguments), Looks(fails=how == "fails")
    if how == "fails":
        with pytest.raises(KeyError, match="on purpose"):
            trainer.fit(module, tiny_loader())
    else:
        getattr(trainer, how)(module, tiny_loader())
    assert module.seen
    assert all(seen == {**outside, **during} for seen in module.seen), (module.seen[0], {**outside, **during})
    assert settings() == outside


def test_settings_are_put_back_when_the_run_cannot_even_start(quiet: dict[str, Any]) -> None:
    outside = settings()
    with pytest.raises(TypeError):
        Trainer(**quiet, deterministic=True, detect_anomaly=True).fit(3)  # type: ignore[arg-type]
    assert settings() == outside


def test_an_operation_without_deterministic_form_is_an_error_or_a_warning(quiet: dict[str, Any]) -> None:
    class Unsure(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.ones(1).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        Trainer(**quiet, max_epochs=1, deterministic=True).fit(Unsure(), tiny_loader())
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        Trainer(**quiet, max_epochs=1, deterministic="warn").fit(Unsure(), tiny_loader())


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_inference_mode_holds_in_evaluation_only(entry: str, inference_mode: bool, quiet: dict[str, Any]) -> None:
    seen: list[tuple[bool, bool]] = []

    class Notes(TinyModule):
        def note(self, *args: Any) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        validation_step = test_step = predict_step = note

    trainer = Trainer(**quiet, inference_mode=inference_mode)
    getattr(trainer, entry)(Notes(), tiny_loader(batches=1))
    assert seen == [(inference_mode, False)]
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_what_a_fits_validation_computes_can_be_trained_on_and_differentiated(quiet: dict[str, Any]) -> None:
    class Caches(TinyModule):
        cache: Any = None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            self.cache = torch.ones(2)
            with torch.enable_grad():
                x = torch.ones(2, requires_grad=True)
                assert torch.autograd.grad((x * x).sum(), x)[0].tolist() == [2, 2]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * (self.cache * loss).sum()

    Trainer(**quiet, max_epochs=1).fit(Caches(), tiny_loader(batches=1), tiny_loader(batches=1))
