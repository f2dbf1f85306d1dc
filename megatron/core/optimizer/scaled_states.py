"""Optimizer states in formats of 8 and 16 bits, with a scale per tensor where the format's range is short.

    value = stored * scale

[Note: scales] A scale is a power of two, the least for which the largest magnitude stays below the format's maximum, or
twice that. So the values of a stored tensor are exact in fp32, and storing them again, under whichever scale they then
get, loses nothing: a state that is saved in fp32 and loaded has the bits it had. What each rank of a sharded tensor
holds has a scale of its own; after resharding, a value may be rounded again beside larger ones.

What is far smaller than the largest value becomes zero: below 2**-18 of it in e4m3, below 2**-40 in fp16. An exp_avg_sq
that has become zero leaves eps alone in Adam's denominator: e4m3 serves exp_avg, and exp_avg_sq only with a large eps.
"""

from __future__ import annotations

import torch

# The largest finite value of the formats that have a scale. bf16 has the range of fp32 and needs none.
_LARGEST = {torch.float16: 65504.0, torch.float8_e4m3fn: 448.0}
_PIECE_NUMEL = 1 << 18


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether a state of this dtype is stored with a scale."""
    return dtype in _LARGEST


def new_scale(device: torch.device) -> torch.Tensor:
    """The scale of a tensor of zeros. Scalar, fp32."""
    return torch.ones((), dtype=torch.float32, device=device)


def read(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of a local tensor, in fp32, as a tensor of their own."""
    return stored.float().mul_(scale)


def write(stored: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> None:
    """Stores fp32 values, rounded to nearest even, in place, and sets the scale. See [Note: scales].

    Values that are not finite stay so (infinities become NaN in e4m3, which has none).
    """
    if values.numel() == 0:
        return
    scale.copy_(_scale_of(values, _LARGEST[stored.dtype]))
    # Piece by piece: what a state is stored from may be most of the memory that there is to spare.
    pieces = [(stored, values)]
    if stored.is_contiguous():
        pieces = list(zip(stored.view(-1).split(_PIECE_NUMEL), values.reshape(-1).split(_PIECE_NUMEL), strict=True))
    for own, part in pieces:
        scaled = part / scale
        if stored.dtype == torch.float8_e4m3fn:
            # Otherwise conversion makes the largest finite number of infinities.
            scaled.masked_fill_(part.isinf(), torch.nan)
        own.copy_(scaled)


def _scale_of(values: torch.Tensor, largest: float) -> torch.Tensor:
    smallest, greatest = values.aminmax()  # of the magnitudes there would have to be a tensor
    ratio = torch.maximum(-smallest, greatest) / largest
    exponent = torch.frexp(ratio).exponent
    return torch.where(ratio.isfinite() & (ratio > 0), torch.ldexp(torch.ones_like(ratio), exponent), 1.0)
