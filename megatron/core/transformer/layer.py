"""One pre-norm transformer layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles


class TransformerLayer(nn.Module):
    """Attention and MLP, each normalized before and added to the residual stream after dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, rotary: RotaryAngles | None = None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden], same dtype.

        With --recompute-granularity full, a training forward keeps only `hidden` and backward runs
        the body again.
        """
        if (
            self.config.recompute_granularity == "full"
            and self.training
            and torch.is_grad_enabled()
        ):
            # Inside forward, so the hooks that gather and release this module's weights are not
            # rerun.
            recomputed: Tensor = checkpoint(self._body, hidden, rotary, use_reentrant=False)
            return recomputed

        return self._body(hidden, rotary)

    def _body(self, hidden: Tensor, rotary: RotaryAngles | None) -> Tensor:
        hidden = hidden + self._dropout(self.self_attention(self.input_layernorm(hidden), rotary))
        return hidden + self._dropout(self.mlp(self.pre_mlp_layernorm(hidden)))

    def _dropout(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.config.hidden_dropout, self.training)
