"""Optimizer states in formats of 8 and 16 bits, with a scale per tensor: their range is short.

    value = stored * scale

[Note: scales] There are two rules, since moments and main weights are used differently.

- A moment's scale maps its largest magnitude to the format's largest number, as TransformerEngine's
  does. The largest value is then exact but for fp32's own rounding, and values near it have the
  format's full precision.
- A main weight's scale is a power of two. 16-bit weights are exact in it, and a step that changes
  the largest weight does not round the others anew.

Loading must give back the very values that were saved, or a resumed run would be another run.
Dividing the values by the scale that they were stored with gives the stored numbers again; so both
rules find, from the largest stored value, the scale under which it was stored. For moments this
takes a second rounding: several scales may have the same fp32 product with the largest number, and
`(ratio * largest) / largest` always chooses the same one.

A part of a tensor, such as the rows that a rank holds after resharding, need not contain the
largest value. `restore` then looks for the scale that the values were stored with, so parts keep
their bits too. Only where parts with different scales come together are values rounded once more,
as every step rounds them.

Values far smaller than the largest become zero: below 2**-18 of it in e4m3, below 2**-40
in fp16. An exp_avg_sq that has become zero leaves eps alone in Adam's denominator: e4m3 serves
exp_avg, and exp_avg_sq only with a large eps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

_FP32_FRACTION_BITS = 23
_FP32_NORMAL = torch.finfo(torch.float32).tiny  # the least such number
_FP32_LAST_BUT_ONE = torch.finfo(torch.float32).max - 2.0**104
_FP32_SUBNORMAL = _FP32_NORMAL * torch.finfo(torch.float32).eps
_PIECE_NUMEL = 1 << 18
_SAMPLE_NUMEL = 64  # values that are checked before all others
_MAX_CANDIDATES = 8  # scales that are tried with all values


class _Format(NamedTuple):
    """A floating-point format of at most 16 bits."""

    bits: int  # significant ones
    largest: float
    overflow: float  # from here on, numbers do not round to a finite one
    least: float  # the least positive number

    @property
    def least_normal_scale(self) -> float:
        """From here on, all products are normal numbers of fp32, with all of its bits."""
        return _FP32_NORMAL / self.least

    @property
    def least_scale(self) -> float:
        """From here on, products with a power of two are exact in fp32."""
        return max(_FP32_NORMAL, _FP32_SUBNORMAL / self.least)


# bf16 has the range of fp32 and needs no scale.
_FORMATS = {
    torch.float16: _Format(bits=11, largest=65504.0, overflow=65520.0, least=2.0**-24),
    torch.float8_e4m3fn: _Format(bits=4, largest=448.0, overflow=464.0, least=2.0**-9),
}


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether a state of this dtype is stored with a scale."""
    return dtype in _FORMATS


def new_scale(device: torch.device) -> torch.Tensor:
    """The scale of a tensor of zeros. Scalar, fp32."""
    return torch.ones((), dtype=torch.float32, device=device)


