"""Causal self-attention with grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary


class SelfAttention(nn.Module):
    """Multi-head attention of every position to itself and those before it.

    Query heads are consecutive within a group: head h reads key and value head h // (heads /
    groups) (Ainslie et al. 2023, arXiv:2305.13245).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        sections = FusedWeight(
            (
                ("query", config.query_size),
                ("key", config.key_value_size),
                ("value", config.key_value_size),
            )
        )

        self.linear_qkv = FusedLinear(
            config.hidden_size,
            sections,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init_std=config.init_method_std,
        )

        self.q_layernorm = build_norm(config, config.head_dim) if config.qk_layernorm else None
        self.k_layernorm = build_norm(config, config.head_dim) if config.qk_layernorm else None
        self.linear_proj = Linear(
            config.query_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            init_std=config.output_init_std,
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
        if (
            self.config.recompute_granularity == "selective"
            and self.training
            and torch.is_grad_enabled()
        ):
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
            rearrange(
                section, "batch seq (head dim) -> batch seq head dim", dim=self.config.head_dim
            )
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
        is_grouped = self.config.num_key_value_heads != self.config.num_attention_heads
        if is_grouped and not _has_grouped_kernel(query):
            num_repeats = self.config.num_attention_heads // self.config.num_key_value_heads
            key = key.repeat_interleave(num_repeats, dim=1)
            value = value.repeat_interleave(num_repeats, dim=1)
            is_grouped = False

        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=True,
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
