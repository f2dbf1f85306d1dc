"""Causal self-attention with grouped queries."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from megatron.core.transformer.attention_core import Attention
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary
from megatron.core.transformer.spec import AttentionSpec, Sinks
from megatron.core.transformer.tensor_exchange import TensorExchange, gathered_linear


class SelfAttention(Attention):
    """Multi-head attention.

    Query heads are consecutive within a group: head h reads key and value head h // (heads /
    groups) (Ainslie et al. 2023, arXiv:2305.13245). The rows of `linear_qkv` are the rows of all
    queries, then of the output gate where there is one, of all keys, and of all values; each
    section head by head.

    Args:
        spec: heads and arithmetic.
        hidden_size: width of the residual stream.
        init_std: standard deviation of the initial weights and of learned sinks.
        output_init_std: that of the output projection.
        recompute_granularity: see `Attention`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        init_std: float,
        output_init_std: float,
        recompute_granularity: str | None = None,
    ) -> None:
        super().__init__(spec, spec.dropout, recompute_granularity)
        self.spec = spec
        self.init_std = init_std

        self.linear_qkv = FusedLinear(
            hidden_size,
            _sections(spec),
            bias=spec.has_qkv_bias,
            init_std=init_std,
            tensor_dim=0,
        )
        widths = (spec.head_dim, spec.head_dim)
        if not spec.qk_norm_is_per_head:
            widths = (spec.query_size, spec.key_value_size)
        norms = [None if spec.qk_norm is None else build_norm(spec.qk_norm, one) for one in widths]
        self.q_layernorm, self.k_layernorm = norms
        self.linear_proj = Linear(
            spec.query_size,
            hidden_size,
            bias=spec.has_output_bias,
            init_std=output_init_std,
            tensor_dim=1,
        )

        if spec.sinks is Sinks.LEARNED:
            self.sinks = nn.Parameter(torch.empty(spec.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial sinks as weights are drawn, as gpt-oss and Megatron do.
        Near zero each counts as one key of average score.
        """
        if self.sinks is not None:
            nn.init.normal_(self.sinks, mean=0.0, std=self.init_std)

    def inputs(
        self, hidden: Tensor, rotary: RotaryAngles | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `Attention`."""
        projected = gathered_linear(self.linear_qkv, hidden, self.tensor)
        query, *gate, key, value = self.linear_qkv.split(projected)
        if self.tensor is not None and key.shape[-1] % self.spec.head_dim:
            key, value = self._whole_head(key, value, self.tensor)
        return self._heads(query, key, value, rotary), tuple(gate)

    def _whole_head(
        self, key: Tensor, value: Tensor, tensor: TensorExchange
    ) -> tuple[Tensor, Tensor]:
        """The key and value head of this rank's query heads, from parts of heads: [batch, seq,
        head_dim] both. Several ranks compute a head's channels, and all of them need it.
        """
        parts = tensor.gather(torch.cat((key, value), dim=-1).transpose(1, 2))
        # [batch, ranks, key and value, channels of a part, seq]
        parts = parts.unflatten(1, (tensor.num_ranks, 2, -1))
        ranks_per_head = tensor.num_ranks // self.spec.num_key_value_heads
        first = tensor.rank // ranks_per_head * ranks_per_head
        parts = parts.narrow(1, first, ranks_per_head)
        # Channels are contiguous: otherwise attention would take a kernel with all pairs.
        key, value = rearrange(parts, "batch ranks two part seq -> two batch seq (ranks part)")
        return key, value

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, heads, seq, head_dim]; keys and values [batch, groups, seq, head_dim]."""
        is_per_head = self.spec.qk_norm_is_per_head
        if not is_per_head:
            query, key = self._normalized(query, key)
        query, key, value = (
            rearrange(section, "batch seq (head dim) -> batch seq head dim", dim=self.spec.head_dim)
            for section in (query, key, value)
        )
        if is_per_head:
            query, key = self._normalized(query, key)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_layernorm is None or self.k_layernorm is None:
            return query, key
        return self.q_layernorm(query), self.k_layernorm(key)


def _sections(spec: AttentionSpec) -> FusedWeight:
    """The sections of the projection of the input, in the order of their rows."""
    heads = {"query": spec.num_heads, "gate": spec.num_heads}
    if not spec.has_output_gate:
        del heads["gate"]
    heads |= {"key": spec.num_key_value_heads, "value": spec.num_key_value_heads}
    return FusedWeight(
        [(name, num_heads * spec.head_dim) for name, num_heads in heads.items()], [*heads.values()]
    )
