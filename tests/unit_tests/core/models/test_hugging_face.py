"""Which architecture of the transformers library a GPT is, and the names of its weights there.

That they compute the same is tested where weights are saved:
tests/unit_tests/training/checkpoint/test_hf_weights.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.models.description import ModelDescription
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import hf_config, hf_rows
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig

LLAMA = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    group_query_attention=True,
    num_query_groups=2,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)


MIXTURE = {"qk_layernorm": True, "num_experts": 4, "moe_ffn_hidden_size": 10}


def changed(**fields: Any) -> TransformerConfig:
    return dataclasses.replace(LLAMA, **fields)


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"add_bias_linear": True}, "LlamaForCausalLM"),
        ({"qk_layernorm": True}, "Qwen3ForCausalLM"),
        ({"add_qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"position_embedding_type": "none"}, "SmolLM3ForCausalLM"),
        ({"normalization": "LayerNorm"}, "StableLmForCausalLM"),
        ({"normalization": "LayerNorm", "rotary_percent": 0.5}, "StableLmForCausalLM"),
        ({"normalization": "LayerNorm", "swiglu": False}, "Starcoder2ForCausalLM"),
        ({"swiglu": False}, "ArceeForCausalLM"),
        (MIXTURE, "Qwen3MoeForCausalLM"),
        ({**MIXTURE, "moe_layer_freq": "[0,1]"}, "Qwen3MoeForCausalLM"),
        # What concerns training alone is no architecture's.
        ({**MIXTURE, "moe_expert_capacity_factor": 1.0}, "Qwen3MoeForCausalLM"),
        ({**MIXTURE, "moe_router_dtype": "fp32", "moe_z_loss_coeff": 0.1}, "Qwen3MoeForCausalLM"),
        (
            {"qk_layernorm": True, "qk_layernorm_across_heads": True, "num_experts": 4},
            "OlmoeForCausalLM",
        ),
        # Llama wants a hidden size that is a multiple of the number of heads.
        ({"hidden_size": 18, "kv_channels": 6}, "SmolLM3ForCausalLM"),
    ],
)
def test_every_weight_has_a_name_of_its_own_in_the_architecture_that_fits(fields, architecture):
    config = changed(**fields)
    model = GPTModel(config, 32)
    assert hf_config(ModelDescription(config, 32))["architectures"] == [architecture]
    rows = hf_rows(model)
    names = {own: place.name for own, place in rows.items()}
    assert {f"model.{own}" for own in names} == {entry.key for entry in collect(model).entries}
    assert len(set(names.values())) == len(names)
    assert all(place == RowMap(place.name) for place in rows.values())


def test_a_config_says_what_is_computed_and_takes_no_token_ids_from_the_architecture():
    config = changed(
        kv_channels=6, rotary_base=500.0, norm_epsilon=1e-3, max_position_embeddings=77
    )
    content = hf_config(ModelDescription(config, 32))
    expected = {
        "head_dim": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-3,
        "rope_theta": 500.0,
        "max_position_embeddings": 77,
        "attention_bias": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    assert {name: content[name] for name in expected} == expected
    assert content["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"rotary_percent": 0.5}, "--rotary-percent"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "--add-qkv-bias"),
        ({"normalization": "LayerNorm", "add_bias_linear": True}, "--disable-bias-linear"),
        ({"normalization": "LayerNorm", "kv_channels": 6}, "--kv-channels"),
        ({"hidden_size": 18, "kv_channels": 6, "swiglu": False}, "--hidden-size"),
        ({"softmax_type": "learnable"}, "--softmax-type"),
        ({"softmax_scale": 0.3}, "--softmax-scale"),
        ({"post_norm": True}, "--post-norm"),
        ({"qk_layernorm": True, "qk_layernorm_across_heads": True}, "--qk-layernorm-across-heads"),
        ({**MIXTURE, "moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
        ({**MIXTURE, "moe_router_score_function": "sigmoid"}, "--moe-router-score-function"),
        ({**MIXTURE, "moe_expert_rows": "inputs"}, "--moe-expert-rows"),
    ],
)
def test_what_no_architecture_computes_is_rejected_by_its_flag(fields, flags):
    with pytest.raises(
        ConfigError,
        match=f"^{flags}: expected a GPT that an architecture of the transformers library",
    ):
        hf_config(ModelDescription(changed(**fields), 32))
    with pytest.raises(ConfigError):
        hf_rows(GPTModel(changed(**fields), 32))
