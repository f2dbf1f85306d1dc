"""From options to the specs of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import (
    Activation,
    AttentionSpec,
    Balancing,
    DenseSpec,
    DropPolicy,
    GatedDeltaNetSpec,
    LinearScaling,
    Llama3Scaling,
    MoeSpec,
    NormKind,
    NormSpec,
    RotarySpec,
    RouterSpec,
    Scores,
    Sinks,
    YarnScaling,
)


def _attentions(config: TransformerConfig) -> list[AttentionSpec]:
    mixers = [layer.mixer for layer in model_spec(config).layers]
    assert all(isinstance(mixer, AttentionSpec) for mixer in mixers)
    return mixers  # type: ignore[return-value]


def test_delta_nets_stand_where_the_pattern_says() -> None:
    config = TransformerConfig(
        8,
        64,
        4,
        linear_attention_freq="4",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        norm_epsilon=1e-6,
    )
    mixers = [layer.mixer for layer in model_spec(config).layers]
    kinds = [isinstance(mixer, GatedDeltaNetSpec) for mixer in mixers]
    assert kinds == [True, True, True, False] * 2
    assert mixers[0] == GatedDeltaNetSpec(2, 4, 8, 16, 4, 1e-6)
    assert (mixers[0].key_size, mixers[0].value_size) == (16, 64)  # type: ignore[union-attr]


def test_a_window_counts_the_position_itself_and_skips_layers() -> None:
    windows = [
        attention.window
        for attention in _attentions(
            TransformerConfig(6, 64, 4, window_size=(127, 0), window_attn_skip_freq="3")
        )
    ]
    assert windows == [128, 128, None, 128, 128, None]
    every = TransformerConfig(2, 64, 4, window_size=(7, 0))
    assert [attention.window for attention in _attentions(every)] == [8, 8]
    none = TransformerConfig(2, 64, 4, window_size=(-1, 0))
    assert [attention.window for attention in _attentions(none)] == [None, None]


def test_windowed_layers_may_have_a_base_of_their_own_without_scaling() -> None:
    config = TransformerConfig(
        2,
        64,
        4,
        window_size=(7, 0),
        window_attn_skip_freq="2",
        rotary_base=1e6,
        window_rotary_base=1e4,
        rotary_seq_len_interpolation_factor=8.0,
    )
    assert [attention.rotary for attention in _attentions(config)] == [
        RotarySpec(16, 1e4),
        RotarySpec(16, 1e6, LinearScaling(8.0)),
    ]


def test_layers_without_rotation_are_every_nth_one() -> None:
    config = TransformerConfig(4, 64, 4, no_rope_freq="4")
    assert [attention.rotary is None for attention in _attentions(config)] == [False] * 3 + [True]
    nowhere = TransformerConfig(2, 64, 4, position_embedding_type="none")
    assert [attention.rotary for attention in _attentions(nowhere)] == [None, None]


def test_rotary_scalings_match_the_options() -> None:
    def scaling(**changes: object) -> object:
        rotary = _attentions(TransformerConfig(1, 64, 4, **changes))[0].rotary  # type: ignore[arg-type]
        assert rotary is not None
        return rotary.scaling

    assert scaling() is None
    assert scaling(use_rope_scaling=True) == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    yarn = {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 4096,
    }
    found = scaling(**yarn)
    assert isinstance(found, YarnScaling)
    assert found == YarnScaling(4.0, 4096, 32.0, 1.0, found.attention_factor, True)
    assert found.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    given = scaling(**yarn, yarn_attention_factor=1.5)
    assert isinstance(given, YarnScaling)
    assert given.attention_factor == 1.5


def test_the_rest_of_the_options_reach_the_specs() -> None:
    config = TransformerConfig(
        1,
        64,
        4,
        softmax_type="learnable",
        softmax_scale=0.5,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attention_output_gate=True,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        normalization="RMSNorm",
        post_norm=True,
        embedding_multiplier=8.0,
        gated_linear_unit=True,
        activation_func="gelu_tanh",
        untie_embeddings_and_output_weights=True,
    )
    spec, norm = model_spec(config), NormSpec(NormKind.RMS_NORM, 1e-5, is_zero_centered=True)
    (layer,), (attention,) = spec.layers, _attentions(config)
    assert (spec.embedding_scale, spec.logit_softcap, spec.is_tied) == (8.0, 30.0, False)
    assert layer.norm == layer.post_norm == attention.qk_norm == spec.final_norm == norm
    assert (attention.sinks, attention.scale, attention.softcap) == (Sinks.LEARNED, 0.5, 50.0)
    assert attention.has_output_gate
    assert (layer.feed_forward.activation, layer.feed_forward.is_gated) == (
        Activation.GELU_TANH,
        True,
    )


def test_a_mixture_of_experts_is_made_of_its_options() -> None:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        swiglu=True,
        add_bias_linear=False,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        num_experts=16,
        moe_layer_freq="2",
        moe_ffn_hidden_size=24,
        moe_router_topk=3,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_dtype="fp64",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.2,
        moe_shared_expert_intermediate_size=40,
        moe_shared_expert_gate=True,
        moe_expert_capacity_factor=1.5,
        moe_token_drop_policy="position",
        moe_expert_rows="inputs",
    )
    layers = [layer.feed_forward for layer in model_spec(config).layers]
    dense = DenseSpec(128, Activation.SILU, is_gated=True, has_bias=False, clamp=7.0, up_offset=1.0)
    assert layers[1] == layers[3] == dense
    assert (
        layers[0]
        == layers[2]
        == MoeSpec(
            router=RouterSpec(
                num_experts=16,
                top_k=3,
                scores=Scores.SIGMOID,
                is_scored_first=True,
                is_normalized=True,
                scale=2.5,
                num_groups=4,
                top_groups=2,
                has_expert_bias=True,
                bias_update_rate=0.01,
                dtype="fp64",
                balancing=Balancing.SEQUENCE,
                balance_coeff=0.1,
                z_coeff=0.2,
            ),
            expert=replace(dense, size=24),
            shared=replace(dense, size=40),
            has_shared_gate=True,
            capacity_factor=1.5,
            drop_policy=DropPolicy.POSITION,
            rows_are_inputs=True,
        )
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False)),
        ({"moe_router_norm_topk": True}, (False, False)),
        ({"moe_router_pre_softmax": True}, (True, False)),
        ({"moe_router_pre_softmax": True, "moe_router_norm_topk": True}, (True, True)),
        ({"moe_router_score_function": "sigmoid"}, (True, True)),
        ({"moe_router_score_function": "sigmoid", "moe_router_topk": 1}, (True, False)),
        ({"moe_router_score_function": "sigmoid", "moe_router_norm_topk": False}, (True, False)),
    ],
)
def test_scores_are_normalized_where_megatron_normalizes_them_unless_said_otherwise(
    options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    spec = model_spec(TransformerConfig(1, 64, 4, num_experts=4, **options))
    router = spec.mixtures[0].router
    assert (router.is_scored_first, router.is_normalized) == expected
