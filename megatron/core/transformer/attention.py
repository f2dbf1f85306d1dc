"""Causal self-attention with grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary
from megatron.core.transformer.spec import AttentionSpec


class SelfAttention(nn.Module):
    """Multi-head attention of every position to itself and those before it.

    Query heads are consecutive within a group: head h reads key and value head h // (heads /
    groups) (Ainslie et al. 2023, arXiv:2305.13245).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        init_std: float,
        output_init_std: float,
        recomputes_core: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.recomputes_core = recomputes_core
        sections = FusedWeight(
            (
                ("query", spec.query_size),
                ("key", spec.key_value_size),
                ("value", spec.key_value_size),
            )
        )

        self.linear_qkv = FusedLinear(
            hidden_size,
            sections,
            bias=spec.has_qkv_bias,
            init_std=init_std,
        )

        self.q_layernorm = None if spec.qk_norm is None else build_norm(spec.qk_norm, spec.head_dim)
        self.k_layernorm = None if spec.qk_norm is None else build_norm(spec.qk_norm, spec.head_dim)
        self.linear_proj = Linear(
            spec.query_size,
            hidden_size,
            bias=spec.has_output_bias,
            init_std=output_init_std,
        )

    def forward(self, hidden: Tensor, rotary: RotaryAngles | None = None) -> Tensor:
        """Attends within each sequence.

        Args:
            hidden: [batch, seq, hidden].
            rotary: the angles of the seq positions; None leaves queries and keys unrotated.

        Returns:
            [batch, seq, hidden], same dtype.
        """
        query, key, value = self._heads(hidden, rotary)
        if self.recomputes_core and self.training and torch.is_grad_enabled():
            context = checkpoint(self._core_attention, query, key, value, use_reentrant=False)
        else:
            context = self._core_attention(query, key, value)

        output: Tensor = self.linear_proj(
            rearrange(context, "batch head seq dim -> batch seq (head dim)")
        )
        return output

    def _heads(self, hidden: Tensor, rotary: RotaryAngles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, heads, seq, head_dim]; keys and values [batch, groups, seq, head_dim]."""
        query, key, value = (
            rearrange(section, "batch seq (head dim) -> batch seq head dim", dim=self.spec.head_dim)
            for section in self.linear_qkv.split(self.linear_qkv(hidden))
        )
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query = apply_rotary(query, rotary.cos, rotary.sin)
            key = apply_rotary(key, rotary.cos, rotary.sin)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _core_attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(query key^T / sqrt(head_dim)) value, causal: [batch, heads, seq, head_dim]."""
        is_grouped = self.spec.num_key_value_heads != self.spec.num_heads
        if is_grouped and not _has_grouped_kernel(query):
            num_repeats = self.spec.num_heads // self.spec.num_key_value_heads
            key = key.repeat_interleave(num_repeats, dim=1)
            value = value.repeat_interleave(num_repeats, dim=1)
            is_grouped = False

        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.spec.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.spec.scale,
            enable_gqa=is_grouped,
        )


def _has_grouped_kernel(query: Tensor) -> bool:
    """Whether one of PyTorch's fused kernels takes grouped queries, of this dtype and on this
    device, as they are.

    On a GPU those are FlashAttention's and cuDNN's, which know 16-bit dtypes only. The
    memory-efficient kernel, the one for fp32, takes as many key heads as query heads. With
    `enable_gqa` PyTorch would fall back to the plain formula, which holds the scores of all pairs
    of positions; repeated keys and values are far smaller than that. The kernel for the CPU takes
    grouped queries in any dtype.
    """
    return query.device.type == "cpu" or query.dtype.itemsize == 2
