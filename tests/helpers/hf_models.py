"""Tiny models as the transformers library saves them, each with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.training.tokenizer import train_bpe

VOCAB = 301  # rows that no number of ranks divides, and no multiple of 128
TEXT = "def main():\n    return the_answer(to=everything)\n"
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 3,
    "eos_token_id": 0,
}


class Family(NamedTuple):
    """A class of the transformers library's models, and what its config says besides the sizes."""

    name: str
    config: dict[str, Any]


FAMILIES = {
    "llama": Family("Llama", {"tie_word_embeddings": False}),
    "llama, tied": Family("Llama", {"tie_word_embeddings": True}),
    "llama, with biases": Family(
        "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    ),
    "qwen3": Family("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def save_model(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Saves such a model with random weights, of which none is as a new model's is."""
    transformers = pytest.importorskip("transformers")
    name, own = FAMILIES[family]
    made = getattr(transformers, f"{name}Config")(**{**_SIZES, **own, **config})
    model = getattr(transformers, f"{name}ForCausalLM")(made)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            parameter.add_(1.0 if parameter.dim() == 1 else 0.0)
    model.to(dtype).save_pretrained(folder)
    train_bpe([TEXT * 20], 300, folder / "tokenizer.json")
    return folder
