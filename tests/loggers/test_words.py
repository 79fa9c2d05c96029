from __future__ import annotations

import pytest

from paceline.loggers.words import words_in


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("val_loss", "val loss"),
        ("train/MSELoss-2.kl", "train mse loss mseloss 2 kl"),
        ("lossless_size", "lossless size"),
        ("val/mIoU", "val m io u miou"),
        ("top5", "top5 top"),
        ("valacc", "valacc acc"),
        ("train", "train"),
        ("", ""),
    ],
)
def test_the_words_of_a_name_are_found_at_separators_humps_digits_and_stages(name: str, words: str) -> None:
    assert words_in(name) == set(words.split())
