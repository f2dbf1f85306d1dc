"""Trains by TRL's `SFTTrainer` and `DPOTrainer`."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.peers.helpers.peer_rank import (
    LENGTH,
    OPTIMIZERS,
    VOCABULARY,
    serve,
    tiny_llama,
    use_engine,
)
from tests.peers.helpers.trainer_job import Numbers, add_adapters, run_trainers

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)]
NUM_SAMPLES = 64


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _samples(columns: list[str]) -> Dataset:
    generator = random.Random(0)
    return Dataset.from_list(
        [
            {name: " ".join(generator.choices(WORDS, k=LENGTH // 2 - 2)) for name in columns}
            for _ in range(NUM_SAMPLES)
        ]
    )


def train(
    engine: str,
    optimizer: str,
    fsdp: dict[str, Any] | None,
    method: str = "SFT",
    has_adapters: bool = False,
    is_resumed: bool = False,
) -> list[float]:
    """Losses and norms of each step."""
    use_engine(engine)

    def make(arguments: TrainingArguments, collected: Numbers) -> Trainer:
        model = tiny_llama()
        if has_adapters:
            model = add_adapters(model)
        common = {
            "model": model,
            "args": arguments,
            "processing_class": _tokenizer(),
            "callbacks": [collected],
        }
        if method == "SFT":
            trainer = SFTTrainer(train_dataset=_samples(["text"]), **common)
        else:
            samples = _samples(["prompt", "chosen", "rejected"])
            trainer = DPOTrainer(ref_model=tiny_llama(), train_dataset=samples, **common)
        trainer.optimizer_cls_and_kwargs = OPTIMIZERS[optimizer]
        return trainer

    config = SFTConfig if method == "SFT" else DPOConfig
    return run_trainers(
        config, make, fsdp, is_resumed, bf16=False, max_length=LENGTH, gradient_checkpointing=False
    )


if __name__ == "__main__":
    serve(train)
