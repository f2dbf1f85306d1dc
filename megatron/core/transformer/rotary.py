"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Channel i of the first half of the rotated channels and channel i of the second half form a plane,
or channels 2i and 2i + 1 where they are interleaved. Position p turns it by p * frequency_i, where
frequency_i = base^(-2i / rotary_dim). A scaling lowers some or all of the frequencies, to reach
positions beyond the ones of the first training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.spec import (
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    YarnScaling,
)


@dataclass(frozen=True, eq=False)
class RotaryAngles:
    """The cosines and sines of every position's angles, times YaRN's attention factor.

    Not a tuple: mixed precision of FSDP casts the floating-point inputs of a module to the compute
    dtype, also within tuples, and in bf16 neighbouring positions would have equal angles.
    """

    cos: Tensor  # [seq, rotary_dim / 2] fp32, or [batch, seq, rotary_dim / 2]
    sin: Tensor  # the same
    is_interleaved: bool = False  # see `RotarySpec`


def rotary_angles(
    spec: RotarySpec, positions: Tensor, sections: tuple[int, ...] | None = None
) -> RotaryAngles:
    """The angles of positions. Computed on each call, so there is no buffer to initialize or move.

    Args:
        positions: [seq] or [batch, seq], of any integer dtype; with `sections` [axes, batch, seq].
        sections: how many planes turn by each of the axes. Planes take the axes in turn, 0 1 2 0 1
            2 ..., as long as an axis has any left, except the first axis, which has all others:
            Qwen3-VL's interleaved multimodal positions.
    """
    # fp64 up to the cosine: an fp32 angle of 100000 radians is off by some thousandths.
    frequencies = _frequencies(spec, positions.device)
    if sections is None:
        angles = positions.double().unsqueeze(-1) * frequencies  # [..., seq, rotary_dim / 2]
    else:
        axes = _axes_of_planes(sections, len(frequencies), positions.device)
        # [axes, batch, seq] -> [batch, seq, planes]
        angles = positions.double()[axes].movedim(0, -1) * frequencies

    cos, sin = angles.cos(), angles.sin()
    if isinstance(spec.scaling, YarnScaling):
        cos, sin = cos * spec.scaling.attention_factor, sin * spec.scaling.attention_factor
    return RotaryAngles(cos.float(), sin.float(), spec.is_interleaved)


def _axes_of_planes(sections: tuple[int, ...], num_planes: int, device: torch.device) -> Tensor:
    """By which axis of a position each plane turns: [planes] int64."""
    # Made where it is used: a device would wait for a copy.
    planes = torch.arange(num_planes, device=device)
    axes = torch.zeros_like(planes)
    for axis, count in enumerate(sections[1:], start=1):
        is_axis = (planes % len(sections) == axis) & (planes < count * len(sections))
        axes = axes.masked_fill(is_axis, axis)
    return axes


def _frequencies(spec: RotarySpec, device: torch.device) -> Tensor:
    """By how many radians each plane turns from one position to the next: [rotary_dim / 2] fp64."""
    exponents = torch.arange(0, spec.dim, 2, device=device, dtype=torch.float64) / spec.dim
    frequencies = spec.base**-exponents
    if spec.scaling is None:
        return frequencies

    if isinstance(spec.scaling, LinearScaling):
        return frequencies / spec.scaling.factor
    if isinstance(spec.scaling, Llama3Scaling):
        kept = _kept_by_llama3(frequencies, spec.scaling)
    else:
        kept = _kept_by_yarn(frequencies, spec, spec.scaling)
    return kept * frequencies + (1 - kept) * frequencies / spec.scaling.factor


def _kept_by_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """The share of each frequency that is not divided by the factor. It rises linearly from zero,
    for planes that turn `low_freq_factor` times within the original length, to one, for frequencies
    that turn `high_freq_factor` times (the code published with Llama 3.1).
    """
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(frequencies: Tensor, spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    """The share of each frequency that is not divided by the factor. It falls linearly from one, at
    the plane that turns `beta_fast` times within the original length, to zero, at the plane that
    turns `beta_slow` times (Peng et al. 2023, arXiv:2309.00071, section 3.2).
    """

    def plane(turns: float) -> float:
        # frequency_i * original_length = 2 pi turns, solved for i.
        wavelength = scaling.original_length / turns
        return spec.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(spec.base))

    first, last = plane(scaling.beta_fast), plane(scaling.beta_slow)
    if scaling.rounds_range:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)

    # Equal bounds would divide by zero. The transformers library blends over 0.001 planes then.
    width = last - first or 1e-3
    numbers = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float64)
    return 1.0 - ((numbers - first) / width).clamp(0.0, 1.0)


def apply_rotary(x: Tensor, angles: RotaryAngles) -> Tensor:
    """Turns the first channels of each head by its position's angles; channels beyond them pass
    unchanged.

    Args:
        x: [batch, seq, heads, head_dim], any floating dtype.
        angles: angles of the positions of x, rotary_dim <= head_dim.

    Returns:
        [batch, seq, heads, head_dim] in the dtype of x; the arithmetic is fp32.

    Raises:
        ValueError: the angles are not fp32, or of another number of positions or of too
            many channels.
    """
    cos, sin = angles.cos, angles.sin
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(
            f"Expected cosines and sines in torch.float32, got {cos.dtype} and {sin.dtype}."
        )

    seq_length, head_dim = x.shape[1], x.shape[3]
    half = cos.shape[-1]
    rows = (seq_length, half) if cos.dim() == 2 else (len(x), seq_length, half)
    if not cos.shape == sin.shape == rows or 2 * half > head_dim:
        raise ValueError(
            f"Expected angles of {seq_length} positions and at most {head_dim} channels, "
            f"got cos {tuple(cos.shape)} and sin {tuple(sin.shape)}."
        )

    if angles.is_interleaved:
        first, second = x[..., 0 : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
    else:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [..., seq, 1, rotary_dim / 2]: all heads
    turned = (first * cos - second * sin, second * cos + first * sin)
    if angles.is_interleaved:
        rotated = torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
    else:
        rotated = torch.cat(turned, dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1) if 2 * half < head_dim else rotated
