"""TransformerConfig: defaults, derived values, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec

REQUIRED: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 8}


def test_options_left_out_are_derived_from_the_others() -> None:
    config = TransformerConfig(**REQUIRED)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (512, 16, 8)
    assert config.max_position_embeddings is None
    assert (config.head_dim, config.num_key_value_heads, config.rotary_dim) == (16, 8, 16)


def test_swiglu_takes_two_thirds_of_the_width_in_multiples_of_64() -> None:
    assert (
        TransformerConfig(**REQUIRED, swiglu=True).ffn_hidden_size == 320
    )  # 341.3 cut to a multiple of 64
    assert TransformerConfig(2, 4096, 32, swiglu=True).ffn_hidden_size == 10880


def test_output_projections_start_smaller_with_depth() -> None:
    spec = model_spec(TransformerConfig(8, 128, 8, init_method_std=0.02))
    assert spec.output_init_std == pytest.approx(0.02 / 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 130}, "--hidden-size: expected a multiple of --num-attention-heads (8)"),
        (
            {"group_query_attention": True, "num_query_groups": 3},
            "--num-query-groups: expected a divisor of",
        ),
        (
            {"kv_channels": 15},
            "--rotary-percent: expected an even, positive share of the 15 channels",
        ),
        (
            {"hidden_size": 16, "swiglu": True},
            "--ffn-hidden-size: expected a value, since the default of gated MLPs",
        ),
        ({"window_size": (7, 1)}, "--window-size: expected the number of earlier positions"),
        (
            {"linear_attention_freq": "[1,0,1]"},
            "--linear-attention-freq: expected a number, or zeros and ones for --num-layers 2",
        ),
        (
            {"linear_attention_freq": "2", "linear_num_key_heads": 3},
            "--linear-num-value-heads: expected a multiple of --linear-num-key-heads (3), got 32.",
        ),
        (
            {"swiglu": True, "activation_func": "gelu"},
            "--activation-func: expected silu, since --swiglu is given, got 'gelu'.",
        ),
        (
            {"num_experts": 4, "moe_router_topk": 5},
            "--moe-router-topk: expected at most --num-experts 4, got 5.",
        ),
        (
            {"num_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
            "--moe-router-num-groups: expected a divisor of --num-experts 4, got 3.",
        ),
        (
            {
                "num_experts": 8,
                "moe_router_topk": 3,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 1,
            },
            "--moe-router-topk: expected at most the 2 experts of --moe-router-group-topk 1",
        ),
        (
            {"num_experts": 4, "moe_router_num_groups": 2},
            "--moe-router-num-groups: expected --moe-router-group-topk as well, got None.",
        ),
        (
            {"num_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 3},
            "--moe-router-group-topk: expected at most --moe-router-num-groups 2, got 3.",
        ),
        (
            {"num_experts": 4, "moe_layer_freq": "[1,0,1]"},
            "--moe-layer-freq: expected a number, or zeros and ones for --num-layers 2",
        ),
        (
            {"num_experts": 4, "moe_layer_freq": "[0,0]"},
            "--moe-layer-freq: expected at least one layer with experts, got '[0,0]'.",
        ),
        (
            {"num_experts": 4, "moe_router_norm_topk": False},
            "--moe-router-no-norm-topk: expected --moe-router-pre-softmax or sigmoid scores, since",
        ),
        (
            {
                "num_experts": 4,
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.1,
            },
            "--moe-router-load-balancing-type: expected a loss for --moe-aux-loss-coeff 0.1, or a "
            "coefficient of 0, got 'none'.",
        ),
        (
            {"position_embedding_type": "yarn"},
            "--yarn-rotary-scaling-factor: expected a value with --position-embedding-type yarn",
        ),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
            "--rotary-seq-len-interpolation-factor: expected one scaling of rotary, got --use-",
        ),
        (
            {"window_size": (-1, 0), "window_attn_skip_freq": "x"},
            "--window-attn-skip-freq: expected a number, or zeros and ones such as",
        ),
        (
            {"position_embedding_type": "yarn", "yarn_beta_slow": 32.0}
            | {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 64},
            "--yarn-beta-fast: expected more than --yarn-beta-slow 32.0, got 32.0.",
        ),
        (
            {"use_rope_scaling": True, "position_embedding_type": "none"},
            "--use-rope-scaling: expected rotary positions, got --position-embedding-type none.",
        ),
        (
            {"use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
            "--rope-scaling-high-freq-factor: expected more than --rope-scaling-low-freq-factor",
        ),
    ],
)
def test_unsupported_settings_are_rejected_by_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TransformerConfig(**{**REQUIRED, **changes})
    assert str(error.value).startswith(message)


def test_without_their_number_all_query_heads_share_one_group_as_in_megatron() -> None:
    config = TransformerConfig(**REQUIRED, group_query_attention=True)
    assert (config.num_query_groups, config.num_key_value_heads) == (1, 1)
