"""Tiny models as the transformers library saves them, each with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import processors

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


_FULL, _WINDOWED, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_HEADS = {"head_dim": 8}
_DELTA_NET = {
    **_HEADS,
    "layer_types": [_LINEAR, _FULL],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_CHOICE = {"num_experts_per_tok": 2}
_EXPERTS = {**_CHOICE, "moe_intermediate_size": 12}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 8}

# The config of each without the sizes. The first word is the library's name of its class.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _UNTIED,
    "llama, tied": _TIED,
    "llama, with biases": {**_UNTIED, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**_HEADS, **_TIED},
    # Queries and gates alternate in one tensor, and the sections of a convolution's follow others.
    "qwen3_5_text": {**_DELTA_NET, **_UNTIED},
    "qwen3_moe": {
        **_HEADS,
        **_UNTIED,
        **_EXPERTS,
        "num_experts": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3_next": {**_DELTA_NET, **_UNTIED, **_SHARED_EXPERT, "num_experts": 6},
    "qwen3_5_moe_text": {**_DELTA_NET, **_TIED, **_SHARED_EXPERT, "num_experts": 4},
    "olmoe": {**_UNTIED, **_CHOICE, "num_experts": 4, "norm_topk_prob": False},
    # Keys and values alternate in one tensor, a latent comes before the rotary key in another, and
    # biases of experts are buffers.
    "deepseek_v3": {
        **_UNTIED,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 10,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        **_HEADS,
        **_UNTIED,
        **_EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 4,
    },
    # All experts' matrices are one tensor, whose rows are input channels.
    "gpt_oss": {**_HEADS, **_UNTIED, **_CHOICE, "num_local_experts": 4, "sliding_window": 5},
    "gemma3_text": {
        **_HEADS,
        **_TIED,
        "query_pre_attn_scalar": 10,
        "sliding_window": 5,
        "layer_types": [_WINDOWED, _FULL],
    },
}


def begin_texts(folder: Path, token: int = 3) -> int:
    """Has the tokenizer of a directory start every text with a token, as Llama's. Returns it."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = backend.id_to_token(token)
    backend.post_processor = processors.TemplateProcessing(
        single=[name, "$A"], special_tokens=[(name, token)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return token


def save_model(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Saves such a model with random weights, of which none is as a new model's is."""
    transformers = pytest.importorskip("transformers")
    kind, _, _ = family.partition(",")
    made = transformers.AutoConfig.for_model(kind, **{**_SIZES, **FAMILIES[family], **config})
    model = transformers.AutoModelForCausalLM.from_config(made)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            parameter.add_(1.0 if parameter.dim() == 1 else 0.0)
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    model.to(dtype).save_pretrained(folder)
    train_bpe([TEXT * 20], 300, folder / "tokenizer.json")
    return folder
