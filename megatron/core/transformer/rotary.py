"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotate-half convention.

Channel i of the first half of the rotated channels and channel i of the second half form a plane,
which position p turns by p * base^(-2i / rotary_dim).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.spec import RotarySpec


@dataclass(frozen=True, eq=False)
class RotaryAngles:
    """The cosines and sines of every position's angles.

    Not a tuple: a wrapper that casts the floating point tensors it finds among a module's inputs to
    the compute dtype (mixed precision of FSDP) looks into tuples, and angles in bf16 cannot tell
    neighbouring positions apart.
    """

    cos: Tensor  # [seq, rotary_dim / 2] fp32
    sin: Tensor  # [seq, rotary_dim / 2] fp32


def rotary_angles(spec: RotarySpec, seq_length: int, device: torch.device) -> RotaryAngles:
    """The angles of positions 0 .. seq_length - 1. Computed on each call, so there is no buffer to
    initialize or move.
    """
    # fp64 up to the cosine: an fp32 angle of 100000 radians is off by some thousandths.
    exponents = torch.arange(0, spec.dim, 2, device=device, dtype=torch.float64) / spec.dim
    positions = torch.arange(seq_length, device=device, dtype=torch.float64)
    angles = torch.outer(positions, spec.base**-exponents)  # [seq, rotary_dim / 2]
    return RotaryAngles(angles.cos().float(), angles.sin().float())


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the first channels of each head by its position's angles; channels beyond them pass
    unchanged.

    Args:
        x: [batch, seq, heads, head_dim], any floating dtype.
        cos, sin: [seq, rotary_dim / 2] fp32, rotary_dim <= head_dim.

    Returns:
        [batch, seq, heads, head_dim] in the dtype of x; the arithmetic is fp32.

    Raises:
        ValueError: the angles are not fp32, or are those of another number of positions or of too
            many channels.
    """
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(
            f"Expected cosines and sines in torch.float32, got {cos.dtype} and {sin.dtype}."
        )

    seq_length, head_dim = x.shape[1], x.shape[3]
    half = cos.shape[1]
    if cos.shape != sin.shape or cos.shape[0] != seq_length or 2 * half > head_dim:
        raise ValueError(
            f"Expected angles of {seq_length} positions and at most {head_dim} channels, "
            f"got cos {tuple(cos.shape)} and sin {tuple(sin.shape)}."
        )

    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [seq, 1, rotary_dim / 2], for all heads
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rotated = turned.to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1) if 2 * half < head_dim else rotated
