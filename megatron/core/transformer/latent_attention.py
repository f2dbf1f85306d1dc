"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434), as it is trained.

Keys and values of all heads are computed from one small latent for each position, queries from
another one or from the layer's input. The latent of keys and values is the part that a cache would
hold; a forward that has all positions computes the heads' keys and values themselves.

    input -- linear_q_down_proj -- q_layernorm -- linear_q_up_proj ---- query: content, rotary
    input -- linear_kv_down_proj +- latent - kv_layernorm - linear_kv_up_proj - key: content; value
                                 +- key: rotary, the same for all heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.attention_core import Attention
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary
from megatron.core.transformer.spec import AttentionSpec, LatentAttentionSpec
from megatron.core.transformer.tensor_exchange import gathered_linear


class LatentAttention(Attention):
    """Multi-head latent attention.

    The rows of `linear_q_up_proj`, or of `linear_q_proj` where queries have no latent, are each
    head's in turn, content before rotary. `linear_kv_down_proj` has the latent's rows, then the
    rows of the rotary part of the key; `linear_kv_up_proj` the keys' of all heads, then the
    values'.

    Args:
        spec: heads and arithmetic.
        hidden_size: width of the residual stream.
        init_std: standard deviation of the initial weights.
        output_init_std: that of the output projection.
        recompute_granularity: see `Attention`.
    """

    def __init__(
        self,
        spec: LatentAttentionSpec,
        hidden_size: int,
        *,
        init_std: float,
        output_init_std: float,
        recompute_granularity: str | None = None,
    ) -> None:
        core_spec = AttentionSpec(
            num_heads=spec.num_heads,
            num_key_value_heads=spec.num_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
        )
        super().__init__(core_spec, spec.dropout, recompute_granularity)
        self.spec = spec

        def fused(in_features: int, *sections: tuple[str, int], num_heads: int = 1) -> FusedLinear:
            weight = FusedWeight(sections, [num_heads] * len(sections))
            # Tensor parallelism divides heads; a projection without heads stays whole.
            dim = None if num_heads == 1 else 0
            return FusedLinear(in_features, weight, bias=False, init_std=init_std, tensor_dim=dim)

        def queries(name: str, in_features: int) -> FusedLinear:
            # One section with the layer's name, so that checkpoints have that name.
            return fused(in_features, (name, spec.query_size), num_heads=spec.num_heads)

        norm, rank, latent = spec.latent_norm, spec.query_rank, spec.key_value_rank
        self.linear_q_proj = queries("linear_q_proj", hidden_size) if rank is None else None
        self.linear_q_down_proj = (
            None if rank is None else Linear(hidden_size, rank, bias=False, init_std=init_std)
        )
        self.q_layernorm = None if rank is None or norm is None else build_norm(norm, rank)
        self.linear_q_up_proj = None if rank is None else queries("linear_q_up_proj", rank)

        self.linear_kv_down_proj = fused(
            hidden_size, ("kv_latent", latent), ("key_rotary", spec.rotary_dim)
        )
        self.kv_layernorm = None if norm is None else build_norm(norm, latent)
        self.linear_kv_up_proj = fused(
            latent,
            ("key", spec.num_heads * spec.content_dim),
            ("value", spec.value_size),
            num_heads=spec.num_heads,
        )
        self.linear_proj = Linear(
            spec.value_size,
            hidden_size,
            bias=spec.has_output_bias,
            init_std=output_init_std,
            tensor_dim=1,
        )

    def inputs(
        self, hidden: Tensor, rotary: RotaryAngles | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `Attention`; there is no gate."""
        query = self._query(hidden, rotary)
        key, value = self._key_and_value(hidden, rotary)
        return (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), ()

    def _query(self, hidden: Tensor, rotary: RotaryAngles | None) -> Tensor:
        """[batch, seq, heads, head_dim]."""
        if self.linear_q_proj is not None:
            query = gathered_linear(self.linear_q_proj, hidden, self.tensor)
        else:
            assert self.linear_q_down_proj is not None, "the constructor builds one of the two"
            assert self.linear_q_up_proj is not None, "with the other"
            latent = self.linear_q_down_proj(hidden)
            if self.q_layernorm is not None:
                latent = self.q_layernorm(latent)
            query = gathered_linear(self.linear_q_up_proj, latent, self.tensor)

        query = query.view(*query.shape[:-1], -1, self.spec.head_dim)
        if rotary is None:
            return query
        content, turned = query.split((self.spec.content_dim, self.spec.rotary_dim), dim=-1)
        return torch.cat((content, apply_rotary(turned, rotary)), dim=-1)

    def _key_and_value(self, hidden: Tensor, rotary: RotaryAngles | None) -> tuple[Tensor, Tensor]:
        """[batch, seq, heads, head_dim] and [batch, seq, heads, value_dim]."""
        latent, shared = self.linear_kv_down_proj.split(self.linear_kv_down_proj(hidden))
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        if self.tensor is not None:
            # Of all positions, for this rank's heads.
            latent, shared = self.linear_kv_down_proj.split(
                self.tensor.gather(torch.cat((latent, shared), dim=-1))
            )
        content, value = self.linear_kv_up_proj.split(self.linear_kv_up_proj(latent))
        content = content.unflatten(-1, (-1, self.spec.content_dim))
        value = value.unflatten(-1, (-1, self.spec.value_dim))

        shared = shared.unsqueeze(2)  # as of one head
        if rotary is not None:
            shared = apply_rotary(shared, rotary)
        return torch.cat((content, shared.expand(-1, -1, content.shape[2], -1)), dim=-1), value
