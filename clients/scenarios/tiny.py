"""Small networks, a tokenizer and texts for the scenarios, created here so that nothing is downloaded."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import transformers

SEED = 7
WORDS = [f"w{number}" for number in range(60)]


def tokenizer() -> Any:
    """Return a tokenizer with 64 words."""
    marks = ["[PAD]", "[UNK]", "[BEGIN]", "[END]"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate([*marks, *WORDS])}, unk_token="[UNK]")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BEGIN]", "eos_token": "[END]"}
    named |= {"cls_token": "[BEGIN]", "sep_token": "[END]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, model_max_length=32, **named)


def language_model() -> Any:
    """Return a GPT-2 model with two layers and dropout, with the same weights every time."""
    transformers.set_seed(SEED)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=2, eos_token_id=3, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def encoder() -> Any:
    """Return a sentence encoder: a BERT model with one layer, followed by the mean of the token embeddings."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=32)
    transformers.set_seed(SEED)
    with tempfile.TemporaryDirectory() as place:  # of this process alone
        transformers.BertModel(config).save_pretrained(place)
        tokenizer().save_pretrained(place)
        words = modules.Transformer(place)
    return SentenceTransformer(modules=[words, modules.Pooling(words.get_embedding_dimension())], device="cpu")


def sentences(count: int, seed: int = 3) -> list[str]:
    """Return texts of 4 to 13 words."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randrange(4, 14))) for _ in range(count)]


def tokens(count: int) -> datasets.Dataset:
    """Return sequences of 12 tokens."""
    chosen = random.Random(3)
    rows = [[chosen.randrange(4, 64) for _ in range(12)] for _ in range(count)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


class Losses(transformers.TrainerCallback):
    """Collects the training and evaluation losses that a Trainer logs."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Collect the losses in ``logs``."""
        self.seen.extend(value for name, value in (logs or {}).items() if name in ("loss", "eval_loss"))


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return arguments for ``TrainingArguments`` and its subclasses: 20 steps, each logged."""
    usual: dict[str, Any] = {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 20,
        "learning_rate": 5e-3,
        "seed": SEED,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return usual | more
