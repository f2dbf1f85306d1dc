"""Tiny models with mixtures of experts: DeepSeek-V3, GLM-4.5 and GPT-OSS. As in `their_models.py`,
values are never the defaults.
"""

from __future__ import annotations

from typing import Any

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Of a token's 4 groups of 3 experts, 2 are chosen, and then 3 experts.
_GROUPS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_DEEPSEEK = {
    **_GROUPS,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {**_YARN, "mscale": 1.3, "mscale_all_dim": 0.6, "beta_fast": 2.0},
}
_GLM = {
    **_GROUPS,
    "head_dim": 12,
    "use_qk_norm": True,
    "attention_bias": True,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "partial_rotary_factor": 2 / 3,
    },
}
_GPT_OSS = {
    "head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-3,
    "layer_types": [_WINDOWED, _FULL, _FULL, _WINDOWED],
    "rope_parameters": {**_YARN, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.25},
}

MIXTURE_CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _DEEPSEEK,
    # As of Moonlight, but for a rotation of halves.
    "deepseek_v3 queries without a latent": {
        **_DEEPSEEK,
        "q_lora_rank": None,
        "rope_interleave": False,
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "deepseek_v3 one mscale": {
        **_DEEPSEEK,
        "v_head_dim": 20,
        "first_k_dense_replace": 2,
        "rope_parameters": {**_YARN, "mscale_all_dim": 0.8},
    },
    "deepseek_v3 a given factor": {
        **_DEEPSEEK,
        "rope_parameters": {
            **_YARN,
            "attention_factor": 1.4,
            "mscale": 0.5,
            "mscale_all_dim": 0.8,
        },
    },
    "deepseek_v3 no mscale": {**_DEEPSEEK, "rope_parameters": _YARN},
    "glm4_moe": _GLM,
    "glm4_moe without norms and biases": {
        **_GLM,
        "use_qk_norm": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": _GPT_OSS,
    "gpt_oss windows in every other layer": {
        **_GPT_OSS,
        "tie_word_embeddings": True,
        "layer_types": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
    },
}
