"""ModelPruning in real fits: masks, lottery tickets, plain checkpoints, exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn
from torch.nn.utils import prune

from paceline import Trainer
from paceline.callbacks import ModelCheckpoint, ModelPruning


class Deep(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        width = self.layer.in_features
        self.first = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return super().forward(torch.tanh(self.first(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def module() -> Deep:
    torch.manual_seed(7)
    return Deep()


pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint contains the state of callbacks")


def fit(callback: ModelPruning, deep: Deep | None = None, ckpt_path: Any = None, **arguments: Any) -> Deep:
    deep = deep or module()
    more = arguments.pop("callbacks", [])
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **arguments}, callbacks=[callback, *more])
    trainer.fit(deep, tiny_loader(4), tiny_loader(2), ckpt_path=ckpt_path)
    return deep


def zeros(weight: torch.Tensor) -> int:
    return int((weight == 0).sum())


def whole(deep: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in deep.state_dict().items()}


def test_a_part_of_what_is_left_is_pruned_each_epoch_and_is_permanent_at_the_end() -> None:
    deep = fit(ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False))
    names = list(deep.state_dict())
    assert names == list(Deep().state_dict())
    assert sum(value.numel() for value in deep.parameters()) == 25
    assert sum(zeros(value) for value in deep.parameters()) == 5 + 4
    assert not deep.first._forward_pre_hooks


def test_a_lottery_ticket_starts_again_from_the_first_values() -> None:
    first = module().first.weight.detach().clone()
    callback = ModelPruning(
        "l1_unstructured",
        amount=0.25,
        make_pruning_permanent=False,
        apply_pruning=lambda epoch: epoch == 1,
        use_lottery_ticket_hypothesis=lambda epoch: epoch == 1,
    )
    deep = fit(callback)
    assert prune.is_pruned(deep.first)
    kept, mask = deep.first.get_parameter("weight_orig"), deep.first.get_buffer("weight_mask")
    assert torch.equal(kept, first)
    assert torch.equal(deep.first.weight, first * mask)


def test_resampled_weights_are_new_ones() -> None:
    first = module().first.weight.detach().clone()
    deep = fit(ModelPruning("l1_unstructured", resample_parameters=True, make_pruning_permanent=False))
    assert not torch.any(torch.isclose(deep.first.get_parameter("weight_orig"), first, rtol=1e-6))


@pytest.mark.parametrize(
    ("pruning_fn", "more"),
    [
        ("random_unstructured", {}),
        ("random_structured", {"pruning_dim": 0}),
        ("ln_structured", {"pruning_dim": 0, "pruning_norm": 1}),
        (lambda part, name, amount: prune.l1_unstructured(part, name, amount), {}),
    ],
)
def test_each_method_prunes_one_parameter_at_a_time(pruning_fn: Any, more: Any) -> None:
    deep = module()
    callback = ModelPruning(
        pruning_fn,
        [(deep.first, "weight")],
        use_global_unstructured=False,
        use_lottery_ticket_hypothesis=False,
        amount=lambda epoch: 0.5 if epoch == 1 else 0.0,
        **more,
    )
    fit(callback, deep)
    weight = deep.first.weight
    assert zeros(weight) == weight.numel() // 2
    if "pruning_dim" in more:
        assert set(torch.count_nonzero(weight, dim=1).tolist()) == {0, weight.shape[1]}
    assert zeros(deep.layer.weight) == 0


@pytest.mark.parametrize("permanent", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints_hold_plain_weights_and_a_resume_from_each_is_exact(
    permanent: bool, inside: bool, tmp_path: Path
) -> None:
    def pruning() -> ModelPruning:
        return ModelPruning("random_unstructured", amount=0.3, make_pruning_permanent=permanent)

    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=3 if inside else None, filename="{step}")
    straight = fit(pruning(), max_epochs=4, callbacks=[saving], enable_checkpointing=True)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) >= 4
    for file in files:
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert list(saved) == list(Deep().state_dict())
        assert (sum(zeros(value) for value in saved.values()) > 0) == (file.stem != "step=3")
        torch.manual_seed(99)
        again = fit(pruning(), Deep(), file, max_epochs=4)
        assert all(torch.equal(value, whole(again)[name]) for name, value in whole(straight).items())
    before = whole(straight)
    trained = fit(pruning(), straight, files[0], max_epochs=4)  # a module that was pruned, or is
    assert all(torch.equal(value, before[name]) for name, value in whole(trained).items())


def test_weights_only_files_of_a_pruned_module_load_anywhere(tmp_path: Path) -> None:
    deep = module()
    callback = ModelPruning("l1_unstructured", make_pruning_permanent=False)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[callback])
    trainer.fit(deep, tiny_loader(4), tiny_loader(1))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded = Deep.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert torch.equal(loaded.first.weight, deep.first.weight)
    trainer.validate(deep, tiny_loader(1), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert torch.equal(loaded.first.weight, deep.first.weight)


def test_all_processes_prune_the_same_weights() -> None:
    def run() -> Any:
        callback = ModelPruning("random_unstructured", resample_parameters=True)
        deep = fit(callback, strategy="ddp", devices=2)
        return {name: value.tolist() for name, value in deep.state_dict().items()}

    first, second = ranks(2, run)
    assert first == second


def test_pruning_at_the_end_of_validations_leaves_the_sanity_check_out() -> None:
    epochs: list[int] = []

    def noted(epoch: int) -> bool:
        epochs.append(epoch)
        return True

    deep = fit(ModelPruning("l1_unstructured", apply_pruning=noted, prune_on_train_epoch_end=False))
    assert epochs == [0, 1]
    assert zeros(deep.first.weight) > 0


def test_reports_name_totals_and_each_parameter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    deep = module()
    fit(ModelPruning("l1_unstructured", [(deep.first, "bias")], amount=1, verbose=2), deep, max_epochs=1)
    size = deep.first.bias.numel()
    assert f"Applied `L1Unstructured`. Pruned: 0/{size} (0.00%) -> 1/{size}" in caplog.text
    assert "bias=True).bias` with amount=1. Pruned: 0 (0.00%) -> 1" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"pruning_fn": "l2_unstructured"}, ValueError, "Did you mean 'l1_unstructured'"),
        ({"pruning_fn": "l1_unstructured", "parameter_names": ["kernel"]}, ValueError, "'kernel'.*'weight'"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, ValueError, "verbose=3"),
        ({"pruning_fn": "random_structured"}, ValueError, "pruning_dim=0"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, ValueError, "pruning_norm"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, ValueError, "use_global_unstructured=False"),
        ({"pruning_fn": prune.l1_unstructured}, ValueError, "is a function.*use_global_unstructured=False"),
        ({"pruning_fn": prune.Identity, "use_global_unstructured": False}, ValueError, "is a class"),
        ({"pruning_fn": {}}, TypeError, r"pruning_fn=\{\} is a dict"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ModelPruning(**arguments)


def test_parameters_that_the_module_does_not_have_are_named() -> None:
    deep = module()
    for pairs, message in (
        ([(nn.Linear(1, 1), "weight")], "Linear that is not a submodule of the Deep"),
        ([(deep.first, "wieght")], "Did you mean 'weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(ModelPruning("l1_unstructured", pairs), deep)
    with pytest.raises(ValueError, match="nothing to prune"):
        ModelPruning.sanitize_parameters_to_prune(nn.ReLU())
