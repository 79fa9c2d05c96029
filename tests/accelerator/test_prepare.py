"""What ``prepare`` does where parameters are replaced: what belonged to the old ones follows, or is refused."""

from __future__ import annotations

import pytest
import torch
from own_loop import data, loss_of, network, whole_weights
from rank_processes import RanksError, ranks

from paceline.accelerator.accelerator import Accelerator


def _go_on(strategy: str) -> torch.Tensor | None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for prepared in (False, True):
        if prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        for number in range(2):
            (accelerator.backward if prepared else torch.Tensor.backward)(loss_of(model, data(8 + number)[:]))
            optimizer.step()
            optimizer.zero_grad()
    return whole_weights(accelerator, model)


def test_an_optimizer_that_has_stepped_goes_on_when_its_model_is_sharded() -> None:
    replicated, sharded = (ranks(2, _go_on, strategy)[0] for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(sharded, replicated, rtol=1e-10, atol=1e-12)


def _share(whole_layer: bool) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    first, second = network(), network()
    if whole_layer:
        second[0] = first[0]
    else:
        second[0].weight = first[0].weight
    accelerator.prepare(first, second)


@pytest.mark.parametrize("whole_layer", [False, True])
def test_sharded_models_that_share_parameters_are_refused(whole_layer: bool) -> None:
    with pytest.raises(RanksError, match=r"shares 0\.weight with the prepared Sequential"):
        ranks(2, _share, whole_layer)
