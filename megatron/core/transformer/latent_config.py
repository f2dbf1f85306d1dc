"""LatentAttentionOptions: what decides a model's multi-head latent attention, as a part of its
options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.options import expect, option, options_of

_MOST_CHANNELS = 2**24

# Options of attention that do not apply to this one.
_OF_OTHER_ATTENTION = (
    "kv_channels",
    "group_query_attention",
    "window_size",
    "softmax_type",
    "attn_logit_softcapping",
    "attention_output_gate",
    "add_qkv_bias",
    "rotary_percent",
    "qk_layernorm_across_heads",
)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOptions:
    """The options of multi-head latent attention, under Megatron's names and, where it has them,
    with its defaults. A base of `TransformerConfig`, which checks them.
    """

    multi_latent_attention: bool = option(
        False,
        "compute keys and values from a low-rank latent (MLA); --qk-layernorm then normalizes "
        "the latents",
    )
    q_lora_rank: int | None = option(
        None,
        "channels of the latent of queries (default: queries have no latent)",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        no_effect_unless="multi_latent_attention",
    )
    kv_lora_rank: int = option(
        32,
        "channels of the latent of keys and values",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        no_effect_unless="multi_latent_attention",
    )
    qk_head_dim: int = option(
        128,
        "channels of a query or key head that are not rotated",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        no_effect_unless="multi_latent_attention",
    )
    qk_pos_emb_head_dim: int = option(
        64,
        "rotated channels of a query head; all heads share the rotated channels of the key",
        at_least=2,
        ceiling=_MOST_CHANNELS,
        no_effect_unless="multi_latent_attention",
    )
    v_head_dim: int = option(
        128,
        "channels of a value head",
        at_least=1,
        ceiling=_MOST_CHANNELS,
        no_effect_unless="multi_latent_attention",
    )
    latent_norm_epsilon: float | None = option(
        None,
        "epsilon of the normalization of latents (default: --norm-epsilon)",
        more_than=0.0,
        no_effect_unless={"multi_latent_attention": True, "qk_layernorm": True},
    )
    mscale: float = option(
        1.0,
        "YaRN: multiply rotary cosines and sines by m(mscale) / m(mscale-all-dim), where m(x) ="
        " 1 + x log(scaling factor) / 10",
        at_least=0.0,
        no_effect_unless={"multi_latent_attention": True, "position_embedding_type": "yarn"},
    )
    mscale_all_dim: float = option(
        0.0,
        "YaRN: also multiply products of queries and keys by the square of m(mscale-all-dim)",
        at_least=0.0,
        no_effect_unless={"multi_latent_attention": True, "position_embedding_type": "yarn"},
    )

    def _check_latent_attention(self) -> None:
        """ConfigError for options that latent attention does not have."""
        if not self.multi_latent_attention:
            return

        expect(
            self.qk_pos_emb_head_dim % 2 == 0,
            "--qk-pos-emb-head-dim",
            "an even number of channels",
            self.qk_pos_emb_head_dim,
        )
        for field in options_of(type(self)):
            if field.name in _OF_OTHER_ATTENTION:
                value = getattr(self, field.name)
                expected = "its default with --multi-latent-attention"
                expect(value == field.default, field.flag, expected, value)


def yarn_mscale(factor: float, mscale: float) -> float:
    """What YaRN multiplies queries, or keys, by where positions are stretched by `factor` (Peng et
    al. 2023, arXiv:2309.00071, section 3.3, with a weight for the logarithm).
    """
    return 1.0 + 0.1 * mscale * math.log(factor)