def read(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the values of a local tensor as a new fp32 tensor."""
    return stored.float().mul_(scale)


def write(
    stored: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    *,
    is_weight: bool = False,
) -> None:
    """Stores fp32 values in place, rounded to nearest even, and sets the scale; see [Note: scales].

    Values that are not finite stay so (infinities become NaN in e4m3, which has none).

    Args:
        is_weight: whether they are main weights, and not moments.
    """
    if values.numel() == 0:
        return

    number_format = _FORMATS[stored.dtype]
    smallest, greatest = values.aminmax()  # of the magnitudes there would have to be a tensor
    magnitude = torch.maximum(-smallest, greatest)
    rule = _weight_scale if is_weight else _moment_scale
    found = rule(magnitude, number_format).clamp_min(number_format.least_scale)
    scale.copy_(torch.where(magnitude.isfinite() & (magnitude > 0), found, 1.0))

    _store(stored, scale, values)


def restore(
    stored: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    *,
    is_weight: bool = False,
) -> None:
    """As `write`, but values that were read from a tensor of this format, or a part of it, stay."""
    write(stored, scale, values, is_weight=is_weight)
    if values.numel() == 0 or _holds(stored, scale, values):
        return

    candidates = _likely_scales(values, stored.dtype)
    for candidate in candidates:
        scale.copy_(candidate)
        _store(stored, scale, values)
        if _holds(stored, scale, values):
            return
    if candidates:
        write(stored, scale, values, is_weight=is_weight)


def _moment_scale(magnitude: torch.Tensor, number_format: _Format) -> torch.Tensor:
    """The scale that maps a magnitude to the largest number."""
    # By a tensor: GPUs divide by a number by multiplying with its inverse, which rounds twice.
    largest = torch.full_like(magnitude, number_format.largest)
    # With the last fp32 number as the magnitude, the product would round to infinity.
    ratio = magnitude.clamp_max(_FP32_LAST_BUT_ONE) / largest
    scale = ratio * largest / largest

    # Subnormal products have fewer bits, but are exact with a power of two.
    is_normal = ratio >= number_format.least_normal_scale
    return torch.where(is_normal, scale, _weight_scale(magnitude, number_format))


def _weight_scale(magnitude: torch.Tensor, number_format: _Format) -> torch.Tensor:
    """The least power of two under which a magnitude rounds to a finite number."""
    ratio = magnitude / torch.full_like(magnitude, number_format.overflow)
    exponent = ratio.view(torch.int32) >> _FP32_FRACTION_BITS
    return (exponent + 1 << _FP32_FRACTION_BITS).view(torch.float32)


def _store(stored: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> None:
    for own, part in _pieces(stored, values):
        scaled = part / scale
        if stored.dtype == torch.float8_e4m3fn:
            # Otherwise conversion makes the largest finite number of infinities.
            scaled.masked_fill_(part.isinf(), torch.nan)
        own.copy_(scaled)


def _holds(stored: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the values are stored as they are."""
    return all(torch.equal(read(own, scale), part) for own, part in _pieces(stored, values))


def _pieces(
    stored: torch.Tensor,
    values: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of both: a temporary as large as the values may not fit into memory."""
    if not stored.is_contiguous():
        return iter([(stored, values)])
    parts = (stored.view(-1).split(_PIECE_NUMEL), values.reshape(-1).split(_PIECE_NUMEL))
    return zip(*parts, strict=True)


def _likely_scales(values: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Scales under which a sample of values is stored exactly; their own, if any, is among them.

    The largest value is the product of that scale and one of the format's numbers. These are few,
    but for powers of two.
    """
    parts = values.reshape(-1).split(_PIECE_NUMEL)
    extremes = torch.stack([torch.stack(part.aminmax()) for part in parts])
    magnitude = extremes.abs().max()
    if not (magnitude.isfinite() and magnitude > 0):
        return []

    numbers = _largest_numbers(dtype).to(values.device)
    # A scale below the normal numbers of fp32 has fewer bits than the one that is looked for, which
    # came with a smaller number of the format.
    least_scale = float(magnitude) / _FORMATS[dtype].largest
    num_octaves = max(0, math.ceil(math.log2(_FP32_NORMAL / least_scale)))
    scales = magnitude / (numbers * 2.0**-num_octaves)
    # A product is rounded, so its quotient may be off by one.
    nearby = [torch.nextafter(scales, scales * factor) for factor in (1.0, 0.5, 2.0)]
    candidates = torch.cat(nearby).unsqueeze(1)

    sample = next(found for part in parts if (found := part[part != 0][:_SAMPLE_NUMEL]).numel())
    is_exact = ((sample / candidates).to(dtype).float() * candidates == sample).all(dim=1)
    return list(candidates[is_exact].flatten()[:_MAX_CANDIDATES])


def _largest_numbers(dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a format in its last octave, fp32: one for every mantissa."""
    number_format = _FORMATS[dtype]
    integer = torch.int16 if dtype.itemsize == 2 else torch.int8
    top = int(torch.tensor(number_format.largest).to(dtype).view(integer))
    patterns = torch.arange(top + 1 - 2 ** (number_format.bits - 1), top + 1, dtype=integer)
    return patterns.view(dtype).float()
