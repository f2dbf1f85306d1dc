"""The position-wise MLP of a transformer layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear


class MLP(nn.Module):
    """GELU (exact) between two linear layers, or SwiGLU: fc2(silu(gate) * up) (Shazeer 2020,
    arXiv:2002.05202).

    With SwiGLU, `linear_fc1` holds the gate's rows and then those of up.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        bias, std = config.add_bias_linear, config.init_method_std
        self.linear_fc1: Linear
        if config.swiglu:
            sections = FusedWeight((("gate", config.ffn_size), ("up", config.ffn_size)))
            self.linear_fc1 = FusedLinear(config.hidden_size, sections, bias, init_std=std)
        else:
            self.linear_fc1 = Linear(config.hidden_size, config.ffn_size, bias, init_std=std)
        self.linear_fc2 = Linear(
            config.ffn_size, config.hidden_size, bias, init_std=config.output_init_std
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden], same dtype."""
        inner: Tensor = self.linear_fc1(hidden)
        if isinstance(self.linear_fc1, FusedLinear):
            gate, up = self.linear_fc1.split(inner)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner)
        output: Tensor = self.linear_fc2(inner)
        return output
