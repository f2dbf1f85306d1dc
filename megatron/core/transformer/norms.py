"""Normalization over the last dim. The arithmetic is fp32 for inputs of 16 bits, the result has the
input's dtype.

A zero-centred weight is stored as its difference from one, so that it starts at zero and, in 16
bits, changes in steps that are small relative to zero rather than to one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.spec import NormKind, NormSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019,
    arXiv:1910.07467).
    """

    def __init__(self, size: int, eps: float, is_zero_centered: bool = False) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.is_zero_centered = is_zero_centered
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        nn.init.constant_(self.weight, 0.0 if self.is_zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        if x.dtype == self.weight.dtype and not self.is_zero_centered:
            # torch computes 16-bit inputs in fp32. Its CUDA kernel keeps no fp32 copies for
            # backward; on the CPU it composes the norm of single operations, which do.
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        scale = _fp32_scale(self.weight, self.is_zero_centered)
        return F.rms_norm(x.float(), (self.size,), scale, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim (Ba et al. 2016,
    arXiv:1607.06450).
    """

    def __init__(self, size: int, eps: float, is_zero_centered: bool = False) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.is_zero_centered = is_zero_centered
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.bias = nn.Parameter(torch.empty(size))  # [size]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one and the shift to zero."""
        nn.init.constant_(self.weight, 0.0 if self.is_zero_centered else 1.0)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        if x.dtype == self.weight.dtype and not self.is_zero_centered:
            # A kernel on every device: fp32 inside, and for backward it keeps only x and the row
            # statistics.
            return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        scale = _fp32_scale(self.weight, self.is_zero_centered)
        return F.layer_norm(x.float(), (self.size,), scale, self.bias.float(), self.eps).to(x.dtype)


def _fp32_scale(weight: Tensor, is_zero_centered: bool) -> Tensor:
    """The factor of a norm, in fp32: one plus a small weight is not a number of 16 bits."""
    return weight.float() + 1.0 if is_zero_centered else weight.float()


def build_norm(spec: NormSpec, size: int) -> RMSNorm | LayerNorm:
    """The normalization that `spec` describes, over `size` channels."""
    kind = RMSNorm if spec.kind is NormKind.RMS_NORM else LayerNorm
    return kind(size, spec.eps, spec.is_zero_centered)
