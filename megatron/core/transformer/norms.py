"""Normalization over the last dim. The arithmetic is fp32 for inputs of 16 bits, the result has the
input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.config import TransformerConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019,
    arXiv:1910.07467).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        if x.dtype == self.weight.dtype:
            # torch computes 16-bit inputs in fp32. Its CUDA kernel keeps no fp32 copies for
            # backward; on the CPU it composes the norm of single operations, which do.
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x.float(), (self.size,), self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim (Ba et al. 2016,
    arXiv:1607.06450).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.bias = nn.Parameter(torch.empty(size))  # [size]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one and the shift to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        if x.dtype == self.weight.dtype:
            # A kernel on every device: fp32 inside, and for backward it keeps only x and the row
            # statistics.
            return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        return F.layer_norm(
            x.float(), (self.size,), self.weight.float(), self.bias.float(), self.eps
        ).to(x.dtype)


def build_norm(config: TransformerConfig, size: int) -> RMSNorm | LayerNorm:
    """The normalization that `config` asks for, over `size` channels."""
    if config.normalization == "RMSNorm":
        return RMSNorm(size, config.norm_epsilon)
    return LayerNorm(size, config.norm_epsilon)
