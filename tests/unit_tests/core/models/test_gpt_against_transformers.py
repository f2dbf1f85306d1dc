"""The GPT computes what the same architectures of the transformers library compute from the same
weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "attention_dropout": 0.0,
}


def llama() -> nn.Module:
    """Untied embeddings, no QK-norm."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    )


def qwen3() -> nn.Module:
    """Tied embeddings, QK-norm, heads wider than hidden size / heads."""
    sizes = {**SIZES, "head_dim": 24}
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
    )


def ours(theirs: nn.Module) -> GPTModel:
    """Our model with the other's weights."""
    wanted = theirs.config
    rope = getattr(wanted, "rope_parameters", None) or {"rope_theta": wanted.rope_theta}
    config = TransformerConfig(
        num_layers=wanted.num_hidden_layers,
        hidden_size=wanted.hidden_size,
        num_attention_heads=wanted.num_attention_heads,
        ffn_hidden_size=wanted.intermediate_size,
        kv_channels=wanted.head_dim,
        group_query_attention=True,
        num_query_groups=wanted.num_key_value_heads,
        rotary_base=int(rope["rope_theta"]),
        normalization="RMSNorm",
        norm_epsilon=wanted.rms_norm_eps,
        qk_layernorm=hasattr(theirs.model.layers[0].self_attn, "q_norm"),
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not wanted.tie_word_embeddings,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(config, wanted.vocab_size)
    weights = {
        "embedding.word_embeddings.weight": theirs.model.embed_tokens.weight,
        "decoder.final_layernorm.weight": theirs.model.norm.weight,
    }
    if not wanted.tie_word_embeddings:
        weights["output_layer.weight"] = theirs.lm_head.weight
    for number, layer in enumerate(theirs.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        named = {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "self_attention.linear_qkv.weight": torch.cat(
                [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            ),
            "self_attention.linear_proj.weight": attention.o_proj.weight,
            "pre_mlp_layernorm.weight": layer.post_attention_layernorm.weight,
            "mlp.linear_fc1.weight": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "mlp.linear_fc2.weight": mlp.down_proj.weight,
        }
        if config.qk_layernorm:
            named["self_attention.q_layernorm.weight"] = attention.q_norm.weight
            named["self_attention.k_layernorm.weight"] = attention.k_norm.weight
        weights |= {f"decoder.layers.{number}.{name}": weight for name, weight in named.items()}
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("build", [llama, qwen3])
def test_logits_and_losses_are_those_of_the_same_architecture_elsewhere(build):
    torch.manual_seed(0)
    theirs = build().eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            # Norm weights are ones at first, which would hide one that is left out.
            weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if "norm" in name else 0.0))
    model = ours(theirs).eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 17))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        expected = theirs(inputs).logits
        torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)
        loss = nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(model(inputs, labels).mean(), loss, rtol=1e-5, atol=1e-6)
