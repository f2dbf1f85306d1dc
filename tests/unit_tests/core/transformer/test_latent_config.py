"""The options of multi-head latent attention, and the specs that they give."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.latent_config import yarn_mscale
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import (
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    NormKind,
    NormSpec,
    RotarySpec,
    YarnScaling,
)

# A hidden size that the heads do not divide.
LATENT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 33,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "multi_latent_attention": True,
}
YARN: dict[str, Any] = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 40.0,
    "yarn_original_max_position_embeddings": 4096,
}


def _mixer(**changes: Any) -> LatentAttentionSpec:
    mixer = model_spec(TransformerConfig(**{**LATENT, **changes})).layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


def test_options_reach_the_spec() -> None:
    mixer = _mixer(
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=10,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        latent_norm_epsilon=1e-6,
        qk_layernorm=True,
        add_bias_linear=False,
        rotary_interleaved=False,
        rotary_base=500.0,
        softmax_scale=0.7,
        attention_dropout=0.0,
    )
    norm = NormSpec(NormKind.RMS_NORM, 1e-6)
    rotary = RotarySpec(4, 500.0)
    assert mixer == LatentAttentionSpec(4, 24, 16, 8, 4, 10, 0.7, rotary, norm)
    assert (mixer.head_dim, mixer.query_size, mixer.value_size) == (12, 48, 40)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "attention_factor", "scaled"),
    [
        (1.0, 0.0, 1 + 0.1 * math.log(40), 1.0),  # as other attention
        (1.0, 1.0, 1.0, (1 + 0.1 * math.log(40)) ** 2),  # DeepSeek-V3
        (0.707, 0.707, 1.0, (1 + 0.0707 * math.log(40)) ** 2),  # DeepSeek-V2
        (2.0, 0.5, (1 + 0.2 * math.log(40)) / (1 + 0.05 * math.log(40)), None),
    ],
)
def test_mscale_scales_the_rotation_and_the_scores(
    mscale: float, all_dim: float, attention_factor: float, scaled: float | None
) -> None:
    mixer = _mixer(**YARN, mscale=mscale, mscale_all_dim=all_dim)
    assert mixer.rotary is not None
    assert isinstance(mixer.rotary.scaling, YarnScaling)
    assert mixer.rotary.scaling.attention_factor == pytest.approx(attention_factor)
    wanted = yarn_mscale(40.0, all_dim) ** 2 if scaled is None else scaled
    assert mixer.scale == pytest.approx(wanted / math.sqrt(192))


def test_layers_may_be_unrotated_or_delta_nets() -> None:
    config = TransformerConfig(**{**LATENT, "num_layers": 4}, no_rope_freq="2")
    mixers = [layer.mixer for layer in model_spec(config).layers]
    assert [mixer.rotary is None for mixer in mixers] == [False, True] * 2  # type: ignore[union-attr]
    mixed = model_spec(TransformerConfig(**LATENT, linear_attention_freq="2"))
    kinds = [type(layer.mixer) for layer in mixed.layers]
    assert kinds == [GatedDeltaNetSpec, LatentAttentionSpec]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_channels": 64},
            "--kv-channels: expected its default with --multi-latent-attention, got 64.",
        ),
        ({"window_size": (7, 0)}, "--window-size: expected its default with --multi-latent"),
        (
            {"qk_layernorm": True, "qk_layernorm_across_heads": True},
            "--qk-layernorm-across-heads: expected its default with --multi-latent-attention",
        ),
        ({"qk_pos_emb_head_dim": 5}, "--qk-pos-emb-head-dim: expected an even number of channels"),
        ({"latent_norm_epsilon": 1e-6}, "--latent-norm-epsilon: expected --qk-layernorm, got"),
        ({"mscale_all_dim": 1.0}, "--mscale-all-dim: expected --position-embedding-type yarn"),
        (
            {"multi_latent_attention": False, "hidden_size": 32, "v_head_dim": 64},
            "--v-head-dim: expected --multi-latent-attention, got 64.",
        ),
    ],
)
def test_options_without_effect_are_rejected_by_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TransformerConfig(**{**LATENT, **changes})
    assert str(error.value).startswith(message)
