"""Floating-point formats of 8 and 4 bits, and the scales that fit values into them.

    format  largest  exponent, mantissa   infinity  NaN    dtype of codes
    e4m3    448      4, 3                 no        yes    torch.float8_e4m3fn
    e5m2    57344    5, 2                 yes       yes    torch.float8_e5m2
    e2m1    6        2, 1                 no        no     torch.uint8, two codes a byte
    e8m0    2^127    8, 0: a scale        no        yes    torch.float8_e8m0fnu

Casts round to nearest, ties to even, and saturate at the largest value, as the conversions of
NVIDIA GPUs with `satfinite` do. PyTorch's own cast to e5m2 makes infinities of values from 61440
on, and its cast to e8m0 rounds to nearest, where a scale is rounded up here.

Scales follow TransformerEngine: `compute_scale_from_amax` of common/recipe/recipe_common.cuh for
fp32, `float_to_e8m0` of common/util/ptx.cuh for e8m0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A format of codes.

    Attributes:
        largest: largest finite value.
        per_byte: codes in an element of `dtype`.
    """

    dtype: torch.dtype
    largest: float
    per_byte: int = 1


E4M3 = Format(torch.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, 57344.0)
E2M1 = Format(torch.uint8, 6.0, per_byte=2)

_LARGEST_FP32 = torch.finfo(torch.float32).max


def scale_of(maxima: Tensor, largest: float, *, power_of_two: bool = False) -> Tensor:
    """What values are multiplied by before they are cast: largest / maximum, fp32.

    A maximum of 0, infinity or NaN gives 1, and a quotient beyond fp32 the largest fp32 value.

    Args:
        maxima: largest absolute values, fp32 of any shape.
        power_of_two: clears the mantissa, which rounds down.
    """
    # A number divided by a tensor is a reciprocal to PyTorch, and rounded twice.
    scales = (torch.full_like(maxima, largest) / maxima).clamp(max=_LARGEST_FP32)
    scales = scales.where(maxima.isfinite() & (maxima > 0), 1.0)
    if power_of_two:
        scales = (scales.view(torch.int32) & -0x800000).view(torch.float32)
    return scales


def e8m0_of(values: Tensor) -> Tensor:
    """Positive fp32 values as powers of two, rounded up: float8_e8m0fnu of the same shape.

    0 becomes 2^-127, the least power; infinity the largest one, 2^127; NaN stays NaN.
    """
    bits = values.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # Of subnormals those up to 2^-127 have the exponent 0 as it is.
    is_above = (mantissa > 0) & (exponent < 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + is_above).clamp(max=0xFE)
    exponent = exponent.where(~values.isnan(), 0xFF)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def encode(values: Tensor, target: Format, noise: Tensor | None = None) -> Tensor:
    """The codes of fp32 values [..., columns], saturated. NaN stays NaN, except in e2m1, which has
    none: there it becomes 6.

    Args:
        noise: in [0, 1), of the values' shape: rounds up where the fraction of a step and the noise
            add up to 1 or more, instead of to nearest. For e2m1 only.

    Returns:
        [..., columns] of the format's dtype; for e2m1 [..., ceil(columns / 2)], the first of two
        codes in the low four bits.
    """
    if target.per_byte == 1:
        return values.clamp(-target.largest, target.largest).to(target.dtype)

    sizes = values.abs().nan_to_num(nan=target.largest).clamp(max=target.largest)
    steps = 0.5 * (1 + (sizes >= 2) + 2 * (sizes >= 4))  # between the two neighbours
    counts = sizes / steps
    sizes = (counts.round() if noise is None else (counts + noise).floor()) * steps
    numbers = (2 * sizes).where(sizes <= 2, (sizes + 2).where(sizes <= 4, sizes / 2 + 4))
    numbers = numbers.to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    if numbers.shape[-1] % 2:
        numbers = F.pad(numbers, (0, 1))
    return numbers[..., ::2] | (numbers[..., 1::2] << 4)


def decode(codes: Tensor, source: Format, columns: int) -> Tensor:
    """The values of codes: fp32 [..., columns]."""
    if source.per_byte == 1:
        return codes.float()
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return _e2m1_values(codes.device)[pairs[..., :columns].int()]


@cache
def _e2m1_values(device: torch.device) -> Tensor:
    """The value of each code, fp32: [16]. Kept, because a copy to a GPU waits for it."""
    sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return torch.tensor([*sizes, *(-size for size in sizes)], device=device)
