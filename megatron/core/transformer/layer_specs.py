"""From a model's options to its spec: which parts each layer is built of."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.latent_config import yarn_mscale
from megatron.core.transformer.spec import (
    AttentionSpec,
    Balancing,
    DenseSpec,
    DropPolicy,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    MoeSpec,
    NormKind,
    NormSpec,
    RotaryScaling,
    RotarySpec,
    RouterSpec,
    Scores,
    Sinks,
    YarnScaling,
)


def model_spec(config: TransformerConfig) -> ModelSpec:
    """The spec of a model of these options."""
    norm = NormSpec(
        NormKind(config.normalization), config.norm_epsilon, config.layernorm_zero_centered_gamma
    )
    dense = DenseSpec(
        size=config.ffn_size,
        activation=config.activation,
        is_gated=config.is_gated,
        has_bias=config.add_bias_linear,
        clamp=config.activation_func_clamp_value,
        up_offset=config.glu_linear_offset,
    )
    mixture = None if config.num_experts is None else _mixture(config, dense, config.num_experts)

    kinds = zip(
        config.linear_layers(),
        config.windowed_layers(),
        config.unrotated_layers(),
        config.expert_layers(),
        strict=True,
    )
    layers = tuple(
        LayerSpec(
            mixer=_delta_net(config)
            if is_linear
            else _softmax_attention(config, norm, has_window, is_unrotated),
            feed_forward=mixture if has_experts and mixture is not None else dense,
            norm=norm,
            post_norm=norm if config.post_norm else None,
            dropout=config.hidden_dropout,
        )
        for is_linear, has_window, is_unrotated, has_experts in kinds
    )

    return ModelSpec(
        layers=layers,
        hidden_size=config.hidden_size,
        final_norm=norm,
        is_tied=not config.untie_embeddings_and_output_weights,
        max_length=config.max_position_embeddings,
        embedding_scale=config.embedding_multiplier,
        logit_softcap=config.final_logit_softcapping,
        dropout=config.hidden_dropout,
        init_std=config.init_method_std,
        # Two projections of each layer write into the residual stream; the variance of their sum
        # over the depth is that of one (GPT-2, Radford et al. 2019).
        output_init_std=config.init_method_std / math.sqrt(2 * config.num_layers),
        z_loss_coeff=config.z_loss_coeff or 0.0,
    )


def _mixture(config: TransformerConfig, dense: DenseSpec, num_experts: int) -> MoeSpec:
    router = RouterSpec(
        num_experts=num_experts,
        top_k=config.moe_router_topk,
        scores=Scores(config.moe_router_score_function),
        is_scored_first=config.is_router_scored_first,
        is_normalized=config.is_router_normalized,
        scale=config.moe_router_topk_scaling_factor or 1.0,
        num_groups=config.moe_router_num_groups or 1,
        top_groups=config.moe_router_group_topk or 1,
        has_bias=config.add_bias_linear,
        has_expert_bias=config.moe_router_enable_expert_bias,
        bias_update_rate=config.moe_router_bias_update_rate,
        dtype=config.moe_router_dtype,
        balancing=Balancing(config.moe_router_load_balancing_type),
        balance_coeff=config.moe_aux_loss_coeff,
        z_coeff=config.moe_z_loss_coeff or 0.0,
    )
    shared_size = config.moe_shared_expert_intermediate_size
    return MoeSpec(
        router=router,
        expert=replace(dense, size=config.moe_ffn_hidden_size or dense.size),
        shared=None if shared_size is None else replace(dense, size=shared_size),
        has_shared_gate=config.moe_shared_expert_gate,
        capacity_factor=config.moe_expert_capacity_factor,
        drop_policy=DropPolicy(config.moe_token_drop_policy),
        rows_are_inputs=config.moe_expert_rows == "inputs",
    )


def _delta_net(config: TransformerConfig) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
        norm_eps=config.norm_epsilon,
    )


def _softmax_attention(
    config: TransformerConfig, norm: NormSpec, has_window: bool, is_unrotated: bool
) -> AttentionSpec | LatentAttentionSpec:
    if config.multi_latent_attention:
        return _latent_attention(config, norm, is_unrotated)
    return _attention(config, norm, has_window, is_unrotated)


def _latent_attention(
    config: TransformerConfig, norm: NormSpec, is_unrotated: bool
) -> LatentAttentionSpec:
    scale = 1 / math.sqrt(config.head_dim)
    if config.position_embedding_type == "yarn":
        # Queries and keys, unrotated channels too, as DeepSeek-V2 and V3 are trained.
        scale *= yarn_mscale(_yarn_factor(config), config.mscale_all_dim) ** 2

    latent_norm = None
    if config.qk_layernorm:
        latent_norm = replace(norm, eps=config.latent_norm_epsilon or norm.eps)
    return LatentAttentionSpec(
        num_heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        key_value_rank=config.kv_lora_rank,
        content_dim=config.qk_head_dim,
        rotary_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
        scale=config.softmax_scale or scale,
        rotary=None if is_unrotated else _rotary(config, has_window=False),
        latent_norm=latent_norm,
        has_output_bias=config.add_bias_linear,
        dropout=config.attention_dropout,
    )


def _attention(
    config: TransformerConfig, norm: NormSpec, has_window: bool, is_unrotated: bool
) -> AttentionSpec:
    window = None
    if has_window and config.window_size is not None:
        window = config.window_size[0] + 1  # with the position itself

    return AttentionSpec(
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.softmax_scale or 1 / math.sqrt(config.head_dim),
        rotary=None if is_unrotated else _rotary(config, has_window),
        window=window,
        sinks=Sinks(config.softmax_type),
        qk_norm=norm if config.qk_layernorm else None,
        qk_norm_is_per_head=not config.qk_layernorm_across_heads,
        has_output_gate=config.attention_output_gate,
        softcap=config.attn_logit_softcapping,
        has_qkv_bias=config.add_bias_linear or config.add_qkv_bias,
        has_output_bias=config.add_bias_linear,
        dropout=config.attention_dropout,
    )


def _rotary(config: TransformerConfig, has_window: bool) -> RotarySpec:
    interleaved = config.is_rotary_interleaved
    if has_window and config.window_rotary_base is not None:
        return RotarySpec(config.rotary_dim, config.window_rotary_base, None, interleaved)
    return RotarySpec(config.rotary_dim, config.rotary_base, _scaling(config), interleaved)


def _scaling(config: TransformerConfig) -> RotaryScaling | None:
    if config.position_embedding_type == "yarn":
        length = config.yarn_original_max_position_embeddings
        assert length is not None, "TransformerConfig has checked that it is given"
        return YarnScaling(
            factor=_yarn_factor(config),
            original_length=length,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
            attention_factor=config.yarn_attention_factor or _yarn_attention_factor(config),
            rounds_range=config.yarn_correction_range_round_to_int,
        )
    if config.use_rope_scaling:
        return Llama3Scaling(
            factor=config.rope_scaling_factor,
            low_freq_factor=config.rope_scaling_low_freq_factor,
            high_freq_factor=config.rope_scaling_high_freq_factor,
            original_length=config.rope_scaling_original_max_position_embeddings,
        )
    if config.rotary_seq_len_interpolation_factor is not None:
        return LinearScaling(config.rotary_seq_len_interpolation_factor)
    return None


def _yarn_attention_factor(config: TransformerConfig) -> float:
    """The factor of cosines and sines where no option sets it."""
    factor = _yarn_factor(config)
    # The defaults of --mscale and --mscale-all-dim, which are for latent attention, give the factor
    # of other attention.
    return yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)


def _yarn_factor(config: TransformerConfig) -> float:
    factor = config.yarn_rotary_scaling_factor
    assert factor is not None, "TransformerConfig has checked that it is given"
    return factor
